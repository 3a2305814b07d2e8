"""The streams between clients and shards, and between leaders and followers, over Arrow Flight.

A stream opens with the descriptor command {"op", "cluster_id", "shard"}. Every message carries its metadata as JSON in
app_metadata and its rows as an Arrow batch:

    put        -> a message of actors/api/puts.py
               <- acks of puts.py
    fetch      -> "id" and the fields of actors/api/fetches.py
               <- per queue "id", "end" and the head of fetches.py, with FETCH_SCHEMA unless it is an error. "end" is
                  true in the last message of an answer. Without a queue {"id","end":true} or {"id","error"}.
                  Few records travel without an Arrow batch: the size of the JSON in 4 bytes, the JSON with "rows",
                  rows + 1 offsets of 4 bytes, little endian, and the records
               Instead of a fetch {"id", "lease": a request of actors/api/leases.py}
               <- "id" and the head of leases.py, with FETCH_SCHEMA as above if it has records
               Or {"id", "settle": arguments of the operation settle}
               <- {"id", "result"} or {"id", "error"}
    replicate  frames of raymq.replication.wire in both directions: the size of the header in 4 bytes, the header, and
                  up to INLINE_BYTES_MAX log bytes. More log bytes come as FRAME_SCHEMA

A server that stops sends GOAWAY on each stream. The client must then end the stream.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.store.base.errors import Rejected

if TYPE_CHECKING:
    from typing_extensions import Buffer

PUT, FETCH, REPLICATE = "put", "fetch", "replicate"

#: rows of a fetch answer: raw RocketMQ records
FETCH_SCHEMA = pa.schema([pa.field("record", pa.binary(), nullable=False)])
#: rows of a replication frame: log bytes
FRAME_SCHEMA = pa.schema([pa.field("bytes", pa.large_binary(), nullable=False)])

#: log bytes that travel without an Arrow batch, which costs both sides as much as the rest of a small frame
INLINE_BYTES_MAX = 32 << 10
#: so many records of a fetch, or fewer, travel without one
INLINE_ROWS_MAX = 64
_HEADER_SIZE = struct.Struct(">I")
#: an offset of a record
_EDGE = struct.Struct("<i")
_EDGE_BYTES = _EDGE.size

AUTHORIZATION = "authorization"

#: the server stops: the whole metadata of its last message. Neither JSON nor a frame begins like it
GOAWAY = b"bye"


def _plain(value: object) -> int:
    """An integer of another type, such as numpy's, as JSON takes it. Raises: Rejected for anything else."""
    if isinstance(value, Integral):
        return int(value)
    raise Rejected(
        f"{value!r} is {type(value).__name__}, which no call takes; give numbers and texts",
        field="arguments",
        limit="numbers and texts",
    )


#: one for all calls: with `separators`, `json.dumps` makes a new one for each
_JSON = json.JSONEncoder(separators=(",", ":"), default=_plain)


def pack(value: Mapping[str, object]) -> bytes:
    """Metadata as compact JSON."""
    return _JSON.encode(value).encode()


