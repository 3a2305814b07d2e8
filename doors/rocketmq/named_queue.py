"""The queue that a request means: its topic, its broker, and the number of a queue there."""

from __future__ import annotations

from typing import NamedTuple

from .connection import ClientConnection
from .request_fields import RequestFields
from .send_message import queue_named, shard_named
from .shards import Shards
from .topology import BrokerQueues


class NamedQueue(NamedTuple):
    """One queue of a request."""

    queues: BrokerQueues
    shard: int
    queue_id: int


async def named_queue(
    shards: Shards, connection: ClientConnection, fields: RequestFields
) -> NamedQueue:
    """Look the queue of a request up.

    Raises: Refused for one that the broker does not have; TopicMissing; Unavailable.
    """
    queues = await shards.topic(fields.text("topic"))
    shard = shard_named(fields.text("bname", ""), connection)
    return NamedQueue(queues, shard, queue_named(queues, shard, fields.integer("queueId")))
