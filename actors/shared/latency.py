"""Latencies as a few counts: one addition per event, and processes can share them.

The buckets are powers of two of a microsecond, so the bucket of a value is the number of its bits.
"""

from __future__ import annotations

from typing import NamedTuple

#: the first bucket ends at 2**5 = 32 microseconds, the last one that ends at 2**24 = 16.8 seconds
_FIRST_BITS, _LAST_BITS = 5, 24
#: the end of each bucket, seconds. One more bucket has no end
BOUNDS_S: tuple[float, ...] = tuple(2**bits / 1e6 for bits in range(_FIRST_BITS, _LAST_BITS + 1))
#: counts of all buckets, then the sum of all values in microseconds
FIELDS = len(BOUNDS_S) + 2
_SUM = FIELDS - 1


class Latencies(NamedTuple):
    """The counts so far."""

    #: per bucket, not cumulative. The last one is for all values above BOUNDS_S
    counts: tuple[int, ...]
    sum_s: float

    @property
    def total(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def quantile_s(self, share: float) -> float | None:
        """The end of the bucket that holds the quantile: at most twice its value. None without values.

        Args: `share`: (0, 1]. Values above the last bound are reported as that bound.
        """
        left = share * self.total
        if not left:
            return None
        for count, bound in zip(self.counts, BOUNDS_S, strict=False):
            left -= count
            if left <= 0:
                return bound
        return BOUNDS_S[-1]


NO_LATENCIES = Latencies((0,) * (FIELDS - 1), 0.0)


class LatencyCounter:
    """Counts into `words`, a list of its own or memory that another process reads. Callers: one at a time."""

    def __init__(self, words: memoryview | None = None) -> None:
        self._words: list[int] | memoryview = [0] * FIELDS if words is None else words

    def add(self, seconds: float) -> None:
        """Count one value."""
        micros = int(seconds * 1e6)
        if micros < 0:
            micros = 0
        bits = micros.bit_length()
        words = self._words
        if bits <= _FIRST_BITS:
            words[0] += 1
        elif bits > _LAST_BITS:
            words[_SUM - 1] += 1
        else:
            words[bits - _FIRST_BITS] += 1
        words[_SUM] += micros

    def read(self) -> Latencies:
        """The counts so far. Callers: any thread. A value may be in the counts and not yet in the sum."""
        words = self._words
        return Latencies(tuple(words[at] for at in range(_SUM)), words[_SUM] / 1e6)

    def clear(self) -> None:
        """Count from 0."""
        for word in range(FIELDS):
            self._words[word] = 0
