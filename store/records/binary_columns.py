"""Binary and string columns as bytes: making them in one go, and the offsets of their values."""

from __future__ import annotations

import struct
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Int64s

_OFFSET = struct.Struct("=i")
_OFFSET_MAX = 2**31 - 1


def value_offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    """The n + 1 value offsets in `value_bytes`."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, dtype=np.int32)
    return np.frombuffer(buffer, dtype=np.int32)[array.offset : array.offset + len(array) + 1]


def value_bytes(array: pa.Array) -> npt.NDArray[np.uint8]:
    """The bytes of all values. Bytes of null slots and of other slices may be among them."""
    buffer = array.buffers()[2]
    return np.frombuffer(b"" if buffer is None else buffer, dtype=np.uint8)


def joined_values(array: pa.Array) -> bytes:
    """A copy of the bytes from the first value to the last. Bytes of null slots may be among them."""
    low, high = _edges(array)
    if low == high:
        return b""
    data: bytes = array.buffers()[2].slice(low, high - low).to_pybytes()
    return data


def joined_length(array: pa.Array) -> int:
    """The length of `joined_values`."""
    low, high = _edges(array)
    return high - low


def null_where(mask: pa.Array, values: pa.Array) -> pa.Array:
    """The values of a binary or string column, but null in the rows of the mask.

    `pc.if_else` with a null scalar gives the bytes of other rows for a slice, before Arrow 24 (its issue 49410).
    """
    return pc.if_else(mask, pa.nulls(len(values), values.type), values)


def _edges(array: pa.Array) -> tuple[int, int]:
    """The first offset and the last. Without numpy, whose first call after a large copy takes 12 us."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return 0, 0
    first = array.offset
    (low,), (high,) = (
        _OFFSET.unpack_from(buffer, _OFFSET.size * row) for row in (first, first + len(array))
    )
    return low, high


def ranges(data: npt.NDArray[np.uint8], starts: Int64s, ends: Int64s) -> pa.BinaryArray:
    """The ranges [start, end) of bytes as binary values. Args: `starts`, `ends`: ascending, one after the other."""
    edges = np.stack([starts, ends], axis=1).ravel()
    offsets = edges.astype(np.int32) if len(edges) else np.zeros(1, dtype=np.int32)
    # Every second piece is between two ranges.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    pieces = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
    return pieces.take(pa.array(np.arange(0, len(edges), 2)))


def value_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value; 0 for null, whose slot may span bytes."""
    offsets = value_offsets(array)
    lengths = np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def one_value(array: pa.Array) -> bytes | None:
    """The value that all rows of a binary or string array have; None if they differ, or one is null.

    Most clients give all messages of a batch the same properties: then one comparison is enough.
    """
    if array.null_count or not len(array):
        return None
    offsets = value_offsets(array)
    low, width = int(offsets[0]), int(offsets[1]) - int(offsets[0])
    # The sum alone excludes most columns.
    if not width or int(offsets[-1]) - low != width * len(array):
        return None
    if not ((offsets[1:] - offsets[:-1]) == width).all():
        return None
    data = joined_values(array)
    first = data[:width]
    return first if data == first * len(array) else None


def binary_array(values: list[bytes]) -> pa.BinaryArray:
    """A binary column of these values, none of them null: bytes, or buffers of single bytes.

    Like `pa.array`, which doubles its buffer until the values fit: in fresh memory that takes twice as long.
    Raises: pa.ArrowInvalid if they have 2 GiB or more, TypeError for anything else.
    """
    ends = accumulate(map(len, values), initial=0)
    offsets = np.fromiter(ends, dtype=np.int64, count=len(values) + 1)
    if offsets[-1] > _OFFSET_MAX:
        raise pa.ArrowInvalid(f"{offsets[-1]} bytes of values; a column may have {_OFFSET_MAX}")
    data = b"".join(values)
    if len(data) != offsets[-1]:
        # Buffers of larger items have another length than size.
        raise TypeError("values of a binary column are bytes")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)
