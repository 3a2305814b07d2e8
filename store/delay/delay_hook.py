"""Moves messages with a delivery time to the topics where they wait.

`MessagePut` calls `transform` for every message. Half messages of transactions pass unchanged. RocketMQ's brokers move
each message. RayMQ's producers send columns for the timer topic, or for that of the delay levels, so that sequences and
batches stay whole. The shard only checks (`check_batch`) that each message names its queue, and a time that timers
reach or its level.
Source: HookUtils#handleScheduleMessage, RocketMQ 5.3.3. RocketMQ refuses messages for a congested second at random, and
more of them if more messages wait. RayMQ refuses them from the limit on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.put_errors import check_record_size, error_of
from raymq.store.put.put_hooks import PutHook
from raymq.store.records.binary_columns import value_lengths
from raymq.store.records.key_check import check_keys
from raymq.store.records.producer_stamp import STAMP_BYTES
from raymq.store.records.properties import DELAY, REAL_QUEUE, REAL_TOPIC, TAG_EXTRA_BYTES, decode
from raymq.store.records.requests import PutRequest
from raymq.store.records.small_batch import SmallBatch
from raymq.store.state.shard_state import TopicInfo
from raymq.store.state.topics import check_target

from .delayed_record import BUNDLE_RESERVE_BYTES, ROW_RESERVE_BYTES
from .delivery_time import (
    DELAY_MS,
    DELAY_S,
    DELIVER_MS,
    check_deliver_at,
    delay_level,
    named_ms,
    out_time_ms,
)
from .timer_rule import DELETE_KEY, OUT_MS, PRECISION_MS

#: so far the clocks of producer and shard may differ
CLOCKS_DIFFER_MS = 60_000
#: most bytes of a record of the timer topic besides its body, its tag and the properties that were sent
_RECORD_BYTES = (
    fmt.HEADER_BYTES
    + 2 * fmt.IPV6_EXTRA_BYTES
    + len(TIMER_TOPIC)
    + 4
    + STAMP_BYTES
    + TAG_EXTRA_BYTES
)

# The first of a name counts, because `_WRONG` finds doubles. The last separator is there: record_check.py asks for it.
_OUT = r"(?:^|\x02)TIMER_OUT_MS\x01(?P<v>[0-9]{1,18})\x02"
_TOPIC = r"(?:^|\x02)REAL_TOPIC\x01(?P<v>[^\x02]+)\x02"
_QUEUE = r"(?:^|\x02)REAL_QID\x01(?P<v>[0-9]{1,9})\x02"
_LEVEL = r"(?:^|\x02)DELAY\x01(?P<v>[0-9]{1,5})\x02"
_WRONG_LEVEL = (
    r"(?:^|\x02)(?:DELAY\x01.*\x02DELAY|REAL_TOPIC\x01.*\x02REAL_TOPIC"
    r"|REAL_QID\x01.*\x02REAL_QID)\x01"
)
#: properties that only the shard writes, and names that occur twice
_WRONG = (
    r"(?:^|\x02)TIMER_(?:ROLL_TIMES|DEL_UNIQKEY|ENQUEUE_MS|DEQUEUE_MS)\x01"
    r"|(?:^|\x02)(?:TIMER_OUT_MS\x01.*\x02TIMER_OUT_MS|REAL_TOPIC\x01.*\x02REAL_TOPIC"
    r"|REAL_QID\x01.*\x02REAL_QID)\x01"
)


def transform(
    message: InnerMessage,
    now_ms: int,
    config: StoreConfig,
    *,
    waiting: Callable[[int], int] | None = None,
) -> InnerMessage:
    """The message as it is stored: itself, or on its way to the delay levels or the timers.

    Args: `waiting`: from the ms of a second to how many messages wait for it (`TimerMessageStore.waiting`).
    Raises: Rejected with `status` MESSAGE_ILLEGAL or one of WHEEL_TIMER_*, Unavailable with WHEEL_TIMER_FLOW_CONTROL.
    Nothing was stored then.
    """
    if (message.sys_flag & fmt.SYS_TRANSACTION_MASK) in fmt.SYS_UNQUEUED:
        return message
    if message.topic in (TIMER_TOPIC, SCHEDULE_TOPIC):
        return message

    text = message.properties_text
    properties = dict(message.properties) if text is None else decode(text)
    level = delay_level(properties)
    if level > 0:
        for name in (DELIVER_MS, DELAY_S, DELAY_MS):
            properties.pop(name, None)
        level = min(level, len(config.delay_levels_ms))
        properties[DELAY] = str(level)
        return _moved(message, properties, SCHEDULE_TOPIC, level - 1, config)

    deliver_ms = named_ms(properties, now_ms)
    if deliver_ms is None:
        return message

    if not config.timer_wheel_enabled:
        raise error_of(
            PutStatus.WHEEL_TIMER_NOT_ENABLE,
            "timers are switched off (timer_wheel_enabled); use a delay level, or send the message without a time",
            field="deliver_at_ms",
            limit=None,
        )

    if deliver_ms <= now_ms:
        if DELETE_KEY in properties:
            raise error_of(
                PutStatus.WHEEL_TIMER_MSG_ILLEGAL,
                f"{DELETE_KEY} names a message that is due at {deliver_ms} ms, which is over: it cannot be cancelled",
                field=DELETE_KEY,
                limit=now_ms,
            )
        return message

    check_deliver_at(deliver_ms, now_ms, config)
    out_ms = out_time_ms(deliver_ms)
    check_congestion(out_ms, waiting, config)
    properties[OUT_MS] = str(out_ms)
    return _moved(message, properties, TIMER_TOPIC, 0, config)


class DelayHook(PutHook):
    """Sends messages to the topics where they wait (`transform`) and guards the timer topic (`check_batch`)."""

    name = "delay"

    def __init__(self, config: StoreConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        #: a waiting message is delivered in a bundle, and its record grows then
        self.record_bytes_max = config.bundle_bytes_max - BUNDLE_RESERVE_BYTES - ROW_RESERVE_BYTES
        #: how many messages wait for a second; set by the timer service
        self.waiting: Callable[[int], int] | None = None

    def before_put(self, message: InnerMessage) -> InnerMessage:
        """The message itself, or on its way to a topic where it waits: `transform`."""
        return transform(message, self._clock.now_ms(), self._config, waiting=self.waiting)

    def check_batch(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> None:
        """Refuse columns for the timer topic with any row that could not be delivered.

        Rows that were staged are taken at any time, also for a full second or with timers switched off: their write is
        decided.

        Raises: Rejected naming the field, Unavailable if too many messages wait for the second of a row; both with
        RocketMQ's status. Nothing was stored then.
        """
        self._check(request, topics)

    def check_staged(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> None:
        """Refuse columns that the timer topic could not take after a decision.

        Raises: as `check_batch`, and Rejected for a row that is too large.
        """
        batch = self._check(request, topics)
        body, tag, properties = batch.columns[:3]
        sizes = value_lengths(body) + value_lengths(tag) + value_lengths(properties) + _RECORD_BYTES
        row = int(sizes.argmax())
        check_record_size(self._config, row, int(sizes[row]), limit=self.record_bytes_max)

    def _check(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> pa.RecordBatch:
        """The checks of both. Returns: the columns."""
        if not (self._config.timer_wheel_enabled or request.was_staged):
            raise error_of(
                PutStatus.WHEEL_TIMER_NOT_ENABLE,
                "timers are switched off in this cluster (timer_wheel_enabled); send without a delivery time",
                field="deliver_at_ms",
                limit=None,
            )

        batch = request.batch
        if isinstance(batch, SmallBatch):
            batch = batch.to_batch()

        properties = batch.column("properties").fill_null(b"")
        out = _extracted(properties, _OUT)
        topic = _extracted(properties, _TOPIC)
        queue = _extracted(properties, _QUEUE)
        wrong = pc.match_substring_regex(properties, f"(?s:{_WRONG})")
        missing = out.null_count + topic.null_count + queue.null_count
        if request.queue_id or missing or pc.any(wrong).as_py():
            faulty = pc.or_(wrong, pc.or_(out.is_null(), pc.or_(topic.is_null(), queue.is_null())))
            named = {} if request.queue_id else {"row": pc.index(faulty, True).as_py()}
            raise error_of(
                PutStatus.WHEEL_TIMER_MSG_ILLEGAL,
                "messages of the timer topic need TIMER_OUT_MS, REAL_TOPIC and REAL_QID, once each, and none of the "
                "shard's own TIMER_ properties; send with deliver_at_ms instead",
                field="properties",
                limit="TIMER_OUT_MS, REAL_TOPIC, REAL_QID",
                **named,
            )

        if not request.was_staged:
            self._check_times(out.cast(pa.string()).cast(pa.int64()).to_numpy())
        _check_targets(batch, topic, queue, topics)
        return batch

    def _check_times(self, out_ms: Int64s) -> None:
        """Refuse seconds that are too far away, or for which too many messages wait."""
        now_ms = self._clock.now_ms() + CLOCKS_DIFFER_MS
        row = int(np.argmax(out_ms))
        with _naming(row):
            check_deliver_at(int(out_ms[row]) + PRECISION_MS, now_ms, self._config)
        for time_ms in np.unique(out_ms - out_ms % PRECISION_MS).tolist():
            check_congestion(time_ms, self.waiting, self._config)


class LevelGuard:
    """Opens the topic of the delay levels to the columns that producers put (`TopicGuard`)."""

    def __init__(self, config: StoreConfig) -> None:
        self._levels = len(config.delay_levels_ms)
        self.record_bytes_max = config.bundle_bytes_max - BUNDLE_RESERVE_BYTES - ROW_RESERVE_BYTES

    def check_batch(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> None:
        """Refuse columns with any row that is not of the queue's level, or could not be delivered.

        Raises: Rejected naming the field and row; nothing was stored then.
        """
        level, batch = request.queue_id + 1, request.batch
        if not 0 < level <= self._levels:
            raise error_of(
                PutStatus.MESSAGE_ILLEGAL,
                f"delay level {level} is put; there are {self._levels} (message_delay_level)",
                field="delay_level",
                limit=self._levels,
                found=level,
            )

        if isinstance(batch, SmallBatch):
            batch = batch.to_batch()
        properties = batch.column("properties").fill_null(b"")
        named = _extracted(properties, _LEVEL)
        topic = _extracted(properties, _TOPIC)
        queue = _extracted(properties, _QUEUE)
        is_right = pc.equal(named, str(level).encode()).fill_null(False)
        is_right = pc.and_(is_right, pc.and_(topic.is_valid(), queue.is_valid()))
        wrong = pc.or_(
            pc.match_substring_regex(properties, f"(?s:{_WRONG_LEVEL})"), pc.invert(is_right)
        )
        if pc.any(wrong).as_py():
            raise error_of(
                PutStatus.MESSAGE_ILLEGAL,
                f"messages of queue {request.queue_id} of {SCHEDULE_TOPIC} need DELAY {level}, REAL_TOPIC and "
                "REAL_QID, once each; send with delay_level instead",
                field="properties",
                limit="DELAY, REAL_TOPIC, REAL_QID",
                row=pc.index(wrong, True).as_py(),
            )
        _check_targets(batch, topic, queue, topics)


def _check_targets(
    batch: pa.RecordBatch, topic: pa.Array, queue: pa.Array, topics: Mapping[str, TopicInfo]
) -> None:
    """Refuse rows that name a topic or queue to which they could not be delivered. Raises: Rejected."""
    for raw in pc.unique(topic).to_pylist():
        rows = pc.equal(topic, raw)
        queue_ids = queue.filter(rows).cast(pa.string()).cast(pa.int64()).to_numpy()
        name, highest = raw.decode("utf-8", "replace"), int(queue_ids.argmax())
        with _naming(int(np.flatnonzero(rows.to_numpy(zero_copy_only=False))[highest])):
            check_target(name, int(queue_ids[highest]), topics)
        if topics[name].compacted:
            check_keys(name, batch, rows)


@contextmanager
def _naming(row: int) -> Iterator[None]:
    """Let the refusal of the block name a row, so that a producer can send the others."""
    try:
        yield
    except Rejected as error:
        error.fields["row"] = row
        raise


def _extracted(properties: pa.Array, pattern: str) -> pa.Array:
    return pc.struct_field(pc.extract_regex(properties, pattern), 0)


def _moved(
    message: InnerMessage,
    properties: dict[str, str],
    topic: str,
    queue_id: int,
    config: StoreConfig,
) -> InnerMessage:
    """The message in the topic where it waits. Raises: Rejected if its delivery could not be appended."""
    properties[REAL_TOPIC] = message.topic
    properties[REAL_QUEUE] = str(message.queue_id)

    text = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in properties.items())
    size = fmt.HEADER_BYTES + 4 + len(message.body) + text + ROW_RESERVE_BYTES
    limit = config.bundle_bytes_max - BUNDLE_RESERVE_BYTES
    if size > limit:
        raise Rejected(
            f"the message makes a record of up to {size} bytes; one that is delivered later may have {limit}",
            field="record",
            limit=limit,
            status=PutStatus.MESSAGE_ILLEGAL.value,
        )

    return replace(
        message, topic=topic, queue_id=queue_id, properties=properties, properties_text=None
    )


def check_congestion(
    out_ms: int, waiting: Callable[[int], int] | None, config: StoreConfig
) -> None:
    """Raises: Unavailable for a second that too many messages wait for."""
    limit = config.timer_congest_num_each_slot
    if waiting is not None and waiting(out_ms) >= limit:
        raise error_of(
            PutStatus.WHEEL_TIMER_FLOW_CONTROL,
            f"{limit} messages wait for the second from {out_ms} ms on; choose another time",
            field="deliver_at_ms",
            limit=limit,
        )
