"""The CommitLog process of a replica: start, roles, ack loop, failure and stop."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raymq.actors.api.call_arguments import check_integer, check_known
from raymq.actors.api.shard_api import Frames, PutTicket, SendFrame
from raymq.actors.protocol.log_units import pack_sound_bytes
from raymq.actors.shared.control_block import COMMIT_REAL_TIME, Leadership
from raymq.actors.shared.failures import ActiveFailures
from raymq.actors.shared.heartbeat import Heartbeat
from raymq.actors.shared.maintenance import Maintenance
from raymq.replication.election import (
    CopyLog,
    ElectionLimits,
    EpochBegun,
    FollowerHeard,
    HandOver,
)
from raymq.replication.wire import PROBE_LIMIT, AppendEntries, ReplicaProcess
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    Bug,
    Corrupt,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    require,
)
from raymq.store.base.files import Files, SyncFailed
from raymq.store.base.running_flags import BLOCKS_PUTS, FENCED
from raymq.store.base.status import PutStatus
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.config.promise import awaits_commit
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.log.mending.sound_bytes import find_match, read_sound_bytes
from raymq.store.log.scrub import scrub_of_log
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from raymq.store.state.shard_state import SHARDS, UNCLEAN_RECOVERIES

from .callable_peers import CallablePeers
from .dispatcher import Dispatcher
from .election_peers import ElectionPeers, PeerCalls
from .elections import Elections
from .log_copier import LogCopier
from .log_repair import LogRepair
from .role import Body, ReplicaRole
from .supervisor import Supervisor

logger = logging.getLogger("raymq.commit_log")

#: from a refused operation (no descriptor, no memory, no space, a disk that does not answer) to the next try
RETRY_S = 0.1
#: between two tries to take back a failed append
TAKE_BACK_RETRY_MS = 500
#: between two tries to begin an epoch
LEAD_RETRY_MS = 5_000
#: operations about the whole cluster, of which a shard that is being added does not know all yet
_OF_ALL_SHARDS = ("describe", "routes", "replicas", "topics")
#: how long the end of a role waits for its threads
ROLE_END_S = 2.0


class LeaderStreams(Protocol):
    """The follower's side of replication: `follower.session.FollowerSession`."""

    def run(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream of a leader until it ends."""

    def take_copied(self, offer: CopyLog, message: AppendEntries, data: memoryview) -> None:
        """Take bytes of a log that cannot lead. Raises: RayMQError, OSError when they may not, or cannot, be taken."""


class RoleClasses(NamedTuple):
    """What a replica is made of. They are in packages above this one."""

    leader: Callable[[ReplicaHost], ReplicaRole]
    follower: Callable[[ReplicaHost], ReplicaRole]
    streams: Callable[[ReplicaHost], LeaderStreams]


class ReplicaHost:
    """The process that owns the log of one replica and supervises its satellites: a `shard_api.ShardBackend`.

    Every replica is a whole store, and may lead or follow. `role` is what it does at present. The elections decide it,
    and the thread of the ack loop changes it.
    """

    # Made by `_open` and `_make_parts`:
    store: MessageStore
    log: CommitLog
    elections: Elections
    dispatcher: Dispatcher
    maintenance: Maintenance
    compaction: CompactionService
    role: ReplicaRole

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        classes: RoleClasses,
        identity: dict[str, Any],
        roles: tuple[str, ...],
        members: Sequence[int] = (0,),
        candidates: Sequence[int] = (0,),
        connect_peer: Callable[[int], PeerCalls] | None = None,
        limits: ElectionLimits | None = None,
        is_new_complete: bool = True,
        generations: Sequence[int] = (),
        least_epoch: int = 0,
        note_leadership: Callable[[int], None] | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        """Args: `roles`: the satellites. `members`: all replicas of the shard. `candidates`: those that may lead.

        `connect_peer`: connects to another replica, for elections and repairs. `is_new_complete`: whether an empty
        directory may be trusted to be a new one (rule R13 of docs/design.md). `generations`, `least_epoch`: as of
        `Elections`.
        `note_leadership`: called with the epoch that this replica leads from now on. `end_process`: ends this process
        soon, for a reason. Its successor recovers. None: stay, read only.
        """
        require(
            (COMMIT_REAL_TIME in roles) == config.transient_pool,
            "CommitRealTime runs with a transient pool and only with one",
            roles=roles,
        )

        self.identity_facts = identity
        self.root = root
        self.files = files or Files()
        self.config = config
        self.clock = clock or Clock()
        self.started_ms = self.clock.now_ms()

        #: why this replica has stopped writing; None: it has not
        self.stop_error: RayMQError | None = None
        #: operations that fail at present and are tried again
        self.failures = ActiveFailures()
        #: shard -> endpoint of its leader, as far as this replica knows
        self.routes: dict[str, str] = {}
        #: endpoint of a replica of this shard, as far as this one knows
        self.endpoint_of: Callable[[int], str | None] = lambda replica: None
        self.has_followers = "replication" in roles
        self._classes = classes
        #: ids of all replicas of the shard
        self.members = tuple(sorted({*members, self._replica_id}))
        self._candidates = tuple(candidates)
        self._limits = limits
        self._is_new_complete = is_new_complete
        self._generations = tuple(generations)
        self._least_epoch = least_epoch
        self._note_leadership = note_leadership
        self._end_process = end_process
        self._stopping = False
        self._next_lead_ms = 0
        self._next_take_back_ms = 0
        #: the epoch that this replica leads; None: it follows
        self.led: Leadership | None = None
        #: the log was empty when that epoch began
        self.led_from_nothing = False
        #: the threads of `role`
        self._role_threads: list[threading.Thread] = []
        self._role_ended = threading.Event()
        #: notified when the role has changed
        self._role_changed = threading.Condition()
        #: held by changes of a followed log, and while this replica begins to lead; before the dispatcher's pause
        self.log_lock = threading.RLock()
        #: replica -> when it acknowledged last, as the elections know
        self._followers_heard: dict[int, int] = {}
        #: called with a replica of this shard, its endpoint, and whether that replica itself said it
        self.note_endpoint: Callable[[int, str, bool], None] = lambda *_: None
        #: shard -> replica -> endpoint, as far as this replica knows
        self.replicas: Callable[[], dict[str, dict[str, str]]] = dict
        self._connect_peer = connect_peer
        #: mends damage with the bytes of other replicas; None: there are none
        self.repair: LogRepair | None = None
        self._peers: ElectionPeers | None = None
        self._callable: CallablePeers | None = None
        #: copies what this log lacks from a replica that cannot lead; None: no other one may lead
        self._copier: LogCopier | None = None
        if connect_peer is not None and self.sole_candidate is None:
            others = [each for each in self.members if each != self._replica_id]
            self._peers = ElectionPeers(others, connect_peer, receive=self._take_answer)
            self._callable = CallablePeers(others, connect_peer)

        self.supervisor = Supervisor(
            root,
            roles,
            clock=self.clock,
            files=self.files,
            witness_sync=self._witness_sync,
            commit_least_bytes=self._commit_least_bytes(),
        )
        self.heartbeat = Heartbeat(self.supervisor.control, files=self.files)

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
            self._rewrite_unfinished_sync()
            self._elect()
            # Recovered bytes may be in the page cache only: they are synced before anything relies on them.
            self._sync_log()
            self._begin_grants()
            self._make_parts(undo)
            self._start_threads(undo)
            undo.pop_all()

    @property
    def sole_candidate(self) -> int | None:
        """The only replica that may lead; None: there are several."""
        return self._candidates[0] if len(self._candidates) == 1 else None

    @property
    def _replica_id(self) -> int:
        return int(self.identity_facts.get("replica", 0))

    def _commit_least_bytes(self) -> int:
        """CommitRealTime is woken for this many uncommitted bytes."""
        eager = awaits_commit(self.config.flush, has_followers=self.has_followers)
        return 0 if eager else self.config.commit_least_pages * PAGE_BYTES

    # --- start ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lock and recover the store. Raises: any error, with nothing left open."""
        self.store = MessageStore.open(
            self.root,
            config=self.config,
            files=self.files,
            clock=self.clock,
            identity=self._store_identity(),
            on_locked=self._fence_old,
            follows=True,
        )
        self.log = self.store.log

    def set_store_host(self, ip: str, port: int) -> None:
        """Name the address under which this replica serves clients in the records that it writes from now on."""
        self.log.store_host = (ip, port)

    def _abandon(self) -> None:
        """Release the store as a crash would."""
        self.store.abandon()

    def _store_identity(self) -> dict[str, Any]:
        """Whose store it is: another replica must not open it."""
        facts = self.identity_facts
        return {
            "cluster_id": facts["cluster_id"],
            "shard": facts["shard"],
            "replica": facts.get("replica", 0),
        }

    def _elect(self) -> None:
        """Make `elections` of the recovered log. A sole candidate begins to lead."""
        facts = self.identity_facts
        self.store.flags.set(FENCED)
        self.elections = Elections(
            self.log,
            ReplicaProcess(self._replica_id, int(facts.get("incarnation", 0))),
            members=self.members,
            candidates=self._candidates,
            clock=self.clock,
            put_lock=self.store.put_lock,
            flags=self.store.flags,
            cluster_id=str(facts["cluster_id"]),
            shard=int(facts["shard"]),
            limits=self._limits,
            is_new_complete=self._is_new_complete,
            generations=self._generations,
            least_epoch=self._least_epoch,
            # Where replica 0 is decides where shards are led first: leaders are spread so.
            is_preferred=self._replica_id == 0,
        )

        if self.sole_candidate is not None:
            self.elections.tick()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Begin the epoch that this replica was elected to lead: set `led`, unless that has to be tried again."""
        epoch = self.elections.elected_epoch
        if epoch is None:
            return

        is_empty = self.log.is_empty
        try:
            begun = self.store.lead(epoch)
        except (StorageFull, Unavailable, OSError) as error:
            if isinstance(error, SyncFailed):
                raise
            if self.elections.elected_epoch != epoch:
                # Another epoch has begun meanwhile: the next one may begin at once.
                self._forget_lead()
                return
            self.failures.note("lead", error)
            self._next_lead_ms = self.clock.monotonic_ms() + LEAD_RETRY_MS
            return

        self.elections.step(EpochBegun(epoch, begun.end_offset))
        self.led = Leadership(
            epoch, begun.end_offset, self.elections.me.incarnation, self.log.confirmed
        )
        self.led_from_nothing = is_empty
        self.failures.clear("lead")

    def _forget_lead(self) -> None:
        """No epoch waits to begin."""
        self._next_lead_ms = 0
        self.failures.clear("lead")

    def _fence_old(self) -> None:
        """Take over from the process before. Callers: with the store's lock held, before recovery."""
        self._fenced = self.supervisor.fence_old()
        self.heartbeat.start()
        if self._fenced.failed_sync_errno:
            # The previous process died before it could report this.
            raise Corrupt(
                f"a sync of {self.root} failed (errno {self._fenced.failed_sync_errno}) before the restart; its "
                "unsynced bytes cannot be trusted; see docs/operating/runbook.md, 'An fsync failed'",
                path=str(self.root),
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
        self.begin_satellites()
        self.log.on_poisoned = self.supervisor.poison

    def begin_satellites(self) -> None:
        """Let the satellites count from the log's ends. Callers: while no satellite is granted."""
        self.supervisor.begin(
            appended=self.log.end, synced=self.log.synced, confirmed=self.log.confirmed
        )

    def _make_parts(self, undo: contextlib.ExitStack) -> None:
        """Create the parts that work on the open store."""
        store, config, log = self.store, self.config, self.log
        if self.has_followers:
            # Replication maps files, too, and this process does not see how long the mappings last.
            log.segments.spares = None
        log.pool.publish(self.supervisor.incarnation)
        self.dispatcher = Dispatcher(
            store, clock=self.clock, on_dispatched=self._on_dispatched, failures=self.failures
        )
        # Only the disk may delay the epoch of a sole candidate. Until then it serves reads, as a leader.
        leads = self.led is not None or self.sole_candidate == self._replica_id
        self.role = self._classes.leader(self) if leads else self._classes.follower(self)
        self.dispatcher.linger_s = self.role.dispatch_linger_s
        undo.callback(self.role.end)
        self._publish_leadership()

        self.maintenance = Maintenance(
            self.role.make_cleaner(),
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
        self.streams = self._classes.streams(self)
        self.elections.on_change = self.supervisor.wake_commit_log
        self.elections.is_writable = self._is_disk_writable
        self.elections.can_stream = partial(self.supervisor.works, "replication")
        if self._connect_peer is not None and self.sole_candidate is None:
            self._copier = LogCopier(
                log,
                self._connect_peer,
                take=self.streams.take_copied,
                log_lock=self.log_lock,
            )
            self.elections.copy_log = self._copier.offer
        self.dispatcher.wake()

    def _on_dispatched(self) -> None:
        self.role.on_dispatched()

    def _upkeep(self) -> None:
        self.store.checkpoint_service.run_once()
        self.role.upkeep()

    # --- roles ------------------------------------------------------------------------------------

    def _publish_leadership(self) -> None:
        """Let Replication serve the epoch that is led, and take puts, unless that epoch is over already."""
        self.supervisor.publish_leadership(self.led)
        if self.led is None:
            return
        if self.elections.admit_puts(self.led.epoch) and self._note_leadership is not None:
            self._note_leadership(self.led.epoch)

    def _adapt_role(self) -> None:
        """Lead or follow, as the elections have decided. Callers: the ack loop."""
        elected = self.elections.elected_epoch
        if self.led is not None and elected != self.led.epoch:
            self._follow()
        if self.led is not None:
            return
        if elected is not None:
            self._lead()
            return
        # An epoch that could not begin is over now.
        self._forget_lead()
        if self.store.followed is not None and self.store.followed.ended:
            with self.dispatcher.paused():
                self.store.follow()

    def _lead(self) -> None:
        """Begin the epoch that this replica was elected to lead, and take puts."""
        if self.clock.monotonic_ms() < self._next_lead_ms:
            return
        # All that was written for earlier leaders is in the log, and nothing more comes: `CommitLog.epoch_floor`.
        with self.heartbeat.blocking_call, self.log_lock:
            with self.dispatcher.paused(), self._satellites_paused_for_cut():
                self._begin_epoch()
            if self.led is None:
                return
            self.supervisor.appends.publish(self.log.end)
        self.supervisor.wake_all()
        self._change_role(self._classes.leader)
        self._publish_leadership()
        logger.info("this replica leads epoch %d", self.led.epoch)

    @contextlib.contextmanager
    def satellites_paused(self) -> Iterator[None]:
        """Around a change of what the satellites count from: they end before, and are granted again after it.

        Raises: Unavailable, with nothing changed, if one does not end.
        """
        with self.heartbeat.blocking_call:
            self.supervisor.revoke_all()
            try:
                yield
            finally:
                # Also after an error: without satellites nothing would be synced any more.
                self.begin_satellites()

    @contextlib.contextmanager
    def _satellites_paused_for_cut(self) -> Iterator[None]:
        """Around a take-over: end the satellites if it has to cut the log, which is after a power loss at most."""
        followed = self.store.followed
        if followed is None or not followed.apply_all():
            yield
            return
        with self.satellites_paused():
            yield

    def _follow(self) -> None:
        """Let another replica write the log. The puts under way are unknown."""
        self.led = None
        self._publish_leadership()
        self._change_role(self._classes.follower, before=self.store.follow)
        logger.info("this replica follows; epoch %d", self.elections.epoch)

    def _change_role(
        self, make: Callable[[ReplicaHost], ReplicaRole], before: Callable[[], None] | None = None
    ) -> None:
        """End the present role, and begin another one. Args: `before`: called between the two."""
        self.role.stop()
        # Before the threads are awaited: no client needs to wait for them.
        self.role.answer_waiting()
        self._end_role_threads()
        for part in ("lead", "append"):
            self.failures.clear(part)
        self.role.end()
        if before is not None:
            with self.dispatcher.paused():
                before()
        with self._role_changed:
            self.role = make(self)
            self.dispatcher.linger_s = self.role.dispatch_linger_s
            self._role_changed.notify_all()
        self.maintenance.cleaner = self.role.make_cleaner()
        self._start_role_threads()
        self.dispatcher.wake_readers()

    def _start_role_threads(self) -> None:
        self._role_ended = threading.Event()
        self._role_threads = self._make_threads(
            {
                name: partial(self._run_retried, name, body, self._role_ended)
                for name, body in self.role.loops().items()
            }
        )
        for thread in self._role_threads:
            thread.start()

    def _end_role_threads(self) -> None:
        self._role_ended.set()
        self.role.stop()
        for thread in self._role_threads:
            # A start that lacks a thread ends those before it.
            if thread.is_alive():
                thread.join(ROLE_END_S)

    def await_follower(self, timeout_s: float) -> None:
        """Wait until this replica follows, after a newer leader was heard. Raises: Unavailable."""
        with self._role_changed:
            if not self._role_changed.wait_for(
                lambda: self._follows() or self._stopping, timeout_s
            ):
                raise Unavailable("this replica has not ended its own leadership yet", field="role")

    def _follows(self) -> bool:
        """Whether another replica may write the log."""
        followed = self.store.followed
        return followed is not None and not followed.ended

    @property
    def leads(self) -> bool:
        """Whether this replica leads the newest epoch that it has heard."""
        return self.elections.leads

    @property
    def mode(self) -> str:
        """ "leader" or "follower"."""
        return "follower" if self.is_deposed() else self.role.mode

    def is_deposed(self) -> bool:
        """Whether the epoch that this replica led is over, while its role may not have changed yet."""
        led = self.led
        return led is not None and self.elections.elected_epoch != led.epoch

    def hand_over(self, replica: int) -> None:
        """Let another replica lead, once its log has all of this one. Callers: while this replica leads.

        Raises: Rejected for one that may not lead.
        """
        others = [each for each in self._candidates if each != self._replica_id]
        if type(replica) is not int or replica not in others:
            raise Rejected(
                f"replica {replica!r} cannot lead this shard in place of replica {self._replica_id}; "
                f"those that can: {others or 'none'}",
                field="replica",
                limit=others,
                found=replica,
            )
        self.elections.step(HandOver(replica))

    # --- elections --------------------------------------------------------------------------------

    def elect(self, frame: bytes) -> list[bytes]:
        """Take a message of another replica's elections. Returns: the messages that answer it.

        A replica of which a sync has failed still answers, by what it had synced before: others need its vote.
        Raises: Rejected for a frame of another shard; Unavailable when nothing is answered any more.
        """
        votes_on = self.log.sync_failed and not isinstance(self.stop_error, (Corrupt, Bug))
        if self._stopping or not votes_on:
            self.check_serving()
        return self.elections.receive(frame)

    def _take_answer(self, frame: bytes) -> None:
        """Take a message that answers one of this replica."""
        if self.stop_error is None and not self._stopping:
            self.elections.take(frame)

    def _run_elections(self) -> None:
        """Do what is due in the elections. Callers: the ack loop."""
        if self.stop_error is not None:
            return
        if self.sole_candidate is None:
            self.elections.tick()
            self._report_followers()
        self._adapt_role()

    def idle_wait_ms(self, limit_ms: int) -> int:
        """How long the ack loop may sleep while its role has nothing to do. Args: `limit_ms`: what the role allows."""
        if self.sole_candidate is not None or self.stop_error is not None:
            return limit_ms
        return min(limit_ms, self.elections.wait_ms())

    def _is_disk_writable(self) -> bool:
        """Whether the disk takes appends, as far as is known. Without an EPOCH record `lead` has tried one."""
        bits = self.store.flags.bits & BLOCKS_PUTS & ~FENCED
        return not bits and self.role.takes_appends and "lead" not in self.failures

    def _report_followers(self) -> None:
        """Give the elections what Replication knows of the followers."""
        if self.led is None:
            return
        led = self.led.epoch
        for replica in self.members:
            found = self.supervisor.control.followers[replica].read()
            is_new = found.heard_ms > self._followers_heard.get(replica, 0)
            if replica != self._replica_id and found.epoch == led and is_new:
                self._followers_heard[replica] = found.heard_ms
                self.elections.step(
                    FollowerHeard(replica, led, found.durable_end, found.is_complete)
                )

    def unclean_recoveries(self) -> list[dict[str, Any]]:
        """When a majority of the replicas was lost, by an operator's decision or with its disks, oldest first."""
        return list(self.store.state.progress.get(UNCLEAN_RECOVERIES, {}).values())

    def leader_hint(self) -> dict[str, Any]:
        """Who leads the shard, as far as this replica knows: `replica`, `epoch`, `endpoint`, `unclean_recoveries`."""
        leader = self.elections.leader
        replica = None if leader is None else leader.id
        endpoint = None if replica is None else self.endpoint_of(replica)
        return {
            "replica": replica,
            "epoch": self.elections.epoch,
            "endpoint": endpoint,
            "unclean_recoveries": len(self.store.state.progress.get(UNCLEAN_RECOVERIES, ())),
        }

    # --- ShardBackend -----------------------------------------------------------------------------

    def put(
        self,
        request: PutRequest,
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> PutTicket:
        """See `ShardBackend.put`."""
        return self.role.put(request, notify, producer_waits=producer_waits)

    def put_many(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """See `ShardBackend.put_many`."""
        return self.role.put_many(requests, notify, producer_waits=producer_waits)

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `ShardBackend.fetch`."""
        return self.role.fetch(request)

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `ShardBackend.call`. Operations of any replica are answered here, the others by its role."""
        if op in _OF_ALL_SHARDS and self._is_joining():
            raise Unavailable(
                "this shard is being added, and may lack topics: ask another one",
                field="joining",
                shard=self.identity_facts["shard"],
            )
        handler = getattr(self, f"_op_{op}", None)
        answer: dict[str, Any] = self.role.call(op, args) if handler is None else handler(**args)
        return answer

    def _op_describe(self) -> dict[str, Any]:
        return self.identity()

    def _op_replica_id(self) -> dict[str, Any]:
        return {"replica": self._replica_id}

    def _op_status(self) -> dict[str, Any]:
        return self.status()

    def _op_leader(self) -> dict[str, Any]:
        return self.leader_hint()

    def _op_routes(self) -> dict[str, Any]:
        routes = dict(self.routes)
        endpoint = self.leader_hint()["endpoint"]
        if endpoint is not None:
            routes[str(self.identity_facts["shard"])] = endpoint
        return routes

    def _op_topics(self) -> dict[str, Any]:
        topics = self.store.confirmed_topics(self.role.visible_end)
        return {topic.name: topic.shown() for topic in topics}

    def _op_check_record(self, topic: str, queue_id: int, offset: int) -> dict[str, Any]:
        """Whether the message at an offset is whole here, or is mended now. Raises: Corrupt naming file and place."""
        info = self.store.state.topics[check_known(topic, self.store.state.topics)]
        check_integer("queue_id", queue_id, 0, info.queues - 1)
        check_integer("offset", offset, 0)
        self.store.check_record(topic, queue_id, offset)
        return {}

    def _op_replicas(self) -> dict[str, Any]:
        """Shard -> replica -> endpoint. Of this shard also what elections know: this replica may not have been told."""
        known = self.replicas()
        own = str(self.identity_facts["shard"])
        elected = {str(each): self.endpoint_of(each) for each in self.members}
        found = {replica: endpoint for replica, endpoint in elected.items() if endpoint}
        return {**known, own: {**known.get(own, {}), **found}} if found else known

    def _op_elect(self, frame: str, replica: int, endpoints: dict[str, str]) -> dict[str, Any]:
        """Take a message of another replica's elections.

        Args: `replica`: the sender. `endpoints`: replica -> where it listens, as the sender knows.
        """
        answers = self.elect(bytes.fromhex(frame))
        # After the message was taken: that of a replaced replica is refused, and so is its address.
        for each, endpoint in endpoints.items():
            self.note_endpoint(int(each), endpoint, int(each) == replica)
        return {"frames": [each.hex() for each in answers]}

    def _op_log_units(self, start: int, stop: int) -> dict[str, Any]:
        """Log bytes for another replica whose own are damaged. Raises: Corrupt, if these are damaged, too."""
        check_integer("start", start)
        check_integer("stop", stop)
        return pack_sound_bytes(read_sound_bytes(self.log, start, stop))

    def _op_log_match(self, candidates: list[list[int]]) -> dict[str, Any]:
        """Up to where the log of another replica, with these (unit end, chain value), equals this one."""
        if not 0 < len(candidates) <= PROBE_LIMIT:
            raise Rejected(
                f"candidates must be 1 to {PROBE_LIMIT} places, got {len(candidates)}",
                field="candidates",
                limit=PROBE_LIMIT,
                found=len(candidates),
            )
        places = [(int(end), int(value)) for end, value in candidates]
        return {"candidate": find_match(self.log, places), "last_end": places[-1][0]}

    def replicate(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream of a leader until it ends."""
        self.streams.run(frames, send)

    # --- threads ----------------------------------------------------------------------------------

    def _start_threads(self, undo: contextlib.ExitStack) -> None:
        self.scrub = scrub_of_log(self.log, on_fault=self._note_scrub_fault)
        self.repair = self._make_repair()
        retried: dict[str, Body] = {
            "acks": self._run_acks,
            "dispatch": self.dispatcher.run,
            "allocate": lambda: self.log.allocator.run(self.is_stopping),
            "maintenance": lambda: self.maintenance.run(self.is_stopping),
        }
        bodies: dict[str, Body] = {
            name: partial(self._run_retried, name, body) for name, body in retried.items()
        }
        # The end of these does not stop the replica.
        bodies["compaction"] = lambda: self.compaction.run(self.is_stopping, self.clock)
        if self.config.scrub_bytes_per_s:
            bodies["scrub"] = lambda: self.scrub.run(self.is_stopping)
        repair, copier = self.repair, self._copier
        if repair is not None:
            bodies["repair"] = lambda: repair.run(self.is_stopping)
        if copier is not None:
            bodies["copy"] = lambda: copier.run(self.is_stopping)

        self._threads = self._make_threads(bodies)
        undo.callback(self._end_threads)
        if self._peers is not None:
            # Before the ack loop: the first question of the preferred replica would be lost, and repeated only after
            # the time of an election.
            self.elections.send_frame = self._peers.send
            self._peers.start()
        if self._callable is not None:
            found = self._callable
            self.elections.uncallable = lambda: found.uncallable
            self.elections.on_heard = found.hear
            found.start()
        self._start_role_threads()
        for thread in self._threads:
            thread.start()

    def _note_scrub_fault(self, fault: Corrupt) -> None:
        """Log damage that the scrub has found, and begin to repair it. The replica continues."""
        logger.error("%s", fault)
        if self.repair is not None:
            self.repair.wake()

    def _make_repair(self) -> LogRepair | None:
        """The repair from the other replicas; None without any."""
        others = [each for each in self.members if each != self._replica_id]
        if self._connect_peer is None or not others:
            return None

        def leader_first() -> list[int]:
            leader = self.elections.leader
            return sorted(others, key=lambda each: leader is None or each != leader.id)

        return LogRepair(
            self.log,
            self.scrub,
            leader_first,
            self._connect_peer,
            met=lambda: self.role.damaged_places(),
            end_file=lambda: self.role.end_damaged_file(),
            failures=self.failures,
            clock=self.clock,
        )

    def _make_threads(self, bodies: dict[str, Body]) -> list[threading.Thread]:
        return [
            threading.Thread(target=body, name=f"raymq-{name}", daemon=True)
            for name, body in bodies.items()
        ]

    def is_stopping(self) -> bool:
        """Whether the process is ending."""
        return self._stopping

    def _run_retried(self, name: str, body: Body, ended: threading.Event | None = None) -> None:
        """Run a service loop, again after a transient error. Any other error stops the replica.

        Args: `ended`: set when the role of this loop has ended.

        `body` clears the failure from `failures` once it works again.
        """
        pause = ended or threading.Event()
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

            if pause.wait(RETRY_S) or self._stopping:
                return

    # --- ack loop and failure ---------------------------------------------------------------------

    def _run_acks(self) -> None:
        repeated = False
        self.heartbeat.note_iteration()
        try:
            while not self._stopping:
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

    def check_poisoned(self) -> None:
        """Raises: Unavailable, when the log takes nothing more."""
        if self.supervisor.poisoned is not None:
            with self.heartbeat.blocking_call:
                self.log.poison(self.supervisor.poisoned)
        if self.log.poisoned is not None and not self._takes_back():
            # If no sync has failed, the next start cuts off a failed append that could not be undone.
            raise Unavailable(
                self.log.poisoned, field="store", status=PutStatus.SERVICE_NOT_AVAILABLE.value
            )

    def _takes_back(self) -> bool:
        """Whether the append that failed last is taken back, or tried again later.

        The disk may work again, and meanwhile reads go on. Of several candidates another one leads sooner if this
        process ends.
        """
        if self.sole_candidate != self._replica_id or not self.log.may_take_back:
            return False
        now_ms = self.clock.monotonic_ms()
        if now_ms >= self._next_take_back_ms:
            self._next_take_back_ms = now_ms + TAKE_BACK_RETRY_MS
            with self.heartbeat.blocking_call, self.store.put_lock:
                self.log.take_back()
        return True

    def _witness_sync(self) -> int:
        with self.heartbeat.blocking_call:
            return self.log.sync()

    def fail(self, error: RayMQError) -> None:
        """A part of the process is dead: the replica stops writing, rather than continue without it.

        If a restart may help, the process ends and Ray starts the next one. After a failed sync, for corrupt bytes
        or for a bug a restart would fail in the same way. Then the replica stays up, serves reads and reports why.
        """
        if self._stopping or self.stop_error is not None:
            return
        logger.error("the %s stops writing: %s", self.role.display_name, error)
        self.stop_error = error
        try:
            self.role.answer_waiting()
            self._leave_elections()
        finally:
            lasting = (
                self.log.sync_failed
                or self.supervisor.poisoned is not None
                or isinstance(error, (Corrupt, Bug))
            )
            if self._end_process is not None and not lasting:
                self._end_process(str(error))

    def _leave_elections(self) -> None:
        """Let the other replicas elect another leader at once: this one writes nothing more."""
        if self.sole_candidate is None:
            with contextlib.suppress(OSError):
                self.elections.leave()

    def check_serving(self) -> None:
        """Raises: Unavailable, when nothing more is written."""
        if self.stop_error is None and not self._stopping:
            return
        cause = f"stopped writing: {self.stop_error}" if self.stop_error else "is stopping"
        raise Unavailable(
            f"the {self.role.display_name} {cause}",
            field="shard",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
        )

    # --- status -----------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard, number of shards and this process's incarnation."""
        facts = dict(self.identity_facts)
        if "shards" in facts:
            # The actor keeps the number of its start, also when Ray restarts it.
            facts["shards"] = max(facts["shards"], self._joined_shards())
        if facts.get("joining"):
            facts["joining"] = self._is_joining()
        return facts

    def _joined_shards(self) -> int:
        """How many shards the log names since some were added; 0: none were."""
        return int(self.store.state.progress.get(SHARDS, {}).get("joined", 0))

    def _is_joining(self) -> bool:
        """Whether this shard was added, and may lack topics."""
        facts = self.identity_facts
        return bool(facts.get("joining")) and self._joined_shards() <= int(facts["shard"])

    @property
    def state(self) -> str:
        """RUNNING, or READ_ONLY while every write is refused."""
        stopped = self.stop_error or self.log.poisoned or not self.role.is_serving
        return "READ_ONLY" if stopped else "RUNNING"

    @property
    def cause(self) -> str | None:
        """Why nothing is written, or which operations fail at present; None: none."""
        if self.stop_error:
            return str(self.stop_error)
        failures = [f"{part}: {cause}" for part, cause in self._active_failures().items()]
        poisoned = [self.log.poisoned] if self.log.poisoned else []
        return "; ".join([*poisoned, *failures, *self.role.causes()]) or None

    def _active_failures(self) -> dict[str, str]:
        found = {**self.failures.as_status(), **self.role.failures()}
        refused = {} if self._callable is None else self._callable.refused_certificates()
        if refused:
            found["certificates"] = "; ".join(
                f"replica {replica} cannot be called, and leads only if no other can: {refusal}"
                for replica, refusal in sorted(refused.items())
            )
        if not self.elections.is_complete and self.store.lacks_compacted:
            found["compaction"] = (
                f"the log of this replica begins at {self.log.start}, and older messages of compacted topics are not "
                "here: it can neither count nor lead. Bring the disk of the replica before it back, or delete these "
                "topics"
            )
        return found

    def status(self) -> dict[str, Any]:
        """Ends and satellites, for status displays."""
        log, recovered = self.log, self.log.recovered
        leader = self.elections.leader
        recovery = None
        if recovered is not None:
            recovery = {"row": recovered.row.name, "end": recovered.end}

        return {
            **self.identity(),
            "mode": self.mode,
            "state": self.state,
            "error": self.cause,
            "failures": self._active_failures(),
            "appended": log.end,
            "synced": log.synced,
            "confirmed": log.confirmed,
            "dispatched": self.store.dispatched,
            "epoch": self.elections.epoch,
            "leader": None if leader is None else leader.id,
            "is_complete": self.elections.is_complete,
            "uncallable": sorted(self.elections.uncallable()),
            "unclean_recoveries": self.unclean_recoveries(),
            "recovery": recovery,
            "scrub": self.scrub.status(),
            "repair": None if self.repair is None else self.repair.status(),
            "supervisor": self.supervisor.describe(),
            **self.role.status(),
        }

    def metrics(self) -> dict[str, Any]:
        """The values of METRICS; none while another replica leads."""
        return self.role.metrics()

    # --- stop -------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: no new puts, waiting ones answered, everything synced, satellites stopped.

        Raises: Unavailable when a step failed; everything is released in any case.
        """
        if self.stop_error is None:
            self.role.drain(self.clock.monotonic_ms() + int(timeout_s * 1000))
        self._end_threads()
        self.heartbeat.stop()
        self.supervisor.close()
        self.role.close()

    def _end_threads(self) -> None:
        """End the service loops that were started, and answer the requests that none of them will answer."""
        self._stopping = True
        self.role.stop()
        if self._peers is not None:
            self._peers.close()
        if self._callable is not None:
            self._callable.close()
        self.scrub.wake()
        if self.repair is not None:
            self.repair.wake()
        if self._copier is not None:
            self._copier.wake()
        self.log.allocator.wake()
        self.compaction.wake()
        self.maintenance.wake()
        self.dispatcher.stop()
        with self._role_changed:
            self._role_changed.notify_all()
        self.supervisor.wake_commit_log()

        # The ack loop first: it changes roles.
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)
        self._end_role_threads()
        self.role.answer_waiting()
