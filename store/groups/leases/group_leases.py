"""The leases of one group on this shard: its queues, leases and sessions, as a function of the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from raymq.store.state.topics import QueueKey

from .entries import (
    Entry,
    ForgetEntry,
    HeldEntry,
    LeaseEntry,
    LengthEntry,
    PauseEntry,
    QueueEntry,
    ResetEntry,
    SessionEntry,
    Settled,
    SettleEntry,
    SettleOutcome,
    TimeEntry,
    TrimEntry,
)
from .offsets import OffsetColumn
from .queue_columns import OPEN, WAITING, QueueColumns

#: about how many bytes of memory a lease takes with its deadline; its part in a queue, beside the offsets; a session;
#: and a group of refused offsets, beside these
_LEASE_BYTES, _PART_BYTES, _SESSION_BYTES, _REFUSED_BYTES = 600, 200, 400, 300


#: dead letters are counted over so long
DEAD_COUNTED_MS = 60_000


@dataclass(slots=True)
class OpenLease:
    """Offsets that a session got with one request."""

    session: bytes
    #: a new leader gives it so long
    lease_ms: int
    #: offsets that are not settled, and that no other lease has
    open_count: int = 0
    #: what it got of each queue, settled or not
    parts: list[tuple[QueueKey, OffsetColumn]] = field(default_factory=list)


class WorkerSession(NamedTuple):
    """The newest requests of a session, so that a repeated one gets its first answer."""

    #: the newest request that got a lease, and its number
    request: int = 0
    number: int = 0
    #: the newest request that settled, and what it was refused
    settle: int = 0
    refused: Sequence[Settled] = ()


#: of a session that is not known
NEW_SESSION = WorkerSession()


class GroupLeases:
    """Not thread-safe: the put lock guards it."""

    def __init__(self) -> None:
        self.queues: dict[QueueKey, QueueColumns] = {}
        #: by number
        self.leases: dict[int, OpenLease] = {}
        self.sessions: dict[bytes, WorkerSession] = {}
        #: outcome -> offsets that have met it since the group began, or since the process did
        self.counts: dict[SettleOutcome, int] = {}
        #: when the group was used last, as its records say, ms since 1970; 0: they are of a version that did not say it
        self.used_ms = 0
        #: why it leases nothing; empty: it does
        self.paused = ""
        #: messages that have died since this store time, in the newest minute in which some did. Snapshots have neither
        self._dead_since_ms = self._dead_count = 0
        #: bytes of what sessions were refused, and of the parts of leases
        self.refused_bytes = 0
        self._parts_bytes = 0

    @property
    def nbytes(self) -> int:
        """About how many bytes of memory it takes, with the times of its leases."""
        columns = sum(each.nbytes for each in self.queues.values())
        leases = _LEASE_BYTES * len(self.leases) + self._parts_bytes
        return columns + leases + _SESSION_BYTES * len(self.sessions) + self.refused_bytes

    @property
    def is_held(self) -> bool:
        """Whether something would be lost with the group: a lease, a session, a message that waits, or one that is
        settled above the low mark; or a pause.
        """
        is_open = any(each.next > each.low for each in self.queues.values())
        return is_open or bool(self.leases) or bool(self.sessions) or bool(self.paused)

    def dead_within(self, at_ms: int) -> int:
        """Messages that have died in the minute to which a store time belongs. It began with the first of them."""
        return self._dead_count if at_ms - self._dead_since_ms < DEAD_COUNTED_MS else 0

    @property
    def in_flight(self) -> int:
        """Offsets that are leased and not settled."""
        return sum(each.open_count for each in list(self.queues.values()))

    @property
    def waiting(self) -> int:
        """Offsets that wait for their next lease."""
        return sum(each.waiting_count for each in list(self.queues.values()))

    def open_of(self, number: int) -> Iterator[tuple[QueueKey, OffsetColumn]]:
        """What a lease still holds, by queue."""
        lease = self.leases.get(number)
        for key, offsets in () if lease is None else lease.parts:
            if key in self.queues:
                left = self.queues[key].open_under(number, offsets)
                if len(left):
                    yield key, left

    # --- records ----------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        """Account for one entry. Raises: ValueError, LookupError for one that no leader writes."""
        match entry:
            case LeaseEntry():
                self._lease(entry)
            case SettleEntry():
                self._settle(entry)
            case ResetEntry():
                self._reset(entry)
            case TrimEntry():
                self._trim(entry)
            case LengthEntry():
                if entry.number in self.leases:
                    self.leases[entry.number].lease_ms = entry.lease_ms
            case ForgetEntry():
                for session in entry.sessions:
                    self._note_session(session, NEW_SESSION)
                    del self.sessions[session]
            case TimeEntry():
                self.used_ms = max(self.used_ms, entry.at_ms)
            case PauseEntry():
                self.paused = entry.reason
                if not entry.reason:
                    self._dead_count = 0
            case HeldEntry():
                self.leases[entry.number] = OpenLease(entry.session, entry.lease_ms)
            case SessionEntry():
                self._note_session(entry.session, WorkerSession(*entry[1:]))
            case QueueEntry():
                self._load(entry)
            case _:
                raise ValueError(f"an entry {type(entry).__name__}")

    def _lease(self, entry: LeaseEntry) -> None:
        number = entry.number
        lease = OpenLease(entry.session, entry.lease_ms)
        for part in entry.parts:
            lost = self.queues[part.key].lease(number, part)
            self._drop(lost)
            if len(part.taken):
                lease.open_count += len(part.taken)
                self._add_part(lease, part.key, part.taken)

        if number:
            self.leases[number] = lease
            if entry.session:
                known = self.sessions.get(entry.session, NEW_SESSION)
                self.sessions[entry.session] = known._replace(request=entry.request, number=number)

    def _settle(self, entry: SettleEntry) -> None:
        refused: list[Settled] = []
        for group in entry.groups:
            if group.outcome == SettleOutcome.REFUSED:
                refused.append(group)
                continue
            self._settle_group(group)
            self.counts[group.outcome] = self.counts.get(group.outcome, 0) + len(group.offsets)
            if counts_as_dead(group.outcome):
                self._count_dead(len(group.offsets))
        if entry.session:
            known = self.sessions.get(entry.session, NEW_SESSION)
            settled = known._replace(settle=entry.settle, refused=refused)
            self._note_session(entry.session, settled)

    def _count_dead(self, count: int) -> None:
        # The record began with its time.
        before = self.dead_within(self.used_ms)
        if not before:
            self._dead_since_ms = self.used_ms
        self._dead_count = before + count

    def _note_session(self, session: bytes, known: WorkerSession) -> None:
        before = self.sessions.get(session, NEW_SESSION)
        self.refused_bytes += bytes_of(known.refused) - bytes_of(before.refused)
        self.sessions[session] = known

    def _add_part(self, lease: OpenLease, key: QueueKey, offsets: OffsetColumn) -> None:
        lease.parts.append((key, offsets))
        self._parts_bytes += offsets.nbytes + _PART_BYTES

    def _settle_group(self, group: Settled) -> None:
        columns, offsets = self.queues[group.key], group.offsets
        places = columns.at(offsets)
        status = columns.status[places]
        is_held = (status == OPEN) & (columns.number[places] == group.number)
        if not group.number:
            is_held = (status == OPEN) | (status == WAITING)
        if not (columns.inside(offsets) & is_held).all():
            raise ValueError(f"offsets of {group.key} that lease {group.number} does not hold")

        if group.number:
            self._release(group.number, len(offsets))
        else:
            self._drop(columns.number[places[status == OPEN]])
        if group.outcome in (SettleOutcome.NACKED, SettleOutcome.RETURNED):
            is_counted = group.outcome == SettleOutcome.NACKED
            columns.wait(offsets, group.delay_ms, is_counted=is_counted)
        elif group.outcome in (SettleOutcome.ACKED, SettleOutcome.DEAD, SettleOutcome.MOVED):
            columns.settle(offsets)
            columns.advance()
        else:
            raise ValueError(f"an outcome {group.outcome!r}")

    def _drop(self, numbers: OffsetColumn) -> None:
        """Account for offsets that leases lost. Args: `numbers`: of the leases, one for each offset."""
        if len(numbers):
            lost, counts = np.unique(numbers, return_counts=True)
            for number, count in zip(lost.tolist(), counts.tolist(), strict=True):
                self._release(number, count)

    def _release(self, number: int, count: int) -> None:
        lease = self.leases[number]
        lease.open_count -= count
        if not lease.open_count:
            del self.leases[number]
            self._parts_bytes -= sum(offsets.nbytes + _PART_BYTES for _, offsets in lease.parts)

    def _reset(self, entry: ResetEntry) -> None:
        columns = self.queues.pop(entry.key, None)
        if columns is not None:
            left = columns.unsettled()
            places = columns.at(left)
            self._drop(columns.number[places[columns.status[places] == OPEN]])
        if entry.offset >= 0:
            self.queues[entry.key] = QueueColumns(entry.offset)

    def _trim(self, entry: TrimEntry) -> None:
        columns = self.queues[entry.key]
        places = columns.at(columns.unsettled(entry.min_offset))
        self._drop(columns.number[places[columns.status[places] == OPEN]])
        columns.trim(entry.min_offset)

    def drop_topic(self, topic: str) -> None:
        """Forget the queues of a topic that is deleted."""
        for key in [key for key in self.queues if key[0] == topic]:
            self._reset(ResetEntry(key, -1))

    # --- snapshots --------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """The whole state as entries: applied to an empty one, they make this one."""
        if self.used_ms:
            yield TimeEntry(self.used_ms)
        if self.paused:
            yield PauseEntry(self.paused)
        for number, lease in self.leases.items():
            yield HeldEntry(number, lease.session, lease.lease_ms)
        for session, known in self.sessions.items():
            yield SessionEntry(session, *known)
        for key, columns in self.queues.items():
            yield from columns.entries(key)

    def _load(self, entry: QueueEntry) -> None:
        if entry.first == entry.low:
            self.queues[entry.key] = QueueColumns(entry.low)
        self.queues[entry.key].load(entry)
        offsets = np.arange(entry.first, entry.stop)
        is_left = np.ones(len(offsets), dtype=np.bool_)
        is_left[entry.settled - entry.first] = False
        left = offsets[is_left]
        if not len(left):
            return

        # The offsets of one lease together, ascending.
        order = np.argsort(entry.numbers, kind="stable")
        numbers, firsts = np.unique(entry.numbers[order], return_index=True)
        for number, found in zip(
            numbers.tolist(), np.split(left[order], firsts[1:].tolist()), strict=True
        ):
            if number:
                lease = self.leases[number]
                lease.open_count += len(found)
                self._add_part(lease, entry.key, found)


def counts_as_dead(outcome: SettleOutcome) -> bool:
    """A message that dies counts, also one that is dropped: the simulation removes this rule."""
    return outcome == SettleOutcome.DEAD


def bytes_of(refused: Sequence[Settled]) -> int:
    """About how many bytes of memory refused offsets take."""
    return sum(each.offsets.nbytes + _REFUSED_BYTES for each in refused)
