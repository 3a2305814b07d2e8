"""Finds the Java that Spark would use, and reads its version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

#: Spark 3.5, the newest that RayDP takes, needs it. Its Arrow breaks on 21
MAJOR = 17
_TIMEOUT_S = 60


def find(environment: Mapping[str, str]) -> str | None:
    """The `java` that Spark on a Ray of this environment would use: PATH first (as RayDP), else JAVA_HOME's."""
    on_path = shutil.which("java", path=environment.get("PATH"))
    home = environment.get("JAVA_HOME")
    if on_path is not None or not home:
        return on_path
    return shutil.which("java", path=os.path.join(home, "bin"))


def major_version(java: str) -> int:
    """The major version of an executable `java`, or 0 if it cannot be run or does not print its version."""
    try:
        done = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return parse_major(done.stderr + done.stdout)


def parse_major(text: str) -> int:
    """The major version in the output of `java -version`, or 0 if it is not there ("1.8.0" is 8)."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else 0
