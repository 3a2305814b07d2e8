"""Leases messages of one shard for a program, with one thread, one stream and long polls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import pyarrow as pa

from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.client.transport.ask import moved, search_pauses
from raymq.client.transport.connection import FetchStream, LeaseStream
from raymq.client.transport.fetch_thread import FetchThread
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.queues.raw_records import fault_of
from raymq.store.records.requests import FetchSlice

from .worker_state import WorkerState

logger = logging.getLogger("raymq.client")

#: longest wait of one call at the shard
WAIT_MS = 10_000
#: ... and the part of a lease that it may take: a lease counts from the sending of its call
WAIT_PART = 4


class ShardLeases(FetchThread):
    """The leasing thread of one shard."""

    def __init__(
        self,
        routes: Routes,
        shard: int,
        call: LeaseCall,
        state: WorkerState,
        clock: Clock,
        take: Callable[[LeasedMessages, int], None],
    ) -> None:
        """Args: `call`: what all calls have in common. `take`: called with the lock held, with an answer and when it
        was asked for.
        """
        self._state = state
        self._clock = clock
        self._take = take
        self._pauses = search_pauses()
        wait_ms = min(WAIT_MS, call.options.lease_ms // WAIT_PART)
        self._call = call._replace(request=0, wait_ms=wait_ms)
        #: the call was sent, and is not answered: it is repeated under its number, and gets the same lease
        self._is_open = False
        #: why the last call got nothing, if the group is paused
        self._paused = ""
        name = f"raymq-leases-{shard}"
        super().__init__(routes, shard, state.changed, lambda: state.closed, name=name)

    def _fetch(self, stream: FetchStream) -> bool:
        """One call, once the program wants messages. False: end, or open a new stream."""
        state = self._state

        def must_return() -> bool:
            return state.closed or self._stream is not stream

        state.look_for_queues()
        with state.changed:
            state.changed.wait_for(lambda: must_return() or self._is_open or state.missing)
            if must_return():
                return False
            if not self._is_open:
                request = self._call.request + 1
                self._call = self._call._replace(request=request, max_records=state.missing)
                self._is_open = True

        sent_ms = self._clock.monotonic_ms()
        found = cast("LeaseStream", stream).lease(self._call)
        self._verify(found)
        self._pauses = search_pauses()
        with state.changed:
            self._is_open = False
            state.down.pop(self.shard, None)
            self._note_pause(found.paused)
            if found.number:
                self._take(found, sent_ms)
        return True

    def _note_pause(self, reason: str) -> None:
        """Warn once when the group is paused. The program waits as for messages that have not come yet."""
        group = self._call.group
        if reason and not self._paused:
            logger.warning(
                "group %s is paused on shard %d (%s): its workers get nothing until `raymq group resume %s`",
                *(group, self.shard, reason, group),
            )
        self._paused = reason

    def _verify(self, found: LeasedMessages) -> None:
        """Compare the messages with their CRCs. Raises: Unavailable for a damaged one: the call is repeated."""
        fault = None if found.records is None else _fault_of(found.records)
        if fault is not None:
            raise Unavailable(
                f"a leased message arrived damaged ({fault}) from shard {self.shard}, which had it intact. Suspect "
                "faulty memory or network; test the RAM of both machines",
                shard=self.shard,
            )

    def _handle_failure(self, error: RayMQError, stream: FetchStream | None) -> bool:
        """Record a failure. False: no pause is needed, because the program broke the stream itself or has closed."""
        state = self._state
        with state.changed:
            if state.closed or (stream is not None and self._stream is not stream):
                return False
            if error.retriable or moved(error):
                if state.missing or self._is_open:
                    state.down.setdefault(self.shard, (self._clock.monotonic_ms(), error))
                state.report()
                if not self._routes.fails_over:
                    return True
                # Another replica may lead soon: the pauses are shorter here.
                if not self._routes.knows_next(self.shard):
                    state.changed.wait_for(self._ended, next(self._pauses) / 1000)
                return False

            # Such a failure does not pass by itself: other options than those of the group, for example.
            state.fatal_error = error
            state.report()
            state.changed.wait_for(self._ended)
            return False

    def take_last(self) -> LeasedMessages | None:
        """End the session. Returns: what the call that was broken off has got, if any. Callers: after `join`.

        Raises: RayMQError.
        """
        if not self._call.request:
            return None
        stream = self._routes.fetch_stream(self.shard)
        try:
            # Nothing is leased for the first time.
            return stream.lease(self._call._replace(max_records=0, wait_ms=0))
        finally:
            stream.close()


def _fault_of(records: pa.Array) -> str | None:
    fault = fault_of(FetchSlice(0, 0, 0, 0, 0, records, None))
    return None if fault is None else fault.rule
