"""`python -m tests`: pytest, without the teardown of the interpreter, with the same arguments and exit code.

It writes how long each file and test took to build/durations.json. Threads of gRPC, which Arrow Flight and Ray bring
along, run until the process ends. The end of a whole run once crashed in them, after all tests had passed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import durations

TARGET = Path(__file__).resolve().parents[1] / "build" / "durations.json"

with tempfile.TemporaryDirectory() as folder:
    lines = Path(folder) / "lines"
    lines.touch()
    os.environ[durations.VARIABLE] = str(lines)
    code = pytest.main(sys.argv[1:])
    durations.write(lines, TARGET)
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
