"""Checks and encodes single messages, before they have a place in a batch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from itertools import count
from numbers import Integral
from typing import Any

from raymq.client.messages.codecs import CONTENT_TYPE, codec
from raymq.client.messages.message import (
    NULL_PROPERTY,
    Message,
    check_properties_size,
    property_bytes,
)
from raymq.client.messages.received import ReceivedMessage
from raymq.client.messages.record_head import (
    WAITS_NOT,
    Head,
    delay_level_of,
    delay_property,
    head_of,
)
from raymq.client.times import EARLIEST_MS
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.config.delay_levels import DEFAULT_LEVEL_COUNT
from raymq.store.config.promise import Acks
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delivery_time import check_deliver_at, out_time_ms
from raymq.store.records.keys import UNIQ_KEY_NAME
from raymq.store.records.properties import PROPERTY_SEPARATOR, REAL_QUEUE, REAL_TOPIC, encode

from .producer_config import ProducerConfig, check_acks

#: counted for each message beside its body and properties, so that empty bodies fill buffers too
MESSAGE_BYTES = 128
#: bytes of the properties around topic and queue id
REAL_BYTES = 40
#: default limits; the shard checks again with its own options
_CONFIG = StoreConfig()


@dataclass(eq=False, slots=True)
class EncodedMessage:
    """A message that passed all checks of its sender."""

    topic: str
    queue_id: int | None
    key: bytes | None
    body: bytes
    tag: str | None
    properties: bytes | None
    #: bytes of the byte limit
    size: int
    acks: Acks
    #: the properties that say when it is to be delivered; None: at once
    later: bytes | None = None
    #: the body is empty then
    is_null: bool = False
    #: the delay level that `later` names; 0: it names a time
    delay_level: int = 0
    #: None: all defaults
    head: Head | None = None
    #: the message as the hooks left it; None: the producer has no hooks
    hooked: Message | None = None


class MessageEncoder:
    """Encodes with the codec and limits of a producer. Threads: any."""

    def __init__(
        self, config: ProducerConfig, clock: Clock, *, delay_levels: int = DEFAULT_LEVEL_COUNT
    ) -> None:
        """Args: `delay_levels`: how many the cluster has. Raises: Rejected for an unknown codec."""
        self._codec = codec(config.codec)
        self._is_raw = self._codec.name == "bytes"
        self._raw = codec("bytes")
        self._acks = config.acks
        self._max_message_bytes = config.max_message_bytes
        self._delay_levels = delay_levels
        self._clock = clock
        #: unique keys of timers: 32 hex digits, as RocketMQ's
        self._unique_prefix = secrets.token_hex(10).upper()
        self._unique_numbers = count()

    def encode(
        self,
        topic: str | Message,
        body: object = None,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        delay_level: int = 0,
        flag: int = 0,
        sys_flag: int = 0,
        born_host: str | None = None,
        wait_store_ok: bool = True,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> EncodedMessage:
        """Never blocks; see `Producer.send`. Raises: Rejected for a message that cannot be stored."""
        if type(topic) is not str and isinstance(topic, Message):
            message = topic
            topic, body, key, tag = message.topic, message.body, message.key, message.tag
            index_keys, properties = message.index_keys, message.properties
            deliver_at_ms, delay_level = message.deliver_at_ms, message.delay_level
            flag, sys_flag, wait_store_ok = message.flag, message.sys_flag, message.wait_store_ok
            if not isinstance(message, ReceivedMessage):
                born_host = message.born_host
            elif message.is_null:
                # The body is empty then. Who sends a received message again is a sender of its own.
                body = None
        elif not self._is_raw:
            body = self._codec.encode(body)
            properties = {**(properties or {}), CONTENT_TYPE: self._codec.name}
        is_null = body is None
        if not isinstance(body, bytes):
            body = b"" if is_null else self._raw.encode(body)

        size = len(body)
        if size > self._max_message_bytes:
            self.check_size(size)
        if acks is not None:
            check_acks(acks)

        size += MESSAGE_BYTES
        encoded = later = None
        if key is not None or tag is not None or index_keys or properties:
            encoded = property_bytes(key, tag, index_keys, properties)
            size += 0 if encoded is None else len(encoded)
        if is_null:
            encoded = (encoded or b"") + NULL_PROPERTY
            check_properties_size(encoded, tag, "key, tag and properties")
            size += len(NULL_PROPERTY)
        if deliver_at_ms is not None:
            later = timer_properties(deliver_at_ms, self._clock.now_ms())
            if later is not None:
                later += self._unique_key()
                size += len(later) + len(topic) + REAL_BYTES

        made = EncodedMessage(
            topic, queue_id, key, body, tag, encoded, size, acks or self._acks, later, is_null
        )
        # Compared with each default, because other values that count as false are wrong.
        is_plain = wait_store_ok is True and delay_level == flag == sys_flag == 0
        if not is_plain or born_host is not None:
            if wait_store_ok is not True:
                _wait_not(made, wait_store_ok, acks)
            if delay_level != 0:
                _delay(made, delay_level, deliver_at_ms, self._delay_levels)
            made.head = head_of(flag, sys_flag, born_host)
        return made

    def message_of(
        self,
        topic: str | Message,
        body: object = None,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        delay_level: int = 0,
        flag: int = 0,
        sys_flag: int = 0,
        born_host: str | None = None,
        wait_store_ok: bool = True,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> tuple[Message, int | None, Acks | None]:
        """The arguments of `encode` as a Message that `encode` takes, with `queue_id` and `acks`.

        Raises: Rejected for a body that the codec does not take.
        """
        if isinstance(topic, ReceivedMessage):
            # As `encode` does: a sender of its own, and a null value is one again.
            received = topic
            names = [each.name for each in fields(Message) if each.name != "born_host"]
            given: dict[str, Any] = {name: getattr(received, name) for name in names}
            if received.is_null:
                given["body"] = None
            return Message(**given), queue_id, acks
        if isinstance(topic, Message):
            return topic, queue_id, acks

        if not self._is_raw:
            body = self._codec.encode(body)
            properties = {**(properties or {}), CONTENT_TYPE: self._codec.name}
        given = {"body": body, "properties": {} if properties is None else properties}
        message = Message(
            topic=topic,
            key=key,
            tag=tag,
            index_keys=index_keys,
            deliver_at_ms=deliver_at_ms,
            delay_level=delay_level,
            flag=flag,
            sys_flag=sys_flag,
            born_host=born_host,
            wait_store_ok=wait_store_ok,
            **given,
        )
        return message, queue_id, acks

    def _unique_key(self) -> bytes:
        """The property by which a timer can be cancelled. Source: MessageClientIDSetter#createUniqID."""
        key = f"{self._unique_prefix}{next(self._unique_numbers):012X}"
        return UNIQ_KEY_NAME + key.encode() + PROPERTY_SEPARATOR

    def check_size(self, size: int) -> None:
        """Raises: Rejected for a body that is too large."""
        limit, most = self._max_message_bytes, _CONFIG.max_message_bytes
        if size > limit:
            raised = "the producer"
            if size > most:
                raised += f", and of the cluster (raymq config set, up to 32 MiB), which takes {most} bytes by default"
            raise Rejected(
                f"the body has {size} bytes, the limit is {limit}: split it, compress it, store it elsewhere and send "
                f"its place, or raise max_message_bytes of {raised}",
                field="body",
                limit=limit,
            )


