"""Leases of a shard: workers share the messages of its queues, and settle each message alone.

The decisions are `LeaseMachine`'s. This service gives it what the shard's queues have, appends its records and copies
its messages. An answer counts once everything in the log is as durable as the host of the store promises.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base.errors import (
    Bug,
    Corrupt,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    Unavailable,
)
from raymq.store.base.format import RETRY_PREFIX
from raymq.store.groups.claims import Claim
from raymq.store.groups.leases.entries import LeaseEntry, SettleOutcome, TimeEntry
from raymq.store.groups.leases.key_order import slots_of
from raymq.store.groups.leases.lease_machine import AppendGroup, LeaseMachine, LeasePlan
from raymq.store.groups.leases.lease_table import LEASE, SETTLE
from raymq.store.groups.leases.offsets import NO_OFFSETS, OffsetColumn
from raymq.store.groups.leases.options import COPIES_MAX, LEASE_OFFSETS_MAX, LeaseOptions
from raymq.store.groups.leases.packing import pack_checked
from raymq.store.groups.leases.requests import (
    NO_SESSION,
    Copy,
    LeaseAnswer,
    LeaseRequest,
    Offer,
    SettleItem,
    SettleRequest,
)
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.inner_put import RecordGroup
from raymq.store.put.service_host import ServiceHost
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.queues.message_filter import LookLimit
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import AppendedRows, MessageSelector
from raymq.store.state.features import LEASES_LEVEL
from raymq.store.state.topics import QueueKey, dlq_topic, retry_topic, unknown_topic

from .retry import copy_of, queue_of
from .stored_message import StoredMessage, read, read_one

logger = logging.getLogger("raymq.store")

#: the service of the bundles that copies and settlements make
SERVICE = "leases"
#: properties of a dead letter: why it is one, and the session that had it last
DEAD_REASON, DEAD_HOLDER = "DLQ_REASON", "DLQ_HOLDER"

#: properties with a message's key, as text or in base64: a key has one of these forms
KEY_PROPERTIES = ("__SHARDINGKEY", "__KEY_B64")
#: orders of a group's messages
ORDERS = ("", "key", "queue")
#: messages whose keys are looked at together
KEYS_READ_MAX = 1_000
#: messages that were never leased, at which one request looks at least: others may take the first ones meanwhile
LOOK_OFFSETS_MIN = 256
#: how long one request looks for messages that a filter wants
LOOK_MS = 50
#: bytes of the messages of one lease
LEASED_BYTES_MAX = 4 << 20


class LeaseDecision(NamedTuple):
    """A decision of the machine whose records were appended."""

    plan: LeasePlan
    #: None: it needed no record
    appended: AppendedRows | None
    #: when a message may be leased again, on the clock of the store; None: no time makes one due
    next_ms: int | None = None


class Wanted(NamedTuple):
    """How much of a queue a request looks at, and for what."""

    max_records: int
    max_bytes: int
    #: None: all messages
    selector: MessageSelector | None
    #: the keys of messages count
    has_keys: bool


@dataclass(eq=False)
class _Waiting:
    """A call that waits to be decided."""

    group: str
    call: Callable[[LeaseMachine, int], LeasePlan]
    woken: threading.Event = field(default_factory=threading.Event)
    #: its thread decides all that wait
    leads: bool = False
    decision: LeaseDecision | None = None
    error: Exception | None = None


class QueueLeases(NamedTuple):
    """How a group of workers stands in one queue."""

    #: everything below is settled
    low: int
    #: the first offset that was never leased
    next: int
    #: messages that workers have
    leased: int
    #: messages that wait for their next delivery
    waiting: int


class LeaseService:
    """Leases of the groups of workers on one shard, while it leads. Threads: any may call."""

    def __init__(self, store: ServiceHost, *, shard: int = 0) -> None:
        self._store = store
        self._shard = shard
        self._options: dict[str, LeaseOptions] = {}
        #: by group; made from the state when the group is used first
        self._machines: dict[str, LeaseMachine] = {}
        #: guards the fields below
        self._gather_lock = threading.Lock()
        #: calls that wait to be decided
        self._gathered: list[_Waiting] = []
        self._is_deciding = False

    def activate(self) -> None:
        """Begin to lead: every lease gets its whole time again. Callers: before any other call of this leadership."""
        self._machines.clear()

    def configure(self, group: str, options: LeaseOptions) -> None:
        """Set the options of a group. Raises: Rejected for an unknown order."""
        if options.order not in ORDERS:
            raise Rejected(
                f"group {group} wants the order {options.order!r}; there are {ORDERS}",
                field="order",
                limit=ORDERS,
                found=options.order,
            )
        self._options[group] = options
        machine = self._machines.get(group)
        if machine is not None and machine.options != options:
            if machine.options.order == options.order:
                machine.change_options(options)
            else:
                del self._machines[group]

    def lease(
        self,
        group: str,
        request: LeaseRequest,
        queues: Sequence[QueueKey],
        *,
        start: str = "earliest",
        selector: MessageSelector | None = None,
        max_bytes: int = LEASED_BYTES_MAX,
    ) -> LeaseDecision:
        """Lease messages of some queues of this shard.

        Args: `start`: earliest or latest: where a group begins with a queue of which it has no offset. `selector`: only
        these messages; the others are settled. `max_bytes`: of messages that are leased for the first time, at least
        one of each queue.
        Raises: Rejected for a topic that does not exist, and for a queue that a member has claimed. Otherwise as
        `InnerPut.put_groups`.
        """
        store = self._store
        ranges = {key: store.queue_range(*key) for key in queues}
        self._prepare(group, ranges, start)
        self._read_keys(group)
        has_keys = self._options.get(group, LeaseOptions()).order == "key"
        wanted = Wanted(request.max_records, max_bytes, selector, has_keys)
        most = 2 * request.max_records
        decision, is_whole = self._lease_from(group, request, ranges, wanted, most)
        answer = decision.plan.answer
        if isinstance(answer, LeaseAnswer) and not answer.number and not is_whole and most:
            # What the first queues have may be taken by now, or has to wait.
            decision, _ = self._lease_from(group, request, ranges, wanted, None)
        return decision

    def _lease_from(
        self,
        group: str,
        request: LeaseRequest,
        ranges: dict[QueueKey, tuple[int, int]],
        wanted: Wanted,
        most: int | None,
    ) -> tuple[LeaseDecision, bool]:
        """Lease messages. Returns: the decision, and whether all queues were looked at.

        Args: `most`: queues are not looked at beyond so many messages; None: all are looked at.
        """
        columns = self._store.leases.group(group).queues
        looked: list[Offer] = []
        is_whole = True

        for key, (_, end) in ranges.items():
            offered = sum(each.stop - each.first for each in looked)
            # What comes again is offered of all queues.
            is_needed = most is None or offered < most
            is_whole &= is_needed
            looked.append(self._look(key, columns[key].next, end if is_needed else 0, wanted))

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            for key in ranges:
                self._check_queue(group, key)
            offers = [
                each._replace(due=machine.due(each.key, request.max_records, now_ms))
                for each in looked
            ]
            return machine.lease(request, offers, now_ms)

        return self._decide(group, decide), is_whole

    def settle(self, group: str, request: SettleRequest) -> LeaseDecision:
        """Settle leased messages. Raises: Rejected for too many rejected messages; as `InnerPut.put_groups`."""
        self._read_keys(group)
        return self._decide(group, lambda machine, now_ms: machine.settle(request, now_ms))

    def extend(self, group: str, session: bytes, lease_ms: int | None = None) -> LeaseDecision:
        """Give all leases of a session more time: `LeaseMachine.extend`."""
        return self._decide(
            group, lambda machine, now_ms: machine.extend(session, now_ms, lease_ms=lease_ms)
        )

    def set_deadline(
        self, group: str, number: int, key: QueueKey, offset: int, length_ms: int, *, gives_up: bool
    ) -> LeaseDecision:
        """Give one message a deadline of its own: `LeaseMachine.set_deadline`."""
        return self._decide(
            group,
            lambda machine, now_ms: machine.set_deadline(
                number, key, offset, length_ms, now_ms, gives_up=gives_up
            ),
        )

    def give_back(
        self, group: str, number: int, key: QueueKey, offsets: OffsetColumn
    ) -> LeaseDecision:
        """Take messages of a lease back that its worker did not get: this attempt does not count."""
        item = SettleItem(number, key, offsets, SettleOutcome.RETURNED)
        return self.settle(group, SettleRequest(NO_SESSION, 0, [item]))

    def reset(self, group: str, key: QueueKey, offset: int) -> LeaseDecision:
        """Let a group go on elsewhere in a queue. All of its leases there end."""
        return self._decide(group, lambda machine, now_ms: machine.reset(key, offset))

    def describe(self, group: str) -> dict[QueueKey, QueueLeases]:
        """How a group stands in each queue that its workers have leased messages of."""
        found: dict[QueueKey, QueueLeases] = {}

        def look() -> list[tuple[str, bytes]]:
            for key, each in self._store.leases.group(group).queues.items():
                waiting = len(each.unsettled()) - each.open_count
                found[key] = QueueLeases(each.low, each.next, each.open_count, waiting)
            return []

        self._store.inner_put.put_decided(look)
        return found

    def forget_idle(self) -> None:
        """Forget sessions that hold nothing and were not used for an hour."""
        for group in list(self._machines):
            self._decide(group, lambda machine, now_ms: machine.forget_idle(now_ms))

    # --- the parts of a decision ------------------------------------------------------------------

    def _prepare(self, group: str, ranges: dict[QueueKey, tuple[int, int]], start: str) -> None:
        """Let the queues begin, and settle what retention has deleted."""
        store = self._store
        store.note_feature_level(LEASES_LEVEL)
        for target in (dlq_topic(group), retry_topic(group)):
            queue_of(store, target, self._shard)
        columns = store.leases.group(group).queues
        if all(key in columns and columns[key].low >= first for key, (first, _) in ranges.items()):
            return

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            plan = LeasePlan()
            for key, (first, end) in ranges.items():
                self._check_queue(group, key)
                known = store.state.offsets.get((group, key[0]), {}).get(key[1])
                begin = max(
                    first, known if known is not None else end if start == "latest" else first
                )
                plan.groups += machine.begin(key, begin).groups + machine.trim(key, first).groups
            return plan

        self._decide(group, decide)

    def _check_queue(self, group: str, key: QueueKey) -> None:
        """Raises: Rejected, if a group may not lease messages of a queue. Has the put lock."""
        topic, queue_id = key
        if topic not in self._store.state.topics:
            raise unknown_topic(topic)
        held = self._store.claims.held(group, topic, {queue_id: None})
        if held:
            raise _belongs(group, topic, queue_id, held[queue_id])

    def _look(self, key: QueueKey, first: int, end: int, wanted: Wanted) -> Offer:
        """What of a queue was never leased, with what the machine needs to know of these messages."""
        ahead = min(LEASE_OFFSETS_MAX, max(LOOK_OFFSETS_MIN, 2 * wanted.max_records))
        stop = max(first, min(end, first + ahead))
        if first == stop:
            return Offer(key, NO_OFFSETS, first, stop)

        matches = None
        is_retry = key[0].startswith(RETRY_PREFIX)
        if wanted.selector is not None and not is_retry:
            # Messages of the retry topic matched before.
            matches = self._matching(key, first, wanted, wanted.selector)
            stop = first + len(matches)
        else:
            stop = self._within_bytes(key, first, stop, wanted.max_bytes)
        if first == stop or not (is_retry or wanted.has_keys):
            return Offer(key, NO_OFFSETS, first, stop, matches=matches)

        found = self._read(key, first, stop)
        stop = first + len(found)
        tries = np.array([0 if each is None else each.reconsume_times for each in found], np.uint16)
        return Offer(
            *(key, NO_OFFSETS, first, stop),
            matches=None if matches is None else matches[: len(found)],
            slots=slots_of(list(map(_key_of, found))) if wanted.has_keys else None,
            attempts=tries if is_retry else None,
        )

    def _within_bytes(self, key: QueueKey, first: int, stop: int, max_bytes: int) -> int:
        """The offset before which messages of a queue have so many bytes, after at least one."""
        try:
            units = self._store.consume_queues.get(*key).read(first, stop - first)
        except (Corrupt, OffsetOutOfRange):
            # The worker that leases them hears of it.
            return stop
        ends = units["size"].cumsum(dtype=np.int64)
        return min(stop, first + max(1, int(ends.searchsorted(max_bytes, side="right"))))

    def _matching(
        self, key: QueueKey, first: int, wanted: Wanted, selector: MessageSelector
    ) -> npt.NDArray[np.bool_]:
        """Which of the next messages of a queue a filter wants, as far as one request looks."""
        clock = self._store.clock
        over_ms = clock.monotonic_ms() + LOOK_MS
        look = LookLimit(LEASE_OFFSETS_MAX, lambda: clock.monotonic_ms() >= over_ms)
        try:
            found = self._store.fetch(
                *(*key, first),
                max_bytes=wanted.max_bytes,
                max_records=wanted.max_records,
                wanted=expression_filter(*selector),
                look=look,
            )
        except Corrupt:
            # Nothing is known of it: a worker gets it, and hears of the damage.
            return np.ones(1, np.bool_)
        except OffsetOutOfRange:
            return np.zeros(0, np.bool_)

        matches = np.zeros(found.next_offset - first, np.bool_)
        if found.records is not None and len(found.records):
            rows = decode_records(found.records, columns=("queue_offset",))
            matches[rows.column("queue_offset").to_numpy() - first] = True
        return matches

    def _read(self, key: QueueKey, first: int, stop: int) -> list[StoredMessage | None]:
        """Some messages of a queue that follow each other, the first ones; None: one cannot be read."""
        try:
            most = min(stop - first, KEYS_READ_MAX)
            found, _ = read(self._store, *key, first, max_records=most)
        except (Corrupt, OffsetOutOfRange):
            return [None]
        whole: list[StoredMessage | None] = []
        for each in found:
            gap = each.queue_offset - first - len(whole)
            whole += [None] * min(gap, most - len(whole))
            if len(whole) < most:
                whole.append(each)
        return whole or [None]

    def _read_keys(self, group: str) -> None:
        """Read the keys of what an earlier leader has leased, if their order counts."""
        machine = self._machines.get(group)
        if self._options.get(group, LeaseOptions()).order != "key":
            return
        if machine is None or machine.is_stale:
            self._decide(group, lambda machine, now_ms: LeasePlan())
            machine = self._machines[group]

        for key in list(self._store.leases.group(group).queues):
            offsets = machine.without_keys(key)
            if not len(offsets):
                continue
            first, stop = int(offsets[0]), int(offsets[-1]) + 1
            found: list[StoredMessage | None] = []
            while first + len(found) < stop:
                found += self._read(key, first + len(found), stop)
            slots = slots_of(list(map(_key_of, found)))[offsets - first]
            self._note_keys(group, key, offsets, slots)

    def _note_keys(
        self, group: str, key: QueueKey, offsets: OffsetColumn, slots: npt.NDArray[np.uint16]
    ) -> None:
        def note(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            machine.note_keys(key, offsets, slots)
            return LeasePlan()

        self._decide(group, note)

    def _machine(self, group: str) -> LeaseMachine:
        """The machine of a group. Has the put lock."""
        machine = self._machines.get(group)
        if machine is None or machine.is_stale:
            options = self._options.get(group, LeaseOptions())
            now_ms = self._store.clock.monotonic_ms()
            machine = LeaseMachine(self._store.leases, group, options, now_ms)
            self._machines[group] = machine
        return machine

    def _decide(self, group: str, call: Callable[[LeaseMachine, int], LeasePlan]) -> LeaseDecision:
        """Decide, and append what the decision needs.

        Calls that wait for the put lock are decided together, by one thread: with many workers, handing the lock from
        thread to thread would cost more than all decisions.
        """
        mine = _Waiting(group, call)
        with self._gather_lock:
            self._gathered.append(mine)
            mine.leads = not self._is_deciding
            self._is_deciding = True
        if not mine.leads:
            mine.woken.wait()
        if mine.leads:
            self._decide_gathered()

        if mine.error is not None:
            raise mine.error
        if mine.decision is None:
            raise Bug("a call of leases was not decided")
        return mine.decision

    def _decide_gathered(self) -> None:
        """Decide all calls that wait by now, and let the first one of those that come meanwhile lead the next round."""
        with self._gather_lock:
            calls, self._gathered = self._gathered, []
        try:
            self._store.inner_put.put_groups(SERVICE, lambda: self._decide_each(calls))
        except Exception as error:
            # Those after the one that failed are repeated by their callers.
            for each in calls:
                if each.decision is None and each.error is None:
                    each.error = error
        finally:
            with self._gather_lock:
                self._is_deciding = bool(self._gathered)
                if self._gathered:
                    self._gathered[0].leads = True
                    self._gathered[0].woken.set()
            for each in calls:
                each.woken.set()

    def _decide_each(self, calls: Sequence[_Waiting]) -> Iterator[RecordGroup]:
        """The records of calls, one after the other. Has the put lock."""
        for each in calls:
            now_ms = self._store.clock.monotonic_ms()
            try:
                machine = self._machine(each.group)
                plan, groups = self._plan(each.group, machine, each.call, now_ms)
            except RayMQError as error:
                each.error = error
                continue
            yield from groups
            # All are applied.
            machine.note(plan, now_ms)
            appended = AppendedRows.up_to(self._store.log.end) if groups else None
            each.decision = LeaseDecision(plan, appended, machine.next_ms())

    def _plan(
        self,
        group: str,
        machine: LeaseMachine,
        call: Callable[[LeaseMachine, int], LeasePlan],
        now_ms: int,
    ) -> tuple[LeasePlan, list[RecordGroup]]:
        """A decision with its records. Has the put lock."""
        machine.copies_max = COPIES_MAX
        while True:
            plan = call(machine, now_ms)
            groups = [self._records_of(group, each) for each in plan.groups]
            if machine.copies_max == 1 or not any(map(self._is_large, groups)):
                return plan, groups
            # A plan changes nothing: one with fewer copies takes its place.
            machine.copies_max //= 2

    def _is_large(self, group: RecordGroup) -> bool:
        """Whether other puts would wait too long for the copies of a group."""
        copied_bytes = sum(len(message.body) for message in group.messages)
        return copied_bytes > self._store.config.bundle_bytes_max

    def _records_of(self, group: str, wanted: AppendGroup) -> RecordGroup:
        """A group of entries as a record, with the messages that are copied."""
        is_lease = any(isinstance(entry, LeaseEntry) for entry in wanted.entries)
        look = self._store.log.marks.clock_look
        at_ms = max(look.wall_ms - look.jumped_ms, self._store.state.store_time_ms)
        body = pack_checked(group, [TimeEntry(at_ms), *wanted.entries])
        record = (LEASE if is_lease else SETTLE), body
        found = [self._copy(group, copy) for copy in wanted.copies]
        return RecordGroup([record], [each for each in found if each is not None])

    def _copy(self, group: str, copy: Copy) -> InnerMessage | None:
        """The copy of a message for the dead letters or for the retry topic; None: it cannot be read any more."""
        store = self._store
        is_dead = copy.outcome == SettleOutcome.DEAD
        target = dlq_topic(group) if is_dead else retry_topic(group)
        if target not in store.state.topics:
            raise Unavailable(f"topic {target} was deleted; repeat the call")
        try:
            message = read_one(store, *copy.key, copy.offset)
        except Corrupt as error:
            logger.warning("a message is settled without its copy for %s: %s", target, error)
            return None
        if message is None:
            return None

        levels = store.config.delay_levels_ms
        level = 0 if is_dead else min(bisect.bisect_left(levels, copy.delay_ms) + 1, len(levels))
        queue_id = queue_of(store, target, self._shard)
        made = copy_of(message, target, queue_id, level, copy.attempts)
        if not is_dead:
            return made
        more = {DEAD_REASON: copy.reason, DEAD_HOLDER: copy.holder.hex()}
        return replace(made, properties={**made.properties, **more})


def _key_of(message: StoredMessage | None) -> bytes:
    """What stands for a message's key; empty: it has none, or cannot be read."""
    found = {} if message is None else message.properties
    return next((found[name].encode() for name in KEY_PROPERTIES if name in found), b"")


def _belongs(group: str, topic: str, queue_id: int, claim: Claim) -> Rejected:
    return Rejected(
        f"queue {queue_id} of {topic} belongs to member {claim.member_id} of group {group}, which reads it as a "
        "stream: workers need another group",
        field="group",
        limit="a group of workers",
        found=claim.member_id,
    )
