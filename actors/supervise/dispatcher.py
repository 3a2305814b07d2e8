"""The read side of a replica: dispatches confirmed messages, and holds the reads that wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from raymq.actors.api.held_fetch import LOOK_MS, FetchProgress
from raymq.actors.shared.failures import ActiveFailures
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, NotServing, OffsetOutOfRange, StorageFull, Unavailable
from raymq.store.engine.message_store import MessageStore
from raymq.store.queues import reader
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.queues.message_filter import LookLimit
from raymq.store.records.requests import FetchRequest, FetchSlice
from raymq.store.state.topics import QueueKey

#: how long a read that finds nothing waits for messages that were confirmed before it. Dispatch of a queue's first
#: message waits for a new file
FIRST_DISPATCH_WAIT_MS = 5_000
#: how long `await_confirmed` waits: below the time that clients give a call
CONFIRMED_WAIT_MS = 10_000
#: from a dispatch that failed to the next one
DISPATCH_RETRY_S = 0.2
#: how often to check without a wakeup
CHECK_S = 1.0
#: how long `stop` waits for the slice that a read dispatches
STOP_WAIT_S = 2.0
#: confirmed bytes that end a linger: a follower that takes over dispatches no more than these first
LINGER_BYTES_MAX = 8 << 20


class Dispatcher:
    """The read side of one replica. Threads: `run` has one of its own, any may call `wake` and `fetch`.

    A read that finds nothing waits in the lists of its queues. Only a message of one of them wakes the read, as soon
    as the message is confirmed, and the read dispatches it: waking another thread for that takes five times as long as
    the dispatch. Reads hold no lock while they read, so that a slow disk delays only the reader that needs it.
    """

    def __init__(
        self,
        store: MessageStore,
        *,
        clock: Clock,
        on_dispatched: Callable[[], None],
        failures: ActiveFailures | None = None,
    ) -> None:
        """Args: `on_dispatched`: called after each dispatch. It must not block or raise."""
        #: while no reader waits for a unit, those of so many seconds are dispatched together
        self.linger_s = 0.0
        self._store = store
        self._on_dispatched = on_dispatched
        self._clock = clock
        self._failures = ActiveFailures() if failures is None else failures

        #: guards `_waiting_reads`
        self._lock = threading.Lock()
        #: queue -> what wakes the reads that wait for a message in it
        self._waiting_reads: dict[QueueKey, set[Callable[[], None]]] = {}

        #: notified of each dispatch, while `_awaiting` callers wait for a certain end
        self._dispatch_happened = threading.Condition()
        self._awaiting = 0
        #: acknowledged messages may end as late as here, although less is confirmed at present
        self._expected_end = 0
        #: whether an answer that lacks messages below `_expected_end` is refused
        self._needs_expected = False
        #: held while a slice is dispatched
        self._run_lock = threading.Lock()
        #: the disk or the kernel refused the last dispatch
        self._failing = False
        #: the unexpected error of a dispatch in the thread of a read: `run` raises it, which ends the replica
        self._fatal_error: Exception | None = None

        self._wake = threading.Event()
        #: set: a caller waits for messages that are already confirmed, so do not linger
        self._urgent = threading.Event()
        self._stopping = False

    # --- dispatching ------------------------------------------------------------------------------

    def run(self) -> None:
        """Dispatch confirmed messages until `stop`.

        An operation that the disk or the kernel refuses is tried again. Readers wait until then, and the log is not
        touched. Raises: every other error of a dispatch, also of one in the thread of a read.
        """
        wait_s = CHECK_S
        while not self._stopping:
            self._wake.wait(wait_s)
            self._wake.clear()
            self._linger()
            wait_s = CHECK_S
            if self._fatal_error is not None:
                raise self._fatal_error
            try:
                while not self._stopping and self._step():
                    pass
            except (OSError, StorageFull) as error:
                self._failing = True
                self._failures.note("dispatch", error)
                wait_s = DISPATCH_RETRY_S
            else:
                self._failing = False
                self._failures.clear("dispatch")

    def _step(self) -> bool:
        """Dispatch a slice. Returns: whether there may be more."""
        with self._run_lock:
            moved = self._dispatch_slice()
        if moved:
            self._on_dispatched()
        return moved

    def _dispatch_slice(self) -> bool:
        """Dispatch or index one slice. Needs `_run_lock`. Returns: whether there may be more."""
        if self._stopping:
            return False
        before = self._store.dispatched
        try:
            after = self._store.dispatch(self._store.log.confirmed)
            reput = self._store.reput
            return after != before or reput.index_behind or reput.units_behind
        finally:
            self._wake_reads(self._store.reput.take_changed_queues())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is dispatched inside of the block."""
        with self._run_lock:
            yield

    def _linger(self) -> None:
        """Let several units gather, unless readers may wait for some that only the log has."""
        if not (self._awaiting or self._stopping or self._queues_to_wake() is None):
            self._urgent.wait(self.linger_s)
        self._urgent.clear()

    def _queues_to_wake(self) -> set[QueueKey] | None:
        """The queues with waiting reads and confirmed messages to dispatch; None: any may have some in the log."""
        if not self._waiting_reads:
            return set()
        return self._store.reput.concerned(self._waiting_reads, self._store.log.confirmed)

    def wake(self) -> None:
        """The confirmed end has moved, or may have. Callers: any thread, after the move."""
        # While the loop lingers, the first of many calls has set it already.
        if not self._wake.is_set():
            self._wake.set()
        if self._urgent.is_set():
            return
        queues = self._queues_to_wake()
        undispatched = self._store.log.confirmed - self._store.dispatched
        if queues is None or undispatched > LINGER_BYTES_MAX:
            self._urgent.set()
        else:
            self._wake_reads(queues)

    def stop(self) -> None:
        """End `run`, and every read that waits. No read dispatches after that, unless the disk hangs."""
        self._stopping = True
        self._wake.set()
        self._urgent.set()
        self.wake_readers()
        if self._run_lock.acquire(timeout=STOP_WAIT_S):
            self._run_lock.release()

    def wake_readers(self) -> None:
        """Let all reads that wait check again."""
        self._wake_reads(list(self._waiting_reads))

    def _wake_reads(self, queues: set[QueueKey] | list[QueueKey]) -> None:
        """Let the reads that wait for one of these queues check again."""
        if self._awaiting:
            with self._dispatch_happened:
                self._dispatch_happened.notify_all()
        if not self._waiting_reads or not queues:
            return
        with self._lock:
            waiting = {notify for key in queues for notify in self._waiting_reads.get(key, ())}
        for notify in waiting:
            notify()

    # --- waiting for a dispatch -------------------------------------------------------------------

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read every requested queue, and wait up to `wait_ms` while all are empty. All acknowledged messages are seen.

        Source: PullRequestHoldService: a request is held until a message arrives or its time is up.
        """
        began_ms = self._clock.monotonic_ms()
        confirmed = self._store.log.confirmed
        # Checked before the queues are read: a dispatch between the two is not missed.
        dispatch_lags = self._store.dispatched < max(confirmed, self._expected_end)
        awaits_dispatch = self._awaits_dispatch(request, confirmed)
        may_hold = request.wait_ms > 0 or awaits_dispatch
        if awaits_dispatch:
            self._dispatch_for_read()
        look_ms = self._clock.monotonic_ms()
        found = self._read(request)
        if dispatch_lags and any(isinstance(each.error, OffsetOutOfRange) for each in found):
            # The range in the error must end after every acknowledged message.
            self.await_confirmed()
            found = self._read(request)
        progress = FetchProgress(request)
        if progress.note(found, look_ms, self._clock.monotonic_ms()) or not may_hold:
            return progress.answer()
        return self._hold(progress, began_ms, confirmed)

    def _hold(self, progress: FetchProgress, began_ms: int, confirmed: int) -> list[FetchSlice]:
        """Read again after each dispatch into the request's queues, until something is found or the time is up."""
        woken = threading.Event()
        release = self.hold(progress.request.queues(), woken.set)
        try:
            while True:
                woken.clear()
                request = progress.request
                if self._awaits_dispatch(request, self._store.log.confirmed):
                    self._dispatch_for_read()
                # Checked before the queues are read: a dispatch between the two is not missed.
                awaits_dispatch = self._awaits_dispatch(request, confirmed)
                look_ms = self._clock.monotonic_ms()
                found = self._read(request)
                now_ms = self._clock.monotonic_ms()
                is_over = progress.note(found, look_ms, now_ms)

                wait_ms = request.wait_ms
                if awaits_dispatch:
                    wait_ms = max(wait_ms, FIRST_DISPATCH_WAIT_MS)
                left_ms = began_ms + wait_ms - now_ms
                if progress.ends_ms is not None:
                    left_ms = min(left_ms, progress.ends_ms - now_ms)
                if is_over or left_ms <= 0:
                    return progress.answer()
                if self._stopping:
                    raise NotServing("the shard is stopping", field="shard")

                if found:
                    # A filter looks at a part of a queue at a time.
                    continue
                if self._awaits_dispatch(request, self._store.log.confirmed):
                    self._urgent.set()
                woken.wait(left_ms / 1000)
        finally:
            release()

    def _dispatch_for_read(self) -> None:
        """Dispatch a slice in the thread of a read, if no other thread does. Raises: nothing; the read is not at fault.

        After a failure only the dispatch thread dispatches, until that works: it pauses between two tries.
        """
        if self._failing:
            return

        moved = False
        if self._run_lock.acquire(blocking=False):
            try:
                if self._store.dispatched >= self._store.log.confirmed:
                    # Another read was quicker, and indexing is not the work of a read.
                    return
                moved = self._dispatch_slice()
            except (OSError, StorageFull):
                self._failing = True
            except Exception as error:
                self._fatal_error = error
            finally:
                self._run_lock.release()

        if moved:
            self._on_dispatched()
        else:
            # The dispatch thread comes next. After a failure it tries again, and reports.
            self._wake.set()
            self._urgent.set()

    def hold(self, queues: Iterable[QueueKey], notify: Callable[[], None]) -> Callable[[], None]:
        """See `ShardBackend.hold`."""
        keys = list(queues)
        with self._lock:
            for key in keys:
                self._waiting_reads.setdefault(key, set()).add(notify)

        def release() -> None:
            with self._lock:
                for key in keys:
                    waiting = self._waiting_reads.get(key, set())
                    waiting.discard(notify)
                    if not waiting:
                        self._waiting_reads.pop(key, None)

        return release

    def reach(self, queues: Iterable[QueueKey]) -> None:
        """Dispatch confirmed messages of these queues that readers do not see yet, if there are any."""
        if self._store.dispatched >= self._store.log.confirmed:
            return
        ends = self._store.state.next_offsets
        if any(self._store.queue_range(*key)[1] < ends.get(key, 0) for key in queues):
            self._dispatch_for_read()

    def _awaits_dispatch(self, request: FetchRequest, confirmed: int) -> bool:
        """Whether messages that the request asks for may be confirmed and not dispatched yet."""
        if self._store.dispatched >= confirmed:
            return False
        ends = self._store.state.next_offsets
        return any(offset < ends.get(key, 0) for key, offset in request.queues().items())

    def expect(self, end: int, *, is_needed: bool) -> None:
        """Messages that end at `end` or before may have been acknowledged, although less is confirmed at present.

        Args: `is_needed`: that end will be confirmed as soon as this replica leads. Otherwise only one call waits.
        """
        self._needs_expected = is_needed
        self._expected_end = end

    def await_confirmed(self) -> None:
        """Wait until readers see all messages confirmed by now.

        After a power loss the confirmed end is not known before enough followers are connected. The first call
        waits for the end that may have been acknowledged, too. After a failover all calls wait for it.
        Raises: Unavailable, when the dispatch takes longer than CONFIRMED_WAIT_MS: an answer from incomplete queues
        would be wrong.
        """
        confirmed = self._store.log.confirmed
        expected = max(confirmed, self._expected_end)
        if self._store.dispatched >= expected:
            return

        self.await_dispatched(expected, CONFIRMED_WAIT_MS)
        if not self._needs_expected or self._store.dispatched >= expected:
            self._expected_end = 0
        missing = max(confirmed, self._expected_end) - self._store.dispatched
        if missing > 0:
            cause = f" ({self._failures})" if "dispatch" in self._failures else ""
            raise Unavailable(
                f"the consume queues lack {missing} acknowledged bytes of the log{cause}; ask again: they are being "
                "written",
                field="consumequeue",
                limit=0,
                found=missing,
            )

    def await_dispatched(self, end: int, timeout_ms: int) -> None:
        """Dispatch without a linger until everything below `end` is dispatched, or the time is up."""
        self._await_end(lambda: self._store.dispatched, end, timeout_ms)

    def _await_end(self, reached: Callable[[], int], end: int, timeout_ms: int) -> None:
        """Dispatch and index without a linger until `reached` is at `end`, or the time is up."""
        with self._dispatch_happened:
            self._awaiting += 1
            self._urgent.set()
            self._wake.set()
            try:
                self._dispatch_happened.wait_for(
                    lambda: reached() >= end or self._stopping, timeout_ms / 1000
                )
            finally:
                self._awaiting -= 1

    def await_indexed(self) -> None:
        """Wait until every message that is dispatched by now is in the index.

        Raises: Unavailable, when that takes longer than CONFIRMED_WAIT_MS, as while an index is built again.
        """
        store = self._store
        end = store.dispatched
        self._await_end(lambda: store.index.indexed, end, CONFIRMED_WAIT_MS)
        missing = end - store.index.indexed
        if missing > 0 and not self._stopping:
            raise Unavailable(
                f"the index lacks {missing} bytes of the log; ask again: they are being indexed",
                field="index",
                limit=0,
                found=missing,
            )

    # --- reading ----------------------------------------------------------------------------------

    def _read(self, request: FetchRequest) -> list[FetchSlice]:
        """The queues that have records or an error now, or were looked at in vain. Raises: Unavailable."""
        try:
            return self._read_queues(request)
        except OSError as error:
            # Descriptors or memory, for example: another try may succeed.
            raise Unavailable(f"the shard could not read: {error}", field="store") from error

    def _read_queues(self, request: FetchRequest) -> list[FetchSlice]:
        slices: list[FetchSlice] = []
        queues = self._in_turn(request.queues())
        budget, left = request.max_bytes, len(queues)
        look = None
        if request.wanted is not None:
            over_ms = self._clock.monotonic_ms() + LOOK_MS
            look = LookLimit(reader.FILTERED_UNITS, lambda: self._clock.monotonic_ms() >= over_ms)

        for key, offset in queues:
            # An equal share of what is left: what one queue does not need is for those after it.
            share = max(budget // left, 1)
            left -= 1
            try:
                fetched = self._read_queue(request, key, offset, share, look)
            except (OffsetOutOfRange, Corrupt) as error:
                low, high = self._store.queue_range(*key)
                part = FetchSlice(key[1], offset, offset, low, high, None, error)
                slices.append(_with_topic(part, key[0], request))
                continue
            if fetched.records is not None and fetched.next_offset > offset:
                part = fetched._replace(first_offset=offset)
                slices.append(_with_topic(part, key[0], request))
                # Arrow takes long to count bytes, so those of the last queue are not counted.
                budget -= fetched.records.nbytes if left else 0
                if budget <= 0:
                    break
            if look is not None:
                # The next look goes on with the queues that this one does not reach.
                look = look._replace(units=look.units - (fetched.next_offset - offset))
                if look.units <= 0 or look.is_over():
                    break

        return slices

    def _in_turn(self, asked: Mapping[QueueKey, int]) -> list[tuple[QueueKey, int]]:
        """The queues of a request with their offsets: those without messages, the first one with some, then the fewest.

        So a busy queue does not keep the messages of quiet ones back, and gets the bytes that they do not need. The
        request's first queue changes, so that large messages of others cannot keep one back for ever.
        """
        queues = list(asked.items())
        if len(queues) == 1:
            return queues

        counts = {queue: self._messages_of(*queue) for queue in queues}
        filled = [queue for queue in queues if counts[queue] > 0]
        order = [queue for queue in queues if counts[queue] <= 0]
        return [*order, *filled[:1], *sorted(filled[1:], key=counts.__getitem__)]

    def _messages_of(self, key: QueueKey, offset: int) -> int:
        """How many messages a queue has from an offset on; less than 1 also if it cannot be read."""
        try:
            return self._store.queue_range(*key)[1] - offset
        except (OffsetOutOfRange, Corrupt):
            return 0

    def _read_queue(
        self,
        request: FetchRequest,
        key: QueueKey,
        offset: int,
        max_bytes: int,
        look: LookLimit | None,
    ) -> FetchSlice:
        """The first records from `offset` on. Raises: OffsetOutOfRange, Corrupt, Rejected for a wrong filter."""
        wanted = None if request.wanted is None else expression_filter(*request.wanted)
        while True:
            fetched = self._store.fetch(
                *key,
                offset,
                max_bytes=max_bytes,
                max_records=request.max_records,
                wanted=wanted,
                look=look,
            )
            is_at_end = fetched.next_offset <= offset
            if wanted is not None or is_at_end or fetched.records is None or len(fetched.records):
                return fetched
            # These units of a foreign store point at nothing, and the next message comes after them.
            offset = fetched.next_offset


def _with_topic(part: FetchSlice, topic: str, request: FetchRequest) -> FetchSlice:
    """A queue's answer, with its topic if the request reads several."""
    return part if topic == request.topic else part._replace(topic=topic)
