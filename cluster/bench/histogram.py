"""A histogram of latencies with three significant digits, filled with columns and merged over workers.

Source: HdrHistogram's layout (Gil Tene): buckets whose width doubles, each cut into equal parts. The
package `hdrhistogram` takes one value per Python call and ships compiled code. A bench worker has
arrays of up to a batch of values, so this is numpy over the same layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import require

#: values below have a slot of their own. Above, a slot is at most value / 1024 wide (3 digits)
SUB_BUCKETS = 2048
_HALF = SUB_BUCKETS // 2
_HALF_BITS = 10
#: the largest value, in the unit of the values: more than an hour of microseconds
VALUE_MAX = (1 << 33) - 1
SLOTS = (33 - _HALF_BITS) * _HALF + _HALF

#: the percentiles of reports
PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99, 100.0)


class Histogram:
    """Counts of values from 0 to VALUE_MAX (larger ones count as that, negative ones as 0).

    Values are whole numbers of any one unit. The benchmark's are microseconds. A percentile is the
    largest value of its slot, so it is never too small and at most 0.1 % too large. Not thread-safe.
    """

    def __init__(self) -> None:
        self._counts: Int64s = np.zeros(SLOTS, dtype=np.int64)
        #: the largest value, exactly
        self.max = 0
        #: sum of all values, exactly
        self.sum = 0

    @property
    def count(self) -> int:
        """How many values."""
        return int(self._counts.sum())

    @property
    def mean(self) -> float:
        """The mean, 0.0 without values."""
        count = self.count
        return self.sum / count if count else 0.0

    def record(self, values: npt.ArrayLike) -> None:
        """Add a column of values."""
        found = np.clip(np.asarray(values, dtype=np.int64), 0, VALUE_MAX)
        if not len(found):
            return
        np.add.at(self._counts, _slots(found), 1)
        self.max = max(self.max, int(found.max()))
        self.sum += int(found.sum())

    def record_repeated(self, value: int, count: int) -> None:
        """Add one value `count` times, for the messages of a batch that was acknowledged as one."""
        value = min(max(int(value), 0), VALUE_MAX)
        self._counts[_slots(np.array([value], dtype=np.int64))[0]] += count
        self.max = max(self.max, value) if count else self.max
        self.sum += value * count

    def merge(self, other: Histogram) -> None:
        """Add all of another's values."""
        self._counts += other._counts
        self.max = max(self.max, other.max)
        self.sum += other.sum

    def percentile(self, percent: float) -> int:
        """The least value that at least `percent` percent of all do not exceed, or 0 without values."""
        require(0.0 <= percent <= 100.0, "a percentile is from 0 to 100", percent=percent)
        return self.percentiles((percent,))[0]

    def percentiles(self, percents: tuple[float, ...] = PERCENTILES) -> list[int]:
        """Several percentiles in one walk."""
        total = np.cumsum(self._counts)
        count = int(total[-1])
        if not count:
            return [0] * len(percents)
        # The product of a percentage and a count is not exact: 99.9 % of 1000 must be 999.
        ranks = np.ceil(np.array(percents) / 100.0 * count - 1e-6).astype(np.int64)
        slots = np.searchsorted(total, np.clip(ranks, 1, count), side="left")
        return [min(_highest(int(slot)), self.max) for slot in slots]

    def curve(self) -> list[tuple[float, int]]:
        """(percent, value) of the percentile plot: evenly in the number of nines, to the last value."""
        count = self.count
        if not count:
            return []
        nines = np.arange(0.0, np.log10(count), 0.05)
        percents = [*(100.0 * (1.0 - 10.0**-nines)).tolist(), 100.0]
        return list(zip(percents, self.percentiles(tuple(percents)), strict=True))

    def summary_ms(self) -> dict[str, object]:
        """Count, mean and percentiles of microseconds, in milliseconds."""
        return {
            "count": self.count,
            "mean_ms": round(self.mean / 1000, 4),
            **{
                "max_ms" if percent == 100.0 else f"p{percent:g}_ms": value / 1000
                for percent, value in zip(PERCENTILES, self.percentiles(), strict=True)
            },
        }

    def __getstate__(self) -> tuple[object, ...]:
        # Sparse: one is sent by every worker at every tick.
        slots = np.flatnonzero(self._counts)
        return slots.astype(np.int32), self._counts[slots], self.max, self.sum

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        slots, counts, self.max, self.sum = state
        self._counts = np.zeros(SLOTS, dtype=np.int64)
        self._counts[slots] = counts


def _slots(values: Int64s) -> Int64s:
    """The slot of each value: its leading 11 bits, and how far they were shifted."""
    exponents = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    shifts = np.maximum(exponents - (_HALF_BITS + 1), 0)
    slots: Int64s = shifts * _HALF + (values >> shifts)
    return slots


def _highest(slot: int) -> int:
    """The largest value of a slot."""
    shift = max(slot // _HALF - 1, 0)
    return ((slot - shift * _HALF + 1) << shift) - 1
