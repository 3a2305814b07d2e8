"""Base class of the leader's and the follower's CommitLog process: start, ack loop, failure and stop."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from raymq.actors.shared.control_block import COMMIT_REAL_TIME
from raymq.actors.shared.failures import ActiveFailures
from raymq.actors.shared.heartbeat import Heartbeat
from raymq.actors.shared.maintenance import Maintenance
from raymq.replication.wire import ReplicaProcess
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, Corrupt, RayMQError, StorageFull, Unavailable, require
from raymq.store.base.files import Files, SyncFailed
from raymq.store.base.status import PutStatus
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.clean import CleanService
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.scrub import scrub_of_log

from .dispatcher import Dispatcher
from .elections import Elections
from .supervisor import Supervisor

logger = logging.getLogger("raymq.commit_log")

#: from a refused operation (no descriptor, no memory, no space, a disk that does not answer) to the next try
RETRY_S = 0.1

Body = Callable[[], None]


class ReplicaHost(ABC):
    """The process that owns the log of one replica and supervises its satellites.

    Every replica is a whole store. A subclass adds the parts of a leader or of a follower, and their service loops.
    """

    #: "leader" or "follower"
    mode: str
    #: how error messages call this replica
    display_name: str
    #: another replica writes the log
    follows: bool
    # Made by `_open` and `_make_parts`:
    store: MessageStore
    log: CommitLog
    elections: Elections
    _dispatcher: Dispatcher
    maintenance: Maintenance
    compaction: CompactionService

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        identity: dict[str, Any],
        roles: tuple[str, ...],
        files: Files | None = None,
        clock: Clock | None = None,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        """Args: `end_process`: ends this process soon, for a reason. Its successor recovers. None: stay, read only."""
        require(
            (COMMIT_REAL_TIME in roles) == config.transient_pool,
            "CommitRealTime runs with a transient pool and only with one",
            roles=roles,
        )

        self.identity_facts = identity
        self._root = root
        self._files = files or Files()
        self.config = config
        self.clock = clock or Clock()
        self.started_ms = self.clock.now_ms()

        #: why this replica has stopped writing; None: it has not
        self.stop_error: RayMQError | None = None
        #: operations that fail at present and are tried again
        self.failures = ActiveFailures()
        #: shard -> endpoint of its leader, as far as this replica knows
        self.routes: dict[str, str] = {}
        self._end_process = end_process
        self._stopping = False

        self.supervisor = Supervisor(
            root,
            roles,
            clock=self.clock,
            files=self._files,
            witness_sync=self._witness_sync,
            commit_least_bytes=self._commit_least_bytes(roles),
        )
        self._heartbeat = Heartbeat(self.supervisor.control, files=self._files)

        try:
            self._open()
        except BaseException:
            self._heartbeat.stop()
            self.supervisor.close()
            raise

        # A constructor that fails is called again later. It must find the store released.
        with contextlib.ExitStack() as undo:
            undo.callback(self._abandon)
            undo.callback(self.supervisor.close)
            undo.callback(self._heartbeat.stop)
            self._rewrite_unfinished_sync()
            self._elect()
            # Recovered bytes may be in the page cache only: they are synced before anything relies on them.
            self._sync_log()
            self._begin_grants()
            self._make_parts(undo)
            self._start_threads(undo)
            undo.pop_all()

    # --- for a subclass to implement --------------------------------------------------------------

    @abstractmethod
    def _elect(self) -> None:
        """Make `elections` of the recovered log. A replica that need not wait for others begins to lead."""

    @abstractmethod
    def _make_role_parts(self, undo: contextlib.ExitStack) -> None:
        """Create the parts that only this kind of replica has. The threads are not started yet."""

    def _make_cleaner(self) -> CleanService:
        """What deletes old files."""
        return self.store.clean_service

    def _on_dispatched(self) -> None:
        """Messages were dispatched. It must not block or raise."""
        return

    def _retried_loops(self) -> dict[str, Body]:
        """The service loops that start again after a transient error. Any other error stops the replica."""
        return {
            "dispatch": self._dispatcher.run,
            "allocate": lambda: self.log.allocator.run(self._is_stopping),
            "maintenance": lambda: self.maintenance.run(self._is_stopping),
        }

    def _other_loops(self) -> dict[str, Body]:
        """The service loops whose end does not stop the replica."""
        return {"compaction": lambda: self.compaction.run(self._is_stopping, self.clock)}

    @abstractmethod
    def _ack_step(self) -> None:
        """Wait for the satellites, supervise them, and note their progress. Raises: Unavailable, when poisoned."""

    def _wake_threads(self) -> None:
        """Let every service loop see that the replica is stopping."""
        self.log.allocator.wake()
        self.compaction.wake()
        self.maintenance.wake()
        self._dispatcher.stop()

    def _commit_least_bytes(self, roles: tuple[str, ...]) -> int:
        """CommitRealTime is woken for this many uncommitted bytes."""
        return 0

    def _answer_waiting(self) -> None:
        """Answer the requests that no thread will answer any more."""
        return

    # --- start ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lock and recover the store. Raises: any error, with nothing left open."""
        self.store = MessageStore.open(
            self._root,
            config=self.config,
            files=self._files,
            clock=self.clock,
            identity=self._store_identity(),
            on_locked=self._fence_old,
            follows=self.follows,
        )
        self.log = self.store.log

    def _abandon(self) -> None:
        """Release the store as a crash would."""
        self.store.abandon()

    def _make_parts(self, undo: contextlib.ExitStack) -> None:
        """Create the parts that work on the open store."""
        store, config = self.store, self.config
        self._dispatcher = Dispatcher(
            store, clock=self.clock, on_dispatched=self._on_dispatched, failures=self.failures
        )
        self.maintenance = Maintenance(
            self._make_cleaner(),
            clock=self.clock,
            interval_ms=config.clean_resource_interval_ms,
            sample=store.stats.sample,
            upkeep=store.checkpoint_service.run_once,
        )
        self.compaction = CompactionService(
            store.compaction,
            interval_ms=config.compaction_interval_ms,
            now_ms=self.clock.monotonic_ms(),
        )
        self._make_role_parts(undo)
        self._dispatcher.wake()

    def _store_identity(self) -> dict[str, Any]:
        """Whose store it is: another replica must not open it."""
        facts = self.identity_facts
        return {
            "cluster_id": facts["cluster_id"],
            "shard": facts["shard"],
            "replica": facts.get("replica", 0),
        }

    def _make_elections(self) -> Elections:
        """The elections of this replica.

        Replica 0 alone leads. It needs no votes: what is confirmed is durable in its own log. The others wait for it.
        """
        facts = self.identity_facts
        me = ReplicaProcess(int(facts.get("replica", 0)), int(facts.get("incarnation", 0)))
        members = sorted({0, me.id})
        return Elections(self.log, me, members=members, candidates=(0,), clock=self.clock)

    def _fence_old(self) -> None:
        """Take over from the process before. Callers: with the store's lock held, before recovery."""
        self._fenced = self.supervisor.fence_old()
        self._heartbeat.start()
        if self._fenced.failed_sync_errno:
            # The previous process died before it could report this.
            raise Corrupt(
                f"a sync of {self._root} failed (errno {self._fenced.failed_sync_errno}) before the restart; its "
                "unsynced bytes cannot be trusted; see docs/operating/runbook.md, 'An fsync failed'",
                path=str(self._root),
                rule="poisoned",
            )

    def _rewrite_unfinished_sync(self) -> None:
        """Make the pages of a sync that died with its process dirty again: the next sync covers them."""
        if self._fenced.unfinished_sync is not None:
            self.log.rewrite(self._fenced.unfinished_sync[0])

    def _sync_log(self) -> None:
        """Sync the bytes in the pool and the page cache. Callers: while no satellite is granted."""
        self.log.commit_pool()
        self.log.sync()

    def _begin_grants(self) -> None:
        self._begin_satellites()
        self.log.on_poisoned = self.supervisor.poison

    def _begin_satellites(self) -> None:
        """Let the satellites count from the log's ends. Callers: while no satellite is granted."""
        self.supervisor.begin(
            appended=self.log.end,
            synced=self.log.synced,
            confirmed=self.log.confirmed,
            epoch=self.log.last_epoch,
        )

    def _start_threads(self, undo: contextlib.ExitStack) -> None:
        # Damage that the scrub finds is logged and counted. The replica continues.
        self.scrub = scrub_of_log(self.log, on_fault=lambda fault: logger.error("%s", fault))
        self._threads = self._make_threads()
        undo.callback(self._end_threads)
        for thread in self._threads:
            thread.start()

    def _make_threads(self) -> list[threading.Thread]:
        retried = {"acks": self._run_acks, **self._retried_loops()}
        bodies: dict[str, Body] = {
            name: partial(self._run_retried, name, body) for name, body in retried.items()
        }
        bodies |= self._other_loops()
        if self.config.scrub_bytes_per_s:
            bodies["scrub"] = lambda: self.scrub.run(self._is_stopping)
        return [
            threading.Thread(target=body, name=f"raymq-{name}", daemon=True)
            for name, body in bodies.items()
        ]

    def _is_stopping(self) -> bool:
        return self._stopping

    def _run_retried(self, name: str, body: Body) -> None:
        """Run a service loop, again after a transient error. Any other error stops the replica.

        `body` clears the failure from `failures` once it works again.
        """
        pause = threading.Event()
        while True:
            try:
                body()
                return
            except SyncFailed as error:
                self.fail(Unavailable(f"{name}: {error}", field="store"))
                return
            except (OSError, StorageFull) as error:
                self.failures.note(name, error)
            except RayMQError as error:
                self.fail(error)
                return
            except Exception as error:
                logger.exception("service loop died")
                self.fail(Unavailable(f"{name}: {error!r}", field="store"))
                return

            pause.wait(RETRY_S)
            if self._stopping:
                return

    # --- ack loop and failure ---------------------------------------------------------------------

    def _run_acks(self) -> None:
        repeated = False
        try:
            while not self._stopping:
                self._heartbeat.note_iteration()
                if repeated and self.failures:
                    self.failures.clear("acks")
                repeated = True
                self._ack_step()
        finally:
            self._heartbeat.loop_ended()

    def _check_poisoned(self) -> None:
        """Raises: Unavailable, when the log takes nothing more."""
        if self.supervisor.poisoned is not None:
            self.log.poison(self.supervisor.poisoned)
        if self.log.poisoned is not None:
            # If no sync has failed, the next start cuts off a failed append that could not be undone.
            raise Unavailable(
                self.log.poisoned, field="store", status=PutStatus.SERVICE_NOT_AVAILABLE.value
            )

    def _witness_sync(self) -> int:
        with self._heartbeat.blocking_call():
            return self.log.sync()

    def fail(self, error: RayMQError) -> None:
        """A part of the process is dead: the replica stops writing, rather than continue without it.

        If a restart may help, the process ends and Ray starts the next one. After a failed sync, for corrupt bytes
        or for a bug a restart would fail in the same way. Then the replica stays up, serves reads and reports why.
        """
        if self._stopping or self.stop_error is not None:
            return
        logger.error("the %s stops writing: %s", self.display_name, error)
        self.stop_error = error
        try:
            self._answer_waiting()
        finally:
            lasting = (
                self.log.sync_failed
                or self.supervisor.poisoned is not None
                or isinstance(error, (Corrupt, Bug))
            )
            if self._end_process is not None and not lasting:
                self._end_process(str(error))

    def check_serving(self) -> None:
        """Raises: Unavailable, when nothing more is written."""
        if self.stop_error is None and not self._stopping:
            return
        cause = f"stopped writing: {self.stop_error}" if self.stop_error else "is stopping"
        raise Unavailable(
            f"the {self.display_name} {cause}",
            field="shard",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
        )

    # --- status -----------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard and this process's incarnation."""
        return dict(self.identity_facts)

    @property
    def state(self) -> str:
        """RUNNING, or READ_ONLY while every write is refused."""
        return "READ_ONLY" if self.stop_error or self.log.poisoned else "RUNNING"

    @property
    def cause(self) -> str | None:
        """Why nothing is written, or which operations fail at present; None: none."""
        return str(self.stop_error) if self.stop_error else "; ".join(self._causes()) or None

    def _causes(self) -> list[str]:
        failures = [f"{part}: {cause}" for part, cause in self._active_failures().items()]
        return [self.log.poisoned, *failures] if self.log.poisoned else failures

    def _active_failures(self) -> dict[str, str]:
        return self.failures.as_status()

    def status(self) -> dict[str, Any]:
        """Ends and satellites, for status displays."""
        log, recovered = self.log, self.log.recovered
        return {
            **self.identity_facts,
            "mode": self.mode,
            "state": self.state,
            "error": self.cause,
            "failures": self._active_failures(),
            "appended": log.end,
            "synced": log.synced,
            "confirmed": log.confirmed,
            "epoch": self.elections.epoch,
            "recovery": None
            if recovered is None
            else {"row": recovered.row.name, "end": recovered.end},
            "scrub": self.scrub.status(),
            "supervisor": self.supervisor.describe(),
        }

    # --- stop -------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End the threads and the satellites. The store is still open."""
        self._end_threads()
        self._heartbeat.stop()
        self.supervisor.close()

    def _end_threads(self) -> None:
        """Stop the service loops that were started, and answer the requests that none of them will answer."""
        self._stopping = True
        self.scrub.wake()
        self._wake_threads()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)
        self._answer_waiting()
