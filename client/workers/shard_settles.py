"""Settles messages at one shard: what waits goes together, and one call is under way at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raymq.actors.api.leases import pack_items, unpack_refused
from raymq.client.client_thread import ClientThread, join_at_close
from raymq.client.transport.ask import moved
from raymq.client.transport.chained_future import ChainedFuture, wake_callers
from raymq.client.transport.connection import LeaseStream
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import Bug, Fenced, RayMQError, Rejected, Unavailable
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.options import COPIES_MAX, LEASE_OFFSETS_MAX
from raymq.store.groups.leases.requests import RefusedOffsets, SettleItem, offsets_of
from raymq.store.state.topics import QueueKey

#: after a call that failed
RETRY_S = 0.2
#: after a call of so few settlements a caller sends its own
FEW = 2
#: items of one call: offsets of one lease and queue with one verdict
ITEMS_MAX = 4_096
#: offsets that an error names
SHOWN_MAX = 10


class _Pending(NamedTuple):
    """A settlement that a program waits for."""

    items: Sequence[SettleItem]
    future: ChainedFuture[None]


class _Call(NamedTuple):
    """Settlements that go together, under a number of the session."""

    arguments: Mapping[str, object]
    taken: Sequence[_Pending]


class ShardSettles:
    """The settlements of one session. Threads: any may call.

    A call is repeated under its number until it is answered: its session has one under way at a time, so that a
    repeated one gets its first answer. A thread of its own sends what waits together. A program that settles one
    message after the other sends each by itself, which saves two changes of threads.
    """

    def __init__(self, routes: Routes, shard: int, arguments: Mapping[str, object]) -> None:
        """Args: `arguments`: of every call: those that name the session, and its options."""
        self._routes = routes
        self._shard = shard
        self._group = str(arguments["group"])
        self._arguments = arguments

        self._lock = threading.Lock()
        #: wakes the thread
        self._work = threading.Condition(self._lock)
        #: wakes those that wait for the end of what is under way
        self._idle = threading.Condition(self._lock)
        self._pending: deque[_Pending] = deque()
        self._number = 0
        #: the call under way, of the thread or of a caller
        self._under_way: _Call | None = None
        #: how many settlements the last call had
        self._last_count = 0
        #: a call of a caller that got no answer: the thread repeats it
        self._unanswered: _Call | None = None
        self._ends = False
        #: calls that fail are not repeated any more
        self._gives_up = False
        #: of the call under way. Under the lock others may break it
        self._stream: LeaseStream | None = None
        #: started with the first settlement
        self._thread: ClientThread | None = None

    def add(self, items: Sequence[SettleItem], *, is_awaited: bool = False) -> ChainedFuture[None]:
        """Settle messages. Returns: a future that ends when that is durable, or with Fenced naming what was lost.

        Args: `is_awaited`: the caller calls `send_here` next.
        Raises: Rejected after the end.
        """
        future: ChainedFuture[None] = ChainedFuture()
        with self._lock:
            if self._ends:
                raise Rejected(
                    "the workers are closed: their messages are not settled any more, and others get them",
                    field="workers",
                    limit="open",
                )
            self._pending.append(_Pending(items, future))
            if self._thread is None:
                self._thread = ClientThread(self._run, f"raymq-settles-{self._shard}")
                self._thread.start()
            if self._under_way is None and not (is_awaited and self._last_count <= FEW):
                self._work.notify()
        return future

    def send_here(self) -> None:
        """Send what waits in this thread, unless another one sends or many callers settle at the same time.

        It ends with the answer, or when there is none: then the thread goes on.
        """
        with self._lock:
            is_busy = self._under_way is not None or self._last_count > FEW
            if is_busy or not self._pending or self._gives_up:
                return
            call = self._next_call()
        try:
            self._try(call)
        except BaseException as error:
            with self._lock:
                # Ctrl-C may come after its end.
                if self._under_way is call:
                    self._unanswered = call
                    self._work.notify()
            wake_callers([each.future for each in call.taken if each.future.done()])
            if not isinstance(error, RayMQError):
                raise

    def flush(self, timeout_s: float, arguments: Mapping[str, object]) -> None:
        """Wait for what is under way, for so long at most. Args: `arguments`: of the calls after that."""
        with self._lock:
            self._idle.wait_for(self._is_idle, timeout_s)
            self._arguments = arguments

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, for so long at most. What has no answer then may be settled or not."""
        with self._lock:
            self._ends = True
            self._work.notify()
            self._idle.wait_for(self._is_idle, timeout_s)
            self._gives_up = True
            if self._stream is not None:
                self._stream.abort()
            self._work.notify()
        if self._thread is not None:
            join_at_close(self._thread, self._routes.transport)

    def abandon(self) -> None:
        """Let the thread end. No lock is taken: the collector calls it anywhere."""
        self._ends = self._gives_up = True

    def _is_idle(self) -> bool:
        return not self._pending and self._under_way is None

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (call := self._await_call()) is not None:
            try:
                self._repeat(call)
            except BaseException as error:
                # Without an answer its caller would wait for ever.
                fault = error if isinstance(error, RayMQError) else Bug(f"settle: {error!r}")
                self._end_call(call, fault)
        self._leave_stream()

    def _await_call(self) -> _Call | None:
        """The next call; None at the end."""
        with self._lock:
            while self._unanswered is None and (self._under_way is not None or not self._pending):
                if self._ends and self._is_idle():
                    return None
                self._work.wait(1.0)
            call, self._unanswered = self._unanswered, None
            return self._next_call() if call is None else call

    def _next_call(self) -> _Call:
        """The call of what waits, which begins. Needs the lock."""
        taken = self._take()
        self._number += 1
        items = pack_items(_gathered(taken))
        call = _Call({**self._arguments, "settle": self._number, "items": items}, taken)
        self._under_way = call
        return call

    def _take(self) -> list[_Pending]:
        """What goes with the next call. Needs the lock."""
        taken: list[_Pending] = []
        offsets = items = rejected = 0

        while self._pending:
            first = self._pending[0]
            offsets += sum(len(each.offsets) for each in first.items)
            items += len(first.items)
            rejected += sum(
                len(each.offsets) for each in first.items if each.verdict == SettleOutcome.REJECTED
            )
            is_full = offsets > LEASE_OFFSETS_MAX or items > ITEMS_MAX or rejected > COPIES_MAX
            if taken and is_full:
                break
            taken.append(self._pending.popleft())
        return taken

    def _repeat(self, call: _Call) -> None:
        """Send a call until it is answered. Raises: the shard's error; Unavailable, DeliveryUnknown at the end."""
        while True:
            try:
                self._try(call)
                return
            except RayMQError as error:
                if self._gives_up or not (error.retriable or moved(error)):
                    raise
            if self._routes.fails_over and self._routes.knows_next(self._shard):
                continue
            with self._lock:
                self._work.wait_for(lambda: self._gives_up, RETRY_S)
            self._routes.refresh()

    def _try(self, call: _Call) -> None:
        """Send a call once, and end its settlements. Raises: RayMQError: there is no answer."""
        try:
            answer = self._open_stream().settle(call.arguments)
        except BaseException:
            self._leave_stream()
            raise
        self._end_call(call, unpack_refused(answer["refused"]))

    def _open_stream(self) -> LeaseStream:
        """The stream to the leader. Raises: RayMQError."""
        stream = self._stream or self._routes.fetch_stream(self._shard)
        with self._lock:
            self._stream = stream
            if self._gives_up:
                raise Unavailable("the workers are closed", shard=self._shard)
        return stream

    def _leave_stream(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _end_call(self, call: _Call, outcome: Sequence[RefusedOffsets] | RayMQError) -> None:
        """End the settlements of a call."""
        futures = [each.future for each in call.taken]
        for each in call.taken:
            # An earlier try was interrupted while it ended them.
            if each.future.done():
                continue
            if isinstance(outcome, RayMQError):
                each.future.set_exception(outcome)
            else:
                self._finish(each, outcome)

        with self._lock:
            self._under_way = None
            self._last_count = len(futures)
            if self._pending or self._ends:
                self._work.notify()
            self._idle.notify_all()
        wake_callers(futures)

    def _finish(self, pending: _Pending, refused: Iterable[RefusedOffsets]) -> None:
        lost: dict[QueueKey, list[OffsetColumn]] = {}
        for item in pending.items:
            for each in refused:
                if (each.number, each.key) == (item.number, item.key):
                    found = np.intersect1d(item.offsets, each.offsets)
                    if len(found):
                        lost.setdefault(item.key, []).append(found)
        if lost:
            pending.future.set_exception(lost_error(self._group, lost))
        else:
            pending.future.set_result(None)


def _gathered(taken: Iterable[_Pending]) -> list[SettleItem]:
    """The items of several settlements, those of one lease, queue and verdict together."""
    found: dict[tuple[int, QueueKey, SettleOutcome, int | None], list[OffsetColumn]] = {}
    for pending in taken:
        for item in pending.items:
            what = item.number, item.key, item.verdict, item.delay_ms
            found.setdefault(what, []).append(item.offsets)
    return [
        SettleItem(number, key, offsets_of(np.concatenate(offsets)), verdict, delay_ms)
        for (number, key, verdict, delay_ms), offsets in found.items()
    ]


def lost_error(group: str, lost: dict[QueueKey, list[OffsetColumn]]) -> Fenced:
    """Why messages were not settled."""
    offsets = [
        (topic, queue_id, offset)
        for (topic, queue_id), found in sorted(lost.items())
        for offset in np.unique(np.concatenate(found)).tolist()
    ]
    shown = ", ".join(
        f"{offset} of queue {queue} of {topic}" for topic, queue, offset in offsets[:SHOWN_MAX]
    )
    more = f" and {len(offsets) - SHOWN_MAX} more" if len(offsets) > SHOWN_MAX else ""
    return Fenced(
        f"the lease of message {shown}{more} is over, and nothing of it was settled: another worker of group {group} "
        "may have it, or it is settled already. The work may be done twice, the settlement is not",
        group=group,
        offsets=offsets,
    )


def unanswered(shard: int, timeout_ms: float) -> Unavailable:
    """Why a caller hears nothing of its settlement yet."""
    return Unavailable(
        f"shard {shard} did not answer within {timeout_ms:g} ms; the settlement is repeated until it does, while the "
        "workers are open",
        shard=shard,
    )
