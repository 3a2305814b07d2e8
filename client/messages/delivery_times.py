"""Delivery times: which are taken for a mistake, and those of many rows as properties of messages for later."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.client.times import EARLIEST_MS
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.delay.delivery_time import DELIVER_MS, out_time_ms
from raymq.store.delay.timer_rule import OUT_MS
from raymq.store.records.binary_columns import null_where

#: unit of a timestamp -> so many of it are a second, or a millisecond
_PER_S = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}
#: no timer reaches so far: later times become this one, which the shard can read and refuses
_MS_MAX = 1000 << 40


def encode_times(times: pa.Array) -> pa.Array:
    """The encoded properties of the delivery times; null for null.

    A time that is over has them, too: its message waits for less than a second. So a repeated write makes the same
    rows, whenever it runs.

    The shard refuses a time that is further away than its timers reach.

    Raises: Rejected, with field and row: no timestamp with a time zone, or a time before 2001.
    """
    if not is_time(times.type):
        raise Rejected(
            f"column deliver_at has type {times.type}, expected a timestamp with a time zone; cast it",
            field="deliver_at",
            limit="timestamp with a time zone",
            found=str(times.type),
        )
    values: Int64s = times.cast(pa.int64()).fill_null(0).to_numpy()
    earliest = EARLIEST_MS // 1000 * _PER_S[times.type.unit]
    is_early = (values < earliest) & times.is_valid().to_numpy(zero_copy_only=False)
    if is_early.any():
        row = int(np.argmax(is_early))
        message = (
            f"row {row}: deliver_at is before 2001, as a time in seconds is that was taken for milliseconds; use null "
            "for a row that readers get at once"
        )
        raise Rejected(message, field="deliver_at", limit="2001 or later", row=row)

    deliver_ms = _milliseconds(values, times.type.unit)
    out_ms = out_time_ms(deliver_ms)
    found = pc.binary_join_element_wise(
        pa.scalar(f"{DELIVER_MS}\x01".encode()),
        _as_text(deliver_ms),
        pa.scalar(f"\x02{OUT_MS}\x01".encode()),
        _as_text(out_ms),
        pa.scalar(b"\x02"),
        b"",
    )
    return null_where(times.is_null(), found)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column of this type has delivery times."""
    return bool(pa.types.is_timestamp(kind) and kind.tz)


def _milliseconds(values: Int64s, unit: str) -> Int64s:
    """The first full ms at or after each time."""
    if unit == "s":
        return np.minimum(values, _MS_MAX // 1000) * 1000
    per_ms = _PER_MS[unit]
    return np.minimum(values // per_ms + (values % per_ms > 0), _MS_MAX)


def _as_text(values: Int64s) -> pa.Array:
    return pa.array(values).cast(pa.string()).cast(pa.binary())
