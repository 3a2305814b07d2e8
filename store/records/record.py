"""Records of the commit log: encode columns, walk boundaries, decode columns.

Import this name. The parts are in record_check, record_encode, record_walk and record_decode.
"""

from __future__ import annotations

from .record_check import batch_bytes, check_put, wait_store_ok
from .record_decode import RECORD_SCHEMA, decode, select
from .record_encode import EncodedBatch, blank, encode_batch, encode_record
from .record_walk import MAGICS, Walk, WalkStop, walk
from .small_batch import (
    MORE_SCHEMA,
    PUT_SCHEMA,
    SMALL_BYTES_MAX,
    SMALL_ROWS_MAX,
    EncodedSmallBatch,
    SmallBatch,
    small_batch,
)

__all__ = [
    "MAGICS",
    "MORE_SCHEMA",
    "PUT_SCHEMA",
    "RECORD_SCHEMA",
    "SMALL_BYTES_MAX",
    "SMALL_ROWS_MAX",
    "EncodedBatch",
    "EncodedSmallBatch",
    "SmallBatch",
    "Walk",
    "WalkStop",
    "batch_bytes",
    "blank",
    "check_put",
    "decode",
    "encode_record",
    "encode_batch",
    "select",
    "small_batch",
    "wait_store_ok",
    "walk",
]
