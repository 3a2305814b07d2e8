"""Bounds the memory of batches that a server has received and not answered, over all its put streams."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa

#: limit of unanswered bytes over all put streams of a server
LIMIT_BYTES = 64 << 20
#: the smallest limit of a stream. One batch may always be in flight
STREAM_LIMIT_BYTES_MIN = 1 << 20
#: peak above which a trim of the allocator pays for its later page faults
TRIM_BYTES = 48 << 20
#: a server without a batch for this long is expected to stay idle
IDLE_S = 5.0


class ReceiveMemory:
    """Counts bytes that are received and not answered. Threads: any.

    Streams wait in the order in which they came, so that small batches cannot keep a large one waiting. A stream
    that waits is not read, but gRPC receives its messages nevertheless, without a limit. So every stream's client is
    sent a limit, and producers keep no more than that in flight.
    """

    def __init__(
        self,
        *,
        limit_bytes: int = LIMIT_BYTES,
        idle_s: float = IDLE_S,
        trim: Callable[[], None] | None = None,
    ) -> None:
        """Args: `idle_s`: seconds. `trim`: returns free memory to the system (`give_back`)."""
        #: bytes taken now
        self.used = 0
        #: bytes that each stream may have in flight: an equal part of the limit
        self.stream_limit_bytes = limit_bytes
        self._streams = 0
        #: guards all fields. It is notified when bytes are released and when a stream's client has left
        self._changed = threading.Condition()
        self._limit = limit_bytes
        self._idle_s = idle_s
        self._trim = trim or give_back
        #: the highest use since the last trim
        self._peak = 0
        self._turns: deque[object] = deque()
        self._trimmer: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """One more stream shares the memory during the block."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._streams += change
            self.stream_limit_bytes = max(
                STREAM_LIMIT_BYTES_MIN, self._limit // max(1, self._streams)
            )

    def acquire(self, size: int, client_left: Callable[[], bool]) -> bool:
        """Wait until `size` more bytes are within the limit, and acquire them. A size above the limit must be alone.

        Returns: False, with nothing acquired, once `client_left()`: the stream's client has left.
        """
        with self._changed:
            if self._turns or not self._fits(size):
                self._await_turn(size, client_left)
                if client_left():
                    return False
            self.used += size
            if self.used > self._peak:
                self._peak = self.used
            return True

    def _await_turn(self, size: int, client_left: Callable[[], bool]) -> None:
        turn = object()

        def may_go_on() -> bool:
            return client_left() or (self._turns[0] is turn and self._fits(size))

        self._turns.append(turn)
        try:
            self._changed.wait_for(may_go_on)
        finally:
            self._turns.remove(turn)
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return not self.used or self.used + size <= self._limit

    def release(self, size: int) -> None:
        """Release `size` bytes."""
        with self._changed:
            self.used -= size
            self._changed.notify_all()
            if not self.used and self._peak > TRIM_BYTES and self._trimmer is None:
                self._trimmer = threading.Thread(
                    target=self._trim_when_idle, name="raymq-trim", daemon=True
                )
                self._trimmer.start()

    def wake(self) -> None:
        """Have waiting streams check again whether their client has left."""
        with self._changed:
            self._changed.notify_all()

    def _trim_when_idle(self) -> None:
        """Trim after a large load, once nothing was received for `idle_s`."""
        with self._changed:
            while self._changed.wait_for(lambda: self._closed or self.used > 0, self._idle_s):
                if self._closed:
                    return
                self._changed.wait_for(lambda: self._closed or not self.used)
            self._peak = 0
            self._trimmer = None
        self._trim()

    def close(self) -> None:
        """End the thread that trims."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def give_back() -> None:
    """Return the free memory of this process's allocators to the system."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
