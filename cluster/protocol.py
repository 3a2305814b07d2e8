"""The words on the wire between clients and shards, and between leaders and followers.

A stream opens with the descriptor command {"op", "cluster_id", "shard"}. Every message carries its
metadata as JSON in app_metadata and its rows as an Arrow batch:

    put        -> {"id","topic","queue","pid","epoch","seq","acks","read"} + PUT_SCHEMA; ids grow,
                  "read" is the id of the last ack read (without it acks may come a little later);
                  or a small single row and its words as bytes, without a batch: see `pack_row`
               <- {"acks": [{"id","first_offset","count","duplicates","store_time_ms",...}
                           or {"id","error"}, ...]}, in the order of the batches
    fetch      -> {"id","topic","offsets":{queue: offset},"max_bytes","max_records","wait_ms"}
               <- {"id","queue","first_offset","next_offset","min_offset","max_offset"}
                  + FETCH_SCHEMA, or {"id","queue","error"}, a queue; then {"id","end":true};
                  or just {"id","error"}
    replicate  frames of replication/wire.py both ways, log bytes beside them

A server that stops says BYE on each stream; the client must then end the stream.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pyarrow as pa

from raymq.store.errors import Rejected
from raymq.store.record import Row

PUT, FETCH, REPLICATE = "put", "fetch", "replicate"

#: rows of a fetch answer: raw RocketMQ records
FETCH_SCHEMA = pa.schema([pa.field("record", pa.binary(), nullable=False)])
#: rows of a replication frame: log bytes
FRAME_SCHEMA = pa.schema([pa.field("bytes", pa.large_binary(), nullable=False)])

AUTHORIZATION = "authorization"

#: the server stops: the whole metadata of its last message; no JSON and no frame begins like it
BYE = b"bye"


def pack(value: dict[str, Any]) -> bytes:
    """Metadata as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack(data: Any) -> dict[str, Any]:
    """Metadata from a buffer. Raises: ValueError when it is no JSON object."""
    if data is None:
        raise ValueError("the message has no metadata")
    value = json.loads(bytes(data))
    if not isinstance(value, dict):
        raise ValueError(f"metadata is a JSON object, not {type(value).__name__}")
    return value


#: kind, flags, queue, id, read, pid, epoch, seq, born time; bytes of topic, tag, properties
_ROW = struct.Struct("<BBiqqQqqqHHI")
_ROW_KIND = b"\x01"
_HAS_PID, _HAS_TAG, _HAS_PROPERTIES, _LEADER_ONLY = 1, 2, 4, 8


def pack_row(meta: dict[str, Any], row: Row) -> bytes:
    """A put of one row: fixed fields, then topic, tag, properties and body.

    An Arrow message of one row costs either side more than all the rest of a put.
    """
    topic = meta["topic"].encode()
    tag = b"" if row.tag is None else row.tag.encode()
    properties = row.properties or b""
    flags = (
        (_HAS_PID if meta["pid"] is not None else 0)
        | (_HAS_TAG if row.tag is not None else 0)
        | (_HAS_PROPERTIES if row.properties is not None else 0)
        | (_LEADER_ONLY if meta["acks"] == "leader" else 0)
    )
    head = _ROW.pack(
        _ROW_KIND[0],
        flags,
        meta["queue"],
        meta["id"],
        meta["read"],
        meta["pid"] or 0,
        meta["epoch"],
        meta["seq"],
        row.born_time_ms,
        len(topic),
        len(tag),
        len(properties),
    )
    return b"".join((head, topic, tag, properties, row.body))


def unpack_row(data: bytes) -> tuple[dict[str, Any], Row] | None:
    """What `pack_row` made; None: it is something else.

    Raises: Rejected when it is damaged.
    """
    if data[:1] != _ROW_KIND:
        return None
    try:
        (
            _,
            flags,
            queue,
            number,
            read,
            pid,
            epoch,
            sequence,
            born,
            topic_bytes,
            tag_bytes,
            rest,
        ) = _ROW.unpack_from(data)
        tag_at = _ROW.size + topic_bytes
        properties_at = tag_at + tag_bytes
        body_at = properties_at + rest
        topic = data[_ROW.size : tag_at].decode()
        tag = data[tag_at:properties_at].decode() if flags & _HAS_TAG else None
    except (struct.error, UnicodeDecodeError) as error:
        raise Rejected(
            f"bad put of a row: {error}", field="metadata", limit="cluster/protocol.py"
        ) from error
    if body_at > len(data):
        raise Rejected(
            f"a put of a row has {len(data)} bytes and tells of {body_at} before its body",
            field="metadata",
            limit="cluster/protocol.py",
        )
    properties = data[properties_at:body_at] if flags & _HAS_PROPERTIES else None
    meta = {
        "id": number,
        "topic": topic,
        "queue": queue,
        "pid": pid if flags & _HAS_PID else None,
        "epoch": epoch,
        "seq": sequence,
        "acks": "leader" if flags & _LEADER_ONLY else "quorum",
        "read": read,
    }
    return meta, Row(data[body_at:], tag, properties, born)


def bearer(token: str) -> bytes:
    """The value of the authorization header."""
    return b"Bearer " + token.encode()


def frame_batch(body: Any) -> pa.RecordBatch:
    """Log bytes as a batch of one row, without a copy."""
    buffer = body if isinstance(body, pa.Buffer) else pa.py_buffer(body)
    offsets = pa.py_buffer((0).to_bytes(8, "little") + buffer.size.to_bytes(8, "little"))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, buffer])
    return pa.record_batch([column], schema=FRAME_SCHEMA)


def frame_body(batch: pa.RecordBatch | None) -> memoryview | None:
    """The bytes of a frame batch, without a copy; None when it has none."""
    if batch is None or batch.num_rows == 0:
        return None
    return memoryview(batch.column(0)[0].as_buffer())
