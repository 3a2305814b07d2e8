"""Messages that are delivered later: by a delay level, or at a time. They wait in a topic of their shard.

Source: HookUtils#handleScheduleMessage.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from raymq.client.produce.batch_sender import waiting_queue
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_hook import transform
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.properties import decode, encode

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
    topic: str, queue_id: int, shard: int, properties: bytes, body: bytes, now_ms: int
) -> Lane:
    """Where a message with such properties is put: its own queue if it need not wait.

    Raises: Rejected for a time beyond the reach of timers, and for a message that is too long to wait.
    """
    message = InnerMessage(topic, queue_id, body, decode(properties))
    moved = transform(message, now_ms, _LIMITS)
    if moved.topic not in (SCHEDULE_TOPIC, TIMER_TOPIC):
        return Lane(topic, queue_id, properties)
    level = moved.queue_id + 1 if moved.topic == SCHEDULE_TOPIC else 0
    waiting_topic, waiting_id = waiting_queue(shard, level)
    return Lane(waiting_topic, waiting_id, encode(moved.properties))
