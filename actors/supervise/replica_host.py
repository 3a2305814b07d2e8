"""The CommitLog process of a replica: its start, its service loops, and its stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.shard_api import Frames, PutTicket, SendFrame
from raymq.actors.shared.control_block import SATELLITE_OPTIONS
from raymq.actors.shared.failures import ActiveFailures
from raymq.actors.shared.heartbeat import Heartbeat
from raymq.actors.shared.maintenance import Maintenance
from raymq.store.base.errors import Corrupt, RayMQError, StoreDamaged
from raymq.store.base.running_flags import BLOCKS_PUTS, FENCED
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.config.promise import awaits_commit
from raymq.store.config.running_config import RunningConfig
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.log.scrub import Scrub, scrub_of_log, scrub_times_ms
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from raymq.store.state.topics import QueueKey

from .addresses import ClusterAddresses
from .dispatcher import Dispatcher
from .doors import Doors
from .election_loop import ElectionLoop, make_elections
from .elections import Elections
from .led_epoch import LedEpoch
from .log_copier import LogCopier
from .log_guard import LogGuard
from .log_repair import LogRepair
from .peers import Peers
from .replica_identity import ReplicaIdentity
from .replica_operations import ReplicaScope, call_replica
from .replica_options import ReplicaOptions
from .replica_parts import ReplicaParts
from .replica_status import ReplicaStatus
from .role import Body, ReplicaRole
from .roles import LeaderStreams, RoleClasses, Roles
from .service_threads import join_all, make_threads, run_retried
from .serving import Serving
from .supervisor import Supervisor

logger = logging.getLogger("raymq.commit_log")

#: how long the end of the process waits for each of its threads
END_S = 2.0


class ReplicaHost:
    """The process that owns the log of one replica and supervises its satellites: a `shard_api.ShardBackend`.

    Every replica is a whole store, and may lead or follow. `roles` has what it does at present. The elections decide
    it, and the thread of the ack loop changes it.
    """

    # Made by `_open` and `_make_parts`:
    store: MessageStore
    log: CommitLog
    elections: Elections
    #: the epoch that this replica leads
    led_epoch: LedEpoch
    serving: Serving
    election_loop: ElectionLoop
    dispatcher: Dispatcher
    maintenance: Maintenance
    compaction: CompactionService
    scrub: Scrub
    parts: ReplicaParts
    roles: Roles
    #: takes the streams of leaders
    streams: LeaderStreams
    report: ReplicaStatus

    def __init__(
        self, root: Path, config: StoreConfig, *, classes: RoleClasses, options: ReplicaOptions
    ) -> None:
        """Open, recover and serve the store in `root`. Raises: as `MessageStore.open`, with nothing left open."""
        options.check(config)
        config = RunningConfig.of(config)
        self.root = root
        self.config = config
        self.options = options
        self.clock = options.clock
        self.started_ms = self.clock.now_ms()
        #: operations that fail at present and are tried again
        self.failures = ActiveFailures()
        self.addresses = ClusterAddresses(options.shard, options.all_members, options.addresses)
        self._classes = classes
        #: the other replicas, as elections reach them; None: no other one may lead
        self._peers: Peers | None = None
        #: copies what this log lacks from a replica that cannot lead; None: no other one may lead
        self._copier: LogCopier | None = None
        #: mends damage with the bytes of other replicas; None: there are none
        self.repair: LogRepair | None = None

        self.supervisor = Supervisor(
            root,
            options.roles,
            clock=self.clock,
            files=options.files,
            witness_sync=self._witness_sync,
            commit_least_bytes=self._commit_least_bytes(),
            wakes_flush_real_time=not config.flush_commit_log_timed,
        )
        self.heartbeat = Heartbeat(self.supervisor.control, files=options.files)

        try:
            self._open()
        except BaseException:
            self.heartbeat.stop()
            self.supervisor.close()
            raise

        # A constructor that fails is called again later. It must find the store released.
        with contextlib.ExitStack() as undo:
            undo.callback(self._abandon)
            undo.callback(self.supervisor.close)
            undo.callback(self.heartbeat.stop)
            self._make_guards()
            self._rewrite_unfinished_sync()
            self._elect()
            # Recovered bytes may be in the page cache only: they are synced before anything relies on them.
            self._sync_log()
            self._begin_grants()
            self._make_parts(undo)
            self._start_threads(undo)
            undo.pop_all()

    def _commit_least_bytes(self) -> int:
        """CommitRealTime is woken for this many uncommitted bytes."""
        eager = awaits_commit(self.config.flush, has_followers=self.options.has_followers)
        return 0 if eager else self.config.commit_least_pages * PAGE_BYTES

    def _witness_sync(self) -> int:
        with self.heartbeat.blocking_call:
            return self.log.sync()

    # --- start ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lock and recover the store. Raises: any error, with nothing left open."""
        self.store = MessageStore.open(
            self.root,
            config=self.config,
            files=self.options.files,
            clock=self.clock,
            identity=self.options.store_identity(),
            on_locked=self._fence_old,
            follows=True,
        )
        self.log = self.store.log
        self.store.on_options.append(self._follow_options)
        # Also without changed options: those of an earlier process may be in the control block.
        self._follow_options()

    def _follow_options(self) -> None:
        """Let the satellites, and the wakeups for them, follow the options that have changed."""
        config, supervisor = self.config, self.supervisor
        supervisor.control.publish_options(
            {name: config.changed[name] for name in SATELLITE_OPTIONS if name in config.changed}
        )
        supervisor.appends.set_rules(
            commit_least_bytes=self._commit_least_bytes(),
            wakes_flush_real_time=not config.flush_commit_log_timed,
        )

    def set_store_host(self, ip: str, port: int) -> None:
        """Name the address under which this replica serves clients in the records that it writes from now on."""
        self.log.store_host = (ip, port)

    def _abandon(self) -> None:
        """Release the store as a crash would."""
        self.store.abandon()

    def _fence_old(self) -> None:
        """Take over from the process before. Callers: with the store's lock held, before recovery."""
        self._fenced = self.supervisor.fence_old()
        self.heartbeat.start()
        if self._fenced.failed_sync_errno:
            # The previous process died before it could report this.
            raise StoreDamaged(
                f"a sync of {self.root} failed (errno {self._fenced.failed_sync_errno}) before the restart; its "
                "unsynced bytes cannot be trusted; see docs/operating/runbook.md, 'An fsync failed'",
                path=str(self.root),
                rule="poisoned",
            )

    def _make_guards(self) -> None:
        """Create what says whether this replica writes, and what orders its changes."""
        self.serving = Serving(
            self.log,
            self.supervisor,
            self.heartbeat,
            put_lock=self.store.put_lock,
            clock=self.clock,
            takes_back=self.options.is_sole_candidate,
            display_name=lambda: self.role.display_name,
            on_failed=self._leave,
            end_process=self.options.end_process,
        )
        self.log_guard = LogGuard(
            self.store, self.supervisor, self.heartbeat, is_stopping=self.serving.is_stopping
        )

    def _rewrite_unfinished_sync(self) -> None:
        """Make the pages of a sync that died with its process dirty again: the next sync covers them."""
        if self._fenced.unfinished_sync is not None:
            self.log.rewrite(self._fenced.unfinished_sync[0])

    def _elect(self) -> None:
        """Make the elections of the recovered log. A sole candidate begins to lead."""
        self.elections = make_elections(self.store, self.options)
        self.led_epoch = LedEpoch(
            self.store,
            self.elections,
            self.supervisor,
            self.failures,
            clock=self.clock,
            note_leadership=self.options.note_leadership,
        )
        if self.options.sole_candidate is not None:
            self.elections.tick()
        self.led_epoch.begin()

    def _sync_log(self) -> None:
        """Sync the bytes in the pool and the page cache. Callers: while no satellite is granted."""
        self.log.commit_pool()
        self.log.sync()

    def _begin_grants(self) -> None:
        self.log_guard.begin_satellites()
        self.log.health.on_poisoned = self.supervisor.poison

    def _leave(self) -> None:
        """Answer those that wait, and let another replica lead: this one writes nothing more."""
        self.role.answer_waiting()
        self.election_loop.leave()

    # --- parts ------------------------------------------------------------------------------------

    def _make_parts(self, undo: contextlib.ExitStack) -> None:
        """Create the parts that work on the open store."""
        options, log = self.options, self.log
        if options.has_followers:
            # Replication maps files, too, and this process does not see how long the mappings last.
            log.segments.spares = None
        log.pool.publish(self.supervisor.incarnation)
        self._make_services()
        self.election_loop = ElectionLoop(
            self.elections, self.store, self.supervisor, self.serving, self.addresses, options
        )

        self.parts = self._collect_parts()
        self.roles = Roles(self.parts, self.led_epoch, self._classes)
        undo.callback(self.role.end)
        self.led_epoch.publish()
        self.streams = self._classes.streams(self.parts)
        self._connect_elections()
        self.dispatcher.wake()

    def _make_services(self) -> None:
        """Create the services that run whatever the role is."""
        store, config = self.store, self.config
        self.dispatcher = Dispatcher(
            store,
            clock=self.clock,
            on_dispatched=lambda: self.role.on_dispatched(),
            failures=self.failures,
        )

        self.maintenance = Maintenance(
            store.clean_service,
            clock=self.clock,
            interval_ms=config.clean_resource_interval_ms,
            sample=store.stats.sample,
            upkeep=self._upkeep,
        )
        self.compaction = CompactionService(
            store.compaction,
            interval_ms=config.compaction_interval_ms,
            now_ms=self.clock.monotonic_ms(),
        )
        self.scrub = scrub_of_log(self.log, on_fault=self._note_scrub_fault)
        store.on_options.append(self._retime_scrub)

    def _retime_scrub(self) -> None:
        """Let the scrub read all within the retention, which may be another one now."""
        self.scrub.pause_ms, self.scrub.pass_ms = scrub_times_ms(self.config)

    def _upkeep(self) -> None:
        self.store.checkpoint_service.run_once()
        self.role.upkeep()

    def _collect_parts(self) -> ReplicaParts:
        """What roles work with."""
        return ReplicaParts(
            root=self.root,
            config=self.config,
            clock=self.clock,
            options=self.options,
            identity=ReplicaIdentity(self.options.identity, self.store),
            store=self.store,
            log=self.log,
            log_guard=self.log_guard,
            supervisor=self.supervisor,
            heartbeat=self.heartbeat,
            serving=self.serving,
            failures=self.failures,
            elections=self.elections,
            election_loop=self.election_loop,
            dispatcher=self.dispatcher,
            maintenance=self.maintenance,
            compaction=self.compaction,
            scrub=self.scrub,
            repaired_units=lambda: 0 if self.repair is None else self.repair.mender.units,
            started_ms=self.started_ms,
        )

    def _heed_elections(self) -> None:
        """The elections have decided something: the ack loop acts, and reads that wait may have to be refused."""
        self.supervisor.wake_commit_log()
        self.dispatcher.wake_readers()

    def _connect_elections(self) -> None:
        """Let the elections know this replica, and reach the others."""
        options, elections, streams = self.options, self.elections, self.streams
        elections.connect(
            on_change=self._heed_elections,
            is_writable=self._is_disk_writable,
            can_stream=partial(self.supervisor.works, "replication"),
            # A replica that lacks messages of compacted queues never counts, and never leads (ADR 0016).
            matched=lambda: (0, 0) if self.store.lacks_compacted else streams.matched(),
        )
        if options.connect_peer is None or options.sole_candidate is not None:
            return

        self._peers = Peers(
            options.others,
            options.connect_peer,
            elections,
            take_answer=self.election_loop.take_answer,
        )
        self._copier = LogCopier(
            self.log,
            options.connect_peer,
            take=streams.take_copied,
            log_lock=self.log_guard.lock,
        )
        elections.connect(copy_log=self._copier.offer)

    def _is_disk_writable(self) -> bool:
        """Whether the disk takes appends, as far as is known. Without an EPOCH record `lead` has tried one."""
        bits = self.store.flags.bits & BLOCKS_PUTS & ~FENCED
        return not bits and self.role.takes_appends and "lead" not in self.failures

    def _make_repair(self) -> LogRepair | None:
        """The repair from the other replicas; None without any."""
        options = self.options
        if options.connect_peer is None or not options.others:
            return None

        def leader_first() -> list[int]:
            leader = self.election_loop.leader_id
            return sorted(options.others, key=lambda each: leader is None or each != leader)

        return LogRepair(
            self.log,
            self.scrub,
            leader_first,
            options.connect_peer,
            met=lambda: self.role.damaged_places(),
            end_file=lambda: self.role.end_damaged_file(),
            failures=self.failures,
            clock=self.clock,
        )

    def _note_scrub_fault(self, fault: Corrupt) -> None:
        """Log damage that the scrub has found, and begin to repair it. The replica continues."""
        logger.error("%s", fault)
        if self.repair is not None:
            self.repair.wake()

    # --- ShardBackend -----------------------------------------------------------------------------

    @property
    def role(self) -> ReplicaRole:
        """What this replica does at present."""
        return self.roles.role

    def identity(self) -> dict[str, Any]:
        """See `ShardBackend.identity`."""
        return self.parts.identity.facts()

    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """See `ShardBackend.put`."""
        return self.roles.role.put(requests, notify, producer_waits=producer_waits)

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `ShardBackend.fetch`."""
        return self.roles.role.fetch(request)

    def hold(self, queues: Iterable[QueueKey], notify: Callable[[], None]) -> Callable[[], None]:
        """See `ShardBackend.hold`."""
        return self.dispatcher.hold(queues, notify)

    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """See `ShardBackend.lease`."""
        return self.roles.role.lease(call, is_left)

    def call(self, op: str, args: Mapping[str, object]) -> dict[str, Any]:
        """See `ShardBackend.call`."""
        return call_replica(self._scope, op, args)

    def replicate(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream of a leader until it ends."""
        self.streams.run(frames, send)

    def status(self) -> dict[str, Any]:
        """See `ReplicaStatus.as_json`."""
        return self.report.as_json()

    def metrics(self) -> dict[str, Any]:
        """See `ReplicaStatus.metrics`."""
        return self.report.metrics()

    # --- threads ----------------------------------------------------------------------------------

    def _start_threads(self, undo: contextlib.ExitStack) -> None:
        self.repair = self._make_repair()
        self.report = ReplicaStatus(self.parts, self.roles, self._peers, self.repair)
        self._scope = ReplicaScope(
            self.parts, self.roles, self.report, self.addresses, Doors(self.clock)
        )
        self._threads = make_threads(self._service_loops())
        undo.callback(self._end_threads)
        if self._peers is not None:
            # Before the ack loop, which ticks the elections.
            self._peers.start()
        self.roles.start_threads()
        for thread in self._threads:
            thread.start()

    def _service_loops(self) -> dict[str, Body]:
        """The bodies of the threads that run whatever the role is."""
        is_stopping = self.serving.is_stopping
        retried: dict[str, Body] = {
            "acks": self._run_acks,
            "dispatch": self.dispatcher.run,
            "allocate": lambda: self.log.allocator.run(is_stopping),
            "maintenance": lambda: self.maintenance.run(is_stopping),
        }

        bodies: dict[str, Body] = {
            name: partial(run_retried, name, body, serving=self.serving, failures=self.failures)
            for name, body in retried.items()
        }
        # The end of these does not stop the replica.
        bodies["compaction"] = lambda: self.compaction.run(is_stopping, self.clock)
        if self.config.scrub_bytes_per_s:
            bodies["scrub"] = lambda: self.scrub.run(is_stopping)
        repair, copier = self.repair, self._copier
        if repair is not None:
            bodies["repair"] = lambda: repair.run(is_stopping)
        if copier is not None:
            bodies["copy"] = lambda: copier.run(is_stopping)
        return bodies

    def _run_acks(self) -> None:
        repeated = False
        self.heartbeat.note_iteration()
        try:
            while not self.serving.is_stopping():
                if repeated and self.failures:
                    self.failures.clear("acks")
                repeated = True
                # A write to a slow disk may hold the put lock, and a change of the role awaits other threads. For the
                # heartbeat the end of this call begins an iteration.
                with self.heartbeat.blocking_call:
                    self._run_elections()
                self.role.step()
        finally:
            self.heartbeat.loop_ended()

    def _run_elections(self) -> None:
        """Do what is due in the elections, and change the role as they decide."""
        if self.serving.stop_error is None:
            self.election_loop.run(self.led_epoch.led)
            self.roles.adapt()

    # --- stop -------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: no new puts, waiting ones answered, everything synced, satellites stopped.

        Raises: Unavailable when a step failed; everything is released in any case.
        """
        if self.serving.stop_error is None:
            self.role.drain(self.clock.monotonic_ms() + int(timeout_s * 1000))
        self._end_threads()
        self.heartbeat.stop()
        self.supervisor.close()
        self.role.close()

    def _end_threads(self) -> None:
        """End the service loops that were started, and answer the requests that none of them will answer."""
        self.serving.stop()
        self.role.stop()
        if self._peers is not None:
            self._peers.close()
        self.scrub.wake()
        if self.repair is not None:
            self.repair.wake()
        if self._copier is not None:
            self._copier.wake()
        self.log.allocator.wake()
        self.compaction.wake()
        self.maintenance.wake()
        self.dispatcher.stop()
        self.log_guard.wake()
        self.supervisor.wake_commit_log()

        # The ack loop first: it changes roles.
        join_all(self._threads, END_S)
        self.roles.end_threads()
        self.role.answer_waiting()
