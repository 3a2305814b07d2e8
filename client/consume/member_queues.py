"""The queues of a consumer that is a member of its group: they come and go between the calls of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter

from raymq.client.transport.ask import LEADER_TIMEOUT_S
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.clock import Clock
from raymq.store.base.errors import QueueMissing, RayMQError, Rejected, TopicMissing
from raymq.store.groups.claims import Commit
from raymq.store.groups.members import TopicSubscription
from raymq.store.state.topics import QueueKey

from .assigned_queues import AssignedQueues
from .consumer_config import ConsumerConfig, QueuesCallback
from .membership import Claimed, Membership, fenced_error, unavailable
from .transaction_offsets import OffsetsToCommit

#: how often a consumer that cannot know its queues looks whether it can again
UNCERTAIN_WAIT_S = 0.1


class MemberQueues:
    """Does what the membership asks for, in the thread of the program: gives queues up, and begins to read others.

    Order at the end of a queue: no more of its messages are returned, `on_revoked` runs and may commit, the queue is
    released.
    """

    def __init__(
        self,
        routes: Routes,
        subscription: TopicSubscription,
        assigned: AssignedQueues,
        config: ConsumerConfig,
        clock: Clock | None,
        begin: Callable[[list[QueueKey]], dict[QueueKey, int]],
    ) -> None:
        """Join the group. Args: `begin`: where queues without a committed offset begin. Raises: RayMQError."""
        self._routes = routes
        self._group = config.group or ""
        self._assigned = assigned
        #: a topic of a pattern may go
        self._begin = begin
        self.on_assigned: QueuesCallback | None = config.on_assigned
        self.on_revoked: QueuesCallback | None = config.on_revoked
        #: queues that are read, and of which `on_assigned` has not heard
        self._unannounced: list[QueueKey] = []
        #: queue -> position of queues that are being given up
        self._left: dict[QueueKey, int] = {}
        #: queues whose next commit may lower the offset
        self._sought: set[QueueKey] = set()

        # All members have one filter: what a member passes over, no other one reads.
        selector = assigned.state.selector
        kind, expression = ("", "") if selector is None else selector
        self.membership = Membership(
            routes,
            self._group,
            subscription,
            changed=assigned.state.changed,
            shard_of=partial(_shard_of, routes),
            notify=assigned.state.notify,
            session_timeout_ms=round(config.session_timeout_s * 1000),
            revoke_timeout_ms=round(config.revoke_timeout_s * 1000),
            max_poll_interval_ms=None
            if config.max_poll_interval_s is None
            else round(config.max_poll_interval_s * 1000),
            instance_id=config.instance_id or "",
            filter_kind=kind,
            expression=expression,
            clock=clock,
        )

    def await_first(self, timeout_ms: int) -> None:
        """Wait for the first assignment, and begin to read it. Raises: RayMQError when the consumer cannot join."""
        membership, changed = self.membership, self._assigned.state.changed
        with changed:
            is_settled = changed.wait_for(lambda: membership.is_settled, timeout_ms / 1000)
        if not is_settled:
            raise unavailable(membership.trouble, self._group, timeout_ms)
        self._unannounced = self.read_claimed()
        self.check_failure()

    # --- between calls ----------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._unannounced) or self.membership.has_news

    def step(self) -> None:
        """Give up what was revoked, and read what was claimed.

        Raises: Fenced when a newer process of the instance has joined; Rejected when the group refuses this member, or
        a queue has no offset and `start` is missing; and what the callbacks raise.
        """
        if not self.has_news:
            return
        for revoked in self.begin_to_revoke():
            try:
                if self.on_revoked is not None:
                    self.on_revoked(revoked)
            finally:
                self.end_revocation(revoked)
        added = sorted({*self._unannounced, *self.read_claimed()})
        self._unannounced = []
        if added and self.on_assigned is not None:
            self.on_assigned(added)
        self.check_failure()

    def begin_to_revoke(self) -> list[list[QueueKey]]:
        """Return no more messages of revoked queues. Returns: one list of them, or no list."""
        revoked = sorted(self.membership.take_revoked())
        if not revoked:
            return []
        self._left = self._assigned.revoke(revoked)
        return [revoked]

    def end_revocation(self, revoked: list[QueueKey]) -> None:
        """Release queues, after the last commit."""
        self._left = {}
        self._sought -= set(revoked)
        self.membership.release(revoked)

    def read_claimed(self) -> list[QueueKey]:
        """Begin to read claimed queues. Returns: them, ascending. Raises: Rejected when one has no place to begin."""
        claimed = self.membership.take_claimed()
        if not claimed:
            return []

        try:
            begins = self._begins_of(claimed)
            shards = {key: _shard_of(self._routes, key) for key in begins}
            self._assigned.add(begins, shards.__getitem__)
        except TopicMissing:
            # A topic was deleted, or is not on all shards yet: its queues are granted again, if there are any.
            self.membership.return_claimed(claimed)
            for key, each in claimed.items():
                self.membership.lose(key, each.number)
            return []
        except Rejected as error:
            self.membership.fail(error)
            raise
        except BaseException:
            # The next call tries again.
            self.membership.return_claimed(claimed)
            raise
        return sorted(claimed)

    def _begins_of(self, claimed: Mapping[QueueKey, Claimed]) -> dict[QueueKey, int]:
        """Where claimed queues begin. Raises: RayMQError."""
        # A topic may have been deleted and made again since the group had its queues here.
        self._routes.topics.look_again({topic for topic, _ in claimed})
        begins = {key: each.offset for key, each in claimed.items() if each.offset is not None}
        missing = sorted(key for key in claimed if key not in begins)
        return begins | self._begin(missing) if missing else begins

    def check_failure(self) -> None:
        """Raises: why this membership is over."""
        if self.membership.failure is not None:
            raise self.membership.failure

    def may_return(self, key: QueueKey) -> bool:
        """Whether messages of a queue may be returned now."""
        return self.membership.may_read(key)

    def wait_until_certain(self, timeout_s: float | None) -> None:
        """Wait for an answer of the coordinator, for a moment."""
        changed = self._assigned.state.changed
        limit_s = UNCERTAIN_WAIT_S if timeout_s is None else min(timeout_s, UNCERTAIN_WAIT_S)
        with changed:
            changed.wait_for(lambda: self.has_news or self._assigned.state.closed, limit_s)

    # --- commits ----------------------------------------------------------------------------------

    def positions(self) -> dict[QueueKey, int]:
        """queue -> next offset, also of queues that are being given up."""
        return {**self._assigned.positions, **self._left}

    def note_seek(self, key: QueueKey) -> None:
        """Let the next commit lower the offset of a queue."""
        self._sought.add(key)

    def commit(self, offsets: Mapping[QueueKey, int]) -> None:
        """Store offsets under the numbers of the member's grants. Raises: Fenced naming the queues of other members."""
        numbers = self.membership.commit_numbers(offsets)
        fenced = offsets.keys() - numbers.keys()
        calls: dict[tuple[int, str], list[QueueKey]] = {}
        failed: RayMQError | None = None
        for topic, found in groupby(sorted(numbers), key=itemgetter(0)):
            keys = list(found)
            try:
                route = _route_with(self._routes, keys[-1])
            except RayMQError as error:
                if not self._assigned.passes_over(error, topic):
                    failed = failed or error
                continue
            for key in keys:
                calls.setdefault((route.shard_of(key[1]), topic), []).append(key)

        for (shard, topic), queues in calls.items():
            arguments = self._commit_arguments(topic, queues, offsets, numbers)
            try:
                answer = self._routes.call(shard, "commit_offsets", arguments)
            except RayMQError as error:
                # The offsets of the others are stored. Those of a deleted topic mean nothing.
                if not self._assigned.passes_over(error, topic):
                    failed = failed or error
                continue
            refused = {(topic, int(queue_id)) for queue_id in answer["fenced"]}
            self._sought -= set(queues) - refused
            for key in refused:
                self.membership.lose(key, numbers[key])
            fenced |= refused
        if failed is not None:
            raise failed
        if fenced:
            raise fenced_error(self._group, fenced)

    def to_commit(self, offsets: Mapping[QueueKey, int]) -> OffsetsToCommit:
        """Offsets for a transaction, under the numbers that the member's grants have now.

        Raises: Fenced naming the queues of other members; TopicMissing, Unavailable.
        """
        numbers = self.membership.commit_numbers(offsets)
        fenced = offsets.keys() - numbers.keys()
        if fenced:
            raise fenced_error(self._group, fenced)
        shards = {key: _shard_of(self._routes, key) for key in offsets}
        commits = {
            key: Commit(numbers[key], int(offset), key in self._sought)
            for key, offset in offsets.items()
        }
        return OffsetsToCommit(
            self._group, commits, shards, self._sought.difference_update, self.membership.lose
        )

    def _commit_arguments(
        self,
        topic: str,
        queues: Iterable[QueueKey],
        offsets: Mapping[QueueKey, int],
        numbers: Mapping[QueueKey, int],
    ) -> dict[str, object]:
        arguments: dict[str, object] = {
            "group": self._group,
            "topic": topic,
            "offsets": {str(key[1]): int(offsets[key]) for key in queues},
            "numbers": {str(key[1]): numbers[key] for key in queues},
        }
        seeks = sorted(key[1] for key in self._sought.intersection(queues))
        return {**arguments, "seeks": seeks} if seeks else arguments

    # --- end --------------------------------------------------------------------------------------

    def check_keeps_place(self, keeps_place: bool) -> None:
        """Raises: Rejected unless a place can be kept, if one is asked for."""
        if keeps_place and not self.membership.has_instance:
            raise Rejected(
                "keep_place=True needs instance_id: a place is kept for an instance",
                field="keep_place",
                limit="a consumer with instance_id",
            )

    def revoke_all(self) -> None:
        """Let the program commit once more. Raises: what `on_revoked` raises."""
        owned = sorted(self.membership.owned())
        if owned and self.on_revoked is not None:
            self.on_revoked(owned)

    def leave(self, *, keeps_place: bool) -> None:
        """Leave the group, after reading has ended."""
        self.membership.leave(keeps_place=keeps_place)


def _route_with(routes: Routes, key: QueueKey) -> TopicRoute:
    """The route of a topic that has a queue, which may have been added lately. Raises: TopicMissing, Unavailable."""
    topic, queue_id = key
    route = routes.topics.find(topic)
    if queue_id >= route.queues:
        for _, answer in routes.ask(routes.known_shards(), "topics", {}, LEADER_TIMEOUT_S):
            if not isinstance(answer, RayMQError):
                routes.topics.note(answer)
        route = routes.topics.find(topic)
    if queue_id >= route.queues:
        # Queues are added one shard after the other.
        raise QueueMissing(f"queue {queue_id} of {topic} is not known everywhere yet")
    return route


def _shard_of(routes: Routes, key: QueueKey) -> int:
    """The shard of a queue. Raises: as `_route_with`."""
    return _route_with(routes, key).shard_of(key[1])
