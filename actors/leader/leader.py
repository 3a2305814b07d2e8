"""The CommitLog role of a leader: takes puts, answers clients, and runs the services of a leading store.

`Roles` makes a `Leader` when its replica was elected and the EPOCH record of its epoch is in the log. A server
receives the host as a `ShardBackend`, so that nothing here knows the network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from raymq.actors.api.call_arguments import check_integer, check_known
from raymq.actors.api.operations import call_leader
from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.actors.api.status_rows import LeadingRow
from raymq.actors.shared.control_block import FollowerProgress, Leadership
from raymq.actors.shared.failures import FailureFile
from raymq.actors.shared.latency import LatencyCounter
from raymq.actors.shared.maintenance import Maintenance
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.actors.supervise.role import Body, ReplicaRole, not_leading
from raymq.replication.quorum import can_fail_over
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    Bug,
    DeliveryUnknown,
    OffsetOutOfRange,
    RayMQError,
    StorageFull,
    Unavailable,
)
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import own_durable, promises
from raymq.store.log.clean import CleanService
from raymq.store.put.small_unit import CheckedPut
from raymq.store.records.requests import AppendedRows, FetchRequest, FetchSlice, PutRequest

from . import leader_metrics
from .appender import AppendedPut, Appender
from .delays import Delays
from .disk_losses import DiskLosses
from .operations.table import OPERATIONS
from .put_acks import PutAcks, PutCounters

logger = logging.getLogger("raymq.commit_log")

#: batches up to this are encoded in about the time that a process needs to wake up
ANNOUNCED_ROWS_MAX = 16
#: how long the record of an operation (a topic, an offset commit) waits for its promise
OPERATION_TIMEOUT_S = 60.0
#: how long a read of state waits for a majority. A leader that hears none steps down before
CHECK_WAIT_MS = 3_000


class Leader(ReplicaRole):
    """The leader of a shard.

    A put goes `put` -> Appender -> MessageStore -> PutAcks. Reads go to the Dispatcher, and operations to their table.
    Threads: server threads call put, fetch and call. `loops` lists the threads of its own.
    """

    mode = "leader"
    display_name = "shard"
    # Each dispatch takes the interpreter from the puts.
    dispatch_linger_s = 0.01

    def __init__(
        self,
        parts: ReplicaParts,
        led: Leadership | None,
        *,
        led_from_nothing: bool = False,
        counters: PutCounters | None = None,
        latency: LatencyCounter | None = None,
    ) -> None:
        """Args: `led`: the epoch; None: the disk delays that of a sole candidate, and only reads are served.

        `led_from_nothing`: the log was empty when it began. `counters`, `latency`: totals over all leaderships of this
        process.
        """
        options, store, log = parts.options, parts.store, parts.log
        self._parts = parts
        self._led = led
        self._serving = parts.serving
        self._elections = parts.elections
        self._dispatcher = parts.dispatcher
        self._members = options.all_members
        self._clock = parts.clock
        self._appends = parts.supervisor.appends
        self.store = store
        self._log = log
        self._put_path = store.put_path
        self.counters = counters or PutCounters()
        #: the role has ended: nothing more is taken
        self._ended = False
        #: the last append was refused by the disk or the kernel
        self._append_failed = False
        #: ... because the disk is full, or answered with an error
        self._disk_refused = False
        #: the put that is being appended is small
        self._small_put = False
        # The real clock, whatever clock this replica has, because Replication's process wrote the times in the file.
        self._replication_failure = FailureFile(parts.root, files=options.files, clock=Clock())

        rows = promises(parts.config.flush, has_followers=options.has_followers)
        self._confirmed_end = rows["quorum"].confirmed_end
        # Another leader's log may lack what no majority has stored. If no other can be elected, nothing is lost.
        self._lasting_end = rows[
            "quorum" if can_fail_over(len(self._members)) else "leader"
        ].acknowledged_end
        store.inner_put.visible_end = lambda: self.visible_end
        self._note_confirmed()
        if options.has_followers:
            self._expect_acknowledged()

        self._delays = Delays(parts, self.await_promise)
        self.acks = PutAcks(parts, rows, self.counters, self._dispatcher.wake, latency=latency)
        self.appender = Appender(self._append, self.acks.report_appended)
        log.pool.on_full = self._await_pool_space
        log.on_appended = self._on_appended
        self._disk_losses = DiskLosses(parts, led, self.publish, led_from_nothing=led_from_nothing)

    def _note_confirmed(self) -> None:
        """Raise the confirmed end to what the log itself knows."""
        self._log.note_confirmed(self._confirmed_end(self._log.ends))

    @property
    def visible_end(self) -> int:
        """See `ReplicaRole.visible_end`."""
        return max(self._log.confirmed, self._lasting_end(self._log.ends))

    def _expect_acknowledged(self) -> None:
        """Let reads wait for messages that the leader before may have acknowledged.

        How far that was is known when the EPOCH record is confirmed. A process that leads again after a restart on the
        same boot knows it already.
        """
        is_elected = self._led is not None and can_fail_over(len(self._members))
        if is_elected or not self._log.same_boot:
            self._dispatcher.expect(self._log.end, is_needed=is_elected)

    def make_cleaner(self) -> CleanService:
        """See `ReplicaRole.make_cleaner`."""
        return self.store.clean_service

    def on_dispatched(self) -> None:
        """See `ReplicaRole.on_dispatched`."""
        self._delays.note_dispatch()

    def upkeep(self) -> None:
        """See `ReplicaRole.upkeep`."""
        self._disk_losses.step()

    def loops(self) -> dict[str, Body]:
        """See `ReplicaRole.loops`."""
        return {
            "append": lambda: self.appender.run(lambda: self._ended),
            "delays": self._delays.run,
        }

    # --- puts -------------------------------------------------------------------------------------

    def put(
        self,
        request: PutRequest,
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> PutTicket:
        """Append a batch. The ticket completes when its promise is kept, or fails with the error that refused it.

        `producer_waits`: the producer seems to send nothing before the answer, so that this thread may wait for it.
        Raises: Rejected, Unavailable with nothing stored.
        """
        began = self._clock.monotonic()
        if self._serving.stop_error is not None or self._ended:
            self.check_serving()
        if not self.acks.waiting and request.batch.num_rows <= ANNOUNCED_ROWS_MAX:
            # No earlier put keeps the flusher awake, so that it is woken here, while this put is encoded.
            self._appends.announce()

        try:
            checked = self._put_path.check(request)
        except RayMQError as error:
            self.counters.rejected += 1
            raise self._for_producer(error) from None

        ticket = PutTicket(notify, began)
        # From here on the batch may be stored, so that nothing is raised and errors go to the ticket.
        appended = self.appender.put(ticket, checked)
        if producer_waits and appended:
            self.acks.await_sync(ticket, request.acks, self.appender)
        return ticket

    def put_many(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """Append small batches together. Returns: the ticket, or the refusal, of each."""
        began = self._clock.monotonic()
        rows = sum(request.batch.num_rows for request in requests)
        if not self.acks.waiting and rows <= ANNOUNCED_ROWS_MAX:
            self._appends.announce()

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

        appended = self.appender.put_many(puts)
        if producer_waits and appended:
            self.acks.await_sync(puts[0][0], puts[0][1].request.acks, self.appender)
        return results

    def _check_one(self, request: PutRequest) -> CheckedPut | RayMQError:
        """Check one of several puts: an error of one must not affect the others."""
        try:
            if self._serving.stop_error is not None or self._ended:
                self.check_serving()
            return self._put_path.check(request)
        except RayMQError as error:
            self.counters.rejected += 1
            return self._for_producer(error)
        except Exception as error:
            logger.exception("put")
            return Bug(f"put: {error!r}")

    def _on_appended(self) -> None:
        """Let the flusher, which is awake for a small put, sync while the put is counted and handed over."""
        if self._small_put and not self.appender.waiting:
            self.acks.publish_early()

    def _append(self, puts: list[CheckedPut]) -> list[AppendedRows | RayMQError]:
        self._small_put = sum(put.encoded.count for put in puts) <= ANNOUNCED_ROWS_MAX
        end = self._log.end
        try:
            results = self._put_path.append_many(puts)
        except Exception as error:
            if self._log.end != end:
                # The shard's state and the log may differ now, and only a recovery makes them equal.
                self._serving.fail(Unavailable(f"append: {error!r}", field="store"))
            raise
        return [self._count_result(put, result) for put, result in zip(puts, results, strict=True)]

    def _count_result(
        self, put: CheckedPut, result: AppendedRows | RayMQError | OSError
    ) -> AppendedRows | RayMQError:
        """Count a put with its result. Returns: the result for the producer."""
        counters = self.counters
        if isinstance(result, AppendedRows):
            if self._append_failed:
                self._append_failed = self._disk_refused = False
                self._parts.failures.clear("append")
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
            self._disk_refused = isinstance(result, (StorageFull, OSError))
            self._parts.failures.note("append", result)
        if isinstance(result, OSError):
            return Unavailable(f"the log could not be written: {result}", field="store")
        return self._for_producer(result)

    def _for_producer(self, error: RayMQError) -> RayMQError:
        """The refusal that a producer gets. With a follower that soon leads in place of a full disk, it tries again."""
        if isinstance(error, StorageFull) and self._elections.has_successor:
            return Unavailable(
                "the disk of the leader is full, and another replica takes over; nothing was stored",
                field="leader",
            )
        return error

    def _await_pool_space(self) -> None:
        self.check_serving()
        self.acks.await_pool_space()

    def step(self) -> None:
        """See `ReplicaRole.step`."""
        if self._log.poisoned is not None and self._serving.stop_error is None:
            self._serving.check_poisoned()
        self.acks.step()

    def answer_waiting(self) -> None:
        """Answer the puts and reads that no thread will answer any more: not stored, or unknown."""
        try:
            self.appender.end()
            self.acks.end()
        finally:
            self._dispatcher.wake_readers()

    def drain(self, deadline_ms: int) -> None:
        """See `ReplicaRole.drain`."""
        while (
            (self.appender.busy or self.acks.waiting)
            and self._serving.stop_error is None
            and self._clock.monotonic_ms() < deadline_ms
        ):
            self._clock.sleep_ms(5)

    def stop(self) -> None:
        """See `ReplicaRole.stop`."""
        self._ended = True
        self.appender.wake()
        self._delays.stop()

    def end(self) -> None:
        """See `ReplicaRole.end`."""
        self._ended = True
        self.answer_waiting()
        # A thread may still be appending. The next leader's process sees what it appended.
        self.appender.await_idle()
        self.acks.end()
        self._delays.abandon()

    def close(self) -> None:
        """See `ReplicaRole.close`."""
        try:
            if self._serving.stop_error is None:
                self._log.commit_pool()
                self._log.sync()
                self._note_confirmed()
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

    # --- the rest of ShardBackend -----------------------------------------------------------------

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `Dispatcher.fetch`.

        Raises: Rejected for a topic or queue that does not exist; Unavailable when the reader has seen a newer epoch.
        """
        self._check_leads()
        epoch = self._elections.epoch if self._led is None else self._led.epoch
        if request.seen_epoch is not None and request.seen_epoch > epoch:
            raise not_leading(self._parts.election_loop)

        self.counters.fetches += 1
        topics = self.store.state.topics
        info = topics[check_known(request.topic, topics)]
        for queue_id in request.offsets:
            if not 0 <= queue_id < info.queues:
                check_integer("offsets", queue_id, 0, info.queues - 1)
        found = self._dispatcher.fetch(request)
        if any(isinstance(part.error, OffsetOutOfRange) for part in found):
            # The queues of a newer leader may end later.
            self.await_check()
        if request.seen_epoch is None:
            return found
        return [part._replace(epoch=epoch) for part in found]

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `ReplicaRole.call`. `operations.scope.LeaderScope` is this leader."""
        self._check_leads()
        return call_leader(OPERATIONS, self, op, args)

    def _check_leads(self) -> None:
        """Raises: Unavailable after the end of the led epoch: another replica may have newer messages."""
        if self._is_deposed():
            raise not_leading(self._parts.election_loop)

    def _is_deposed(self) -> bool:
        """Whether the epoch of this leader is over, while this role may not have ended yet."""
        return self._led is not None and self._elections.elected_epoch != self._led.epoch

    # What operations use beside the store.

    @property
    def maintenance(self) -> Maintenance:
        """The maintenance loop of the process."""
        return self._parts.maintenance

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard and other facts."""
        return self._parts.identity.facts()

    def check_serving(self) -> None:
        """Raises: Unavailable, when the shard takes no writes here."""
        self._serving.check()
        if self._ended:
            raise not_leading(self._parts.election_loop)

    def hand_over(self, replica: int) -> None:
        """See `ElectionLoop.hand_over`."""
        self._parts.election_loop.hand_over(replica)

    def await_check(self) -> None:
        """Wait until a majority says that no other replica led at this call. Raises: Unavailable if none does."""
        led = self._led
        if self._parts.options.sole_candidate is not None:
            return
        if led is not None and self._elections.await_check(led.epoch, CHECK_WAIT_MS):
            return
        if led is None or self._is_deposed():
            raise not_leading(self._parts.election_loop)
        raise Unavailable(
            f"too few replicas have said within {CHECK_WAIT_MS} ms that this one leads the shard; ask again",
            field="leader",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
        )

    def await_dispatch(self) -> None:
        """Wait until readers see all messages confirmed by now. Raises: Unavailable, when that takes too long."""
        self._dispatcher.await_confirmed()

    def end_damaged_file(self) -> None:
        """See `ReplicaRole.end_damaged_file`. Replication reads the file, and cannot wait until puts have filled it."""
        self.publish(self.store.begin_next_file())

    def publish(self, appended: AppendedRows) -> None:
        """Let the satellites work on an append, without waiting for them."""
        notify_all_done(self.acks.report_appended([AppendedPut(PutTicket(), appended, "leader")]))

    def await_promise(self, appended: AppendedRows) -> None:
        """Wait until the promise of an operation's record is kept. Raises: DeliveryUnknown."""
        ticket = PutTicket()
        notify_all_done(self.acks.report_appended([AppendedPut(ticket, appended, "quorum")]))
        ticket.wait(OPERATION_TIMEOUT_S)

    # --- status -----------------------------------------------------------------------------------

    @property
    def waiting_puts(self) -> int:
        """Puts that are not answered yet."""
        return self.appender.waiting + self.acks.waiting

    @property
    def writable(self) -> bool:
        """Whether puts are taken now, judged by the last one."""
        is_refusing = self._serving.stop_error or self._log.poisoned
        return not is_refusing and self.is_serving and not self._append_failed

    @property
    def is_serving(self) -> bool:
        """Whether puts are taken, as far as the flags of the store say."""
        return self.store.flags.writable

    @property
    def takes_appends(self) -> bool:
        """See `ReplicaRole.takes_appends`."""
        return not self._disk_refused

    def causes(self) -> list[str]:
        """See `ReplicaRole.causes`."""
        flags = self.store.flags
        return [] if flags.writable else [f"puts are refused: {', '.join(flags.names())}"]

    def failures(self) -> dict[str, str]:
        """See `ReplicaRole.failures`."""
        found = {}
        if self._log.allocator.last_error is not None:
            found["allocate"] = str(self._log.allocator.last_error)
        cause = self._stalled_followers()
        if cause is not None:
            found["replication"] = cause
        return found

    def damaged_places(self) -> list[int]:
        """See `ReplicaRole.damaged_places`: where Replication cannot read the log."""
        found = self._replication_failure.damaged_at()
        return [] if found is None else [found]

    def _stalled_followers(self) -> str | None:
        """Why followers get no log bytes; None: each of them does."""
        return self._replication_failure.read() if self._parts.options.has_followers else None

    def _followers(self) -> dict[int, FollowerProgress]:
        """Replica -> how far it is, of the followers that Replication serves in this epoch."""
        epoch = 0 if self._led is None else self._led.epoch
        control = self._parts.supervisor.control
        known = {each: control.followers[each].read() for each in self._parts.options.others}
        return {each: found for each, found in known.items() if found.epoch == epoch != 0}

    def status(self) -> LeadingRow:
        """Counters, metrics and services, for status displays and benchmarks."""
        parts, store, log = self._parts, self.store, self._log
        return {
            "writable": self.writable,
            "min_offset": log.start,
            "transient_pool": parts.config.transient_pool,
            "committed": log.committed,
            "prewritten_bytes": log.allocator.ready,
            "counters": vars(self.counters),
            "damage": [{"message": str(error), **error.fields} for error in store.damage],
            "compaction": {"error": parts.compaction.last_error},
            "metrics": leader_metrics.as_status(self.metrics()),
            "flags": store.flags.names(),
            "clean": {**store.clean_service.as_status(), "error": parts.maintenance.last_error},
            "upkeep": {"error": store.checkpoint_service.last_error},
            "store_stats": store.stats.as_status(),
        }

    def metrics(self) -> dict[str, Any]:
        """The values of METRICS. Callers: any thread; cheap enough for every few seconds, not for every put."""
        parts, store, log, counters = self._parts, self.store, self._log, self.counters
        has_followers = parts.options.has_followers
        roles: dict[str, dict[str, Any]] = parts.supervisor.describe()["roles"]
        flushers = [roles[role] for role in FLUSH_ROLES if role in roles]
        confirmed = log.confirmed
        ends = log.ends
        durable = own_durable(parts.config.flush, ends)
        lag = max(0, durable - confirmed)
        followers = self._followers() if has_followers else {}
        incomplete = len(self._members) - 1 - sum(each.is_complete for each in followers.values())

        return {
            "raymq_append_batches_total": counters.puts,
            "raymq_append_messages_total": counters.rows - counters.duplicates,
            "raymq_append_bytes_total": counters.bytes,
            "raymq_append_seconds": self.acks.latency.read(),
            "raymq_flush_seconds": parts.supervisor.sync_latencies(),
            "raymq_fsyncs_total": sum(flusher["syncs"] for flusher in flushers),
            "raymq_duplicates_total": counters.duplicates,
            "raymq_rejected_total": counters.rejected,
            "raymq_unknown_total": counters.unknown,
            "raymq_fetches_total": counters.fetches,
            "raymq_role_restarts_total": sum(max(0, role["grants"] - 1) for role in roles.values()),
            "raymq_scrub_bytes_total": parts.scrub.counters.bytes,
            "raymq_scrub_faults": leader_metrics.damaged_places(parts.scrub, store),
            "raymq_repaired_units_total": parts.repaired_units(),
            "raymq_start_time_seconds": parts.started_ms / 1000,
            "raymq_writable": int(self.writable),
            "raymq_waiting_puts": self.waiting_puts,
            "raymq_log_start_bytes": log.start,
            "raymq_log_appended_bytes": log.end,
            "raymq_log_synced_bytes": log.synced,
            "raymq_log_confirmed_bytes": confirmed,
            "raymq_log_dispatched_bytes": store.dispatched,
            "raymq_replication_lag_bytes": lag if has_followers else None,
            "raymq_under_replicated": (
                int(self._stalled_followers() is not None) if has_followers else None
            ),
            "raymq_epoch": 0 if self._led is None else self._led.epoch,
            # Also those that were not heard in this epoch (rule R13 of docs/design.md).
            "raymq_incomplete_followers": incomplete if has_followers else None,
            "raymq_follower_match_lag_bytes": {
                (str(replica),): max(0, ends.appended - each.matched_end)
                for replica, each in followers.items()
            },
            "raymq_follower_sync_lag_bytes": {
                (str(replica),): max(0, durable - each.durable_end)
                for replica, each in followers.items()
            },
            "raymq_follower_durable_bytes": {
                (str(replica),): each.durable_end for replica, each in followers.items()
            },
            "raymq_unclean_recoveries": len(parts.election_loop.unclean_recoveries()),
            "raymq_consumer_lag_messages": leader_metrics.consumer_lags(store),
            "raymq_topic_messages": leader_metrics.topic_messages(store),
            "raymq_disk_used_bytes": leader_metrics.used_bytes(store),
            "raymq_disk_free_bytes": leader_metrics.free_bytes(log),
        }
