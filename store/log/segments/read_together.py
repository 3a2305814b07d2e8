"""Many small ranges of a file, read with few calls: neighbours together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.base.arrays import Int64s

#: neighbours that are this close together are read in one call
GAP_BYTES = 16 << 10


#: buffers of this size or more are in Arrow's memory, whose pages are used again
LARGE_BYTES = 64 << 10


def read_together(
    read: Callable[[int, int], bytes],
    read_into: Callable[[memoryview, int], None],
    starts: Int64s,
    ends: Int64s,
    *,
    apart: npt.NDArray[Any] | None = None,
    gap_bytes: int = GAP_BYTES,
) -> tuple[memoryview, Int64s]:
    """The bytes of the ranges [start, end), in one buffer, with the bytes between neighbours.

    Args: `starts`, `ends`: ascending, at least one. `apart`: a mask of the neighbours between which no read may cross.
    Returns: the buffer, and the start of each range in it.
    """
    split = starts[1:] - ends[:-1] > gap_bytes
    if apart is not None:
        split |= apart
    cuts = np.flatnonzero(split)

    if not len(cuts):
        first, last = int(starts[0]), int(ends[-1])
        if last - first < LARGE_BYTES:
            return memoryview(read(first, last)), starts - first
        target = memoryview(pa.allocate_buffer(last - first)).cast("B")
        read_into(target, first)
        return target, starts - first

    first_rows = np.concatenate(([0], cuts + 1))
    last_rows = np.concatenate((cuts, [len(ends) - 1]))
    begins = starts[first_rows]
    stops = ends[last_rows]
    lengths = stops - begins
    target_starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())

    if total < LARGE_BYTES:
        data = memoryview(b"".join(map(read, begins.tolist(), stops.tolist())))
    else:
        data = memoryview(pa.allocate_buffer(total)).cast("B")
        for begin, target_start, length in zip(
            begins.tolist(), target_starts.tolist(), lengths.tolist(), strict=True
        ):
            read_into(data[target_start : target_start + length], begin)

    return data, starts + np.repeat(target_starts - begins, last_rows - first_rows + 1)
