"""`python -m tests [--thorough] [pytest's arguments]`: the whole suite as lanes, or one pytest for the tests named.

Without the names of tests, it leaves those with the mark `thorough` out; `--thorough` runs them, too. It writes how
long each file and test took to build/durations.json, and fails if a file took more than twice its budget
(tests/budgets.json). `python -m tests --write-budgets` makes budgets of the last run, which was to be a thorough one.

A pytest ends without the teardown of its interpreter. Threads of gRPC, which Arrow Flight and Ray bring along, run
until the process ends. The end of a whole run once crashed in them, after all tests had passed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests import lanes
from tests.support import durations

#: arguments with which all tests run
OF_ALL = {"-q", "--quiet", "-v", "--verbose"}


def run_one(words: list[str]) -> int:
    """Run one pytest."""
    if durations.VARIABLE in os.environ:
        return int(pytest.main(words))
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        os.environ[durations.VARIABLE] = str(lines)
        code = int(pytest.main(words))
        durations.write(lines, lanes.DURATIONS)
    return code


def end(code: int) -> None:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(words: list[str]) -> None:
    """Run what the arguments name."""
    thorough = "--thorough" in words
    words = [word for word in words if word != "--thorough"]
    if words == ["--write-budgets"]:
        durations.write_budgets(lanes.DURATIONS)
        end(0)
    if words[:1] == ["--one"]:
        end(run_one(words[1:]))
    if not OF_ALL.issuperset(words):
        end(run_one(words))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        end(
            lanes.run([word for word in words if word not in ("-q", "--quiet")], quick=not thorough)
        )
    except KeyboardInterrupt:
        end(130)


main(sys.argv[1:])
