"""Columns of whole numbers as bytes. Ascending offsets become ranges or a bitmap, whichever is shorter.

Offsets begin with their form (1 byte) and their first one (8 bytes). One range has its length (4 bytes) then, several
have their count (4 bytes), the gaps between them and their lengths as columns; a bitmap has its bytes and their count
(4 bytes). A column has the bytes for each number (1 byte), the least one (8 bytes) and the differences to it. All
numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from .reader import PackedReader

#: offsets that one packed column may have. A record of this version has fewer
PACKED_MAX = 1 << 20
#: the highest offset, and the highest number of a lease or of a request
OFFSET_MAX = (1 << 62) - 1

_RANGE, _RANGES, _BITMAP, _EMPTY = range(4)
_WIDTHS = (0, 1, 2, 4, 8)
_HEAD = struct.Struct("<BqI")
_COLUMN = struct.Struct("<Bq")

#: offsets of a queue, ascending, without repetition; or other whole numbers
OffsetColumn = npt.NDArray[np.int64]
NO_OFFSETS: OffsetColumn = np.zeros(0, dtype=np.int64)


def pack_offsets(offsets: OffsetColumn) -> bytes:
    """Ascending offsets without repetition as bytes. Raises: ValueError for others, which could not be read."""
    count = len(offsets)
    if not count:
        return bytes((_EMPTY,))
    first, last = int(offsets[0]), int(offsets[-1])
    steps = np.diff(offsets)
    if first < 0 or last > OFFSET_MAX or (steps < 1).any():
        raise ValueError(f"offsets from {first} to {last} that do not ascend")
    _check_count(count)

    span = last - first + 1
    if span == count:
        return _HEAD.pack(_RANGE, first, count)
    ends = np.flatnonzero(steps != 1)
    starts = np.concatenate((offsets[:1], offsets[ends + 1]))
    stops = np.concatenate((offsets[ends], offsets[-1:])) + 1
    gaps, lengths = starts[1:] - stops[:-1], stops - starts
    ranges = pack_column(gaps) + pack_column(lengths)
    if len(ranges) <= (span + 7) // 8:
        return _HEAD.pack(_RANGES, first, len(starts)) + ranges

    bits = np.zeros(span, dtype=np.bool_)
    bits[offsets - first] = True
    data = np.packbits(bits, bitorder="little").tobytes()
    return _HEAD.pack(_BITMAP, first, len(data)) + data


def read_offsets(reader: PackedReader) -> OffsetColumn:
    """The inverse of `pack_offsets`. Raises: ValueError for other bytes."""
    form = reader.byte()
    if form == _EMPTY:
        return np.zeros(0, dtype=np.int64)
    first, count = reader.signed(), reader.length()
    if not 0 <= first <= 1 << 62:
        raise ValueError(f"offset {first}")

    if form == _RANGE:
        _check_count(count)
        return np.arange(first, first + count, dtype=np.int64)
    if form == _RANGES:
        _check_count(count)
        gaps = read_column(reader, count - 1)
        lengths = read_column(reader, count)
        if (gaps < 1).any() or (lengths < 1).any() or (lengths > PACKED_MAX).any():
            raise ValueError("ranges that do not ascend")
        _check_count(int(lengths.sum()))
        if (gaps > 1 << 62).any() or float(gaps.sum(dtype=np.float64)) > 1 << 62:
            raise ValueError("ranges beyond every offset")
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(gaps + lengths[:-1]))) + first
        shifts = starts - np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)[:-1]))
        offsets = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(shifts, lengths)
        return np.asarray(offsets)
    if form == _BITMAP:
        data = np.frombuffer(reader.take(count), dtype=np.uint8)
        found = np.flatnonzero(np.unpackbits(data, bitorder="little")).astype(np.int64)
        return found + first
    raise ValueError(f"offsets of form {form}")


def _check_count(count: int) -> None:
    if not 0 < count <= PACKED_MAX:
        raise ValueError(f"{count} numbers in one column")


def pack_column(numbers: npt.NDArray[Any]) -> bytes:
    """Whole numbers as bytes; their count is not in it. Raises: ValueError for too many."""
    if not len(numbers):
        return b""
    _check_count(len(numbers))
    least, most = int(numbers.min()), int(numbers.max())
    width = next(each for each in _WIDTHS if most - least < 1 << 8 * each)
    head = _COLUMN.pack(width, least)
    if not width:
        return head
    return head + (numbers.astype(np.int64) - least).astype(f"<u{width}").tobytes()


def read_column(reader: PackedReader, count: int) -> OffsetColumn:
    """The inverse of `pack_column`. Raises: ValueError for other bytes."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    _check_count(count)
    width, least = reader.byte(), reader.signed()
    if width not in _WIDTHS:
        raise ValueError(f"a column of {width} bytes a number")
    if not width:
        return np.full(count, least, dtype=np.int64)
    found = np.frombuffer(reader.take(count * width), dtype=f"<u{width}")
    return found.astype(np.int64) + np.int64(least)
