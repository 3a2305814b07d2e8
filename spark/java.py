"""Finds the Java that Spark would use, and reads its version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Spark 3.5, the newest that RayDP takes, needs it. Its Arrow breaks on 21
MAJOR = 17
_TIMEOUT_S = 60
#: here Ray's own Java unpacks its library and logs, whatever directory the Ray has. No option moves it
RAY_DIRECTORY = Path("/tmp/ray")


def find(environment: Mapping[str, str]) -> str | None:
    """The `java` that Spark on a Ray of this environment would use: PATH first (as RayDP), else JAVA_HOME's."""
    on_path = shutil.which("java", path=environment.get("PATH"))
    home = environment.get("JAVA_HOME")
    if on_path is not None or not home:
        return on_path
    return shutil.which("java", path=os.path.join(home, "bin"))


def ray_directory_fault() -> str | None:
    """Why Ray's Java, which RayDP starts, cannot start for this user, and what to do; None: it can."""
    if not RAY_DIRECTORY.exists() or os.access(RAY_DIRECTORY, os.W_OK | os.X_OK):
        return None
    return (
        f"{RAY_DIRECTORY} belongs to user {RAY_DIRECTORY.stat().st_uid}, and user {os.geteuid()} cannot write it: "
        f"Ray's Java, which RayDP starts, writes nowhere else. Let its owner remove {RAY_DIRECTORY} while no Ray uses "
        "it, or run this where /tmp is its own: in a container, or with systemd's PrivateTmp"
    )


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
