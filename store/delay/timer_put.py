"""The checks of puts into the timer topic: each message names its queue and a time that timers reach.

RocketMQ's brokers move each message there themselves. RayMQ's producers send columns of them, so that sequences and
batches stay whole, and the shard only checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.config import StoreConfig
from raymq.store.errors import Rejected
from raymq.store.put.put_errors import error_of
from raymq.store.records.key_check import check_keys
from raymq.store.records.record_row import Row
from raymq.store.state import TopicInfo
from raymq.store.status import PutStatus
from raymq.store.topics import check_target

from .timer_rule import PRECISION_MS

_OUT = r"(?:^|\x02)TIMER_OUT_MS\x01(?P<v>[0-9]{1,18})\x02"
_TOPIC = r"(?:^|\x02)REAL_TOPIC\x01(?P<v>[^\x02]+)\x02"
_QUEUE = r"(?:^|\x02)REAL_QID\x01(?P<v>[0-9]{1,9})\x02"
#: properties that only the shard writes, and names that occur twice
_WRONG = (
    r"(?:^|\x02)TIMER_(?:ROLL_TIMES|DEL_UNIQKEY|ENQUEUE_MS|DEQUEUE_MS)\x01"
    r"|(?:^|\x02)(?:TIMER_OUT_MS\x01.*\x02TIMER_OUT_MS|REAL_TOPIC\x01.*\x02REAL_TOPIC"
    r"|REAL_QID\x01.*\x02REAL_QID)\x01"
)


def check_timer_put(
    queue_id: int,
    batch: pa.RecordBatch | Row,
    *,
    topics: Mapping[str, TopicInfo],
    config: StoreConfig,
    now_ms: int,
    waiting: Callable[[int], int] | None = None,
) -> None:
    """Refuse a batch for the timer topic with any row that could not be delivered.

    Args: `waiting(ms)` is how many messages wait for that second (`TimerMessageStore.waiting`).
    Raises: Rejected naming the field, Unavailable where too many wait for the second of a row, with RocketMQ's status;
    nothing was stored.
    """
    if not config.timer_wheel_enabled:
        raise Rejected(
            "timers are switched off in this cluster (timer_wheel_enabled); send without deliver_at_ms",
            field="deliver_at_ms",
            limit=None,
            status=PutStatus.WHEEL_TIMER_NOT_ENABLE.value,
        )
    if isinstance(batch, Row):
        batch = batch.to_batch()
    properties = batch.column("properties").fill_null(b"")
    out, topic, queue = (
        pc.struct_field(pc.extract_regex(properties, pattern), 0)
        for pattern in (_OUT, _TOPIC, _QUEUE)
    )
    wrong = pc.match_substring_regex(properties, f"(?s:{_WRONG})")
    if queue_id or out.null_count or topic.null_count or queue.null_count or pc.any(wrong).as_py():
        raise Rejected(
            "messages of the timer topic need TIMER_OUT_MS, REAL_TOPIC and REAL_QID, once each, and none of the "
            "shard's own TIMER_ properties; send with deliver_at_ms instead",
            field="properties",
            limit="TIMER_OUT_MS, REAL_TOPIC, REAL_QID",
            status=PutStatus.WHEEL_TIMER_MSG_ILLEGAL.value,
        )
    seconds = out.cast(pa.string()).cast(pa.int64()).to_numpy()
    # The clocks of producer and shard differ a little.
    check_deliver_at(int(np.max(seconds)) + PRECISION_MS, now_ms + 60_000, config)
    if waiting is not None:
        for time_ms in np.unique(seconds - seconds % PRECISION_MS).tolist():
            check_congestion(time_ms, waiting, config)
    for raw in pc.unique(topic).to_pylist():
        rows = pc.equal(topic, raw)
        mine = queue.filter(rows).cast(pa.string()).cast(pa.int64())
        name = raw.decode("utf-8", "replace")
        check_target(name, pc.max(mine).as_py(), topics)
        if topics[name].compacted:
            check_keys(name, batch, rows)


def check_deliver_at(deliver_ms: int, now_ms: int, config: StoreConfig) -> None:
    """Raises: Rejected for a time further away than timers reach."""
    limit = config.timer_max_delay_s * 1000
    if deliver_ms - now_ms > limit:
        raise Rejected(
            f"the message is to be delivered in {deliver_ms - now_ms} ms; timers reach {limit} ms (timer_max_delay_s)",
            field="deliver_at_ms",
            limit=now_ms + limit,
            status=PutStatus.WHEEL_TIMER_MSG_ILLEGAL.value,
        )


def check_congestion(out_ms: int, waiting: Callable[[int], int], config: StoreConfig) -> None:
    """Raises: Unavailable for a second that too many messages wait for."""
    limit = config.timer_congest_num_each_slot
    if waiting(out_ms) >= limit:
        raise error_of(
            PutStatus.WHEEL_TIMER_FLOW_CONTROL,
            f"{limit} messages wait for the second from {out_ms} ms on; choose another time",
            field="deliver_at_ms",
            limit=limit,
        )
