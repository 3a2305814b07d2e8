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

from .compressed_body import inflate_or_keep
from .fields import INDEX_KEYS, NULL_VALUE
from .keys import key_of
from .message import INDEX_KEY_SEPARATOR, SYSTEM_PROPERTIES, Message

_SHORT = struct.Struct(">h")
_SYS_FLAG = fmt.HeaderFields._fields.index("sys_flag")


class _DecodedField:
    """A field of a ReceivedMessage that its first read decodes. Later reads find it in the instance.

    Two threads may decode one message: both store the same values.
    """

    def __init__(self, decode: Callable[[dict[str, Any]], object], *default: Any) -> None:
        """Args: `decode`: sets this field, and perhaps others. `default`: of the constructor, if it has one."""
        self._decode = decode
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, message: object, owner: type | None = None) -> object:
        if message is None:
            # `dataclass` asks for the default of the field.
            if self._default:
                return self._default[0]
            raise AttributeError(self._name)
        values: dict[str, Any] = message.__dict__
        self._decode(values)
        return values[self._name]


def _decoded(decode: Callable[[dict[str, object]], object], *default: object) -> Any:
    return _DecodedField(decode, *default)


def _decode_record(values: dict[str, Any]) -> None:
    """Set the body and the fields of the record's header. The rest of the record is kept for the other fields."""
    record: bytes | None = values["_record"]
    if record is None:
        return

    header = fmt.HEADER
    fields = header.unpack_from(record)
    if fields[_SYS_FLAG] & fmt.SYS_ANY_HOST_V6:
        born_v6 = bool(fields[_SYS_FLAG] & fmt.SYS_BORN_HOST_V6)
        header = fmt.header_struct(born_v6, bool(fields[_SYS_FLAG] & fmt.SYS_STORE_HOST_V6))
        fields = header.unpack_from(record)
    (
        _,
        magic,
        _,
        queue_id,
        flag,
        offset,
        physical_offset,
        bits,
        born,
        sender,
        stored,
        host,
        _,
        _,
        size,
    ) = fields

    topic_at = header.size + size
    body = record[header.size : topic_at]
    if bits & fmt.SYS_COMPRESSED:
        body, bits = inflate_or_keep(body, bits)
    values["body"] = body
    if magic == fmt.MAGIC_V1:
        topic_bytes, topic_at = record[topic_at], topic_at + 1
    else:
        topic_bytes, topic_at = _SHORT.unpack_from(record, topic_at)[0], topic_at + 2
    topic_end = topic_at + topic_bytes
    values["topic"] = record[topic_at:topic_end].decode()
    # The record ends with its properties. Their length comes before them.
    values["_properties"] = record[topic_end + 2 :]
    values["queue_id"] = queue_id
    values["offset"] = offset
    values["store_time_ms"] = stored
    values["born_time_ms"] = born
    values["_rest"] = flag, bits, sender, host, physical_offset
    values["_record"] = None


def _decode_key_and_tag(values: dict[str, Any]) -> dict[str, str]:
    """Set key and tag. Returns: all properties."""
    _decode_record(values)
    properties = decode_properties(values["_properties"])
    values["key"] = key_of(properties)
    values["tag"] = properties.get(TAGS)
    return properties


def _decode_properties(values: dict[str, object]) -> None:
    properties = _decode_key_and_tag(values)
    words = properties.get(INDEX_KEYS, "")
    values["index_keys"] = tuple(filter(None, words.split(INDEX_KEY_SEPARATOR))) if words else ()
    values["is_null"] = NULL_VALUE in properties and not values["body"]
    values["properties"] = {n: v for n, v in properties.items() if n not in SYSTEM_PROPERTIES}


def _decode_message_id(values: dict[str, Any]) -> None:
    _decode_record(values)
    *_, store_host, physical_offset = values["_rest"]
    values["message_id"] = (store_host + physical_offset.to_bytes(8, "big")).hex().upper()


def _decode_head(values: dict[str, Any]) -> None:
    _decode_record(values)
    flag, bits, sender, *_ = values["_rest"]
    values["flag"] = flag
    values["sys_flag"] = bits & fmt.SYS_OF_SENDER
    values["born_host"] = fmt.format_host(sender)


@dataclass(frozen=True, kw_only=True)
class ReceivedMessage(Message):
    """A message as a consumer returns it.

    Its fields are decoded when one of them is first read: body, topic, offset and times together, key and tag together,
    index keys and properties together, flags and born host together. Until then it holds its record, a few hundred
    bytes more than its body.
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
    key: bytes | None = _decoded(_decode_key_and_tag, None)
    tag: str | None = _decoded(_decode_key_and_tag, None)
    index_keys: tuple[str, ...] = _decoded(_decode_properties, ())
    properties: dict[str, str] = _decoded(_decode_properties)
    flag: int = _decoded(_decode_head, 0)
    sys_flag: int = _decoded(_decode_head, 0)
    #: address and port of the sender
    born_host: str | None = _decoded(_decode_head, None)
    #: whether the value is null, and not empty bytes: `body` is empty in both cases
    is_null: bool = _decoded(_decode_properties, False)
    #: RocketMQ's offset message id: store host and physical offset
    message_id: str = _decoded(_decode_message_id)

    @property
    def value(self) -> Any:
        """As of a `Message`; None for a null value."""
        return None if self.is_null else super().value

    def __getstate__(self) -> dict[str, object]:
        """All fields: a pickled message needs no record."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def received_messages(shard: int, records: pa.Array) -> list[ReceivedMessage]:
    """The messages of raw records that `verify_slices` has found whole."""
    new = object.__new__
    found = []
    for record in records.to_pylist():
        message = new(ReceivedMessage)
        # A frozen dataclass sets each field by a call of its own.
        values = message.__dict__
        values["shard"] = shard
        values["_record"] = record
        found.append(message)
    return found
