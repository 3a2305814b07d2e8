"""Runs the consumer groups that this shard coordinates, for a leader."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, RayMQError, Rejected, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.groups.coordinator import Coordinator, GroupStep
from raymq.store.groups.foreign_members import CLIENTS_SHOWN_MAX, ForeignClient, ForeignReset
from raymq.store.groups.heartbeat import Beat, BeatAnswer
from raymq.store.groups.members import GROUP, dated, group_value
from raymq.store.records.requests import AppendedRows
from raymq.store.state.topics import QueueKey

from .group_records import GroupHost, believed_ms, encoded, note_level, record_time_ms
from .queue_claims import QueueClaims

logger = logging.getLogger("raymq.commit_log")

#: heartbeats that join a group wait so long for others, so that the members that start together are one step
GATHER_MS = 100
#: how often to look for members whose session is over
EXPIRE_EVERY_S = 0.25
#: how often to look for groups that nothing has used for long. The first look comes so long after a leadership begins,
#: when members had time to claim their queues
FORGET_EVERY_MS = 600_000
HOUR_MS = 3_600_000


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
    """Decides by `Coordinator`, appends the records, and lets answers wait for them.

    Threads: any may call. `run` has its own.
    """

    def __init__(self, leader: GroupHost, clock: Clock, claims: QueueClaims) -> None:
        store = leader.store
        self._claims = claims
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
        now_ms = record_time_ms(self._store)
        records = [(kind, encoded(dated(value, now_ms))) for kind, value in planned]

        def decide() -> list[tuple[str, bytes]]:
            # The thread may have stalled since: an earlier leadership's plan must not be appended by a later one.
            self._leader.check_serving()
            return records

        if not records:
            return
        try:
            note_level(self._leader)
            appended = self._store.inner_put.put_decided(decide)
        except BaseException:
            # Some of the records may be in the log. The next step plans the rest.
            self._coordinator.assign_again(group)
            self._end = self._store.log.end
            raise
        if appended is not None:
            self._end = appended.end_offset
        fail_point("groups.appended")

    # --- clients of other protocols ---------------------------------------------------------------

    def note_foreign(
        self, protocol: str, server: str, groups: Mapping[str, Sequence[ForeignClient]]
    ) -> tuple[dict[str, list[str]], list[ForeignReset]]:
        """Take the word of a server on clients of its protocol in groups: `ForeignMembers.note`.

        Returns: some members' programs, of those of these groups that have members; and what operators have reset.
        """
        with self._step_lock:
            now_ms, foreign = self._clock.monotonic_ms(), self._coordinator.foreign
            foreign.note(protocol, server, groups, now_ms)
            resets = foreign.resets(server, now_ms)
            known = self._store.groups.groups
            found = {each: known[each].members for each in groups if each in known}
            shown = {
                group: sorted({each.facts.client for each in members.values()})[:CLIENTS_SHOWN_MAX]
                for group, members in found.items()
                if members
            }
            end = self._end
        self._leader.await_promise(AppendedRows.up_to(end))
        self._leader.await_check()
        return shown, resets

    def notify_reset(
        self, group: str, number: int, offsets: Mapping[str, Mapping[int, int]]
    ) -> list[str]:
        """Notify the clients of other protocols in a group of offsets that were set: `ForeignMembers.note_reset`."""
        with self._step_lock:
            foreign = self._coordinator.foreign
            noted = foreign.note_reset(group, number, offsets, self._clock.monotonic_ms())
        # Servers say their words to the leader, and hear of it there.
        self._leader.await_check()
        return noted

    def foreign_counts(self) -> dict[str, int]:
        """Group -> how many clients of other protocols consume in it, as their servers have reported lately."""
        with self._step_lock:
            return self._coordinator.foreign.counts(self._clock.monotonic_ms())

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
            f"{len(found)} member(s) of group {group} have these queues, such as queue {queue_id} of {topic}: {shown}"
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

            is_changed = known.facts.is_paused != is_paused
            if is_changed:
                facts = known.facts._replace(is_paused=is_paused)
                number = self._store.groups.number
                self._append(group, [(GROUP, group_value(group, facts, number))])
                self._coordinator.assign_again(group)
                self._step(group, ())
            end = self._end

        self._leader.await_promise(AppendedRows.up_to(end))
        if not is_changed:
            self._leader.await_check()

    def end(self, group: str) -> tuple[int, bool]:
        """Delete a group that this shard coordinates. A group of the same name is another one.

        Returns: the number of its end, and whether it existed. Raises: Rejected while it has members.
        """
        with self._step_lock:
            known = self._store.groups.groups.get(group)
            if known is not None and known.members:
                raise Rejected(
                    f"group {group} has {len(known.members)} member(s): close these consumers first. The session of "
                    "one that was killed ends by itself",
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
        unused_since_ms = believed_ms(self._store) - int(
            self._store.config.group_expiry_hours * HOUR_MS
        )
        ended = []
        for name, group in list(self._store.groups.groups.items()):
            if group.members or not 0 < group.changed_ms <= unused_since_ms:
                continue
            with self._step_lock:
                known = self._store.groups.groups.get(name)
                if known is not None and not known.members:
                    self._end_group(name)
                    ended.append(name)

        ended += self._claims.forget_unused(unused_since_ms)
        if ended:
            ended = sorted(set(ended))
            self._leader.publish(AppendedRows.up_to(self._store.log.end))
            logger.info(
                "forgot groups without a member or commit for %g hours (group_expiry_hours): %s",
                self._store.config.group_expiry_hours,
                ", ".join(ended),
            )
        return ended

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
