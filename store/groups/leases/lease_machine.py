"""The decisions on leases: who gets which messages, what is settled, whose time is over. A state machine without I/O.

A decision is a `LeasePlan`: entries that the log needs, messages to copy with them, and an answer. It changes nothing
of the state: the entries do, once their records are appended. `note` then starts their times. The answer leaves when
all that is in the log is confirmed; without entries it also waits for a check that this replica still leads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.state.topics import QueueKey

from . import key_order
from .entries import (
    TO_BURY_MS,
    EndEntry,
    Entry,
    ForgetEntry,
    LeasedPart,
    LeaseEntry,
    LengthEntry,
    PauseEntry,
    ResetEntry,
    Settled,
    SettleEntry,
    SettleOutcome,
    TrimEntry,
    waited_ms,
)
from .group_leases import NEW_SESSION, GroupLeases, WorkerSession, bytes_of
from .lease_table import LeaseTable
from .lease_times import LeaseTimes
from .offsets import NO_OFFSETS, OffsetColumn
from .options import (
    COPIES_MAX,
    DELAY_IN_PLACE_MS_MAX,
    LEASE_OFFSETS_MAX,
    MS_MAX,
    LeaseOptions,
)
from .pauses import DEAD_LETTERS
from .queue_columns import ATTEMPTS_MAX, OPEN, WAITING, QueueColumns
from .request_checks import (
    check_groups,
    check_key,
    check_lease,
    check_length,
    check_session,
    checked_items,
    checked_offsets,
)
from .requests import (
    NO_SESSION,
    Copy,
    Destination,
    ExtendAnswer,
    LeaseAnswer,
    Leased,
    LeaseRequest,
    Offer,
    RefusedOffsets,
    SettleAnswer,
    SettleItem,
    SettleRequest,
    copy_to,
)

#: sessions of a shard
SESSIONS_MAX = 10_000
#: a session that holds nothing is forgotten after so long
SESSION_IDLE_MS = 3_600_000
#: bytes of the refused offsets that a shard remembers, so that a repeated request gets its first answer
REFUSED_BYTES_MAX = 16 << 20
#: a group that is used and needs no record gets one after so long, so that it does not count as unused
MARK_EVERY_MS = 86_400_000
#: parts of leases that one record takes back
RELEASED_MAX = 1_000
#: verdicts that settle a message for ever
_FINAL = (SettleOutcome.ACKED, SettleOutcome.REJECTED)
_NO_SLOTS = np.zeros(0, dtype=np.uint16)


class AppendGroup(NamedTuple):
    """Entries and copied messages that the log gets together, or not at all."""

    entries: Sequence[Entry]
    copies: Sequence[Copy] = ()


@dataclass
class _Draft:
    """What leases take that are decided, and not applied yet."""

    #: queue -> the first offset that none of them has
    next: dict[QueueKey, int] = field(default_factory=dict)
    #: messages, and leases
    in_flight: int = 0
    numbers: int = 0


@dataclass
class LeasePlan:
    """A decision."""

    #: in this order
    groups: list[AppendGroup] = field(default_factory=list)
    #: None: the request is too old to be answered
    answer: LeaseAnswer | SettleAnswer | ExtendAnswer | None = None
    #: of messages that are leased or passed for the first time: their queue, and the slots of their keys
    slots: list[tuple[QueueKey, OffsetColumn, npt.NDArray[np.uint16]]] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """What the log needs before the answer counts."""
        return [entry for group in self.groups for entry in group.entries]


class LeaseMachine:
    """Decides for one group while this replica leads. Callers: one thread, with the put lock. Times: monotonic, ms."""

    def __init__(self, table: LeaseTable, name: str, options: LeaseOptions, now_ms: int) -> None:
        """Begin to lead the group's leases on this shard."""
        self._table = table
        self._name = name
        self.options = options
        #: messages that one step copies. A caller whose append group would be too large lowers it
        self.copies_max = COPIES_MAX
        #: a longer delay than the retry topic knows is waited for in place; so are messages that cannot be copied
        self.move_ms_max = MS_MAX
        self.unmovable: Set[tuple[QueueKey, int]] = frozenset()
        #: the log's store time at the decision. Only the rate of dead letters depends on it
        self.store_ms = 0
        self._draft = _Draft()
        self._times = LeaseTimes(self._group, options)
        self._times.activate(now_ms)
        #: when the group got its last record
        self._written_ms = now_ms
        #: session -> when it was used last
        self._used_ms = dict.fromkeys(self._group.sessions, now_ms)
        #: in the order of keys: messages of an earlier leader, whose keys are not known yet
        self._without_keys = self._unread_keys()

    @property
    def _group(self) -> GroupLeases:
        # Times and records have the same one, also before the first record.
        return self._table.coming(self._name)

    @property
    def is_stale(self) -> bool:
        """Whether the group was deleted, or its state was made again: then another machine decides."""
        return not self._times.is_of(self._table.known(self._name))

    def change_options(self, options: LeaseOptions) -> None:
        """Take other options, from the next decision on. Times go on."""
        order = self.options.order
        self.options = self._times.options = options
        if order != options.order:
            for columns in self._group.queues.values():
                columns.slot[:] = 0
            self._without_keys = self._unread_keys()

    def _unread_keys(self) -> dict[QueueKey, OffsetColumn]:
        """The messages of each queue whose keys are not known, if their order counts."""
        if self.options.order != "key":
            return {}
        queues = self._group.queues.items()
        return {key: left for key, each in queues if len(left := each.unsettled())}

    # --- decisions that share a record ------------------------------------------------------------

    def may_share(self, plan: LeasePlan) -> bool:
        """Whether others may be decided before the entries of a plan are applied, and share its record."""
        if self.options.order or len(plan.groups) != 1:
            return False
        (group,) = plan.groups
        if group.copies or len(group.entries) != 1:
            return False
        (entry,) = group.entries
        if isinstance(entry, SettleEntry):
            return not entry.session or entry.session in self._group.sessions
        if not isinstance(entry, LeaseEntry) or entry.session not in self._group.sessions:
            return False
        # A settlement of what was leased before must come first.
        queues = self._group.queues
        return all(
            not len(part.taken) or part.taken[0] >= queues[part.key].next for part in entry.parts
        )

    def draft(self, plan: LeasePlan) -> int:
        """Decide as if the entry of a plan were applied, until `end_draft`. Returns: of how many offsets it is.

        Callers: for plans that `may_share`. What is decided meanwhile is appended after it, or with it.
        """
        (entry,) = plan.entries
        if isinstance(entry, SettleEntry):
            return sum(len(group.offsets) for group in entry.groups)
        if not isinstance(entry, LeaseEntry):
            return 0

        count = 0
        self._draft.numbers += entry.number > 0
        for part in entry.parts:
            columns = (part.taken, part.filtered, part.passed)
            last = max(int(each[-1]) for each in columns if len(each))
            self._draft.next[part.key] = last + 1
            self._draft.in_flight += len(part.taken)
            count += sum(map(len, columns))
        return count

    def end_draft(self) -> None:
        """Decide on the state alone again."""
        self._draft = _Draft()

    def _next(self, key: QueueKey, columns: QueueColumns) -> int:
        """The first offset of a queue that was never leased."""
        return max(columns.next, self._draft.next.get(key, 0))

    @property
    def _in_flight(self) -> int:
        return self._group.in_flight + self._draft.in_flight

    # --- leases -----------------------------------------------------------------------------------

    def begin(self, key: QueueKey, offset: int) -> LeasePlan:
        """Let a queue begin at the offset that the group has committed, or wants to start at."""
        return LeasePlan() if key in self._group.queues else self.reset(key, offset)

    def due(self, key: QueueKey, count: int, now_ms: int) -> OffsetColumn:
        """Offsets that may be leased again, the first ones, at most `count`. In an order, `lease` finds them itself."""
        return self._times.ready(key, count, now_ms)

    def next_ms(self) -> int | None:
        """When an offset may become due; None: no time makes one due."""
        return self._times.next_ms()

    def room(self, key: QueueKey) -> int:
        """How many messages of a queue may be leased for the first time."""
        columns = self._group.queues[key]
        if not self._table.may_grow(self._name):
            return 0
        in_window = columns.low + self.options.window - self._next(key, columns)
        return max(0, min(in_window, self.options.max_in_flight - self._in_flight))

    def lease(self, request: LeaseRequest, offers: Sequence[Offer], now_ms: int) -> LeasePlan:
        """Decide on a lease. Args: `offers`: what its queues have, in the order of preference.

        Raises: Rejected for a new session, if there are as many as may be, and for a request that no record could say.
        """
        check_lease(request)
        session = self._note_use(request.session, now_ms)
        if request.session and is_repeated(request.request, session.request):
            return LeasePlan(answer=self._repeated(request, session.number, now_ms))
        if request.session and is_old(request.request, session.request):
            return LeasePlan()

        self._times.advance(now_ms)
        if self._group.paused:
            return LeasePlan(answer=_paused(request, self._group.paused))
        plan, parts = LeasePlan(), []
        wanted = min(request.max_records, LEASE_OFFSETS_MAX)
        room = self.options.max_in_flight - self._in_flight
        for offer in _each_queue_once(offers):
            if wanted <= 0:
                break
            part = self._choose(plan, offer, wanted, room, now_ms)
            if part is not None:
                parts.append(part)
                wanted -= len(part.taken)
                room -= self._added(part)
        if self._dies_too_fast(plan.entries):
            # What is dead is buried. Before anything else is delivered, the group is paused.
            plan.groups.append(AppendGroup([PauseEntry(DEAD_LETTERS)]))
            plan.slots.clear()
            plan.answer = _paused(request, DEAD_LETTERS)
            return plan

        lease_ms = min(request.lease_ms or self.options.lease_ms, self.options.max_lease_ms)
        is_lease = any(len(part.taken) for part in parts)
        number = self._table.number + self._draft.numbers + 1 if is_lease else 0
        leased = [self._leased(part) for part in parts if len(part.taken)]
        plan.answer = LeaseAnswer(request.request, number, lease_ms if is_lease else 0, leased)
        if parts:
            session_id = request.session if is_lease else NO_SESSION
            entry = LeaseEntry(number, session_id, request.request, lease_ms, parts)
            plan.groups.append(AppendGroup([entry]))
        if not plan.groups and now_ms - self._written_ms >= MARK_EVERY_MS and self._group.queues:
            # It has the time.
            plan.groups.append(AppendGroup([]))
        return plan

    def _dies_too_fast(self, entries: Sequence[Entry]) -> bool:
        """Whether more messages have died within a minute than may, with those of entries that are not applied yet."""
        if self.options.dead_rate is None:
            return False
        more = sum(
            len(group.offsets)
            for entry in entries
            if isinstance(entry, SettleEntry)
            for group in entry.groups
            if group.outcome == SettleOutcome.DEAD
        )
        return self._group.dead_within(self.store_ms) + more > self.options.dead_rate

    def _repeated(self, request: LeaseRequest, number: int, now_ms: int) -> LeaseAnswer:
        """The answer to a repeated request: what is still open of its lease, whose time starts again."""
        lease = self._group.leases.get(number)
        granted_ms = 0
        if lease is not None:
            granted_ms = restarted_ms(self._times, number, lease.lease_ms, now_ms)
        if not granted_ms:
            return LeaseAnswer(request.request, 0, 0, ())
        parts = []
        for key, offsets in self._group.open_of(number):
            columns = self._group.queues[key]
            left = self._times.held_by_lease(number, key, offsets)
            if len(left):
                parts.append(Leased(key, left, columns.attempts[columns.at(left)]))
        return LeaseAnswer(request.request, number, granted_ms, parts)

    def _choose(
        self, plan: LeasePlan, offer: Offer, wanted: int, room: int, now_ms: int
    ) -> LeasedPart | None:
        """The part of a lease in one queue; None: nothing of it. Adds dead ones to the plan.

        Args: `wanted`: messages at most. `room`: those leased for the first time, at most.
        """
        columns = self._group.queues.get(offer.key)
        if columns is None or offer.key in self._without_keys:
            return None
        if offer.matches is None and not self.options.order:
            # All that is looked at is taken, or stays as it is.
            most = self._next(offer.key, columns) + max(0, min(wanted, room))
            offer = offer._replace(stop=min(offer.stop, most))
            if not len(offer.due) and offer.stop <= self._next(offer.key, columns):
                return None
        fresh, slots, before = self._fresh_of(columns, offer)
        if self.options.order:
            due = columns.unsettled()
            due = due[columns.permitted(due, now_ms)]
        else:
            due = offer.due[columns.permitted(offer.due, now_ms)]
        dead, left = self._dead_of(columns, due)
        now_dead = dead[: max(0, self.copies_max - sum(len(each.copies) for each in plan.groups))]
        if len(now_dead):
            self._bury(plan, offer.key, now_dead)

        if self.options.order and blocks_keys():
            may = key_order.may_lease(columns, fresh, slots, now_ms, dead[len(now_dead) :])
            left = may[(may < columns.next) & np.isin(may, dead, invert=True)]
            chosen = may[may >= columns.next]
        else:
            chosen = fresh
        # All keys of the offer wait: later messages have others.
        is_blocked = self.options.order == "key" and len(fresh) > 0 and not len(chosen)
        left = left[:wanted]
        is_out = columns.status[columns.at(left)] == OPEN
        room -= len(left) - int(np.count_nonzero(is_out))
        chosen = chosen[: max(0, min(wanted - len(left), room))]
        last = int(chosen[-1]) if len(chosen) else self._next(offer.key, columns) - 1
        if is_blocked and passes_blocked_ones():
            last = int(fresh[-1])
        return self._part(columns, offer, left, fresh, chosen, last, slots, before, plan)

    def _added(self, part: LeasedPart) -> int:
        """How many more are in flight with a part: what another lease had is in flight already."""
        columns = self._group.queues[part.key]
        old = part.taken[part.taken < columns.next]
        is_out = columns.status[columns.at(old)] == OPEN
        return len(part.taken) - int(np.count_nonzero(is_out))

    def _fresh_of(
        self, columns: QueueColumns, offer: Offer
    ) -> tuple[OffsetColumn, npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """What of an offer matches and was never leased: the offsets, their slots and earlier attempts."""
        stop = min(offer.stop, columns.low + self.options.window)
        first = self._next(offer.key, columns)
        gone = first - offer.first
        if gone < 0 or stop <= first or not self._table.may_grow(self._name):
            return NO_OFFSETS, _NO_SLOTS, _NO_SLOTS
        offsets = np.arange(first, stop)
        rows = slice(gone, stop - offer.first)
        matches = np.ones(len(offsets), np.bool_) if offer.matches is None else offer.matches[rows]
        slots = np.zeros(len(offsets), np.uint16) if offer.slots is None else offer.slots[rows]
        before = _NO_SLOTS if offer.attempts is None else offer.attempts[rows][matches]
        return offsets[matches], slots[matches], before

    def _part(
        self,
        columns: QueueColumns,
        offer: Offer,
        due: OffsetColumn,
        fresh: OffsetColumn,
        chosen: OffsetColumn,
        last: int,
        slots: npt.NDArray[np.uint16],
        before: npt.NDArray[np.uint16],
        plan: LeasePlan,
    ) -> LeasedPart | None:
        """The part of a lease with these offsets, and with those up to `last` that it passes over."""
        used = fresh <= last
        rest = fresh[~used]
        first = end = self._next(offer.key, columns)
        if offer.first <= first and self._table.may_grow(self._name):
            stop = min(offer.stop, columns.low + self.options.window)
            end = max(end, int(rest[0]) if len(rest) else stop)
        passed = filtered = NO_OFFSETS
        if self.options.order:
            passed = fresh[used][np.isin(fresh[used], chosen, assume_unique=True, invert=True)]
        if offer.matches is not None and end > first:
            filtered = np.arange(first, end)
            filtered = filtered[np.isin(filtered, fresh, assume_unique=True, invert=True)]
        if not any(map(len, (due, chosen, filtered, passed))):
            return None

        if self.options.order:
            plan.slots.append((offer.key, fresh[used], slots[used]))
        earlier = before[used].astype(np.int64) if len(before) else NO_OFFSETS
        return LeasedPart(offer.key, np.concatenate((due, chosen)), filtered, passed, earlier)

    def _leased(self, part: LeasedPart) -> Leased:
        """What the answer says of a part: the attempts with this one."""
        columns = self._group.queues[part.key]
        is_old = part.taken < columns.next
        attempts = np.ones(len(part.taken), dtype=np.int64)
        attempts[is_old] += columns.attempts[columns.at(part.taken[is_old])]
        if len(part.before):
            fresh = part.taken[~is_old]
            used = np.sort(np.concatenate((fresh, part.passed)))
            attempts[~is_old] += part.before[np.searchsorted(used, fresh)]
        return Leased(part.key, part.taken, attempts.clip(0, ATTEMPTS_MAX).astype(np.uint16))

    def _dead_of(
        self, columns: QueueColumns, offsets: OffsetColumn
    ) -> tuple[OffsetColumn, OffsetColumn]:
        """The offsets that are not delivered again, as rejected ones or after their last attempt; and the others."""
        is_dead = columns.delay_ms[columns.at(offsets)] == TO_BURY_MS
        if self.options.max_attempts is not None:
            is_dead |= attempts_of(columns, offsets) >= self.options.max_attempts
        return offsets[is_dead], offsets[~is_dead]

    def _bury(self, plan: LeasePlan, key: QueueKey, dead: OffsetColumn) -> None:
        """Settle messages whose last attempt ended without a word of their worker, and rejected ones."""
        columns = self._group.queues[key]
        entry = SettleEntry(NO_SESSION, 0, [Settled(SettleOutcome.DEAD, 0, key, 0, dead)])
        is_rejected = columns.delay_ms[columns.at(dead)] == TO_BURY_MS
        reasons = np.where(is_rejected, "rejected", "its last lease ended").tolist()
        copies = [
            self._copy(columns, key, offset, SettleOutcome.DEAD, reason)
            for offset, reason in zip(dead.tolist(), reasons, strict=True)
        ]
        plan.groups.append(AppendGroup([entry], copies if self.options.has_dead_letters else ()))

    def _copy(
        self,
        columns: QueueColumns,
        key: QueueKey,
        offset: int,
        outcome: SettleOutcome,
        reason: str,
        delay_ms: int = 0,
    ) -> Copy:
        place = int(columns.at(np.array([offset]))[0])
        lease = self._group.leases.get(int(columns.number[place]))
        holder = NO_SESSION if lease is None else lease.session
        return Copy(key, offset, outcome, int(columns.attempts[place]), reason, delay_ms, holder)

    # --- settlements ------------------------------------------------------------------------------

    def settle(self, request: SettleRequest, now_ms: int) -> LeasePlan:
        """Decide what becomes of messages.

        Raises: Rejected for a new session, if there are as many as may be; for a request that no record could say; and
        for refused messages, if the shard remembers as many as it may.
        """
        items = checked_items(request)
        session = self._note_use(request.session, now_ms)
        if request.session and is_settled_before(request.settle, session.settle):
            refused = [
                RefusedOffsets(each.number, each.key, each.offsets) for each in session.refused
            ]
            return LeasePlan(answer=SettleAnswer(request.settle, refused))
        if request.session and is_old(request.settle, session.settle):
            return LeasePlan()

        self._times.advance(now_ms)
        draft = _Settling()
        for item in items:
            self._check_keys(item.key)
            draft.take(item, self._held(item, draft))
        is_ordered = bool(self.options.order) and orders_settlements()
        if is_ordered:
            self._refuse_early(draft)
        if draft.postpone(self.copies_max) and is_ordered:
            # What is postponed stays unsettled.
            self._refuse_early(draft)
        self._decide(draft)

        groups = [
            Settled(*each, np.unique(np.concatenate(found))) for each, found in draft.groups()
        ]
        check_groups(len(groups))
        if request.session:
            self._check_refused(groups, session)
        refused = [
            RefusedOffsets(each.number, each.key, each.offsets)
            for each in groups
            if each.outcome == SettleOutcome.REFUSED
        ]
        plan = LeasePlan(answer=SettleAnswer(request.settle, refused))
        if records_settlement(request.session, groups):
            if not request.session:
                groups = [each for each in groups if each.outcome != SettleOutcome.REFUSED]
            if groups or request.session:
                entries: list[Entry] = [SettleEntry(request.session, request.settle, groups)]
                has_dead = any(each.outcome == SettleOutcome.DEAD for each in groups)
                if has_dead and not self._group.paused and self._dies_too_fast(entries):
                    entries.append(PauseEntry(DEAD_LETTERS))
                copies = draft.copies if self.options.has_dead_letters else draft.moved()
                plan.groups.append(AppendGroup(entries, copies))
        return plan

    def _check_refused(self, groups: Sequence[Settled], session: WorkerSession) -> None:
        """Raises: Rejected, if the shard would remember too many refused offsets."""
        refused = [each for each in groups if each.outcome == SettleOutcome.REFUSED]
        others = sum(each.refused_bytes for each in self._table.groups.values())
        found = others - bytes_of(session.refused) + bytes_of(refused)
        if refused and found > REFUSED_BYTES_MAX:
            raise Rejected(
                f"the shard would remember {found} bytes of refused messages; the limit is {REFUSED_BYTES_MAX}",
                field="refused",
                limit=REFUSED_BYTES_MAX,
                found=found,
            )

    def _held(self, item: SettleItem, draft: _Settling) -> npt.NDArray[np.bool_]:
        """Which offsets of an item its lease holds. One that the request names twice counts once."""
        columns = self._group.queues.get(item.key)
        if columns is None:
            return np.zeros(len(item.offsets), dtype=np.bool_)
        is_held = is_held_by(self, columns, item)
        for named in draft.named.get(item.key, ()):
            is_held &= np.isin(item.offsets, named, invert=True)
        return is_held

    def _refuse_early(self, draft: _Settling) -> None:
        """Refuse what has an earlier message of its key that stays unsettled."""
        by_queue: dict[QueueKey, list[OffsetColumn]] = {}
        for item in draft.items:
            if item.verdict in _FINAL and len(item.offsets):
                by_queue.setdefault(item.key, []).append(item.offsets)
        may: dict[QueueKey, OffsetColumn] = {}
        for key, found in by_queue.items():
            offsets = np.sort(np.concatenate(found))
            may[key] = offsets[key_order.may_settle(self._group.queues[key], offsets)]

        for index, item in enumerate(draft.items):
            if item.verdict in _FINAL and len(item.offsets):
                is_kept = np.isin(item.offsets, may[item.key])
                draft.refuse(item, item.offsets[~is_kept])
                draft.items[index] = item._replace(offsets=item.offsets[is_kept])
        # What was refused is still held.
        draft.name_items()

    def _decide(self, draft: _Settling) -> None:
        """The outcome of each message that its lease holds."""
        # The rejected ones first: those that are nacked take what is left of the copies.
        for item in sorted(draft.items, key=lambda each: each.verdict != SettleOutcome.REJECTED):
            if not len(item.offsets):
                continue
            columns = self._group.queues[item.key]
            match item.verdict:
                case SettleOutcome.ACKED:
                    draft.add(SettleOutcome.ACKED, item, item.offsets)
                case SettleOutcome.REJECTED:
                    self._add_copies(draft, item, item.offsets, SettleOutcome.DEAD, "rejected")
                case SettleOutcome.NACKED if item.delay_ms == TO_BURY_MS:
                    draft.add(SettleOutcome.NACKED, item, item.offsets, TO_BURY_MS)
                case SettleOutcome.NACKED:
                    self._nack(draft, columns, item)
                case SettleOutcome.RETURNED:
                    draft.add(SettleOutcome.RETURNED, item, item.offsets)

            is_returned = item.verdict in (SettleOutcome.NACKED, SettleOutcome.RETURNED)
            if is_returned and self.options.order and returns_later_ones():
                held = columns.open_under(item.number, self._of_lease(item))
                for named in draft.named[item.key]:
                    held = held[np.isin(held, named, invert=True)]
                later = key_order.later_ones(columns, held, item.offsets)
                if len(later):
                    draft.add(SettleOutcome.RETURNED, item, later)
                    draft.named[item.key].append(later)

    def _of_lease(self, item: SettleItem) -> OffsetColumn:
        lease = self._group.leases[item.number]
        found = [offsets for key, offsets in lease.parts if key == item.key]
        return np.concatenate(found) if found else NO_OFFSETS

    def _nack(self, draft: _Settling, columns: QueueColumns, item: SettleItem) -> None:
        """What becomes of messages that are to be delivered again."""
        dead, left = self._dead_of(columns, item.offsets)
        room = self.copies_max - len(draft.copies)
        self._add_copies(draft, item, dead[:room], SettleOutcome.DEAD, "its last attempt failed")
        # The next request for a lease finds that these had their last attempt.
        draft.add(SettleOutcome.NACKED, item, dead[room:])

        attempts = columns.attempts[columns.at(left)]
        for each in np.unique(attempts).tolist():
            offsets = left[attempts == each]
            delay_ms = self.options.backoff_of(each) if item.delay_ms is None else item.delay_ms
            moved, rest = self._moved_of(columns, item.key, offsets, delay_ms)
            room = self.copies_max - len(draft.copies)
            self._add_copies(draft, item, moved[:room], SettleOutcome.MOVED, "delayed", delay_ms)
            for stays in (moved[room:], rest):
                draft.add(SettleOutcome.NACKED, item, stays, delay_ms)

    def _moved_of(
        self, columns: QueueColumns, key: QueueKey, offsets: OffsetColumn, delay_ms: int
    ) -> tuple[OffsetColumn, OffsetColumn]:
        """The offsets that wait for a delay in the retry topic, and those that wait where they are."""
        is_crowded = columns.next - columns.low > self.options.window // 2
        is_long = delay_ms > DELAY_IN_PLACE_MS_MAX
        if self.options.order or delay_ms > self.move_ms_max or not (is_long or is_crowded):
            return NO_OFFSETS, offsets
        if not self.unmovable:
            return offsets, NO_OFFSETS
        stays = np.array([(key, each) in self.unmovable for each in offsets.tolist()], np.bool_)
        return offsets[~stays], offsets[stays]

    def _add_copies(
        self,
        draft: _Settling,
        item: SettleItem,
        offsets: OffsetColumn,
        outcome: SettleOutcome,
        reason: str,
        delay_ms: int = 0,
    ) -> None:
        columns = self._group.queues[item.key]
        draft.add(outcome, item, offsets)
        draft.copies += [
            self._copy(columns, item.key, offset, outcome, reason, delay_ms)
            for offset in offsets.tolist()
        ]

    # --- dead letters that go back ----------------------------------------------------------------

    def redrive(
        self,
        request: SettleRequest,
        found: Mapping[tuple[QueueKey, int], Destination],
        now_ms: int,
    ) -> LeasePlan:
        """Lease messages, and settle them at once with a copy of each, all in one append group.

        A message that is leased or settled already is refused, and so is one without a destination, one that cannot be
        copied, and one beyond those that one step copies.
        Args: `found`: (queue, offset) -> where it goes. The queues have begun. Raises: as `settle`.
        """
        items = checked_items(request)
        session = self._note_use(request.session, now_ms)
        if request.session and is_settled_before(request.settle, session.settle):
            refused = [
                RefusedOffsets(each.number, each.key, each.offsets) for each in session.refused
            ]
            return LeasePlan(answer=SettleAnswer(request.settle, refused))
        if request.session and is_old(request.settle, session.settle):
            return LeasePlan()

        number = self._table.number + self._draft.numbers + 1
        parts: list[LeasedPart] = []
        groups: list[Settled] = []
        copies: list[Copy] = []
        for item in items:
            taken = self._redriven_of(item, found, self.copies_max - len(copies))
            left = item.offsets[np.isin(item.offsets, taken, assume_unique=True, invert=True)]
            if len(left):
                groups.append(Settled(SettleOutcome.REFUSED, 0, item.key, 0, left))
            if not len(taken):
                continue
            first = self._group.queues[item.key].next
            passed = np.arange(first, max(first, int(taken[-1])))
            passed = passed[np.isin(passed, taken, assume_unique=True, invert=True)]
            parts.append(LeasedPart(item.key, taken, NO_OFFSETS, passed, NO_OFFSETS))
            groups.append(Settled(SettleOutcome.ACKED, number, item.key, 0, taken))
            copies += [copy_to(item.key, each, found[item.key, each]) for each in taken.tolist()]

        self._check_refused(groups, session)
        entries: list[Entry] = [SettleEntry(request.session, request.settle, groups)]
        if parts:
            lease = LeaseEntry(number, NO_SESSION, 0, self.options.lease_ms, parts)
            entries.insert(0, lease)
        refused = [
            RefusedOffsets(0, each.key, each.offsets)
            for each in groups
            if each.outcome == SettleOutcome.REFUSED
        ]
        answer = SettleAnswer(request.settle, refused)
        return LeasePlan([AppendGroup(entries, copies)], answer)

    def _redriven_of(
        self, item: SettleItem, found: Mapping[tuple[QueueKey, int], Destination], most: int
    ) -> OffsetColumn:
        """The offsets of an item that are leased by none, not settled, and can be copied; the first ones."""
        columns = self._group.queues.get(item.key)
        if columns is None:
            return NO_OFFSETS
        offsets = item.offsets
        is_fresh = (offsets >= columns.next) & (offsets < columns.low + self.options.window)
        is_waiting = columns.inside(offsets) & (columns.status[columns.at(offsets)] == WAITING)
        is_known = [
            (item.key, each) in found and (item.key, each) not in self.unmovable
            for each in offsets.tolist()
        ]
        is_left = (is_fresh | is_waiting) & np.array(is_known, np.bool_)
        return np.asarray(offsets[is_left][: max(0, most)])

    # --- more time --------------------------------------------------------------------------------

    def extend(
        self,
        session: bytes,
        now_ms: int,
        *,
        numbers: Iterable[int] | None = None,
        lease_ms: int | None = None,
    ) -> LeasePlan:
        """Give leases of a session more time.

        Args: `numbers`: of the leases; None: all of the session, of which there must be one. `lease_ms`: None: the
        length of each. Raises: Rejected for what no record could say.
        """
        check_session(session)
        if lease_ms is not None:
            check_length(lease_ms)
        self._note_use(session, now_ms)
        leases = self._group.leases
        named = (leases if session else ()) if numbers is None else numbers
        mine = [each for each in named if each in leases and leases[each].session == session]

        plan, granted = LeasePlan(), {}
        entries: list[Entry] = []
        for number in mine:
            length_ms = lease_ms or leases[number].lease_ms
            granted_ms = self._times.prolong(number, length_ms, now_ms)
            if granted_ms:
                granted[number] = granted_ms
                if needs_record(granted_ms, leases[number].lease_ms):
                    entries.append(LengthEntry(number, granted_ms))
        if entries:
            plan.groups.append(AppendGroup(entries))
        plan.answer = ExtendAnswer(granted)
        return plan

    def set_deadline(
        self,
        number: int,
        key: QueueKey,
        offset: int,
        length_ms: int,
        now_ms: int,
        *,
        gives_up: bool = False,
    ) -> LeasePlan:
        """Give one message of a lease a deadline of its own, which extending the lease does not move any more.

        Args: `gives_up`: its worker does not hold it any more; others get it then, and the attempt counts.
        Raises: Rejected for what no record could say.
        """
        checked_offsets(np.array([offset]))
        check_length(length_ms)
        lease = self._group.leases.get(number)
        columns = self._group.queues.get(key)
        answer = LeasePlan(answer=ExtendAnswer({}))
        if lease is None or columns is None:
            return answer
        if not len(columns.open_under(number, np.array([offset]))):
            return answer
        length_ms = self._times.set_own(number, key, offset, length_ms, now_ms, ends=gives_up)
        if length_ms:
            answer.answer = ExtendAnswer({number: length_ms})
            if needs_record(length_ms, lease.lease_ms):
                answer.groups.append(AppendGroup([LengthEntry(number, length_ms)]))
        return answer

    # --- operators, retention ---------------------------------------------------------------------

    def trim(self, key: QueueKey, min_offset: int) -> LeasePlan:
        """Settle what retention has deleted."""
        columns = self._group.queues.get(key)
        if columns is None or columns.low >= min_offset:
            return LeasePlan()
        return LeasePlan([AppendGroup([TrimEntry(key, min_offset)])])

    def reset(self, key: QueueKey, offset: int) -> LeasePlan:
        """Let a queue begin at another offset. All of its leases end. Raises: Rejected for what no record could say."""
        check_key(key)
        checked_offsets(np.array([offset]))
        return LeasePlan([AppendGroup([ResetEntry(key, offset)])])

    def release(self, topic: str | None) -> LeasePlan:
        """Take what workers have back, for an operator: others get it at once. The attempts count.

        Args: `topic`: of these messages; None: all.
        """
        settled = [
            Settled(SettleOutcome.NACKED, number, key, 0, offsets)
            for number in self._group.leases
            for key, offsets in self._group.open_of(number)
            if topic in (None, key[0])
        ]
        return LeasePlan(
            [
                AppendGroup([SettleEntry(NO_SESSION, 0, settled[at : at + RELEASED_MAX])])
                for at in range(0, len(settled), RELEASED_MAX)
            ]
        )

    def pause(self, reason: str) -> LeasePlan:
        """Lease nothing for a reason, or go on if there is none. Leases under way go on, and may be settled.

        A group that is paused already keeps its reason.
        """
        if bool(reason) == bool(self._group.paused):
            return LeasePlan()
        return LeasePlan([AppendGroup([PauseEntry(reason)])])

    def forget_idle(self, now_ms: int) -> LeasePlan:
        """Forget sessions that hold nothing and were not used for an hour, and a group that has nothing else."""
        holding = {lease.session for lease in self._group.leases.values()}
        self._used_ms = {each: self._used_ms.get(each, now_ms) for each in self._group.sessions}
        idle = [
            session
            for session, used_ms in self._used_ms.items()
            if session not in holding and now_ms - used_ms >= SESSION_IDLE_MS
        ]
        group = self._table.groups.get(self._name)
        is_empty = group is not None and not group.queues and not group.paused
        if is_empty and len(idle) == len(self._group.sessions):
            return LeasePlan([AppendGroup([EndEntry()])])
        return LeasePlan([AppendGroup([ForgetEntry(idle)])]) if idle else LeasePlan()

    # --- keys -------------------------------------------------------------------------------------

    def without_keys(self, key: QueueKey) -> OffsetColumn:
        """The messages of a queue whose keys a new leader has to read before it leases others, in the order of keys."""
        return self._without_keys.get(key, NO_OFFSETS)

    @property
    def unread(self) -> dict[QueueKey, OffsetColumn]:
        """`without_keys` of each queue that has some."""
        return dict(self._without_keys)

    def note_keys(
        self, key: QueueKey, offsets: OffsetColumn, slots: npt.NDArray[np.uint16]
    ) -> None:
        """Take the slots of the keys of all messages that `without_keys` named."""
        columns = self._group.queues.get(key)
        if columns is not None:
            inside = columns.inside(offsets)
            columns.slot[columns.at(offsets[inside])] = slots[inside]
        self._without_keys.pop(key, None)

    def _check_keys(self, key: QueueKey) -> None:
        if key in self._without_keys:
            raise Unavailable(f"the keys of the messages of queue {key[1]} of {key[0]} are read")

    # --- what follows from appended entries -------------------------------------------------------

    def note(self, plan: LeasePlan, now_ms: int) -> None:
        """Start the times of a plan whose entries were appended and applied."""
        if plan.groups:
            self._written_ms = now_ms
        for key, offsets, slots in plan.slots:
            columns = self._group.queues[key]
            inside = columns.inside(offsets)
            columns.slot[columns.at(offsets[inside])] = slots[inside]

        for entry in plan.entries:
            if isinstance(entry, LeaseEntry):
                is_settled = entry.number and entry.number not in self._group.leases
                if is_settled:
                    # It went back, with its lease.
                    for part in entry.parts:
                        self._times.wait(part.key, part.passed, now_ms)
                    continue
                self._note_lease(entry, now_ms)
            elif isinstance(entry, SettleEntry):
                for group in entry.groups:
                    if group.outcome in (SettleOutcome.NACKED, SettleOutcome.RETURNED):
                        due_ms = now_ms + waited_ms(group.delay_ms)
                        self._times.wait(group.key, group.offsets, due_ms)

    def _note_lease(self, entry: LeaseEntry, now_ms: int) -> None:
        if entry.number:
            self._times.begin(entry.number, entry.lease_ms, now_ms)
        for part in entry.parts:
            hold(self._times, self._group.queues[part.key], part.taken)
            self._times.wait(part.key, part.passed, now_ms)

    def _note_use(self, session: bytes, now_ms: int) -> WorkerSession:
        """The session of a request. Raises: Rejected for a new one, if there are as many as may be."""
        if not session:
            return NEW_SESSION
        known = self._group.sessions.get(session)
        if known is None:
            count = sum(len(each.sessions) for each in self._table.groups.values())
            if count >= SESSIONS_MAX:
                raise Rejected(
                    f"the shard knows {count} sessions of workers; the limit is {SESSIONS_MAX}",
                    field="session",
                    limit=SESSIONS_MAX,
                    found=count,
                )
        self._used_ms[session] = now_ms
        return known or NEW_SESSION


class _Settling:
    """A request that settles, while it is decided."""

    def __init__(self) -> None:
        #: what leases hold of the items
        self.items: list[SettleItem] = []
        #: queue -> offsets that were named
        self.named: dict[QueueKey, list[OffsetColumn]] = {}
        self.copies: list[Copy] = []
        self._found: dict[tuple[SettleOutcome, int, QueueKey, int], list[OffsetColumn]] = {}

    def take(self, item: SettleItem, is_held: npt.NDArray[np.bool_]) -> None:
        """Take an item. Args: `is_held`: which of its offsets its lease holds."""
        self.refuse(item, item.offsets[~is_held])
        held = item.offsets[is_held]
        self.items.append(item._replace(offsets=held))
        self.named.setdefault(item.key, []).append(held)

    def name_items(self) -> None:
        """Let only those offsets be named that the items still have."""
        self.named = {}
        for item in self.items:
            self.named.setdefault(item.key, []).append(item.offsets)

    def postpone(self, copies_max: int) -> bool:
        """Let rejected offsets wait, but for the first ones: so many are copied now. Returns: whether some wait."""
        kept: list[SettleItem] = []
        waiting: list[SettleItem] = []
        room = copies_max
        for item in self.items:
            if item.verdict != SettleOutcome.REJECTED:
                kept.append(item)
                continue
            now, later = item.offsets[:room], item.offsets[room:]
            room -= len(now)
            kept.append(item._replace(offsets=now))
            if len(later):
                waits = item._replace(verdict=SettleOutcome.NACKED, delay_ms=TO_BURY_MS)
                waiting.append(waits._replace(offsets=later))
        self.items = kept + waiting
        return bool(waiting)

    def refuse(self, item: SettleItem, offsets: OffsetColumn) -> None:
        """Refuse offsets of an item."""
        self.add(SettleOutcome.REFUSED, item, offsets)

    def add(
        self, outcome: SettleOutcome, item: SettleItem, offsets: OffsetColumn, delay_ms: int = 0
    ) -> None:
        """Let offsets of an item have an outcome."""
        if len(offsets):
            self._found.setdefault((outcome, item.number, item.key, delay_ms), []).append(offsets)

    def groups(
        self,
    ) -> Iterable[tuple[tuple[SettleOutcome, int, QueueKey, int], list[OffsetColumn]]]:
        """SettleOutcome, lease, queue and delay, with the offsets."""
        return self._found.items()

    def moved(self) -> list[Copy]:
        """The copies without those of dead messages."""
        return [each for each in self.copies if each.outcome == SettleOutcome.MOVED]


def _paused(request: LeaseRequest, reason: str) -> LeaseAnswer:
    """The answer of a group that leases nothing: there is no message."""
    return LeaseAnswer(request.request, 0, 0, (), reason)


def _each_queue_once(offers: Sequence[Offer]) -> Iterable[Offer]:
    """The first offer of each queue."""
    found: dict[QueueKey, Offer] = {}
    for offer in offers:
        found.setdefault(offer.key, offer)
    return found.values()


# --- parts that a mutant removes ------------------------------------------------------------------


def is_repeated(number: int, newest: int) -> bool:
    """Whether a request came before: it gets its first answer."""
    return number == newest


def is_settled_before(number: int, newest: int) -> bool:
    """Whether a request that settles came before: it gets its first answer."""
    return number == newest


def is_old(number: int, newest: int) -> bool:
    """Whether a request is older than the newest one of its session: nothing waits for its answer."""
    return number < newest


def is_held_by(
    machine: LeaseMachine, columns: QueueColumns, item: SettleItem
) -> npt.NDArray[np.bool_]:
    """Which offsets of an item are open under its lease, however late it comes."""
    places = columns.at(item.offsets)
    is_open = (columns.status[places] == OPEN) & (columns.number[places] == item.number)
    return np.asarray(columns.inside(item.offsets) & is_open)


def restarted_ms(times: LeaseTimes, number: int, lease_ms: int, now_ms: int) -> int:
    """The answer to a repeated request starts the time of its lease again: its worker counts from the repetition."""
    return times.prolong(number, lease_ms, now_ms)


def hold(times: LeaseTimes, columns: QueueColumns, offsets: OffsetColumn) -> None:
    """A lease ends the wait of what it takes."""
    times.hold(columns, offsets)


def attempts_of(columns: QueueColumns, offsets: OffsetColumn) -> npt.NDArray[np.uint16]:
    """Attempts are those of the log, so that they count across leaders."""
    return columns.attempts[columns.at(offsets)]


def records_settlement(session: bytes, groups: Sequence[Settled]) -> bool:
    """A request of a session has a record also if all of it is refused: a refusal must not become untrue."""
    return True


def needs_record(length_ms: int, lease_ms: int) -> bool:
    """A new leader gives a lease the length that its record says: a longer one needs another record."""
    return length_ms > lease_ms


def blocks_keys() -> bool:
    """A message waits for the earlier ones of its key."""
    return True


def passes_blocked_ones() -> bool:
    """Messages whose keys wait do not keep later ones of other keys away."""
    return True


def orders_settlements() -> bool:
    """A message is settled after the earlier ones of its key."""
    return True


def returns_later_ones() -> bool:
    """A message that is returned takes the later ones of its key with it."""
    return True
