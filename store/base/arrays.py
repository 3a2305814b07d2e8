"""Names of array types, and the count of the first rows that a mask has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
#: rows of several fields
Structs = npt.NDArray[Any]


def leading(mask: Bools) -> int:
    """The number of rows before the first one for which the mask is false."""
    return len(mask) if mask.all() else int(mask.argmin())
