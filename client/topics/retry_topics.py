"""The retry and dead letter topics of groups, which have a queue on each shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq.store.base.errors import TopicWithOtherQueues

from .add_queues import add_queues
from .new_topic import create_topic

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


def create_retry_topic(cluster: ClusterHandle, name: str) -> None:
    """Make a topic with a queue on each shard, or give one that is older than some shards the queues that it lacks.

    Raises: as `create_topic` and `add_queues`.
    """
    try:
        create_topic(cluster, name, queues=cluster.shards)
    except TopicWithOtherQueues:
        # Its messages are read in any order.
        facts = cluster.topics()[name]
        missing = cluster.shards - len(set(facts["shards"]))
        queues = int(facts["queues"]) + missing
        add_queues(cluster, name, queues, break_key_order=True)
