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
from raymq.store.groups.claims import Claim, Commit, claim_value, ended_value
from raymq.store.groups.coordinator import Coordinator, GroupStep
from raymq.store.groups.heartbeat import Beat, BeatAnswer
from raymq.store.groups.members import CLAIM, GROUP, dated, group_value
from raymq.store.records.requests import AppendedRows
from raymq.store.state.features import GROUPS_LEVEL, feature_level
from raymq.store.state.shard_state import OFFSETS, no_offsets_body, offsets_body
from raymq.store.state.topics import QueueKey, unknown_topic

logger = logging.getLogger("raymq.commit_log")

#: heartbeats that join a group wait so long for others, so that the members that start together are one step
GATHER_MS = 100
#: how often to look for members whose session is over
EXPIRE_EVERY_S = 0.25
#: how often to look for groups that nothing has used for long. The first look comes so long after a leadership begins,
#: when members had time to claim their queues
FORGET_EVERY_MS = 600_000
HOUR_MS = 3_600_000


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
        self._forget_ms = clock.monotonic_ms() + FORGET_EVERY_MS

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
        self._append(group, step.records)
        return step

    def _append(self, group: str, planned: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Append records that change a group. Needs the step's lock. Raises: as `InnerPut.put_decided`."""
        now_ms = self._now_ms()
        records = [(kind, _encoded(dated(value, now_ms))) for kind, value in planned]

        def decide() -> list[tuple[str, bytes]]:
            # The thread may have stalled since: an earlier leadership's plan must not be appended by a later one.
            self._leader.check_serving()
            return records

        if not records:
            return
        try:
            self._note_level()
            appended = self._store.inner_put.put_decided(decide)
        except BaseException:
            # Some of the records may be in the log. The next step plans the rest.
            self._coordinator.assign_again(group)
            self._end = self._store.log.end
            raise
        if appended is not None:
            self._end = appended.end_offset
        fail_point("groups.appended")

    def _note_level(self) -> None:
        """Write the level of the log before its first record of groups. Raises: as `put_inner`."""
        if feature_level(self._store.state.progress) < GROUPS_LEVEL:
            self._leader.check_serving()
            self._store.note_feature_level(GROUPS_LEVEL)

    def _now_ms(self) -> int:
        """The time that records get, as far as it is believed: never before the newest message."""
        return max(self._believed_ms(), self._store.state.store_time_ms)

    def _believed_ms(self) -> int:
        """The newest look at the wall clock, without a jump ahead that is not a day old: see `BelievedClock`."""
        look = self._store.log.marks.clock_look
        return look.wall_ms - look.jumped_ms

    # --- administration ---------------------------------------------------------------------------

    def names(self) -> dict[str, int]:
        """Group -> number of members, of those that this shard coordinates."""
        return {name: len(group.members) for name, group in list(self._store.groups.groups.items())}

    def paused(self) -> list[str]:
        """The groups that this shard coordinates and that are paused."""
        groups = list(self._store.groups.groups.items())
        return [name for name, group in groups if group.facts.is_paused]

    def describe(self, group: str) -> dict[str, Any]:
        """What a group consists of: `Coordinator.describe`."""
        with self._step_lock:
            found = self._coordinator.describe(group, self._clock.monotonic_ms())
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))
        self._leader.await_check()
        return found

    def take_number(self, group: str, queues: Sequence[QueueKey], *, is_forced: bool) -> int:
        """A new number for an operator who takes queues of a group away from their members.

        Raises: Rejected naming the members that have one of the queues, unless `is_forced`.
        """
        with self._step_lock:
            held = {} if is_forced else self._coordinator.holders(group, queues)
            if held:
                raise self._is_read(group, held)
            number = self._store.groups.number + 1
            self._append(group, [(GROUP, {"number": number})])
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))
        return number

    def _is_read(self, group: str, held: Mapping[QueueKey, str]) -> Rejected:
        members = self._store.groups.groups[group].members
        found = sorted(set(held.values()))
        (topic, queue_id), _ = next(iter(held.items()))
        shown = ", ".join(f"{each} of {members[each].facts.client}" for each in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return Rejected(
            f"{len(found)} members of group {group} have these queues, such as queue {queue_id} of {topic}: {shown}"
            f"{more}. Stop them, or take the queues away from them with force (--force)",
            field="force",
            limit="queues that no member has",
            found=found,
        )

    def withdraw(self, group: str, queues: Sequence[QueueKey], number: int) -> None:
        """Let members give queues up that they have under a lower number, and get them again under a higher one."""
        with self._step_lock:
            if group in self._store.groups.groups:
                self._coordinator.withdraw(group, queues, number)
                self._step(group, ())
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))

    def pause(self, group: str, *, is_paused: bool) -> None:
        """Let the members of a group get no messages, or get them again. Raises: Rejected for an unknown group."""
        with self._step_lock:
            known = self._store.groups.groups.get(group)
            if known is None:
                raise Rejected(
                    f"group {group!r} has had no member: only a group with members can be paused. Consumers with "
                    "queues= have none",
                    field="group",
                    limit="a group that had members",
                    found=group,
                )
            if known.facts.is_paused != is_paused:
                facts = known.facts._replace(is_paused=is_paused)
                number = self._store.groups.number
                self._append(group, [(GROUP, group_value(group, facts, number))])
                self._coordinator.assign_again(group)
                self._step(group, ())
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))

    def end(self, group: str) -> tuple[int, bool]:
        """Delete a group that this shard coordinates. A group of the same name is another one.

        Returns: the number of its end, and whether it existed. Raises: Rejected while it has members.
        """
        with self._step_lock:
            known = self._store.groups.groups.get(group)
            if known is not None and known.members:
                raise Rejected(
                    f"group {group} has {len(known.members)} members: close these consumers first. The session of one "
                    "that was killed ends by itself",
                    field="group",
                    limit="a group without members",
                    found=len(known.members),
                )
            number = self._end_group(group)
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))
        return number, known is not None

    def _end_group(self, group: str) -> int:
        """Append the end of a group. Needs the step's lock. Returns: its number."""
        number = self._store.groups.number + 1
        self._append(group, [(GROUP, group_value(group, None, number))])
        self._coordinator.forget(group)
        return number

    # --- what time ends ---------------------------------------------------------------------------

    def run(self) -> None:
        """Remove members whose session is over, and groups that nothing has used for long, until `stop`."""
        while not self._stopping.wait(EXPIRE_EVERY_S):
            with self._step_lock:
                due = self._coordinator.due(self._clock.monotonic_ms())
            for group in due:
                self._expire(group)
            if self._clock.monotonic_ms() >= self._forget_ms:
                self._forget_ms = self._clock.monotonic_ms() + FORGET_EVERY_MS
                self._forget()

    def _forget(self) -> None:
        """Forget groups that nothing has used for long. A shard that takes no writes now does it later."""
        try:
            self._leader.check_serving()
            self.forget_unused()
        except Bug:
            raise
        except (RayMQError, OSError) as error:
            if not self._stopping.is_set():
                logger.warning("unused groups could not be forgotten: %s", error)

    def forget_unused(self) -> list[str]:
        """Forget groups without members, and offsets of groups, that nothing has used for `group_expiry_hours`.

        A group with a member stays. So do offsets of a queue that a member has claimed and not given back.
        Returns: the names of the groups.
        """
        unused_since_ms = self._believed_ms() - int(self._store.config.group_expiry_hours * HOUR_MS)
        ended = []
        for name, group in list(self._store.groups.groups.items()):
            if group.members or not 0 < group.changed_ms <= unused_since_ms:
                continue
            with self._step_lock:
                known = self._store.groups.groups.get(name)
                if known is not None and not known.members:
                    self._end_group(name)
                    ended.append(name)

        state = self._store.state
        old, used = set[str](), set[str]()
        for name, topic in list(state.offsets):
            is_old = 0 < state.offset_times_ms.get((name, topic), 0) <= unused_since_ms
            (old if is_old else used).add(name)
        ended += [
            name for name in sorted(old - used) if self._forget_offsets(name, unused_since_ms)
        ]
        if ended:
            ended = sorted(set(ended))
            self._leader.publish(AppendedRows.up_to(self._store.log.end))
            logger.info(
                "forgot groups without a member or commit for %g hours (group_expiry_hours): %s",
                self._store.config.group_expiry_hours,
                ", ".join(ended),
            )
        return ended

    def _forget_offsets(self, group: str, unused_since_ms: int) -> bool:
        """Delete the offsets of a group on this shard, if all of them are old and no member has a claim."""

        def decide() -> list[tuple[str, bytes]]:
            state, claims = self._store.state, self._store.claims.of_group(group)
            topics = [topic for name, topic in state.offsets if name == group]
            times = [state.offset_times_ms.get((group, topic), 0) for topic in topics]
            is_old = bool(topics) and min(times) > 0 and max(times) <= unused_since_ms
            if not is_old or any(claim.member_id for claim in claims.values()):
                return []
            number = max((claim.number for claim in claims.values()), default=0)
            return self._ending(group, topics, number)

        return self._store.inner_put.put_decided(decide) is not None

    def _ending(self, group: str, topics: Sequence[str], number: int) -> list[tuple[str, bytes]]:
        """The records that delete what this shard has of a group. Args: `number`: no claim below it is valid again."""
        records = [(OFFSETS, no_offsets_body(group, topic)) for topic in topics]
        return [*records, (CLAIM, _encoded(ended_value(group, number)))] if number else records

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
        self._note_level()

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
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
            self._check_topic(topic)
            committed = state.offsets.get((group, topic), {})
            new, refusals = claims.plan_commit(group, topic, wanted, committed)
            refused.update(refusals)
            return [(OFFSETS, offsets_body(group, topic, new, self._now_ms()))] if new else []

        self._await(self._store.inner_put.put_decided(decide))
        return refused

    def commit_unclaimed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Store offsets of a consumer that is not a member.

        Raises: Rejected for a queue that a member of the group has. Nothing was stored.
        """

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            for queue_id, claim in self._store.claims.held(group, topic, offsets).items():
                raise Rejected(
                    f"queue {queue_id} of {topic} belongs to member {claim.member_id} of group {group}: only that "
                    "member commits its offset, until it closes. If it was killed, let a consumer of the group without "
                    "queues= join and close; or use another group",
                    field="offsets",
                    limit="queues that no member has",
                    found=queue_id,
                )
            return [(OFFSETS, offsets_body(group, topic, offsets, self._now_ms()))]

        self._await(self._store.inner_put.put_decided(decide))

    def release(self, group: str, topic: str, member_id: str, numbers: Mapping[int, int]) -> None:
        """End claims of a member that leaves. Others of these queues stay as they are."""

        def decide() -> list[tuple[str, bytes]]:
            released = self._store.claims.plan_release(group, topic, member_id, numbers)
            return [(CLAIM, _encoded(claim_value(group, topic, released)))] if released else []

        self._await(self._store.inner_put.put_decided(decide))

    def reset(
        self, group: str, topic: str, offsets: Mapping[int, int], number: int
    ) -> dict[int, Claim]:
        """Set offsets of a group for an operator, and end the claims of its members there.

        Args: `number`: of `take_number`. Returns: the queues that a member has under a higher number, each with that
        claim. Of these nothing is stored.
        """
        refused: dict[int, Claim] = {}

        def decide() -> list[tuple[str, bytes]]:
            self._check_topic(topic)
            new, refusals = self._store.claims.plan_reset(group, topic, offsets, number)
            refused.update(refusals)
            if not new:
                return []
            # The claims come first: after a crash between both, a member's commit must not be taken any more.
            moved = {queue_id: offsets[queue_id] for queue_id in new}
            return [
                (CLAIM, _encoded(claim_value(group, topic, new))),
                (OFFSETS, offsets_body(group, topic, moved, self._now_ms())),
            ]

        self._await(self._store.inner_put.put_decided(decide))
        return refused

    def forget_offsets(self, group: str, number: int) -> list[str]:
        """Delete the offsets and claims that this shard has of a group.

        Args: `number`: of `end`. Returns: the topics of which it had offsets.
        Raises: Rejected when the group has got a member since. Nothing was deleted.
        """
        topics: list[str] = []

        def decide() -> list[tuple[str, bytes]]:
            claims = self._store.claims.of_group(group)
            topics.extend(topic for name, topic in self._store.state.offsets if name == group)
            for (topic, queue_id), claim in claims.items():
                if claim.number > number and claim.member_id:
                    raise Rejected(
                        f"group {group} has got a member again: {claim.member_id} has queue {queue_id} of {topic}. "
                        "Its offsets stay on this shard",
                        field="group",
                        limit="a group without members",
                        found=claim.member_id,
                    )
            return self._ending(group, topics, number) if topics or claims else []

        self._await(self._store.inner_put.put_decided(decide))
        return topics

    def _check_topic(self, topic: str) -> None:
        """Raises: Rejected for a topic that was deleted meanwhile: its offsets must not come back. Has the put lock."""
        if topic not in self._store.state.topics:
            raise unknown_topic(topic)

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
