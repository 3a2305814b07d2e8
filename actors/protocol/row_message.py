"""A put of one small row as plain bytes: an Arrow message of one row would cost more than the rest of the put."""

from __future__ import annotations

import struct
from typing import Any

from raymq.store.errors import Rejected
from raymq.store.promise import ACKS
from raymq.store.record import Row

#: kind, flags, queue, id, read, pid, epoch, seq, born time; bytes of topic, tag, properties
_ROW = struct.Struct("<BBiqqQqqqHHI")
_KIND = 1
_ROW_KIND = bytes([_KIND])
_HAS_PID, _HAS_TAG, _HAS_PROPERTIES = 1, 2, 4
#: the flags hold the ack mode as its index in ACKS
_ACKS_SHIFT = 3


def pack_row(meta: dict[str, Any], row: Row) -> bytes:
    """A put of one row: fixed fields, then topic, tag, properties and body. Args: `meta`: as in flight_messages.py."""
    topic = meta["topic"].encode()
    tag = b"" if row.tag is None else row.tag.encode()
    properties = row.properties or b""

    flags = ACKS.index(meta["acks"]) << _ACKS_SHIFT
    if meta["pid"] is not None:
        flags |= _HAS_PID
    if row.tag is not None:
        flags |= _HAS_TAG
    if row.properties is not None:
        flags |= _HAS_PROPERTIES

    queue, number, read = meta["queue"], meta["id"], meta["read"]
    pid, epoch, seq = meta["pid"] or 0, meta["epoch"], meta["seq"]
    topic_bytes, tag_bytes, rest = len(topic), len(tag), len(properties)
    born = row.born_time_ms

    head = _ROW.pack(
        _KIND, flags, queue, number, read, pid, epoch, seq, born, topic_bytes, tag_bytes, rest
    )
    return b"".join((head, topic, tag, properties, row.body))


def unpack_row(data: bytes) -> tuple[dict[str, Any], Row] | None:
    """The inverse of `pack_row`, or None for another message. Raises: Rejected when it is damaged."""
    if data[:1] != _ROW_KIND:
        return None

    try:
        fields = _ROW.unpack_from(data)
        _, flags, queue, number, read, pid, epoch, seq, born, topic_bytes, tag_bytes, rest = fields
        tag_at = _ROW.size + topic_bytes
        properties_at = tag_at + tag_bytes
        body_at = properties_at + rest
        topic = data[_ROW.size : tag_at].decode()
        tag = data[tag_at:properties_at].decode() if flags & _HAS_TAG else None
        acks = ACKS[flags >> _ACKS_SHIFT]
        if body_at > len(data):
            raise ValueError(f"it has {len(data)} bytes, its fields before the body {body_at}")
    except (struct.error, ValueError, IndexError) as error:
        raise Rejected(
            f"bad put of a row: {error}", field="metadata", limit="raymq.actors.protocol"
        ) from error

    properties = data[properties_at:body_at] if flags & _HAS_PROPERTIES else None
    meta = {
        "id": number,
        "topic": topic,
        "queue": queue,
        "pid": pid if flags & _HAS_PID else None,
        "epoch": epoch,
        "seq": seq,
        "acks": acks,
        "read": read,
    }

    return meta, Row(data[body_at:], tag, properties, born)
