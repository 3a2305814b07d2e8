"""What readers see: the dispatch of what is confirmed, and the reads that wait for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from raymq.actors.shared.troubles import Troubles
from raymq.store.clock import Clock
from raymq.store.errors import Corrupt, OffsetOutOfRange, StorageFull, Unavailable
from raymq.store.message_store import MessageStore
from raymq.store.requests import FetchRequest, FetchSlice

#: while no reader waits for a unit, units are dispatched together: each dispatch alone takes the interpreter from the
#: puts
DISPATCH_LINGER_S = 0.01
#: how often to look meanwhile whether a unit has come that a reader waits for
LINGER_LOOKS = 5
#: how long a read that finds nothing waits for messages that were confirmed before it: the first message of a queue
#: waits for a file to be made
FIRST_DISPATCH_WAIT_MS = 5_000
#: how long `await_confirmed` waits: below the time that clients give a call
CONFIRMED_WAIT_MS = 10_000
#: from a dispatch that failed to the next one
DISPATCH_RETRY_S = 0.2
#: how often to look without a wake-up
LOOK_S = 1.0

Key = tuple[str, int]


class Dispatcher:
    """The read side of one leader. Threads: `run` is one of its own; any may `wake` and `fetch`.

    A read that finds nothing waits in the lists of its queues, and only a dispatch into one of them wakes it. Reads
    themselves hold no lock: a slow disk delays its own reader only.
    """

    def __init__(
        self,
        store: MessageStore,
        *,
        clock: Clock,
        on_dispatched: Callable[[], None],
        troubles: Troubles | None = None,
    ) -> None:
        """Args: `on_dispatched` is called whenever something was dispatched; it must not block or raise."""
        self._store = store
        self._on_dispatched = on_dispatched
        self._clock = clock
        self._troubles = Troubles() if troubles is None else troubles
        #: over `_waiting`
        self._lock = threading.Lock()
        #: queue -> the reads that wait for a message in it
        self._waiting: dict[Key, set[threading.Event]] = {}
        #: tells of each dispatch, while `_awaiting` callers wait for a certain end
        self._dispatched = threading.Condition()
        self._awaiting = 0
        #: what was acknowledged may reach up to here, although less is confirmed at present
        self.hoped_end = 0
        self._wake = threading.Event()
        #: a caller waits for what is confirmed already
        self._now = threading.Event()
        self._stopping = False

    def run(self) -> None:
        """Dispatch what is confirmed until told to stop.

        An operation that the disk or the kernel refuses is tried again: readers wait, the log is not touched by it.
        """
        wait_s = LOOK_S
        while not self._stopping:
            self._wake.wait(wait_s)
            self._wake.clear()
            self._linger()
            wait_s = LOOK_S
            try:
                while not self._stopping and self._step():
                    pass
            except (OSError, StorageFull) as error:
                self._troubles.note("dispatch", error)
                wait_s = DISPATCH_RETRY_S
            else:
                self._troubles.clear("dispatch")

    def _step(self) -> bool:
        """Dispatch a slice. Returns: whether there may be more."""
        before = self._store.dispatched
        try:
            after = self._store.dispatch(self._store.log.confirmed)
            if after == before and not self._store.index_behind:
                return False
        finally:
            self._tell(self._store.take_touched())
        self._on_dispatched()
        return True

    def _linger(self) -> None:
        """Let units gather, unless a reader waits for one of them."""
        for _ in range(LINGER_LOOKS):
            if self._awaiting or self._stopping or self._wanted():
                break
            if self._now.wait(
                DISPATCH_LINGER_S / LINGER_LOOKS if self._waiting else DISPATCH_LINGER_S
            ):
                break
            if not self._waiting:
                break
        self._now.clear()

    def _wanted(self) -> bool:
        return bool(self._waiting) and self._store.dispatch_concerns(
            self._waiting, self._store.log.confirmed
        )

    def wake(self) -> None:
        """The confirmed end has moved, or may have. Callers: any thread, after the move."""
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
        """Reads that wait look again, all of them."""
        self._tell(list(self._waiting))

    def _tell(self, queues: set[Key] | list[Key]) -> None:
        """Reads that wait for one of these queues look again."""
        if self._awaiting:
            with self._dispatched:
                self._dispatched.notify_all()
        if not self._waiting or not queues:
            return
        with self._lock:
            reads = {read for key in queues for read in self._waiting.get(key, ())}
        for read in reads:
            read.set()

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read every queue asked for; wait up to `wait_ms` while none has anything. What is acknowledged is seen.

        Source: PullRequestHoldService: a request is held until a message arrives or its time is up.
        """
        began = self._clock.monotonic_ms()
        confirmed = self._store.log.confirmed
        found = self._read(request)
        if found or (request.wait_ms <= 0 and not self._is_behind(request, confirmed)):
            return found
        with self._waiting_for(request) as told:
            while True:
                told.clear()
                # Looked at before the queues: what is dispatched between the two is not missed.
                behind = self._is_behind(request, confirmed)
                found = self._read(request)
                wait_ms = request.wait_ms
                if behind:
                    wait_ms = max(wait_ms, FIRST_DISPATCH_WAIT_MS)
                left = began + wait_ms - self._clock.monotonic_ms()
                if found or left <= 0:
                    return found
                if self._stopping:
                    raise Unavailable("the shard is stopping", field="shard")
                if behind:
                    self._now.set()
                told.wait(left / 1000)

    @contextlib.contextmanager
    def _waiting_for(self, request: FetchRequest) -> Iterator[threading.Event]:
        """An event that is set when one of the request's queues gets a message."""
        told = threading.Event()
        keys = [(request.topic, queue_id) for queue_id in request.offsets]
        with self._lock:
            for key in keys:
                self._waiting.setdefault(key, set()).add(told)
        try:
            yield told
        finally:
            with self._lock:
                for key in keys:
                    reads = self._waiting[key]
                    reads.discard(told)
                    if not reads:
                        del self._waiting[key]

    def await_confirmed(self) -> None:
        """Wait until readers see all that is confirmed now.

        After a power loss the confirmed end of a mirror is not known before its follower is there: it is waited for
        once, as long.
        Raises: Unavailable, when the dispatch takes longer than CONFIRMED_WAIT_MS: no caller is told less than there
        is.
        """
        upto = self._store.log.confirmed
        hoped = max(upto, self.hoped_end)
        if self._store.dispatched >= hoped:
            return
        with self._dispatched:
            self._awaiting += 1
            self._now.set()
            self._wake.set()
            try:
                self._dispatched.wait_for(
                    lambda: self._store.dispatched >= hoped or self._stopping,
                    CONFIRMED_WAIT_MS / 1000,
                )
            finally:
                self._awaiting -= 1
        self.hoped_end = 0
        behind = upto - self._store.dispatched
        if behind > 0:
            cause = f" ({self._troubles})" if "dispatch" in self._troubles else ""
            raise Unavailable(
                f"the consume queues are {behind} bytes of the log behind what was acknowledged{cause}; ask again: "
                "they are being written",
                field="consumequeue",
                limit=0,
                found=behind,
            )

    def _is_behind(self, request: FetchRequest, confirmed: int) -> bool:
        """Whether messages that were asked for are confirmed, perhaps, and not dispatched yet."""
        return self._store.dispatched < confirmed and self._has_more(request)

    def _has_more(self, request: FetchRequest) -> bool:
        """Whether the log has anything from an offset on that was asked for; else the dispatch brings nothing."""
        ends = self._store.state.next_offsets
        return any(
            offset < ends.get((request.topic, queue_id), 0)
            for queue_id, offset in request.offsets.items()
        )

    def _read(self, request: FetchRequest) -> list[FetchSlice]:
        """What there is now: queues that have records or an error. Raises: Unavailable."""
        try:
            return self._read_queues(request)
        except OSError as error:
            # Descriptors or memory, for example: another try may succeed.
            raise Unavailable(f"the shard could not read: {error}", field="store") from error

    def _read_queues(self, request: FetchRequest) -> list[FetchSlice]:
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
            except (OffsetOutOfRange, Corrupt) as error:
                low, high = self._store.queue_range(request.topic, queue_id)
                slices.append(FetchSlice(queue_id, offset, offset, low, high, None, error))
                continue
            if part.records is not None and len(part.records):
                budget -= part.records.nbytes
                slices.append(part._replace(first_offset=offset))
                if budget <= 0:
                    break
        return slices
