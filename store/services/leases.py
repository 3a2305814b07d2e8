"""Leases of a shard: workers share the messages of its queues, and settle each message alone.

The decisions are `LeaseMachine`'s. This service gives it what the shard's queues have, appends its records and copies
its messages. An answer counts once everything in the log is as durable as the host of the store promises.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.groups.claims import Claim
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.key_order import slots_of
from raymq.store.groups.leases.lease_machine import LeaseMachine, LeasePlan
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import (
    NO_SESSION,
    LeaseAnswer,
    LeaseRequest,
    Offer,
    SettleItem,
    SettleRequest,
)
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.requests import MessageSelector
from raymq.store.state.features import PAUSES_LEVEL
from raymq.store.state.topics import QueueKey, dlq_topic, retry_topic, unknown_topic

from .lease_copies import LeaseCopies
from .lease_decisions import AckPlan, LeaseDecision, LeaseDecisions, Shared
from .lease_offers import LeaseOffers, Wanted, key_of
from .redrive import RedriveService
from .retry import queue_of
from .stored_message import StoredMessage

#: orders of a group's messages
ORDERS = ("", "key", "queue")
#: bytes of the messages of one lease
LEASED_BYTES_MAX = 4 << 20


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
        self._offers = LeaseOffers(store)
        copies = LeaseCopies(store, shard)
        self._decisions = LeaseDecisions(store, copies)
        #: dead letters that go back
        self.redrives = RedriveService(store, self._decisions, copies, shard=shard)

    @property
    def uncopied_count(self) -> int:
        """Messages that were settled as dead without a copy, since this leadership began."""
        return self._decisions.uncopied_count

    def activate(self) -> None:
        """Begin to lead: every lease gets its whole time again, from now on. Callers: before any other call of this
        leadership. Raises: Unavailable unless this replica leads.
        """
        self._decisions.activate()

    def configure(self, group: str, options: LeaseOptions) -> None:
        """Set the options of a group. Raises: Rejected for an unknown order."""
        if options.order not in ORDERS:
            raise Rejected(
                f"group {group} wants the order {options.order!r}; there are {ORDERS}",
                field="order",
                limit=ORDERS,
                found=options.order,
            )
        self._decisions.options[group] = options

    def _options(self, group: str) -> LeaseOptions:
        return self._decisions.options.get(group, LeaseOptions())

    # --- leases -----------------------------------------------------------------------------------

    def lease(
        self,
        group: str,
        request: LeaseRequest,
        queues: Sequence[QueueKey],
        *,
        start: str = "earliest",
        selector: MessageSelector | None = None,
        max_bytes: int = LEASED_BYTES_MAX,
        is_over: Callable[[], bool] = lambda: False,
    ) -> LeaseDecision:
        """Lease messages of some queues of this shard.

        Args: `start`: earliest or latest: where a group begins with a queue of which it has no offset. `selector`: only
        these messages; the others are settled. `max_bytes`: of messages that are leased for the first time, at least
        one of each queue. `is_over`: whether the session has ended meanwhile: it gets nothing then.
        Raises: Rejected for a topic that does not exist or is compacted, and for a queue that a member has claimed.
        Unavailable for a queue that was deleted or reset meanwhile. Otherwise as `InnerPut.put_groups`.
        """
        ranges = {key: self._store.queue_range(*key) for key in queues}
        self._prepare(group, ranges, start)
        self._read_keys(group)
        has_keys = self._options(group).order == "key"
        wanted = Wanted(request.max_records, max_bytes, selector, has_keys)
        most = 2 * request.max_records

        decision, is_whole = self._lease_from(group, request, ranges, wanted, most, is_over)
        answer = decision.plan.answer
        if isinstance(answer, LeaseAnswer) and not answer.number and not is_whole and most:
            # What the first queues have may be taken by now, or has to wait.
            decision, _ = self._lease_from(group, request, ranges, wanted, None, is_over)
        return decision

    def _lease_from(
        self,
        group: str,
        request: LeaseRequest,
        ranges: dict[QueueKey, tuple[int, int]],
        wanted: Wanted,
        most: int | None,
        is_over: Callable[[], bool],
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
            known = columns.get(key)
            if known is None:
                raise _moved(group, key)
            looked.append(self._offers.look(key, known.next, end if is_needed else 0, wanted))

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            if is_over():
                return LeasePlan(answer=LeaseAnswer(request.request, 0, 0, ()))
            for key, (first, _) in ranges.items():
                self._check_queue(group, key)
                if not self._is_ready(group, key, first):
                    raise _moved(group, key)
            offers = [
                each._replace(due=machine.due(each.key, request.max_records, now_ms))
                for each in looked
            ]
            return machine.lease(request, offers, now_ms)

        shared = Shared(True, request.session)
        return self._decisions.decide(group, decide, shared), is_whole

    def _prepare(self, group: str, ranges: dict[QueueKey, tuple[int, int]], start: str) -> None:
        """Let the queues begin, and settle what retention has deleted."""
        store = self._store
        store.note_feature_level(PAUSES_LEVEL)
        for target in (dlq_topic(group), retry_topic(group)):
            queue_of(store, target, self._shard)
        columns = store.leases.group(group).queues
        is_done = all(
            self._is_ready(group, key, first) and (known := columns.get(key)) and known.low >= first
            for key, (first, _) in ranges.items()
        )
        if is_done:
            return

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            plan = LeasePlan()
            for key, (first, end) in ranges.items():
                self._check_queue(group, key)
                known = store.state.offsets.get((group, key[0]), {}).get(key[1])
                begin = max(
                    first, known if known is not None else end if start == "latest" else first
                )
                if self._is_ready(group, key, first):
                    plan.groups += machine.trim(key, first).groups
                else:
                    plan.groups += machine.reset(key, begin).groups
            return plan

        self._decisions.decide(group, decide)

    def _is_ready(self, group: str, key: QueueKey, first: int) -> bool:
        """Whether leases of a queue may go on where they are. Args: `first`: the first offset of the queue.

        A stream, a person or an import may have committed another offset while no worker had anything of the queue.
        """
        columns = self._store.leases.group(group).queues.get(key)
        if columns is None:
            return False
        committed = self._store.state.offsets.get((group, key[0]), {}).get(key[1])
        if committed is None or columns.next > columns.low:
            return True
        return max(committed, first) == max(columns.low, first)

    def _check_queue(self, group: str, key: QueueKey) -> None:
        """Raises: Rejected, if a group may not lease messages of a queue. Has the put lock."""
        topic, queue_id = key
        info = self._store.state.topics.get(topic)
        if info is None:
            raise unknown_topic(topic)
        if info.compacted:
            raise Rejected(
                f"topic {topic} is compacted: it keeps the latest message of each key, and no worker settles one",
                field="topic",
                limit="a topic that is not compacted",
                found=topic,
            )
        held = self._store.claims.held(group, topic, {queue_id: None})
        if held:
            raise _belongs(group, topic, queue_id, held[queue_id])

    # --- settlements, more time -------------------------------------------------------------------

    def settle(self, group: str, request: SettleRequest) -> LeaseDecision:
        """Settle leased messages. Offsets that their lease does not hold any more are refused, and the others settled.

        Raises: Rejected for a request that no record could say, and for a new session or refused messages, if the
        shard remembers as many as it may. Otherwise as `InnerPut.put_groups`.
        """
        self._read_keys(group)
        numbers = frozenset(item.number for item in request.items)
        return self._decisions.decide(
            group,
            lambda machine, now_ms: machine.settle(request, now_ms),
            Shared(False, request.session, numbers),
        )

    def prepare_acks(self, group: str) -> None:
        """What `plan_acks` needs, before the put lock is taken."""
        self._store.note_feature_level(PAUSES_LEVEL)
        self._read_keys(group)

    def plan_acks(self, group: str, items: Sequence[SettleItem]) -> AckPlan:
        """Decide on acks that another decision of the shard needs: `LeaseDecisions.plan_acks`.

        They belong to no session: the other decision is recognised when it is repeated.
        """
        return self._decisions.plan_acks(group, SettleRequest(NO_SESSION, 0, items))

    def note_acks(self, acks: AckPlan) -> None:
        """The record of acks was appended and applied. Callers: with the put lock."""
        self._decisions.note_acks(acks)

    def extend(
        self,
        group: str,
        session: bytes,
        lease_ms: int | None = None,
        numbers: Iterable[int] | None = None,
    ) -> LeaseDecision:
        """Give leases of a session more time: `LeaseMachine.extend`."""
        named = None if numbers is None else list(numbers)
        return self._decisions.decide(
            group,
            lambda machine, now_ms: machine.extend(
                session, now_ms, numbers=named, lease_ms=lease_ms
            ),
        )

    def set_deadline(
        self, group: str, number: int, key: QueueKey, offset: int, length_ms: int, *, gives_up: bool
    ) -> LeaseDecision:
        """Give one message a deadline of its own: `LeaseMachine.set_deadline`."""
        return self._decisions.decide(
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

    # --- operators --------------------------------------------------------------------------------

    def reset(self, group: str, key: QueueKey, offset: int) -> LeaseDecision:
        """Let a group go on elsewhere in a queue. All of its leases there end."""
        self._store.note_feature_level(PAUSES_LEVEL)
        return self._decisions.decide(group, lambda machine, now_ms: machine.reset(key, offset))

    def release(self, group: str, topic: str | None = None) -> LeaseDecision:
        """Take what workers have back: others get it at once. Args: `topic`: of these messages; None: all."""
        return self._decisions.decide(group, lambda machine, now_ms: machine.release(topic))

    def pause(self, group: str, reason: str) -> LeaseDecision:
        """Let a group lease nothing for a reason; empty: let it go on."""
        self._store.note_feature_level(PAUSES_LEVEL)
        return self._decisions.decide(group, lambda machine, now_ms: machine.pause(reason))

    def describe(self, group: str) -> dict[QueueKey, QueueLeases]:
        """How a group stands in each queue that its workers have leased messages of."""
        found: dict[QueueKey, QueueLeases] = {}

        def look() -> list[tuple[str, bytes]]:
            for key, each in self._store.leases.group(group).queues.items():
                found[key] = QueueLeases(each.low, each.next, each.open_count, each.waiting_count)
            return []

        self._store.inner_put.put_decided(look)
        return found

    def forget_idle(self, in_use: Container[str] = ()) -> None:
        """Forget sessions that hold nothing and were not used for an hour, and groups that have nothing else.

        Args: `in_use`: groups whose options stay.
        """
        self._decisions.forget_idle(in_use)

    # --- keys -------------------------------------------------------------------------------------

    def _read_keys(self, group: str) -> None:
        """Read the keys of what an earlier leader has leased, if their order counts."""
        if self._options(group).order != "key" or not self._decisions.has_unread_keys(group):
            return
        unread: dict[QueueKey, OffsetColumn] = {}

        def look(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            unread.update(machine.unread)
            return LeasePlan()

        self._decisions.decide(group, look)
        for key, offsets in unread.items():
            first, stop = int(offsets[0]), int(offsets[-1]) + 1
            found: list[StoredMessage | None] = []
            while first + len(found) < stop:
                found += self._offers.read(key, first + len(found), stop)
            slots = slots_of(list(map(key_of, found)))[offsets - first]
            self._note_keys(group, key, offsets, slots)

    def _note_keys(
        self, group: str, key: QueueKey, offsets: OffsetColumn, slots: npt.NDArray[np.uint16]
    ) -> None:
        def note(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            machine.note_keys(key, offsets, slots)
            return LeasePlan()

        self._decisions.decide(group, note)


def _moved(group: str, key: QueueKey) -> Unavailable:
    topic, queue_id = key
    return Unavailable(
        f"queue {queue_id} of {topic} was deleted or reset for group {group} meanwhile; ask again",
        field="queue",
    )


def _belongs(group: str, topic: str, queue_id: int, claim: Claim) -> Rejected:
    return Rejected(
        f"queue {queue_id} of {topic} belongs to member {claim.member_id} of group {group}, which reads it as a "
        "stream: workers need another group",
        field="group",
        limit="a group of workers",
        found=claim.member_id,
    )
