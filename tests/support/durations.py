"""How long each test takes: `python -m tests` writes build/durations.json, and fails if a file has doubled.

A run may have several pytests. Each adds a line for each phase of a test to the file that VARIABLE names.

tests/budgets.json has the seconds of each long file, as `python -m tests --thorough` took them on two cores. All files
of a run take longer on a slower machine, and beside other work. So all budgets grow by the median of what these files
take, or by how long a computation waits for a core if that is more. Other work comes and goes: a file that ran beside
more of it than most counts by its CPU time.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

#: names the file of a run's lines; `ray_environment` takes away what begins with RAY while a test lasts
VARIABLE = "TEST_DURATIONS"
#: file -> seconds
BUDGETS = Path(__file__).parents[1] / "budgets.json"
#: seconds of a file without a budget of its own; it is also the least that a file needs to get one
OTHERS_S = 10.0
#: how long a computation waits while two lanes run and nothing else does
LANES_WAIT = 1.5
#: CPU time of the computation of `core_wait`: several time slices of a busy core
PROBE_S = 0.05
#: a file may take so many seconds more at least: live tests wait for what other processes do by chance
BY_CHANCE_S = 30.0
#: on a machine that takes so many times the budgets, other work has a core now and then
BUSY = 1.6

#: CPU seconds of this process at the last `note`
_cpu_s = 0.0


def note(report: pytest.TestReport) -> None:
    """Add the duration of one phase of a test, if this run notes durations."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    line = json.dumps([report.nodeid, report.duration, _cpu_since_last()])
    with open(place, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _cpu_since_last() -> float:
    """CPU seconds of this process, and of its children that have ended, since the last call."""
    global _cpu_s
    times = os.times()
    before_s, _cpu_s = _cpu_s, sum(times[:4])
    return _cpu_s - before_s


def by_file(lines: str) -> dict[str, dict[str, Any]]:
    """The seconds of each file and of its tests, the longest first."""
    seconds: dict[str, dict[str, float]] = {}
    cpu_s: Counter[str] = Counter()
    for line in lines.splitlines():
        node_id, duration, used_s = json.loads(line)
        path, _, test = node_id.partition("::")
        tests = seconds.setdefault(path, {})
        tests[test] = tests.get(test, 0.0) + duration
        cpu_s[path] += used_s
    found = {
        path: {
            "seconds": round(sum(tests.values()), 2),
            "cpu_s": round(cpu_s[path], 2),
            "tests": _longest_first(tests),
        }
        for path, tests in seconds.items()
    }
    return dict(sorted(found.items(), key=lambda pair: -float(pair[1]["seconds"])))


def _longest_first(tests: dict[str, float]) -> dict[str, float]:
    ordered = sorted(tests.items(), key=lambda pair: -pair[1])
    return {test: round(duration, 3) for test, duration in ordered}


def write(lines: Path, target: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Write a run's durations as JSON. Returns: the seconds of each file, and its CPU seconds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    found = by_file(lines.read_text(encoding="utf-8"))
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    seconds, cpu_s = (
        {path: float(facts[name]) for path, facts in found.items()} for name in ("seconds", "cpu_s")
    )
    return seconds, cpu_s


def read_budgets(source: Path = BUDGETS) -> dict[str, float]:
    """The seconds of each file that has a budget of its own."""
    budgets: dict[str, float] = json.loads(source.read_text(encoding="utf-8"))
    return budgets


def core_wait() -> float:
    """How many times its own CPU time a computation takes now: 1.0 with a core of its own."""
    began_s, own_s = time.perf_counter(), time.thread_time()
    while (used_s := time.thread_time() - own_s) < PROBE_S:
        pass
    return (time.perf_counter() - began_s) / used_s


def over_budget(
    seconds: Mapping[str, float],
    budgets: Mapping[str, float],
    waits: Sequence[float] = (),
    cpu_s: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """A line for each file that took more than twice its budget.

    Args: `seconds`, `budgets`, `cpu_s`: by file. `waits`: the `core_wait` of some moments of the run, in which the
    lanes have their part.
    """
    ratios = [taken / budgets[path] for path, taken in seconds.items() if path in budgets]
    slower = max(
        1.0, statistics.median(ratios or [1.0]), statistics.median(waits or [1.0]) / LANES_WAIT
    )
    if slower >= BUSY:
        seconds = {path: min(taken, cpu_s.get(path, taken)) for path, taken in seconds.items()}
    return [
        f"{path} took {taken:.0f} s, more than twice its budget of {budget:.0f} s, on a machine that takes"
        f" {slower:.1f} times the budgets: make it quicker, mark tests as thorough, or raise it in tests/budgets.json"
        for path, taken in seconds.items()
        if taken > slower * max(2 * (budget := budgets.get(path, OTHERS_S)), budget + BY_CHANCE_S)
    ]


def write_budgets(source: Path, target: Path = BUDGETS) -> None:
    """Take the durations of a whole run as budgets. Args: `source`: build/durations.json."""
    found = json.loads(source.read_text(encoding="utf-8"))
    budgets = {
        path: math.ceil(facts["seconds"])
        for path, facts in sorted(found.items())
        if facts["seconds"] > OTHERS_S
    }
    target.write_text(json.dumps(budgets, indent=1) + "\n", encoding="utf-8")
