"""Messages that are delivered later: by a delay level, or at a time. They wait in a topic of their shard.

Source: HookUtils#handleScheduleMessage.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from raymq.client.produce.batch_sender import waiting_queue
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delivery_time import (
    DELAY_MS,
    DELAY_S,
    DELIVER_MS,
    check_deliver_at,
    delay_level,
    named_ms,
    out_time_ms,
)
from raymq.store.delay.timer_rule import OUT_MS
from raymq.store.records.properties import DELAY, REAL_QUEUE, REAL_TOPIC, decode, encode

_LIMITS = StoreConfig()
#: the properties that delay a message
_DELAYS = re.compile(rb"(?:^|\x02)(?:DELAY|TIMER_DELIVER_MS|TIMER_DELAY_SEC|TIMER_DELAY_MS)\x01")


class Lane(NamedTuple):
    """Where a message is put: topic and queue as `BatchSender` takes them, and its properties there."""

    topic: str
    queue: int
    properties: bytes | None


def is_delayed(properties: bytes | None) -> bool:
    """Whether a message may have to wait."""
    return properties is not None and _DELAYS.search(properties) is not None


def waiting_lane(
    topic: str, queue_id: int, shard: int, properties: bytes, *, now_ms: int, levels: int
) -> Lane:
    """Where a message with such properties is put: its own queue if it need not wait.

    Args: `levels`: how many delay levels the cluster has. A higher one is the highest.
    Raises: Rejected for a time that cannot be read, or that timers do not reach.
    """
    named = decode(properties)
    level = min(delay_level(named), levels)
    if level > 0:
        for name in (DELIVER_MS, DELAY_S, DELAY_MS):
            named.pop(name, None)
        named[DELAY] = str(level)
    else:
        deliver_ms = named_ms(named, now_ms)
        if deliver_ms is None or deliver_ms <= now_ms:
            return Lane(topic, queue_id, properties)
        check_deliver_at(deliver_ms, now_ms, _LIMITS)
        named[OUT_MS] = str(out_time_ms(deliver_ms))
        level = 0

    named |= {REAL_TOPIC: topic, REAL_QUEUE: str(queue_id)}
    waiting_topic, waiting_id = waiting_queue(shard, level)
    return Lane(waiting_topic, waiting_id, encode(named))
