"""One coordinator, one shard with the queues of a topic, and the processes of a group, under faults.

The coordinator, the claims and the members are those that ship. Their logs keep encoded records: a crash keeps any part
of the unconfirmed ones, and the state is made from the records again. A deposed coordinator goes on running. Messages
are lost, doubled and late. Processes hang, die, leave and come back. The clocks of processes run at rates that differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from raymq.client.consume.group_member import GroupMember
from raymq.store.base.errors import RayMQError
from raymq.store.groups.claims import ClaimTable, Commit, claim_value
from raymq.store.groups.coordinator import Coordinator
from raymq.store.groups.group_table import GroupTable
from raymq.store.groups.heartbeat import Beat, BeatAnswer, JoinRequest
from raymq.store.groups.members import CLAIM, MemberFacts, TopicSubscription
from raymq.store.state.topics import QueueKey

GROUP, TOPIC = "g", "t"
SESSION_MS = 3_000
#: kind of the records of committed offsets
OFFSETS = "OFFSETS"


class Broken(AssertionError):
    """An invariant does not hold."""


def need(holds: bool, *what: object) -> None:
    """Raises: Broken unless it holds."""
    if not holds:
        raise Broken(*what)


#: kinds of faults, and how many of each a run may have
FAULTS = (
    ("lose", 2),
    ("double", 4),
    ("crash", 2),
    ("crash_shard", 2),
    ("leave", 2),
    ("die", 1),
    ("hang", 2),
    ("rejoin", 4),
)


@dataclass(frozen=True)
class Bounds:
    """What a run has, and how many faults."""

    processes: int = 2
    queues: int = 2
    #: messages of each queue
    messages: int = 3
    #: messages under way at most
    network: int = 8
    #: the processes are of one instance
    static: bool = False
    #: the processes are of so many instances, in turns
    instances: int = 1
    #: a process that leaves may have its place kept
    keeps_places: bool = False
    #: heartbeats may come together in one step
    gathers: bool = False
    #: the clock of process i runs at rates[i % n]
    rates: tuple[float, ...] = (1.0,)
    ticks: int = 12
    faults: tuple[tuple[str, int], ...] = FAULTS


class Log:
    """Encoded records, and how many of them are confirmed."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes]] = []
        self.confirmed = 0
        #: (records that must be confirmed, message that leaves then)
        self.waiting: list[tuple[int, Message]] = []

    def append(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        """Append a record. Returns: its value, as read from the log."""
        body = json.dumps(value).encode()
        self.records.append((kind, body))
        return json.loads(body)

    def cut(self, end: int) -> None:
        """Keep the first records only: a new leader has them."""
        del self.records[end:]
        self.confirmed = end
        self.waiting.clear()

    def copy(self) -> Log:
        copied = Log()
        copied.records, copied.waiting = list(self.records), list(self.waiting)
        copied.confirmed = self.confirmed
        return copied


@dataclass(frozen=True)
class Message:
    """A message under way. `kind`: beat, answer, claim, claimed, commit, committed."""

    kind: str
    #: name of the process that sent it, or that gets it
    process: str
    member_id: str
    key: QueueKey = (TOPIC, 0)
    number: int = 0
    #: of the assignment; of a commit: how often its program had given the queue up
    version: int = 0
    #: of a commit; of an answer what is committed, None: refused
    offset: int | None = None
    #: on the clock of the process
    sent_ms: int = 0
    beat: Beat | None = None
    answer: BeatAnswer | RayMQError | None = None

    def __str__(self) -> str:
        """What tells it from others, short enough for a schedule."""
        text = f"{self.kind} {self.member_id} {self.key[1]}:{self.number} v{self.version} at {self.sent_ms}"
        if isinstance(self.answer, BeatAnswer):
            text += f" -> v{self.answer.version}"
        return text if self.offset is None else f"{text} offset {self.offset}"


class Event(NamedTuple):
    """Something that may happen: a method of the world and its arguments."""

    weight: float
    kind: str
    arguments: tuple[Any, ...] = ()

    def run(self, world: World) -> None:
        getattr(world, self.kind)(*self.arguments)

    def __str__(self) -> str:
        return " ".join([self.kind, *map(str, self.arguments)])


#: messages to a process
ANSWERS = ("answer", "claimed", "committed")


@dataclass(repr=False)
class Process:
    """A process of the group: its member, and what its program has done."""

    name: str
    rate: float
    member: GroupMember
    joined: int = 0
    #: queue -> offset of the next message
    positions: dict[QueueKey, int] = field(default_factory=dict)
    #: queue -> how often its program has given it up. It waits for no commit from before
    given_up: dict[QueueKey, int] = field(default_factory=dict)
    state: str = "in"
    is_hung: bool = False

    def __repr__(self) -> str:
        return (
            f"{self.name}{self.joined} {self.state} {self.is_hung} {self.positions} {self.given_up}"
        )

    def copy(self) -> Process:
        member: GroupMember = object.__new__(GroupMember)
        member.__dict__ |= vars(self.member)
        for name in ("assigned", "releasing", "claimed"):
            setattr(member, name, dict(getattr(member, name)))
        return replace(
            self, member=member, positions=dict(self.positions), given_up=dict(self.given_up)
        )

    def now_ms(self, world_ms: int) -> int:
        """Its own monotonic clock."""
        return int(world_ms * self.rate)


class World:
    """The whole of a run. Every event is a method; `check` holds the invariants."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.now_ms = 0
        self.left = dict.fromkeys(dict(FAULTS), 0) | dict(bounds.faults) | {"tick": bounds.ticks}
        self.topics = {TOPIC: bounds.queues}
        self.keys = [(TOPIC, queue_id) for queue_id in range(bounds.queues)]
        self.steps = 0

        self.log = Log()
        self.table = GroupTable()
        self.coordinator = Coordinator(self.table)
        self.deposed: Coordinator | None = None

        self.shard_log = Log()
        self.claims = ClaimTable()
        self.offsets: dict[int, int] = {}

        self.net: list[Message] = []
        self.processes = {
            name: self._make(name, index, 1)
            for index, name in enumerate("abcdefgh"[: bounds.processes])
        }
        self.delivered: dict[QueueKey, set[int]] = {key: set() for key in self.keys}
        #: queue -> the highest offset whose commit was answered
        self.answered: dict[QueueKey, int] = dict.fromkeys(self.keys, 0)
        #: (queue, number) -> the member that it names
        self.named: dict[tuple[QueueKey, int], str] = {}
        #: queue -> the member that has it by the records, and its number, at the last check
        self.granted: dict[QueueKey, tuple[str, int]] = {}

    def _make(self, name: str, index: int, joined: int) -> Process:
        facts = MemberFacts(
            TopicSubscription((TOPIC,)),
            f"i{index % self.bounds.instances}" if self.bounds.static else "",
            name,
            SESSION_MS,
            SESSION_MS,
        )
        member = GroupMember(member_id(name, joined), JoinRequest(facts))
        return Process(name, self.bounds.rates[index % len(self.bounds.rates)], member, joined)

    def copy(self) -> World:
        """A world that goes on alone."""
        copied: World = object.__new__(World)
        copied.__dict__ |= self.__dict__
        copied.left, copied.offsets = dict(self.left), dict(self.offsets)
        copied.log, copied.shard_log = self.log.copy(), self.shard_log.copy()
        copied.net, copied.answered = list(self.net), dict(self.answered)
        copied.named = dict(self.named)
        copied.granted = dict(self.granted)
        copied.delivered = {key: set(each) for key, each in self.delivered.items()}
        copied.processes = {name: each.copy() for name, each in self.processes.items()}
        memo: dict[int, Any] = {id(self.topics): self.topics}
        copied.table, copied.claims, copied.coordinator, copied.deposed = deepcopy(
            (self.table, self.claims, self.coordinator, self.deposed), memo
        )
        return copied

    def key(self) -> int:
        """Equal for two worlds in which the same can happen."""
        log, shard_log = self.log, self.shard_log
        live = self.coordinator.live(GROUP)
        # Without what only says when it looks again.
        known = live.sessions, live.target, live.topics is None
        return hash(
            (
                self.now_ms,
                tuple(log.records[log.confirmed :]),
                repr((self.table.groups, self.table.number, known, log.waiting)),
                tuple(shard_log.records[shard_log.confirmed :]),
                repr((self.claims.claims, self.offsets, shard_log.waiting)),
                repr(sorted(map(repr, self.net))),
                repr([(each, vars(each.member)) for each in self.processes.values()]),
                repr((self.left, self.delivered, self.answered)),
            )
        )

    # --- the network ------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        if len(self.net) < self.bounds.network and message not in self.net:
            self.net.append(message)

    def deliver(self, message: Message) -> None:
        self.net.remove(message)
        self.take(message)

    def double(self, message: Message) -> None:
        self.left["double"] -= 1
        self.take(message)

    def lose(self, message: Message) -> None:
        self.left["lose"] -= 1
        self.net.remove(message)

    def take(self, message: Message) -> None:
        match message.kind:
            case "beat":
                self._take_beat(message)
            case "claim":
                self._take_claim(message)
            case "commit":
                self._take_commit(message)
            case _:
                self._take_answer(message)

    # --- the coordinator --------------------------------------------------------------------------

    def _take_beat(self, message: Message) -> None:
        assert message.beat is not None
        self._step([message.beat], [message])

    def _step(self, beats: list[Beat], asked: list[Message]) -> None:
        step = self.coordinator.step(GROUP, beats, self.topics, self.now_ms)
        for kind, value in step.records:
            self.note(kind, value)
        for message, answer in zip(asked, self.coordinator.answers(step), strict=True):
            # The check of an answer that rests on no new record is a confirmation, too: one that began later.
            self.answer(self.log, replace(message, kind="answer", answer=answer))

    def note(self, kind: str, value: dict[str, Any]) -> None:
        """Append a record to the coordinator's log, and apply it."""
        self.table.apply(kind, self.log.append(kind, value))

    def gather(self) -> None:
        """All heartbeats that are under way come in one step."""
        messages = [each for each in self.net if each.kind == "beat"]
        for each in messages:
            self.net.remove(each)
        self._step([each.beat for each in messages if each.beat is not None], messages)

    def ask_deposed(self, message: Message) -> None:
        """A coordinator that leads no more takes a heartbeat. Its checks fail, and nothing of it is confirmed."""
        assert self.deposed is not None
        self.net.remove(message)
        assert message.beat is not None
        step = self.deposed.step(GROUP, [message.beat], self.topics, self.now_ms)
        if not step.records and not deposed_is_checked():
            (answer,) = self.deposed.answers(step)
            self.send(replace(message, kind="answer", answer=answer))

    def answer(self, log: Log, message: Message) -> None:
        """Send a message when everything that is in the log now is confirmed."""
        log.waiting.append((len(log.records), message))

    def confirm(self) -> None:
        self._confirm(self.log)

    def confirm_shard(self) -> None:
        self._confirm(self.shard_log)

    def _confirm(self, log: Log) -> None:
        log.confirmed = len(log.records)
        waiting, log.waiting = log.waiting, []
        for _, message in waiting:
            self.send(message)

    def crash(self, end: int, *, with_snapshot: bool = False) -> None:
        """Another replica leads: it has the first `end` records."""
        self.left["crash"] -= 1
        self.deposed = self.coordinator
        self.log.cut(end)
        self.table = fold_groups(self.log.records, with_snapshot=with_snapshot)
        self.coordinator = Coordinator(self.table)
        activate(self.coordinator, self.deposed)
        # The new leader looks for members without a session, and gives each a whole one.
        self.expire()

    def expire(self) -> None:
        """The coordinator removes members whose session is over."""
        if self.coordinator.due(self.now_ms):
            self._step([], [])

    # --- the shard of the queues ------------------------------------------------------------------

    def _take_claim(self, message: Message) -> None:
        queue_id = message.key[1]
        new, refused = self.claims.plan(GROUP, TOPIC, message.member_id, {queue_id: message.number})
        if new:
            self.note_claims(claim_value(GROUP, TOPIC, new))
        offset = None if refused else claimed_offset(message, self.offsets.get(queue_id, 0))
        self.answer(self.shard_log, replace(message, kind="claimed", offset=offset))

    def _take_commit(self, message: Message) -> None:
        queue_id, offset = message.key[1], message.offset
        assert offset is not None
        new, refused = self.claims.plan_commit(
            GROUP, TOPIC, {queue_id: Commit(message.number, offset)}, self.offsets
        )
        need(not new or offset <= len(self.delivered[message.key]), "I4: a gap", message.key)
        if new:
            standing = self.claims.claim_of(GROUP, TOPIC, queue_id)
            need(message.number >= standing.number, "G10: a commit of a former owner", message.key)
            before = self.offsets.get(queue_id, 0)
            need(new[queue_id] >= before, "I3: an offset went back", message.key)
            self.offsets |= self._store_offsets(new)
        self.answer(
            self.shard_log, replace(message, kind="committed", offset=None if refused else offset)
        )

    def note_claims(self, value: dict[str, Any]) -> None:
        """Append a record to the shard's log, and apply it."""
        self.claims.apply(CLAIM, self.shard_log.append(CLAIM, value))

    def _store_offsets(self, new: dict[int, int]) -> dict[int, int]:
        value = self.shard_log.append(OFFSETS, {"offsets": list(new.items())})
        return dict(map(tuple, value["offsets"]))

    def crash_shard(self, end: int, *, with_snapshot: bool = False) -> None:
        self.left["crash_shard"] -= 1
        self.shard_log.cut(end)
        self.claims, self.offsets = fold_shard(self.shard_log.records, with_snapshot=with_snapshot)

    # --- processes --------------------------------------------------------------------------------

    def beat(self, name: str) -> None:
        process = self.processes[name]
        beat, sent_ms = process.member.beat(), process.now_ms(self.now_ms)
        version = beat.version
        self.send(
            Message("beat", name, beat.member_id, version=version, sent_ms=sent_ms, beat=beat)
        )

    def claim(self, name: str, key: QueueKey) -> None:
        member = self.processes[name].member
        number, version = member.to_claim()[key], member.version
        seen = self.offsets.get(key[1], 0)
        self.send(Message("claim", name, member.member_id, key, number, version, offset=seen))

    def work(self, name: str, key: QueueKey) -> None:
        """The program gets a message."""
        process = self.processes[name]
        self.delivered[key].add(process.positions[key])
        process.positions[key] += 1

    def commit(self, name: str, key: QueueKey) -> None:
        process = self.processes[name]
        number = process.member.commit_numbers([key])[key]
        self.send(
            Message(
                "commit",
                name,
                process.member.member_id,
                key,
                number,
                process.given_up.get(key, 0),
                offset=process.positions[key],
            )
        )

    def release(self, name: str, key: QueueKey) -> None:
        """The program has given up a queue that it must release. A commit that has no answer by then has failed for it,
        and may be stored later.
        """
        process = self.processes[name]
        process.given_up[key] = process.given_up.get(key, 0) + 1
        process.member.released([key])

    def leave(self, name: str) -> None:
        self.left["leave"] -= 1
        process = self.processes[name]
        beat = process.member.leave()
        process.state = "gone"
        self.send(Message("beat", name, beat.member_id, beat=beat))

    def go_away(self, name: str) -> None:
        """Leave, and have the place kept for the next process of the instance."""
        self.left["leave"] -= 1
        process = self.processes[name]
        beat = process.member.leave(keeps_place=True)
        process.state = "gone"
        self.send(Message("beat", name, beat.member_id, version=beat.version, beat=beat))

    def die(self, name: str) -> None:
        self.left["die"] -= 1
        process = self.processes[name]
        process.member.fence()
        process.state = "gone"

    def hang(self, name: str) -> None:
        self.left["hang"] -= 1
        self.processes[name].is_hung = True

    def wake(self, name: str) -> None:
        self.processes[name].is_hung = False

    def rejoin(self, name: str) -> None:
        self.left["rejoin"] -= 1
        self._rejoin(name)

    def _rejoin(self, name: str) -> None:
        index = list(self.processes).index(name)
        self.processes[name] = self._make(name, index, self.processes[name].joined + 1)

    def _take_answer(self, message: Message) -> None:
        process = self.processes[message.process]
        if process.member.member_id != message.member_id or process.state != "in":
            return
        member, key = process.member, message.key
        if message.kind == "answer":
            assert message.beat is not None
            if isinstance(message.answer, BeatAnswer):
                sent_ms = counted_from(message.sent_ms, process.now_ms(self.now_ms))
                member.answered(message.beat, message.answer, sent_ms)
            else:
                member.fence()
                process.state = "fenced"
        elif message.kind == "claimed":
            if message.offset is None:
                member.lost(key, message.number)
            elif member.takes_claim(
                key, message.number, message.version, process.now_ms(self.now_ms)
            ):
                need(message.offset >= self.answered[key], "I9: begins below an answered commit")
                member.took_claim(key, message.number)
                process.positions[key] = message.offset
        elif message.offset is not None and message.version == process.given_up.get(key, 0):
            self.answered[key] = max(self.answered[key], message.offset)
            need(self.answered[key] <= self.offsets.get(key[1], 0), "I3: a commit is lost", key)

    def tick(self, ms: int = 1_000) -> None:
        self.left["tick"] -= 1
        self.now_ms += ms

    # --- all events -------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """The events that are possible now."""
        found: list[Event] = []
        left = self.left
        for message in self.net:
            if message.kind in ANSWERS and self.processes[message.process].is_hung:
                # It waits in the socket.
                continue
            found.append(Event(6, "deliver", (message,)))
            if left["double"]:
                found.append(Event(1, "double", (message,)))
            if left["lose"]:
                found.append(Event(0.3, "lose", (message,)))
            if self.deposed is not None and message.kind == "beat" and not deposed_is_checked():
                found.append(Event(1, "ask_deposed", (message,)))

        if self.bounds.gathers and sum(each.kind == "beat" for each in self.net) > 1:
            found.append(Event(3, "gather"))

        for suffix, log in (("", self.log), ("_shard", self.shard_log)):
            if log.waiting or log.confirmed < len(log.records):
                found.append(Event(6, "confirm" + suffix))
            if left["crash" + suffix]:
                for end in range(log.confirmed, len(log.records) + 1):
                    found.append(Event(0.5, "crash" + suffix, (end,)))
        if left["tick"]:
            found.append(Event(2, "tick"))
        if self.coordinator.due(self.now_ms):
            found.append(Event(3, "expire"))

        for name, process in self.processes.items():
            self._add_process(found, name, process)
        return found

    def _add_process(self, found: list[Event], name: str, process: Process) -> None:
        left, member = self.left, process.member
        if process.state != "in":
            if left["rejoin"]:
                found.append(Event(1, "rejoin", (name,)))
            return
        if process.is_hung:
            found.append(Event(0.4, "wake", (name,)))
            return
        if len(self.net) < self.bounds.network:
            found.append(Event(2, "beat", (name,)))
        if not member.version:
            return
        for kind, weight in (("hang", 0.4), ("leave", 0.4), ("die", 0.3)):
            if left[kind]:
                found.append(Event(weight, kind, (name,)))
        if left["leave"] and self.bounds.keeps_places:
            found.append(Event(0.6, "go_away", (name,)))
        now_ms = process.now_ms(self.now_ms)
        for key in member.to_claim():
            found.append(Event(3, "claim", (name, key)))
        for key in member.claimed:
            if member.may_read(key, now_ms) and process.positions[key] < self.bounds.messages:
                found.append(Event(2, "work", (name, key)))
        for key in (*member.claimed, *member.releasing):
            if process.positions.get(key, 0) > self.answered[key]:
                found.append(Event(2, "commit", (name, key)))
        for key in member.releasing:
            found.append(Event(2, "release", (name, key)))

    # --- invariants -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: Broken, if an invariant does not hold."""
        self.steps += 1
        owners: dict[QueueKey, str] = {}
        for name, process in self.processes.items():
            member = process.member
            if not member.believes(process.now_ms(self.now_ms)):
                continue
            for key in member.assigned:
                if key in member.releasing and key not in member.claimed:
                    continue
                need(
                    key not in owners, "I1: two members believe to own", key, owners.get(key), name
                )
                owners[key] = name

        group = self.table.groups.get(GROUP)
        members = group.members if group is not None else {}
        before, self.granted = self.granted, {}
        for owner_id, facts in members.items():
            for key, number in facts.grants.items():
                need(key not in self.granted, "I2: granted twice", key, owner_id)
                self.granted[key] = owner_id, number
        for process in self.processes.values():
            member = process.member
            is_member = member.member_id in members and member.believes(process.now_ms(self.now_ms))
            for key, number in {**member.assigned, **member.releasing}.items() if is_member else ():
                had = before.get(key) == (member.member_id, number)
                is_free = self.granted.get(key) != (member.member_id, number)
                need(not (had and is_free), "I10: free before it was released", key, member)
        for process in self.processes.values():
            for key, number in process.member.assigned.items():
                named = self.named.setdefault((key, number), process.member.member_id)
                need(named == process.member.member_id, "I5: a number names two", key, number)
        for key in self.keys:
            committed = self.offsets.get(key[1], 0)
            need(committed >= self.answered[key], "I3: an answered commit is gone", key)
            need(self.delivered[key] >= set(range(committed)), "I4: not delivered", key)
        if not self.steps & 63:
            again = fold_groups(self.log.records, with_snapshot=bool(self.steps & 64))
            need(again.groups == self.table.groups, "I6: not a function of the log")
            need(again.number == self.table.number, "I6: not a function of the log")

    def heal(self, choose: Callable[[list[Event]], Event]) -> None:
        """Faults stop: then all queues are owned, in balance, and read to their end."""
        self.left = dict.fromkeys(self.left, 0)
        self.deposed = None
        for name, process in self.processes.items():
            process.is_hung = False
            if process.state != "in":
                self._rejoin(name)
        for _ in range(16):
            for _ in range(4):
                self._heal_round(choose)
            self.now_ms += SESSION_MS // 5
            with contextlib.suppress(Broken):
                self.check_healed()
                return
        self.check_healed()

    def _heal_round(self, choose: Callable[[list[Event]], Event]) -> None:
        for name, process in self.processes.items():
            if process.state == "in":
                self.beat(name)
            elif not process.member.is_replaced:
                self._rejoin(name)
        for _ in range(60):
            events = [each for each in self.events() if each.kind != "beat"]
            if not events:
                break
            choose(events).run(self)
            self.check()

    def check_healed(self) -> None:
        """Raises: Broken, unless all queues are owned, in balance, and read to their end."""
        live = [each for each in self.processes.values() if each.state == "in"]
        live = [each for each in live if not each.member.is_replaced]
        counts = [len(each.member.claimed) for each in live]
        need(sum(counts) == self.bounds.queues, "I7: not all queues are owned", counts)
        need(max(counts) - min(counts) <= 1, "I7: not balanced", counts)
        need(not any(each.member.releasing for each in live), "I7: not released")
        for key in self.keys:
            read = self.offsets.get(key[1], 0)
            need(read == self.bounds.messages, "I7: not read to its end", key, read)
        members = self.table.groups[GROUP].members
        need(len(members) <= len(self.processes), "I8: ghosts stay", list(members))


# --- parts that a mutant removes ------------------------------------------------------------------


def deposed_is_checked() -> bool:
    """An answer without a record leaves only after a check that its coordinator still leads (G4)."""
    return True


def claimed_offset(message: Message, committed: int) -> int:
    """The answer to a claim says where to begin: what the member read before it may be old (G9)."""
    return committed


def counted_from(sent_ms: int, now_ms: int) -> int:
    """A member counts its belief from the sending of the heartbeat (G7)."""
    return sent_ms


def member_id(name: str, joined: int) -> str:
    """Each membership of a process has an id of its own (G1)."""
    return f"{name}{joined}"


def activate(new: Coordinator, old: Coordinator) -> None:
    """A new coordinator knows nothing of the sessions before it (G8)."""


# --- state from records ---------------------------------------------------------------------------


def fold_groups(records: list[tuple[str, bytes]], *, with_snapshot: bool) -> GroupTable:
    """The groups of a log. Args: `with_snapshot`: half of it is a snapshot."""
    table = GroupTable()
    half = len(records) // 2
    for index, (kind, body) in enumerate(records):
        if with_snapshot and index == half:
            snapshot = [(each, json.dumps(value)) for each, value in table.records()]
            table = GroupTable()
            for each, text in snapshot:
                table.apply(each, json.loads(text))
        table.apply(kind, json.loads(body))
    return table


def fold_shard(
    records: list[tuple[str, bytes]], *, with_snapshot: bool
) -> tuple[ClaimTable, dict[int, int]]:
    """The claims and the offsets of a log."""
    claims, offsets = ClaimTable(), {}
    for kind, body in records:
        value = json.loads(body)
        if kind == CLAIM:
            claims.apply(kind, value)
        else:
            offsets |= dict(map(tuple, value["offsets"]))
    if with_snapshot:
        again = ClaimTable()
        for kind, value in claims.records():
            again.apply(kind, json.loads(json.dumps(value)))
        claims = again
    return claims, offsets
