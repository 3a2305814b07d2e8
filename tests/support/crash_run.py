"""Crash exploration of whole workloads, one a task, which makes its traces itself."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from tests.support.crash_check import Checker, states
from tests.support.crash_states import last_states, lost_names
from tests.support.crash_traces import SEED, Owed, Trace, fixed_names, owed_by
from tests.support.crash_workloads import TRACES, make_trace
from tests.support.simulated_disk import Op, SimulatedDisk

#: block sizes of the disks: a crash may tear a write between two blocks
WIDTHS = (512, 4096)
#: combinations tried at each place of a recovery that crashes again
SECOND_LIMIT = 6
#: disks of each trace whose recovery crashes again
SECOND_IMAGES = 4
#: of further kills with the same names not settled one of so many is tried
OTHER_KILLS_STRIDE = 50
#: disks that a power loss leaves of each life after a kill
LOST_LIMIT = 4


class Task(NamedTuple):
    """One workload, on disks of each block size."""

    trace: str
    #: how many times as many combinations, and second crashes, are tried as give a hundred thousand disks in all
    depth: float

    def times_depth(self, count: int) -> int:
        """So many at this depth, one at least."""
        return max(1, round(count * self.depth))


class Explored(NamedTuple):
    """The result of one task."""

    #: of every disk that was recovered
    keys: frozenset[int]
    recoveries: int
    #: recovered stores that were looked at closely: every one that differs from those before
    looks: int
    #: recoveries of disks that a crash during another recovery left
    second_crashes: int
    seconds: float


def explore(task: Task) -> Explored:
    """Recover every disk that a crash of a workload may leave, and some that crash again while they recover.

    Crashes of both block sizes leave many equal disks with equal promises: each of these is recovered once.
    Raises: AssertionError, with the workload, the kind and the place of the crash.
    """
    tried: set[tuple[bool, int, Owed]] = set()
    found = [_explore(task, width, tried) for width in WIDTHS]
    return Explored(
        frozenset().union(*(each.keys for each in found)),
        sum(each.recoveries for each in found),
        sum(each.looks for each in found),
        sum(each.second_crashes for each in found),
        sum(each.seconds for each in found),
    )


def _explore(task: Task, width: int, tried: set[tuple[bool, int, Owed]]) -> Explored:
    started = time.perf_counter()
    trace = make_trace(task.trace, width)
    checker = Checker(trace)
    keys: set[int] = set()
    chance = random.Random(f"{SEED}/{task.trace}/{width}")
    sample: list[tuple[bool, SimulatedDisk]] = []
    second_images = task.times_depth(SECOND_IMAGES)
    limit = task.times_depth(TRACES[task.trace][1])

    for number, (power, image) in enumerate(states(trace, limit)):
        keys.add(image.key)
        disk = (power, image.key, owed_by(image, power=power))
        if disk not in tried:
            tried.add(disk)
            _check(checker, image, power, f"state {number} of {task}, blocks of {width}")
        at = number if len(sample) < second_images else chance.randrange(number + 1)
        if at < second_images:
            sample[at : at + 1] = [(power, image)]

    first = checker.recovered
    for power, image in sample:
        kind = "power loss" if power else "kill"
        recover_and_go_on(trace, image, power=power)
        for number, (power_again, second) in enumerate(states(trace, SECOND_LIMIT)):
            keys.add(second.key)
            where = (
                f"state {number} after a {kind} at {image.crashed_at} of {task}, blocks of {width}"
            )
            _check(checker, second, power_again, where)

    return Explored(
        frozenset(keys),
        checker.recovered,
        checker.looks,
        checker.recovered - first,
        time.perf_counter() - started,
    )


def lose_after_kills(name: str) -> Explored:
    """Kill a trace at each new set of names that are not settled, and now and then elsewhere. Start, ack, lose power.

    What the killed process left in the page cache is served and acknowledged by the next one. So the next one must
    have it on the disk. Raises: AssertionError, with the trace and the place of the kill.
    """
    started = time.perf_counter()
    trace = make_trace(name, 4096)
    checker = Checker(trace)
    keys: set[int] = set()
    kills = 0
    tried: set[frozenset[tuple[int, Op]]] = {frozenset()}

    for number, image in enumerate(trace.disk.kill_states()):
        assert image.killed is not None
        if image.killed.open_names in tried and number % OTHER_KILLS_STRIDE:
            continue
        tried.add(image.killed.open_names)
        kills += 1
        recover_and_go_on(trace, image, power=False, close=False)
        _, lost = last_states(trace.disk, LOST_LIMIT, SEED)
        for state in (*lost_names(trace.disk), *lost):
            keys.add(state.key)
            _check(
                checker, state, True, f"after a kill at {image.crashed_at} of {name}, and an ack"
            )

    return Explored(
        frozenset(keys), checker.recovered, checker.looks, kills, time.perf_counter() - started
    )


def recover_and_go_on(
    trace: Trace, image: SimulatedDisk, *, power: bool, close: bool = True
) -> None:
    """The next life of a trace, on what a crash left: recovery, a put, an ack, an orderly stop if `close`."""
    trace.begin_with_crash(image, power=power)
    with fixed_names():
        trace.go_on()

    if not close and "t" not in trace.store.state.topics:
        trace.store.topics.create("t", 2, [0])
        trace.ends = {0: 0, 1: 0}
    if trace.groups and "t" in trace.store.state.topics:
        trace.put_group(2, 50)
    elif "t" in trace.store.state.topics:
        trace.put(0, 1, 50)

    if not close:
        fill_last_file(trace)
    trace.ack()
    if close:
        trace.store.close()
    else:
        trace.store.sync_queues()
        trace.store.abandon()


def fill_last_file(trace: Trace) -> None:
    """Put until the end is in the newest file that is there, and make no other one, which would settle its name."""
    log = trace.store.log
    last = log.segments.files[-1].start
    while log.end <= last:
        if trace.groups:
            trace.put_group(2, min(700, max(50, log.room() // 4)))
        else:
            trace.put(0, 1, min(1500, max(50, log.room() - 400)))


def _check(checker: Checker, image: SimulatedDisk, power: bool, where: str) -> None:
    try:
        checker.check(image, power=power)
    except Exception as error:
        kind = "power loss" if power else "kill"
        error.args = (f"{kind} at {image.crashed_at}, {where}: {error}",)
        raise
