"""Runs the consumer groups that this shard coordinates, and the claims on its queues, for a leader."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, RayMQError, Rejected, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.claims import Claim, Commit, claim_value
from raymq.store.groups.coordinator import Coordinator, GroupStep
from raymq.store.groups.heartbeat import Beat, BeatAnswer
from raymq.store.groups.members import CLAIM
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import OFFSETS, offsets_body

logger = logging.getLogger("raymq.commit_log")

#: heartbeats that join a group wait so long for others, so that the members that start together are one step
GATHER_MS = 100
#: how often to look for members whose session is over
EXPIRE_EVERY_S = 0.25


class GroupHost(Protocol):
    """What the service needs of its leader: see `scope.LeaderScope`."""

    store: MessageStore

    def check_serving(self) -> None: ...

    def await_check(self) -> None: ...

    def publish(self, appended: AppendedRows) -> None: ...

    def await_promise(self, appended: AppendedRows) -> None: ...


@dataclass
class _Round:
    """Heartbeats of several callers that are answered together, after one check."""

    beats: dict[str, list[Beat]] = field(default_factory=dict)
    answers: dict[str, list[BeatAnswer | RayMQError]] = field(default_factory=dict)
    is_done: threading.Event = field(default_factory=threading.Event)
    failure: RayMQError | None = None

    def add(self, group: str, beat: Beat) -> tuple[str, int]:
        """Take a heartbeat in. Returns: where its answer will be."""
        beats = self.beats.setdefault(group, [])
        beats.append(beat)
        return group, len(beats) - 1


class GroupService:
    """Decides by `Coordinator` and `ClaimTable`, appends the records, and lets answers wait for them.

    Threads: any may call. `run` has its own.
    """

    def __init__(self, leader: GroupHost, clock: Clock) -> None:
        store = leader.store
        self._leader = leader
        self._store = store
        self._clock = clock
        self._coordinator = Coordinator(store.groups)
        #: held during a step, from its plan to its answers
        self._step_lock = threading.Lock()
        self._gather_lock = threading.Lock()
        #: the round that still takes heartbeats
        self._open: _Round | None = None
        #: the end of the newest record of a group, which answers rest on
        self._end = store.log.end
        self._stopping = threading.Event()

    # --- heartbeats -------------------------------------------------------------------------------

    def beat(self, asked: Sequence[tuple[str, Beat]]) -> list[BeatAnswer | RayMQError]:
        """Answer heartbeats of members: group and heartbeat. Each has its own answer or refusal, in their order.

        Raises: Unavailable, DeliveryUnknown. The same call may be repeated.
        """
        self._leader.check_serving()
        is_joining = any(not beat.version and not beat.is_leaving for _, beat in asked)
        with self._gather_lock:
            gathering = self._open
            is_mine = gathering is None
            if gathering is None:
                gathering = _Round()
                if is_joining:
                    self._open = gathering
            places = [gathering.add(group, beat) for group, beat in asked]

        if is_mine:
            self._lead_round(gathering, waits_ms=GATHER_MS if is_joining else 0)
        else:
            gathering.is_done.wait()
        if gathering.failure is not None:
            raise gathering.failure
        return [gathering.answers[group][index] for group, index in places]

    def _lead_round(self, gathering: _Round, *, waits_ms: int) -> None:
        """Answer all heartbeats of a round. Callers: the thread that began it."""
        try:
            if waits_ms:
                self._clock.sleep_ms(waits_ms)
                with self._gather_lock:
                    self._open = None
            self._answer_round(gathering)
        except RayMQError as error:
            gathering.failure = error
        except OSError as error:
            gathering.failure = Unavailable(f"group_beat: {error}", field="store")
        except BaseException as error:
            gathering.failure = Bug(f"group_beat: {error!r}")
            raise
        finally:
            gathering.is_done.set()

    def _answer_round(self, gathering: _Round) -> None:
        needs_check = False
        with self._step_lock:
            for group, beats in gathering.beats.items():
                step = self._step(group, beats)
                gathering.answers[group] = self._coordinator.answers(step)
                needs_check |= not step.records
            end = self._end

        # An answer also rests on records of earlier steps, which may not be confirmed yet.
        self._leader.await_promise(AppendedRows.up_to(end))
        if needs_check:
            self._leader.await_check()
        else:
            fail_point("groups.confirmed")

    def _step(self, group: str, beats: Sequence[Beat]) -> GroupStep:
        """Take a step and append its records. Needs the step's lock. Raises: as `InnerPut.put_decided`.

        The plan is made without the put lock: puts would wait for that of a large group. While this replica leads, only
        steps change groups.
        """
        topics = self._store.state.queue_counts()
        step = self._coordinator.step(group, beats, topics, self._clock.monotonic_ms())
        records = [(kind, _encoded(value)) for kind, value in step.records]

        def decide() -> list[tuple[str, bytes]]:
            # The thread may have stalled since: an earlier leadership's plan must not be appended by a later one.
            self._leader.check_serving()
            return records

        if not records:
            return step
        try:
            appended = self._store.inner_put.put_decided(decide)
        except BaseException:
            # Some of the records may be in the log. The next step plans the rest.
            self._coordinator.assign_again(group)
            self._end = self._store.log.end
            raise
        if appended is not None:
            self._end = appended.end_offset
        fail_point("groups.appended")
        return step

    def names(self) -> dict[str, int]:
        """Group -> number of members, of those that this shard coordinates."""
        return {name: len(group.members) for name, group in list(self._store.groups.groups.items())}

    def describe(self, group: str) -> dict[str, Any]:
        """What a group consists of: `Coordinator.describe`."""
        with self._step_lock:
            found = self._coordinator.describe(group, self._clock.monotonic_ms())
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))
        self._leader.await_check()
        return found

    def run(self) -> None:
        """Remove members whose session is over, until `stop`."""
        while not self._stopping.wait(EXPIRE_EVERY_S):
            with self._step_lock:
                due = self._coordinator.due(self._clock.monotonic_ms())
            for group in due:
                self._expire(group)

    def _expire(self, group: str) -> None:
        """Remove members of one group. A shard that takes no writes now is asked again."""
        try:
            self._leader.check_serving()
            with self._step_lock:
                step = self._step(group, ())
                end = self._end
            if step.records:
                self._leader.publish(AppendedRows.up_to(end))
        except Bug:
            raise
        except (RayMQError, OSError) as error:
            if not self._stopping.is_set():
                logger.warning("group %s: members could not be removed: %s", group, error)

    def stop(self) -> None:
        """End `run`."""
        self._stopping.set()

    # --- claims and commits -----------------------------------------------------------------------

    def claim(
        self, group: str, topic: str, member_id: str, wanted: Mapping[int, int]
    ) -> tuple[dict[int, int], dict[int, Claim]]:
        """Give queues to a member. Args: `wanted`: queue -> number of its grant.

        Returns: queue -> committed offset of the group, of those that have one; and the refused queues, each with the
        claim that stands.
        """
        claims, state = self._store.claims, self._store.state
        refused: dict[int, Claim] = {}
        offsets: dict[int, int] = {}

        def decide() -> list[tuple[str, bytes]]:
            new, refusals = claims.plan(group, topic, member_id, wanted)
            refused.update(refusals)
            # Later commits of an earlier owner are refused by the new claims.
            offsets.update(state.offsets.get((group, topic), {}))
            return [(CLAIM, _encoded(claim_value(group, topic, new)))] if new else []

        appended = self._store.inner_put.put_decided(decide)
        fail_point("groups.claim_appended")
        self._await(appended)
        mine = wanted.keys() - refused.keys()
        return {each: offsets[each] for each in sorted(mine) if each in offsets}, refused

    def commit(self, group: str, topic: str, wanted: Mapping[int, Commit]) -> dict[int, Claim]:
        """Store offsets of a member. Returns: the refused queues, each with the claim that stands."""
        claims, state = self._store.claims, self._store.state
        refused: dict[int, Claim] = {}

        def decide() -> list[tuple[str, bytes]]:
            committed = state.offsets.get((group, topic), {})
            new, refusals = claims.plan_commit(group, topic, wanted, committed)
            refused.update(refusals)
            return [(OFFSETS, offsets_body(group, topic, new))] if new else []

        self._await(self._store.inner_put.put_decided(decide))
        return refused

    def commit_unclaimed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Store offsets of a consumer that is not a member.

        Raises: Rejected for a queue that a member of the group has. Nothing was stored.
        """

        def decide() -> list[tuple[str, bytes]]:
            for queue_id, claim in self._store.claims.held(group, topic, offsets).items():
                raise Rejected(
                    f"queue {queue_id} of {topic} belongs to member {claim.member_id} of group {group}: only that "
                    "member commits its offset, until it closes. If it was killed, let a consumer of the group without "
                    "queues= join and close; or use another group",
                    field="offsets",
                    limit="queues that no member has",
                    found=queue_id,
                )
            return [(OFFSETS, offsets_body(group, topic, offsets))]

        self._await(self._store.inner_put.put_decided(decide))

    def release(self, group: str, topic: str, member_id: str, numbers: Mapping[int, int]) -> None:
        """End claims of a member that leaves. Others of these queues stay as they are."""

        def decide() -> list[tuple[str, bytes]]:
            released = self._store.claims.plan_release(group, topic, member_id, numbers)
            return [(CLAIM, _encoded(claim_value(group, topic, released)))] if released else []

        self._await(self._store.inner_put.put_decided(decide))

    def _await(self, appended: AppendedRows | None) -> None:
        """Let an answer wait for everything that it rests on: its own record, or earlier ones and a check."""
        if appended is not None:
            self._leader.await_promise(appended)
        else:
            self._leader.await_promise(AppendedRows.up_to(self._store.log.end))
            self._leader.await_check()


#: one encoder for all records
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _encoded(value: Mapping[str, Any]) -> bytes:
    return _encode(value).encode()
