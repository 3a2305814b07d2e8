"""What one `Workers` does at one shard: it leases, renews and settles there, in one session."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from raymq.actors.api.leases import (
    ANSWER_BYTES_MAX,
    LeaseCall,
    LeasedMessages,
    LeasedQueue,
    pack_options,
)
from raymq.client.consume.selector import selector_of
from raymq.client.transport.chained_future import ChainedFuture
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.requests import SettleItem, offsets_of

from .held import BELIEF_PERCENT, HeldLease, HeldPart
from .shard_leases import ShardLeases
from .shard_renewals import ShardRenewals
from .shard_settles import ShardSettles, lost_error, unanswered
from .worker_state import WorkerState
from .workers_config import WorkersConfig

#: callers that wait for less leave the sending of their settlements to the thread
CALLER_TIMEOUT_MS = 10_000
#: how long `extend` of one message may take
EXTEND_TIMEOUT_S = 10.0


class ShardSession:
    """One session: a `held.LeaseOwner`. Threads: any may call."""

    def __init__(
        self,
        routes: Routes,
        shard: int,
        topics: Sequence[str],
        config: WorkersConfig,
        state: WorkerState,
        clock: Clock,
    ) -> None:
        """Begin to lease, when the program wants messages."""
        self.shard = shard
        self._routes = routes
        self._config = config
        self._state = state
        self._clock = clock
        session = secrets.token_bytes(16)
        #: by number; the lock of the state guards them
        self._leases: dict[int, HeldLease] = {}

        options, selector = config.lease_options(), selector_of(config.tags, config.sql)
        self._names = {"group": config.group, "session": session.hex()}
        self._arguments = {**self._names, **pack_options(options, selector)}
        self._settles = ShardSettles(routes, shard, self._arguments)
        self._renewals = ShardRenewals(
            *(routes, shard, self._arguments, state, self._leases),
            lease_s=config.lease_s,
            clock=clock,
        )
        call = LeaseCall(
            *(config.group, tuple(topics), session, 0, 1, ANSWER_BYTES_MAX, 0, config.start),
            options,
            selector,
        )
        self._reader = ShardLeases(routes, shard, call, state, clock, self._take)

    # --- leases -----------------------------------------------------------------------------------

    def _take(self, found: LeasedMessages, sent_ms: int) -> None:
        """Hold a new lease, and let the program have its messages. Needs the lock."""
        if not found.queues:
            return
        left = sum(map(_count_of, found.queues))
        until_ms = sent_ms + found.lease_ms * BELIEF_PERCENT // 100
        lease = HeldLease(found.number, self, until_ms, left)
        self._leases[found.number] = lease
        if self._config.auto_extend:
            self._renewals.start()

        at = 0
        for queue in found.queues:
            self._settle_unreadable(lease, queue)
            count = len(queue.offsets)
            if count and found.records is not None:
                records = found.records.slice(at, count)
                part = HeldPart(lease, queue.key, records, queue.offsets, queue.attempts)
                self._state.add(part)
                at += count

    def _settle_unreadable(self, lease: HeldLease, queue: LeasedQueue) -> None:
        """Settle what has no message, and what is damaged: the program hears of that. Needs the lock."""
        items = []
        if len(queue.missing):
            items.append(_item(lease, queue, queue.missing, SettleOutcome.ACKED))
        if queue.damaged:
            damaged = offsets_of(list(queue.damaged))
            items.append(_item(lease, queue, damaged, SettleOutcome.REJECTED))
            for offset, error in queue.damaged.items():
                self._state.faults.append(_damage(error, self.shard, offset))
            self._state.report()
        if items:
            with contextlib.suppress(RayMQError):
                self.settle(items, lease)

    # --- held.LeaseOwner --------------------------------------------------------------------------

    def settle(
        self, items: Sequence[SettleItem], lease: HeldLease, *, is_awaited: bool = False
    ) -> ChainedFuture[None]:
        """See `held.LeaseOwner`."""
        waits = (
            is_awaited
            and self._state.settle_mode == "wait"
            # A caller that sends cannot stop waiting sooner than a silent shard is left.
            and self._config.unavailable_timeout_ms >= CALLER_TIMEOUT_MS
        )
        future = self._settles.add(items, is_awaited=waits)
        count = sum(len(each.offsets) for each in items)
        future.add_done_callback(partial(self._note_settled, lease, count))
        return future

    def arguments(self) -> Mapping[str, Any]:
        """See `held.LeaseOwner`."""
        return self._arguments

    def _note_settled(self, lease: HeldLease, count: int, done: Future[None]) -> None:
        self.note_settled(lease, count)

    def note_settled(self, lease: HeldLease, count: int) -> None:
        """See `held.LeaseOwner`."""
        lease.left -= count
        if lease.left <= 0:
            # One operation of a dictionary: `settle` may be called with the lock held.
            self._leases.pop(lease.number, None)

    def result_of(self, future: ChainedFuture[None]) -> Future[None] | None:
        """See `held.LeaseOwner`."""
        if self._state.settle_mode == "pipelined":
            return future
        timeout_ms = self._config.unavailable_timeout_ms
        if not future.done() and timeout_ms >= CALLER_TIMEOUT_MS:
            self._settles.send_here()
        if not future.done():
            future.await_end(timeout_ms / 1000)
        if not future.done():
            raise unanswered(self.shard, timeout_ms)
        future.result()
        return None

    def extend(self, lease: HeldLease, key: tuple[str, int], offset: int, lease_ms: int) -> None:
        """See `held.LeaseOwner`."""
        sent_ms = self._clock.monotonic_ms()
        message = [lease.number, *key, offset]
        arguments = {**self._arguments, "lease_ms": lease_ms, "message": message}
        answer = self._routes.call(self.shard, "extend_leases", arguments, EXTEND_TIMEOUT_S)
        granted_ms = answer["granted_ms"].get(str(lease.number))
        if granted_ms is None:
            raise lost_error(self._config.group, {key: [np.array([offset])]})
        until_ms = sent_ms + int(granted_ms) * BELIEF_PERCENT // 100
        with self._state.lock:
            lease.own_until_ms[key, offset] = max(until_ms, lease.until_of(key, offset))

    def now_ms(self) -> int:
        """See `held.LeaseOwner`."""
        return self._clock.monotonic_ms()

    # --- end --------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Break off the call under way, after the state was closed. Needs the lock."""
        self._reader.restart()

    def close(self, unread: Sequence[HeldPart], timeout_s: float) -> None:
        """Give messages back that the program did not get, and wait for settlements, for so long at most. Best effort.

        Args: `unread`: of any shard. Callers: after `restart`.
        """
        deadline_s = self._clock.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline_s - self._clock.monotonic())

        self._reader.join()
        with self._state.lock:
            # An answer may have come in the meantime.
            parts = [*unread, *self._state.ready]
        for part in parts:
            if part.lease.owner is self:
                self._release(part.lease, part.key, part.offsets[part.at :])
        self._renewals.close()
        # The next call ends the session: those after it must not begin it again.
        self._settles.flush(left_s(), self._names)
        with contextlib.suppress(RayMQError):
            last = self._reader.take_last()
            if last is not None and last.number and last.number not in self._leases:
                lease = HeldLease(last.number, self, 0, 0)
                for queue in last.queues:
                    self._release(lease, queue.key, queue.offsets)
        self._settles.close(left_s())

    def _release(self, lease: HeldLease, key: tuple[str, int], offsets: OffsetColumn) -> None:
        item = SettleItem(lease.number, key, offsets, SettleOutcome.RETURNED)
        with contextlib.suppress(RayMQError):
            self.settle([item], lease)

    def abandon(self) -> None:
        """Let the threads end, soon. No lock is taken."""
        self._settles.abandon()
        self._renewals.abandon()


def _count_of(queue: LeasedQueue) -> int:
    return len(queue.offsets) + len(queue.missing) + len(queue.damaged)


def _item(
    lease: HeldLease, queue: LeasedQueue, offsets: OffsetColumn, verdict: SettleOutcome
) -> SettleItem:
    return SettleItem(lease.number, queue.key, offsets, verdict)


def _damage(error: RayMQError, shard: int, offset: int) -> RayMQError:
    """What the program hears of a damaged message, which is settled."""
    advice = "the message is settled as rejected, without a dead letter"
    fields = {**error.fields, "shard": shard, "queue_offset": offset}
    return Corrupt(f"shard {shard}: {error.message}; {advice}", **fields)
