"""All schedules of a few exchanges between three replicas, breadth first: what random runs would find too rarely.

An action is one whole exchange: a replica asks for votes while it reaches some others, a leader sends them a heartbeat
or streams its log to one follower, an answer arrives a second time, a process restarts, a disk is lost. Messages of an
exchange are delivered in order between the replicas that reach each other, and are lost otherwise. States that were
seen are not visited again. The machine is the one that ships; logs are lists of (epoch, record).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any, TypeAlias, TypeVar

from raymq.replication import election_events as r
from raymq.replication import wire
from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import Ballot, ElectionState, LogFacts
from raymq.replication.election_limits import ElectionLimits
from raymq.replication.leader_knowledge import LeaderKnowledge
from raymq.replication.wire import ReplicaProcess

from .store import Broken

#: a replica, and the kind of its message that comes twice
Hold: TypeAlias = tuple[int, type[wire.Election]]

Thing = TypeVar("Thing")

MEMBERS = (0, 1, 2)
RECORD_BYTES = 10
#: later than any timer of a step before
ROUND_MS = 100_000
#: a leader steps down only because of what it hears
LIMITS = ElectionLimits(majority_silence_ms=1 << 40, stream_silence_ms=1 << 40)


@dataclass
class Member:
    """One replica: its disk, and its process."""

    id: int
    log: tuple[int, ...] = ()
    ballot: Ballot = field(default_factory=Ballot)
    incarnation: int = 1
    replica: ElectionMachine | None = None
    #: (leader's epoch, records equal to the leader's)
    matched: tuple[int, int] = (0, 0)

    @property
    def process(self) -> ReplicaProcess:
        return ReplicaProcess(self.id, self.incarnation)

    def facts(self) -> LogFacts:
        end = len(self.log) * RECORD_BYTES
        epoch, records = self.matched
        return LogFacts(self.log[-1] if self.log else 0, end, end, records * RECORD_BYTES, epoch)


class State:
    """Three replicas, what was confirmed, and at most one message that will arrive again."""

    def __init__(self, machine: type[ElectionMachine], *, holds: bool = False) -> None:
        """Args: `holds`: answers may come twice, so that states also differ by the processes that asked."""
        self.machine = machine
        self.holds = holds
        self.now = 0
        self.members = [Member(number) for number in MEMBERS]
        self.confirmed: tuple[int, ...] = ()
        self.leaders: dict[int, ReplicaProcess] = {}
        self.held: tuple[int, r.Received] | None = None
        self.losses = self.restarts = 0
        for member in self.members:
            self.start(member)

    def copied(self) -> State:
        other = _twin(self)
        other.leaders = dict(self.leaders)
        other.members = []
        for member in self.members:
            twin = _twin(member)
            assert member.replica is not None
            machine = twin.replica = _twin(member.replica)
            machine._answers = dict(machine._answers)
            machine._health = _twin(machine._health)
            if machine.state is ElectionState.LEADER:
                # What only times a step-down stays common.
                leadership = machine._leadership = _twin(machine._leadership)
                leadership.durable_ends = dict(leadership.durable_ends)
                leadership.answers = dict(leadership.answers)
                leadership.joins = list(leadership.joins)
            other.members.append(twin)
        return other

    def key(self) -> tuple[Any, ...]:
        """What distinguishes two states. Times are left out: every exchange begins after all timers."""
        members = []
        for member in self.members:
            machine = member.replica
            assert machine is not None
            leadership = machine._leadership
            led = (
                leadership.begun_end,
                tuple(sorted(leadership.durable_ends.items())),
                tuple(_waiting(leadership)),
                leadership.check_number if self.holds else 0,
            )
            members.append(
                (
                    member.log,
                    machine.ballot,
                    machine.state,
                    machine.leader,
                    machine._join_target,
                    machine._nonce > 0,
                    (machine._question, machine._last_nonce, member.incarnation)
                    if self.holds
                    else 0,
                    member.matched,
                    led if machine.state is ElectionState.LEADER else None,
                )
            )
        return tuple(members), self.confirmed, self.held, self.losses, self.restarts

    def start(self, member: Member) -> None:
        member.replica = self.machine(member.process, MEMBERS, member.ballot, limits=LIMITS)
        member.matched = (0, 0)
        # The first tick sets the timers.
        self.step(member, r.ElectionTick(0.0), [])

    # --- exchanges --------------------------------------------------------------------------------

    def step(
        self, member: Member, event: r.ElectionEvent, sent: list[tuple[int, r.Received]]
    ) -> None:
        machine = member.replica
        assert machine is not None
        confirmed = machine.confirmed
        effects = machine.step(event, self.now, member.facts())
        has_confirmed = machine.confirmed > confirmed
        for effect in effects:
            if isinstance(effect, r.Persist):
                member.ballot = effect.ballot
            elif isinstance(effect, r.SendElection):
                message = r.Received(member.process, effect.addressee, effect.epoch, effect.message)
                sent.append((effect.addressee.id, message))
            elif isinstance(effect, r.BeginEpoch):
                self.begin_epoch(member, effect.epoch, sent)
        if has_confirmed:
            self.confirm(member, machine.confirmed)

    def begin_epoch(self, member: Member, epoch: int, sent: list[tuple[int, r.Received]]) -> None:
        if self.leaders.setdefault(epoch, member.process) != member.process:
            raise Broken(f"epoch {epoch} has two leaders")
        if member.log[: len(self.confirmed)] != self.confirmed:
            raise Broken(f"leader {member.id} of epoch {epoch} lacks confirmed records")
        member.log += (epoch,)
        self.step(member, r.EpochBegun(epoch, len(member.log) * RECORD_BYTES), sent)

    def confirm(self, member: Member, end: int) -> None:
        records = member.log[: end // RECORD_BYTES]
        shorter = min(len(records), len(self.confirmed))
        if records[:shorter] != self.confirmed[:shorter]:
            raise Broken(f"replica {member.id} confirms other records than were confirmed")
        if len(records) > len(self.confirmed):
            self.confirmed = records

    def deliver(
        self, reached: tuple[int, ...], sent: list[tuple[int, r.Received]], *, hold: Hold | None
    ) -> None:
        """Deliver messages among the replicas that reach each other, until there are none.

        Args: `hold`: the last message of this replica and kind will arrive a second time.
        """
        queue = deque(sent)
        while queue:
            target, message = queue.popleft()
            if target not in reached:
                continue
            if (message.sender.id, type(message.message)) == hold:
                self.held = (target, message)
            more: list[tuple[int, r.Received]] = []
            self.step(self.members[target], message, more)
            queue.extend(more)

    def elect(self, candidate: int, others: tuple[int, ...], hold: Hold | None = None) -> None:
        """A replica hears no leader, and reaches some others."""
        self.now += ROUND_MS
        sent: list[tuple[int, r.Received]] = []
        self.step(self.members[candidate], r.ElectionTick(0.0), sent)
        self.deliver((candidate, *others), sent, hold=hold)

    def beat(self, leader: int, others: tuple[int, ...], hold: Hold | None = None) -> None:
        """A heartbeat of a leader reaches some others."""
        self.now += ROUND_MS
        sent: list[tuple[int, r.Received]] = []
        self.step(self.members[leader], r.ElectionTick(0.0), sent)
        self.deliver((leader, *others), sent, hold=hold)

    def stream(
        self, leader: int, follower: int, others: tuple[int, ...], *, one: bool = False
    ) -> None:
        """A leader's records and a heartbeat reach a follower, and the ack comes back.

        Args: `one`: only the first record that the follower lacks is sent.
        """
        source, target = self.members[leader], self.members[follower]
        machine, taker = source.replica, target.replica
        assert machine is not None
        assert taker is not None
        if machine.state is not ElectionState.LEADER:
            return
        sent: list[tuple[int, r.Received]] = []
        epoch = machine.epoch
        self.step(target, r.LeaderHeard(source.process, epoch), sent)
        if taker.admits(source.process, epoch):
            equal = 0
            shorter = min(len(source.log), len(target.log))
            while equal < shorter and source.log[equal] == target.log[equal]:
                equal += 1
            sent_records = min(equal + 1, len(source.log)) if one else len(source.log)
            if equal < sent_records:
                # What differs is cut. A log that only is longer stays as it is.
                target.log = source.log[:sent_records]
            matched = target.matched[1] if target.matched[0] == epoch else 0
            target.matched = (epoch, max(matched, sent_records))
            self.step(target, r.LeaderHeard(source.process, epoch), sent)
            end = target.matched[1] * RECORD_BYTES
            heard = r.FollowerHeard(follower, epoch, end, taker.ballot.is_complete)
            self.step(source, heard, sent)
        self.deliver((leader, follower, *others), sent, hold=None)

    def put(self, leader: int) -> None:
        member = self.members[leader]
        if member.replica is not None and member.replica.leads:
            member.log += (member.replica.epoch,)

    def lose_disk(self, number: int) -> None:
        member = self.members[number]
        self.losses += 1
        member.log, member.ballot = (), Ballot(is_complete=False)
        member.incarnation += 1
        self.start(member)

    def restart(self, number: int) -> None:
        member = self.members[number]
        self.restarts += 1
        member.incarnation += 1
        self.start(member)

    def release(self) -> None:
        assert self.held is not None
        target, message = self.held
        self.held = None
        sent: list[tuple[int, r.Received]] = []
        self.step(self.members[target], message, sent)
        self.deliver(MEMBERS, sent, hold=None)


@dataclass(frozen=True)
class Bounds:
    """How far the search goes."""

    depth: int = 7
    states: int = 200_000
    losses: int = 1
    restarts: int = 1
    records: int = 4
    #: answers of these kinds may come twice
    holds: tuple[type[wire.Election], ...] = ()
    #: replica 0 leads at the beginning, and all follow
    led: bool = True


def _twin(thing: Thing) -> Thing:
    """A shallow copy: `copy.copy` takes several times as long."""
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


def _waiting(leadership: LeaderKnowledge) -> Iterator[tuple[Any, ...]]:
    """The joins that wait, each with the answers that count for it. The numbers of checks make no difference."""
    for sender, nonce, after in leadership.joins:
        newer = [
            (member, is_complete)
            for member, (number, is_complete) in sorted(leadership.answers.items())
            if number > after
        ]
        yield sender, nonce, tuple(newer)


def _subsets(number: int) -> list[tuple[int, ...]]:
    others = [each for each in MEMBERS if each != number]
    return [subset for size in (0, 1, 2) for subset in combinations(others, size)]


def actions(state: State, bounds: Bounds) -> Iterator[tuple[str, Callable[[State], None]]]:
    """The exchanges that may come next, with their names."""
    incomplete = [member.id for member in state.members if not member.ballot.is_complete]
    for number in MEMBERS:
        machine = state.members[number].replica
        assert machine is not None
        if machine.state is ElectionState.LEADER:
            for follower in MEMBERS:
                if follower == number:
                    continue
                third = 3 - number - follower
                for others in ((), (third,)):
                    yield (
                        f"{number} streams to {follower} with {others}",
                        lambda s, n=number, f=follower, o=others: s.stream(n, f, o),
                    )
                yield (
                    f"{number} streams one record to {follower}",
                    lambda s, n=number, f=follower: s.stream(n, f, (), one=True),
                )
            for others in _subsets(number)[1:]:
                yield f"{number} checks {others}", lambda s, n=number, o=others: s.beat(n, o)
            if machine.leads and len(state.members[number].log) < bounds.records:
                yield f"put at {number}", lambda s, n=number: s.put(n)
        else:
            for others in _subsets(number):
                yield f"{number} asks {others}", lambda s, n=number, o=others: s.elect(n, o)
                if state.held is None:
                    for late in product(others, bounds.holds):
                        yield (
                            f"{number} asks {others}, and {late[1].__name__} of {late[0]} comes twice",
                            lambda s, n=number, o=others, h=late: s.elect(n, o, h),
                        )
        if state.losses < bounds.losses and not [each for each in incomplete if each != number]:
            yield f"{number} loses its disk", lambda s, n=number: s.lose_disk(n)
        if state.restarts < bounds.restarts:
            yield f"{number} restarts", lambda s, n=number: s.restart(n)
    if state.held is not None:
        yield "the answer comes again", lambda s: s.release()


@dataclass
class Found:
    """The result of a search."""

    states: int
    depth: int
    #: the schedule that breaks an invariant; empty: none
    schedule: tuple[str, ...] = ()
    fault: str = ""


def search(machine: type[ElectionMachine] = ElectionMachine, bounds: Bounds | None = None) -> Found:
    """Visit all states within bounds. Returns: the first schedule that breaks an invariant, if there is one."""
    bounds = bounds or Bounds()
    first = State(machine, holds=bool(bounds.holds))
    if bounds.led:
        first.elect(0, (1, 2))
        first.stream(0, 1, (2,))
        first.stream(0, 2, (1,))
    seen = {first.key()}
    level: list[tuple[State, tuple[str, ...]]] = [(first, ())]
    for depth in range(1, bounds.depth + 1):
        following: list[tuple[State, tuple[str, ...]]] = []
        for state, schedule in level:
            for name, act in actions(state, bounds):
                after = state.copied()
                try:
                    act(after)
                except Broken as error:
                    return Found(len(seen), depth, (*schedule, name), str(error))
                key = after.key()
                if key not in seen:
                    seen.add(key)
                    following.append((after, (*schedule, name)))
            if len(seen) > bounds.states:
                return Found(len(seen), depth)
        level = following
    return Found(len(seen), bounds.depth)
