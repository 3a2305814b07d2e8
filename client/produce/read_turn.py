"""Decides which thread reads the acks of a shard: the receiver thread, or a caller blocked on a receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raymq.store.base.errors import RayMQError

#: how often the parked receiver thread checks whether it is needed. The interval grows while callers read, because each
#: check costs their puts a thread switch
PARK_TICK_S = 0.002
PARK_TICK_MAX_S = 0.016
#: time without a reading caller after which the receiver thread reads again
PARK_S = 0.05
#: a caller's read is broken off after this time, so that the caller can be interrupted
CALLER_READ_MS_MAX = 1_000
#: how long no caller may read after that
CALLER_PAUSE_MS = 60_000


class ReadTurn:
    """Which thread may read the acks. Every method needs the sender's lock.

    A caller that sends one batch and blocks on its receipt reads the ack itself. Waking the receiver thread would cost
    half as much as the round trip. The receiver thread is *parked* during such reads.
    """

    def __init__(self, lock: threading.RLock) -> None:
        # A condition of its own: most changes of the sender do not concern the parked thread.
        self._unparked = threading.Condition(lock)
        #: a caller blocked on a receipt since the receiver thread was parked last
        self.wanted = False
        self.receiver_parked = False
        self.caller_reading = False
        #: reads by callers so far
        self.caller_reads = 0
        #: id of the thread that reads as a caller
        self.caller = 0
        #: the error that ended a caller's read, for the receiver thread
        self._error: RayMQError | None = None
        self._began_ms = 0
        self._not_before_ms = 0

    def begin(self, now_ms: int) -> bool:
        """A caller asks to read. Returns: whether it may."""
        if not self.receiver_parked or self.caller_reading or now_ms < self._not_before_ms:
            return False
        self.caller_reading = True
        self.caller = threading.get_ident()
        self._began_ms = now_ms
        return True

    def end(self, error: RayMQError | None, *, unpark: bool) -> None:
        """The caller that reads has ended, with the error of the stream if it broke."""
        self.caller_reading = False
        self.caller = 0
        self.caller_reads += 1
        self._error = error
        if unpark or error is not None:
            self._unparked.notify()

    def park(self, oldest: Callable[[], int | None], must_return: Callable[[], bool]) -> None:
        """Leave the stream to callers, while there are any. For the receiver thread.

        Args: `oldest`: the number of the oldest unacknowledged batch. A caller may be about to block on its receipt.
        When none has come by the next check, the receiver thread reads the ack.
        Raises: the error of a caller's read.
        """
        self.wanted = False
        self.receiver_parked = True
        reads = self.caller_reads
        tick_s, idle_s = PARK_TICK_S, 0.0
        seen = 0

        try:
            # The stream has one reader at a time, even while it is being closed.
            while self.caller_reading or not (must_return() or idle_s >= PARK_S):
                self._unparked.wait(tick_s)
                self._raise_error()
                if self.caller_reading:
                    tick_s = min(2 * tick_s, PARK_TICK_MAX_S)
                    continue

                number = oldest()
                if number is not None:
                    if number == seen:
                        return
                    seen, tick_s = number, PARK_TICK_S
                idle_s = idle_s + tick_s if reads == self.caller_reads else 0.0
                reads = self.caller_reads
        finally:
            self.receiver_parked = False

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def is_too_long(self, now_ms: int, progress_ms: int) -> bool:
        """Whether a caller has read for too long without an answer. Then no caller reads for a while."""
        since_ms = max(self._began_ms, progress_ms)
        if not self.caller_reading or now_ms - since_ms < CALLER_READ_MS_MAX:
            return False
        self._not_before_ms = now_ms + CALLER_PAUSE_MS
        return True

    def reset(self) -> None:
        """Forget the error of a caller's read: its stream is closed."""
        self._error = None
