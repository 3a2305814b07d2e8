"""How a RayMQ cluster looks to RocketMQ's clients: brokers, their queues, and their addresses.

A shard is a broker: `raymq-0` is shard 0. Clients number the queues of a broker from 0 without gaps, so queue ids
differ: the i-th queue of a topic on a shard is queue i of that broker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.format import pack_host

_BROKER = re.compile(r"raymq-(\d+)\Z")

#: id of a leader among the addresses of a broker. A client does not see the queues of a broker without it
LEADER_ID = 0


class BrokerAddress(NamedTuple):
    """Where a server of this protocol listens, as clients dial it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@lru_cache(maxsize=1024)
def packed(address: BrokerAddress) -> str:
    """An address as the first part of message ids: upper-case hexadecimal digits."""
    return pack_host(address.host, address.port).hex().upper()


def broker_name(shard: int) -> str:
    """The name of a shard as a broker."""
    return f"raymq-{shard}"


def shard_of_broker(name: str) -> int | None:
    """The shard that a broker's name means; None: no shard has such a name."""
    found = _BROKER.match(name)
    return int(found[1]) if found else None


class BrokerTable:
    """Where the servers of each shard listen. Callers: any thread."""

    def __init__(self) -> None:
        #: shard -> broker id -> where its clients dial
        self._addresses: dict[int, dict[int, BrokerAddress]] = {}

    def note(self, shard: int, leader: int | None, servers: Mapping[int, BrokerAddress]) -> None:
        """Take the servers of a shard's replicas. Without any, those of before stay: clients need an address.

        Args: `leader`: the replica that leads; None: that is not known.
        """
        if not servers:
            return
        # A client does not see the queues of a broker without id 0. Every server reaches the leader.
        first = leader if leader is not None and leader in servers else min(servers)
        others = [address for replica, address in sorted(servers.items()) if replica != first]
        found = [servers[first], *others]
        self._addresses = {**self._addresses, shard: dict(enumerate(found, LEADER_ID))}

    def of(self, shard: int) -> dict[int, BrokerAddress]:
        """Broker id -> address; empty: no server of the shard was heard of."""
        return self._addresses.get(shard, {})

    def leader(self, shard: int) -> BrokerAddress | None:
        """Where clients dial the leader of a shard."""
        return self.of(shard).get(LEADER_ID)

    def shards(self) -> list[int]:
        """The shards that have a server."""
        return sorted(self._addresses)


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
