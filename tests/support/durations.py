"""How long each test takes: `python -m tests` writes build/durations.json.

A run may have several pytests. Each adds a line for each phase of a test to the file that VARIABLE names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

#: names the file of a run's lines
VARIABLE = "RAYMQ_DURATIONS"


def note(report: pytest.TestReport) -> None:
    """Add the duration of one phase of a test, if this run notes durations."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    line = json.dumps([report.nodeid, report.duration])
    with open(place, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def by_file(lines: str) -> dict[str, dict[str, Any]]:
    """The seconds of each file and of its tests, the longest first."""
    seconds: dict[str, dict[str, float]] = {}
    for line in lines.splitlines():
        node_id, duration = json.loads(line)
        path, _, test = node_id.partition("::")
        tests = seconds.setdefault(path, {})
        tests[test] = tests.get(test, 0.0) + duration
    found = {
        path: {"seconds": round(sum(tests.values()), 2), "tests": _longest_first(tests)}
        for path, tests in seconds.items()
    }
    return dict(sorted(found.items(), key=lambda pair: -float(pair[1]["seconds"])))


def _longest_first(tests: dict[str, float]) -> dict[str, float]:
    ordered = sorted(tests.items(), key=lambda pair: -pair[1])
    return {test: round(duration, 3) for test, duration in ordered}


def write(lines: Path, target: Path) -> None:
    """Write a run's durations as JSON."""
    target.parent.mkdir(parents=True, exist_ok=True)
    found = by_file(lines.read_text(encoding="utf-8"))
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
