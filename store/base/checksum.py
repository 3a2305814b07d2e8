"""Checksums: CRC-32C over log bytes (chain units), CRC-32 over bodies (records)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import require

try:
    # several times faster than zlib: an SSE/PCLMUL or NEON implementation of the same polynomial
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32 as crc32

try:
    import google_crc32c

    _has_google_crc32c = google_crc32c.implementation == "c"
except ImportError:
    _has_google_crc32c = False

#: RocketMQ stores body CRCs as non-negative ints
BODY_CRC_MASK = 0x7FFFFFFF
#: bodies of this mean size are read in place; for smaller ones a copy made by Arrow costs less than a slice.
#: (Copies of large bodies cost twenty times the CRC, because the allocator gets and returns pages each time.)
SLICED_BODY_BYTES = 512
#: this many ranges of one length and distance, or more, are read as one array
ROWS_MIN = 16
_ZEROS = bytes(1 << 20)


@lru_cache(maxsize=1)
def _crcmod_function() -> Callable[[bytes, int], int]:
    from crcmod.predefined import mkPredefinedCrcFun

    function: Callable[[bytes, int], int] = mkPredefinedCrcFun("crc-32c")
    return function


def crc32c(data: Any, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of a buffer. `value`: the CRC of the bytes before it."""
    if _has_google_crc32c:
        # Its C code takes bytes and arrays but not memoryviews. An array over the same bytes is not a copy.
        plain = data if isinstance(data, bytes) else np.frombuffer(data, dtype=np.uint8)
        return int(google_crc32c.extend(value, plain))
    return _crcmod_function()(bytes(memoryview(data)), value)


def crc32c_padded(data: bytes, length: int) -> int:
    """CRC-32C of `data` followed by zeros, `length` bytes together."""
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


def body_crc(body: object) -> int:
    """The CRC that a record stores for its body.

    Source: UtilAll#crc32: zlib's CRC-32 with the sign bit cleared, and 0 for an empty body.
    """
    return crc32(body) & BODY_CRC_MASK


def body_crcs(bodies: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """`body_crc` of each value, with one C call per value. The array must have no nulls."""
    require(bodies.null_count == 0, "bodies have no nulls", nulls=bodies.null_count)
    count = len(bodies)
    offsets, data = bodies.buffers()[1:]
    if not count or data is None:
        return np.zeros(count, dtype=np.int32)
    edges = np.frombuffer(offsets, dtype=np.int32)[bodies.offset : bodies.offset + count + 1]
    starts, ends = edges[:-1], edges[1:]
    lengths = ends - starts
    if (lengths == lengths[0]).all() or lengths.sum() >= SLICED_BODY_BYTES * count:
        return range_crcs(memoryview(data), starts, ends)
    return _body_crcs_of(bodies.to_numpy(zero_copy_only=False), count)


def range_crcs(
    view: memoryview, starts: npt.NDArray[np.integer[Any]], ends: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int32]:
    """`body_crc` of each range [start, end) of `view`, bytes."""
    return _body_crcs_of(chain.from_iterable(_ranges(view, starts, ends)), len(starts))


def _body_crcs_of(bodies: Iterable[object], count: int) -> npt.NDArray[np.int32]:
    crcs = np.fromiter(map(crc32, bodies), dtype=np.uint32, count=count)
    return (crcs & BODY_CRC_MASK).astype(np.int32)


def _ranges(
    view: memoryview, starts: npt.NDArray[np.integer[Any]], ends: npt.NDArray[np.integer[Any]]
) -> Iterator[Iterable[Any]]:
    """The ranges as buffers. A run of one length and distance becomes rows of an array, which cost half a slice."""
    lengths, steps = ends - starts, starts[1:] - starts[:-1]
    # A run begins where a range differs in length or distance from the one before. The last run ends at the end.
    edge = np.ones(len(starts) + 1, dtype=np.bool_)
    edge[1:-1] = lengths[1:] != lengths[:-1]
    edge[2:-1] |= steps[1:] != steps[:-1]
    edges = np.flatnonzero(edge)
    long = np.flatnonzero(edges[1:] - edges[:-1] >= ROWS_MIN)
    at = 0

    def slices(first: int, last: int) -> Iterable[Any]:
        return map(
            view.__getitem__, map(slice, starts[first:last].tolist(), ends[first:last].tolist())
        )

    for first, last in zip(edges[long].tolist(), edges[long + 1].tolist(), strict=True):
        yield slices(at, first)
        yield np.ndarray(
            (last - first, int(lengths[first])),
            np.uint8,
            buffer=view,
            offset=int(starts[first]),
            strides=(int(steps[first]), 1),
        )
        at = last
    yield slices(at, len(starts))
