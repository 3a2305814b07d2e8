"""Reports waiting puts to the satellites. Answers each when its promise is kept, or as unknown at a deadline.

A put waits for the ends that its row of store/config/promise.py names. `PutCombiner` makes the outcomes, success by a
watermark and exceptions by entries. Puts of each ack mode wait in a queue of their own, so that none waits for the
promise of another.

Replication combines a promise that names replicas. Its watermark arrives here as the replicated end, and its late puts
arrive as entries. For such puts the combiner here reports only when Replication has been silent for
REPLICATION_SILENCE_MS after their deadline.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.actors.shared.latency import LatencyCounter
from raymq.actors.shared.retry_throttle import RetryThrottle
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.actors.supervise.supervisor import STALE_MS
from raymq.replication.combiner import LatePuts, PutCombiner
from raymq.store.base.errors import DeliveryUnknown, Unavailable
from raymq.store.base.slow_calls import SLOW_S, SlowCalls
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import Acks, Ends, Promise
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.requests import PutOutcome

from .appender import AppendedPut, Appender

logger = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps while no put waits; a wakeup ends the sleep
IDLE_WAIT_MS = 500
#: ... and while puts wait: a lost wakeup delays by this
BUSY_WAIT_MS = 10
#: how often satellites are supervised while puts wait
TICK_MS = 20
#: how long Replication may take to report a late put: as long as a satellite may be silent before it is replaced
REPLICATION_SILENCE_MS = STALE_MS


class AckQueue:
    """The waiting puts of one ack mode, numbered for the combiner. Guarded by `PutAcks._submit_lock`."""

    def __init__(self, promise: Promise, config: StoreConfig, acknowledged: int) -> None:
        self.promise = promise
        #: Replication combines these
        self.waits_for_replicas = promise.waits_for_replicas
        silence_ms = REPLICATION_SILENCE_MS if self.waits_for_replicas else 0
        self._silence_ms = silence_ms
        self.combiner = PutCombiner(
            promise,
            flush_timeout_ms=config.sync_flush_timeout_ms + silence_ms,
            replica_timeout_ms=config.slave_timeout_ms + silence_ms,
            acknowledged=acknowledged,
        )

        #: in the order of the log
        self.puts: deque[AppendedPut] = deque()
        #: number of the last put that began to wait
        self.last_number = 0
        #: highest end of all puts
        self.end = 0
        #: how many puts have left the queue
        self.answered_count = 0
        #: number of the last put that the combiner here has
        self.combined_up_to = 0
        #: number of the last put that Replication has
        self.submitted_up_to = 0

    def set_timeouts(self, config: StoreConfig) -> None:
        """Use the timeouts of these options, also for the puts that wait."""
        silence_ms = self._silence_ms
        self.combiner.set_timeouts(
            config.sync_flush_timeout_ms + silence_ms, config.slave_timeout_ms + silence_ms
        )

    def add(self, put: AppendedPut) -> None:
        """Let the put wait."""
        self.puts.append(put)
        self.last_number += 1
        self.end = max(self.end, put.appended.end_offset)

    def take(self) -> AppendedPut:
        """Remove and return the first put."""
        self.answered_count += 1
        return self.puts.popleft()


@dataclass
class PutCounters:
    """Totals for status and the benchmarks."""

    puts: int = 0
    rows: int = 0
    bytes: int = 0
    duplicates: int = 0
    rejected: int = 0
    unknown: int = 0
    fetches: int = 0


class PutAcks:
    """The puts under way of one leader.

    Threads: the appending one hands puts over; the ack loop calls `step`. The satellites' progress is read under
    `_progress_lock`, by the ack loop and by a server thread that awaits the sync of its own put.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        promises: dict[Acks, Promise],
        counters: PutCounters,
        on_confirmed: Callable[[], None],
        *,
        latency: LatencyCounter | None = None,
    ) -> None:
        """Args: `promises`: of this shard, by ack mode. `on_confirmed`: called after the confirmed end has moved.

        `latency`: of puts whose promise was kept, guarded by `_submit_lock`.
        """
        self._log = parts.log
        self._config = parts.config
        self._options_version = parts.config.version
        self._supervisor = parts.supervisor
        self._appends = parts.supervisor.appends
        self._clock = parts.clock
        self._fail = parts.serving.fail
        self._idle_wait_ms = parts.election_loop.idle_wait_ms
        self._on_confirmed = on_confirmed
        self._queues = {
            acks: AckQueue(promise, parts.config, promise.acknowledged_end(parts.log.ends))
            for acks, promise in promises.items()
        }

        #: the confirmed end is the same for all ack modes
        self._confirmed_end = promises["quorum"].confirmed_end
        #: readers see a message before a sync and before any replica has it
        self._readable_at_once = promises["quorum"].readable_in_memory
        #: receipts wait for the sync that the next append begins
        self._awaits_sync = any(promise.waits_for_sync for promise in promises.values())

        #: how many puts wait, in all queues
        self.waiting = 0
        self._counters = counters
        self.latency = latency or LatencyCounter()
        #: what `_write_lines` writes: the kind, the seconds and the facts of a slow or late put
        self._lines: list[tuple[SlowCalls, float, str]] = []
        self.slow_puts = SlowCalls("a put", logger, parts.clock)
        self.late_replicas = SlowCalls(
            "a put that too few replicas have had in time", logger, parts.clock
        )

        self._submit_lock = threading.Lock()
        #: held by a thread that awaits the sync of its own put
        self._await_sync_lock = threading.Lock()
        #: awaiting a sync does not help if the disk is slower than WATCH_US
        self._await_sync_throttle = RetryThrottle()
        #: guards the ends that the satellites report; order: this one, then `_submit_lock`
        self._progress_lock = threading.Lock()
        self._ticked_ms = 0
        self._ended = False

    # --- appended puts ----------------------------------------------------------------------------

    def report_appended(self, puts: list[AppendedPut]) -> list[PutTicket]:
        """Report appended puts to the satellites. Returns: the tickets that are finished already."""
        try:
            return self._submit(puts)
        except Exception as error:
            logger.exception("after an append")
            self._fail(Unavailable(f"after an append: {error!r}", field="store"))
            # Also if the shard is stopping already: no ticket may be finished twice.
            self.end()
        # Stored, but in no queue. Every stream is notified, even of puts that were finished before.
        with self._submit_lock:
            for put in puts:
                if not put.ticket.done:
                    self._finish_unknown(put)
        return [put.ticket for put in puts]

    def publish_early(self) -> None:
        """Let the flusher begin before `report_appended`, if no put waits. Callers: the appending thread."""
        if self._awaits_sync and not self.waiting:
            try:
                with self._submit_lock:
                    if not self._ended:
                        self._appends.publish(self._log.end)
            except Exception:
                # `report_appended` meets the same error and reports it.
                pass

    def _submit(self, puts: list[AppendedPut]) -> list[PutTicket]:
        if self._readable_at_once:
            # Puts that are acknowledged at once are readable at once.
            with self._progress_lock:
                if not self._ended:
                    self._log.note_confirmed(self._confirmed_end(self._log.ends))
            self._on_confirmed()

        now_ms = self._clock.monotonic_ms()
        with self._submit_lock:
            if self._ended:
                # The log may be another leader's by now: its ends say nothing about these puts.
                for put in puts:
                    self._finish_unknown(put)
                return [put.ticket for put in puts]
            # Order: bytes (written), then the shared field, then the wakeup.
            self._appends.publish(self._log.end)
            finished = self._enqueue(puts)
            for queue in self._queues.values():
                if queue.combined_up_to < queue.last_number:
                    queue.combined_up_to = queue.last_number
                    queue.combiner.add(queue.last_number, queue.end, now_ms)
                    if queue.waits_for_replicas:
                        self._submit_to_replication(queue, now_ms)
        self._appends.wake_for_append()
        self._write_lines()
        return finished

    def _enqueue(self, puts: list[AppendedPut]) -> list[PutTicket]:
        """Let puts wait whose promise is not kept yet. Needs `_submit_lock`. Returns: the tickets of the others."""
        finished: list[PutTicket] = []
        ends = self._log.ends
        acknowledged: dict[Acks, int] = {}
        for put in puts:
            queue = self._queues[put.acks]
            if put.acks not in acknowledged:
                acknowledged[put.acks] = queue.promise.acknowledged_end(ends)
            if not put.appended.wait_store_ok or put.appended.end_offset <= acknowledged[put.acks]:
                self._finish(put, self._clock.monotonic())
                finished.append(put.ticket)
            else:
                queue.add(put)
                self.waiting += 1
        return finished

    def _submit_to_replication(self, queue: AckQueue, now_ms: int) -> None:
        """Report puts that Replication does not have yet. If its ring is full, the next round reports them."""
        if queue.submitted_up_to < queue.last_number and self._supervisor.submit(
            queue.last_number, queue.end, now_ms
        ):
            queue.submitted_up_to = queue.last_number

    def await_pool_space(self) -> None:
        """The transient pool is full. Callers: the appending thread, whose last puts are not published yet."""
        with self._submit_lock:
            self._appends.publish(self._log.end)
        self._appends.wake_now()
        # The end is read and noted under one lock. Otherwise an older end, noted after this one, would count space as
        # used that the next append overwrites. A restart would then take those bytes for uncommitted ones.
        with self._progress_lock:
            self._log.note_committed(self._supervisor.committed())

    # --- answering --------------------------------------------------------------------------------

    def step(self) -> None:
        """Wait for a wakeup, then answer puts and supervise the satellites. Raises: Unavailable, when poisoned."""
        self._supervisor.wait(BUSY_WAIT_MS if self.waiting else self._idle_wait_ms(IDLE_WAIT_MS))
        now_ms = self._clock.monotonic_ms()
        # Acks first: with puts under way most wakeups are about them.
        if not self.waiting or now_ms - self._ticked_ms >= TICK_MS:
            self._supervisor.tick()
            self._ticked_ms = now_ms
            if self._options_version != self._config.version:
                self._follow_options()
        if self._supervisor.poisoned is not None:
            self._log.health.poison(self._supervisor.poisoned)
            raise Unavailable(
                self._supervisor.poisoned,
                field="store",
                status=PutStatus.SERVICE_NOT_AVAILABLE.value,
            )
        self._advance()

    def _follow_options(self) -> None:
        """Use the timeouts that have changed."""
        self._options_version = self._config.version
        with self._submit_lock:
            for queue in self._queues.values():
                queue.set_timeouts(self._config)

    def await_sync(self, ticket: PutTicket, acks: Acks, appender: Appender) -> None:
        """Answer the puts from this one on here, while no other put waits.

        Waking the ack loop takes about as long as the sync. Does nothing if the put waits for more than the sync, or is
        not the first that waits. Callers: the thread that brought the put and those after it.
        """
        queue = self._queues[acks]
        if (
            queue.waits_for_replicas
            or not queue.promise.waits_for_sync
            or not self._appends.may_await_synced()
            or not self._await_sync_throttle.should_try()
        ):
            return

        try:
            first, last = queue.puts[0], queue.puts[-1]
        except IndexError:
            return
        if first.ticket is not ticket or not self._await_sync_lock.acquire(blocking=False):
            return

        waiting = self.waiting
        try:
            synced = self._appends.await_synced(
                last.appended.end_offset,
                lambda: self.waiting == waiting and not appender.waiting,
            )
            self._await_sync_throttle.note_result(worked=synced)
            self._advance()
        except Exception as error:
            logger.exception("after a put")
            self._fail(Unavailable(f"after a put: {error!r}", field="store"))
        finally:
            self._await_sync_lock.release()

    def _advance(self) -> None:
        """Take the satellites' progress and answer. Callers: the ack loop, and a thread that awaits its own put."""
        log = self._log
        with self._progress_lock:
            if self._ended:
                # The log may be another leader's by now.
                return
            ends, late = self._supervisor.progress()
            log.note_committed(ends.committed)
            log.note_synced(ends.synced)
            if log.health.sync_failed:
                # A later sync of the flusher may have succeeded without the lost bytes, so that its end proves nothing.
                # The ack loop ends the puts.
                return
            moved = log.note_confirmed(self._confirmed_end(ends))

        try:
            # Also when no put waits: the appending thread may have read older ends and be about to queue its put.
            self._complete(ends, late)
        finally:
            if moved:
                # After the acks: both need the interpreter.
                self._on_confirmed()

    def _complete(self, ends: Ends, reported: list[LatePuts]) -> None:
        """Finish the puts whose promise is kept, and those that are late."""
        now_ms, now_s = self._clock.monotonic_ms(), self._clock.monotonic()
        finished: list[PutTicket] = []
        with self._submit_lock:
            for queue in self._queues.values():
                puts = queue.puts
                if not puts:
                    continue

                late = queue.combiner.combine(ends, now_ms)
                acknowledged = queue.combiner.acknowledged
                while puts and puts[0].appended.end_offset <= acknowledged:
                    put = queue.take()
                    self._finish(put, now_s)
                    finished.append(put.ticket)

                for number, end, status in [*reported, *late] if queue.waits_for_replicas else late:
                    while (
                        puts
                        and queue.answered_count < number
                        and puts[0].appended.end_offset <= end
                    ):
                        put = queue.take()
                        self._finish_unknown(put, status)
                        finished.append(put.ticket)
                if queue.waits_for_replicas:
                    self._submit_to_replication(queue, now_ms)
            self.waiting -= len(finished)

        if finished:
            notify_all_done(finished)
        self._write_lines()

    def _finish(self, put: AppendedPut, now_s: float) -> None:
        """The promise was kept. Needs `_submit_lock`."""
        ticket = put.ticket
        if ticket.began:
            took_s = now_s - ticket.began
            self.latency.add(took_s)
            if took_s > SLOW_S:
                self._note_later(self.slow_puts, took_s, put)
        ticket.finish(PutOutcome.of(put.appended))

    def _finish_unknown(self, put: AppendedPut, status: PutStatus | None = None) -> None:
        """Stored, without knowing whether the promise will be kept. Args: `status`: None if the shard has ended."""
        if status is PutStatus.FLUSH_SLAVE_TIMEOUT:
            waited_s = self._clock.monotonic() - put.ticket.began if put.ticket.began else 0.0
            self._note_later(self.late_replicas, waited_s, put)
        if status is None:
            promise = self._queues[put.acks].promise
            status = promise.late_status(self._log.ends, put.appended.end_offset)
        self._counters.unknown += 1
        put.ticket.finish(
            DeliveryUnknown(
                f"stored at the leader, but {status.value}: it may or may not stay; a retry with the same sequence "
                "is safe",
                status=status.value,
                append=put.appended._asdict(),
            )
        )

    def _note_later(self, kind: SlowCalls, seconds: float, put: AppendedPut) -> None:
        """Count a put now, before its answer, and let `_write_lines` write of it. Needs `_submit_lock`."""
        kind.add()
        facts = f"acks {put.acks}, {put.appended.count} message(s) up to {put.appended.end_offset}"
        self._lines.append((kind, seconds, f"{facts}; {self._log.ends}"))

    def _write_lines(self) -> None:
        """Write what was noted under `_submit_lock`. Callers: without it, because the disk of the log may hang."""
        while self._lines:
            try:
                kind, seconds, facts = self._lines.pop(0)
            except IndexError:
                # Another thread has written it.
                return
            kind.write(seconds, facts)

    def end(self) -> None:
        """Finish waiting and later puts as unknown: the shard has stopped writing."""
        with self._progress_lock, self._submit_lock:
            self._ended = True
            left: list[AppendedPut] = []
            for queue in self._queues.values():
                while queue.puts:
                    left.append(queue.take())
            self.waiting = 0
            # Under the lock: another thread may handle these puts, and no ticket may be finished twice.
            for put in left:
                self._finish_unknown(put)
        notify_all_done(put.ticket for put in left)