def unpack(data: Any) -> dict[str, Any]:
    """Metadata from a buffer. Raises: ValueError when it is not a JSON object."""
    if data is None:
        raise ValueError("the message has no metadata")
    try:
        value = json.loads(str(data, "utf-8"))
    except RecursionError:
        raise ValueError("the metadata is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"metadata is a JSON object, not {type(value).__name__}")
    return value


def bearer(token: str) -> bytes:
    """The value of the authorization header."""
    return b"Bearer " + token.encode()


def pack_frame(header: bytes, body: Any = None) -> tuple[bytes, pa.RecordBatch | None]:
    """A frame as metadata and batch. Args: `body`: a buffer of log bytes, or None."""
    head = _HEADER_SIZE.pack(len(header)) + header
    if body is None:
        return head, None
    if memoryview(body).nbytes <= INLINE_BYTES_MAX:
        return b"".join((head, body)), None
    return head, frame_batch(body)


def unpack_frame(metadata: Any, batch: pa.RecordBatch | None) -> tuple[bytes, memoryview | None]:
    """The header and the log bytes of a frame. Raises: ValueError for another message."""
    data = bytes(metadata or b"")
    if len(data) < _HEADER_SIZE.size:
        raise ValueError("the message has no frame")
    begin = _HEADER_SIZE.size
    end = begin + _HEADER_SIZE.unpack_from(data)[0]
    if end > len(data):
        raise ValueError(f"the header of a frame has {len(data) - begin} bytes of {end - begin}")
    header = data[begin:end]
    if end == len(data):
        return header, frame_body(batch)
    return header, memoryview(data)[end:]


def pack_records(head: dict[str, object], records: pa.Array) -> tuple[bytes, pa.RecordBatch | None]:
    """The records of one queue as metadata and batch."""
    rows = len(records)
    if rows <= INLINE_ROWS_MAX and not records.offset:
        _, edges, data = records.buffers()
        edges = memoryview(edges)[: _EDGE_BYTES * (rows + 1)]
        begin, end = _EDGE.unpack_from(edges)[0], _EDGE.unpack_from(edges, _EDGE_BYTES * rows)[0]
        if not begin and end <= INLINE_BYTES_MAX:
            json_head = pack({**head, "rows": rows})
            size = _HEADER_SIZE.pack(len(json_head))
            return b"".join((size, json_head, edges, memoryview(data)[:end])), None
    return pack(head), pa.record_batch([records], schema=FETCH_SCHEMA)


def unpack_records(
    metadata: pa.Buffer | None, batch: pa.RecordBatch | None
) -> tuple[dict[str, Any], pa.Array | None]:
    """A message of a fetch's answer: its JSON, and its records or None. Raises: ValueError for another message."""
    if metadata is None or not metadata.size or memoryview(metadata)[0]:
        # The first byte of JSON is a brace. The first byte of a size is 0, because no head has 16 MiB.
        return unpack(metadata), None if batch is None else batch.column(0)

    begin = _HEADER_SIZE.size
    if metadata.size < begin:
        raise ValueError("the message has no records")
    edges_at = begin + _HEADER_SIZE.unpack_from(metadata)[0]
    head = unpack(memoryview(metadata)[begin:edges_at])
    rows = head["rows"]
    if type(rows) is not int or rows < 0:
        raise ValueError(f"a message cannot hold {rows!r} records")
    data_at = edges_at + _EDGE_BYTES * (rows + 1)
    if data_at > metadata.size:
        raise ValueError(f"a message of {metadata.size} bytes cannot hold {rows} records")

    # A copy, because Arrow needs it aligned.
    edges = array("i", memoryview(metadata)[edges_at:data_at].tobytes())
    data = metadata.slice(data_at)
    if edges[0] or edges[-1] != data.size or list(edges) != sorted(edges):
        raise ValueError("the offsets of the records are wrong")
    return head, pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(edges), data])


def frame_batch(body: Buffer) -> pa.RecordBatch:
    """Log bytes as a batch of one row, without a copy."""
    buffer = body if isinstance(body, pa.Buffer) else pa.py_buffer(body)
    offsets = pa.py_buffer((0).to_bytes(8, "little") + buffer.size.to_bytes(8, "little"))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
    return pa.record_batch([column], schema=FRAME_SCHEMA)


def frame_body(batch: pa.RecordBatch | None) -> memoryview | None:
    """The bytes of a frame batch, without a copy, or None when it has none.

    Raises: ValueError for another batch: its offsets came over the network.
    """
    if batch is None or batch.num_rows == 0:
        return None
    if batch.num_rows > 1 or batch.schema != FRAME_SCHEMA:
        raise ValueError(f"a frame has one row of bytes, not {batch.num_rows} of {batch.schema}")
    batch.validate()
    return memoryview(batch.column(0)[0].as_buffer())