def _wait_not(message: EncodedMessage, wait_store_ok: object, acks: Acks | None) -> None:
    """Let the receipt of a message come early. Args: `acks`: of the call.

    Raises: Rejected if the call names any, or if `wait_store_ok` is not False.

    Source: CommitLog#handleDiskFlushAndHA: without WAIT the answer waits for neither. A call that names `acks` gets no
    weaker receipt than it asks for; those of the producer are the default, which the message overrides.
    """
    if wait_store_ok is not False:
        raise Rejected(
            f"wait_store_ok is {wait_store_ok!r}; give True, or False for an early receipt",
            field="wait_store_ok",
            limit="True or False",
            found=repr(wait_store_ok),
        )
    if acks is not None:
        raise Rejected(
            f"the message has wait_store_ok=False, and the call asks for acks={acks!r}: a receipt cannot be both early "
            "and as durable; leave one of them out",
            field="acks",
            limit="absent with wait_store_ok=False",
            found=acks,
        )
    message.properties = (message.properties or b"") + WAITS_NOT
    message.size += len(WAITS_NOT)
    check_properties_size(message.properties, message.tag, "key, tag and properties")


def _delay(
    message: EncodedMessage, delay_level: int, deliver_at_ms: int | None, levels: int
) -> None:
    """Give a message a delay level. Args: `levels`: of the cluster. Raises: Rejected, also with a delivery time."""
    if deliver_at_ms is not None:
        raise Rejected(
            f"the message has delay_level {delay_level!r} and deliver_at_ms; give one of them",
            field="delay_level",
            limit="without deliver_at_ms",
            found=delay_level,
        )
    message.delay_level = delay_level_of(delay_level, levels)
    message.later = delay_property(message.delay_level)
    message.size += len(message.later) + len(message.topic) + REAL_BYTES


def timer_properties(deliver_at_ms: int, now_ms: int) -> bytes | None:
    """The properties of the delivery time; None for a time in the past, which means delivery at once.

    Raises: Rejected for a value that is not a time, a time before 2001, or one beyond the reach of timers.
    """
    if isinstance(deliver_at_ms, bool) or not isinstance(deliver_at_ms, Integral):
        raise Rejected(
            f"deliver_at_ms is {deliver_at_ms!r}; give ms since 1970 as an int",
            field="deliver_at_ms",
            limit="int",
        )
    deliver_at_ms = int(deliver_at_ms)
    if deliver_at_ms < EARLIEST_MS:
        raise Rejected(
            f"deliver_at_ms is {deliver_at_ms}, a time before 2001: give milliseconds since 1970, which is "
            "int(time.time() * 1000) now, not seconds; leave it out for a message that readers get at once",
            field="deliver_at_ms",
            limit=EARLIEST_MS,
        )
    if deliver_at_ms <= now_ms:
        return None
    check_deliver_at(deliver_at_ms, now_ms, _CONFIG)
    out = out_time_ms(deliver_at_ms)
    return encode({"TIMER_DELIVER_MS": str(deliver_at_ms), "TIMER_OUT_MS": str(out)})


def waiting_properties(message: EncodedMessage, queue_id: int, later: bytes) -> bytes:
    """All properties of a message in the topic where it waits. Raises: Rejected when they are too long."""
    real = encode({REAL_TOPIC: message.topic, REAL_QUEUE: str(queue_id)})
    text = (message.properties or b"") + later + real
    check_properties_size(text, message.tag, "key, tag, properties and delivery time")
    return text
