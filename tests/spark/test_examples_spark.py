"""The Spark example runs as its first lines say, and checks its own result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "spark_ingest.py"


def test_a_frame_goes_to_a_topic_and_comes_back() -> None:
    # Not tmp_path: a data directory in /tmp would need to be declared ephemeral.
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=Path.home()))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    try:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), str(place / "data")],
            capture_output=True,
            text=True,
            check=False,
            env={
                **inherited,
                "RAYMQ_HOME": str(place / "home"),
                "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
            },
            timeout=180,
        )
    finally:
        shutil.rmtree(place)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert answer == {"rows": 50_000, "repeated": 50_000, "read": 50_000, "sum": 1_249_975_000}
