"""How a producer's messages were batched: counters that `Producer.statistics` shows."""

from __future__ import annotations

import threading

from .send_future import Pending


class SendStatistics:
    """Sums over answered batches. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = 0
        self._messages = 0
        self._failed_messages = 0
        self._bytes = 0
        self._queue_s = 0.0
        self._ack_s = 0.0

    def note(self, pending: Pending, now: float, *, failed: bool) -> None:
        """A batch was answered at `now`, seconds of the monotonic clock."""
        with self._lock:
            self._batches += 1
            self._messages += pending.rows
            self._failed_messages += pending.rows if failed else 0
            self._bytes += pending.size
            self._queue_s += pending.sealed_at - pending.begun
            self._ack_s += now - pending.sealed_at

    def read(self) -> dict[str, int | float]:
        """Counters and means; see `Producer.statistics`."""
        with self._lock:
            batches = max(self._batches, 1)
            return {
                "messages": self._messages,
                "failed_messages": self._failed_messages,
                "batches": self._batches,
                "bytes": self._bytes,
                "batch_messages_mean": self._messages / batches,
                "batch_bytes_mean": self._bytes / batches,
                "queue_ms_mean": 1000 * self._queue_s / batches,
                "ack_ms_mean": 1000 * self._ack_s / batches,
            }
