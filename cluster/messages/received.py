"""Raw records of a fetch to messages, one by one: through columns a poll of a few messages takes many times as long."""

from __future__ import annotations

import struct

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


def _message(shard: int, data: bytes, at: int) -> ReceivedMessage:
    """The message of the record at a position."""
    header = fmt.HEADER
    sys_flag = int.from_bytes(data[at + fmt.SYS_FLAG_AT : at + fmt.SYS_FLAG_AT + 4], "big")
    if sys_flag & fmt.SYS_ANY_HOST_V6:
        born_v6, store_v6 = sys_flag & fmt.SYS_BORN_HOST_V6, sys_flag & fmt.SYS_STORE_HOST_V6
        header = fmt.header_struct(bool(born_v6), bool(store_v6))
    fields = fmt.HeaderFields._make(header.unpack_from(data, at))

    body_at = at + header.size
    topic_at = body_at + fields.body_length
    body = data[body_at:topic_at]
    if fields.magic == fmt.MAGIC_V1:
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
        queue_id=fields.queue_id,
        offset=fields.queue_offset,
        store_time_ms=fields.store_time_ms,
        born_time_ms=fields.born_time_ms,
        message_id=(fields.store_host + fields.physical_offset.to_bytes(8, "big")).hex().upper(),
    )
    return message
