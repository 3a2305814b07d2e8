"""How many bytes of a producer may be unanswered, and who waits for room."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raymq.store.errors import Unavailable


class ByteLimiter:
    """Bytes that may be unanswered."""

    def __init__(self, limit: int, max_block_ms: int) -> None:
        self._limit = limit
        self._max_block_ms = max_block_ms
        self._used = 0
        #: guards `_used`, and `_blocked`: how many wait for `_freed`
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._blocked = 0
        #: called, by any thread, when there is more room; must not block
        self.on_free: Callable[[], None] | None = None

    @property
    def used(self) -> int:
        """Bytes that are unanswered now."""
        return self._used

    def take(self, size: int) -> None:
        """Wait for room. More than the whole room goes alone.

        Raises: Unavailable when there is none in time.
        """
        if self.take_nowait(size):
            return
        with self._lock:
            self._blocked += 1
            try:
                fits = self._freed.wait_for(lambda: self._fits(size), self._max_block_ms / 1000)
            finally:
                self._blocked -= 1
            if not fits:
                raise Unavailable(
                    f"{self._used} bytes wait for acknowledgement, the limit is {self._limit}, and "
                    f"none came free in {self._max_block_ms} ms: the cluster is slower than this "
                    "producer; send less, or raise buffer_bytes or max_block_ms",
                    field="buffer_bytes",
                    limit=self._limit,
                )
            self._used += size

    def take_nowait(self, size: int) -> bool:
        """Take what is free now; False: it is not."""
        with self._lock:
            if not self._fits(size):
                return False
            self._used += size
            return True

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit

    def give(self, size: int) -> None:
        """Bytes were answered."""
        with self._lock:
            self._used -= size
            if self._blocked:
                self._freed.notify_all()
        if self.on_free is not None:
            self.on_free()
