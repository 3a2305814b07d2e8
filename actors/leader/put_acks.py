"""Puts that wait for their promise: handed to the satellites, answered as these get on, or as unknown in time.

What a put waits for is its row of store/promise.py. `PutCombiner` makes the outcome: success by watermark, exceptions
by entry. Puts of each ack mode wait in a line of their own, so that none waits for the promise of another. A promise
that names replicas is combined in Replication: its watermark comes as the replicated end, its late puts as entries.
For such puts the combiner here speaks only when Replication has kept silent for SILENT_MS beyond their deadline.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from raymq.actors.api.shard_api import PutTicket, tell_all
from raymq.actors.shared.latency import LatencyCounter
from raymq.actors.shared.retry_throttle import RetryThrottle
from raymq.actors.supervise.supervisor import STALE_MS, Supervisor
from raymq.replication.combiner import Late, PutCombiner
from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import DeliveryUnknown, RayMQError, Unavailable
from raymq.store.log.commit_log import CommitLog
from raymq.store.promise import Acks, Ends, Promise
from raymq.store.requests import Append, PutOutcome
from raymq.store.status import PutStatus

from .appender import AppendedPut, Appender

log = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps with nothing in flight; a wakeup wakes it at once
IDLE_WAIT_MS = 200
#: every wait times out: a lost wakeup only delays (D4)
BUSY_WAIT_MS = 10
#: how often satellites are looked after while puts wait
TICK_MS = 20
#: how long Replication may be late with a late put: as long as a satellite may be silent before it is replaced
SILENT_MS = STALE_MS


class Line:
    """The puts of one ack mode that wait, numbered as the combiner asks. Guarded by `PutAcks._submit_lock`."""

    def __init__(self, promise: Promise, config: StoreConfig, acknowledged: int) -> None:
        self.promise = promise
        #: Replication combines these
        self.replicated = "replicated" in promise.acknowledged_by
        silent_ms = SILENT_MS if self.replicated else 0
        self.combiner = PutCombiner(
            promise,
            flush_timeout_ms=config.sync_flush_timeout_ms + silent_ms,
            replica_timeout_ms=config.slave_timeout_ms + silent_ms,
            acknowledged=acknowledged,
        )
        #: in the order of the log
        self.puts: deque[AppendedPut] = deque()
        #: of the last put that began to wait, and the highest end of all
        self.number = 0
        self.end = 0
        #: how many have left
        self.answered = 0
        #: the last put that the combiner here has, and the last one that Replication has
        self.combined = 0
        self.submitted = 0

    def add(self, put: AppendedPut) -> None:
        """The put waits."""
        self.puts.append(put)
        self.number += 1
        self.end = max(self.end, put.appended.end_offset)

    def take(self) -> AppendedPut:
        """The first put waits no longer."""
        self.answered += 1
        return self.puts.popleft()


@dataclass
class Counters:
    """What status and the benchmarks show."""

    puts: int = 0
    rows: int = 0
    bytes: int = 0
    duplicates: int = 0
    rejected: int = 0
    unknown: int = 0
    fetches: int = 0


class PutAcks:
    """The puts under way of one leader.

    Threads: the appending one hands over; `run` is one of its own; what the satellites tell is taken under
    `_progress_lock`, by `run` and by a server thread that waits for the sync of its own put.
    """

    def __init__(
        self,
        store_log: CommitLog,
        supervisor: Supervisor,
        config: StoreConfig,
        *,
        clock: Clock,
        counters: Counters,
        promises: dict[Acks, Promise],
        on_confirmed: Callable[[], None],
        fail: Callable[[RayMQError], None],
    ) -> None:
        """Args: on_confirmed: C has moved; fail: the shard must stop writing, and `end` be called.

        promises: of this shard, by ack mode.
        """
        self._log = store_log
        self._supervisor = supervisor
        self._config = config
        self._clock = clock
        self._on_confirmed = on_confirmed
        self._fail = fail
        self._lines = {
            acks: Line(promise, config, promise.acknowledged(store_log.ends))
            for acks, promise in promises.items()
        }
        #: the confirmed end is the same for all ack modes
        self._readable = promises["quorum"].readable
        nothing, memory = Ends(0, 0, 0, 0), Ends(1, 1, 0, 0)
        #: readers see what is appended, without a satellite
        self._readable_at_once = self._readable(memory) > self._readable(nothing)
        #: receipts wait for the sync that the next append begins
        self._awaits_sync = any(
            "synced" in line.promise.acknowledged_by for line in self._lines.values()
        )
        #: how many puts wait, in all lines
        self.waiting = 0
        self._counters = counters
        #: of puts whose promise was kept; guarded by `_submit_lock`
        self.latency = LatencyCounter()
        self._submit_lock = threading.Lock()
        #: held by a thread that waits for the sync of its own put
        self._watch_lock = threading.Lock()
        #: in vain where the disk is slower than a watch
        self._watches = RetryThrottle()
        #: of what the satellites tell; order: this one, then `_submit_lock`
        self._progress_lock = threading.Lock()
        self._ended = False

    # --- handing over ---------------------------------------------------------------------------------------

    def hand_over(self, made: list[AppendedPut]) -> list[PutTicket]:
        """Hand puts to the satellites. Returns: the tickets of those that have ended already, settled."""
        try:
            return self._await(made)
        except Exception as error:
            log.exception("behind an append")
            self._fail(Unavailable(f"behind an append: {error!r}", field="store"))
            # Also where the shard is stopping already: no ticket may end twice.
            self.end()
        # Stored, but no line waits for their syncs any more. Every stream is notified, also of puts that ended before.
        with self._submit_lock:
            for put in made:
                if not put.ticket.done:
                    self._settle_unknown(put)
        return [put.ticket for put in made]

    def publish_early(self) -> None:
        """Let the flusher begin, where no put waits, before `hand_over`. Callers: the appending thread."""
        if self._awaits_sync and not self.waiting:
            try:
                with self._submit_lock:
                    self._supervisor.publish_appended(self._log.end)
            except Exception:
                # Trouble comes again in `hand_over`, which tells of it.
                pass

    def _await(self, made: list[AppendedPut]) -> list[PutTicket]:
        ended: list[PutTicket] = []
        if self._readable_at_once:
            # What is acknowledged at once is readable at once.
            with self._progress_lock:
                self._log.note_confirmed(self._readable(self._log.ends))
            self._on_confirmed()
        now_ms = self._clock.monotonic_ms()
        with self._submit_lock:
            # Order: bytes (written), then the word, then the wakeup.
            self._supervisor.publish_appended(self._log.end)
            ends = self._log.ends
            kept: dict[Acks, int] = {}
            for put in made:
                line = self._lines[put.acks]
                if put.acks not in kept:
                    kept[put.acks] = line.promise.acknowledged(ends)
                if not put.appended.waits or put.appended.end_offset <= kept[put.acks]:
                    self._settle(put, self._clock.monotonic())
                elif self._ended:
                    # The ack loop is over.
                    self._settle_unknown(put)
                else:
                    line.add(put)
                    self.waiting += 1
                    continue
                ended.append(put.ticket)
            for line in self._lines.values():
                if line.combined < line.number:
                    line.combined = line.number
                    line.combiner.add(line.number, line.end, now_ms)
                    self._submit(line, now_ms)
        self._supervisor.wake_for_append()
        return ended

    def _submit(self, line: Line, now_ms: int) -> None:
        """Hand to Replication what it does not know of; where its ring is full, again at the next round."""
        if not line.replicated or line.submitted == line.number:
            return
        if self._supervisor.submit(line.number, line.end, now_ms):
            line.submitted = line.number

    def await_room(self) -> None:
        """The transient pool is full. Callers: whoever appends; the puts of its group are not published yet."""
        with self._submit_lock:
            self._supervisor.publish_appended(self._log.end)
        self._supervisor.wake_first()
        # Looked at and noted in one go: an older word that is noted behind this one would claim room again that the
        # next append overwrites, and a start would take that for what is to be committed yet.
        with self._progress_lock:
            self._log.note_committed(self._supervisor.committed())

    # --- answering ------------------------------------------------------------------------------------------

    def run(self, stopping: Callable[[], bool]) -> None:
        """Answer puts and look after the satellites until told to stop. Raises: Unavailable, when poisoned."""
        ticked_ms = 0
        while not stopping():
            self._supervisor.wait(BUSY_WAIT_MS if self.waiting else IDLE_WAIT_MS)
            now_ms = self._clock.monotonic_ms()
            # Acks first: with puts under way most wakeups are about them.
            if not self.waiting or now_ms - ticked_ms >= TICK_MS:
                self._supervisor.tick()
                ticked_ms = now_ms
            if self._supervisor.poisoned is not None:
                self._log.poison(self._supervisor.poisoned)
                raise Unavailable(self._supervisor.poisoned, field="store", status="poisoned")
            self._advance()

    def await_sync(self, ticket: PutTicket, acks: Acks, appender: Appender) -> None:
        """While no other put waits: to wake the ack loop takes about as long as the sync itself.

        Callers: the thread that brought this put. Does nothing where the put waits for more than the sync.
        """
        line = self._lines[acks]
        if line.promise.acknowledged_by != ("synced",) or not self._watches.should_try():
            return
        try:
            first = line.puts[0]
        except IndexError:
            return
        if first.ticket is not ticket or not self._watch_lock.acquire(blocking=False):
            return
        try:
            flushed = self._supervisor.await_flushed(
                first.appended.end_offset, lambda: self.waiting == 1 and not appender.waiting
            )
            self._watches.record(worked=flushed)
            self._advance()
        except Exception as error:
            log.exception("after a put")
            self._fail(Unavailable(f"after a put: {error!r}", field="store"))
        finally:
            self._watch_lock.release()

    def _advance(self) -> None:
        """Answer what the satellites have done. Callers: the ack loop, and who waits for its own put."""
        log_ = self._log
        with self._progress_lock:
            ends, late = self._supervisor.progress()
            log_.note_committed(ends.committed)
            log_.note_synced(ends.synced)
            if log_.sync_failed:
                # A later sync of the flusher may have succeeded without the lost bytes. `run` ends what waits.
                return
            moved = log_.note_confirmed(self._readable(ends))
        try:
            # Also when none seems to wait: a put may be on its way into its line, and have seen the ends of before.
            self._complete(ends, late)
        finally:
            if moved:
                # After the acks: both need the interpreter.
                self._on_confirmed()

    def _complete(self, ends: Ends, reported: list[Late]) -> None:
        now_ms, now_s = self._clock.monotonic_ms(), self._clock.monotonic()
        ended: list[PutTicket] = []
        with self._submit_lock:
            for line in self._lines.values():
                puts = line.puts
                if not puts:
                    continue
                late = line.combiner.combine(ends, now_ms)
                acknowledged = line.combiner.acknowledged
                while puts and puts[0].appended.end_offset <= acknowledged:
                    put = line.take()
                    self._settle(put, now_s)
                    ended.append(put.ticket)
                for number, end, status in [*reported, *late] if line.replicated else late:
                    while puts and line.answered < number and puts[0].appended.end_offset <= end:
                        put = line.take()
                        self._settle_unknown(put, status)
                        ended.append(put.ticket)
                self._submit(line, now_ms)
            self.waiting -= len(ended)
        if ended:
            tell_all(ended)

    def _settle(self, put: AppendedPut, now_s: float) -> None:
        """The promise was kept. Needs `_submit_lock`."""
        ticket = put.ticket
        if ticket.began:
            self.latency.add(now_s - ticket.began)
        ticket.settle(_outcome(put.appended))

    def _settle_unknown(self, put: AppendedPut, status: PutStatus | None = None) -> None:
        """Stored, and not known whether the promise will be kept. Args: status: None where the shard has ended."""
        if status is None:
            promise = self._lines[put.acks].promise
            status = promise.late(self._log.ends, put.appended.end_offset)
        self._counters.unknown += 1
        put.ticket.settle(
            DeliveryUnknown(
                f"stored at the leader, but {status.value}: it may or may not stay; a retry with the same sequence "
                "is safe",
                status=status.value,
                append=put.appended._asdict(),
            )
        )

    def end(self) -> None:
        """The shard has stopped writing: nobody knows of what waits, nor of what may still come."""
        with self._submit_lock:
            self._ended = True
            left = [line.take() for line in self._lines.values() for _ in range(len(line.puts))]
            self.waiting = 0
            # Under the lock: another thread may be at these puts, and no ticket ends twice.
            for put in left:
                self._settle_unknown(put)
        tell_all(put.ticket for put in left)


def _outcome(appended: Append) -> PutOutcome:
    return PutOutcome(
        appended.first_offset,
        appended.count,
        appended.duplicates,
        appended.store_time_ms,
        appended.physical_offset,
        appended.last_offset,
    )
