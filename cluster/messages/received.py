"""Raw records of a fetch to messages, one by one: through columns a poll of a few messages takes many times as long."""

from __future__ import annotations

import struct
from functools import cache

import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.records.binary_columns import value_offsets
from raymq.store.records.properties import TAGS
from raymq.store.records.properties import decode as decode_properties

from .keys import key_of
from .message import INDEX_KEY_SEPARATOR, INDEX_KEYS, SYSTEM_PROPERTIES, ReceivedMessage

_SHORT = struct.Struct(">h")


def received_messages(shard: int, records: pa.Array) -> list[ReceivedMessage]:
    """The messages of raw records that `verify_slices` has found whole."""
    if not len(records):
        return []
    offsets = value_offsets(records)
    low = int(offsets[0])
    data: bytes = records.buffers()[2].slice(low, int(offsets[-1]) - low).to_pybytes()
    return [_message(shard, data, at) for at in (offsets[:-1] - low).tolist()]


@cache
def _header(born_v6: bool, store_v6: bool) -> struct.Struct:
    """A record's header up to the body; `fmt.HEADER` with hosts of other lengths."""
    born, store = 20 if born_v6 else 8, 20 if store_v6 else 8
    return struct.Struct(f">iIiiiqqiq{born}sq{store}siqi")


def _message(shard: int, data: bytes, at: int) -> ReceivedMessage:
    """The message of the record at a position."""
    header = fmt.HEADER
    sys_flag = int.from_bytes(data[at + fmt.SYS_FLAG_AT : at + fmt.SYS_FLAG_AT + 4], "big")
    if sys_flag & fmt.SYS_ANY_HOST_V6:
        header = _header(
            bool(sys_flag & fmt.SYS_BORN_HOST_V6), bool(sys_flag & fmt.SYS_STORE_HOST_V6)
        )
    fields = header.unpack_from(data, at)
    _, magic, _, queue_id, _, offset, physical_offset, _, born_time_ms, _ = fields[:10]
    store_time_ms, store_host, _, _, body_bytes = fields[10:]

    body_at = at + header.size
    topic_at = body_at + body_bytes
    body = data[body_at:topic_at]
    if magic == fmt.MAGIC_V1:
        topic_bytes, topic_at = data[topic_at], topic_at + 1
    else:
        topic_bytes, topic_at = _SHORT.unpack_from(data, topic_at)[0], topic_at + 2
    topic_end = topic_at + topic_bytes
    properties_at = topic_end + 2
    (property_bytes,) = _SHORT.unpack_from(data, topic_end)
    properties = decode_properties(data[properties_at : properties_at + property_bytes])

    words = properties.get(INDEX_KEYS, "")
    message = object.__new__(ReceivedMessage)
    # A frozen dataclass sets each field by a call of its own.
    message.__dict__.update(
        topic=data[topic_at:topic_end].decode(),
        body=body,
        key=key_of(properties),
        tag=properties.get(TAGS),
        index_keys=tuple(filter(None, words.split(INDEX_KEY_SEPARATOR))) if words else (),
        properties={n: v for n, v in properties.items() if n not in SYSTEM_PROPERTIES},
        deliver_at_ms=None,
        shard=shard,
        queue_id=queue_id,
        offset=offset,
        store_time_ms=store_time_ms,
        born_time_ms=born_time_ms,
        message_id=(store_host + physical_offset.to_bytes(8, "big")).hex().upper(),
    )
    return message
