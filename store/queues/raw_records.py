"""Raw records as a fetch answers them: one binary column, which its reader looks through before it uses it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from raymq.store import format as fmt
from raymq.store.records.record_walk import RecordFault, first_fault
from raymq.store.requests import FetchSlice

_LONG = struct.Struct(">q")


def fault_of(part: FetchSlice) -> RecordFault | None:
    """The first damaged record of an answer; None without one."""
    records: Any = part.records
    if records is None or not len(records):
        return None
    count = len(records)
    edges: Any = np.frombuffer(records.buffers()[1], dtype=np.int32)
    edges = edges[records.offset : records.offset + count + 1].astype(np.int64)
    return first_fault(records.buffers()[2], edges[:-1], edges[1:] - edges[:-1])


def before(part: FetchSlice, row: int) -> FetchSlice:
    """The answer up to a row, which is not the first."""
    records: Any = part.records
    whole = records.slice(0, row)
    following = part.first_offset + row
    if part.next_offset - part.first_offset != len(records):
        # Of a compacted topic there are gaps.
        following = _LONG.unpack_from(whole[row - 1].as_py(), fmt.QUEUE_OFFSET_AT)[0] + 1
    return part._replace(records=whole, next_offset=following)
