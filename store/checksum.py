"""Checksums: CRC-32C over log bytes (chain units), CRC-32 over bodies (records)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import require

try:
    # several times faster than zlib: an SSE/PCLMUL or NEON implementation of the same polynomial
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32 as _crc32

try:
    import google_crc32c

    _has_google_crc32c = google_crc32c.implementation == "c"
except ImportError:
    _has_google_crc32c = False

#: RocketMQ stores body CRCs as non-negative ints
BODY_CRC_MASK = 0x7FFFFFFF
#: bodies of this mean size are read in place; below, a copy made by Arrow costs less than a slice.
#: (Copies of large ones cost twenty times the CRC: the allocator gets and returns pages each time.)
SLICED_BODY_BYTES = 512
_ZEROS = bytes(1 << 20)


@lru_cache(maxsize=1)
def _crcmod_function() -> Callable[[bytes, int], int]:
    from crcmod.predefined import mkPredefinedCrcFun

    function: Callable[[bytes, int], int] = mkPredefinedCrcFun("crc-32c")
    return function


def crc32c(data: Any, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of a buffer. `value`: the CRC of the bytes before it."""
    if _has_google_crc32c:
        # Its C code takes bytes and arrays, no memoryview: an array over the same bytes is no copy.
        plain = data if isinstance(data, bytes) else np.frombuffer(data, dtype=np.uint8)
        return int(google_crc32c.extend(value, plain))
    return _crcmod_function()(bytes(memoryview(data)), value)


def crc32c_padded(data: bytes, length: int) -> int:
    """CRC-32C of `data` and the zeros behind it, `length` bytes together."""
    crc, left = crc32c(data), length - len(data)
    while left:
        part = min(left, len(_ZEROS))
        crc = crc32c(memoryview(_ZEROS)[:part], crc)
        left -= part
    return crc


if not _has_google_crc32c:
    warnings.warn(
        "google-crc32c has no C code here: CRC-32C comes from crcmod, maybe as slow as 10 MB/s. "
        "Install the google-crc32c wheel.",
        RuntimeWarning,
        stacklevel=1,
    )


def body_crc(body: Any) -> int:
    """The CRC that a record stores for its body.

    Source: UtilAll#crc32: zlib's CRC-32 with the sign bit cleared; 0 for an empty body.
    """
    return _crc32(body) & BODY_CRC_MASK


def body_crcs(bodies: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """`body_crc` of each value; one C call a value. The array must have no nulls."""
    require(bodies.null_count == 0, "bodies have no nulls", nulls=bodies.null_count)
    count = len(bodies)
    offsets, data = bodies.buffers()[1:]
    if not count or data is None:
        return np.zeros(count, dtype=np.int32)
    edges = np.frombuffer(offsets, dtype=np.int32)[bodies.offset : bodies.offset + count + 1]
    found: Iterator[int]
    sizes = np.diff(edges)
    if sizes[0] and (sizes == sizes[0]).all():
        # The rows of an array cost half of what slices cost.
        values = np.frombuffer(data, dtype=np.uint8)[int(edges[0]) : int(edges[-1])]
        found = map(_crc32, values.reshape(count, -1))
    elif int(edges[-1]) - int(edges[0]) < SLICED_BODY_BYTES * count:
        found = map(_crc32, bodies.to_numpy(zero_copy_only=False))
    else:
        view, ends = memoryview(data), edges.tolist()
        found = (_crc32(view[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True))
    crcs = np.fromiter(found, dtype=np.uint32, count=count)
    return (crcs & BODY_CRC_MASK).astype(np.int32)
