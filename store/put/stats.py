"""Counters of one store: puts, reads, times of appends, and rates per second.

Source: StoreStatsService, RocketMQ 5.3.3. Its put time ends with the flush. RayMQ's ends with the append, because the
put latency of `actors/leader/put_acks.py` includes the wait for flush and replica.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict, deque
from typing import Any, NamedTuple

#: upper ends of the latency buckets 1 to 11, ms. Bucket 0 is for 0 ms, the last one for 10 s and more
BUCKET_ENDS_MS = (10, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000)
BUCKETS = len(BUCKET_ENDS_MS) + 2
BUCKET_NAMES = (
    "<=0ms",
    "0-10ms",
    "10-50ms",
    "50-100ms",
    "100-200ms",
    "200-500ms",
    "500ms-1s",
    "1-2s",
    "2-3s",
    "3-4s",
    "4-5s",
    "5-10s",
    ">10s",
)
SAMPLE_MS = 1_000
#: rates are means over this many seconds
RATES_S = (10, 60, 600)


def bucket_of(took_ms: int) -> int:
    """The number of the latency bucket of a put."""
    return 0 if took_ms <= 0 else 1 + bisect_right(BUCKET_ENDS_MS, took_ms)


class Sample(NamedTuple):
    """The totals at one time."""

    at_ms: int
    puts: int
    transferred: int


class Rates(NamedTuple):
    """Means over a time, per second, rounded."""

    duration_ms: int
    puts: int
    transferred: int


class StoreStats:
    """One store's counters since it was opened. Callers: any thread; `note_put`: with the put lock."""

    def __init__(self) -> None:
        #: topic -> [messages, bytes of records]
        self._topics: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        #: messages put
        self.puts = 0
        #: puts that were refused or failed
        self.put_failed = 0
        #: puts (batches count once) by the time that their append took, see BUCKET_NAMES
        self.put_buckets = [0] * BUCKETS
        #: longest append under the put lock
        self.put_max_ms = 0
        #: reads with messages, reads without a message, and messages read
        self.get_found = 0
        self.get_missed = 0
        self.get_transferred = 0

        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=RATES_S[-1] + 1)

    def note_put(self, topic: str, count: int, size: int, took_ms: int) -> None:
        """Count one appended batch of `count` messages and `size` bytes of records."""
        entry = self._topics[topic]
        entry[0] += count
        entry[1] += size
        self.puts += count
        self.put_buckets[bucket_of(took_ms) if took_ms else 0] += 1
        if took_ms > self.put_max_ms:
            self.put_max_ms = took_ms

    def note_failed(self) -> None:
        """Count one put that was refused or failed."""
        with self._lock:
            self.put_failed += 1

    def note_get(self, count: int) -> None:
        """Count one read of `count` messages."""
        with self._lock:
            if count:
                self.get_found += 1
                self.get_transferred += count
            else:
                self.get_missed += 1

    def sample(self, now_ms: int) -> None:
        """Remember the totals, at most once a second, for `rates`. Args: `now_ms`: monotonic."""
        with self._lock:
            if not self._samples or now_ms - self._samples[-1].at_ms >= SAMPLE_MS:
                self._samples.append(Sample(now_ms, self.puts, self.get_transferred))

    def rates(self, seconds: int) -> Rates | None:
        """Rates over the last `seconds`, or over a shorter known time; None with fewer than two samples."""
        with self._lock:
            samples = list(self._samples)
        if len(samples) < 2:
            return None
        last = samples[-1]
        first = next(s for s in samples if s.at_ms >= last.at_ms - seconds * 1_000)
        duration_ms = last.at_ms - first.at_ms
        if not duration_ms:
            return None
        return Rates(
            duration_ms,
            puts=round((last.puts - first.puts) * 1_000 / duration_ms),
            transferred=round((last.transferred - first.transferred) * 1_000 / duration_ms),
        )

    def as_status(self) -> dict[str, Any]:
        """For status displays: JSON-able."""
        rates = {seconds: self.rates(seconds) for seconds in RATES_S}
        return {
            "puts": self.puts,
            "put_failed": self.put_failed,
            "put_max_ms": self.put_max_ms,
            "put_time": dict(zip(BUCKET_NAMES, self.put_buckets, strict=True)),
            "get_found": self.get_found,
            "get_missed": self.get_missed,
            "get_transferred": self.get_transferred,
            "put_tps": {f"{s}s": rate.puts for s, rate in rates.items() if rate},
            "get_transferred_tps": {f"{s}s": rate.transferred for s, rate in rates.items() if rate},
            "topics": {
                name: {"messages": entry[0], "bytes": entry[1]}
                for name, entry in sorted(self._topics.copy().items())
            },
        }
