"""How a RayMQ cluster looks to RocketMQ's clients: brokers, their queues, and their addresses.

A shard is a broker: `raymq-0` is shard 0. Clients number the queues of a broker from 0 without gaps, so queue ids
differ: the i-th queue of a topic on a shard is queue i of that broker.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from raymq.client.transport.topic_routes import TopicRoute

_BROKER = re.compile(r"raymq-(\d+)\Z")

#: id of a leader among the addresses of a broker. A client does not see the queues of a broker without it
LEADER_ID = 0


class BrokerAddress(NamedTuple):
    """Where a server of this protocol listens, as clients dial it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def broker_name(shard: int) -> str:
    """The name of a shard as a broker."""
    return f"raymq-{shard}"


def shard_of_broker(name: str) -> int | None:
    """The shard that a broker's name means; None: no shard has such a name."""
    found = _BROKER.match(name)
    return int(found[1]) if found else None


class BrokerQueues:
    """The queues of one topic as brokers number them. Made again when the topic has got more."""

    def __init__(self, route: TopicRoute) -> None:
        self.route = route
        #: shard -> its queues, ascending: the index is the number that clients use
        self.by_shard = {shard: route.queues_of(shard) for shard in sorted(set(route.shards))}
        self._numbers = {
            queue_id: number
            for queues in self.by_shard.values()
            for number, queue_id in enumerate(queues)
        }

    def queue_id(self, shard: int, number: int) -> int | None:
        """The queue that a broker has under a number; None: it has no such queue."""
        queues = self.by_shard.get(shard, [])
        return queues[number] if 0 <= number < len(queues) else None

    def number(self, queue_id: int) -> int:
        """The number of a queue at its broker. Raises: KeyError for a queue that the topic does not have."""
        return self._numbers[queue_id]

    @property
    def is_renumbered(self) -> bool:
        """Whether numbers differ from the queue ids that records hold."""
        return len(self.by_shard) > 1
