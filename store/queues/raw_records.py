"""Raw records as a fetch returns them: one binary column, which its reader checks before using it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.records.binary_columns import value_offsets
from raymq.store.records.record_decode import decode
from raymq.store.records.record_walk import RecordFault, first_fault
from raymq.store.records.requests import FetchSlice

_LONG = struct.Struct(">q")


def fault_of(part: FetchSlice) -> RecordFault | None:
    """The first damaged record of an answer; None without one."""
    records: Any = part.records
    if records is None or not len(records):
        return None
    offsets = value_offsets(records).astype(np.int64)
    return first_fault(records.buffers()[2], offsets[:-1], np.diff(offsets))


def records_before(part: FetchSlice, row: int) -> FetchSlice:
    """The answer up to `row`, which is not the first row."""
    records: Any = part.records
    whole = records.slice(0, row)
    following = part.first_offset + row
    if part.next_offset - part.first_offset != len(records):
        # The offsets of a compacted topic have gaps.
        following = _LONG.unpack_from(whole[row - 1].as_py(), fmt.QUEUE_OFFSET_AT)[0] + 1
    return part._replace(records=whole, next_offset=following)


def decode_records(records: pa.Array, *, columns: tuple[str, ...] | None = None) -> pa.RecordBatch:
    """Raw records of a fetch as columns of `RECORD_SCHEMA`: all columns, or the named ones."""
    offsets = value_offsets(records).astype(np.int64)
    return decode(records.buffers()[2], offsets[:-1], np.diff(offsets), columns=columns)
