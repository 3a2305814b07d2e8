"""Work that begins with the first test, in processes of its own, and is checked by the tests that wait for it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

Key = TypeVar("Key", bound=Hashable)
Done = TypeVar("Done")

#: of <sys/prctl.h>
PR_SET_PDEATHSIG = 1
#: so that they agree on hashes
HASH_SEED = "20"


def end_with_parent() -> None:
    """Callers: a new process. It would wait for ever for a killed parent, or work without one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _only_idle_time() -> None:
    """Other work of the machine is not delayed: these workers run beside other tests."""
    end_with_parent()
    # The kernel may share the cores out among sessions first (sched_autogroup): idle work of one session then takes
    # as much as a Ray in another. So these have one of their own, of the least weight.
    os.setsid()
    _schedule(os.getpid(), os.SCHED_IDLE, 19)


def _schedule(pid: int, policy: int, nice: int) -> None:
    """Set the schedule of a process that has a session of its own, if this user may."""
    with contextlib.suppress(OSError):
        if os.getsid(pid) != pid:
            # It has just been started.
            return
        os.sched_setscheduler(pid, policy, os.sched_param(0))
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


class Workers:
    """Processes, and the tasks that they were given: only names and results pass between them and the tests."""

    def __init__(self, count: int | None = None, *, only_idle: bool = False) -> None:
        """Args: `count`: by default one per core. `only_idle`: use idle time only, until a test waits."""
        self._only_idle = only_idle
        self._pool = ProcessPoolExecutor(
            count or len(os.sched_getaffinity(0)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_only_idle_time if only_idle else end_with_parent,
        )
        self._futures: dict[Any, Future[Any]] = {}

    def start(self, work: Callable[[Key], Done], keys: Iterable[Key]) -> None:
        """Begin these, in this order. Args: `work`: a function of a module."""
        # New interpreters, not forks: this process may have threads. They agree on hashes by the fixed seed.
        with mock.patch.dict(os.environ, PYTHONHASHSEED=HASH_SEED):
            for key in keys:
                if (work, key) not in self._futures:
                    self._futures[work, key] = self._pool.submit(work, key)

    def result(self, work: Callable[[Key], Done], key: Key) -> Done:
        """Wait for one. Raises: what it raised."""
        self.start(work, [key])
        future = self._futures[work, key]
        while self._only_idle and not future.done():
            for pid in self._pool._processes:
                _schedule(pid, os.SCHED_OTHER, 0)
            wait([future], timeout=1.0)
        done: Done = future.result()
        return done

    def close(self) -> None:
        """End them. Of a run that was broken off also what they are at."""
        if not all(future.done() for future in self._futures.values()):
            for worker in self._pool._processes.values():
                worker.terminate()
        self._pool.shutdown(cancel_futures=True)
