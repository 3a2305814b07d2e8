"""The CommitLog role of a leader: takes puts, answers clients, and runs the services of a leading store.

`Roles` makes a `Leader` when its replica was elected and the EPOCH record of its epoch is in the log. A server
receives the host as a `ShardBackend`, so that nothing here knows the network.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raymq.actors.api.call_arguments import check_integer, check_known
from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.operations import call_leader
from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.actors.api.status_rows import LeadingRow
from raymq.actors.shared.control_block import Leadership
from raymq.actors.shared.latency import LatencyCounter
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.actors.supervise.role import Body, ReplicaRole, not_leading
from raymq.replication.quorum import can_fail_over
from raymq.store.base.errors import (
    Bug,
    DeliveryUnknown,
    NotServing,
    OffsetOutOfRange,
    RayMQError,
    StorageFull,
    TopicDeleted,
    TopicMissing,
    Unavailable,
)
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import promises
from raymq.store.delay.timer_cancel import CancelledTimer
from raymq.store.log.clean import CleanService
from raymq.store.put.small_unit import CheckedPut
from raymq.store.records.requests import AppendedRows, FetchRequest, FetchSlice, PutRequest
from raymq.store.state.topics import deleted_topic_error

from .appender import AppendedPut, Appender
from .delays import Delays
from .disk_losses import DiskLosses
from .group_progress import GroupProgress
from .group_service import GroupService
from .leader_report import LeaderReport
from .operations.table import OPERATIONS
from .put_acks import PutAcks, PutCounters
from .queue_claims import QueueClaims
from .transaction_commits import LeaderCommits
from .transactions import Transactions
from .worker_leases import WorkerLeases

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
        #: the replica, as operations use it, too
        self.parts = parts
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
        #: claims on the queues of this shard
        self.claims = QueueClaims(self, parts.clock)
        #: the consumer groups that this shard coordinates
        self.groups = GroupService(self, parts.clock, self.claims)
        #: messages of this shard that workers have
        self.leases = WorkerLeases(self, parts.clock, self._dispatcher, shard=parts.identity.shard)
        #: transactions that lie on this shard
        self.commits = LeaderCommits(self, self.leases)
        #: the half messages of this shard
        self.transactions = Transactions(
            parts,
            check_serving=self.check_serving,
            await_promise=self.await_promise,
            await_dispatch=self.await_dispatch,
            publish=self.publish,
        )
        self.acks = PutAcks(parts, rows, self.counters, self._dispatcher.wake, latency=latency)
        self.appender = Appender(self._append, self.acks.report_appended)
        self.report = LeaderReport(
            parts,
            led,
            counters=self.counters,
            acks=self.acks,
            appender=self.appender,
            groups=GroupProgress(store),
            open_halves=self.transactions.open_halves,
            uncopied=lambda: self.leases.uncopied_count,
            transactions=self.commits.counts,
            is_writable=lambda: self.writable,
        )
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
        self.transactions.step()
        self.leases.step()

    def loops(self) -> dict[str, Body]:
        """See `ReplicaRole.loops`."""
        return {
            "append": lambda: self.appender.run(lambda: self._ended),
            "delays": self._delays.run,
            "groups": self.groups.run,
        }

    # --- puts -------------------------------------------------------------------------------------

    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """Append batches. Each ticket completes when its promise is kept, or fails with the error that refused it.

        Args: `producer_waits`: the producer seems to send nothing before the answer, so that this thread may wait for
        it. Returns: the ticket, or the refusal, of each.
        """
        began = self._clock.monotonic()
        rows = sum(request.batch.num_rows for request in requests)
        may_append = self._serving.stop_error is None and not self._ended
        if may_append and not self.acks.waiting and rows <= ANNOUNCED_ROWS_MAX:
            # No earlier put keeps the flusher awake, so that it is woken here, while these are encoded. It is a hint:
            # a shard that stops meanwhile must still refuse them.
            with contextlib.suppress(Exception):
                self._appends.announce()

        results: list[PutTicket | RayMQError] = []
        puts: list[tuple[PutTicket, CheckedPut]] = []
        for request in requests:
            checked = self._check(request)
            if isinstance(checked, RayMQError):
                results.append(checked)
                continue
            ticket = PutTicket(notify, began)
            puts.append((ticket, checked))
            results.append(ticket)

        # From here on a batch may be stored, so that nothing is raised and errors go to the tickets.
        appended = self.appender.put(puts)
        if producer_waits and appended:
            self.acks.await_sync(puts[0][0], puts[0][1].request.acks, self.appender)
        return results

    def _check(self, request: PutRequest) -> CheckedPut | RayMQError:
        """Check one put: an error of one must not affect the others."""
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
                self.parts.failures.clear("append")
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
            self.parts.failures.note("append", result)
        if isinstance(result, OSError):
            return Unavailable(f"the log could not be written: {result}", field="store")
        return self._for_producer(result)

    def _for_producer(self, error: RayMQError) -> RayMQError:
        """The refusal that a producer gets. With a follower that soon leads in place of a full disk, it tries again."""
        if isinstance(error, StorageFull) and self._elections.has_successor:
            return NotServing(
                "the disk of the leader is full, and another replica takes over; nothing was stored",
                field="leader",
            )
        return error

    def _await_pool_space(self) -> None:
        self.check_serving()
        self.acks.await_pool_space()

    def step(self) -> None:
        """See `ReplicaRole.step`."""
        if self._log.health.poisoned is not None and self._serving.stop_error is None:
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
        self.groups.stop()

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
            raise not_leading(self.parts.election_loop)

        self.counters.fetches += 1
        topics = self.store.state.topics
        gone: list[FetchSlice] = []
        for topic, offsets in request.by_topic():
            error = self._topic_error(topic, request)
            if error is not None:
                shown = "" if topic == request.topic else topic
                gone += [
                    FetchSlice(queue_id, at, at, -1, -1, None, error, topic=shown)
                    for queue_id, at in offsets.items()
                ]
                continue
            info = topics[topic]
            for queue_id in offsets:
                if not 0 <= queue_id < info.queues:
                    check_integer("offsets", queue_id, 0, info.queues - 1)
        if gone:
            # The next fetch comes without these queues. Another leader may have a longer log.
            self.await_check()
            return gone
        found = self._dispatcher.fetch(request)
        if any(isinstance(part.error, OffsetOutOfRange) for part in found):
            # The queues of a newer leader may end later.
            self.await_check()
        if request.seen_epoch is None:
            return found
        return [part._replace(epoch=epoch) for part in found]

    def _topic_error(self, topic: str, request: FetchRequest) -> TopicMissing | TopicDeleted | None:
        """Why one of the topics of a fetch cannot be read; None: it can.

        Raises: Unavailable while its deletion is not confirmed; TopicMissing for the only topic.
        """
        state = self.store.state
        error = deleted_topic_error(state, topic, request.generation(topic))
        if error is None:
            try:
                check_known(topic, state.topics)
            except TopicMissing as missing:
                if request.others is None:
                    raise
                return missing
        if error is not None and self.store.topics.end_of(topic) > self.visible_end:
            fault = f"topic {topic} is being deleted; ask again"
            raise Unavailable(fault, field="topic")
        return error

    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """See `WorkerLeases.lease`."""
        self._check_leads()
        try:
            return self.leases.lease(call, is_left)
        except OSError as error:
            # The record could not be appended, or a message not be read.
            raise Unavailable(f"lease: {error}", field="store") from error

    def call(self, op: str, args: Mapping[str, object]) -> dict[str, Any]:
        """See `ReplicaRole.call`. `operations.scope.LeaderScope` is this leader."""
        self._check_leads()
        return call_leader(OPERATIONS, self, op, args)

    def _check_leads(self) -> None:
        """Raises: Unavailable after the end of the led epoch: another replica may have newer messages."""
        if self._is_deposed():
            raise not_leading(self.parts.election_loop)

    def _is_deposed(self) -> bool:
        """Whether the epoch of this leader is over, while this role may not have ended yet."""
        return self._led is not None and self._elections.elected_epoch != self._led.epoch

    # What operations use beside the parts of the replica.

    def check_serving(self) -> None:
        """Raises: Unavailable, when the shard takes no writes here."""
        self._serving.check()
        if self._ended:
            raise not_leading(self.parts.election_loop)

    def await_check(self) -> None:
        """Wait until a majority says that no other replica led at this call. Raises: Unavailable if none does."""
        led = self._led
        if self.parts.options.sole_candidate is not None:
            return
        if led is not None and self._elections.await_check(led.epoch, CHECK_WAIT_MS):
            return
        if led is None or self._is_deposed():
            raise not_leading(self.parts.election_loop)
        raise NotServing(
            f"too few replicas have said within {CHECK_WAIT_MS} ms that this one leads the shard; ask again",
            field="leader",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
        )

    def await_dispatch(self) -> None:
        """Wait until readers see all messages confirmed by now. Raises: Unavailable, when that takes too long."""
        self._dispatcher.await_confirmed()

    def await_index(self) -> None:
        """Wait until the index has all messages that readers see by now. Raises: Unavailable."""
        self._dispatcher.await_indexed()

    def cancel_timer(self, offset: int) -> CancelledTimer:
        """Cancel a timer, unless its second is over: `Delays.cancel`. The caller awaits the promise."""
        return self._delays.cancel(offset)

    def end_damaged_file(self) -> None:
        """See `ReplicaRole.end_damaged_file`. Replication reads the file, and cannot wait until puts have filled it."""
        self.publish(self.store.begin_next_file())

    def publish(self, appended: AppendedRows) -> None:
        """Let the satellites work on an append, without waiting for them."""
        notify_all_done(self.acks.report_appended([AppendedPut(PutTicket(), appended, "leader")]))

    def await_promise(self, appended: AppendedRows) -> None:
        """Wait until the promise of an operation's record is kept. Raises: DeliveryUnknown."""
        self.begin_promise(appended).wait(OPERATION_TIMEOUT_S)

    def announce(self) -> None:
        """A small record is appended in a moment, and its caller waits: the flusher may wake up meanwhile."""
        if not self.acks.waiting:
            # As in `put`: a hint.
            with contextlib.suppress(Exception):
                self._appends.announce()

    def finish_promise(self, ticket: PutTicket) -> None:
        """Wait for the end of `begin_promise`. This thread may wait for the sync itself. Raises: DeliveryUnknown."""
        self.acks.await_sync(ticket, "quorum", self.appender)
        ticket.wait(OPERATION_TIMEOUT_S)

    def begin_promise(self, appended: AppendedRows) -> PutTicket:
        """Let the satellites work on an append. Returns: what ends when the promise of its record is kept."""
        ticket = PutTicket()
        notify_all_done(self.acks.report_appended([AppendedPut(ticket, appended, "quorum")]))
        return ticket

    # --- status -----------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether puts are taken now, judged by the last one."""
        is_refusing = self._serving.stop_error or self._log.health.poisoned
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
        return self.report.failures()

    def damaged_places(self) -> list[int]:
        """See `ReplicaRole.damaged_places`."""
        return self.report.damaged_places()

    def status(self) -> LeadingRow:
        """See `LeaderReport.status`."""
        return self.report.status()

    def metrics(self) -> dict[str, Any]:
        """See `LeaderReport.metrics`."""
        return self.report.metrics()
