"""The message model: messages to send, and receipts. Received messages are in received.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.client.arguments import check_text, check_unicode
from raymq.store.base.errors import PropertiesTooLong, Rejected
from raymq.store.base.format import PROPERTIES_MAX_BYTES, QUEUE_OFFSET_AT
from raymq.store.records.dead_letter import ORIGIN_QUEUE
from raymq.store.records.producer_stamp import STAMP_BYTES, STAMP_NAME
from raymq.store.records.properties import TAGS, encode, separators_absent
from raymq.store.records.record_walk import gather

from .codecs import CONTENT_TYPE, codec
from .fields import INDEX_KEYS, NULL_VALUE, property_names
from .keys import key_property

#: the separator of index keys in their property
INDEX_KEY_SEPARATOR = " "

#: property names that users neither see nor set: RayMQ's own, and the names that RocketMQ's clients and brokers set.
#: Source: MessageConst.STRING_HASH_SET of RocketMQ 5.3.3.
_ROCKETMQ = """
    WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET
    BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME
    MSG_REGION TRACE_ON UNIQ_KEY EXTEND_UNIQ_INFO MAX_RECONSUME_TIMES CONSUME_START_TIME
    INNER_NUM INNER_BASE DUP_INFO CHECK_IMMUNITY_TIME_IN_SECONDS
    TRAN_PREPARED_QUEUE_OFFSET __transactionId__ TRANSACTION_CHECK_TIMES INSTANCE_ID
    CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE POP_CK
    POP_CK_OFFSET 1ST_POP_TIME TIMER_DELIVER_MS TIMER_DELAY_SEC TIMER_DELAY_MS
    TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_DEL_UNIQKEY
    DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID CRC32 DELIVERY_TIMESTAMP
"""
#: the property of a null value, encoded
NULL_PROPERTY = f"{NULL_VALUE}\x011\x02".encode()
SYSTEM_PROPERTIES = property_names() | {STAMP_NAME, ORIGIN_QUEUE, *_ROCKETMQ.split()}


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message to send: `producer.send(message)` is `producer.send(topic, body, ...)` as one object.

    Example:
        ```python
        import raymq

        message = raymq.Message(topic="orders", body=b"one espresso", key=b"alice", tag="bar")
        with raymq.connect() as cluster, cluster.producer() as producer:
            cluster.create_topic("orders", queues=4)
            print(producer.send(message).result(timeout=30).offset)
        ```
    """

    topic: str
    #: any bytes, or the output of a codec
    body: bytes
    #: partition and ordering key: messages with one key go to one queue, in order
    key: bytes | None = None
    #: one word that consumers see, and by which readers filter
    tag: str | None = None
    #: RocketMQ's KEYS: words by which the engine finds the message, and the key of a compacted topic
    index_keys: tuple[str, ...] = ()
    #: non-empty names and values without \\x01 and \\x02
    properties: dict[str, str] = field(default_factory=dict)
    #: delivery time in ms since 1970; None: at once
    deliver_at_ms: int | None = None
    #: RocketMQ's delay level in the place of a time, 1 to 18; 0: none
    delay_level: int = 0
    #: RocketMQ's flag: a number of 32 bits that readers see
    flag: int = 0
    #: RocketMQ's sysFlag, the bits that a sender sets: a compressed body and how, several tags
    sys_flag: int = 0
    #: address and port of its first sender; None: those of the producer's connection
    born_host: str | None = None
    #: False: the receipt waits neither for the flush nor for replicas, see `Producer.send`
    wait_store_ok: bool = True

    @property
    def value(self) -> Any:
        """The body, decoded by the codec in property `content-type`, or the bytes if it has no such property."""
        return codec(self.properties.get(CONTENT_TYPE, "bytes")).decode(self.body)


