"""What a dead letter says, in its properties, of the message that it was."""

from __future__ import annotations

from collections.abc import Mapping

from .properties import DELAY, REAL_QUEUE, REAL_TOPIC, WAIT

#: properties of a copy: topic, queue and message id of its original. RocketMQ knows no queue
ORIGIN_TOPIC, ORIGIN_QUEUE, ORIGIN_ID = "RETRY_TOPIC", "RETRY_QID", "ORIGIN_MESSAGE_ID"
#: properties of a dead letter: why it is one, and the session that had it last
DEAD_REASON, DEAD_HOLDER = "DLQ_REASON", "DLQ_HOLDER"
#: property of a message that was a dead letter: how often it was put back
REDRIVES = "REDRIVES"
#: the topic of a dead letter that RocketMQ's clients have put there by themselves
_FOREIGN_TOPIC = "DLQ_ORIGIN_TOPIC"
#: properties that a copy, or its sender, has added
ADDED = (
    ORIGIN_TOPIC,
    ORIGIN_QUEUE,
    ORIGIN_ID,
    DEAD_REASON,
    DEAD_HOLDER,
    WAIT,
    DELAY,
    REAL_TOPIC,
    REAL_QUEUE,
    _FOREIGN_TOPIC,
    "DLQ_ORIGIN_MESSAGE_ID",
    "RECONSUME_TIME",
    "MAX_RECONSUME_TIMES",
)


def origin_topic(properties: Mapping[str, str]) -> str:
    """The topic from which a dead letter came; empty: it does not say so."""
    return properties.get(ORIGIN_TOPIC) or properties.get(_FOREIGN_TOPIC, "")


def origin_queue(properties: Mapping[str, str]) -> int | None:
    """The queue from which a dead letter came; None: it does not say so."""
    text = properties.get(ORIGIN_QUEUE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def redrives_of(properties: Mapping[str, str]) -> int:
    """How often a message was put back. A user may have set any text."""
    text = properties.get(REDRIVES, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
