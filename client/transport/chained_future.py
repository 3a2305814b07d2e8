"""A future whose blocked callers, and those of others that end with it, are woken one after the other.

If all of them were woken together, they would compete for the interpreter. With 64 threads that took a tenth of the
rate of puts in one topic, and a third over a hundred topics.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Generic, TypeVar

#: what a future ends with
FutureOutcome = TypeVar("FutureOutcome")


class BlockedCallers:
    """Threads that wait for the same thing. Threads: any may call."""

    def __init__(self) -> None:
        #: a locked lock of each
        self._blocked: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._blocked)

    def block(self) -> Any:
        """Begin to wait. What comes after this call wakes the caller. Returns: what `sleep` takes."""
        wakeup = threading.Lock()
        wakeup.acquire()
        self._blocked.append(wakeup)
        return wakeup

    def sleep(self, wakeup: Any, timeout_s: float) -> bool:
        """Wait to be woken. Returns: False when the time is up."""
        woken = False
        try:
            woken = bool(wakeup.acquire(timeout=timeout_s))
        finally:
            if not woken:
                try:
                    self._blocked.remove(wakeup)
                except ValueError:
                    # It was woken in the last moment: the next one gets what is left.
                    self.wake_next()
        return woken

    def wake_next(self) -> bool:
        """Wake one. Returns: whether there was one."""
        try:
            self._blocked.popleft().release()
        except IndexError:
            return False
        return True

    def wake_all(self) -> None:
        """Wake all of them."""
        while self.wake_next():
            pass


class ChainedFuture(Future[FutureOutcome], Generic[FutureOutcome]):
    """A future that cannot be cancelled. `wake_callers` wakes those that block on it."""

    #: a future that ended together with this one, and whose blocked callers are woken after this one's
    woken_after: ChainedFuture[Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        #: a locked lock of each caller that blocks
        self._blocked: deque[Any] = deque()
        # A caller that gives up waiting must not cancel it for others.
        self.set_running_or_notify_cancel()

    def await_end(self, timeout: float | None) -> None:
        """Wait until it has its outcome or the time is up. `timeout` is in seconds; None: without limit."""
        wakeup = threading.Lock()
        wakeup.acquire()
        self._blocked.append(wakeup)
        woken = False
        try:
            # The outcome is set before the first caller is woken: one of the two is seen here.
            if not self.done():
                woken = wakeup.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        finally:
            if not woken:
                # Another thread may have taken this lock already.
                with contextlib.suppress(ValueError):
                    self._blocked.remove(wakeup)
            if self.done():
                self.wake_next()

    @property
    def has_blocked(self) -> bool:
        """Whether a caller blocks on it."""
        return bool(self._blocked)

    def wake_next(self) -> None:
        """Wake one blocked caller, of this future or of the next one that ended with it. The caller wakes the next."""
        future: ChainedFuture[Any] | None = self
        while future is not None:
            # Another caller may take the last one first.
            with contextlib.suppress(IndexError):
                future._blocked.popleft().release()
                return
            after, future.woken_after = future.woken_after, None
            future = after


def wake_callers(finished: Sequence[ChainedFuture[Any]]) -> None:
    """Wake the blocked callers of futures that have their outcomes, one after the other."""
    blocked = [future for future in finished if future.has_blocked]
    for future, after in pairwise(blocked):
        future.woken_after = after
    if blocked:
        blocked[0].wake_next()
