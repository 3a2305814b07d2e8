"""Many small places of a file, read with few calls: neighbours together (design D3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

#: neighbours that are so near are read together
GAP_BYTES = 16 << 10


def read_together(
    read: Callable[[int, int], bytes],
    starts: Int64s,
    ends: Int64s,
    *,
    apart: npt.NDArray[Any] | None = None,
    gap_bytes: int = GAP_BYTES,
) -> tuple[memoryview, Int64s]:
    """The bytes of the ranges [start, end), in one buffer with what stands between neighbours.

    Args: `starts` and `ends` ascend, and there is one at least; `apart`: between which neighbours there is an edge that
    no read may cross. Returns: the buffer, and where each range begins in it.
    """
    split = starts[1:] - ends[:-1] > gap_bytes
    if apart is not None:
        split |= apart
    cuts = np.flatnonzero(split)
    if not len(cuts):
        first = int(starts[0])
        return memoryview(read(first, int(ends[-1]))), starts - first
    lows = np.concatenate(([0], cuts + 1))
    begins, stops = starts[lows], ends[np.concatenate((cuts, [len(ends) - 1]))]
    data = b"".join(map(read, begins.tolist(), stops.tolist()))
    lengths = stops - begins
    shifts = np.cumsum(lengths) - lengths - begins
    counts = np.diff(np.append(lows, len(starts)))
    return memoryview(data), starts + np.repeat(shifts, counts)
