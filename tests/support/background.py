"""What runs in the background of the tests, from the first one on: programs, and the exploration of crashes.

Where several processes run the tests (pytest-xdist), one of them runs all that starts Ray or waits for this work, in
one group, and begins the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .crash_run import Task, explore, lose_after_kills
from .failing_workloads import fail_every_call
from .programs import run
from .workers import Workers

#: tests that look at what the exploration found
EXPLORED = ("test_every_call_fails.py", "test_crash_points.py")
#: tests outside the folders of Ray and Spark that look at what a program printed
WATCHED = ("test_border.py", "test_docs.py", "test_site.py")
_programs = pytest.StashKey[Workers]()
_explorers = pytest.StashKey[Workers]()


def work_beside(item: pytest.Item) -> tuple[Callable[[Any], Any], Any] | None:
    """The function and the argument that a test's mark names; None without a mark."""
    program = item.get_closest_marker("program")
    if program is not None:
        return run, program.args[0]
    beside = item.get_closest_marker("beside")
    return None if beside is None else (beside.args[0], beside.args[1])


def begin(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Begin the work that the chosen tests look at. The first call counts."""
    if _programs in config.stash:
        return
    # One after the other: most of their time the programs wait.
    config.stash[_programs] = programs = Workers(1)
    for work, key in filter(None, map(work_beside, items)):
        programs.start(work, [key])
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    tasks: list[Task] = [each["task"] for each in params if "task" in each]
    workloads: list[str] = [each["workload"] for each in params if "workload" in each]
    kills: list[str] = [each["trace_killed"] for each in params if "trace_killed" in each]
    if tasks or workloads or kills:
        config.stash[_explorers] = explorers = Workers(only_idle=True)
        explorers.start(fail_every_call, workloads)
        explorers.start(lose_after_kills, kills)
        explorers.start(explore, tasks)


def end(config: pytest.Config) -> None:
    """End the work, also when the run was broken off."""
    for key in (_programs, _explorers):
        if key in config.stash:
            config.stash[key].close()


def result_beside(item: pytest.Item) -> Any:
    """What the work of a test's mark returned. Raises: what the work raised."""
    work = work_beside(item)
    assert work is not None, "the test has neither mark `program` nor `beside`"
    return item.config.stash[_programs].result(*work)


def crash_workers(config: pytest.Config) -> Workers:
    """The processes that explore crashes."""
    if _explorers not in config.stash:
        config.stash[_explorers] = Workers()
    return config.stash[_explorers]
