"""The membership of a consumer in its group: heartbeats, claims, and what its program has to do about them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from raymq.client.client_thread import ClientThread, join_at_close
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    Bug,
    Fenced,
    InstanceReplaced,
    RayMQError,
    TopicMissing,
    Unavailable,
)
from raymq.store.groups.heartbeat import REPLACES_MAX, Beat, BeatAnswer, JoinRequest, pack_beat
from raymq.store.groups.members import MemberFacts, TopicSubscription
from raymq.store.state.topics import QueueKey

from .group_member import GroupMember
from .heartbeats import Heartbeats

logger = logging.getLogger("raymq")

#: pause after a claim that failed
CLAIM_RETRY_S = 0.2
#: how long the claims at one shard may take: those of others wait meanwhile
CLAIM_TIMEOUT_S = 5.0
#: how long the last heartbeat of a member may take
LEAVE_TIMEOUT_S = 2.0

#: one clock for all members of the process, so that they share the thread of their heartbeats
_CLOCK = Clock()


class Claimed(NamedTuple):
    """A queue whose claim was confirmed."""

    number: int
    #: where the group goes on; None: it has no offset of the queue yet
    offset: int | None


class Membership:
    """One consumer's place in a group. It joins again by itself after it was removed.

    Threads: the heartbeats' thread brings answers, a thread of its own claims queues. The program's thread calls the
    rest. `changed` guards all fields, and is notified when there is something for the program to do.
    """

    def __init__(
        self,
        routes: Routes,
        group: str,
        subscription: TopicSubscription,
        *,
        changed: threading.Condition,
        shard_of: Callable[[QueueKey], int],
        notify: Callable[[], None],
        session_timeout_ms: int,
        revoke_timeout_ms: int,
        max_poll_interval_ms: int | None,
        instance_id: str,
        clock: Clock | None = None,
        filter_kind: str = "",
        expression: str = "",
    ) -> None:
        """Join. Args: `shard_of`: where a queue is. `notify`: wakes the program; called with `changed` held."""
        facts = MemberFacts(
            subscription,
            instance_id,
            f"{socket.gethostname()}:{os.getpid()}",
            session_timeout_ms,
            revoke_timeout_ms,
        )
        self.group = group
        self.due_ms: int | None = 0
        #: why this membership is over for good
        self.failure: RayMQError | None = None
        #: the newest failure of a call, until one succeeds
        self.trouble: RayMQError | None = None
        #: claimed queues that the program does not read yet
        self.claimed: dict[QueueKey, Claimed] = {}
        #: an answer to a heartbeat came
        self.has_joined = False

        self._routes = routes
        self._join = JoinRequest(facts, "stream", filter_kind, expression)
        self._changed = changed
        self._shard_of = shard_of
        self._notify = notify
        self._clock = clock or _CLOCK
        self._member = GroupMember(uuid.uuid4().hex, self._join)
        #: queues that the program reads
        self._read: set[QueueKey] = set()
        #: queues that the program has to give up
        self._revoked: set[QueueKey] = set()
        #: no heartbeat is sent any more
        self.is_over = False
        self._max_poll_interval_ms = max_poll_interval_ms
        #: when the program polled last; None: it does so now
        self._polled_ms: int | None = self._clock.monotonic_ms()
        #: the program has not polled for too long: the member has left, and joins again at the next poll
        self._is_idle = False

        found = routes.call(0, "find_coordinator", {"group": group})
        self._coordinator = int(found["shard"])
        self._claims = ClientThread(self._claim_until_over, f"raymq-claims-{group}")
        self._claims.start()
        self._heartbeats = Heartbeats.add(self, routes, self._coordinator, self._clock)

    # --- heartbeats -------------------------------------------------------------------------------

    def next_beat(self) -> Beat:
        """See `HeartbeatSender`."""
        with self._changed:
            self._check_polled()
            if self._is_idle:
                return Beat(self._member.member_id, is_leaving=True)
            return self._member.beat()

    def _check_polled(self) -> None:
        """Give up all queues if the program has not polled for too long. Needs the lock."""
        limit_ms, polled_ms = self._max_poll_interval_ms, self._polled_ms
        if limit_ms is None or polled_ms is None or self._is_idle:
            return
        if self._clock.monotonic_ms() - polled_ms <= limit_ms:
            return
        logger.warning(
            "a member of group %s leaves: its program has not polled for %g s (max_poll_interval_s)",
            self.group,
            limit_ms / 1000,
        )
        self._is_idle = True
        self._revoke(self._read)
        self.claimed.clear()
        self._member.fence()

    @contextlib.contextmanager
    def polling(self) -> Iterator[None]:
        """The program polls now. If it did not do so for too long, the member joins again."""
        with self._changed:
            self._polled_ms = None
            joins = self._is_idle and self.failure is None
            if joins:
                self._is_idle = False
                self._join_again()
        if joins:
            self._heartbeats.wake()
        try:
            yield
        finally:
            with self._changed:
                self._polled_ms = self._clock.monotonic_ms()

    @property
    def must_poll(self) -> bool:
        """Whether the member leaves when its program does not poll."""
        return self._max_poll_interval_ms is not None

    def take_answer(self, beat: Beat, answer: BeatAnswer | RayMQError, sent_ms: int) -> None:
        """See `HeartbeatSender`."""
        with self._changed:
            if self.is_over or beat.member_id != self._member.member_id:
                return
            if self.failure is not None:
                self.due_ms = None
                return
            self.trouble = None
            if self._is_idle:
                # It has left; or was removed before.
                self.due_ms = None
            elif isinstance(answer, BeatAnswer):
                self._member.answered(beat, answer, sent_ms)
                self.has_joined = True
                self.due_ms = sent_ms + answer.interval_ms
                now = self._member.beat()
                if (beat.version, beat.owned) != (now.version, now.owned):
                    # It has given queues up since, or has another assignment.
                    self.due_ms = self._clock.monotonic_ms()
                self._revoke(key for key in self._read if key in self._member.releasing)
                self._release_unread()
            elif isinstance(answer, InstanceReplaced):
                self._revoke(self._read)
                self._member.fence()
                self.failure, self.due_ms = answer, None
            elif isinstance(answer, Fenced):
                self._join_again()
            elif answer.retriable:
                self.trouble = answer
                self.due_ms = self._clock.monotonic_ms() + int(CLAIM_RETRY_S * 1000)
            else:
                self.failure, self.due_ms = answer, None

            if self._member.is_replaced and not self._member.releasing:
                self._fail_as_replaced()
            self._notify()

    def note_failure(self, error: RayMQError) -> None:
        """See `HeartbeatSender`."""
        with self._changed:
            self.trouble = error
            if not error.retriable:
                self.failure, self.due_ms = error, None
            self._notify()

    def _revoke(self, keys: Iterable[QueueKey]) -> None:
        """Have the program give up queues. Needs the lock."""
        for key in list(keys):
            self._read.discard(key)
            self._revoked.add(key)

    def _release_unread(self) -> None:
        """Release what the program never got. Needs the lock."""
        unread = [key for key in self._member.releasing if key not in self._revoked]
        self._member.released(unread)
        for key in list(self.claimed):
            if key not in self._member.claimed:
                del self.claimed[key]
        if unread:
            self.due_ms = self._clock.monotonic_ms()

    def _join_again(self) -> None:
        """Begin another membership after this one was removed. Needs the lock."""
        self._revoke(self._read)
        self.claimed.clear()
        self._member.fence()
        if self._member.is_replaced:
            self._fail_as_replaced()
            return
        if self._join.facts.instance_id:
            # The earlier memberships may last until their sessions end: one that kept a queue for too long, or one
            # whose last heartbeat was lost.
            replaces = (*self._join.replaces, self._member.member_id)[-REPLACES_MAX:]
            self._join = self._join._replace(replaces=replaces)
        self._member = GroupMember(uuid.uuid4().hex, self._join._replace(is_again=True))
        self.due_ms = self._clock.monotonic_ms()

    def _fail_as_replaced(self) -> None:
        instance_id = self._join.facts.instance_id
        self.failure = Fenced(
            f"another consumer of group {self.group} has joined with instance_id {instance_id!r}: this one is replaced",
            group=self.group,
            field="instance_id",
            found=instance_id,
        )
        # One more heartbeat says that its queues are free.
        self.due_ms = self._clock.monotonic_ms()

    # --- claims -----------------------------------------------------------------------------------

    def _claim_until_over(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_over or self._member.to_claim())
                if self.is_over:
                    return
                member = self._member
                wanted, version = member.to_claim(), member.version

            try:
                failed = self._claim(member, wanted, version)
            except BaseException as error:
                # Without this thread no further queue would be read.
                failed = error if isinstance(error, RayMQError) else Bug(f"claims: {error!r}")

            with self._changed:
                if failed is None and self._member.to_claim() == wanted:
                    # The member cannot know its queues now.
                    self._changed.wait_for(lambda: self.is_over, CLAIM_RETRY_S)
                if failed is not None:
                    self.trouble = failed
                    # A topic is made, and deleted, on one shard after the other.
                    if not failed.retriable and not isinstance(failed, TopicMissing):
                        self.failure, self.due_ms = failed, None
                    self._notify()
                    self._changed.wait_for(lambda: self.is_over, CLAIM_RETRY_S)

    def _claim(
        self, member: GroupMember, wanted: Mapping[QueueKey, int], version: int
    ) -> RayMQError | None:
        """Claim queues at their shards. Returns: why some could not be claimed."""
        failed: RayMQError | None = None
        calls: dict[tuple[int, str], dict[int, int]] = {}
        for key, number in wanted.items():
            try:
                calls.setdefault((self._shard_of(key), key[0]), {})[key[1]] = number
            except RayMQError as error:
                failed = error

        for (shard, topic), numbers in calls.items():
            arguments = {
                "group": self.group,
                "topic": topic,
                "member": member.member_id,
                "numbers": _as_json(numbers),
            }
            try:
                answer = self._routes.call(shard, "claim_queues", arguments, CLAIM_TIMEOUT_S)
            except RayMQError as error:
                failed = error
                continue
            with self._changed:
                self._take_claims(member, topic, numbers, version, answer)
                self._notify()
        return failed

    def _take_claims(
        self,
        member: GroupMember,
        topic: str,
        numbers: Mapping[int, int],
        version: int,
        answer: Mapping[str, Any],
    ) -> None:
        now_ms = self._clock.monotonic_ms()
        for queue_id, number in numbers.items():
            key = topic, queue_id
            if str(queue_id) in answer["fenced"]:
                self._lose(member, key, number)
            elif member is self._member and member.takes_claim(key, number, version, now_ms):
                member.took_claim(key, number)
                offset = answer["offsets"].get(str(queue_id))
                self.claimed[key] = Claimed(number, None if offset is None else int(offset))

    def _lose(self, member: GroupMember, key: QueueKey, number: int) -> None:
        """Another member has a queue, or an operator took it. Needs the lock."""
        if member.lost(key, number) and member is self._member:
            self._revoke({key} & self._read)
            self.claimed.pop(key, None)

    # --- the program ------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the first assignment is claimed, or never will be. Needs the lock."""
        return self.failure is not None or (self.has_joined and not self._member.to_claim())

    @property
    def has_news(self) -> bool:
        """Whether the program has something to do. Needs the lock."""
        return bool(self._revoked or self.claimed or self.failure)

    @property
    def has_instance(self) -> bool:
        """Whether the member has a name that outlives its process."""
        return bool(self._join.facts.instance_id)

    def fail(self, error: RayMQError) -> None:
        """End the membership: the program cannot read what it is given."""
        with self._changed:
            self.failure, self.due_ms = error, None

    def take_revoked(self) -> set[QueueKey]:
        """The queues that the program has to give up: `release` must follow, after its last commit."""
        with self._changed:
            return set(self._revoked)

    def release(self, keys: Iterable[QueueKey]) -> None:
        """Say that the program has given up queues."""
        with self._changed:
            gone = set(keys)
            self._revoked -= gone
            self._member.released(gone)
            if self._member.is_replaced and not self._member.releasing:
                self._fail_as_replaced()
            elif self.failure is None:
                self.due_ms = self._clock.monotonic_ms()
        self._heartbeats.wake()

    def owned(self) -> set[QueueKey]:
        """The queues that the program reads or has to give up."""
        with self._changed:
            return self._read | self._revoked

    def return_claimed(self, claimed: Mapping[QueueKey, Claimed]) -> None:
        """Undo `take_claimed`: the program could not begin to read them now."""
        with self._changed:
            self.claimed = {**claimed, **self.claimed}
            self._read -= claimed.keys()

    def take_claimed(self) -> dict[QueueKey, Claimed]:
        """The queues that the program reads from now on."""
        with self._changed:
            claimed, self.claimed = self.claimed, {}
            self._read |= claimed.keys()
            return claimed

    def may_read(self, key: QueueKey) -> bool:
        """Whether messages of a queue may be returned to the program."""
        with self._changed:
            return self._member.may_read(key, self._clock.monotonic_ms())

    def assignment(self) -> dict[QueueKey, int]:
        """The queues that are the member's now, with their numbers. Empty while it cannot know."""
        with self._changed:
            if not self._member.believes(self._clock.monotonic_ms()):
                return {}
            return dict(self._member.claimed)

    def commit_numbers(self, keys: Iterable[QueueKey]) -> Mapping[QueueKey, int]:
        """The numbers under which offsets of queues are committed. Those of other members are missing."""
        with self._changed:
            return self._member.commit_numbers(keys)

    def lose(self, key: QueueKey, number: int) -> None:
        """A commit of a queue was refused: another member has it."""
        with self._changed:
            self._lose(self._member, key, number)

    # --- end --------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Let the threads end, soon. The session ends by itself. No lock is taken: the collector calls it anywhere."""
        self.due_ms = None
        self.is_over = True

    def leave(self, *, keeps_place: bool = False) -> None:
        """Leave the group, after the program has given up its queues. Best effort: else the session ends by itself."""
        self.abandon()
        with self._changed:
            self._notify()
            claimed = dict(self._member.claimed)
            beat = self._member.leave(keeps_place=keeps_place)
            member_id = self._member.member_id
        self._heartbeats.remove(self)
        join_at_close(self._claims, self._routes.transport)
        self._release_claims(member_id, claimed)
        # If it is lost, the members that stay get its queues when its session is over.
        with contextlib.suppress(RayMQError):
            beats = {"beats": [pack_beat(self.group, beat)]}
            self._routes.call(self._coordinator, "group_beat", beats, LEAVE_TIMEOUT_S)

    def _release_claims(self, member_id: str, claimed: Mapping[QueueKey, int]) -> None:
        """Let consumers that are no members commit these queues' offsets again. A failure is passed over."""
        calls: dict[tuple[int, str], dict[int, int]] = {}
        for key, number in claimed.items():
            with contextlib.suppress(RayMQError):
                calls.setdefault((self._shard_of(key), key[0]), {})[key[1]] = number
        for (shard, topic), numbers in calls.items():
            arguments = {
                "group": self.group,
                "topic": topic,
                "member": member_id,
                "numbers": _as_json(numbers),
            }
            with contextlib.suppress(RayMQError):
                self._routes.call(shard, "release_claims", arguments, LEAVE_TIMEOUT_S)


def _as_json(numbers: Mapping[int, int]) -> dict[str, int]:
    return {str(queue_id): number for queue_id, number in numbers.items()}


def fenced_error(group: str, queues: Iterable[QueueKey]) -> Fenced:
    """Why offsets of queues were not committed."""
    found: dict[str, list[int]] = {}
    for topic, queue_id in sorted(queues):
        found.setdefault(topic, []).append(queue_id)
    shown = " and ".join(f"{ids} of {topic}" for topic, ids in found.items())
    # The first topic; `others` has the rest.
    first, *others = found
    return Fenced(
        f"the queues {shown} belong to another member of group {group} now: their offsets were not committed. That "
        "member begins where the group's last commit was",
        group=group,
        topic=first,
        queues=found[first],
        **({"others": {topic: found[topic] for topic in others}} if others else {}),
    )


def unavailable(trouble: RayMQError | None, group: str, timeout_ms: int) -> Unavailable:
    """Why a consumer could not join in time."""
    why = "" if trouble is None else f": {trouble}"
    return Unavailable(f"the consumer could not join group {group} within {timeout_ms} ms{why}")
