"""How a producer's messages were batched: counters that `Producer.statistics` shows."""

from __future__ import annotations

import threading

from .batch_future import BatchFuture


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

    def record(self, batch: BatchFuture, now: float, *, failed: bool) -> None:
        """Count a batch that was answered at `now`, seconds of the monotonic clock."""
        with self._lock:
            self._batches += 1
            self._messages += batch.rows
            self._failed_messages += batch.rows if failed else 0
            self._bytes += batch.size
            self._queue_s += batch.closed - batch.begun
            self._ack_s += now - batch.closed

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
