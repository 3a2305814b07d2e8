"""The one message model (design D10), and its way into and out of columns."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from raymq.store import properties as codec
from raymq.store import record
from raymq.store.errors import Rejected
from raymq.store.format import offset_message_id
from raymq.store.producer_stamp import STAMP_BYTES

#: a key that is text stands in RocketMQ's sharding key; any other goes base64 into our own property
KEY, KEY_BASE64 = "__SHARDINGKEY", "__KEY_B64"
KEYS, TAGS, CONTENT_TYPE = "KEYS", "TAGS", "content-type"
#: properties that users neither set nor see
HIDDEN = frozenset({"_P", KEY, KEY_BASE64, KEYS, TAGS, "UNIQ_KEY", "WAIT", "CLUSTER", "MSG_REGION", "TRACE_ON"})


@dataclass(frozen=True, kw_only=True)
class Message:
    """What is sent."""

    topic: str
    body: bytes
    #: partition and ordering key: equal keys share a queue
    key: bytes | None = None
    tag: str | None = None
    #: RocketMQ's KEYS: what the message can be found by; no spaces inside
    index_keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    deliver_at_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReceivedMessage(Message):
    """What is read: the message and where it stands."""

    shard: int
    queue_id: int
    offset: int
    store_time_ms: int
    born_time_ms: int
    message_id: str


@dataclass(frozen=True)
class Receipt:
    """The promise for this message was kept."""

    topic: str
    shard: int
    queue_id: int
    #: -1: stored earlier, by a send so old that its offset is no longer remembered
    offset: int
    store_time_ms: int


def encode_properties(
    key: bytes | None,
    index_keys: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
) -> bytes:
    """The properties string of a message without stamp and tag.

    Raises: Rejected for a reserved name, a separator in a name or value, a space in an index key.
    """
    found: dict[str, str] = {}
    if key is not None:
        name, value = key_property(key)
        found[name] = value
    if index_keys:
        for index_key in index_keys:
            if not index_key or " " in index_key:
                raise Rejected(
                    f"index key {index_key!r} is empty or holds a space",
                    field="index_keys",
                    limit="no spaces",
                )
        found[KEYS] = " ".join(index_keys)
    for name, value in (properties or {}).items():
        if name in HIDDEN:
            raise Rejected(
                f"property {name!r} is reserved; choose another name",
                field="properties",
                limit="not a reserved name",
            )
        found[name] = value
    return codec.encode(found) if found else b""


def key_property(key: bytes) -> tuple[str, str]:
    """Name and value of the property that holds a key."""
    try:
        text = key.decode()
        if text and "\x01" not in text and "\x02" not in text:
            return KEY, text
    except UnicodeDecodeError:
        pass
    # "=" so that an empty key has a value too: RocketMQ drops empty ones.
    return KEY_BASE64, "=" + base64.b64encode(key).decode()


def key_of(properties: Mapping[str, str]) -> bytes | None:
    """The key of a message by its properties."""
    if KEY in properties:
        return properties[KEY].encode()
    if KEY_BASE64 in properties:
        return base64.b64decode(properties[KEY_BASE64].removeprefix("="))
    return None


def put_batch(
    bodies: Sequence[bytes] | pa.Array,
    *,
    tags: Any = None,
    properties: Any = None,
    born_time_ms: int | Any = 0,
) -> pa.RecordBatch:
    """A PUT_SCHEMA batch of columns or sequences."""
    count = len(bodies)
    born = [born_time_ms] * count if isinstance(born_time_ms, int) else born_time_ms
    return pa.record_batch(
        [
            bodies if isinstance(bodies, pa.Array) else pa.array(bodies, pa.binary()),
            _column(tags, count, pa.string()),
            _column(properties, count, pa.binary()),
            born if isinstance(born, pa.Array) else pa.array(born, pa.int64()),
        ],
        schema=record.PUT_SCHEMA,
    )


def _column(values: Any, count: int, kind: pa.DataType) -> pa.Array:
    if values is None:
        return pa.nulls(count, kind)
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def decode_records(records: pa.Array) -> pa.RecordBatch:
    """Raw records as columns (record.RECORD_SCHEMA)."""
    count = len(records)
    offsets = np.frombuffer(records.buffers()[1], dtype=np.int32)[
        records.offset : records.offset + count + 1
    ].astype(np.int64)
    return record.decode(records.buffers()[2], offsets[:-1], np.diff(offsets))


def messages(records: pa.Array, shard: int) -> list[ReceivedMessage]:
    """Raw records as message objects."""
    found: list[ReceivedMessage] = []
    for row in decode_records(records).to_pylist():
        properties = codec.decode(row["properties"])
        host, _, port = row["store_host"].rpartition(":")
        found.append(
            ReceivedMessage(
                topic=row["topic"],
                body=row["body"],
                key=key_of(properties),
                tag=properties.get(TAGS),
                index_keys=tuple(properties.get(KEYS, "").split()),
                properties={n: v for n, v in properties.items() if n not in HIDDEN},
                shard=shard,
                queue_id=row["queue_id"],
                offset=row["queue_offset"],
                store_time_ms=row["store_time_ms"],
                born_time_ms=row["born_time_ms"],
                message_id=offset_message_id(host.strip("[]"), int(port), row["physical_offset"]),
            )
        )
    return found


__all__ = [
    "STAMP_BYTES",
    "Message",
    "Receipt",
    "ReceivedMessage",
    "decode_records",
    "encode_properties",
    "messages",
    "put_batch",
]
