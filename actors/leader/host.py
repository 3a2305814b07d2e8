"""The CommitLog role of a leader: one process that owns a replica's log, answers clients and supervises its satellites.

A plain class; ray/actor_classes.py wraps it as a Ray actor. A server gets it as a `ShardBackend` (the Flight server is
cluster/transport/flight_server.py), so nothing here knows the network.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raymq.actors.api.call_arguments import check_known, check_whole
from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.actors.shared.control_block import COMMIT_REAL_TIME
from raymq.actors.shared.failures import ActiveFailures, FailureFile
from raymq.actors.shared.heartbeat import Heartbeat
from raymq.actors.shared.loops import restart_may_help, retrying
from raymq.actors.shared.maintenance import Maintenance
from raymq.actors.supervise.supervisor import Supervisor
from raymq.store.clock import Clock
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.config import StoreConfig
from raymq.store.errors import (
    Corrupt,
    DeliveryUnknown,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    require,
)
from raymq.store.files import Files
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.log.scrub import scrub_of_log
from raymq.store.message_store import MessageStore
from raymq.store.promise import Acks, Promise, awaits_commit, own_durable, promises
from raymq.store.put.put_path import CheckedPut
from raymq.store.requests import Append, FetchRequest, FetchSlice, PutRequest

from .admin_calls import AdminCalls
from .appender import AppendedPut, Appender
from .delays import Delays
from .dispatcher import Dispatcher
from .leader_metrics import as_status, read_leader
from .put_acks import PutAcks, PutCounters

logger = logging.getLogger("raymq.commit_log")

#: batches up to this are encoded in about the time that a process needs to wake up
ANNOUNCED_ROWS_MAX = 16
#: how long the record of an operation (a topic, an offset commit) waits for its promise
OPERATION_TIMEOUT_S = 60.0


class LeaderHost:
    """The leader of a shard: implements `shard_api.ShardBackend` over a MessageStore and a Supervisor.

    A put goes `put` -> Appender -> MessageStore -> PutAcks. Reads go to the Dispatcher, operations to AdminCalls.
    Threads: server threads call put, fetch and call. `_make_threads` lists the shard's own.
    """

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        identity: dict[str, Any],
        roles: tuple[str, ...],
        files: Files | None = None,
        clock: Clock | None = None,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        """Args: give_up: end this process soon, for this reason; its successor recovers. None: stay, read only."""
        self.identity_facts = identity
        self._root = root
        self.config = config
        self.clock = clock or Clock()
        self.counters = PutCounters()
        self.started_ms = self.clock.now_ms()
        #: why the shard has stopped writing; None: it has not
        self.failed: RayMQError | None = None
        #: operations that fail at present and are tried again
        self.failures = ActiveFailures()
        self._give_up = give_up
        #: the last append was refused by the disk or the kernel
        self._append_failed = False
        #: the put that is being appended is small
        self._small_put = False
        #: iterations of the ack loop since it was started last
        self._ack_iterations = 0
        #: shard -> endpoint, as far as this shard knows
        self.routes: dict[str, str] = {}
        mirrored = "replication" in roles
        rows = promises(config.flush, mirrored=mirrored)
        self._readable = rows["quorum"].readable
        self._stopping = False
        files = files or Files()
        self._replication_failure = FailureFile(root, files=files, clock=Clock())
        self.supervisor = self._make_supervisor(roles, files, mirrored=mirrored)
        self._heartbeat = Heartbeat(self.supervisor.control, files=files)
        try:
            self.store = self._open_store(identity, files)
        except BaseException:
            self._heartbeat.stop()
            self.supervisor.close()
            raise
        # A constructor that fails is called again later. It must find the store released.
        with contextlib.ExitStack() as undo:
            undo.callback(self.store.abandon)
            undo.callback(self.supervisor.close)
            undo.callback(self._heartbeat.stop)
            self._make_parts(rows, mirrored=mirrored)
            undo.callback(self._delays.abandon)
            undo.callback(self._end_threads)
            for thread in self._threads:
                thread.start()
            undo.pop_all()
        self._dispatcher.wake()

    # --- start ------------------------------------------------------------------------------------------------

    def _make_supervisor(
        self, roles: tuple[str, ...], files: Files, *, mirrored: bool
    ) -> Supervisor:
        config = self.config
        require(
            (COMMIT_REAL_TIME in roles) == config.transient_pool,
            "CommitRealTime runs with a transient pool and only with one",
            roles=roles,
        )
        eager = awaits_commit(config.flush, mirrored=mirrored)
        return Supervisor(
            self._root,
            roles,
            clock=self.clock,
            files=files,
            witness_sync=self._witness_sync,
            commit_least_bytes=0 if eager else config.commit_least_pages * PAGE_BYTES,
        )

    def _open_store(self, identity: dict[str, Any], files: Files) -> MessageStore:
        """Take over from the process before, recover, begin."""
        store = MessageStore.open(
            self._root,
            config=self.config,
            files=files,
            clock=self.clock,
            identity={
                "cluster_id": identity["cluster_id"],
                "shard": identity["shard"],
                "replica": identity.get("replica", 0),
            },
            on_locked=self._fence_old,
        )
        log = store.log
        try:
            if self._fenced.unfinished_sync is not None:
                log.rewrite(self._fenced.unfinished_sync[0])
            # The snapshot that a new log begins with; CommitRealTime is not granted yet.
            log.commit_pool()
            # Recovered bytes may be in the page cache only: they are synced before anything relies on them.
            log.sync()
            log.note_confirmed(self._readable(log.ends))
            self.supervisor.begin(log.end, log.synced, log.confirmed)
            log.pool.publish(self.supervisor.incarnation)
        except BaseException:
            store.abandon()
            raise
        return store

    def _fence_old(self) -> None:
        self._fenced = self.supervisor.fence_old()
        self._heartbeat.start()
        if self._fenced.failed_sync_errno:
            # The previous process died before it could report this.
            raise Corrupt(
                f"a sync of {self._root} failed (errno {self._fenced.failed_sync_errno}) before the restart; its "
                "unsynced bytes cannot be trusted: rebuild this replica",
                path=str(self._root),
                rule="poisoned",
            )

    def _make_parts(self, rows: dict[Acks, Promise], *, mirrored: bool) -> None:
        """Everything that works on the open store. The threads are not started yet."""
        store, config = self.store, self.config
        self._put_path = store.put_path
        self._delays = Delays(
            store,
            clock=self.clock,
            check_serving=self.check_serving,
            await_promise=self.await_promise,
            failures=self.failures,
        )
        self._dispatcher = Dispatcher(
            store,
            clock=self.clock,
            on_dispatched=self._delays.note_dispatch,
            failures=self.failures,
        )
        if mirrored and not store.log.same_boot:
            self._dispatcher.expected_end = store.log.end
        self.acks = PutAcks(
            store.log,
            self.supervisor,
            config,
            clock=self.clock,
            counters=self.counters,
            promises=rows,
            on_confirmed=self._dispatcher.wake,
            fail=self._fail,
        )
        self._appender = Appender(self._append, self.acks.hand_over)
        self._admin = AdminCalls(self)
        store.log.pool.on_full = self._await_pool_space
        store.log.on_appended = self._on_appended
        store.log.on_poisoned = self.supervisor.poison
        if mirrored:
            # Replication maps files, too, and this process does not see for how long.
            store.log.queue.spares = None
        self._ahead = store.log.allocate_ahead()
        # Damage that the scrub finds is logged and counted; the shard continues.
        self.scrub = scrub_of_log(store.log, on_fault=lambda fault: logger.error("%s", fault))
        self.maintenance = Maintenance(
            store.cleaner,
            clock=self.clock,
            interval_ms=config.clean_resource_interval_ms,
            sample=store.stats.sample,
            upkeep=store.upkeep.run_once,
        )
        self.compaction = CompactionService(
            store.compaction,
            interval_ms=config.compaction_interval_ms,
            now_ms=self.clock.monotonic_ms(),
        )
        self._threads: list[threading.Thread] = self._make_threads()

    def _make_threads(self) -> list[threading.Thread]:
        def stopping() -> bool:
            return self._stopping

        bodies: dict[str, Callable[[], None]] = {
            "append": lambda: self._appender.run(stopping),
            "acks": self._run_acks,
            "dispatch": self._dispatcher.run,
            "delays": self._delays.run,
            "allocate": lambda: self._ahead.run(stopping),
            "maintenance": lambda: self.maintenance.run(stopping),
        }
        bodies = {
            name: retrying(name, body, stopping=stopping, failures=self.failures, fail=self._fail)
            for name, body in bodies.items()
        }
        # The end of these does not stop the shard.
        bodies["compaction"] = lambda: self.compaction.run(stopping, self.clock)
        if self.config.scrub_bytes_per_s:
            bodies["scrub"] = lambda: self.scrub.run(stopping)
        return [
            threading.Thread(target=body, name=f"raymq-{name}", daemon=True)
            for name, body in bodies.items()
        ]

    # --- ShardBackend: put ----------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard and this process's incarnation."""
        return dict(self.identity_facts)

    def put(
        self, request: PutRequest, notify: Callable[[], None] | None = None, *, alone: bool = False
    ) -> PutTicket:
        """Append a batch; the ticket completes when its promise is kept, or fails with the error that refused it.

        `alone`: the producer seems to send nothing before the answer, so that this thread may wait for it.
        Raises: Rejected, Unavailable with nothing stored.
        """
        began = self.clock.monotonic()
        if self.failed is not None or self._stopping:
            self.check_serving()
        if not self.acks.waiting and request.batch.num_rows <= ANNOUNCED_ROWS_MAX:
            # No earlier put keeps the flusher awake: it wakes up while this one is encoded.
            self.supervisor.appends.announce()
        try:
            checked = self._put_path.check(request)
        except (Rejected, Unavailable):
            self.counters.rejected += 1
            raise
        ticket = PutTicket(notify, began)
        # From here on the batch may be stored: nothing is raised, errors go to the ticket.
        appended = self._appender.put(ticket, checked)
        if alone and appended:
            self.acks.await_sync(ticket, request.acks, self._appender)
        return ticket

    def _on_appended(self) -> None:
        """The flusher woken for a small put is awake: it syncs while the put is counted and handed over."""
        if self._small_put:
            self.acks.publish_early()

    def _append(self, checked: CheckedPut) -> Append:
        self._small_put = checked.prepared.count <= ANNOUNCED_ROWS_MAX
        end = self.store.log.end
        try:
            appended = self._put_path.append(checked)
        except DeliveryUnknown as error:
            self.counters.unknown += 1
            self._note_append_failure(error)
            raise
        except RayMQError as error:
            self.counters.rejected += 1
            if isinstance(error, (StorageFull, Unavailable)):
                self._note_append_failure(error)
            raise
        except OSError as error:
            self.counters.rejected += 1
            self._note_append_failure(error)
            raise Unavailable(f"the log could not be written: {error}", field="store") from error
        except Exception as error:
            if self.store.log.end != end:
                # The accounts and the log may differ now: only a recovery makes them equal.
                self._fail(Unavailable(f"append: {error!r}", field="store"))
            raise
        if self._append_failed:
            self._append_failed = False
            self.failures.clear("append")
        self.counters.puts += 1
        self.counters.rows += appended.count
        self.counters.bytes += checked.prepared.bytes_from(appended.duplicates)
        self.counters.duplicates += appended.duplicates
        return appended

    def _note_append_failure(self, error: Exception) -> None:
        self._append_failed = True
        self.failures.note("append", error)

    def _await_pool_space(self) -> None:
        self.check_serving()
        self.acks.await_pool_space()

    def _witness_sync(self) -> int:
        with self._heartbeat.blocking_call():
            return self.store.log.sync()

    # --- ack loop and failure -----------------------------------------------------------------------------------

    def _run_acks(self) -> None:
        self._ack_iterations = 0
        try:
            self.acks.run(self._begin_ack_iteration)
        finally:
            self._heartbeat.loop_ended()

    def _begin_ack_iteration(self) -> bool:
        """Returns: whether the loop is to end. Raises: Unavailable, when the log takes nothing more."""
        self._heartbeat.note_iteration()
        self._ack_iterations += 1
        if self._ack_iterations > 1 and self.failures:
            self.failures.clear("acks")
        poisoned = self.store.log.poisoned
        if poisoned is not None and self.failed is None and not self._stopping:
            # A failed append that could not be undone, for example: the next start cuts it off.
            raise Unavailable(poisoned, field="store", status="poisoned")
        return self._stopping

    def _fail(self, error: RayMQError) -> None:
        """A part of the process is dead: the shard stops writing rather than continue without it.

        Where a restart may help the process ends, and Ray starts the next one.
        """
        if self._stopping or self.failed is not None:
            return
        logger.error("the shard stops writing: %s", error)
        self.failed = error
        try:
            self._finish_remaining()
        finally:
            self._dispatcher.wake_readers()
            sync_failed = self.store.log.sync_failed or self.supervisor.poisoned is not None
            if self._give_up is not None and restart_may_help(error, sync_failed=sync_failed):
                self._give_up(str(error))

    def _finish_remaining(self) -> None:
        """Answer the puts that no thread will answer any more: not stored, or unknown."""
        self._appender.end()
        self.acks.end()

    def check_serving(self) -> None:
        """Raises: Unavailable, when nothing more is written."""
        if self.failed is not None:
            raise Unavailable(
                f"the shard stopped writing: {self.failed}",
                field="shard",
                status="SERVICE_NOT_AVAILABLE",
            )
        if self._stopping:
            raise Unavailable(
                "the shard is stopping", field="shard", status="SERVICE_NOT_AVAILABLE"
            )

    # --- ShardBackend: the rest -----------------------------------------------------------------------------

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `Dispatcher.fetch`. Raises: Rejected for a topic or queue that does not exist."""
        self.counters.fetches += 1
        topics = self.store.state.topics
        info = topics[check_known(request.topic, topics)]
        for queue_id in request.offsets:
            if not 0 <= queue_id < info.queues:
                check_whole("offsets", queue_id, 0, info.queues - 1)
        return self._dispatcher.fetch(request)

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `AdminCalls.call`."""
        return self._admin.call(op, args)

    def await_dispatch(self) -> None:
        """Wait until readers see what is confirmed now. Raises: Unavailable, when that takes too long."""
        self._dispatcher.await_confirmed()

    def await_promise(self, appended: Append) -> None:
        """Wait until the promise of an operation's record is kept. Raises: DeliveryUnknown."""
        ticket = PutTicket()
        notify_all_done(self.acks.hand_over([AppendedPut(ticket, appended, "quorum")]))
        ticket.wait(OPERATION_TIMEOUT_S)

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """A leader takes no replication stream."""
        raise Rejected("this replica is the leader", field="mode", limit="follower")

    # --- status -------------------------------------------------------------------------------------------------

    @property
    def waiting_puts(self) -> int:
        """Puts that are not answered yet."""
        return self._appender.waiting + self.acks.waiting

    @property
    def writable(self) -> bool:
        """Whether puts are taken now, judged by the last one."""
        return self.state == "RUNNING" and not self._append_failed

    @property
    def state(self) -> str:
        """RUNNING, or READ_ONLY while every put is refused."""
        refusing = self.failed or self.store.log.poisoned or not self.store.flags.writable
        return "READ_ONLY" if refusing else "RUNNING"

    @property
    def cause(self) -> str | None:
        """Why the shard does not write, or which operations fail at present; None: none."""
        if self.failed is not None:
            return str(self.failed)
        flags = self.store.flags
        reasons = [
            self.store.log.poisoned or "",
            *(f"{part}: {cause}" for part, cause in self._active_failures().items()),
            "" if flags.writable else f"puts are refused: {', '.join(flags.names())}",
        ]
        return "; ".join(filter(None, reasons)) or None

    def _active_failures(self) -> dict[str, str]:
        found = self.failures.as_status()
        log = self.store.log
        if self._ahead.failed is not None:
            found["allocate"] = str(self._ahead.failed)
        # Without a replica both ends move together, and only Replication writes the file.
        if log.confirmed < own_durable(self.config.flush, log.ends):
            cause = self._replication_failure.read()
            if cause is not None:
                found["replication"] = cause
        return found

    def status(self) -> dict[str, Any]:
        """Ends, counters, metrics and satellites, for status displays and benchmarks."""
        store, log = self.store, self.store.log
        return {
            **self.identity_facts,
            "mode": "leader",
            "state": self.state,
            "writable": self.writable,
            "error": self.cause,
            "failures": self._active_failures(),
            "min_offset": log.start,
            "transient_pool": self.config.transient_pool,
            "appended": log.end,
            "committed": log.committed,
            "synced": log.synced,
            "confirmed": log.confirmed,
            "dispatched": store.dispatched,
            "prewritten_bytes": self._ahead.ready,
            "recovery": None
            if log.recovered is None
            else {"row": log.recovered.row, "end": log.recovered.end},
            "counters": vars(self.counters),
            "scrub": self.scrub.status(),
            "damage": [{"message": str(error), **error.fields} for error in store.damage],
            "compaction": {"error": self.compaction.failed},
            "metrics": as_status(read_leader(self)),
            "flags": store.flags.names(),
            "clean": {**store.cleaner.as_status(), "error": self.maintenance.failed},
            "upkeep": {"error": store.upkeep.failed},
            "store_stats": store.stats.as_status(),
            "roles": self.supervisor.describe(),
        }

    # --- stop ---------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: no new puts, waiting ones answered, everything synced, satellites stopped.

        Raises: Unavailable when that failed; everything is released all the same.
        """
        deadline = self.clock.monotonic_ms() + int(timeout_s * 1000)
        while (
            (self._appender.busy or self.acks.waiting)
            and self.failed is None
            and self.clock.monotonic_ms() < deadline
        ):
            self.clock.sleep_ms(5)
        self._end_threads()
        self._heartbeat.stop()
        self.supervisor.close()
        try:
            if self.failed is None:
                log = self.store.log
                log.commit_pool()
                log.sync()
                log.note_confirmed(self._readable(log.ends))
            self._delays.close()
            self.store.close()
        except (OSError, RayMQError) as error:
            # As a crash leaves it: the next start finds the pool and recovers.
            self._delays.abandon()
            self.store.abandon()
            raise Unavailable(
                f"the shard's last writes before its stop failed: {error}; the next start completes them",
                field="store",
            ) from error

    def _end_threads(self) -> None:
        """Stop the service loops that were started, and answer the puts that none of them will answer."""
        self._stopping = True
        self._appender.wake()
        self._ahead.wake()
        self.scrub.wake()
        self.compaction.wake()
        self.maintenance.wake()
        self._dispatcher.stop()
        self._delays.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)
        self._finish_remaining()
