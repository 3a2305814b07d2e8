"""What readers see: the dispatch behind C, and the reads that wait for it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from raymq.store.clock import Clock
from raymq.store.errors import OffsetOutOfRange, StorageFull, Unavailable
from raymq.store.message_store import MessageStore
from raymq.store.requests import FetchRequest, FetchSlice

log = logging.getLogger("raymq.commit_log")

#: while nobody waits to read, units are dispatched together: each dispatch alone takes the interpreter from the puts
DISPATCH_LINGER_S = 0.01
#: how long a read waits for the dispatch of all that was acknowledged before it; then it sees what there is
DISPATCH_WAIT_MS = 100
#: how long, where nothing of it is there yet: the first message of a queue waits for a file to be made
FIRST_DISPATCH_WAIT_MS = 5000


class Dispatcher:
    """The read side of one leader. Threads: `run` is one of its own; any may `wake` and `fetch`."""

    def __init__(
        self, store: MessageStore, *, clock: Clock, on_dispatched: Callable[[], None]
    ) -> None:
        """Args: `on_dispatched` is called whenever something was dispatched; it must not block or raise."""
        self._store = store
        self._on_dispatched = on_dispatched
        self._clock = clock
        self._readable = threading.Condition()
        #: readers that wait, guarded by `_readable`
        self._readers = 0
        self._wake = threading.Event()
        #: somebody waits for the dispatch
        self._now = threading.Event()
        self._stopping = False

    def run(self) -> None:
        """Dispatch what is confirmed until told to stop. Raises: what the store raises; the shard cannot go on then."""
        while not self._stopping:
            self._wake.wait(1.0)
            self._wake.clear()
            if not self._readers:
                self._now.wait(DISPATCH_LINGER_S)
            self._now.clear()
            while not self._stopping:
                before = self._store.dispatched
                try:
                    after = self._store.dispatch(self._store.log.confirmed)
                except StorageFull as error:
                    # No room for a consume queue file: readers wait, the log is not touched by it.
                    log.warning("dispatch waits for room: %s", error)
                    break
                if after == before and not self._store.index_behind:
                    break
                self.tell_readers()
                self._on_dispatched()

    def wake(self) -> None:
        """C has moved, or may have. Callers: any thread, behind the move."""
        # While it lingers, the first of many has woken it already.
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        """End `run`, and every read that waits."""
        self._stopping = True
        self._wake.set()
        self._now.set()
        self.tell_readers()

    def tell_readers(self) -> None:
        """Readers that wait look again."""
        with self._readable:
            self._readable.notify_all()

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read every queue asked for; wait up to `wait_ms` while none has anything. What is acknowledged is seen.

        Source: PullRequestHoldService: a request is held until a message arrives or its time is up.
        """
        began = self._clock.monotonic_ms()
        acknowledged = self.await_confirmed()
        while True:
            with self._readable:
                # Looked at before the queues: what is dispatched between the two is not missed.
                behind = self._store.dispatched < acknowledged and self._has_more(request)
                found = self._read(request)
                wait_ms = request.wait_ms
                if behind:
                    wait_ms = max(wait_ms, FIRST_DISPATCH_WAIT_MS)
                left = began + wait_ms - self._clock.monotonic_ms()
                if (
                    any(
                        part.error or (part.records is not None and len(part.records))
                        for part in found
                    )
                    or left <= 0
                ):
                    return found
                if self._stopping:
                    raise Unavailable("the shard is stopping", field="shard")
                with self._reading():
                    self._readable.wait(left / 1000)

    def await_confirmed(self) -> int:
        """Wait until readers see what is confirmed now; not for long. Returns: up to where that is."""
        upto = self._store.log.confirmed
        if self._store.dispatched < upto:
            with self._readable, self._reading():
                self._readable.wait_for(
                    lambda: self._store.dispatched >= upto or self._stopping,
                    DISPATCH_WAIT_MS / 1000,
                )
        return upto

    def _has_more(self, request: FetchRequest) -> bool:
        """Whether the log has anything from an offset on that was asked for; else the dispatch brings nothing."""
        ends = self._store.state.next_offsets
        return any(
            offset < ends.get((request.topic, queue_id), 0)
            for queue_id, offset in request.offsets.items()
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """While somebody waits for the dispatch it does not linger. Needs `_readable`."""
        self._readers += 1
        self._now.set()
        try:
            yield
        finally:
            self._readers -= 1

    def _read(self, request: FetchRequest) -> list[FetchSlice]:
        slices: list[FetchSlice] = []
        budget = request.max_bytes
        for queue_id, offset in request.offsets.items():
            at = offset
            try:
                while True:
                    part = self._store.fetch(
                        request.topic,
                        queue_id,
                        at,
                        max_bytes=max(budget, 1),
                        max_records=request.max_records,
                    )
                    if part.records is None or len(part.records) or part.next_offset <= at:
                        break
                    # Units of a foreign store that point at nothing: the next message is behind them.
                    at = part.next_offset
            except OffsetOutOfRange as error:
                low, high = self._store.queue_range(request.topic, queue_id)
                slices.append(FetchSlice(queue_id, offset, offset, low, high, None, error))
                continue
            if part.records is not None and len(part.records):
                budget -= part.records.nbytes
                slices.append(part._replace(first_offset=offset))
                if budget <= 0:
                    break
        return slices
