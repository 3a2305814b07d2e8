"""Puts in RocketMQ's form: messages with any fields, answered by a PutStatus.

Each put makes RocketMQ's checks in its order, calls the hooks, appends once and awaits the promise. This form is for
callers with one message at a time, such as a gateway or tools. Columns are put by `MessageStore.put`.
Source: DefaultMessageStore#asyncPutMessage and #asyncPutMessages, HookUtils, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from raymq.store.base import format as fmt
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.status import PutStatus
from raymq.store.delay.delivery_time import delay_level
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.put_errors import error_of, status_of
from raymq.store.put.put_hooks import PutHook
from raymq.store.records.key_check import check_key
from raymq.store.records.properties import DELAY, INNER_NUM, REAL_TOPIC, WAIT, decode
from raymq.store.records.requests import AppendedRows
from raymq.store.state.topics import is_system_topic

logger = logging.getLogger("raymq.store")

#: bytes that a record may have besides its body (MessageExtEncoder)
RECORD_EXTRA_BYTES_MAX = 64 * 1024
#: sysFlag of a record that holds a whole batch. Only topics with a BatchCQ may have one, and RayMQ has no such topic
INNER_BATCH_FLAG = 0x80


#: fields of a record that are numbers, and their least and largest values
_INT32, _INT64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
_NUMBERS = {
    "queue_id": (0, _INT32[1]),
    "flag": _INT32,
    "sys_flag": _INT32,
    "born_time_ms": _INT64,
    "reconsume_times": _INT32,
    "prepared_transaction_offset": _INT64,
}


class AppendResult(NamedTuple):
    """The offsets of a message, or of the first one of a batch. Source: AppendMessageResult."""

    #: physical offset of the record, and bytes of all records
    wrote_offset: int
    wrote_bytes: int
    #: the id of each message, in order
    message_ids: tuple[str, ...]
    store_time_ms: int
    #: queue offset of the first message
    logics_offset: int
    #: number of messages
    message_count: int


class PutResult(NamedTuple):
    """The result of a put. `append` is set for every stored message, even if the promise is not kept."""

    status: PutStatus
    append: AppendResult | None = None
    #: why it is not PUT_OK, as text
    error: Exception | None = None


class MessagePut:
    """Puts of single messages and of batches of one queue. Callers: any thread."""

    def __init__(
        self, store: MessageStore, await_promise: Callable[[AppendedRows], object]
    ) -> None:
        """Args: `await_promise`: waits until the promise of an append is kept, or raises DeliveryUnknown."""
        self._store = store
        self._await_promise = await_promise
        self._config = store.config

    def put(self, messages: tuple[InnerMessage, ...], *, is_batch: bool) -> PutResult:
        """Store one message, or a batch: records of one queue that follow each other in one file.

        A crash may leave only the first messages of a batch, as in RocketMQ. Acknowledged batches stay whole.
        Returns: the result, also of a refused put. Raises nothing.
        """
        hooks = self._store.hooks
        try:
            self._store.put_path.check_serving()
            if is_batch:
                check_batch(messages)
            else:
                check_message(messages[0])
            for message in messages:
                self._check_key(message)
            for hook in hooks:
                messages = tuple(map(hook.before_put, messages))
            if is_batch:
                check_batch(messages)
            self._check_sizes(messages)
        except (RayMQError, OSError) as error:
            result = self._refused(error)
        else:
            result = self._append(messages)

        for message in messages:
            _run_after_hooks(hooks, message, result)
        return result

    def _refused(self, error: Exception) -> PutResult:
        self._store.stats.note_failed()
        return PutResult(status_of(error), None, error)

    def _check_key(self, message: InnerMessage) -> None:
        """Refuse a message without KEYS for a compacted topic, even if it is delivered there after a delay."""
        topics = self._store.state.topics
        text, topic = message.properties_text, message.topic
        properties = message.properties if text is None else decode(text)
        if is_system_topic(topic):
            topic = properties.get(REAL_TOPIC, "")
        if topic in topics and topics[topic].compacted:
            check_key(topic, properties)

    def _check_sizes(self, messages: tuple[InnerMessage, ...]) -> None:
        limit = self._config.max_message_bytes
        total = sum(len(message.body) for message in messages)
        if total > limit:
            raise error_of(
                PutStatus.MESSAGE_ILLEGAL,
                f"the body has {total} bytes, the limit is {limit} (max_message_bytes)",
                field="body",
                limit=limit,
            )

    def _append(self, messages: tuple[InnerMessage, ...]) -> PutResult:
        try:
            appended = self._store.inner_put.put_unit(
                messages, record_bytes_max=self._config.max_message_bytes + RECORD_EXTRA_BYTES_MAX
            )
        except (RayMQError, OSError) as error:
            return self._refused(error)

        first = appended[0]
        host = self._store.log.store_host
        stored = AppendResult(
            first.physical_offset,
            first.end_offset - first.physical_offset,
            tuple(fmt.offset_message_id(*host, rows.physical_offset) for rows in appended),
            first.store_time_ms,
            first.first_offset,
            len(appended),
        )

        if all(wait_store_ok(message.properties) for message in messages):
            try:
                self._await_promise(appended[-1])
            except (RayMQError, OSError) as error:
                return PutResult(status_of(error), stored, error)

        return PutResult(PutStatus.PUT_OK, stored)


def wait_store_ok(properties: Mapping[str, str]) -> bool:
    """Whether a message's answer waits for the flush and the replicas.

    Source: Message#isWaitStoreMsgOK, which takes all but "true" for false.
    """
    return properties.get(WAIT, "true").lower() == "true"


def check_message(message: InnerMessage) -> None:
    """Refuse what RocketMQ refuses before any hook runs. Raises: Rejected with MESSAGE_ILLEGAL.

    Source: HookUtils#checkBeforePutMessage, #checkInnerBatch.
    """
    _check_kinds(message)

    length = len(message.topic)
    is_retry = message.topic.startswith(fmt.RETRY_PREFIX)
    limit = fmt.TOPIC_MAX_CHARS if is_retry else fmt.TOPIC_V1_MAX_CHARS
    if not 0 < length <= limit:
        raise _illegal(f"the topic has {length} bytes; it may have 1 to {limit}", "topic", limit)

    try:
        fmt.check_topic_name(message.topic)
    except Rejected as error:
        # In RocketMQ client and broker check it. Here the topic's name becomes the name of a directory.
        raise _illegal(error.message, "topic", error.limit) from error

    if INNER_NUM in message.properties or message.sys_flag & INNER_BATCH_FLAG:
        raise _illegal(
            f"an inner batch ({INNER_NUM}, or sysFlag {INNER_BATCH_FLAG:#x}) needs a topic with a batch consume "
            "queue; send the messages one by one or by put_messages",
            "sys_flag",
            "no inner batch",
        )


def _check_kinds(message: InnerMessage) -> None:
    """Refuse values that no field of a record can hold."""
    if not isinstance(message.topic, str):
        raise _illegal(f"the topic is {message.topic!r}; give its name", "topic", "text")
    if not isinstance(message.body, bytes):
        raise _illegal("the message has no body; an empty one is b''", "body", "bytes")

    for name, (low, high) in _NUMBERS.items():
        value = getattr(message, name)
        if not isinstance(value, int) or not low <= value <= high:
            fault = f"{name} is {value!r}; it must be an int of {low} to {high}"
            raise _illegal(fault, name, f"{low}..{high}")

    match message.born_host:
        case None | (str(), int()):
            pass
        case host:
            raise _illegal(f"born_host is {host!r}; give (IP address, port)", "born_host", "a pair")

    if not isinstance(message.properties_text, bytes | None):
        raise _illegal("properties_text is not bytes", "properties_text", "bytes")
    if not isinstance(message.properties, Mapping):
        fault = f"properties are {message.properties!r}; give a mapping"
        raise _illegal(fault, "properties", "text")

    for name, text in message.properties.items():
        if not all(isinstance(part, str) and _is_unicode(part) for part in (name, text)):
            fault = f"property {name!r} is {text!r}; names and values are text"
            raise _illegal(fault, "properties", "text")


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_batch(messages: tuple[InnerMessage, ...]) -> None:
    """Refuse batches that RocketMQ refuses. Raises: Rejected with MESSAGE_ILLEGAL.

    Source: CommitLog#asyncPutMessages, SendMessageProcessor#sendBatchMessage, MessageBatch#generateFromList.
    """
    if not messages:
        raise _illegal("the batch has no messages", "batch", "at least 1 message")

    first = messages[0]
    for row, message in enumerate(messages):
        check_message(message)
        if (message.topic, message.queue_id) != (first.topic, first.queue_id):
            raise _illegal("all messages of a batch go to one queue", "queue_id", "one queue", row)
        if message.sys_flag & fmt.SYS_TRANSACTION_MASK:
            fault = "a transaction message cannot be in a batch"
            raise _illegal(fault, "sys_flag", "no transaction", row)
        if delay_level(message.properties) > 0:
            raise _illegal("a delayed message cannot be in a batch", DELAY, "no delay level", row)
        if message.topic.startswith(fmt.RETRY_PREFIX):
            raise _illegal("a retry topic takes no batches", "topic", "no retry topic", row)
        if wait_store_ok(message.properties) != wait_store_ok(first.properties):
            raise _illegal(f"all messages of a batch have the same {WAIT}", WAIT, "the same", row)


def _illegal(text: str, field: str, limit: object, row: int | None = None) -> RayMQError:
    where = {} if row is None else {"row": row}
    return error_of(PutStatus.MESSAGE_ILLEGAL, text, field=field, limit=limit, **where)


def _run_after_hooks(hooks: Sequence[PutHook], message: InnerMessage, result: PutResult) -> None:
    for hook in hooks:
        try:
            hook.after_put(message, result.status)
        except Exception:
            # The message stays stored.
            logger.exception("put hook %s", hook.name)
