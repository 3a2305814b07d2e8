"""Connects to the cluster of a source, and asks it for the queues, for their ends, and for offsets by time.

A shard that is away is waited for, as tasks do: the driver may plan a batch while a leader restarts.
"""

from __future__ import annotations

import os
import re
from functools import partial

from raymq.actors.protocol import tls
from raymq.client.consume.queue_ranges import QueueRange
from raymq.client.consume.time_search import offset_at
from raymq.client.handle import ClusterHandle
from raymq.client.messages.topic_values import TopicValues
from raymq.client.transport.away import while_away
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable, require
from raymq.store.base.files import Files

from .offsets import HeldOffsets, TopicQueue
from .source_options import ConnectionOptions, Subscription

#: longer than a failover takes, or Ray to restart a shard's only replica. An address that is wrong must not wait longer
CONNECT_S = 30.0


def connect(options: ConnectionOptions) -> ClusterHandle:
    """The cluster of the first address that answers. Raises: Rejected; Unavailable if none answers for `CONNECT_S`."""
    return while_away(lambda: _connect(options), timeout_s=CONNECT_S)


def _connect(options: ConnectionOptions) -> ClusterHandle:
    """One try at each address."""
    files = Files()
    ca = tls.read_ca(options.ca, files) if options.ca else tls.trusted(os.environ, files)
    last: RayMQError | None = None
    for address in options.addresses:
        try:
            return ClusterHandle.bootstrap(address, token=options.token, ca=ca)
        except (Unavailable, DeliveryUnknown) as error:
            last = error
    require(last is not None, "the options have an address")
    message = f"raymq.address: no shard answers at {', '.join(options.addresses)}: {last}"
    raise Unavailable(message, field="raymq.address") from None


def values_of(cluster: ClusterHandle, subscription: Subscription) -> TopicValues:
    """The values of a read: of its topic, if it names one alone. Those of several topics are read as bytes."""
    names = set(subscription.topics or ()) | {each.topic for each in subscription.queues or ()}
    if len(names) != 1:
        return TopicValues("")
    (topic,) = names
    return TopicValues.of(topic, while_away(cluster.topics).get(topic, {}))


class QueueLookup:
    """The queues of a subscription, as the cluster knows them now."""

    def __init__(self, cluster: ClusterHandle, subscription: Subscription) -> None:
        self.cluster = cluster
        self._subscription = subscription

    def queues(self) -> dict[TopicQueue, HeldOffsets]:
        """The queues and their ends. Raises: Rejected for a topic or queue that does not exist; Unavailable."""
        found: dict[TopicQueue, HeldOffsets] = {}
        for topic in self._topics():
            described = while_away(partial(self.cluster.describe_topic, topic))
            for facts in described["queues"]:
                ends = HeldOffsets(facts["shard"], facts["min_offset"], facts["max_offset"])
                found[TopicQueue(topic, facts["queue_id"])] = ends

        assigned = self._subscription.queues
        if assigned is None:
            return found
        for queue in assigned:
            if queue not in found:
                count = sum(each.topic == queue.topic for each in found)
                raise Rejected(
                    f"assign: topic {queue.topic} has the queues 0 to {count - 1}, not {queue.queue_id}",
                    field="assign",
                    limit=count - 1,
                    found=queue.queue_id,
                )
        return {queue: found[queue] for queue in assigned}

    def _topics(self) -> list[str]:
        topics, pattern, queues = self._subscription
        if pattern is not None:
            names = while_away(self.cluster.topics)
            return [name for name in names if re.fullmatch(pattern, name)]
        if topics is not None:
            return list(topics)
        return sorted({queue.topic for queue in queues or ()})

    def offset_at(self, queue: TopicQueue, ends: HeldOffsets, time_ms: int) -> int | None:
        """The offset of a queue's first message that was stored at a time or later; None if there is none."""
        held = QueueRange(*queue, ends.shard, ends.first, ends.end)
        return while_away(lambda: offset_at(Routes.of(self.cluster), held, time_ms))
