"""The words on the wire between clients and shards, and between leaders and followers.

A stream opens with a descriptor command {"op", "cluster_id", "shard"}; every message carries its metadata as JSON in
app_metadata and its rows as an Arrow batch.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

PUT, FETCH, REPLICATE = "put", "fetch", "replicate"

#: rows of a fetch answer: raw RocketMQ records
FETCH_SCHEMA = pa.schema([pa.field("record", pa.binary(), nullable=False)])
#: rows of a replication frame: log bytes
FRAME_SCHEMA = pa.schema([pa.field("bytes", pa.large_binary(), nullable=False)])

AUTHORIZATION = "authorization"


def pack(value: dict[str, Any]) -> bytes:
    """Metadata as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack(data: Any) -> dict[str, Any]:
    """Metadata from a buffer."""
    value: dict[str, Any] = json.loads(bytes(data))
    return value


def bearer(token: str) -> bytes:
    """The value of the authorization header."""
    return b"Bearer " + token.encode()


def frame_batch(body: Any) -> pa.RecordBatch:
    """Log bytes as a batch of one row, without a copy."""
    buffer = body if isinstance(body, pa.Buffer) else pa.py_buffer(body)
    offsets = pa.py_buffer(int(0).to_bytes(8, "little") + buffer.size.to_bytes(8, "little"))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
    return pa.record_batch([column], schema=FRAME_SCHEMA)


def frame_body(batch: pa.RecordBatch | None) -> memoryview | None:
    """The bytes of a frame batch, without a copy."""
    if batch is None or batch.num_rows == 0:
        return None
    value: pa.Buffer = batch.column(0)[0].as_buffer()
    return memoryview(value)
