"""Decides calls on leases, and appends what the decisions need: calls that wait together share records and appends.

One thread decides for all that wait. Settlements of different leases are decided on one state, and then leases of
messages that were never leased. Each kind is one record. Everything else is decided alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raymq.store.base.errors import Bug, RayMQError, Unavailable
from raymq.store.delay.delayed_record import BUNDLE_RESERVE_BYTES
from raymq.store.groups.leases.entries import Entry, LeaseEntry, SettleOutcome, TimeEntry
from raymq.store.groups.leases.lease_machine import AppendGroup, LeaseMachine, LeasePlan
from raymq.store.groups.leases.lease_table import LEASE, SETTLE
from raymq.store.groups.leases.options import COPIES_MAX, LeaseOptions
from raymq.store.groups.leases.packing import pack_checked
from raymq.store.groups.leases.requests import (
    Copy,
    RefusedOffsets,
    SettleAnswer,
    SettleRequest,
)
from raymq.store.put.inner_put import RecordGroup
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.requests import AppendedRows

from .lease_copies import LeaseCopies, PreparedCopies, PreparedCopy

logger = logging.getLogger("raymq.store")

#: the service of the bundles that copies and settlements make
SERVICE = "leases"
#: offsets of one record that calls share. One with more has a record of its own
SHARED_OFFSETS_MAX = 4_096
#: how often a call is decided again because it needs other copies than before
TRIES_MAX = 10

#: what a call asks of the machine of its group
LeaseDecider = Callable[[LeaseMachine, int], LeasePlan]


class LeaseDecision(NamedTuple):
    """A decision of the machine whose records were appended."""

    plan: LeasePlan
    #: None: it needed no record
    appended: AppendedRows | None
    #: when a message may be leased again, on the clock of the store; None: no time makes one due
    next_ms: int | None = None


class AckPlan(NamedTuple):
    """Acks that are decided, and not appended."""

    machine: LeaseMachine
    plan: LeasePlan
    now_ms: int
    #: what its leases do not hold any more
    refused: Sequence[RefusedOffsets]
    #: kind and body; None: nothing is to be settled
    record: tuple[str, bytes] | None


class Shared(NamedTuple):
    """What a call touches. Calls of one kind that touch different things may be decided on one state."""

    #: settlements come first: they make room
    is_lease: bool
    session: bytes
    #: leases that a settlement names
    numbers: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Waiting:
    """A call that waits to be decided."""

    group: str
    call: LeaseDecider
    #: None: it is decided alone
    shared: Shared | None
    #: copies that were made for it, and how many it may need
    copies: dict[Copy, PreparedCopy]
    copies_max: int
    woken: threading.Event = field(default_factory=threading.Event)
    #: its thread decides all that wait
    leads: bool = False
    decision: LeaseDecision | None = None
    error: Exception | None = None
    #: copies that its decision needs
    missing: list[Copy] = field(default_factory=list)


@dataclass
class _Batch:
    """Decided calls of one group whose entries share a record."""

    machine: LeaseMachine | None = None
    group: str = ""
    is_lease: bool = False
    calls: list[tuple[_Waiting, LeasePlan, int]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    sessions: set[bytes] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    offsets: int = 0

    def takes(self, each: _Waiting) -> bool:
        """Whether a call may be decided on the state from before these."""
        shared = each.shared
        return (
            shared is not None
            and self.group == each.group
            and self.is_lease == shared.is_lease
            and shared.session not in self.sessions
            and self.numbers.isdisjoint(shared.numbers)
            and self.offsets < SHARED_OFFSETS_MAX
        )


class LeaseDecisions:
    """Decides for all groups of a shard. Threads: any may call."""

    def __init__(self, store: ServiceHost, copies: LeaseCopies) -> None:
        self._store = store
        self._copies = copies
        #: by group, as its workers say
        self.options: dict[str, LeaseOptions] = {}
        #: messages that were settled as dead without a copy: they could not be read, or not be copied
        self.uncopied_count = 0
        #: by group; the put lock guards it
        self._machines: dict[str, LeaseMachine] = {}
        #: has decided what is not appended yet
        self._drafting: LeaseMachine | None = None
        #: guards the fields below
        self._gather_lock = threading.Lock()
        #: calls that wait to be decided
        self._gathered: list[_Waiting] = []
        self._is_deciding = False

    # --- machines ---------------------------------------------------------------------------------

    def activate(self) -> None:
        """Begin to lead: every lease gets its whole time again, from now on. Raises: Unavailable."""

        def begin() -> list[tuple[str, bytes]]:
            self._machines.clear()
            for group in self._store.leases.groups:
                self.machine(group)
            return []

        self._store.inner_put.put_decided(begin)

    def machine(self, group: str) -> LeaseMachine:
        """The machine of a group. Callers: with the put lock."""
        machine = self._machines.get(group)
        options = self.options.get(group)
        if machine is None or machine.is_stale:
            now_ms = self._store.clock.monotonic_ms()
            machine = LeaseMachine(self._store.leases, group, options or LeaseOptions(), now_ms)
            machine.move_ms_max = self._copies.delay_ms_max
            self._machines[group] = machine
        elif options is not None and options != machine.options:
            machine.change_options(options)
        return machine

    def has_unread_keys(self, group: str) -> bool:
        """Whether the keys of messages may have to be read before others of the group are leased."""
        machine, options = self._machines.get(group), self.options.get(group)
        return (
            machine is None
            or machine.is_stale
            or bool(machine.unread)
            or machine.options != options
        )

    def forget_idle(self, in_use: Container[str]) -> None:
        """Forget sessions that hold nothing and were not used for an hour, and groups that have nothing else.

        Args: `in_use`: groups whose options stay.
        """
        for group in {*list(self._store.leases.groups), *list(self._machines)}:
            self.decide(group, lambda machine, now_ms: machine.forget_idle(now_ms))

        def forget() -> list[tuple[str, bytes]]:
            for group in list(self._machines):
                if group not in self._store.leases.groups:
                    del self._machines[group]
                    self._store.leases.forget_coming(group)
            return []

        self._store.inner_put.put_decided(forget)
        for group in list(self.options):
            if group not in self._store.leases.groups and group not in in_use:
                self.options.pop(group, None)

    # --- decisions --------------------------------------------------------------------------------

    def decide(
        self,
        group: str,
        call: LeaseDecider,
        shared: Shared | None = None,
        prepared: PreparedCopies | None = None,
    ) -> LeaseDecision:
        """Decide, and append what the decision needs.

        Calls that wait for the put lock are decided together, by one thread: with many workers, handing the lock from
        thread to thread would cost more than all decisions. Messages are copied before.
        Args: `prepared`: copies that it may need, and that are made already.
        Raises: what `call` raises; as `InnerPut.put_groups`.
        """
        copies: dict[Copy, PreparedCopy] = dict(prepared or {})
        copies_max = COPIES_MAX

        for _ in range(TRIES_MAX):
            mine = _Waiting(group, call, shared, copies, copies_max)
            self._decide_once(mine)
            if mine.error is not None:
                raise mine.error
            if mine.decision is not None:
                return mine.decision
            if not mine.missing:
                raise Bug("a call of leases was not decided")
            if not self._prepare(group, mine.missing, copies):
                copies_max = max(1, len(copies))
        raise Unavailable(f"other messages of group {group} had to be copied meanwhile; ask again")

    def _prepare(
        self, group: str, missing: Sequence[Copy], copies: dict[Copy, PreparedCopy]
    ) -> bool:
        """Make copies, without the put lock. Returns: False if no more are made, since these are large enough."""
        room = self._store.config.bundle_bytes_max
        for copy in missing:
            if room <= 0:
                return False
            made = copies[copy] = self._copies.prepare(group, copy)
            if made.encoded is not None:
                room -= made.encoded.size
        return True

    def _decide_once(self, mine: _Waiting) -> None:
        with self._gather_lock:
            self._gathered.append(mine)
            mine.leads = not self._is_deciding
            self._is_deciding = True
        if not mine.leads:
            mine.woken.wait()
        if mine.leads:
            self._decide_gathered()

    def _decide_gathered(self) -> None:
        """Decide all calls that wait by now, and let the first one of those that come meanwhile lead the next round."""
        with self._gather_lock:
            calls, self._gathered = self._gathered, []
        try:
            self._store.inner_put.put_groups(SERVICE, lambda: self._decide_each(calls))
        except Exception as error:
            # Those after the one that failed are repeated by their callers.
            for each in calls:
                if each.decision is None and each.error is None and not each.missing:
                    each.error = error
        finally:
            with self._gather_lock:
                self._is_deciding = bool(self._gathered)
                if self._gathered:
                    self._gathered[0].leads = True
                    self._gathered[0].woken.set()
            for each in calls:
                each.woken.set()

    def plan_acks(self, group: str, request: SettleRequest) -> AckPlan:
        """Decide on acks that another decision of the shard needs. Callers: with the put lock, until `note_acks`.

        Returns: a decision that changes nothing yet. Raises: as `LeaseMachine.settle`.
        """
        self._end_draft()
        machine, now_ms = self.machine(group), self._store.clock.monotonic_ms()
        plan = machine.settle(request, now_ms)
        if any(each.copies for each in plan.groups):
            raise Bug("an ack copies no message")
        answer = plan.answer
        refused = answer.refused if isinstance(answer, SettleAnswer) else ()
        record = (SETTLE, self._body(group, plan.entries)) if plan.entries else None
        return AckPlan(machine, plan, now_ms, refused, record)

    def note_acks(self, acks: AckPlan) -> None:
        """The record of acks was appended and applied."""
        acks.machine.note(acks.plan, acks.now_ms)

    def _end_draft(self) -> None:
        """Decide on the state alone, if an append of the last round has failed. Has the put lock."""
        if self._drafting is not None:
            self._drafting.end_draft()
            self._drafting = None

    def _decide_each(self, calls: Sequence[_Waiting]) -> Iterator[RecordGroup]:
        """The records of calls. Has the put lock."""
        self._end_draft()
        batch = _Batch()
        for each in sorted(calls, key=_turn):
            if not batch.takes(each):
                yield from self._finish(batch)
                batch = _Batch()
            yield from self._decide_one(each, batch)
            if not batch.calls:
                batch = _Batch()
        yield from self._finish(batch)

    def _decide_one(self, each: _Waiting, batch: _Batch) -> Iterator[RecordGroup]:
        """Decide a call, and let its entries wait in the batch, or append them after those of the batch."""
        now_ms = self._store.clock.monotonic_ms()
        try:
            machine = self.machine(each.group)
            plan = self._plan(each, machine, now_ms)
        except RayMQError as error:
            each.error = error
            return
        if each.missing:
            return
        if not plan.groups:
            self._note(each, machine, plan, now_ms)
            return
        if each.shared is not None and machine.may_share(plan):
            shared = each.shared
            batch.machine, batch.group, batch.is_lease = machine, each.group, shared.is_lease
            self._drafting = machine
            batch.calls.append((each, plan, now_ms))
            batch.entries += plan.entries
            batch.offsets += machine.draft(plan)
            batch.numbers |= shared.numbers
            if shared.session:
                batch.sessions.add(shared.session)
            return

        # It was decided on the state after the batch.
        yield from self._finish(batch)
        for group in plan.groups:
            yield self._record_group(each.group, group, each.copies)
        self._note(each, machine, plan, now_ms)

    def _finish(self, batch: _Batch) -> Iterator[RecordGroup]:
        """Append the record of a batch, and answer its calls."""
        machine = batch.machine
        if machine is None or not batch.calls:
            return
        machine.end_draft()
        self._drafting = None
        yield self._record_group(batch.group, AppendGroup(batch.entries), {})
        calls, batch.calls, batch.entries = batch.calls, [], []
        for each, plan, now_ms in calls:
            self._note(each, machine, plan, now_ms)

    def _note(self, each: _Waiting, machine: LeaseMachine, plan: LeasePlan, now_ms: int) -> None:
        """Answer a call whose entries are applied."""
        machine.note(plan, now_ms)
        appended = AppendedRows.up_to(self._store.log.end) if plan.groups else None
        each.decision = LeaseDecision(plan, appended, machine.next_ms())
        for group in plan.groups:
            for copy in group.copies:
                self._note_copy(each.group, copy, each.copies[copy])

    def _note_copy(self, group: str, copy: Copy, made: PreparedCopy) -> None:
        if made.encoded is None and made.fault:
            self.uncopied_count += 1
            target = self._copies.target(group, copy)
            logger.warning("a message is settled without its copy for %s: %s", target, made.fault)

    def _plan(self, each: _Waiting, machine: LeaseMachine, now_ms: int) -> LeasePlan:
        """A decision whose copies are made, or are named as missing. Has the put lock."""
        machine.copies_max = each.copies_max
        machine.store_ms = self._store_ms()
        machine.unmovable = {
            (copy.key, copy.offset)
            for copy, made in each.copies.items()
            if may_stay(copy) and made.encoded is None and made.stays
        }

        while True:
            plan = each.call(machine, now_ms)
            copied = [copy for group in plan.groups for copy in group.copies]
            each.missing = self._copies.missing(each.group, copied, each.copies)
            if each.missing or not copied:
                return plan
            # A plan changes nothing: one with fewer copies takes its place.
            if any(self._is_large(each, group, machine.copies_max) for group in plan.groups):
                machine.copies_max //= 2
                continue
            stay = {
                (copy.key, copy.offset)
                for copy in copied
                if may_stay(copy) and each.copies[copy].stays
            }
            if not stay:
                return plan
            machine.unmovable |= stay

    def _is_large(self, each: _Waiting, group: AppendGroup, copies_max: int) -> bool:
        """Whether other puts would wait too long for the copies of a group, or no record has room for all of them."""
        config = self._store.config
        made = [each.copies[copy].encoded for copy in group.copies]
        copied_bytes = sum(one.size for one in made if one is not None)
        if copies_max > 1 and copied_bytes > config.bundle_bytes_max:
            return True
        # A message that was buried alone always fits: `LeaseCopies.prepare` leaves more room.
        around = BUNDLE_RESERVE_BYTES + len(self._body(each.group, group.entries))
        return bool(copied_bytes) and copied_bytes + around > config.record_bytes_max

    def _record_group(self, group: str, wanted: AppendGroup, copies: PreparedCopies) -> RecordGroup:
        """A group of entries as a record, with the messages that are copied."""
        is_lease = any(isinstance(entry, LeaseEntry) for entry in wanted.entries)
        record = (LEASE if is_lease else SETTLE), self._body(group, wanted.entries)
        made = [copies[copy].encoded for copy in wanted.copies]
        return RecordGroup([record], [each for each in made if each is not None])

    def _body(self, group: str, entries: Sequence[Entry]) -> bytes:
        return pack_checked(group, [TimeEntry(self._store_ms()), *entries])

    def _store_ms(self) -> int:
        """The store time of a record that is written now, about: jumps of the clock do not count."""
        look = self._store.log.marks.clock_look
        return max(look.wall_ms - look.jumped_ms, self._store.state.store_time_ms)


def may_stay(copy: Copy) -> bool:
    """Whether a message without a copy stays as it is. A dead one is settled all the same."""
    return copy.outcome == SettleOutcome.MOVED or copy.destination is not None


def _turn(each: _Waiting) -> tuple[str, int]:
    """The order of calls that wait together: by group, and leases last."""
    if each.shared is None:
        return each.group, 0
    return each.group, 2 if each.shared.is_lease else 1
