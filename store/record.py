"""Records of the commit log: encode columns, walk boundaries, decode columns.

Import this name. The parts are in record_check, record_encode, record_walk and record_decode.
"""

from __future__ import annotations

from .records.record_check import batch_bytes, check_put, wait_store_ok
from .records.record_decode import RECORD_SCHEMA, decode, select
from .records.record_encode import Prepared, blank, encode_record, prepare
from .records.record_row import BATCH_BYTES_MAX, PUT_SCHEMA, PreparedRow, Row, only_row
from .records.record_walk import MAGICS, Walk, WalkStop, walk

__all__ = [
    "BATCH_BYTES_MAX",
    "MAGICS",
    "PUT_SCHEMA",
    "RECORD_SCHEMA",
    "Prepared",
    "PreparedRow",
    "Row",
    "Walk",
    "WalkStop",
    "batch_bytes",
    "blank",
    "check_put",
    "decode",
    "encode_record",
    "only_row",
    "prepare",
    "select",
    "wait_store_ok",
    "walk",
]
