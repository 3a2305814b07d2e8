"""Rows of numbers as columns in a SNAPSHOT record. A column has the differences to its least number, packed narrowly.

A header has (name, bytes per number, least number) of each column. The bytes follow in that order, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

#: most bytes of a header, about
_HEADER_BYTES = 600
#: bytes per number; 0: the column has one number, the least
_WIDTHS = (0, 1, 2, 4, 8)
_UINT64_MAX = (1 << 64) - 1


def split(
    rows: npt.NDArray[Any], part_bytes_max: int, name_bytes: npt.NDArray[np.int64] | None = None
) -> Iterator[npt.NDArray[Any]]:
    """Rows in parts of at most about `part_bytes_max` bytes each. Args: `name_bytes`: bytes of the
    name of each queue, which a part has once."""
    room = part_bytes_max - _HEADER_BYTES
    most = max(1, room // rows.dtype.itemsize)
    while len(rows):
        part = rows[:most]
        while name_bytes is not None and len(part) > 1:
            names = int(name_bytes[np.unique(part["queue"])].sum())
            if len(part) * rows.dtype.itemsize + names <= room:
                break
            part = part[: len(part) // 2]
        yield part
        rows = rows[len(part) :]


def pack(kind: str, rows: npt.NDArray[Any]) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of some rows, at least one."""
    columns: list[tuple[str, int, int]] = []
    parts: list[bytes] = []
    for name in rows.dtype.names or ():
        column = rows[name]
        least, most = int(column.min()), int(column.max())
        width = next(width for width in _WIDTHS if most - least < 1 << 8 * width)
        differences = column.astype(np.uint64) - np.uint64(least & _UINT64_MAX)
        if width:
            parts.append(differences.astype(f"<u{width}").tobytes())
        columns.append((name, width, least))
    return {"t": kind, "count": len(rows), "columns": columns}, b"".join(parts)


def unpack(row: dict[str, Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The rows of a header with its bytes as "data". Raises: ValueError, LookupError, TypeError for other values."""
    count, data = int(row["count"]), row.get("data", b"")
    if count > max(1, len(data)):
        raise ValueError(f"{count} rows in {len(data)} bytes")

    rows = np.zeros(count, dtype=dtype)
    at = 0
    for name, width, least in row["columns"]:
        if width not in _WIDTHS:
            raise ValueError(f"a column of {width!r} bytes a number")
        differences = np.zeros(count, dtype=np.uint64)
        if width:
            differences += np.frombuffer(data, dtype=f"<u{width}", count=count, offset=at)
        at += count * width
        if name in (dtype.names or ()):
            # A newer version may have written more columns.
            column = differences + np.uint64(least & _UINT64_MAX)
            rows[name] = column.astype(rows[name].dtype)

    if at != len(data):
        raise ValueError(f"{len(data)} bytes of columns, expected {at}")
    return rows
