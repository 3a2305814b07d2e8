"""Received messages: raw records of a fetch, each of which is decoded when one of its fields is first read.

Many readers look at the body alone. Through columns a poll of a few messages takes many times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.records.properties import TAGS
from raymq.store.records.properties import decode as decode_properties

from .keys import key_of
from .message import INDEX_KEY_SEPARATOR, INDEX_KEYS, SYSTEM_PROPERTIES, Message

_SHORT = struct.Struct(">h")


class _DecodedField:
    """A field of a ReceivedMessage that its first read decodes. Later reads find it in the instance.

    Two threads may decode one message: both store the same values.
    """

    def __init__(self, decode: Callable[[dict[str, Any]], None], *default: Any) -> None:
        """Args: `decode`: sets this field, and perhaps others. `default`: of the constructor, if it has one."""
        self._decode = decode
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, message: Any, owner: type | None = None) -> Any:
        if message is None:
            # `dataclass` asks for the default of the field.
            if self._default:
                return self._default[0]
            raise AttributeError(self._name)
        values: dict[str, Any] = message.__dict__
        self._decode(values)
        return values[self._name]


def _decoded(decode: Callable[[dict[str, Any]], None], *default: Any) -> Any:
    return _DecodedField(decode, *default)


def _decode_record(values: dict[str, Any]) -> None:
    """Set the body and the fields of the record's header. The rest of the record is kept for the other fields."""
    record: bytes | None = values["_record"]
    if record is None:
        return

    header = fmt.HEADER
    header_fields = fmt.HeaderFields._make(header.unpack_from(record))
    if header_fields.sys_flag & fmt.SYS_ANY_HOST_V6:
        born_v6 = bool(header_fields.sys_flag & fmt.SYS_BORN_HOST_V6)
        header = fmt.header_struct(born_v6, bool(header_fields.sys_flag & fmt.SYS_STORE_HOST_V6))
        header_fields = fmt.HeaderFields._make(header.unpack_from(record))

    topic_at = header.size + header_fields.body_length
    body = record[header.size : topic_at]
    if header_fields.magic == fmt.MAGIC_V1:
        topic_bytes, topic_at = record[topic_at], topic_at + 1
    else:
        topic_bytes, topic_at = _SHORT.unpack_from(record, topic_at)[0], topic_at + 2
    topic_end = topic_at + topic_bytes
    (property_bytes,) = _SHORT.unpack_from(record, topic_end)

    values.update(
        topic=record[topic_at:topic_end].decode(),
        body=body,
        queue_id=header_fields.queue_id,
        offset=header_fields.queue_offset,
        store_time_ms=header_fields.store_time_ms,
        born_time_ms=header_fields.born_time_ms,
        _properties=record[topic_end + 2 : topic_end + 2 + property_bytes],
        _place=(header_fields.store_host, header_fields.physical_offset),
    )
    values["_record"] = None


def _decode_properties(values: dict[str, Any]) -> None:
    _decode_record(values)
    properties = decode_properties(values["_properties"])
    words = properties.get(INDEX_KEYS, "")
    values.update(
        key=key_of(properties),
        tag=properties.get(TAGS),
        index_keys=tuple(filter(None, words.split(INDEX_KEY_SEPARATOR))) if words else (),
        properties={n: v for n, v in properties.items() if n not in SYSTEM_PROPERTIES},
    )


def _decode_message_id(values: dict[str, Any]) -> None:
    _decode_record(values)
    store_host, physical_offset = values["_place"]
    values["message_id"] = (store_host + physical_offset.to_bytes(8, "big")).hex().upper()


@dataclass(frozen=True, kw_only=True)
class ReceivedMessage(Message):
    """A message as a consumer returns it.

    Its fields are decoded when one of them is first read: body, topic, offset and times together, then key, tag and
    properties together. Until then it holds its record, a few hundred bytes more than its body.
    """

    shard: int
    topic: str = _decoded(_decode_record)
    body: bytes = _decoded(_decode_record)
    queue_id: int = _decoded(_decode_record)
    #: offset in its queue
    offset: int = _decoded(_decode_record)
    #: when the shard stored it
    store_time_ms: int = _decoded(_decode_record)
    #: when the producer made it, by the producer's clock
    born_time_ms: int = _decoded(_decode_record)
    key: bytes | None = _decoded(_decode_properties, None)
    tag: str | None = _decoded(_decode_properties, None)
    index_keys: tuple[str, ...] = _decoded(_decode_properties, ())
    properties: dict[str, str] = _decoded(_decode_properties)
    #: RocketMQ's offset message id: store host and physical offset
    message_id: str = _decoded(_decode_message_id)

    def __getstate__(self) -> dict[str, Any]:
        """All fields: a pickled message needs no record."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def received_messages(shard: int, records: pa.Array) -> list[ReceivedMessage]:
    """The messages of raw records that `verify_slices` has found whole."""
    new = object.__new__
    found = []
    for record in records.to_pylist():
        message = new(ReceivedMessage)
        # A frozen dataclass sets each field by a call of its own.
        message.__dict__.update(shard=shard, deliver_at_ms=None, _record=record)
        found.append(message)
    return found
