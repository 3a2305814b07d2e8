"""The message that a dead letter was, to put into a queue again."""

from __future__ import annotations

from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.dead_letter import ADDED, REDRIVES, redrives_of
from raymq.store.state.topics import QueueKey

from .stored_message import StoredMessage


def redriven(message: StoredMessage, key: QueueKey) -> InnerMessage:
    """The message that a dead letter was, to put into a queue. Its attempts begin at 0 again."""
    properties = {name: value for name, value in message.properties.items() if name not in ADDED}
    properties[REDRIVES] = str(redrives_of(message.properties) + 1)
    return message.moved(*key, properties, reconsume_times=0)
