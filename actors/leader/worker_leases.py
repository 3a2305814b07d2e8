"""Leases messages of this shard's queues to workers, for a leader: lets requests wait, reads what they get, settles."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from raymq.actors.api.call_arguments import check_known
from raymq.actors.api.leases import LeaseCall, LeasedMessages, LeasedQueue
from raymq.actors.api.shard_api import PutTicket
from raymq.actors.api.transactions import WorkerAcks
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.groups.leases.entries import SettleEntry
from raymq.store.groups.leases.requests import (
    ExtendAnswer,
    LeaseAnswer,
    LeaseRequest,
    SettleAnswer,
    SettleRequest,
)
from raymq.store.records.requests import AppendedRows
from raymq.store.services.lease_decisions import LeaseDecision
from raymq.store.services.leased_records import read_leased
from raymq.store.services.leases import LeaseService, QueueLeases
from raymq.store.services.retry import queue_of
from raymq.store.state.features import PAUSES_LEVEL
from raymq.store.state.topics import QueueKey, retry_topic

from .dead_letters import DeadLetters
from .group_records import GroupHost
from .lease_options import SharedOptions, WorkerOptions

#: how soon a request that waits notices that its worker has left
LEFT_CHECK_MS = 250
#: how long a request of a paused group waits: its worker hears soon why it gets nothing
PAUSED_WAIT_MS = 1_000
#: how often sessions that hold nothing are looked for
FORGET_EVERY_MS = 600_000


class QueueWatch(Protocol):
    """What lets requests wait for messages: `Dispatcher`."""

    def hold(
        self, queues: Iterable[QueueKey], notify: Callable[[], None]
    ) -> Callable[[], None]: ...

    def reach(self, queues: Iterable[QueueKey]) -> None: ...


class LeaseHost(GroupHost, Protocol):
    """What leases need of their leader."""

    def announce(self) -> None: ...

    def begin_promise(self, appended: AppendedRows) -> PutTicket: ...

    def finish_promise(self, ticket: PutTicket) -> None: ...


class WorkerLeases:
    """Decides by `LeaseService`, and lets answers wait for its records. Threads: any may call."""

    def __init__(self, leader: LeaseHost, clock: Clock, watch: QueueWatch, *, shard: int) -> None:
        self._leader = leader
        self._store = leader.store
        self._clock = clock
        self._watch = watch
        self._shard = shard
        self.service = LeaseService(leader.store, shard=shard)
        self.dead_letters = DeadLetters(leader, self.service.redrives, self._await)
        self._is_active = False

        #: guards the field below
        self._promise_lock = threading.Lock()
        #: the newest end that an answer waits for. Calls that were decided together wait for the same one
        self._promise: tuple[int, PutTicket] | None = None
        #: guards the fields below
        self._lock = threading.Lock()
        self._options = WorkerOptions()
        #: group -> what wakes its requests that wait
        self._waiting: dict[str, set[Callable[[], None]]] = {}
        self._turn = 0
        #: session -> when it has ended: a request of it that waits gets nothing any more
        self._ended: dict[bytes, int] = {}
        self._forget_ms = clock.monotonic_ms() + FORGET_EVERY_MS
        self._activate()

    def _activate(self) -> None:
        """Let the leases of before this leadership begin their whole time again. A store that takes no writes yet does
        it later.
        """
        with contextlib.suppress(Unavailable):
            self.service.activate()
            self._is_active = True

    # --- leases -----------------------------------------------------------------------------------

    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """See `ShardBackend.lease`.

        Raises: Rejected for an unknown or compacted topic, for options that other workers of the group do not have, and
        as `LeaseService.lease`; Unavailable, DeliveryUnknown: the same call may be repeated.
        """
        self._leader.check_serving()
        keys = self._keys(call)
        self._note_call(call)
        if not call.max_records:
            # Its request that waits ends.
            self.wake(call.group)

        decision = self._decide(call, keys)
        if _is_empty(decision) and call.wait_ms and call.max_records:
            decision = self._wait(call, keys, is_left)
        answer = decision.plan.answer
        if not isinstance(answer, LeaseAnswer):
            raise Rejected(
                f"the session has made a newer request than {call.request}",
                field="request",
                limit="the newest request",
                found=call.request,
            )
        if not answer.number:
            return LeasedMessages(call.request, paused=answer.paused)
        fail_point("groups.lease_appended")
        # The messages are read while the record becomes durable.
        ticket = None if decision.appended is None else self._begin_promise(decision.appended)
        found = self._read(call, answer)
        self._finish(ticket)
        return found

    def _keys(self, call: LeaseCall) -> list[QueueKey]:
        """The queues of this shard from which a call may get messages. They take turns as the first."""
        topics = self._store.state.topics
        keys: list[QueueKey] = []
        for name in call.topics:
            info = topics[check_known(name, topics)]
            if info.compacted:
                raise Rejected(
                    f"topic {name} is compacted: it keeps the latest message of each key, and no worker settles one",
                    field="topic",
                    limit="a topic that is not compacted",
                    found=name,
                )
            keys += [
                (name, each) for each in range(info.queues) if info.shard_of(each) == self._shard
            ]

        with self._lock:
            self._turn += 1
            turn = self._turn % max(len(keys), 1)
        retry = retry_topic(call.group)
        with self._publishing():
            self._store.note_feature_level(PAUSES_LEVEL)
            queue_id = queue_of(self._store, retry, self._shard)
        return [(retry, queue_id), *keys[turn:], *keys[:turn]]

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Let what the block appends be synced soon. No answer waits for it."""
        end = self._store.log.end
        yield
        if self._store.log.end != end:
            self._leader.publish(AppendedRows.up_to(self._store.log.end))

    def _note_call(self, call: LeaseCall) -> None:
        with self._lock:
            if not call.max_records:
                self._options.end(call.group, call.session)
                self._ended[call.session] = self._clock.monotonic_ms()
                return
            if self._options.note(call, self._clock.monotonic_ms()):
                self.service.configure(call.group, call.options)

    def _decide(self, call: LeaseCall, keys: Sequence[QueueKey]) -> LeaseDecision:
        """Decide once."""
        self._watch.reach(keys)
        asked = LeaseRequest(call.session, call.request, call.max_records, call.options.lease_ms)
        end = self._store.log.end
        decision = self.service.lease(
            *(call.group, asked, keys),
            start=call.start,
            selector=call.selector,
            max_bytes=call.max_bytes,
            is_over=lambda: call.max_records > 0 and call.session in self._ended,
        )
        if _is_empty(decision) and self._store.log.end != end:
            # No answer waits for it.
            self._leader.publish(AppendedRows.up_to(self._store.log.end))
        return decision

    def _wait(
        self, call: LeaseCall, keys: Sequence[QueueKey], is_left: Callable[[], bool]
    ) -> LeaseDecision:
        """Decide again whenever there may be a message, until there is one or the time is up."""
        begin_ms = self._clock.monotonic_ms()
        deadline_ms = begin_ms + call.wait_ms
        with self._woken(call.group, keys) as woken:
            while True:
                woken.clear()
                self._leader.check_serving()
                decision = self._decide(call, keys)
                if not _is_empty(decision):
                    return decision

                now_ms = self._clock.monotonic_ms()
                if now_ms >= deadline_ms or is_left() or call.session in self._ended:
                    return decision
                if decision.appended is not None:
                    # A filter looks at a part of a queue at a time.
                    continue
                if _pause_of(decision):
                    deadline_ms = min(deadline_ms, begin_ms + PAUSED_WAIT_MS)
                until_ms = deadline_ms
                if decision.next_ms is not None:
                    until_ms = min(deadline_ms, max(now_ms + 1, decision.next_ms))
                if not self._sleep(woken, until_ms, is_left):
                    return decision

    def _sleep(self, woken: threading.Event, until_ms: int, is_left: Callable[[], bool]) -> bool:
        """Sleep until something may have come. Returns: False when the worker has left."""
        while True:
            left_ms = until_ms - self._clock.monotonic_ms()
            if left_ms <= 0 or woken.wait(min(left_ms, LEFT_CHECK_MS) / 1000):
                return True
            if is_left():
                return False

    @contextlib.contextmanager
    def _woken(self, group: str, keys: Iterable[QueueKey]) -> Iterator[threading.Event]:
        """An event that is set when one of the queues may have a message for the group."""
        woken = threading.Event()
        release = self._watch.hold(keys, woken.set)
        with self._lock:
            self._waiting.setdefault(group, set()).add(woken.set)
        try:
            yield woken
        finally:
            release()
            with self._lock:
                waiting = self._waiting[group]
                waiting.discard(woken.set)
                if not waiting:
                    del self._waiting[group]

    def wake(self, group: str) -> None:
        """Let the requests of a group look again: messages were given back, or others may follow them now."""
        with self._lock:
            waiting = list(self._waiting.get(group, ()))
        for wake in waiting:
            wake()

    def _read(self, call: LeaseCall, answer: LeaseAnswer) -> LeasedMessages:
        """The messages of a lease. Those beyond the bytes of an answer are given back."""
        queues: list[LeasedQueue] = []
        records: list[pa.Array] = []
        left_bytes = call.max_bytes
        is_returned = False
        for part in answer.parts:
            found = read_leased(self._store, part.key, part.offsets, left_bytes)
            left_bytes -= found.size_bytes
            if len(found.rest):
                with self._publishing():
                    self.service.give_back(call.group, answer.number, part.key, found.rest)
                is_returned = True
            rows = np.searchsorted(part.offsets, found.offsets)
            attempts = part.attempts[rows].astype(np.int64)
            queues.append(
                LeasedQueue(part.key, found.offsets, attempts, found.missing, found.damaged)
            )
            records += found.records

        if is_returned:
            self.wake(call.group)
        joined = pa.concat_arrays(records) if len(records) > 1 else None
        return LeasedMessages(
            *(call.request, answer.number, answer.lease_ms, queues),
            records[0] if len(records) == 1 else joined,
        )

    # --- settlements ------------------------------------------------------------------------------

    def settle(
        self, group: str, request: SettleRequest, shared: SharedOptions | None
    ) -> SettleAnswer:
        """Settle messages. Args: `shared`: the options of the worker's group, if it says them.

        Raises: as `LeaseService.settle`; Rejected for a request older than the session's newest.
        """
        self._note_use(group, request.session, shared)
        self._store.note_feature_level(PAUSES_LEVEL)
        self._leader.announce()
        decision = self.service.settle(group, request)
        answer = decision.plan.answer
        if not isinstance(answer, SettleAnswer):
            raise Rejected(
                f"the session has made a newer request than {request.settle}",
                field="settle",
                limit="the newest request",
                found=request.settle,
            )
        self.wake(group)
        fail_point("groups.settle_appended")
        self._await(decision.appended)
        return answer

    def extend(
        self,
        group: str,
        session: bytes,
        lease_ms: int | None,
        shared: SharedOptions | None,
        numbers: Sequence[int] | None = None,
    ) -> ExtendAnswer:
        """Give leases of a session more time. Args: `numbers`: of the leases; None: all."""
        self._note_use(group, session, shared)
        return self._granted(self.service.extend(group, session, lease_ms, numbers))

    def extend_message(
        self,
        group: str,
        session: bytes,
        message: tuple[int, QueueKey, int],
        lease_ms: int,
        shared: SharedOptions | None,
    ) -> ExtendAnswer:
        """Give one message of a lease a deadline of its own. Args: `message`: its lease, queue and offset."""
        self._note_use(group, session, shared)
        decision = self.service.set_deadline(group, *message, lease_ms, gives_up=False)
        return self._granted(decision)

    def _granted(self, decision: LeaseDecision) -> ExtendAnswer:
        self._await(decision.appended)
        answer = decision.plan.answer
        return answer if isinstance(answer, ExtendAnswer) else ExtendAnswer({})

    def note_use(self, call: WorkerAcks) -> None:
        """A worker settles messages as a part of a transaction. Raises: as `settle`."""
        shared = None if call.options is None else SharedOptions(call.options, call.selector)
        self._note_use(call.acks.group, call.session, shared)

    def await_log(self, *, has_appended: bool) -> None:
        """Let an answer wait for all that is in the log, and if it has no record of its own, for a check."""
        self._await(AppendedRows.up_to(self._store.log.end) if has_appended else None)

    def _note_use(self, group: str, session: bytes, shared: SharedOptions | None) -> None:
        self._leader.check_serving()
        if shared is not None:
            with self._lock:
                now_ms = self._clock.monotonic_ms()
                if self._options.note_use(group, session, *shared, now_ms):
                    self.service.configure(group, shared.options)

    def _await(self, appended: AppendedRows | None) -> None:
        """Let an answer wait for everything that it rests on: its own record, or earlier ones and a check."""
        self._finish(None if appended is None else self._begin_promise(appended))

    def _begin_promise(self, appended: AppendedRows) -> PutTicket:
        """Let a record become durable. Returns: what ends then."""
        end = appended.end_offset
        with self._promise_lock:
            if self._promise is None or self._promise[0] != end:
                self._promise = end, self._leader.begin_promise(appended)
            return self._promise[1]

    def _finish(self, ticket: PutTicket | None) -> None:
        """Wait for the record of an answer. None: for earlier ones, and for a check that this replica still leads."""
        if ticket is not None:
            self._leader.finish_promise(ticket)
        else:
            self._leader.await_promise(AppendedRows.up_to(self._store.log.end))
            self._leader.await_check()

    @property
    def uncopied_count(self) -> int:
        """See `LeaseService.uncopied_count`."""
        return self.service.uncopied_count

    def describe(self, group: str) -> dict[QueueKey, QueueLeases]:
        """See `LeaseService.describe`."""
        found = self.service.describe(group)
        self._await(None)
        return found

    def release(self, group: str, topic: str | None) -> int:
        """Take what workers have back. Returns: how many messages. Args: as of `LeaseService.release`."""
        self._leader.check_serving()
        decision = self.service.release(group, topic)
        self.wake(group)
        self._await(decision.appended)
        entries = [entry for entry in decision.plan.entries if isinstance(entry, SettleEntry)]
        return sum(len(each.offsets) for entry in entries for each in entry.groups)

    def pause(self, group: str, reason: str) -> None:
        """Let a group lease nothing on this shard, for a reason; empty: let it go on."""
        self._leader.check_serving()
        decision = self.service.pause(group, reason)
        self.wake(group)
        self._await(decision.appended)

    def paused(self) -> dict[str, str]:
        """Group of workers -> why it leases nothing on this shard."""
        groups = list(self._store.leases.groups.items())
        return {name: group.paused for name, group in groups if group.paused}

    # --- what time ends ---------------------------------------------------------------------------

    def step(self) -> None:
        """Forget sessions that are over, now and then. Callers: one thread."""
        if not self._is_active:
            self._activate()
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._forget_ms:
            return
        self._forget_ms = now_ms + FORGET_EVERY_MS
        with self._lock:
            self._ended = {
                session: ended_ms
                for session, ended_ms in self._ended.items()
                if now_ms - ended_ms < FORGET_EVERY_MS
            }
            self._options.forget_silent(now_ms)
            in_use = self._options.groups
        with self._publishing():
            self.service.forget_idle(in_use)


def _pause_of(decision: LeaseDecision) -> str:
    """Why the group leases nothing; empty: it does."""
    answer = decision.plan.answer
    return answer.paused if isinstance(answer, LeaseAnswer) else ""


def _is_empty(decision: LeaseDecision) -> bool:
    """Whether there was no message for a worker."""
    answer = decision.plan.answer
    return isinstance(answer, LeaseAnswer) and not answer.number
