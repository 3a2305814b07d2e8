"""Records of the commit log: encode columns, walk boundaries, decode columns.

This is the name to import; record_check, _encode, _walk and _decode hold the parts.
"""

from __future__ import annotations

from .record_check import PUT_SCHEMA, batch_bytes, check_put
from .record_decode import RECORD_SCHEMA, decode, select
from .record_encode import Prepared, blank, encode_record, prepare
from .record_row import PreparedRow
from .record_walk import MAGICS, Walk, WalkStop, walk

__all__ = [
    "MAGICS",
    "PUT_SCHEMA",
    "RECORD_SCHEMA",
    "Prepared",
    "PreparedRow",
    "Walk",
    "WalkStop",
    "batch_bytes",
    "blank",
    "check_put",
    "decode",
    "encode_record",
    "prepare",
    "select",
    "walk",
]
