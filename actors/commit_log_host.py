"""The CommitLog role: one process that owns a replica's log, answers clients, and minds its satellites.

A plain class; `shells.py` wraps it as a Ray actor. It serves its store through a server it is given (the Flight
server lives in cluster/), so nothing here knows the wire.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raymq.store.clock import Clock
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.config import StoreConfig
from raymq.store.errors import (
    Corrupt,
    DeliveryUnknown,
    RayMQError,
    Rejected,
    Unavailable,
    require,
)
from raymq.store.files import Files
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.log.scrub import Scrub
from raymq.store.message_store import MessageStore
from raymq.store.put.put_path import CheckedPut
from raymq.store.requests import Append, FetchRequest, FetchSlice, PutRequest

from .admin_calls import AdminCalls
from .appender import Appender, Made
from .control_block import COMMIT_REAL_TIME
from .delays import Delays
from .dispatcher import Dispatcher
from .housekeeper import Housekeeper
from .put_acks import Counters, PutAcks
from .readings import as_status, read_leader
from .shard_api import PutTicket, tell_all
from .supervisor import Supervisor

log = logging.getLogger("raymq.commit_log")

#: batches up to this are encoded in about the time that a process needs to wake up
ANNOUNCED_ROWS_MAX = 16


class LeaderHost:
    """The leader of a shard: implements `shard_api.ShardBackend` over a MessageStore and a Supervisor.

    A put goes `put` -> Appender -> MessageStore -> PutAcks; reads are the Dispatcher's, administration AdminCalls'.
    Threads: server threads call put, fetch and call; appends of large batches, acks, dispatch, delayed deliveries,
    allocation ahead and housekeeping have a thread each.
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
    ) -> None:
        self.identity_facts = identity
        self._root = root
        self.config = config
        self.clock = clock or Clock()
        self.counters = Counters()
        self.started_ms = self.clock.now_ms()
        self.failed: RayMQError | None = None
        #: shard -> endpoint, as far as this shard was told
        self.routes: dict[str, str] = {}
        self._sync = config.flush == "sync"
        self._mirror = "replication" in roles
        self._stopping = False
        files = files or Files()
        require(
            (COMMIT_REAL_TIME in roles) == config.transient_pool,
            "the transient pool has its CommitRealTime, and only that has one",
            roles=roles,
        )
        self.supervisor = Supervisor(
            root,
            roles,
            clock=self.clock,
            files=files,
            witness_sync=self._witness_sync,
            commit_least_bytes=config.commit_least_pages * PAGE_BYTES,
        )
        try:
            self.store = self._open_store(identity, files)
        except BaseException:
            self.supervisor.close()
            raise
        self._put_path = self.store.put_path
        self._delays = Delays(
            self.store,
            clock=self.clock,
            check_serving=self.check_serving,
            await_promise=self.await_promise,
        )
        self._dispatcher = Dispatcher(self.store, clock=self.clock, on_dispatched=self._delays.note)
        self.acks = PutAcks(
            self.store.log,
            self.supervisor,
            config,
            clock=self.clock,
            counters=self.counters,
            mirror=self._mirror,
            on_confirmed=self._dispatcher.wake,
            fail=self._fail,
        )
        self.store.log.pool.on_full = self._await_room
        #: the put that is appended just now is small
        self._small = False
        self.store.log.on_appended = self._on_appended
        self._appender = Appender(self._append, self.acks.hand_over)
        self._admin = AdminCalls(self)
        if self._mirror:
            # The replication process maps files, too, and nobody here sees for how long.
            self.store.log.queue.spares = None
        self._ahead = self.store.log.allocate_ahead()
        self.scrub = self._make_scrub(files)
        self.housekeeper = Housekeeper(
            self.store.cleaner,
            clock=self.clock,
            interval_ms=config.clean_resource_interval_ms,
            sample=self.store.stats.sample,
            upkeep=self.store.upkeep.run_once,
        )
        self.compaction = CompactionService(
            self.store.compaction,
            interval_ms=config.compaction_interval_ms,
            now_ms=self.clock.monotonic_ms(),
        )
        self._threads = self._make_threads()
        for thread in self._threads:
            thread.start()
        self._dispatcher.wake()

    def _make_threads(self) -> list[threading.Thread]:
        def stopping() -> bool:
            return self._stopping

        bodies: dict[str, Callable[[], None]] = {
            "append": lambda: self._appender.run(stopping),
            "acks": lambda: self.acks.run(stopping),
            "dispatch": self._dispatcher.run,
            "delays": self._delays.run,
            "allocate": lambda: self._ahead.run(stopping),
            "house": lambda: self.housekeeper.run(stopping),
        }
        bodies = {name: self._guard(name, body) for name, body in bodies.items()}
        # Not guarded: a shard serves on without these.
        bodies["compaction"] = lambda: self.compaction.run(stopping, self.clock)
        if self.config.scrub_bytes_per_s:
            bodies["scrub"] = lambda: self.scrub.run(stopping)
        return [
            threading.Thread(target=body, name=f"raymq-{name}", daemon=True)
            for name, body in bodies.items()
        ]

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
        log_ = store.log
        try:
            if self._fenced.unfinished_sync is not None:
                log_.rewrite(self._fenced.unfinished_sync[0])
            # The snapshot that a new log begins with; nobody else commits yet.
            log_.commit_pool()
            # What recovery found may still sit in the page cache only: prove it before anybody relies on it.
            log_.sync()
            if not self._mirror:
                log_.note_confirmed(log_.end)
            self.supervisor.begin(log_.end, log_.synced, log_.confirmed)
            log_.pool.publish(self.supervisor.incarnation)
        except BaseException:
            store.abandon()
            raise
        return store

    def _make_scrub(self, files: Files) -> Scrub:
        """The walk that reads what is confirmed against the chain's CRCs; what it finds is told, nothing stops."""
        log_, config = self.store.log, self.config
        return Scrub(
            self._root,
            config.segment_size_bytes,
            start=lambda: log_.start,
            limit=lambda: min(log_.synced, log_.confirmed),
            files=files,
            clock=self.clock,
            bytes_per_s=config.scrub_bytes_per_s,
            pause_ms=config.scrub_pause_ms,
            on_fault=lambda fault: log.error("%s", fault),
        )

    # --- ShardBackend: put ----------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard and this process's incarnation."""
        return dict(self.identity_facts)

    def put(
        self, request: PutRequest, notify: Callable[[], None] | None = None, *, alone: bool = False
    ) -> PutTicket:
        """Append a batch; the ticket completes when its promise is kept, or fails with what refused it.

        `alone`: the producer seems to send nothing before the answer, so that this thread may wait for it.
        Raises: Rejected, Unavailable with nothing stored.
        """
        began = self.clock.monotonic()
        if self.failed is not None or self._stopping:
            self.check_serving()
        if not self.acks.waiting and request.batch.num_rows <= ANNOUNCED_ROWS_MAX:
            # Nobody keeps the flusher awake: it wakes up while this is encoded.
            self.supervisor.announce_append()
        try:
            checked = self._put_path.check(request)
        except (Rejected, Unavailable):
            self.counters.rejected += 1
            raise
        ticket = PutTicket(notify, began)
        # From here on it may be stored: nothing is raised, the ticket tells.
        appended = self._appender.put(ticket, checked)
        if alone and appended and self._sync and not self._mirror:
            self.acks.await_sync(ticket, self._appender)
        return ticket

    def _on_appended(self) -> None:
        """The flusher that was told of a small put is awake: it syncs while the put is counted and handed over."""
        if self._small and self._sync:
            self.acks.publish_early()

    def _append(self, checked: CheckedPut) -> Append:
        self._small = checked.prepared.count <= ANNOUNCED_ROWS_MAX
        try:
            appended = self._put_path.append(checked)
        except DeliveryUnknown:
            self.counters.unknown += 1
            raise
        except RayMQError:
            self.counters.rejected += 1
            raise
        except OSError as error:
            self.counters.rejected += 1
            raise Unavailable(f"the log could not be written: {error}", field="store") from error
        self.counters.puts += 1
        self.counters.rows += appended.count
        self.counters.bytes += checked.prepared.bytes_from(appended.duplicates)
        self.counters.duplicates += appended.duplicates
        return appended

    def _fence_old(self) -> None:
        self._fenced = self.supervisor.fence_old()
        if self._fenced.failed_sync_errno:
            # The process before this one died before it could say so.
            raise Corrupt(
                f"a sync of {self._root} failed (errno {self._fenced.failed_sync_errno}) before the restart; its "
                "unsynced bytes cannot be trusted: rebuild this replica",
                path=str(self._root),
                rule="poisoned",
            )

    def _await_room(self) -> None:
        self.check_serving()
        self.acks.await_room()

    def _witness_sync(self) -> int:
        return self.store.log.sync()

    # --- service loops ----------------------------------------------------------------------------------------

    def _guard(self, name: str, body: Callable[[], None]) -> Callable[[], None]:
        """A service loop that dies takes the process's service with it: nothing limps on half alive."""

        def run() -> None:
            try:
                body()
            except RayMQError as error:
                self._fail(error)
            except OSError as error:
                self._fail(Unavailable(f"{name}: {error}", field="store"))
            except Exception as error:
                log.exception("service loop died")
                self._fail(Unavailable(f"{name}: {error!r}", field="store"))

        return run

    def _fail(self, error: RayMQError) -> None:
        if self._stopping:
            return
        log.error("the shard stops writing: %s", error)
        self.failed = error
        self._settle_left()
        self._dispatcher.tell_readers()

    def _settle_left(self) -> None:
        """Answer what nobody will answer any more: not stored, or not known."""
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
        """See `Dispatcher.fetch`."""
        self.counters.fetches += 1
        return self._dispatcher.fetch(request)

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `AdminCalls.call`."""
        return self._admin.call(op, args)

    def await_dispatch(self) -> None:
        """Wait until readers see what is confirmed now; not for long."""
        self._dispatcher.await_confirmed()

    def await_promise(self, appended: Append) -> None:
        """Wait until the promise of a record of our own is kept. Raises: DeliveryUnknown."""
        ticket = PutTicket()
        tell_all(self.acks.hand_over([Made(ticket, appended, False)]))
        ticket.wait(60.0)

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """A leader takes no replica stream."""
        raise Rejected("this replica is the leader", field="mode", limit="follower")

    # --- status and shutdown --------------------------------------------------------------------------------

    @property
    def waiting_puts(self) -> int:
        """Puts that are not answered yet."""
        return self._appender.waiting + len(self.acks.waiting)

    def status(self) -> dict[str, Any]:
        """Positions, counters, metrics and satellites, for people and benchmarks."""
        log_ = self.store.log
        return {
            **self.identity_facts,
            "mode": "leader",
            "state": "RUNNING" if self.failed is None else "READ_ONLY",
            "error": None if self.failed is None else str(self.failed),
            "min_offset": log_.start,
            "transient_pool": self.config.transient_pool,
            "appended": log_.end,
            "committed": log_.committed,
            "synced": log_.synced,
            "confirmed": log_.confirmed,
            "dispatched": self.store.dispatched,
            "prewritten_bytes": self._ahead.ready,
            "recovery": None
            if log_.recovered is None
            else {"row": log_.recovered.row, "end": log_.recovered.end},
            "counters": vars(self.counters),
            "scrub": self.scrub.status(),
            "compaction": {"error": self.compaction.failed},
            "metrics": as_status(read_leader(self)),
            "flags": self.store.flags.names(),
            "clean": {**self.store.cleaner.as_status(), "error": self.housekeeper.failed},
            "upkeep": {"error": self.store.upkeep.failed},
            "store_stats": self.store.stats.as_status(),
            "roles": self.supervisor.describe(),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: no new puts, waiting ones answered, everything synced, satellites told to end.

        Raises: Unavailable when that failed; everything is let go of all the same.
        """
        deadline = self.clock.monotonic_ms() + int(timeout_s * 1000)
        while (
            (self._appender.busy or self.acks.waiting)
            and self.failed is None
            and self.clock.monotonic_ms() < deadline
        ):
            self.clock.sleep_ms(5)
        self._stopping = True
        self._appender.wake()
        self._ahead.wake()
        self.scrub.wake()
        self.compaction.wake()
        self.housekeeper.wake()
        self._dispatcher.stop()
        self._delays.stop()
        for thread in self._threads:
            thread.join(2.0)
        self._settle_left()
        self.supervisor.close()
        try:
            if not self._mirror and self.failed is None:
                self.store.log.commit_pool()
                self.store.log.sync()
                self.store.log.note_confirmed(self.store.log.end)
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
