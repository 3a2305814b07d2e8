"""The leader of a queue's shard and the workers of a group, under faults.

The machine and the state are those that ship. The log keeps packed records: a crash keeps any part of the unconfirmed
ones, and the state is made from the records again. A deposed leader goes on running. Messages are lost, doubled and
late. Workers hang and die. The clocks of workers run at rates that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from raymq.store.groups.leases.entries import (
    TO_BURY_MS,
    Entry,
    LeaseEntry,
    SettleEntry,
    SettleOutcome,
    TimeEntry,
)
from raymq.store.groups.leases.lease_machine import AppendGroup, LeaseMachine, LeasePlan
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.packing import pack, unpack
from raymq.store.groups.leases.requests import (
    Copy,
    ExtendAnswer,
    LeaseAnswer,
    LeaseRequest,
    Offer,
    SettleAnswer,
    SettleItem,
    SettleRequest,
    offsets_of,
)
from tests.groups.simulate.world import Broken, need

from .reference import Reference

GROUP, TOPIC = "g", "t"
LEASE_MS, DELAY_MS = 2_000, 1_000
#: a delay with which a message is moved to the retry topic
LONG_MS = 61_000

#: kinds of faults and of rare deeds, and how many of each a run may have
FAULTS = (
    ("lose", 3),
    ("double", 4),
    ("crash", 2),
    ("die", 1),
    ("hang", 1),
    ("nack", 3),
    ("reject", 1),
    ("release", 1),
    ("mix", 2),
    ("delay", 1),
    ("extend", 4),
    ("own", 2),
    ("repeat", 6),
    ("trim", 1),
)


@dataclass(frozen=True)
class Bounds:
    """What a run has, and how many faults."""

    workers: int = 2
    queues: int = 1
    #: messages of each queue
    messages: int = 5
    #: messages that one request leases
    batch: int = 3
    window: int = 8
    max_in_flight: int = 100
    max_attempts: int | None = 2
    max_lease_ms: int = 60_000
    #: messages that may die within a minute
    dead_rate: int | None = None
    #: messages that one step copies
    copies: int = 64
    #: after a lease whose time is over
    backoff_ms: int = 0
    order: str = ""
    #: keys of the messages, in turns
    keys: int = 2
    #: one message of so many does not match the filter; 0: all match
    filtered: int = 0
    #: messages under way at most
    network: int = 8
    #: leases that a worker holds at once
    held: int = 2
    #: the clock of worker i runs at rates[i % n]
    rates: tuple[float, ...] = (1.0,)
    ticks: int = 14
    faults: tuple[tuple[str, int], ...] = FAULTS

    def options(self) -> LeaseOptions:
        """The options of the group."""
        return LeaseOptions(
            lease_ms=LEASE_MS,
            max_lease_ms=self.max_lease_ms,
            max_in_flight=self.max_in_flight,
            window=self.window,
            max_attempts=self.max_attempts,
            backoff_ms=(self.backoff_ms,),
            order=self.order,
            dead_rate=self.dead_rate,
        )


class Record(NamedTuple):
    """What the log got together."""

    body: bytes
    copies: tuple[Copy, ...]
    #: on the world's clock
    at_ms: int


@dataclass
class Log:
    """Packed records, and how many of them are confirmed."""

    records: list[Record] = field(default_factory=list)
    confirmed: int = 0
    #: (records that must be confirmed, message that leaves then)
    waiting: list[tuple[int, Message]] = field(default_factory=list)


#: offsets of a queue under a lease
Held = tuple[int, int, int]


@dataclass(frozen=True)
class Message:
    """A message under way. `kind`: lease, settle, extend, own; leased, settled, extended."""

    kind: str
    #: name of the worker that sent it, or that gets it
    worker: str
    session: str
    request: int = 0
    #: on the clock of the worker
    sent_ms: int = 0
    #: of settle: (lease, queue, offsets, verdict, delay)
    items: tuple[tuple[int, int, tuple[int, ...], SettleOutcome, int | None], ...] = ()
    #: of own: lease, queue, offset, length, whether it is given up
    own: tuple[int, int, int, int, bool] | None = None
    #: of leased: number, time, (queue, offset, attempts)...; of settled: (lease, queue, offset)...; of extended:
    #: (lease, time)...
    answer: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """What tells it from others, short enough for a schedule."""
        text = f"{self.kind} {self.session} {self.request} at {self.sent_ms}"
        return f"{text} -> {self.answer}" if self.answer else text


class Event(NamedTuple):
    """Something that may happen: a method of the world and its arguments."""

    weight: float
    kind: str
    arguments: tuple[Any, ...] = ()

    def run(self, world: World) -> None:
        getattr(world, self.kind)(*self.arguments)

    def __str__(self) -> str:
        return " ".join([self.kind, *map(str, self.arguments)])


ANSWERS = ("leased", "settled", "extended")


@dataclass
class Worker:
    """A process that leases messages, one session for each life."""

    name: str
    rate: float
    life: int = 1
    request: int = 1
    settle: int = 1
    asked: Message | None = None
    settling: Message | None = None
    #: until when it holds what, on its own clock
    held: dict[Held, float] = field(default_factory=dict)
    #: what it holds under a time of its own
    own: set[Held] = field(default_factory=set)
    is_hung: bool = False
    #: nothing has changed since it heard that there is no message for it: the time, and the records
    found_none: tuple[int, int] = (-1, -1)

    @property
    def session(self) -> str:
        return f"{self.name}{self.life}"

    def now_ms(self, world_ms: int) -> int:
        """Its own monotonic clock."""
        return int(world_ms * self.rate)

    def drop(self, held: Held) -> None:
        """Hold something no more."""
        self.held.pop(held, None)
        self.own.discard(held)

    def over(self, world_ms: int) -> list[Held]:
        """What it may not hold any more."""
        now_ms = self.now_ms(world_ms)
        return [each for each, until_ms in self.held.items() if now_ms >= until_ms]

    def believes(self, world_ms: int) -> set[tuple[int, int]]:
        """(queue, offset) of what it holds by now."""
        now_ms = self.now_ms(world_ms)
        return {each[1:] for each, until_ms in self.held.items() if now_ms < until_ms}


class World:
    """The whole of a run. Every event is a method; `check` holds the invariants."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.options = bounds.options()
        self.now_ms = 0
        self.left = dict.fromkeys(dict(FAULTS), 0) | dict(bounds.faults) | {"tick": bounds.ticks}
        self.keys = [(TOPIC, queue_id) for queue_id in range(bounds.queues)]
        self.min_offset = dict.fromkeys(range(bounds.queues), 0)
        self.steps = 0

        self.log = Log()
        self.table = LeaseTable()
        self.machine = self.make_machine()
        self.reference = Reference()
        self.deposed: LeaseMachine | None = None
        self.deposed_table = self.table

        self.net: list[Message] = []
        self.workers = {
            name: Worker(name, bounds.rates[index % len(bounds.rates)])
            for index, name in enumerate("abcdefgh"[: bounds.workers])
        }
        #: (queue, offset) -> the session that was told that it acknowledged it
        self.told: dict[tuple[int, int], str] = {}
        #: what sessions were told to be refused
        self.told_refused: set[tuple[str, Held]] = set()
        #: (session, request) -> the first answer that it got
        self.answers: dict[tuple[str, int], tuple[Any, ...]] = {}
        #: offsets with a time of their own
        self.had_own: set[tuple[int, int]] = set()
        for key in self.keys:
            self.append(self.machine.begin(key, 0))
        self.confirm()

    def make_machine(self) -> LeaseMachine:
        made = LeaseMachine(self.table, GROUP, self.options, self.now_ms)
        made.copies_max = self.bounds.copies
        return made

    def copy(self) -> World:
        """A world that goes on alone."""
        return deepcopy(self)

    def key(self) -> int:
        """Equal for two worlds in which the same can happen."""
        return hash(
            (
                self.now_ms,
                tuple(self.log.records[self.log.confirmed :]),
                repr((self.reference, self.log.waiting, self.min_offset)),
                repr(self._times()),
                repr(sorted(map(repr, self.net))),
                repr((self.workers, self.left, self.told, self.told_refused)),
            )
        )

    def _times(self) -> object:
        times = vars(self.machine)["_times"]
        due = [
            (key, each.due_ms[each.at(each.unsettled())].tolist())
            for key, each in self.table.groups[GROUP].queues.items()
        ]
        return vars(times)["_deadlines"], due

    # --- the network ------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        if message.kind == "settled":
            key = message.session, message.request
            first = self.answers.setdefault(key, message.answer)
            need(first == message.answer, "J9: another answer to a repeated request", message)
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
        if message.kind in ANSWERS:
            self._take_answer(message)
            return
        plan = self.decide(self.machine, self.table, message)
        self.append(plan)
        answer = answered(message, plan)
        if answer is not None:
            self.answer(answer)

    # --- the leader -------------------------------------------------------------------------------

    def decide(self, machine: LeaseMachine, table: LeaseTable, message: Message) -> LeasePlan:
        session, now_ms = message.session.encode(), self.now_ms
        machine.store_ms = now_ms
        match message.kind:
            case "lease":
                request = LeaseRequest(session, message.request, self.bounds.batch)
                offers = [self.offer(machine, table, key) for key in self.keys]
                return machine.lease(request, offers, now_ms)
            case "settle":
                items = [
                    SettleItem(number, (TOPIC, queue), offsets_of(offsets), verdict, delay_ms)
                    for number, queue, offsets, verdict, delay_ms in message.items
                ]
                return machine.settle(SettleRequest(session, message.request, items), now_ms)
            case "own":
                assert message.own is not None
                number, queue, offset, length_ms, gives_up = message.own
                self.had_own.add((queue, offset))
                key = TOPIC, queue
                return machine.set_deadline(
                    number, key, offset, length_ms, now_ms, gives_up=gives_up
                )
            case _:
                return machine.extend(session, now_ms)

    def offer(self, machine: LeaseMachine, table: LeaseTable, key: tuple[str, int]) -> Offer:
        """All messages of a queue."""
        first, stop = table.groups[GROUP].queues[key].next, self.bounds.messages
        offsets = np.arange(first, max(first, stop))
        matches = None
        if self.bounds.filtered:
            matches = offsets % self.bounds.filtered != self.bounds.filtered - 1
        due = machine.due(key, self.bounds.batch, self.now_ms)
        return Offer(key, due, first, max(first, stop), matches, self.slots(offsets))

    def slots(self, offsets: np.ndarray) -> np.ndarray:
        """The slots of keys."""
        keys = self.bounds.keys if self.bounds.order == "key" else 1
        return (offsets % keys).astype(np.uint16)

    def append(self, plan: LeasePlan) -> None:
        """Append the records of a plan, and apply them."""
        for group in plan.groups:
            self.append_group(group)
        self.machine.note(plan, self.now_ms)

    def append_group(self, group: AppendGroup) -> None:
        need(len(group.copies) <= self.bounds.copies, "L14: too many copies in one step", group)
        time = [] if self.bounds.dead_rate is None else [TimeEntry(self.now_ms)]
        self.write(pack(GROUP, [*time, *group.entries]), tuple(group.copies))

    def write(self, body: bytes, copies: tuple[Copy, ...]) -> None:
        """Append one record, and apply it as read from the log."""
        _, entries = unpack(body)
        for entry in entries:
            self._check_entry(entry)
            self.reference.take(entry)
        try:
            self.table.apply_packed(body)
        except (ValueError, LookupError) as error:
            raise Broken("a record that cannot be applied", error, entries) from error
        self.log.records.append(Record(body, copies, self.now_ms))
        difference = self.reference.differs(self.table.groups[GROUP])
        need(difference is None, "J4: the columns differ", entries, difference)
        for entry in entries:
            if isinstance(entry, SettleEntry) and self.bounds.order:
                self._check_returned(entry)

    def _check_returned(self, entry: SettleEntry) -> None:
        """What is returned takes the later ones of its key along."""
        for group in entry.groups:
            if group.outcome not in (SettleOutcome.NACKED, SettleOutcome.RETURNED):
                continue
            held = self.reference.queues[group.key].open
            first = {self.key_of(each): each for each in reversed(group.offsets.tolist())}
            for later, number in held.items():
                is_own = number == group.number and later > first.get(self.key_of(later), later)
                need(not is_own, "J15: an earlier one of its key was returned", later, entry)

    def _check_entry(self, entry: Entry) -> None:
        """Raises: Broken for an entry that the rules forbid."""
        if isinstance(entry, LeaseEntry):
            self._check_lease(entry)
        elif isinstance(entry, SettleEntry):
            self._check_settle(entry)

    def _check_lease(self, entry: LeaseEntry) -> None:
        for _, earlier in self.entries():
            is_same = isinstance(earlier, LeaseEntry) and entry.number and earlier.number
            if is_same:
                need(
                    earlier[1:3] != entry[1:3] or not entry.session,
                    "J12: two leases of one request",
                    entry,
                )
        is_lease = any(len(part.taken) for part in entry.parts)
        need(not is_lease or not self.reference.paused, "J16: leased while paused", entry)
        most = self.bounds.dead_rate
        is_over = is_lease and most is not None and self.reference.dead > most
        need(not is_over, "J16: leased after too many have died", self.reference.dead)
        for part in entry.parts:
            queue = self.reference.queues[part.key]
            for offset in part.taken.tolist():
                need(not queue.is_settled(offset), "J3: leased after it was settled", offset)
                is_dead = queue.waiting.get(offset) == TO_BURY_MS
                need(not is_dead, "J5: leased after it was rejected", offset)
                most = self.bounds.max_attempts
                attempts = queue.attempts.get(offset, 0)
                need(most is None or attempts < most, "J5: leased too often", offset)
                self._check_delay(part.key[1], offset, attempts)
            fresh = [each for each in part.taken.tolist() if each >= queue.next]
            in_flight = sum(len(each.open) for each in self.reference.queues.values())
            need(
                not fresh or in_flight + len(fresh) <= self.bounds.max_in_flight,
                "L11: too many in flight",
                entry,
            )

    def _check_delay(self, queue: int, offset: int, attempts: int) -> None:
        """An offset that is leased again has waited for its delay, or for its lease and the delay after that."""
        for at_ms, entry in reversed(list(self.entries())):
            if isinstance(entry, LeaseEntry):
                if any(p.key[1] == queue and offset in p.taken.tolist() for p in entry.parts):
                    is_over = self.now_ms >= at_ms + LEASE_MS + self.bounds.backoff_ms
                    is_own = (queue, offset) in self.had_own
                    need(is_own or is_over, "J13: again before its lease was over", offset)
                    return
            elif isinstance(entry, SettleEntry):
                for group in entry.groups:
                    if group.outcome == SettleOutcome.REFUSED or group.key[1] != queue:
                        continue
                    if offset in group.offsets.tolist():
                        is_over = self.now_ms >= at_ms + group.delay_ms
                        need(is_over, "J13: again before the delay of its nack", offset)
                        return

    def _check_settle(self, entry: SettleEntry) -> None:
        for group in entry.groups:
            if group.outcome == SettleOutcome.REFUSED:
                continue
            queue = self.reference.queues[group.key]
            for offset in group.offsets.tolist():
                need(not queue.is_settled(offset), "J1: settled twice", offset, entry)
                if group.number:
                    is_own = queue.open.get(offset) == group.number
                    need(is_own, "J14: settled under another lease", offset, entry)
                held = group.number, group.key[1], offset
                is_refused = (entry.session.decode(), held) in self.told_refused
                # One that came too early is returned with an earlier one of its key.
                is_kept = group.outcome == SettleOutcome.RETURNED
                need(is_kept or not is_refused, "J9: its worker was told that it is refused", held)
            if group.outcome == SettleOutcome.ACKED and self.bounds.order:
                self._check_order(group.key[1], group.offsets.tolist(), entry)

    def _check_order(self, queue_id: int, acked: list[int], entry: SettleEntry) -> None:
        """Earlier ones of a key are settled, before or with it."""
        queue = self.reference.queues[TOPIC, queue_id]
        also = {
            offset
            for group in entry.groups
            if group.outcome in (SettleOutcome.ACKED, SettleOutcome.DEAD)
            and group.key[1] == queue_id
            for offset in group.offsets.tolist()
        }
        for offset in acked:
            for earlier in range(queue.low, offset):
                if self.key_of(earlier) == self.key_of(offset):
                    is_done = queue.is_settled(earlier) or earlier in also
                    need(is_done, "J11: settled before an earlier one of its key", offset)

    def key_of(self, offset: int) -> int:
        return int(self.slots(np.array([offset]))[0])

    def entries(self) -> list[tuple[int, Entry]]:
        """When each entry of the log was written, and it."""
        return [(each.at_ms, entry) for each in self.log.records for entry in unpack(each.body)[1]]

    def answer(self, message: Message) -> None:
        """Send a message when everything that is in the log now is confirmed, and a check is made."""
        self.log.waiting.append((len(self.log.records), message))

    def confirm(self) -> None:
        self.log.confirmed = len(self.log.records)
        waiting, self.log.waiting = self.log.waiting, []
        for _, message in waiting:
            self.send(message)

    def ask_deposed(self, message: Message) -> None:
        """A leader that leads no more takes a request. Its checks fail, and nothing of it is confirmed."""
        assert self.deposed is not None
        self.net.remove(message)
        plan = self.decide(self.deposed, self.deposed_table, message)
        answer = answered(message, plan)
        if not plan.groups and answer is not None and not deposed_is_checked():
            self.send(answer)

    def crash(self, end: int, *, with_snapshot: bool = False) -> None:
        """Another replica leads: it has the first `end` records."""
        self.left["crash"] -= 1
        self.deposed, self.deposed_table = self.machine, self.table
        del self.log.records[end:]
        self.log.confirmed = end
        self.log.waiting.clear()
        self.table = fold(self.log.records, with_snapshot=with_snapshot)
        self.reference = Reference()
        for _, entry in self.entries():
            self.reference.take(entry)
        difference = self.reference.differs(self.table.groups[GROUP])
        need(difference is None, "J4: the state is no fold of the log", difference)

        self.machine = self.make_machine()
        for key in self.keys:
            offsets = self.machine.without_keys(key)
            if len(offsets):
                self.machine.note_keys(key, offsets, self.slots(offsets))

    def resume(self) -> None:
        """An operator lets the group go on."""
        self.append(self.machine.pause(""))

    def trim(self, queue: int) -> None:
        """Retention deletes the first message that is left."""
        self.left["trim"] -= 1
        self.min_offset[queue] += 1
        self.append(self.machine.trim((TOPIC, queue), self.min_offset[queue]))

    # --- workers ----------------------------------------------------------------------------------

    def lease(self, name: str) -> None:
        worker = self.workers[name]
        now_ms = worker.now_ms(self.now_ms)
        worker.asked = Message("lease", name, worker.session, worker.request, now_ms)
        self.send(worker.asked)

    def again(self, name: str) -> None:
        """Repeat a request for a lease."""
        self.left["repeat"] -= 1
        worker = self.workers[name]
        assert worker.asked is not None
        worker.asked = replace(worker.asked, sent_ms=worker.now_ms(self.now_ms))
        self.send(worker.asked)

    def ack(self, name: str, which: str) -> None:
        worker = self.workers[name]
        held = sorted(worker.held)
        chosen = {"all": held, "first": held[:1], "last": held[-1:]}[which]
        self._settle(worker, chosen, SettleOutcome.ACKED)

    def nack(self, name: str) -> None:
        self.left["nack"] -= 1
        self._return(name, SettleOutcome.NACKED, DELAY_MS)

    def delay(self, name: str) -> None:
        """Return a message for so long that it is moved."""
        self.left["delay"] -= 1
        self._return(name, SettleOutcome.NACKED, LONG_MS)

    def release(self, name: str) -> None:
        self.left["release"] -= 1
        self._return(name, SettleOutcome.RETURNED, None)

    def _return(self, name: str, verdict: SettleOutcome, delay_ms: int | None) -> None:
        worker = self.workers[name]
        chosen = sorted(worker.held)[:1]
        self._settle(worker, chosen, verdict, delay_ms)
        if self.bounds.order:
            # It gives up what follows with the same key.
            number, queue, offset = chosen[0]
            for each in list(worker.held):
                if each[1] == queue and self.key_of(each[2]) == self.key_of(offset):
                    worker.drop(each)

    def reject(self, name: str) -> None:
        self.left["reject"] -= 1
        worker = self.workers[name]
        self._settle(worker, sorted(worker.held)[:1], SettleOutcome.REJECTED)

    def mix(self, name: str, verdict: str) -> None:
        """Return the first message and acknowledge the others, or reject all but the last one."""
        self.left["mix"] -= 1
        worker = self.workers[name]
        held = sorted(worker.held)
        if verdict == "nack":
            first = self._items(worker, held[:1], SettleOutcome.NACKED, DELAY_MS)
            rest = self._items(worker, held[1:], SettleOutcome.ACKED)
        else:
            first = self._items(worker, held[:-1], SettleOutcome.REJECTED)
            rest = self._items(worker, held[-1:], SettleOutcome.ACKED)
        self._send_items(worker, (*first, *rest))

    def _settle(
        self,
        worker: Worker,
        chosen: list[Held],
        verdict: SettleOutcome,
        delay_ms: int | None = None,
    ) -> None:
        self._send_items(worker, self._items(worker, chosen, verdict, delay_ms))

    def _items(
        self,
        worker: Worker,
        chosen: list[Held],
        verdict: SettleOutcome,
        delay_ms: int | None = None,
    ) -> tuple[Any, ...]:
        """Settle what a worker holds. Returns: the items of the message."""
        parts: dict[tuple[int, int], list[int]] = {}
        for number, queue, offset in chosen:
            parts.setdefault((number, queue), []).append(offset)
            worker.drop((number, queue, offset))
        return tuple(
            (number, queue, tuple(offsets), verdict, delay_ms)
            for (number, queue), offsets in parts.items()
        )

    def _send_items(self, worker: Worker, items: tuple[Any, ...]) -> None:
        worker.settling = Message("settle", worker.name, worker.session, worker.settle, items=items)
        self.send(worker.settling)

    def resettle(self, name: str) -> None:
        """Repeat a request that settles."""
        self.left["repeat"] -= 1
        settling = self.workers[name].settling
        assert settling is not None
        self.send(settling)

    def extend(self, name: str) -> None:
        self.left["extend"] -= 1
        worker = self.workers[name]
        now_ms = worker.now_ms(self.now_ms)
        self.send(Message("extend", name, worker.session, 0, now_ms))

    def own(self, name: str, *, gives_up: bool) -> None:
        """Ask for a time of its own for one message: a longer one, or a short one after which others get it."""
        self.left["own"] -= 1
        worker = self.workers[name]
        held = min(worker.held)
        length_ms = DELAY_MS if gives_up else 2 * LEASE_MS
        if gives_up:
            worker.drop(held)
        else:
            worker.own.add(held)
        now_ms = worker.now_ms(self.now_ms)
        own = (*held, length_ms, gives_up)
        self.send(Message("own", name, worker.session, 0, now_ms, own=own))

    def drop(self, name: str) -> None:
        """Forget what it may not hold any more."""
        worker = self.workers[name]
        for each in worker.over(self.now_ms):
            worker.drop(each)

    def die(self, name: str) -> None:
        self.left["die"] -= 1
        self._begin_again(name)

    def _begin_again(self, name: str) -> None:
        worker = self.workers[name]
        self.workers[name] = Worker(name, worker.rate, worker.life + 1)

    def hang(self, name: str) -> None:
        self.left["hang"] -= 1
        self.workers[name].is_hung = True

    def wake(self, name: str) -> None:
        self.workers[name].is_hung = False

    def _take_answer(self, message: Message) -> None:
        worker = self.workers[message.worker]
        if worker.session != message.session:
            return
        match message.kind:
            case "leased":
                self._take_leased(worker, message)
            case "settled":
                self._take_settled(worker, message)
            case _:
                self._take_extended(worker, message)

    def _take_leased(self, worker: Worker, message: Message) -> None:
        if worker.asked is None or worker.asked.request != message.request:
            return
        worker.request, worker.asked = worker.request + 1, None
        now_ms = worker.now_ms(self.now_ms)
        number, lease_ms, *offsets = message.answer
        if not number:
            worker.found_none = self.now_ms, len(self.log.records)
        until_ms = counted_from(message.sent_ms, now_ms) + believed_ms(lease_ms)
        if number and now_ms < until_ms:
            for queue, offset in offsets:
                worker.held[number, queue, offset] = until_ms

    def _take_settled(self, worker: Worker, message: Message) -> None:
        settling = worker.settling
        if settling is None or settling.request != message.request:
            return
        worker.settle, worker.settling = worker.settle + 1, None
        for number, queue, offsets, verdict, _ in settling.items:
            for offset in offsets:
                held = number, queue, offset
                if held in message.answer:
                    self.told_refused.add((worker.session, held))
                    self._check_refused(worker.session, held)
                elif verdict == SettleOutcome.ACKED:
                    told = self.told.setdefault((queue, offset), worker.session)
                    need(told == worker.session, "J1: two workers acknowledged", held, told)

    def _check_refused(self, session: str, held: Held) -> None:
        number, queue, offset = held
        for _, entry in self.entries():
            for group in entry.groups if isinstance(entry, SettleEntry) else ():
                if entry.session.decode() == session and group.key[1] == queue:
                    is_same = group.number == number and offset in group.offsets.tolist()
                    counted = is_same and group.outcome not in (
                        SettleOutcome.REFUSED,
                        SettleOutcome.RETURNED,
                    )
                    need(not counted, "J9: refused, and it counted", held)

    def _take_extended(self, worker: Worker, message: Message) -> None:
        now_ms = worker.now_ms(self.now_ms)
        granted = dict(message.answer)
        own = message.own[:3] if message.own is not None else None
        for held in list(worker.held):
            is_meant = held == own if own is not None else held not in worker.own
            if held[0] in granted and is_meant:
                sent_ms = counted_from(message.sent_ms, now_ms)
                until_ms = sent_ms + believed_ms(granted[held[0]])
                worker.held[held] = max(worker.held[held], until_ms)

    def tick(self, ms: int = 1_000) -> None:
        self.left["tick"] -= 1
        self.now_ms += ms

    # --- all events -------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """The events that are possible now."""
        found: list[Event] = []
        left = self.left
        for message in self.net:
            if message.kind in ANSWERS and self.workers[message.worker].is_hung:
                # It waits in the socket.
                continue
            found.append(Event(6, "deliver", (message,)))
            if left["double"]:
                found.append(Event(1, "double", (message,)))
            if left["lose"]:
                found.append(Event(0.3, "lose", (message,)))
            is_asked = self.deposed is not None and message.kind not in ANSWERS
            if is_asked and not deposed_is_checked():
                found.append(Event(6, "ask_deposed", (message,)))

        log = self.log
        if log.waiting or log.confirmed < len(log.records):
            found.append(Event(6, "confirm"))
        if left["crash"]:
            for end in range(log.confirmed, len(log.records) + 1):
                found.append(Event(0.6, "crash", (end,)))
        if left["tick"]:
            found.append(Event(2, "tick"))
        if self.reference.paused:
            found.append(Event(0.5, "resume"))
        if left["trim"]:
            for queue in range(self.bounds.queues):
                if self.min_offset[queue] < self.bounds.messages:
                    found.append(Event(0.3, "trim", (queue,)))
        for name, worker in self.workers.items():
            self._add_worker(found, name, worker)
        return found

    def _add_worker(self, found: list[Event], name: str, worker: Worker) -> None:
        left = self.left
        if worker.is_hung:
            found.append(Event(0.4, "wake", (name,)))
            return
        if worker.over(self.now_ms):
            found.append(Event(1, "drop", (name,)))
        for kind, weight in (("hang", 0.3), ("die", 0.2)):
            if left[kind]:
                found.append(Event(weight, kind, (name,)))
        if len(self.net) >= self.bounds.network:
            return

        leases = {each[0] for each in worker.held}
        has_news = worker.found_none != (self.now_ms, len(self.log.records))
        if worker.asked is None and has_news and len(leases) < self.bounds.held:
            found.append(Event(3, "lease", (name,)))
        if worker.asked is not None and left["repeat"] and worker.asked not in self.net:
            found.append(Event(2, "again", (name,)))
        if worker.settling is not None:
            if left["repeat"] and worker.settling not in self.net:
                found.append(Event(1, "resettle", (name,)))
        elif worker.held:
            self._add_settling(found, name, worker)
        if worker.held and left["extend"]:
            found.append(Event(2, "extend", (name,)))
        if worker.held and left["own"] and not self.bounds.order:
            now_ms = worker.now_ms(self.now_ms)
            if worker.held[min(worker.held)] > now_ms:
                found.append(Event(1, "own_longer", (name,)))
                found.append(Event(1, "own_shorter", (name,)))

    def own_longer(self, name: str) -> None:
        self.own(name, gives_up=False)

    def own_shorter(self, name: str) -> None:
        self.own(name, gives_up=True)

    def _add_settling(self, found: list[Event], name: str, worker: Worker) -> None:
        found.append(Event(3, "ack", (name, "all")))
        if len(worker.held) > 1:
            found.append(Event(1, "ack", (name, "first")))
            found.append(Event(1, "ack", (name, "last")))
        for kind, weight in (("nack", 1), ("reject", 0.5), ("release", 0.7), ("delay", 0.5)):
            if self.left[kind]:
                found.append(Event(weight, kind, (name,)))
        if self.left["mix"] and len(worker.held) > 1:
            found.append(Event(0.4, "mix", (name, "nack")))
            found.append(Event(0.3, "mix", (name, "reject")))

    # --- invariants -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: Broken, if an invariant does not hold."""
        self.steps += 1
        holders: dict[tuple[int, int], str] = {}
        for name, worker in self.workers.items():
            for queue, offset in worker.believes(self.now_ms):
                other = holders.setdefault((queue, offset), name)
                need(other == name, "J2: two workers hold one message", queue, offset, other, name)

        for (queue, offset), session in self.told.items():
            is_settled = self.reference.queues[TOPIC, queue].is_settled(offset)
            need(is_settled, "J8: an acknowledged message is open again", offset, session)
        for (_, queue_id), each in self.reference.queues.items():
            is_in = each.next - each.low <= self.bounds.window
            need(is_in, "J6: the window is too large", each.low, each.next)
            for offset in range(each.low, each.next):
                is_known = each.is_settled(offset) or offset in each.open or offset in each.waiting
                need(is_known, "J7: nobody will get it", offset)
            self._check_copies(queue_id, each.dead, each.moved)
        if self.bounds.order:
            self._check_belief_in_order()
        if not self.steps & 63:
            self._check_fold(with_snapshot=bool(self.steps & 64))

    def _check_copies(self, queue: int, dead: set[int], moved: set[int]) -> None:
        copies = [copy for each in self.log.records for copy in each.copies if copy.key[1] == queue]
        for outcome, settled in ((SettleOutcome.DEAD, dead), (SettleOutcome.MOVED, moved)):
            found = [copy.offset for copy in copies if copy.outcome == outcome]
            need(len(found) == len(set(found)), "J10: two copies", found)
            need(set(found) == settled, "J10: copies and settlements differ", found, settled)
            both = {offset for each, offset in self.told if each == queue} & set(found)
            need(not both, "J10: acknowledged and copied", both)
        most = self.bounds.max_attempts
        for copy in copies:
            is_last = copy.reason == "rejected" or copy.attempts == most
            need(copy.outcome != SettleOutcome.DEAD or is_last, "J5: dead too early", copy)

    def _check_belief_in_order(self) -> None:
        for worker in self.workers.values():
            mine = worker.believes(self.now_ms)
            for item in worker.settling.items if worker.settling is not None else ():
                mine |= {(item[1], offset) for offset in item[2]}
            for queue_id, offset in worker.believes(self.now_ms):
                queue = self.reference.queues[TOPIC, queue_id]
                for earlier in range(queue.low, offset):
                    if self.key_of(earlier) == self.key_of(offset):
                        is_done = queue.is_settled(earlier) or (queue_id, earlier) in mine
                        need(is_done, "J11: at work before an earlier one of its key", offset)

    def _check_fold(self, *, with_snapshot: bool) -> None:
        again = fold(self.log.records, with_snapshot=with_snapshot)
        difference = self.reference.differs(again.groups[GROUP])
        need(difference is None, "J4: not a function of the log", difference)
        need(again.number == self.table.number, "J4: another number")

    def heal(self, choose: Callable[[list[Event]], Event]) -> None:
        """Faults stop: then everything is settled."""
        self.left = dict.fromkeys(self.left, 0) | {"repeat": 10_000}
        self.deposed = None
        for worker in self.workers.values():
            worker.is_hung = False
        for _ in range(200):
            for _ in range(40):
                events = [each for each in self.events() if _heals(each)]
                if not events:
                    break
                choose(events).run(self)
                self.check()
            if all(each.low == self.bounds.messages for each in self.reference.queues.values()):
                break
            self.now_ms += 1_000
            for name in self.workers:
                self.drop(name)
        for each in self.reference.queues.values():
            settled = each.acked | each.dead | each.moved | each.filtered | each.expired
            is_whole = settled >= set(range(self.bounds.messages))
            need(each.low == each.next == self.bounds.messages, "J7: not drained", each)
            need(is_whole, "J7: lost", each)


