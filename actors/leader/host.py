"""The CommitLog role of a leader: one process that owns a replica's log, answers clients and supervises its satellites.

`LeaderHost` is a plain class, which ray/actor_classes.py wraps as a Ray actor. A server receives the host as a
`ShardBackend`, so that nothing here knows the network. The Flight server is cluster/transport/flight_server.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raymq.actors.api.call_arguments import check_integer, check_known
from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.actors.shared.failures import FailureFile
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.actors.supervise.replica_host import Body, ReplicaHost
from raymq.replication.election import BeginEpoch, ElectionTick, EpochBegun
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    Bug,
    DeliveryUnknown,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
)
from raymq.store.base.running_flags import FENCED
from raymq.store.config.promise import Acks, Promise, awaits_commit, own_durable, promises
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.put.put_path import PutPath
from raymq.store.put.small_unit import CheckedPut
from raymq.store.records.requests import AppendedRows, FetchRequest, FetchSlice, PutRequest

from . import leader_metrics
from .admin_calls import AdminCalls
from .appender import AppendedPut, Appender
from .delays import Delays
from .metrics import MetricValues
from .put_acks import PutAcks, PutCounters

logger = logging.getLogger("raymq.commit_log")

#: batches up to this are encoded in about the time that a process needs to wake up
ANNOUNCED_ROWS_MAX = 16
#: how long the record of an operation (a topic, an offset commit) waits for its promise
OPERATION_TIMEOUT_S = 60.0
#: between two tries to begin an epoch
LEAD_RETRY_MS = 5_000


class LeaderHost(ReplicaHost):
    """The leader of a shard, which implements `shard_api.ShardBackend` over a MessageStore and a Supervisor.

    A put goes `put` -> Appender -> MessageStore -> PutAcks. Reads go to the Dispatcher, and operations to AdminCalls.
    Threads: server threads call put, fetch and call. `_retried_loops` and `_other_loops` list the threads of the shard.
    """

    mode = "leader"
    display_name = "shard"
    follows = False

    # Made by `_open`:
    _has_followers: bool
    #: ack mode -> promise
    _promises: dict[Acks, Promise]
    # Made by `_make_role_parts`, in the order in which a put meets them:
    counters: PutCounters
    _put_path: PutPath
    _appender: Appender
    acks: PutAcks
    _delays: Delays
    _admin: AdminCalls

    # --- start ------------------------------------------------------------------------------------

    def _commit_least_bytes(self, roles: tuple[str, ...]) -> int:
        eager = awaits_commit(self.config.flush, has_followers="replication" in roles)
        return 0 if eager else self.config.commit_least_pages * PAGE_BYTES

    def _open(self) -> None:
        #: the epoch that this replica was elected to lead, while its EPOCH record is not in the log
        self._unbegun_epoch: int | None = None
        self._next_try_ms = 0
        self._has_followers = "replication" in self.supervisor.roles
        self._promises = promises(self.config.flush, has_followers=self._has_followers)
        self._confirmed_end = self._promises["quorum"].confirmed_end
        super()._open()

    def _elect(self) -> None:
        self.elections = self._make_elections()
        self.store.flags.set(FENCED)
        try:
            self._lead()
            self.store.flags.clear(FENCED)
        except (StorageFull, Unavailable) as error:
            # Reads are served. `_ack_step` tries again.
            self.failures.note("lead", error)

    def _lead(self) -> None:
        """Begin the epoch that this replica leads, once it is elected, and take puts.

        Raises: StorageFull, Unavailable: the EPOCH record was not stored, and no puts are taken.
        """
        elections = self.elections
        for effect in elections.step(ElectionTick(chance=0.0)):
            if isinstance(effect, BeginEpoch):
                self._unbegun_epoch = effect.epoch
        if self._unbegun_epoch is not None:
            begun = self.store.lead(self._unbegun_epoch)
            elections.step(EpochBegun(self._unbegun_epoch, begun.end_offset))
            self._unbegun_epoch = None

    def _try_to_lead(self) -> None:
        """Begin the epoch that could not begin before, for example because the disk was full."""
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._next_try_ms:
            return
        self._next_try_ms = now_ms + LEAD_RETRY_MS

        # The satellites work under the epoch before.
        for role in self.supervisor.roles:
            self.supervisor.revoke(role)
        try:
            self._lead()
            self.failures.clear("lead")
        except (StorageFull, Unavailable) as error:
            self.failures.note("lead", error)
        # Nothing is appended meanwhile, and all that was appended is in the files.
        with self.store.put_lock:
            self.log.commit_pool()
            self._begin_satellites()
        if self.elections.leads:
            self.store.flags.clear(FENCED)

    def _sync_log(self) -> None:
        super()._sync_log()
        self.log.note_confirmed(self._confirmed_end(self.log.ends))

    def _make_role_parts(self, undo: contextlib.ExitStack) -> None:
        store, log = self.store, self.log
        log.pool.publish(self.supervisor.incarnation)
        self.counters = PutCounters()
        #: the last append was refused by the disk or the kernel
        self._append_failed = False
        #: the put that is being appended is small
        self._small_put = False
        # The real clock, whatever clock this replica has, because Replication's process wrote the times in the file.
        self._replication_failure = FailureFile(self._root, files=self._files, clock=Clock())
        self._put_path = store.put_path

        self._delays = Delays(self, store, self.await_promise)
        undo.callback(self._delays.abandon)
        if self._has_followers and not log.same_boot:
            self._dispatcher.expected_end = log.end

        self.acks = PutAcks(self, self._promises, self.counters, self._dispatcher.wake)
        self._appender = Appender(self._append, self.acks.hand_over)
        log.pool.on_full = self._await_pool_space
        log.on_appended = self._on_appended
        if self._has_followers:
            # Replication maps files, too, and this process does not see how long the mappings last.
            log.segments.spares = None
        self._admin = AdminCalls(self)

    def _on_dispatched(self) -> None:
        self._delays.note_dispatch()

    def _retried_loops(self) -> dict[str, Body]:
        return {
            "append": lambda: self._appender.run(self._is_stopping),
            "delays": self._delays.run,
            **super()._retried_loops(),
        }

    # --- ShardBackend: put ------------------------------------------------------------------------

    def put(
        self,
        request: PutRequest,
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> PutTicket:
        """Append a batch; the ticket completes when its promise is kept, or fails with the error that refused it.

        `producer_waits`: the producer seems to send nothing before the answer, so that this thread may wait for it.
        Raises: Rejected, Unavailable with nothing stored.
        """
        began = self.clock.monotonic()
        if self.stop_error is not None or self._stopping:
            self.check_serving()
        if not self.acks.waiting and request.batch.num_rows <= ANNOUNCED_ROWS_MAX:
            # No earlier put keeps the flusher awake, so that it is woken here, while this put is encoded.
            self.supervisor.appends.announce()

        try:
            checked = self._put_path.check(request)
        except RayMQError:
            self.counters.rejected += 1
            raise

        ticket = PutTicket(notify, began)
        # From here on the batch may be stored, so that nothing is raised and errors go to the ticket.
        appended = self._appender.put(ticket, checked)
        if producer_waits and appended:
            self.acks.await_sync(ticket, request.acks, self._appender)
        return ticket

    def put_many(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """Append small batches together. Returns: the ticket, or the refusal, of each."""
        began = self.clock.monotonic()
        rows = sum(request.batch.num_rows for request in requests)
        if not self.acks.waiting and rows <= ANNOUNCED_ROWS_MAX:
            self.supervisor.appends.announce()

        results: list[PutTicket | RayMQError] = []
        puts: list[tuple[PutTicket, CheckedPut]] = []
        for request in requests:
            checked = self._check_one(request)
            if isinstance(checked, RayMQError):
                results.append(checked)
                continue
            ticket = PutTicket(notify, began)
            puts.append((ticket, checked))
            results.append(ticket)

        appended = self._appender.put_many(puts)
        if producer_waits and appended:
            self.acks.await_sync(puts[0][0], puts[0][1].request.acks, self._appender)
        return results

    def _check_one(self, request: PutRequest) -> CheckedPut | RayMQError:
        """Check one of several puts: an error of one must not affect the others."""
        try:
            if self.stop_error is not None or self._stopping:
                self.check_serving()
            return self._put_path.check(request)
        except RayMQError as error:
            self.counters.rejected += 1
            return error
        except Exception as error:
            logger.exception("put")
            return Bug(f"put: {error!r}")

    def _on_appended(self) -> None:
        """Let the flusher, which is awake for a small put, sync while the put is counted and handed over."""
        if self._small_put and not self._appender.waiting:
            self.acks.publish_early()

    def _append(self, puts: list[CheckedPut]) -> list[AppendedRows | RayMQError]:
        self._small_put = sum(put.encoded.count for put in puts) <= ANNOUNCED_ROWS_MAX
        end = self.log.end
        try:
            results = self._put_path.append_many(puts)
        except Exception as error:
            if self.log.end != end:
                # The shard's state and the log may differ now, and only a recovery makes them equal.
                self.fail(Unavailable(f"append: {error!r}", field="store"))
            raise
        return [self._count_result(put, result) for put, result in zip(puts, results, strict=True)]

    def _count_result(
        self, put: CheckedPut, result: AppendedRows | RayMQError | OSError
    ) -> AppendedRows | RayMQError:
        """Count a put with its result. Returns: the result for the producer."""
        counters = self.counters
        if isinstance(result, AppendedRows):
            if self._append_failed:
                self._append_failed = False
                self.failures.clear("append")
            counters.puts += 1
            counters.rows += result.count
            counters.bytes += put.encoded.bytes_from(result.duplicates)
            counters.duplicates += result.duplicates
            return result

        if isinstance(result, DeliveryUnknown):
            counters.unknown += 1
        else:
            counters.rejected += 1
        if isinstance(result, (DeliveryUnknown, StorageFull, Unavailable, OSError)):
            self._append_failed = True
            self.failures.note("append", result)
        if isinstance(result, OSError):
            return Unavailable(f"the log could not be written: {result}", field="store")
        return result

    def _await_pool_space(self) -> None:
        self.check_serving()
        self.acks.await_pool_space()

    def _ack_step(self) -> None:
        if self.log.poisoned is not None and self.stop_error is None:
            self._check_poisoned()
        if self._unbegun_epoch is not None:
            self._try_to_lead()
        self.acks.step()

    def _answer_waiting(self) -> None:
        """Answer the puts and reads that no thread will answer any more: not stored, or unknown."""
        try:
            self._appender.end()
            self.acks.end()
        finally:
            self._dispatcher.wake_readers()

    # --- ShardBackend: the rest -------------------------------------------------------------------

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `Dispatcher.fetch`. Raises: Rejected for a topic or queue that does not exist."""
        self.counters.fetches += 1
        topics = self.store.state.topics
        info = topics[check_known(request.topic, topics)]
        for queue_id in request.offsets:
            if not 0 <= queue_id < info.queues:
                check_integer("offsets", queue_id, 0, info.queues - 1)
        return self._dispatcher.fetch(request)

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `AdminCalls.call`."""
        return self._admin.call(op, args)

    def await_dispatch(self) -> None:
        """Wait until readers see all messages confirmed by now. Raises: Unavailable, when that takes too long."""
        self._dispatcher.await_confirmed()

    def await_promise(self, appended: AppendedRows) -> None:
        """Wait until the promise of an operation's record is kept. Raises: DeliveryUnknown."""
        ticket = PutTicket()
        notify_all_done(self.acks.hand_over([AppendedPut(ticket, appended, "quorum")]))
        ticket.wait(OPERATION_TIMEOUT_S)

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """A leader takes no replication stream."""
        raise Rejected("this replica is the leader", field="mode", limit="follower")

    # --- status -----------------------------------------------------------------------------------

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
        return super().state if self.store.flags.writable else "READ_ONLY"

    def _causes(self) -> list[str]:
        flags = self.store.flags
        refused = [] if flags.writable else [f"puts are refused: {', '.join(flags.names())}"]
        return super()._causes() + refused

    def _active_failures(self) -> dict[str, str]:
        found = super()._active_failures()
        if self.log.allocator.last_error is not None:
            found["allocate"] = str(self.log.allocator.last_error)
        cause = self._stalled_followers()
        if cause is not None:
            found["replication"] = cause
        return found

    def _stalled_followers(self) -> str | None:
        """Why followers get no log bytes; None: each of them does."""
        return self._replication_failure.read() if self._has_followers else None

    def status(self) -> dict[str, Any]:
        """Ends, counters, metrics and satellites, for status displays and benchmarks."""
        store, log = self.store, self.log
        return {
            **super().status(),
            "writable": self.writable,
            "min_offset": log.start,
            "transient_pool": self.config.transient_pool,
            "committed": log.committed,
            "dispatched": store.dispatched,
            "prewritten_bytes": self.log.allocator.ready,
            "counters": vars(self.counters),
            "damage": [{"message": str(error), **error.fields} for error in store.damage],
            "compaction": {"error": self.compaction.last_error},
            "metrics": leader_metrics.as_status(self.metrics()),
            "flags": store.flags.names(),
            "clean": {**store.clean_service.as_status(), "error": self.maintenance.last_error},
            "upkeep": {"error": store.checkpoint_service.last_error},
            "store_stats": store.stats.as_status(),
        }

    def metrics(self) -> MetricValues:
        """The values of METRICS. Callers: any thread; cheap enough for every few seconds, not for every put."""
        store, log, counters = self.store, self.log, self.counters
        roles: dict[str, dict[str, Any]] = self.supervisor.describe()["roles"]
        flushers = [roles[role] for role in FLUSH_ROLES if role in roles]
        confirmed = log.confirmed
        lag = max(0, own_durable(self.config.flush, log.ends) - confirmed)

        return {
            "raymq_append_batches_total": counters.puts,
            "raymq_append_messages_total": counters.rows - counters.duplicates,
            "raymq_append_bytes_total": counters.bytes,
            "raymq_append_seconds": self.acks.latency.read(),
            "raymq_flush_seconds": self.supervisor.sync_latencies(),
            "raymq_fsyncs_total": sum(flusher["syncs"] for flusher in flushers),
            "raymq_duplicates_total": counters.duplicates,
            "raymq_rejected_total": counters.rejected,
            "raymq_unknown_total": counters.unknown,
            "raymq_fetches_total": counters.fetches,
            "raymq_role_restarts_total": sum(max(0, role["grants"] - 1) for role in roles.values()),
            "raymq_scrub_bytes_total": self.scrub.counters.bytes,
            "raymq_scrub_faults": leader_metrics.damaged_places(self.scrub, store),
            "raymq_start_time_seconds": self.started_ms / 1000,
            "raymq_writable": int(self.writable),
            "raymq_waiting_puts": self.waiting_puts,
            "raymq_log_start_bytes": log.start,
            "raymq_log_appended_bytes": log.end,
            "raymq_log_synced_bytes": log.synced,
            "raymq_log_confirmed_bytes": confirmed,
            "raymq_log_dispatched_bytes": store.dispatched,
            "raymq_replication_lag_bytes": lag if self._has_followers else None,
            "raymq_under_replicated": (
                int(self._stalled_followers() is not None) if self._has_followers else None
            ),
            "raymq_consumer_lag_messages": leader_metrics.consumer_lags(store),
            "raymq_topic_messages": leader_metrics.topic_messages(store),
            "raymq_disk_used_bytes": leader_metrics.used_bytes(store),
            "raymq_disk_free_bytes": leader_metrics.free_bytes(log),
        }

    # --- stop -------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: no new puts, waiting ones answered, everything synced, satellites stopped.

        Raises: Unavailable when a step failed; everything is released in any case.
        """
        deadline_ms = self.clock.monotonic_ms() + int(timeout_s * 1000)
        while (
            (self._appender.busy or self.acks.waiting)
            and self.stop_error is None
            and self.clock.monotonic_ms() < deadline_ms
        ):
            self.clock.sleep_ms(5)

        self._stop()
        try:
            if self.stop_error is None:
                self._sync_log()
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

    def _wake_threads(self) -> None:
        self._appender.wake()
        super()._wake_threads()
        self._delays.stop()
