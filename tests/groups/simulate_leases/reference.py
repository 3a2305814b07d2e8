"""The state of leases a second time: dictionaries of single messages, folded from the records. Short and slow."""

from __future__ import annotations

from dataclasses import dataclass, field

from raymq.store.groups.leases.entries import (
    Entry,
    ForgetEntry,
    LeaseEntry,
    LengthEntry,
    PauseEntry,
    ResetEntry,
    SettleEntry,
    SettleOutcome,
    TimeEntry,
    TrimEntry,
)
from raymq.store.groups.leases.group_leases import GroupLeases
from raymq.store.groups.leases.queue_columns import OPEN, WAITING
from raymq.store.state.topics import QueueKey


@dataclass
class ReferenceQueue:
    """One queue."""

    low: int
    next: int
    #: offset -> its lease
    open: dict[int, int] = field(default_factory=dict)
    #: offset -> its delay
    waiting: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    #: settled above the low mark
    settled: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)

    def is_settled(self, offset: int) -> bool:
        return offset < self.low or offset in self.settled

    def settle(self, offset: int) -> None:
        self.open.pop(offset, None)
        self.waiting.pop(offset, None)
        self.attempts.pop(offset, None)
        self.settled.add(offset)

    def advance(self) -> None:
        while self.low in self.settled:
            self.settled.discard(self.low)
            self.low += 1


@dataclass
class Reference:
    """One group."""

    number: int = 0
    queues: dict[QueueKey, ReferenceQueue] = field(default_factory=dict)
    #: session -> request, number, settle, refused
    sessions: dict[bytes, tuple[int, int, int, tuple[object, ...]]] = field(default_factory=dict)
    paused: str = ""
    #: messages that died since it was resumed
    dead: int = 0
    #: number -> session, length
    leases: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        """Account for one entry."""
        match entry:
            case LeaseEntry():
                self._lease(entry)
            case SettleEntry():
                self._settle(entry)
            case ResetEntry():
                self.queues[entry.key] = ReferenceQueue(entry.offset, entry.offset)
            case TrimEntry():
                queue = self.queues[entry.key]
                for offset in range(queue.low, entry.min_offset):
                    if not queue.is_settled(offset):
                        queue.expired.add(offset)
                        queue.settle(offset)
                queue.next = max(queue.next, entry.min_offset)
            case LengthEntry():
                session, _ = self.leases[entry.number]
                self.leases[entry.number] = session, entry.lease_ms
            case PauseEntry():
                self.paused, self.dead = entry.reason, self.dead if entry.reason else 0
            case TimeEntry():
                pass
            case ForgetEntry():
                for session in entry.sessions:
                    del self.sessions[session]
            case _:
                raise AssertionError(entry)
        for queue in self.queues.values():
            queue.advance()
        held = {number for queue in self.queues.values() for number in queue.open.values()}
        self.leases = {number: each for number, each in self.leases.items() if number in held}

    def _lease(self, entry: LeaseEntry) -> None:
        self.number = max(self.number, entry.number)
        if entry.number:
            self.leases[entry.number] = entry.session, entry.lease_ms
        if entry.number and entry.session:
            _, _, settle, refused = self.sessions.get(entry.session, (0, 0, 0, ()))
            self.sessions[entry.session] = entry.request, entry.number, settle, refused
        for part in entry.parts:
            queue = self.queues[part.key]
            for offset in part.taken.tolist():
                queue.waiting.pop(offset, None)
                queue.open[offset] = entry.number
                queue.attempts[offset] = queue.attempts.get(offset, 0) + 1
            for offset in part.filtered.tolist():
                queue.filtered.add(offset)
                queue.settle(offset)
            for offset in part.passed.tolist():
                queue.waiting[offset] = 0
            whole = (part.taken, part.filtered, part.passed)
            queue.next = max([queue.next, *(int(each[-1]) + 1 for each in whole if len(each))])

    def _settle(self, entry: SettleEntry) -> None:
        refused = []
        for group in entry.groups:
            queue = self.queues[group.key]
            if group.outcome == SettleOutcome.REFUSED:
                refused.append((group.number, group.key, tuple(group.offsets.tolist())))
                continue
            for offset in group.offsets.tolist():
                if group.outcome in (SettleOutcome.NACKED, SettleOutcome.RETURNED):
                    del queue.open[offset]
                    queue.waiting[offset] = group.delay_ms
                    queue.attempts[offset] -= group.outcome == SettleOutcome.RETURNED
                    continue
                kinds = {
                    SettleOutcome.ACKED: queue.acked,
                    SettleOutcome.DEAD: queue.dead,
                    SettleOutcome.MOVED: queue.moved,
                }
                kinds[group.outcome].add(offset)
                self.dead += group.outcome == SettleOutcome.DEAD
                queue.settle(offset)
        if entry.session:
            request, number, _, _ = self.sessions.get(entry.session, (0, 0, 0, ()))
            self.sessions[entry.session] = request, number, entry.settle, tuple(refused)

    def differs(self, group: GroupLeases) -> object:
        """Where the columns are not as this; None: nowhere."""
        for key, queue in self.queues.items():
            found = seen(group, key)
            attempts = {each: n for each, n in queue.attempts.items() if n}
            wanted = queue.low, queue.next, queue.open, queue.waiting, attempts
            if found != wanted:
                return key, found, wanted
        if group.paused != self.paused:
            return group.paused, self.paused
        sessions = {
            session: (
                each.request,
                each.number,
                each.settle,
                tuple(
                    (part.number, part.key, tuple(part.offsets.tolist())) for part in each.refused
                ),
            )
            for session, each in group.sessions.items()
        }
        if sessions != self.sessions:
            return sessions, self.sessions
        leases = {number: (each.session, each.lease_ms) for number, each in group.leases.items()}
        if leases != self.leases:
            return leases, self.leases
        counts = dict.fromkeys(leases, 0)
        for queue in self.queues.values():
            for number in queue.open.values():
                counts[number] += 1
        found_counts = {number: each.open_count for number, each in group.leases.items()}
        if found_counts != counts:
            return found_counts, counts
        in_flight = sum(len(queue.open) for queue in self.queues.values())
        return None if in_flight == group.in_flight else (in_flight, group.in_flight)


def seen(
    group: GroupLeases, key: QueueKey
) -> tuple[int, int, dict[int, int], dict[int, int], dict[int, int]]:
    """A queue's columns as dictionaries: low, next, open, waiting, attempts."""
    columns = group.queues[key]
    opened, waiting, attempts = {}, {}, {}
    for offset in columns.unsettled().tolist():
        place = offset & (len(columns.status) - 1)
        if columns.status[place] == OPEN:
            opened[offset] = int(columns.number[place])
        elif columns.status[place] == WAITING:
            waiting[offset] = int(columns.delay_ms[place])
        if columns.attempts[place]:
            attempts[offset] = int(columns.attempts[place])
    return columns.low, columns.next, opened, waiting, attempts
