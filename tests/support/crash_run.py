"""Crash exploration of whole traces, one a task, on every core.

Each worker is a new interpreter that builds its trace itself: nothing but names and results passes between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from tests.support.crash_check import Checker, states
from tests.support.crash_traces import SEED, Trace, fixed_names
from tests.support.crash_workloads import TRACES, make_trace
from tests.support.simulated_disk import SimulatedDisk

Key = TypeVar("Key", bound=Hashable)
Done = TypeVar("Done")

#: combinations tried at each place of a recovery that crashes again
SECOND_LIMIT = 6
#: disks of each trace whose recovery crashes again
SECOND_IMAGES = 4
#: where a process sets the nice value of its session
AUTOGROUP = Path("/proc/self/autogroup")
#: of <sys/prctl.h>
PR_SET_PDEATHSIG = 1


class Task(NamedTuple):
    """One trace on disks of one block size."""

    trace: str
    width: int
    #: how many times as many combinations, and second crashes, as a usual run tries
    depth: int


class Explored(NamedTuple):
    """What one task did."""

    #: of every disk that was recovered
    keys: frozenset[int]
    recoveries: int
    #: recovered stores that were looked at closely: every one that differs from those before
    looks: int
    #: recoveries of disks that a crash during another recovery left
    second_crashes: int
    seconds: float


def explore(task: Task) -> Explored:
    """Recover every disk that a crash of a trace may leave, and some that crash again while they recover.

    Raises: AssertionError, with the trace, the kind and the place of the crash.
    """
    started = time.perf_counter()
    trace = make_trace(task.trace, task.width)
    checker = Checker(trace)
    keys: set[int] = set()
    chance = random.Random(f"{SEED}/{task.trace}/{task.width}")
    sample: list[tuple[bool, SimulatedDisk]] = []
    for number, (power, image) in enumerate(states(trace, TRACES[task.trace][1] * task.depth)):
        keys.add(image.key)
        _check(checker, image, power, f"state {number} of {task}")
        at = number if len(sample) < SECOND_IMAGES * task.depth else chance.randrange(number + 1)
        if at < SECOND_IMAGES * task.depth:
            sample[at : at + 1] = [(power, image)]
    first = checker.recovered
    for power, image in sample:
        kind = "power loss" if power else "kill"
        recover_and_go_on(trace, image, power=power)
        for number, (power_again, second) in enumerate(states(trace, SECOND_LIMIT)):
            keys.add(second.key)
            where = f"state {number} behind a {kind} at {image.crashed_at} of {task}"
            _check(checker, second, power_again, where)
    return Explored(
        frozenset(keys),
        checker.recovered,
        checker.looks,
        checker.recovered - first,
        time.perf_counter() - started,
    )


def recover_and_go_on(trace: Trace, image: SimulatedDisk, *, power: bool) -> None:
    """The next life of a trace, on what a crash left: recovery, a put, an ack, an orderly stop."""
    trace.begin_with_crash(image, power=power)
    with fixed_names():
        trace.go_on()
    if trace.groups and "t" in trace.store.state.topics:
        trace.put_group(2, 50)
    elif "t" in trace.store.state.topics:
        trace.put(0, 1, 50)
    trace.ack()
    trace.store.close()


def _check(checker: Checker, image: SimulatedDisk, power: bool, where: str) -> None:
    try:
        checker.check(image, power=power)
    except Exception as error:
        kind = "power loss" if power else "kill"
        error.args = (f"{kind} at {image.crashed_at}, {where}: {error}",)
        raise


def _end_with_parent() -> None:
    """A worker would wait for ever for tasks of a parent that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _only_idle_time() -> None:
    """What else the machine does is not held up: these workers run beside other tests."""
    _end_with_parent()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # The kernel may share the cores out among sessions first (sched_autogroup): idle work of one session then takes
    # as much as a Ray in another. So these have one of their own, of the least weight.
    os.setsid()
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text("19")


class Explorers:
    """Worker processes, one a core, and the tasks that they were given."""

    def __init__(self, *, beside: bool = False) -> None:
        """Args: `beside`, take only the time that nobody else needs."""
        self._pool = ProcessPoolExecutor(
            len(os.sched_getaffinity(0)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_only_idle_time if beside else _end_with_parent,
        )
        self._futures: dict[Any, Future[Any]] = {}

    def start(self, work: Callable[[Key], Done], keys: Iterable[Key]) -> None:
        """Begin these, in this order. Args: `work` is a function of a module."""
        # New interpreters, not forks: this process may have threads. They agree on hashes by the fixed seed.
        with mock.patch.dict(os.environ, PYTHONHASHSEED=str(SEED)):
            for key in keys:
                if key not in self._futures:
                    self._futures[key] = self._pool.submit(work, key)

    def result(self, work: Callable[[Key], Done], key: Key) -> Done:
        """Wait for one. Raises: what it raised."""
        self.start(work, [key])
        done: Done = self._futures[key].result()
        return done

    def close(self) -> None:
        """End the workers; of a run that was broken off also what they are at."""
        if not all(future.done() for future in self._futures.values()):
            for worker in self._pool._processes.values():
                worker.terminate()
        self._pool.shutdown(cancel_futures=True)