class Receipt(NamedTuple):
    """The proof that a message is stored as the producer's `acks` and the cluster's flush mode promise.

    That of a message with `wait_store_ok=False` says that the leader has it in memory.
    """

    topic: str
    queue_id: int
    shard: int
    #: offset in its queue, or -1 when an earlier try had stored it and its offset is no longer known
    offset: int
    store_time_ms: int
    #: whether an earlier try had stored it
    duplicate: bool


def property_bytes(
    key: bytes | None,
    tag: str | None,
    index_keys: tuple[str, ...],
    properties: Mapping[str, str] | None,
) -> bytes | None:
    """Encode a message's key, index keys and properties as the log holds them, or None when all are missing.

    Raises: Rejected naming the field that cannot be stored.
    """
    parts = encode_properties(key, index_keys, properties)
    if tag is not None:
        if not isinstance(tag, str) or not tag or not separators_absent(tag):
            raise Rejected(
                f"tag {tag!r} is not text, is empty, or has \\x01 or \\x02",
                field="tag",
                limit="text without \\x01, \\x02",
            )
        check_unicode("tag", tag)
    check_properties_size(parts, tag, "key, tag and properties")
    return parts or None


def check_properties_size(properties: bytes, tag: str | None, fields: str) -> None:
    """Check that a message's properties and its tag leave room for the producer's stamp. Raises: PropertiesTooLong."""
    size = len(properties) + STAMP_BYTES
    if tag is not None:
        size += len(tag.encode()) + len(TAGS) + 2
    if size > PROPERTIES_MAX_BYTES:
        raise PropertiesTooLong(
            f"{fields} make {size} bytes, the limit is {PROPERTIES_MAX_BYTES}: put large values into the body",
            field="properties",
            limit=PROPERTIES_MAX_BYTES,
        )


def encode_properties(
    key: bytes | None, index_keys: tuple[str, ...] = (), properties: Mapping[str, str] | None = None
) -> bytes:
    """Encode a key, index keys and user properties as a properties string.

    Raises: Rejected naming the field that cannot be encoded.
    """
    parts = b""
    if key is not None:
        if not isinstance(key, bytes):
            raise Rejected(
                f"key is {type(key).__name__}; give bytes, such as key.encode()",
                field="key",
                limit="bytes",
            )
        parts = key_property(key)
    if index_keys:
        parts += encode({INDEX_KEYS: INDEX_KEY_SEPARATOR.join(_index_keys(index_keys))})
    if properties:
        parts += encode(_user_properties(properties))
    return parts


def queue_offsets(records: pa.Array) -> npt.NDArray[np.int64]:
    """The queue offset of each raw record of a fetch: ascending, with gaps in a compacted topic."""
    if not len(records):
        return np.zeros(0, dtype=np.int64)
    ends = np.frombuffer(records.buffers()[1], dtype=np.int32)
    starts = ends[records.offset : records.offset + len(records)].astype(np.int64)
    found: npt.NDArray[np.int64] = gather(
        records.buffers()[2], starts + QUEUE_OFFSET_AT, np.dtype(">i8")
    )
    return found.astype(np.int64)


def _index_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(keys, (tuple, list)):
        raise Rejected(
            f"index_keys is {keys!r}; give a tuple of texts", field="index_keys", limit="tuple"
        )
    for key in keys:
        check_text("index_keys", key)
        if not key or INDEX_KEY_SEPARATOR in key:
            raise Rejected(
                f"index key {key!r} is empty or has a space, which separates index keys",
                field="index_keys",
                limit="no space",
            )
    return keys


def _user_properties(properties: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(properties, Mapping):
        raise Rejected(
            f"properties is {properties!r}; give a dict of texts", field="properties", limit="dict"
        )

    for name, value in properties.items():
        if name in SYSTEM_PROPERTIES:
            raise Rejected(
                f"property {name} belongs to the system; choose another name",
                field="properties",
                limit="not a system property",
            )
        if not isinstance(name, str) or not isinstance(value, str):
            raise Rejected(
                f"property {name!r} is {type(value).__name__}; names and values are text",
                field="properties",
                limit="str",
            )

    return properties
