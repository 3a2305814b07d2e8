"""The clients that are connected: producers and consumers, by group, as their heartbeats say.

Source: ConsumerManager, ProducerManager.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from raymq.store.base.clock import Clock

from .connection import ClientConnection

Key = TypeVar("Key")

#: the message model of consumers that share the queues
CLUSTERING = "CLUSTERING"


class SubscriptionData(NamedTuple):
    """What a consumer wants of a topic."""

    topic: str
    #: `*`, `a || b`, or an expression
    expression: str
    #: TAG or SQL92
    kind: str
    #: the client's clock when it was made: the newest one counts
    version: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SubscriptionData:
        """Of a heartbeat. Raises: KeyError, TypeError, ValueError."""
        return cls(
            str(fields["topic"]),
            str(fields.get("subString") or "*"),
            str(fields.get("expressionType") or "TAG"),
            int(fields.get("subVersion") or 0),
        )


class ConsumerFacts(NamedTuple):
    """What a heartbeat says of one consumer."""

    group: str
    #: CONSUME_ACTIVELY (pull) or CONSUME_PASSIVELY (push)
    consume_type: str
    #: CLUSTERING or BROADCASTING
    message_model: str
    consume_from: str
    subscriptions: Mapping[str, SubscriptionData]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ConsumerFacts:
        """Of a heartbeat. Raises: KeyError, TypeError, ValueError."""
        found = [SubscriptionData.of(each) for each in fields.get("subscriptionDataSet") or ()]
        return cls(
            str(fields["groupName"]),
            str(fields.get("consumeType", "CONSUME_PASSIVELY")),
            str(fields.get("messageModel", "CLUSTERING")),
            str(fields.get("consumeFromWhere", "CONSUME_FROM_LAST_OFFSET")),
            {each.topic: each for each in found},
        )


class GroupClient(NamedTuple):
    """One client of a group."""

    client_id: str
    connection: ClientConnection
    #: None: a producer
    facts: ConsumerFacts | None
    #: when the first heartbeat came, ms since 1970
    since_ms: int = 0

    @property
    def is_sharing(self) -> bool:
        """Whether it is a consumer that shares the queues of its group."""
        return self.facts is not None and self.facts.message_model == CLUSTERING


class ClientTable:
    """All clients. Callers: one event loop."""

    def __init__(self) -> None:
        #: group -> client id -> the client
        self._consumers: dict[str, dict[str, GroupClient]] = {}
        #: group -> client id and shard -> the client: a producer has a connection to the port of each shard
        self._producers: dict[str, dict[tuple[str, int | None], GroupClient]] = {}
        #: connection -> the client of its newest heartbeat
        self._client_ids: dict[ClientConnection, str] = {}
        self._turns = itertools.count()

    def note(
        self,
        connection: ClientConnection,
        client_id: str,
        producers: Iterable[str],
        consumers: Iterable[ConsumerFacts],
    ) -> set[str]:
        """Take a heartbeat. Returns: the consumer groups of which a member, or a subscription, is new."""
        if connection.is_closed:
            # `drop` was called already.
            return set()
        self._client_ids[connection] = client_id
        for group in producers:
            member = GroupClient(client_id, connection, None)
            self._producers.setdefault(group, {})[client_id, connection.shard] = member
        changed = set()
        now_ms = Clock().now_ms()
        for facts in consumers:
            members = self._consumers.setdefault(facts.group, {})
            known = members.get(client_id)
            since_ms = now_ms if known is None else known.since_ms
            members[client_id] = GroupClient(client_id, connection, facts, since_ms)
            topics = None if known is None or known.facts is None else known.facts.subscriptions
            if topics is None or topics.keys() != facts.subscriptions.keys():
                changed.add(facts.group)
        return changed

    def remove(
        self, client_id: str, *, producer_group: str = "", consumer_group: str = ""
    ) -> set[str]:
        """A client leaves groups. Returns: the consumer groups that it has left."""
        for key in list(self._producers.get(producer_group, ())):
            if key[0] == client_id:
                _discard(self._producers, producer_group, key)
        return {consumer_group} if _discard(self._consumers, consumer_group, client_id) else set()

    def drop(self, connection: ClientConnection) -> set[str]:
        """A connection has ended. Returns: the consumer groups that lost a member."""
        lost = set()
        self._client_ids.pop(connection, None)
        for group, producers in list(self._producers.items()):
            for key, member in list(producers.items()):
                if member.connection is connection:
                    _discard(self._producers, group, key)
        for group, consumers in list(self._consumers.items()):
            for client_id, member in list(consumers.items()):
                if member.connection is connection:
                    _discard(self._consumers, group, client_id)
                    lost.add(group)
        return lost

    def producer_groups(self) -> list[str]:
        """The groups that have a producer."""
        return sorted(self._producers)

    def a_producer(self, group: str, shard: int) -> ClientConnection | None:
        """The connection of one of a group's producers, in turn; None: there is none that takes requests.

        One to the port of the shard is better: older clients answer to the port that has asked.
        """
        found = [
            member.connection
            for member in self._producers.get(group, {}).values()
            if not member.connection.is_closed and not member.connection.is_slow
        ]
        found = [each for each in found if each.shard == shard] or found
        return found[next(self._turns) % len(found)] if found else None

    def client_id(self, connection: ClientConnection) -> str:
        """The id of the client of a connection; empty: it has sent no heartbeat."""
        return self._client_ids.get(connection, "")

    def sharing(self, group: str) -> list[GroupClient]:
        """A group's consumers that share its queues and its offsets, by client id."""
        return [each for each in self.consumers(group) if each.is_sharing]

    def is_sharing(self, group: str, connection: ClientConnection) -> bool:
        """Whether the client of a connection is such a consumer of the group."""
        found = self._consumers.get(group, {}).get(self.client_id(connection))
        return found is not None and found.is_sharing

    def consumers(self, group: str) -> list[GroupClient]:
        """The members of a group, by client id."""
        return [each for _, each in sorted(self._consumers.get(group, {}).items())]

    def consumer(self, group: str, client_id: str) -> GroupClient | None:
        """A member of a group; None: it is not connected."""
        return self._consumers.get(group, {}).get(client_id)

    @property
    def groups(self) -> list[str]:
        """The consumer groups with a member."""
        return sorted(self._consumers)

    def producers(self, group: str) -> list[GroupClient]:
        """The producers of a group, by client id: one of the connections of each."""
        found = {each.client_id: each for each in self._producers.get(group, {}).values()}
        return [each for _, each in sorted(found.items())]

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """The newest subscription of a group to a topic; None: no member has one."""
        found = [
            member.facts.subscriptions[topic]
            for member in self._consumers.get(group, {}).values()
            if member.facts is not None and topic in member.facts.subscriptions
        ]
        return max(found, key=lambda each: each.version, default=None)


def _discard(table: dict[str, dict[Key, GroupClient]], group: str, key: Key) -> bool:
    """Remove a client of a group. Returns: whether it was one."""
    members = table.get(group)
    if members is None or members.pop(key, None) is None:
        return False
    if not members:
        del table[group]
    return True
