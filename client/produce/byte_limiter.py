"""Limits the bytes that a sender holds without an answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from raymq.client.arguments import wait_s
from raymq.store.base.errors import Unavailable


class ByteLimiter:
    """A count of unanswered bytes with a limit. Threads: any."""

    def __init__(self, limit: int, max_block_ms: int) -> None:
        self._limit = limit
        self._max_block_ms = max_block_ms
        self._used = 0
        #: guards `_used` and `_blocked`, the number of threads that wait for `_released`
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._blocked = 0
        #: called after each release, by any thread; must not block
        self.on_release: Callable[[], None] | None = None

    @property
    def used(self) -> int:
        """Bytes that are unanswered now."""
        return self._used

    def acquire(self, size: int) -> None:
        """Wait until `size` bytes fit. More bytes than the limit are taken when no others are unanswered.

        Raises: Unavailable when they do not fit within `max_block_ms`.
        """
        if self.acquire_nowait(size):
            return
        with self._lock:
            self._blocked += 1
            try:
                fits = self._released.wait_for(
                    lambda: self._fits(size), wait_s(self._max_block_ms / 1000)
                )
            finally:
                self._blocked -= 1
            if not fits:
                raise self.full_error()
            self._used += size

    def full_error(self) -> Unavailable:
        """The error of a caller that has waited for `max_block_ms`."""
        return Unavailable(
            f"{self._used} bytes wait for acknowledgement, the limit is {self._limit}, and not enough came free in "
            f"{self._max_block_ms} ms: the cluster is slower than this producer; send less, or raise buffer_bytes or "
            "max_block_ms",
            field="buffer_bytes",
            limit=self._limit,
        )

    def acquire_nowait(self, size: int) -> bool:
        """Take `size` bytes if they fit now. Returns: whether they did."""
        with self._lock:
            # `_fits`, without a call for each message
            used = self._used
            if used and used + size > self._limit:
                return False
            self._used = used + size
            return True

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit

    @contextlib.contextmanager
    def released_on_error(self, size: int) -> Iterator[None]:
        """Release `size` bytes, which are acquired already, when the block raises."""
        try:
            yield
        except BaseException:
            self.release(size)
            raise

    def release(self, size: int) -> None:
        """Give back bytes that are answered, or that will not be sent."""
        with self._lock:
            self._used -= size
            if self._blocked:
                self._released.notify_all()
        if self.on_release is not None:
            self.on_release()
