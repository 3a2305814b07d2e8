"""The queues of a consumer that is a member of its group: they come and go between the calls of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from raymq.client.transport.ask import LEADER_TIMEOUT_S
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.groups.members import TopicSubscription
from raymq.store.state.topics import QueueKey

from .assigned_queues import AssignedQueues
from .consumer_config import ConsumerConfig, QueuesCallback
from .membership import Membership, fenced_error, unavailable

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
        topic: str,
        assigned: AssignedQueues,
        config: ConsumerConfig,
        clock: Clock | None,
        begin: Callable[[list[int]], dict[int, int]],
    ) -> None:
        """Join the group. Args: `begin`: where queues without a committed offset begin. Raises: RayMQError."""
        self._routes = routes
        self._topic = topic
        self._group = config.group or ""
        self._assigned = assigned
        self._begin = begin
        self.on_assigned: QueuesCallback | None = config.on_assigned
        self.on_revoked: QueuesCallback | None = config.on_revoked
        #: queues that are read, and of which `on_assigned` has not heard
        self._unannounced: list[QueueKey] = []
        #: queue -> position of queues that are being given up
        self._left: dict[int, int] = {}
        #: queues whose next commit may lower the offset
        self._sought: set[int] = set()

        # All members have one filter: what a member passes over, no other one reads.
        selector = assigned.state.selector
        kind, expression = ("", "") if selector is None else selector
        self.membership = Membership(
            routes,
            self._group,
            TopicSubscription((topic,)),
            changed=assigned.state.changed,
            shard_of=partial(_shard_of, routes),
            notify=assigned.state.notify,
            session_timeout_ms=round(config.session_timeout_s * 1000),
            revoke_timeout_ms=round(config.revoke_timeout_s * 1000),
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
        self._left = self._assigned.revoke(queue_id for _, queue_id in revoked)
        return [revoked]

    def end_revocation(self, revoked: list[QueueKey]) -> None:
        """Release queues, after the last commit."""
        self._left = {}
        self._sought -= {queue_id for _, queue_id in revoked}
        self.membership.release(revoked)

    def read_claimed(self) -> list[QueueKey]:
        """Begin to read claimed queues. Returns: them, ascending. Raises: Rejected when one has no place to begin."""
        claimed = self.membership.take_claimed()
        if not claimed:
            return []
        begins = {key[1]: each.offset for key, each in claimed.items() if each.offset is not None}
        missing = sorted(key[1] for key in claimed if key[1] not in begins)
        try:
            if missing:
                begins |= self._begin(missing)
            self._assigned.add(begins, self._shard_of)
        except Rejected as error:
            self.membership.fail(error)
            raise
        except BaseException:
            # The next call tries again.
            self.membership.return_claimed(claimed)
            raise
        return sorted(claimed)

    def _shard_of(self, queue_id: int) -> int:
        return _shard_of(self._routes, (self._topic, queue_id))

    def check_failure(self) -> None:
        """Raises: why this membership is over."""
        if self.membership.failure is not None:
            raise self.membership.failure

    def may_return(self, queue_id: int) -> bool:
        """Whether messages of a queue may be returned now."""
        return self.membership.may_read((self._topic, queue_id))

    def wait_until_certain(self, timeout_s: float | None) -> None:
        """Wait for an answer of the coordinator, for a moment."""
        changed = self._assigned.state.changed
        limit_s = UNCERTAIN_WAIT_S if timeout_s is None else min(timeout_s, UNCERTAIN_WAIT_S)
        with changed:
            changed.wait_for(lambda: self.has_news or self._assigned.state.closed, limit_s)

    # --- commits ----------------------------------------------------------------------------------

    def positions(self) -> dict[int, int]:
        """queue_id -> next offset, also of queues that are being given up."""
        return {**self._assigned.positions, **self._left}

    def note_seek(self, queue_id: int) -> None:
        """Let the next commit lower the offset of a queue."""
        self._sought.add(queue_id)

    def commit(self, offsets: Mapping[int, int]) -> None:
        """Store offsets under the numbers of the member's grants. Raises: Fenced naming the queues of other members."""
        keys = {(self._topic, queue_id) for queue_id in offsets}
        numbers = {key[1]: each for key, each in self.membership.commit_numbers(keys).items()}
        fenced = set(offsets) - numbers.keys()
        by_shard: dict[int, list[int]] = {}
        for queue_id in sorted(numbers):
            by_shard.setdefault(self._shard_of(queue_id), []).append(queue_id)

        for shard, queues in by_shard.items():
            answer = self._routes.call(
                shard, "commit_offsets", self._commit(queues, offsets, numbers)
            )
            refused = {int(queue_id) for queue_id in answer["fenced"]}
            self._sought -= set(queues) - refused
            for queue_id in refused:
                self.membership.lose((self._topic, queue_id), numbers[queue_id])
            fenced |= refused
        if fenced:
            raise fenced_error(self._group, self._topic, fenced)

    def _commit(
        self, queues: Iterable[int], offsets: Mapping[int, int], numbers: Mapping[int, int]
    ) -> dict[str, object]:
        """The arguments of commit_offsets."""
        arguments: dict[str, object] = {
            "group": self._group,
            "topic": self._topic,
            "offsets": {str(each): int(offsets[each]) for each in queues},
            "numbers": {str(each): numbers[each] for each in queues},
        }
        seeks = sorted(self._sought.intersection(queues))
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


def _shard_of(routes: Routes, key: QueueKey) -> int:
    """The shard of a queue, which may have been added to its topic lately."""
    topic, queue_id = key
    route = routes.topics.find(topic)
    if queue_id >= route.queues:
        for _, answer in routes.ask(routes.known_shards(), "topics", {}, LEADER_TIMEOUT_S):
            if not isinstance(answer, RayMQError):
                routes.topics.note(answer)
        route = routes.topics.find(topic)
    if queue_id >= route.queues:
        # Queues are added one shard after the other.
        raise Unavailable(f"queue {queue_id} of {topic} is not known everywhere yet")
    return route.shard_of(queue_id)
