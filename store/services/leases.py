"""Leases of a shard: workers share the messages of its queues, and settle each message alone.

The decisions are `LeaseMachine`'s. This service gives it what the shard's queues have, appends its records and copies
its messages. An answer counts once everything in the log is as durable as the host of the store promises.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.format import RETRY_PREFIX
from raymq.store.groups.claims import Claim
from raymq.store.groups.leases.entries import LeaseEntry, SettleOutcome
from raymq.store.groups.leases.lease_machine import AppendGroup, LeaseMachine, LeasePlan
from raymq.store.groups.leases.lease_table import LEASE, SETTLE
from raymq.store.groups.leases.options import COPIES_MAX, LEASE_OFFSETS_MAX, LeaseOptions
from raymq.store.groups.leases.packing import pack
from raymq.store.groups.leases.requests import Copy, LeaseRequest, Offer, SettleRequest
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.inner_put import RecordGroup
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.requests import AppendedRows
from raymq.store.state.features import LEASES_LEVEL
from raymq.store.state.topics import QueueKey, dlq_topic, retry_topic, unknown_topic

from .retry import copy_of, queue_of
from .stored_message import read, read_one

logger = logging.getLogger("raymq.store")

#: the service of the bundles that copies and settlements make
SERVICE = "leases"
#: properties of a dead letter: why it is one, and the session that had it last
DEAD_REASON, DEAD_HOLDER = "DLQ_REASON", "DLQ_HOLDER"


class LeaseDecision(NamedTuple):
    """A decision of the machine whose records were appended."""

    plan: LeasePlan
    #: None: it needed no record
    appended: AppendedRows | None


class LeaseService:
    """Leases of the groups of workers on one shard, while it leads. Threads: any may call."""

    def __init__(self, store: ServiceHost, *, shard: int = 0) -> None:
        self._store = store
        self._shard = shard
        self._options: dict[str, LeaseOptions] = {}
        #: by group; made from the state when the group is used first
        self._machines: dict[str, LeaseMachine] = {}

    def activate(self) -> None:
        """Begin to lead: every lease gets its whole time again. Callers: before any other call of this leadership."""
        self._machines.clear()

    def configure(self, group: str, options: LeaseOptions) -> None:
        """Set the options of a group. Raises: Rejected for the order of keys, which this version does not read."""
        if options.order == "key":
            raise Rejected(
                f"group {group} wants the order of keys, which this version does not keep",
                field="order",
                limit=("", "queue"),
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
    ) -> LeaseDecision:
        """Lease messages of some queues of this shard.

        Args: `start`: earliest or latest: where a group begins with a queue of which it has no offset.
        Raises: Rejected for a topic that does not exist, and for a queue that a member has claimed. Otherwise as
        `InnerPut.put_groups`.
        """
        store = self._store
        ranges = {key: store.queue_range(*key) for key in queues}
        self._prepare(group, ranges, start)
        columns = store.leases.group(group).queues
        looked = {
            key: self._look(key, columns[key].next, ranges[key][1], request) for key in queues
        }

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            offers = [
                Offer(
                    key, machine.due(key, request.max_records, now_ms), first, stop, attempts=tries
                )
                for key, (first, stop, tries) in looked.items()
            ]
            return machine.lease(request, offers, now_ms)

        return self._decide(group, decide)

    def settle(self, group: str, request: SettleRequest) -> LeaseDecision:
        """Settle leased messages. Raises: Rejected for too many rejected messages; as `InnerPut.put_groups`."""
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

    def reset(self, group: str, key: QueueKey, offset: int) -> LeaseDecision:
        """Let a group go on elsewhere in a queue. All of its leases there end."""
        return self._decide(group, lambda machine, now_ms: machine.reset(key, offset))

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

    def _look(
        self, key: QueueKey, first: int, end: int, request: LeaseRequest
    ) -> tuple[int, int, np.ndarray | None]:
        """What of a queue was never leased: from where, to where, and the attempts of a retry topic."""
        stop = max(first, min(end, first + LEASE_OFFSETS_MAX))
        if not key[0].startswith(RETRY_PREFIX) or first == stop:
            return first, stop, None
        found, _ = read(self._store, *key, first, max_records=request.max_records)
        attempts = np.array([each.reconsume_times for each in found], dtype=np.uint16)
        return first, first + len(found), attempts

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
        """Decide, and append what the decision needs."""
        made: list[tuple[LeaseMachine, LeasePlan, int]] = []

        def decide() -> list[RecordGroup]:
            now_ms = self._store.clock.monotonic_ms()
            machine = self._machine(group)
            machine.copies_max = COPIES_MAX
            while True:
                plan = call(machine, now_ms)
                groups = [self._records_of(group, each) for each in plan.groups]
                if machine.copies_max == 1 or not any(map(self._is_large, groups)):
                    break
                # A plan changes nothing: one with fewer copies takes its place.
                machine.copies_max //= 2
            made.append((machine, plan, now_ms))
            return groups

        def note() -> None:
            machine, plan, now_ms = made[-1]
            machine.note(plan, now_ms)

        appended = self._store.inner_put.put_groups(SERVICE, decide, then=note)
        return LeaseDecision(made[-1][1], appended)

    def _is_large(self, group: RecordGroup) -> bool:
        """Whether other puts would wait too long for the copies of a group."""
        copied_bytes = sum(len(message.body) for message in group.messages)
        return copied_bytes > self._store.config.bundle_bytes_max

    def _records_of(self, group: str, wanted: AppendGroup) -> RecordGroup:
        """A group of entries as a record, with the messages that are copied."""
        is_lease = any(isinstance(entry, LeaseEntry) for entry in wanted.entries)
        record = (LEASE if is_lease else SETTLE), pack(group, wanted.entries)
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


def _belongs(group: str, topic: str, queue_id: int, claim: Claim) -> Rejected:
    return Rejected(
        f"queue {queue_id} of {topic} belongs to member {claim.member_id} of group {group}, which reads it as a "
        "stream: workers need another group",
        field="group",
        limit="a group of workers",
        found=claim.member_id,
    )
