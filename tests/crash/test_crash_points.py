"""Every place where a machine or a process can stop, and real recovery of what is left.

A trace of one store is replayed by `crash_states.py` into the disks that a power loss or SIGKILL
may leave. Each must open, and keep what was promised before the crash: after a power loss what was
synced, after a kill every put that returned. Some are crashed again while they recover.
Deterministic: traces and samples follow from a seed. RAYMQ_CRASH_DEPTH=1 recovers a hundred thousand
disks, as CI does (`nox -s crash`). A usual run recovers a hundredth of them.
"""

from __future__ import annotations

import os

import pytest

from tests.support.crash_run import Task, explore
from tests.support.crash_workloads import TRACES
from tests.support.workers import Workers

DEPTH = float(os.environ.get("RAYMQ_CRASH_DEPTH", "0.01"))
TASKS = [Task(name, DEPTH) for name in TRACES]
#: that each task recovers at least
DISTINCT_MIN = round(1000 * DEPTH)
SECOND_CRASHES_MIN = round(100 * DEPTH)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.trace)
def test_every_crash_keeps_what_was_promised(task: Task, crash_explorers: Workers) -> None:
    done = crash_explorers.result(explore, task)
    rate = done.recoveries / done.seconds
    print(
        f"\n{len(done.keys)} distinct disks, {done.recoveries} recoveries, {rate:.0f}/s, of them "
        f"{done.second_crashes} of a second crash; {done.looks} recovered stores looked at"
    )
    assert len(done.keys) >= DISTINCT_MIN
    assert done.recoveries >= len(done.keys)
    assert done.second_crashes >= SECOND_CRASHES_MIN


def test_a_hundred_thousand_disks_differ_or_as_many_as_the_depth_says(
    crash_explorers: Workers,
) -> None:
    disks: set[int] = set()
    recoveries = second = 0
    for task in TASKS:
        done = crash_explorers.result(explore, task)
        disks |= done.keys
        recoveries += done.recoveries
        second += done.second_crashes
    print(f"\n{len(disks)} distinct disks, {recoveries} recoveries, {second} of a second crash")
    assert len(TRACES) >= 12
    assert len(disks) >= 100_000 * DEPTH