def _heals(event: Event) -> bool:
    return event.kind in ("deliver", "confirm", "lease", "again", "resettle", "resume") or (
        event.kind == "ack" and event.arguments[1] == "all"
    )


def answered(message: Message, plan: LeasePlan) -> Message | None:
    """The answer to a request as a message."""
    match plan.answer:
        case LeaseAnswer(_, number, lease_ms, parts):
            offsets = [(part.key[1], offset) for part in parts for offset in part.offsets.tolist()]
            return replace(message, kind="leased", answer=(number, lease_ms, *offsets))
        case SettleAnswer(_, refused):
            found = [
                (each.number, each.key[1], offset)
                for each in refused
                for offset in each.offsets.tolist()
            ]
            return replace(message, kind="settled", items=(), answer=tuple(sorted(found)))
        case ExtendAnswer(granted):
            return replace(message, kind="extended", answer=tuple(sorted(granted.items())))
    return None


def fold(records: list[Record], *, with_snapshot: bool) -> LeaseTable:
    """The leases of a log. Args: `with_snapshot`: half of it is a snapshot."""
    table = LeaseTable()
    half = len(records) // 2
    for index, record in enumerate(records):
        if with_snapshot and index == half:
            bodies = [body for _, body in table.packed_records()]
            table = LeaseTable()
            for body in bodies:
                table.apply_packed(body)
        table.apply_packed(record.body)
    return table


# --- parts that a mutant removes ------------------------------------------------------------------


def deposed_is_checked() -> bool:
    """An answer without a record leaves only after a check that its leader still leads (L6)."""
    return True


def counted_from(sent_ms: int, now_ms: int) -> int:
    """A worker counts its time from the sending of its request (L6)."""
    return sent_ms


def believed_ms(lease_ms: int) -> float:
    """Clocks may differ by a tenth."""
    return 0.9 * lease_ms
