"""The engine in one process: a store with its flush service on a thread.

The order of put, sync, confirmed end and dispatch is that of the actors, without Ray, sockets or other processes.
Tests and benchmarks measure the actors against it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, StorageFull, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.promise import PROMISES, Ends
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_service import DelayService
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.leases.requests import (
    LeaseAnswer,
    LeaseRequest,
    SettleAnswer,
    SettleRequest,
)
from raymq.store.log.flush import FlushFailed, FlushRealTime, GroupCommit, SegmentSyncer
from raymq.store.log.segments.read_ahead import ReadAhead
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.requests import AppendedRows, FetchSlice, PutRequest
from raymq.store.services.lease_decisions import LeaseDecision
from raymq.store.services.leases import LeaseService
from raymq.store.services.transaction import Half, TransactionService
from raymq.store.state.topics import QueueKey

from .async_put import AsyncPut
from .put_message import MessagePut, PutResult

#: pause after a file could not be opened for a sync
FLUSH_RETRY_S = 0.05
#: GroupCommit looks for appends after this time, if none wakes it
GROUP_COMMIT_WAIT_MS = 200


class EmbeddedStore:
    """One shard's store in this process, without Ray: a `MessageStore` and the threads that flush and prefetch for it.

    A put returns once its message is as durable as `config.flush` asks: GroupCommit ("sync") or FlushRealTime ("async")
    runs on a thread. `append` and `wait` are the two halves of `put`, for pipelining. Any thread may put and fetch.
    `store` is the `MessageStore`, with queries by key and id, filters and maintenance; `transactions` is its
    transaction service. The files are Apache RocketMQ's.

    Example:
        ```python
        from contextlib import closing
        from pathlib import Path

        from raymq.store import EmbeddedStore, InnerMessage, StoreConfig, decode_records

        config = StoreConfig(segment_size_bytes=64 << 20)
        with closing(EmbeddedStore(Path("one-shard"), config=config)) as store:
            store.create_topic("orders", queues=1)
            result = store.put_message(InnerMessage("orders", 0, b"one espresso", {"KEYS": "alice"}))
            found = store.fetch("orders", 0, 0)
            print(result.status, decode_records(found.records)["body"].to_pylist())
        ```

    Args:
        root: the store's directory, created if it is missing. One process at a time may have it open.
        config: the store's options (default `StoreConfig()`): file sizes, flush, retention, limits. An embedded store
            has no transient pool.
        files: access to the file system, for tests that inject failures.
        clock: the source of time, for tests.

    Guarantees:
        Opening recovers the store after any crash. With `flush="sync"` a put that returned is on disk. With "async" it
        is in the page cache, and on disk within `flush_interval_ms`. Less than `flush_least_pages` pages may take
        `flush_thorough_interval_ms`. After a failed fsync the store never writes again.

    Raises:
        Rejected: a wrong argument; nothing was stored.
        Unavailable: another process has the store open, or the store has stopped writing.
        DeliveryUnknown: a put was appended but not synced within `sync_flush_timeout_ms`.
        StorageFull: the disk has no room; nothing was stored.
        Corrupt: the store is damaged at bytes that were on disk.
    """

    def __init__(
        self,
        root: Path,
        *,
        config: StoreConfig | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open or create the store in `root`, recover it and start its threads."""
        if config is not None and config.transient_pool:
            raise Rejected(
                "an embedded store has no CommitRealTime; open it without the transient pool",
                field="transient_pool",
                limit=False,
            )

        self._wake = threading.Event()
        self._ended = threading.Event()
        #: empty or incomplete after a failed constructor
        self._threads: list[threading.Thread] = []

        self.store = MessageStore.open(root, config=config, files=files, clock=clock)
        try:
            self._begin()
        except BaseException:
            self._end_threads()
            if self._threads:
                self._syncer.close()
            self.store.abandon()
            raise

    def _begin(self) -> None:
        log = self.store.log
        config = self.store.config
        log.sync()
        log.note_confirmed(log.end)

        self._delays = DelayService(self.store)
        self._syncer = SegmentSyncer(log.segments.directory, config.segment_size_bytes, log.files)

        self._sync_flush = config.flush == "sync"
        self._promise = PROMISES[config.flush, False, "quorum"]
        #: no receipt waits for the flush thread
        self._acknowledged_at_once = self._promise.waits_for_nothing
        self._group_commit = GroupCommit(self._syncer, synced=log.synced)
        self._flush_real_time = FlushRealTime(
            self._syncer, log.clock, log.config, synced=log.synced
        )

        self._changed = threading.Condition()
        self._dispatch_lock = threading.Lock()
        #: guarded by `_changed`, like `_stop_reason`. The log's marks are closed with the store, but callers may wait
        self._ends = self.store.log.ends
        self._stop_reason: str | None = None
        #: the exception that set `_stop_reason`, and whether a call has raised it
        self._stop_cause: BaseException | None = None
        self._stop_raised = False

        #: transactions; the owner of the store calls its `check`
        self.transactions = TransactionService(self.store)
        #: leases of workers; the owner of the store calls its `forget_idle`
        self.leases = LeaseService(self.store)
        self._messages = MessagePut(self.store, self._await)
        log.health.on_poisoned = self._fail

        for run, name in ((self._run, "raymq-flush"), (self._prepare_pages, "raymq-ahead")):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

        self._advance()

    # --- writing ----------------------------------------------------------------------------------

    def append(self, request: PutRequest) -> AppendedRows:
        """Append a batch without waiting for the flush. Raises: as `put`."""
        self._check_working()
        appended = self.store.put(request)
        self._wake.set()
        return appended

    def wait(self, appended: AppendedRows) -> AppendedRows:
        """Wait until the store's promise for an append is kept.

        Raises: DeliveryUnknown with status FLUSH_DISK_TIMEOUT after the sync flush timeout.
        """
        # In sync mode earlier synced messages are dispatched during the sync. If the dispatch fails, the put has not
        # failed: a running flag reports the failure, and so does the next read.
        with contextlib.suppress(OSError, StorageFull):
            self._dispatch()

        if not appended.wait_store_ok or self._acknowledged_at_once:
            return appended

        promise, end = self._promise, appended.end_offset
        limit = self.store.config.sync_flush_timeout_ms / 1000
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    promise.acknowledged_end(self._ends) >= end or self._stop_reason is not None
                ),
                limit,
            )
            ends, stop_reason = self._ends, self._stop_reason

        if promise.acknowledged_end(ends) < end:
            raise DeliveryUnknown(
                f"the flush did not finish: {stop_reason or f'{limit} s passed'}",
                status=promise.late_status(ends, end).value,
                append=appended._asdict(),
            )
        return appended

    def put(self, request: PutRequest) -> AppendedRows:
        """Append a batch of one queue and wait until the promise is kept."""
        return self.wait(self.append(request))

    def async_put(self) -> AsyncPut:
        """A service that puts single messages without waiting for each. Close it before the store."""
        return AsyncPut(self.append, self.wait, self.store.clock)

    def put_message(self, message: InnerMessage) -> PutResult:
        """Put one message and wait until the promise is kept. A refusal is a status, not an exception."""
        self._check_working()
        return self._messages.put((message,), is_batch=False)

    def put_messages(self, messages: Sequence[InnerMessage]) -> PutResult:
        """Put messages of one queue as consecutive records of one file. Otherwise as `put_message`."""
        self._check_working()
        return self._messages.put(tuple(messages), is_batch=True)

    def _await(self, appended: AppendedRows) -> AppendedRows:
        self._wake.set()
        return self.wait(appended)

    def prepare(self, message: InnerMessage) -> Half:
        """Store a half message, which readers see after its transaction commit. See `TransactionService.prepare`."""
        self._check_working()
        half = self.transactions.prepare(message)
        self._await(half.appended)
        self._advance()
        return half

    def commit(self, offset: int) -> AppendedRows:
        """Commit the transaction of the half message at `offset`. See `TransactionService.commit`."""
        self._check_working()
        return self._await(self.transactions.commit(offset))

    def rollback(self, offset: int) -> AppendedRows:
        """Roll the transaction of the half message at `offset` back. See `TransactionService.rollback`."""
        self._check_working()
        return self._await(self.transactions.rollback(offset))

    def lease(
        self,
        group: str,
        request: LeaseRequest,
        queues: Sequence[QueueKey],
        *,
        start: str = "earliest",
    ) -> LeaseAnswer | None:
        """Lease messages of some queues for a worker. See `LeaseService.lease`.

        Returns: None for a request that is older than the newest one of its session.
        """
        self._check_working()
        answer = self._await_decision(self.leases.lease(group, request, queues, start=start))
        return answer if isinstance(answer, LeaseAnswer) else None

    def settle(self, group: str, request: SettleRequest) -> SettleAnswer | None:
        """Settle leased messages of a worker. See `LeaseService.settle`. Returns: as `lease`."""
        self._check_working()
        answer = self._await_decision(self.leases.settle(group, request))
        return answer if isinstance(answer, SettleAnswer) else None

    def _await_decision(self, decision: LeaseDecision) -> object:
        """The answer of a decision, once everything that it rests on is durable."""
        self._await(decision.appended or AppendedRows.up_to(self.store.log.end))
        return decision.plan.answer

    def create_topic(self, name: str, queues: int) -> None:
        """Create a topic of `queues` queues, durable at return."""
        self._check_working()
        appended = self.store.topics.create(name, queues, [0])
        if appended is not None:
            self._await(appended)

    # --- reading ----------------------------------------------------------------------------------

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_bytes: int = 1 << 20,
        max_records: int = 10_000,
    ) -> FetchSlice:
        """Read messages of one queue from `offset` on. A store that stopped writing still serves reads.

        Returns: raw records of at most `max_bytes` and `max_records`. See `raymq.store.decode_records`.
        Raises: Corrupt if the message at `offset` is damaged.
        """
        self._check_threads()
        self._advance()
        return self.store.fetch_whole(
            topic, queue_id, offset, max_bytes=max_bytes, max_records=max_records
        )

    def deliver_due(self) -> int | None:
        """Deliver the delayed messages (delay level or timer) that are due. Callers: one thread.

        Returns: when to call again, in ms since 1970, or earlier after a put; None: no message waits.
        """
        self._check_working()
        log = self.store.log
        while True:
            self._advance()
            now_ms = log.clock.now_ms()
            ran = self._delays.run_once(now_ms)
            if ran.messages:
                self._wake.set()
                self.wait(AppendedRows.up_to(log.end))
            elif ran.next_due_ms is None or ran.next_due_ms > now_ms:
                return ran.next_due_ms

    def _dispatch(self) -> None:
        """Move the confirmed end, and build consume queues up to it."""
        log = self.store.log
        with self._dispatch_lock:
            # The mark moves under the lock: with two threads it could go back.
            log.note_confirmed(self._promise.confirmed_end(log.ends))
            while self.store.dispatched < log.confirmed:
                before = self.store.dispatched
                if self.store.dispatch(log.confirmed) == before:
                    break

    def _advance(self) -> None:
        """`_dispatch`, then index the dispatched records."""
        self._dispatch()
        with self._dispatch_lock:
            self.store.dispatch(self.store.log.confirmed)

    def await_index(self) -> None:
        """Index every confirmed message. Without this call keys are indexed in groups, and by later calls after a
        start."""
        self._advance()
        with self._dispatch_lock:
            while self.store.reput.index_behind:
                before = self.store.dispatched, self.store.index.indexed
                self.store.dispatch(self.store.log.confirmed)
                if (self.store.dispatched, self.store.index.indexed) == before:
                    break

    # --- the flush thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._run_once()
        except FlushFailed as error:
            self.store.log.health.poison(str(error))
            self._fail(str(error))
        except BaseException as error:
            self._fail(f"the flush thread ended: {error!r}", error)

    def _run_once(self) -> None:
        """Wait for an append or the next flush, then flush. Raises: FlushFailed."""
        timeout_ms = GROUP_COMMIT_WAIT_MS if self._sync_flush else self._flush_real_time.wait_ms()
        idle = not self._wake.wait(timeout_ms / 1000)
        self._wake.clear()
        if self._ended.is_set():
            return

        if idle:
            # The last put must not wait for another one to be dispatched. A failure is raised to readers.
            with contextlib.suppress(OSError, RayMQError):
                self._advance()

        log = self.store.log
        try:
            if self._sync_flush:
                synced = self._group_commit.flush(log.end)
            else:
                synced = self._flush_real_time.flush_if_due(log.end, woken=not idle)
        except FlushFailed:
            raise
        except (OSError, Unavailable):
            # A file could not be opened (descriptors, memory): no sync has failed.
            self._ended.wait(FLUSH_RETRY_S)
            self._wake.set()
            return

        if synced > log.synced:
            log.note_synced(synced)
            self._notify_synced()

    def _fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Stop all puts. Every waiting call and the next one raise the reason. Callers: any thread."""
        with self._changed:
            if self._stop_reason is None:
                self._stop_reason, self._stop_cause = reason, cause
            self._changed.notify_all()

    def _check_working(self) -> None:
        """Raises: Unavailable if a thread of the store ended or a sync failed. Nothing was stored then."""
        if self._stop_reason is not None:
            self._stop_raised = True
            fault = f"the store stopped writing: {self._stop_reason}"
            raise Unavailable(fault, field="store") from self._stop_cause

    def _check_threads(self) -> None:
        """Raises: Unavailable, once, if a thread of the store ended. A failed sync harms no reader."""
        if self._stop_cause is not None and not self._stop_raised:
            self._check_working()

    def _prepare_pages(self) -> None:
        log = self.store.log
        try:
            if self.store.config.warm_mapped_file:
                log.allocator.run(self._ended.is_set)
            else:
                ahead = ReadAhead(log.segments, lambda: log.end, files=log.files)
                ahead.run(self._ended.is_set, self._ended)
        except BaseException as error:
            self._fail(f"the thread that prepares pages ended: {error!r}", error)

    def _notify_synced(self) -> None:
        with self._changed:
            self._ends = self.store.log.ends
            self._changed.notify_all()

    @property
    def ends(self) -> Ends:
        """The ends of the log. Without a replica, `replicated` is the confirmed end."""
        return self.store.log.ends

    @property
    def syncs(self) -> int:
        """fdatasync calls of the flush service so far."""
        return self._syncer.syncs

    def _end_threads(self) -> None:
        self._ended.set()
        self._wake.set()
        self.store.log.allocator.wake()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """Release every file as a crash would, without a write or a sync."""
        self._end_threads()
        with self._changed:
            self._stop_reason = self._stop_reason or "the store was abandoned"
            self._changed.notify_all()
        self._syncer.close()
        self._delays.timers.abandon()
        self.store.abandon()

    def close(self) -> None:
        """Flush everything and close the store.

        Raises: Unavailable if a thread of the store ended and no call has raised that; OSError. The store is closed
        anyway.
        """
        self._end_threads()
        log = self.store.log
        if self._stop_reason is None:
            log.sync()
            self._notify_synced()
            log.note_confirmed(log.end)
        self._syncer.close()
        try:
            self._delays.timers.close(log.clock.now_ms())
        finally:
            self.store.close()
        self._check_threads()
