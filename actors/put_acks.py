"""Puts that wait for their promise: handed to the satellites, answered as these get on, or as unknown in time.

Success is told by watermark (committed, synced, confirmed), exceptions by entry.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import DeliveryUnknown, RayMQError, Unavailable
from raymq.store.log.commit_log import CommitLog
from raymq.store.requests import Append, PutOutcome
from raymq.store.status import PutStatus

from .appender import Appender, Made
from .latency import LatencyCounter
from .shard_api import PutTicket, tell_all
from .supervisor import Supervisor
from .tries import Tries

log = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps with nothing in flight; a bell wakes it at once
IDLE_WAIT_MS = 200
#: every wait times out: a lost bell only delays (D4)
BUSY_WAIT_MS = 10
#: how often satellites are looked after while puts wait
TICK_MS = 20


@dataclass
class Waiting:
    """A put that waits for its promise."""

    ticket: PutTicket
    append: Append
    leader_only: bool
    deadline_ms: int
    sequence: int


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
        mirror: bool,
        on_confirmed: Callable[[], None],
        fail: Callable[[RayMQError], None],
    ) -> None:
        """Args: on_confirmed: C has moved; fail: the shard must stop writing, and `end` be called."""
        self._log = store_log
        self._supervisor = supervisor
        self._config = config
        self._clock = clock
        self._mirror = mirror
        self._on_confirmed = on_confirmed
        self._fail = fail
        self._sync = config.flush == "sync"
        #: in the order of the log
        self.waiting: deque[Waiting] = deque()
        self._counters = counters
        #: of puts whose promise was kept; guarded by `_submit_lock`
        self.latency = LatencyCounter()
        self._submit_lock = threading.Lock()
        #: held by a thread that waits for the sync of its own put
        self._watch_lock = threading.Lock()
        #: in vain where the disk is slower than a watch
        self._watches = Tries()
        #: of what the satellites tell; order: this one, then `_submit_lock`
        self._progress_lock = threading.Lock()
        self._sequence = 0
        self._ended = False

    # --- handing over ---------------------------------------------------------------------------------------

    def hand_over(self, made: list[Made]) -> list[PutTicket]:
        """Hand puts to the satellites. Returns: the tickets of those that have ended already, settled."""
        try:
            return self._await(made)
        except Exception as error:
            log.exception("behind an append")
            self._fail(Unavailable(f"behind an append: {error!r}", field="store"))
            # Also where the shard is stopping already: no ticket may end twice.
            self.end()
        # Stored, but nobody waits for their syncs any more.
        left = [put for put in made if not put.ticket.done]
        for put in left:
            self._settle_unknown(Waiting(put.ticket, put.appended, put.leader_only, 0, 0))
        return [put.ticket for put in left]

    def publish_early(self) -> None:
        """Let the flusher begin, where nobody else waits, before `hand_over`. Callers: whoever appends."""
        if not self.waiting:
            try:
                with self._submit_lock:
                    self._supervisor.publish_appended(self._log.end)
            except Exception:
                # Trouble comes again in `hand_over`, which tells of it.
                pass

    def _await(self, made: list[Made]) -> list[PutTicket]:
        ended: list[PutTicket] = []
        if not self._sync and not self._mirror:
            # What is acknowledged at once is readable at once.
            with self._progress_lock:
                self._note_confirmed(0)
            self._on_confirmed()
        now_ms = self._clock.monotonic_ms()
        with self._submit_lock:
            # Order: bytes (written), then the word, then the bell.
            self._supervisor.publish_appended(self._log.end)
            for ticket, appended, leader_only in made:
                if not appended.waits or self._kept(appended.end_offset, leader_only=leader_only):
                    self._count_latency(ticket, self._clock.monotonic())
                    ticket.settle(_outcome(appended))
                    ended.append(ticket)
                    continue
                self._sequence += 1
                limit_ms = self._config.sync_flush_timeout_ms
                if self._mirror and not leader_only:
                    limit_ms = max(limit_ms, self._config.slave_timeout_ms)
                deadline_ms = now_ms + limit_ms
                waiting = Waiting(ticket, appended, leader_only, deadline_ms, self._sequence)
                if self._ended:
                    # The ack loop is over.
                    self._settle_unknown(waiting)
                    ended.append(ticket)
                    continue
                self.waiting.append(waiting)
                acks: Literal["quorum", "leader"] = "leader" if leader_only else "quorum"
                self._supervisor.submit(self._sequence, appended.end_offset, acks, deadline_ms)
        self._supervisor.ring()
        return ended

    def _kept(self, end_offset: int, *, leader_only: bool) -> bool:
        if leader_only and self._mirror:
            return not self._sync or self._log.synced >= end_offset
        # By C, which moves behind the sync: what is acknowledged may be read.
        return self._log.confirmed >= end_offset or not (self._mirror or self._sync)

    def await_room(self) -> None:
        """The transient pool is full. Callers: whoever appends; the puts of its group are not published yet."""
        with self._submit_lock:
            self._supervisor.publish_appended(self._log.end)
        self._supervisor.ring_first()
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
            # Acks first: with puts under way most bells are about them.
            if not self.waiting or now_ms - ticked_ms >= TICK_MS:
                self._supervisor.tick()
                ticked_ms = now_ms
            if self._supervisor.poisoned is not None:
                self._log.poison(self._supervisor.poisoned)
                raise Unavailable(self._supervisor.poisoned, field="store", status="poisoned")
            self._advance()

    def await_sync(self, ticket: PutTicket, appender: Appender) -> None:
        """While nobody else waits: to wake the ack loop takes about as long as the sync itself.

        Callers: who brought this put, in the sync mode without a mirror.
        """
        if not self._watches.due():
            return
        try:
            last = self.waiting[0]
        except IndexError:
            return
        if last.ticket is not ticket or not self._watch_lock.acquire(blocking=False):
            return
        try:
            flushed = self._supervisor.await_flushed(
                last.append.end_offset, lambda: len(self.waiting) == 1 and not appender.waiting
            )
            self._watches.note(worked=flushed)
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
            progress = self._supervisor.progress()
            log_.note_committed(progress.committed)
            log_.note_synced(progress.flushed)
            moved = self._note_confirmed(progress.confirmed)
        try:
            self._complete()
        finally:
            if moved:
                # Behind the acks: both need the interpreter.
                self._on_confirmed()
        if progress.statuses:
            self._except(dict(progress.statuses))

    def _note_confirmed(self, replicated: int) -> bool:
        """C, once more: what the replicas have, else what the disk, else what the log has. Needs `_progress_lock`.

        Returns: whether it has moved.
        """
        log_ = self._log
        if self._mirror:
            return log_.note_confirmed(replicated)
        return log_.note_confirmed(log_.synced if self._sync else log_.committed)

    def _complete(self) -> None:
        now, now_s = self._clock.monotonic_ms(), self._clock.monotonic()
        ended: list[PutTicket] = []
        with self._submit_lock:
            while self.waiting:
                head = self.waiting[0]
                if self._kept(head.append.end_offset, leader_only=head.leader_only):
                    self._count_latency(head.ticket, now_s)
                    head.ticket.settle(_outcome(head.append))
                elif now >= head.deadline_ms:
                    self._settle_unknown(head)
                else:
                    break
                self.waiting.popleft()
                if head.ticket.notify is not None:
                    ended.append(head.ticket)
        if ended:
            tell_all(ended)

    def _count_latency(self, ticket: PutTicket, now_s: float) -> None:
        """Needs `_submit_lock`."""
        if ticket.began:
            self.latency.add(now_s - ticket.began)

    def _except(self, codes: dict[int, int]) -> None:
        """Exceptions come by entry: the satellite's word on puts that missed their time."""
        with self._submit_lock:
            late = [w for w in self.waiting if w.sequence in codes]
            for waiting in late:
                self.waiting.remove(waiting)
        for waiting in late:
            self._settle_unknown(waiting, PutStatus.of_code(codes[waiting.sequence]))
        tell_all(waiting.ticket for waiting in late)

    def _settle_unknown(self, waiting: Waiting, status: PutStatus | None = None) -> None:
        if status is None:
            flushed = self._log.synced >= waiting.append.end_offset or not self._sync
            # The replica's status wins over the flush's, as in handleDiskFlushAndHA.
            late_replica = self._mirror and not waiting.leader_only and flushed
            status = PutStatus.FLUSH_SLAVE_TIMEOUT if late_replica else PutStatus.FLUSH_DISK_TIMEOUT
        self._counters.unknown += 1
        waiting.ticket.settle(
            DeliveryUnknown(
                f"stored at the leader, but {status.value}: it may or may not stay; a retry with the same sequence "
                "is safe",
                status=status.value,
                append=waiting.append._asdict(),
            )
        )

    def end(self) -> None:
        """The shard has stopped writing: nobody knows of what waits, nor of what may still come."""
        with self._submit_lock:
            self._ended = True
            waiting = list(self.waiting)
            self.waiting.clear()
        for entry in waiting:
            self._settle_unknown(entry)
        tell_all(entry.ticket for entry in waiting)


def _outcome(appended: Append) -> PutOutcome:
    return PutOutcome(
        appended.first_offset,
        appended.count,
        appended.duplicates,
        appended.store_time_ms,
        appended.physical_offset,
        appended.last_offset,
    )
