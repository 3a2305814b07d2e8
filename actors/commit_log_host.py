"""The CommitLog role: one process that owns a replica's log, answers clients, and minds its satellites.

A plain class; `shells.py` wraps it as a Ray actor. It serves its store through a server it is given (the Flight
server lives in cluster/), so nothing here knows the wire.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import (
    Corrupt,
    DeliveryUnknown,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    require,
)
from raymq.store.files import Files
from raymq.store.flush import PAGE_BYTES
from raymq.store.message_store import CheckedPut, MessageStore
from raymq.store.put import Append, FetchRequest, FetchSlice, PutOutcome, PutRequest
from raymq.store.status import PutStatus

from .appender import Appender, Made
from .control_block import COMMIT_REAL_TIME
from .latency import LatencyCounter
from .readings import as_status, read_leader
from .shard_api import PutTicket, tell_all
from .supervisor import Supervisor

log = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps with nothing in flight; a bell wakes it at once
IDLE_WAIT_MS = 200
#: every wait times out: a lost bell only delays (D4)
BUSY_WAIT_MS = 10
#: how often satellites are looked after while puts wait
TICK_MS = 20
#: batches up to this are encoded in about the time that a process needs to wake up
ANNOUNCED_ROWS_MAX = 16
#: while nobody waits to read, units are dispatched together: each dispatch alone takes the interpreter from the puts
DISPATCH_LINGER_S = 0.004
#: how long a read waits for the dispatch of what was acknowledged before it; then it sees what there is
DISPATCH_WAIT_S = 0.1
#: when a watch for a sync was in vain, one put leaves it to the ack loop, then twice as many, at most so many
WATCH_PAUSE_PUTS_MAX = 32


class Server(Protocol):
    """What the host needs of the server that faces the network."""

    port: int

    def close(self) -> None:
        """Stop serving."""


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


class LeaderHost:
    """The leader of a shard: implements `shard_api.ShardBackend` over a MessageStore and a Supervisor.

    Threads: server threads call put, fetch and call; appends of large batches, acks, dispatch and allocation ahead
    have a thread each. What the satellites tell is taken under `_progress_lock`, by the ack thread and by a server
    thread that waits for the sync of its own put.
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
        #: of puts whose promise was kept; guarded by `_submit_lock`
        self.append_latency = LatencyCounter()
        self.started_ms = self.clock.now_ms()
        self.failed: RayMQError | None = None
        #: shard -> endpoint, as far as this shard was told
        self.routes: dict[str, str] = {}
        self._sync = config.flush == "sync"
        self._mirror = "replication" in roles
        self._waiting: deque[Waiting] = deque()
        self._appender = Appender(self._append, self._hand_over)
        self._submit_lock = threading.Lock()
        #: held by a thread that waits for the sync of its own put
        self._watch_lock = threading.Lock()
        #: puts that do not wait themselves, because the disk was slower than a watch
        self._watch_pause = 0
        self._next_watch_pause = 1
        #: of what the satellites tell; order: this one, then `_submit_lock`
        self._progress_lock = threading.Lock()
        self._sequence = 0
        self._readable = threading.Condition()
        #: readers that wait, guarded by `_readable`
        self._readers = 0
        self._dispatch_wake = threading.Event()
        #: somebody waits for the dispatch
        self._dispatch_now = threading.Event()
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
        self._ahead = self.store.log.allocate_ahead()
        self._threads = [
            threading.Thread(
                target=self._guard(lambda: self._appender.run(lambda: self._stopping)),
                name="raymq-append",
                daemon=True,
            ),
            threading.Thread(target=self._guard(self._run_acks), name="raymq-acks", daemon=True),
            threading.Thread(
                target=self._guard(self._run_dispatch), name="raymq-dispatch", daemon=True
            ),
            threading.Thread(
                target=self._guard(self._run_allocate), name="raymq-allocate", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        self._dispatch_wake.set()

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
            log_.on_pool_full = self._await_room
            log_.publish_pool(self.supervisor.incarnation)
        except BaseException:
            store.abandon()
            raise
        return store

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
        self._check_serving()
        if not self._waiting and request.batch.num_rows <= ANNOUNCED_ROWS_MAX:
            # Nobody keeps the flusher awake: it wakes up while this is encoded.
            self.supervisor.announce_append()
        try:
            checked = self.store.check(request)
        except (Rejected, Unavailable):
            self.counters.rejected += 1
            raise
        ticket = PutTicket(notify, began)
        # From here on it may be stored: nothing is raised, the ticket tells.
        appended = self._appender.put(ticket, checked)
        if alone and appended and self._sync and not self._mirror:
            self._await_sync(ticket)
        return ticket

    def _await_sync(self, ticket: PutTicket) -> None:
        """While nobody else waits: to wake the ack loop takes about as long as the sync itself."""
        if self._watch_pause:
            self._watch_pause -= 1
            return
        try:
            last = self._waiting[0]
        except IndexError:
            return
        if last.ticket is not ticket or not self._watch_lock.acquire(blocking=False):
            return
        try:
            flushed = self.supervisor.await_flushed(
                last.append.end_offset,
                lambda: len(self._waiting) == 1 and not self._appender.waiting,
            )
            if flushed:
                self._next_watch_pause = 1
            else:
                self._watch_pause = self._next_watch_pause
                self._next_watch_pause = min(2 * self._next_watch_pause, WATCH_PAUSE_PUTS_MAX)
            self._advance()
        except Exception as error:
            log.exception("after a put")
            self._fail(Unavailable(f"after a put: {error!r}", field="store"))
        finally:
            self._watch_lock.release()

    def _append(self, checked: CheckedPut) -> Append:
        try:
            appended = self.store.append(checked)
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
        self.counters.bytes += int(checked.prepared.sizes[appended.duplicates :].sum())
        self.counters.duplicates += appended.duplicates
        return appended

    def _hand_over(self, made: list[Made]) -> list[PutTicket]:
        """Hand puts to the satellites. Returns: the tickets of those that have ended already, settled."""
        try:
            return self._await(made)
        except Exception as error:
            log.exception("behind an append")
            self._fail(Unavailable(f"behind an append: {error!r}", field="store"))
            # Also where the shard is stopping already: no ticket may end twice.
            self._settle_left()
        # Stored, but nobody waits for their syncs any more.
        left = [put for put in made if not put.ticket.done]
        for put in left:
            self._settle_unknown(Waiting(put.ticket, put.appended, put.leader_only, 0, 0))
        return [put.ticket for put in left]

    def _await(self, made: list[Made]) -> list[PutTicket]:
        ended: list[PutTicket] = []
        if not self._sync and not self._mirror:
            # What is acknowledged at once is readable at once.
            with self._progress_lock:
                self._note_confirmed(0)
            self._dispatch_wake.set()
        now_ms = self.clock.monotonic_ms()
        with self._submit_lock:
            # Order: bytes (written), then the word, then the bell.
            self.supervisor.publish_appended(self.store.log.end)
            for ticket, appended, leader_only in made:
                if self._kept(appended.end_offset, leader_only=leader_only):
                    self._count_latency(ticket, self.clock.monotonic())
                    ticket.settle(_outcome(appended))
                    ended.append(ticket)
                    continue
                self._sequence += 1
                limit_ms = self.config.sync_flush_timeout_ms
                if self._mirror and not leader_only:
                    limit_ms = max(limit_ms, self.config.slave_timeout_ms)
                deadline_ms = now_ms + limit_ms
                waiting = Waiting(ticket, appended, leader_only, deadline_ms, self._sequence)
                if self.failed is not None:
                    # The ack loop is over.
                    self._settle_unknown(waiting)
                    ended.append(ticket)
                    continue
                self._waiting.append(waiting)
                acks: Literal["quorum", "leader"] = "leader" if leader_only else "quorum"
                self.supervisor.submit(self._sequence, appended.end_offset, acks, deadline_ms)
        self.supervisor.ring()
        return ended

    def _kept(self, end_offset: int, *, leader_only: bool) -> bool:
        log_ = self.store.log
        if leader_only:
            return not self._sync or log_.synced >= end_offset
        if self._mirror:
            return log_.confirmed >= end_offset
        return not self._sync or log_.synced >= end_offset

    # --- the ack loop ---------------------------------------------------------------------------------------

    def _run_acks(self) -> None:
        ticked_ms = 0
        while not self._stopping:
            self.supervisor.wait(BUSY_WAIT_MS if self._waiting else IDLE_WAIT_MS)
            now_ms = self.clock.monotonic_ms()
            # Acks first: with puts under way most bells are about them.
            if not self._waiting or now_ms - ticked_ms >= TICK_MS:
                self.supervisor.tick()
                ticked_ms = now_ms
            if self.supervisor.poisoned is not None:
                self.store.log.poison(self.supervisor.poisoned)
                raise Unavailable(self.supervisor.poisoned, field="store", status="poisoned")
            self._advance()

    def _advance(self) -> None:
        """Answer what the satellites have done. Callers: the ack loop, and who waits for its own put."""
        log_ = self.store.log
        with self._progress_lock:
            progress = self.supervisor.progress()
            before = log_.confirmed
            log_.note_committed(progress.committed)
            log_.note_synced(progress.flushed)
            self._note_confirmed(progress.confirmed)
            moved = log_.confirmed > before
        try:
            self._complete()
        finally:
            if moved:
                # Behind the acks: both need the interpreter.
                self._dispatch_wake.set()
        if progress.statuses:
            self._except(dict(progress.statuses))

    def _note_confirmed(self, replicated: int) -> None:
        """C, once more: what the replicas have, else what the disk, else what the log has. Needs `_progress_lock`."""
        log_ = self.store.log
        if self._mirror:
            log_.note_confirmed(replicated)
        else:
            log_.note_confirmed(log_.synced if self._sync else log_.committed)

    def _complete(self) -> None:
        now, now_s = self.clock.monotonic_ms(), self.clock.monotonic()
        ended: list[PutTicket] = []
        with self._submit_lock:
            while self._waiting:
                head = self._waiting[0]
                if self._kept(head.append.end_offset, leader_only=head.leader_only):
                    self._count_latency(head.ticket, now_s)
                    head.ticket.settle(_outcome(head.append))
                elif now >= head.deadline_ms:
                    self._settle_unknown(head)
                else:
                    break
                self._waiting.popleft()
                ended.append(head.ticket)
        tell_all(ended)

    def _count_latency(self, ticket: PutTicket, now_s: float) -> None:
        """Needs `_submit_lock`."""
        if ticket.began:
            self.append_latency.add(now_s - ticket.began)

    def _except(self, codes: dict[int, int]) -> None:
        """Exceptions come by entry: the satellite's word on puts that missed their time."""
        with self._submit_lock:
            late = [w for w in self._waiting if w.sequence in codes]
            for waiting in late:
                self._waiting.remove(waiting)
        for waiting in late:
            self._settle_unknown(waiting, PutStatus.of_code(codes[waiting.sequence]))
        tell_all(waiting.ticket for waiting in late)

    def _settle_unknown(self, waiting: Waiting, status: PutStatus | None = None) -> None:
        if status is None:
            flushed = self.store.log.synced >= waiting.append.end_offset or not self._sync
            # The replica's status wins over the flush's, as in handleDiskFlushAndHA.
            late_replica = self._mirror and not waiting.leader_only and flushed
            status = PutStatus.FLUSH_SLAVE_TIMEOUT if late_replica else PutStatus.FLUSH_DISK_TIMEOUT
        self.counters.unknown += 1
        waiting.ticket.settle(
            DeliveryUnknown(
                f"stored at the leader, but {status.value}: it may or may not stay; a retry with the same sequence "
                "is safe",
                status=status.value,
                append=waiting.append._asdict(),
            )
        )

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
        """The transient pool is full. Callers: whoever appends; the puts of its group are not published yet."""
        self._check_serving()
        with self._submit_lock:
            self.supervisor.publish_appended(self.store.log.end)
        self.supervisor.ring_first()
        self.store.log.note_committed(self.supervisor.committed())

    def _witness_sync(self) -> int:
        return self.store.log.sync()

    # --- dispatch, allocation -------------------------------------------------------------------------------

    def _run_dispatch(self) -> None:
        last_sync = self.clock.monotonic_ms()
        while not self._stopping:
            self._dispatch_wake.wait(1.0)
            self._dispatch_wake.clear()
            if not self._readers:
                self._dispatch_now.wait(DISPATCH_LINGER_S)
            self._dispatch_now.clear()
            while not self._stopping:
                before = self.store.dispatched
                try:
                    after = self.store.dispatch(self.store.log.confirmed)
                except StorageFull as error:
                    # No room for a consume queue file: readers wait, the log is not touched by it.
                    log.warning("dispatch waits for room: %s", error)
                    break
                if after == before:
                    break
                with self._readable:
                    self._readable.notify_all()
            now = self.clock.monotonic_ms()
            if now - last_sync >= 60_000 and not self._stopping:
                self.store.sync_queues()
                last_sync = now

    def _run_allocate(self) -> None:
        self._ahead.run(lambda: self._stopping)

    def _guard(self, body: Callable[[], None]) -> Callable[[], None]:
        """A service loop that dies takes the process's service with it: nothing limps on half alive."""

        def run() -> None:
            try:
                body()
            except RayMQError as error:
                self._fail(error)
            except OSError as error:
                self._fail(Unavailable(f"{body.__name__}: {error}", field="store"))
            except Exception as error:
                log.exception("service loop died")
                self._fail(Unavailable(f"{body.__name__}: {error!r}", field="store"))

        return run

    def _fail(self, error: RayMQError) -> None:
        if self._stopping:
            return
        log.error("the shard stops writing: %s", error)
        self.failed = error
        self._settle_left()
        with self._readable:
            self._readable.notify_all()

    def _settle_left(self) -> None:
        """Answer what nobody will answer any more: not stored, or not known."""
        self._appender.end()
        with self._submit_lock:
            waiting, self._waiting = list(self._waiting), deque()
        for entry in waiting:
            self._settle_unknown(entry)
        tell_all(entry.ticket for entry in waiting)

    def _check_serving(self) -> None:
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

    # --- ShardBackend: fetch --------------------------------------------------------------------------------

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read every queue asked for; wait up to `wait_ms` while none has anything. What is acknowledged is seen.

        Source: PullRequestHoldService: a request is held until a message arrives or its time is up.
        """
        self.counters.fetches += 1
        self._await_dispatch()
        deadline = self.clock.monotonic_ms() + request.wait_ms
        while True:
            with self._readable:
                found = self._read(request)
                left = deadline - self.clock.monotonic_ms()
                if (
                    any(
                        part.error or (part.records is not None and len(part.records))
                        for part in found
                    )
                    or left <= 0
                ):
                    return found
                if self._stopping:
                    raise Unavailable("the shard is stopping", field="shard")
                with self._reading():
                    self._readable.wait(left / 1000)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """While somebody waits for the dispatch it does not linger. Needs `_readable`."""
        self._readers += 1
        self._dispatch_now.set()
        try:
            yield
        finally:
            self._readers -= 1

    def _await_dispatch(self) -> None:
        """Wait until readers see what is confirmed now."""
        upto = self.store.log.confirmed
        if self.store.dispatched < upto:
            with self._readable, self._reading():
                self._readable.wait_for(
                    lambda: self.store.dispatched >= upto or self._stopping, DISPATCH_WAIT_S
                )

    def _read(self, request: FetchRequest) -> list[FetchSlice]:
        slices: list[FetchSlice] = []
        budget = request.max_bytes
        for queue_id, offset in request.offsets.items():
            try:
                part = self.store.fetch(
                    request.topic,
                    queue_id,
                    offset,
                    max_bytes=max(budget, 1),
                    max_records=request.max_records,
                )
            except OffsetOutOfRange as error:
                low, high = self.store.queue_range(request.topic, queue_id)
                slices.append(FetchSlice(queue_id, offset, offset, low, high, None, error))
                continue
            if part.records is not None and len(part.records):
                budget -= part.records.nbytes
                slices.append(part)
                if budget <= 0:
                    break
        return slices

    # --- ShardBackend: call ---------------------------------------------------------------------------------

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """An administrative operation.

        Raises: Rejected for an unknown operation or bad arguments.
        """
        handler = getattr(self, f"_op_{op}", None)
        if handler is None:
            raise Rejected(f"unknown operation {op!r}", field="op", limit="a known operation")
        result: dict[str, Any] = handler(**args)
        return result

    def _op_describe(self) -> dict[str, Any]:
        return dict(self.identity_facts)

    def _op_routes(self) -> dict[str, Any]:
        return dict(self.routes)

    def _op_status(self) -> dict[str, Any]:
        return self.status()

    def _op_topics(self) -> dict[str, Any]:
        return {
            t.name: {"queues": t.queues, "shards": list(t.shards)}
            for t in list(self.store.state.topics.values())
        }

    def _op_create_topic(self, name: str, queues: int, shards: list[int]) -> dict[str, Any]:
        self._check_serving()
        appended = self.store.create_topic(name, queues, shards)
        if appended is None:
            return {"created": False}
        self._wait(appended)
        return {"created": True}

    def _op_queue_ranges(self, topic: str) -> dict[str, Any]:
        info = self.store.state.topics.get(topic)
        if info is None:
            raise Rejected(
                f"topic {topic} does not exist", field="topic", limit="an existing topic"
            )
        self._await_dispatch()
        shard = int(self.identity_facts["shard"])
        return {
            str(queue): list(self.store.queue_range(topic, queue))
            for queue in range(info.queues)
            if info.shard_of(queue) == shard
        }

    def _op_commit_offsets(self, group: str, topic: str, offsets: dict[str, int]) -> dict[str, Any]:
        self._check_serving()
        self._wait(
            self.store.commit_offsets(group, topic, {int(q): int(o) for q, o in offsets.items()})
        )
        return {}

    def _op_offsets(self, group: str, topic: str) -> dict[str, Any]:
        table = self.store.state.offsets.get((group, topic), {})
        return {str(queue): offset for queue, offset in table.items()}

    def _op_init_producer(self, producer_id: int) -> dict[str, Any]:
        self._check_serving()
        epoch, appended = self.store.init_producer(producer_id)
        self._wait(appended)
        return {"epoch": epoch}

    def _wait(self, appended: Append) -> None:
        ticket = PutTicket()
        tell_all(self._hand_over([Made(ticket, appended, False)]))
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
        return self._appender.waiting + len(self._waiting)

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
            "metrics": as_status(read_leader(self)),
            "roles": self.supervisor.describe(),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: no new puts, waiting ones answered, everything synced, satellites told to end."""
        deadline = self.clock.monotonic_ms() + int(timeout_s * 1000)
        while (
            (self._appender.busy or self._waiting)
            and self.failed is None
            and self.clock.monotonic_ms() < deadline
        ):
            self.clock.sleep_ms(5)
        self._stopping = True
        self._appender.wake()
        self._dispatch_wake.set()
        self._dispatch_now.set()
        self._ahead.wake()
        with self._readable:
            self._readable.notify_all()
        for thread in self._threads:
            thread.join(2.0)
        self._settle_left()
        self.supervisor.close()
        with contextlib.suppress(OSError, Corrupt):
            if not self._mirror and self.failed is None:
                self.store.log.commit_pool()
                self.store.log.sync()
                self.store.log.note_confirmed(self.store.log.end)
            self.store.close()


def _outcome(appended: Append) -> PutOutcome:
    return PutOutcome(
        appended.first_offset,
        appended.count,
        appended.duplicates,
        appended.store_time_ms,
        appended.physical_offset,
        appended.last_offset,
    )
