"""One shard's store: RocketMQ's DefaultMessageStore, columnar (design D3, D6, D7, section 3).

`put` appends and returns at once; who waits for the sync, the replica and C is the host's business. `dispatch`
builds consume queues from log[0, C); `fetch` reads them. The engine is usable alone: see `embedded.py`.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from . import format as fmt
from . import record, rows
from .clock import Clock
from .commit_log import CommitLog
from .config import StoreConfig
from .consume_queue import BLANK_SIZE, ConsumeQueue
from .duplicates import Search
from .errors import DeliveryUnknown, OffsetOutOfRange, RayMQError, Rejected, Unavailable, require
from .failpoints import fail_point
from .files import Files
from .mapped_file import MappedFile
from .producer_stamp import Stamp
from .put import Append, FetchSlice, PutRequest
from .state import (
    INTERNAL_QUEUE,
    INTERNAL_TOPIC,
    OFFSETS,
    PRODUCER,
    SNAPSHOT,
    TOPIC,
    UNKNOWN_OFFSET,
    ShardState,
    SnapshotParts,
    TopicInfo,
)
from .status import PutStatus

Int64s = npt.NDArray[np.int64]
Prepared = record.Prepared | record.PreparedRow

#: units whose dispatch facts are kept in memory; beyond it dispatch reads them back from the log
PENDING_MAX = 512
#: longest time dispatch holds the interpreter at once (D1)
SLICE_MS = 2.0


class Pending(NamedTuple):
    """An appended unit that waits for C."""

    start: int
    end: int
    topic: str
    queue_id: int
    first_offset: int
    positions: Int64s
    sizes: Int64s
    tags_codes: Int64s


class CheckedPut(NamedTuple):
    """A batch that may be appended, as `check` returns it."""

    request: PutRequest
    prepared: Prepared
    #: queue offsets of the first and the last row, as far as they are duplicates
    originals: tuple[int, int] = (UNKNOWN_OFFSET, UNKNOWN_OFFSET)


class MessageStore:
    """Topics, puts, dispatch and reads over one commit log.

    Threads: any may put (one put lock), one dispatches, any may fetch.
    """

    def __init__(self, log: CommitLog) -> None:
        self.log = log
        self.config = log.config
        self.files = log.files
        self.clock = log.clock
        self.state = ShardState()
        self.epoch = 0
        #: everything below this is in the consume queues
        self.dispatched = 0
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._queues_lock = threading.Lock()
        self._pending: deque[Pending] = deque()
        #: start of the newest segment that needs no snapshot any more
        self._headed = -1
        self._closed = False

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        config: StoreConfig | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
        identity: dict[str, Any] | None = None,
        on_locked: Callable[[], None] | None = None,
    ) -> MessageStore:
        """Open or create the store in `root` and recover it.

        `on_locked` runs after the store's lock is held and before anything is recovered: the place to end
        whatever an earlier process left running.
        Raises: Unavailable when another process has it open; Corrupt when it is damaged where it must not be.
        """
        log = CommitLog(
            root,
            config or StoreConfig(),
            files=files or Files(),
            clock=clock or Clock(),
            identity=identity,
        )
        store = cls(log)
        try:
            if on_locked is not None:
                on_locked()
            store._recover()
        except BaseException:
            store.abandon()
            raise
        return store

    # --- recovery -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        log = self.log
        log.restore_pool()
        self._load_queues()
        known = max((queue.max_physical_offset for queue in self._queues.values()), default=-1)
        # Consume queues are synced rarely; after a reboot only what the marks say about them is trusted.
        complete = (
            known if log.same_boot or not log.crashed else min(known, log.marks.dispatched_end)
        )
        low = complete if log.same_boot or not log.own else min(complete, log.synced)
        log.recover(self._scan_start(low), self._visit)
        if log.recovered is not None and log.recovered.row == "K" and not log.own:
            log.note_synced(log.end)
        # After a reboot a unit above what was synced may be torn: it is dispatched again.
        keep = log.end if log.same_boot or not log.crashed else min(log.end, max(complete, 0))
        for queue in self._queues.values():
            queue.truncate(keep)
        self.dispatched = min(max(complete, log.start), log.end)
        tail = log.queue.find(log.end)
        if tail is not None:
            complete_at, parts_end = self._head(tail)
            if complete_at is not None or parts_end < log.end:
                self._headed = tail.start
        if not log.queue.files:
            with self._lock:
                self._begin_segment()

    def _load_queues(self) -> None:
        base = self.log.root / "consumequeue"
        for topic in self.files.list(base):
            for name in self.files.list(base / topic):
                if name.isdigit():
                    queue = self._queue(topic, int(name))
                    queue.load()
                    queue.recover(after_crash=self.log.crashed)

    def _scan_start(self, low: int) -> int:
        """Start of the newest segment whose snapshot is complete and ends at or below `low`; else the log's start.

        Below `low` nothing can be cut: no torn tail takes away the snapshot that the state is made from.
        """
        for file in reversed(self.log.queue.files):
            if file.start < low:
                complete_at, _ = self._head(file)
                if complete_at is not None and complete_at <= low:
                    return file.start
        return self.log.start

    def _head(self, file: MappedFile) -> tuple[int | None, int]:
        """Where the snapshot that a segment begins with is complete, and where its SNAPSHOT records end.

        None: it was broken off, or there is none.
        """
        view, at = file.read_view(), file.start
        parts = SnapshotParts()
        while True:
            walk = record.walk(view[at - file.start :], at, limit=1)
            if not len(walk.positions):
                return None, at
            batch = record.decode(view, walk.positions - file.start, walk.sizes)
            tag = rows.tag_column(batch.column("properties"))[0].as_py()
            if batch.column("topic")[0].as_py() != INTERNAL_TOPIC or tag != SNAPSHOT.encode():
                return None, at
            at = walk.end
            if parts.add(batch.column("body")[0].as_py()) is not None:
                return at, at

    def _visit(self, view: memoryview, base: int, walk: record.Walk) -> None:
        for run in rows.runs(view, base, walk.positions, walk.sizes):
            self._apply(run)

    def _apply(self, run: rows.RowRun) -> None:
        if run.topic == INTERNAL_TOPIC:
            tags = rows.tag_column(run.batch.column("properties")).to_pylist()
            for tag, body in zip(tags, run.batch.column("body").to_pylist(), strict=True):
                self.state.apply_internal((tag or b"").decode(), body)
        self.state.apply_rows(
            run.topic,
            run.queue_id,
            run.first_offset,
            len(run.positions),
            int(run.positions[-1] + run.sizes[-1]),
            run.store_time_ms,
            producer=run.producer,
            epoch=run.epoch,
            first_sequence=run.first_sequence,
        )

    # --- put ------------------------------------------------------------------------------------------------

    def put(self, request: PutRequest) -> Append:
        """Check and append one batch of one queue; see `check` and `append`."""
        return self.append(self.check(request))

    def check(self, request: PutRequest) -> CheckedPut:
        """All of a put that needs no lock: check the whole batch, encode what can be.

        Raises: Rejected, Unavailable; nothing was stored.
        """
        if self._closed:
            raise Unavailable("the store is closed", field="store", status="SERVICE_NOT_AVAILABLE")
        self._check_target(request.topic, request.queue_id)
        row = record.check_put(
            request.topic, request.batch, max_message_bytes=self.config.max_message_bytes
        )
        if not request.batch.num_rows:
            raise Rejected("the batch has no rows", field="batch", limit="at least 1 row")
        stamp = None
        if request.producer_id is not None:
            stamp = Stamp(request.producer_id, request.epoch, request.first_sequence)
        prepared = record.prepare(
            request.topic,
            request.queue_id,
            request.batch,
            stamp=stamp,
            store_host=self.config.store_host,
            row=row,
        )
        self._check_sizes(prepared)
        # The offsets of duplicates are searched here, where nobody else waits for it.
        return CheckedPut(request, prepared, self._originals(request))

    def append(self, checked: CheckedPut) -> Append:
        """Append a checked batch. The ack is the caller's: nothing is synced at return.

        Raises: Rejected for a gap in the sequences, Fenced, StorageFull, Unavailable, OSError; nothing was stored.
        DeliveryUnknown when the first rows are stored and the next ones could not be: `append` says what is.
        Source: CommitLog#asyncPutMessages; the order of steps is design section 3.
        """
        with self._lock:
            appended = self._append_new(checked)
        if not appended.duplicates:
            return appended
        first, last = checked.originals
        if first == UNKNOWN_OFFSET or (last == UNKNOWN_OFFSET and appended.last_offset < 0):
            # It became a duplicate after the check, or the log has it no more.
            first, last = self._originals(checked.request)
        return appended._replace(
            first_offset=first,
            last_offset=last if appended.last_offset < 0 else appended.last_offset,
        )

    def _append_new(self, checked: CheckedPut) -> Append:
        """Append the rows that are not stored yet."""
        request, prepared = checked.request, checked.prepared
        count = prepared.count
        skip = 0
        if request.producer_id is not None:
            admission = self.state.admit(
                request.producer_id,
                request.epoch,
                request.topic,
                request.queue_id,
                request.first_sequence,
                count,
            )
            skip = admission.duplicates
            if skip:
                self.state.raise_epoch(request.producer_id, request.epoch)
            if skip == count:
                return Append(
                    first_offset=admission.first_offset,
                    count=count,
                    duplicates=count,
                    store_time_ms=self.state.store_time_ms,
                    physical_offset=-1,
                    end_offset=admission.end_offset,
                )
        appended = self._append(prepared, request, skip)
        last_offset = appended.first_offset + count - skip - 1
        return appended._replace(count=count, duplicates=skip, last_offset=last_offset)

    def _originals(self, request: PutRequest) -> tuple[int, int]:
        """Where the batch's first and last rows were stored; UNKNOWN_OFFSET for one that was not, or is gone.

        Callers: any thread, without the put lock.
        """
        if request.producer_id is None:
            return UNKNOWN_OFFSET, UNKNOWN_OFFSET
        entry = self.state.producers.get((request.producer_id, request.topic, request.queue_id))
        first = request.first_sequence
        if entry is None or first >= entry.next_sequence:
            return UNKNOWN_OFFSET, UNKNOWN_OFFSET
        last = first + request.batch.num_rows - 1
        dispatched = self.dispatched
        queue = self._queues.get((request.topic, request.queue_id))
        search = Search(self.log, request.topic, request.queue_id, request.producer_id)
        first_offset = search.find(first, entry, queue, dispatched)
        return first_offset, search.find(last, entry, queue, dispatched)

    def _check_target(self, topic: str, queue_id: int) -> None:
        info = self.state.topics.get(topic)
        if info is None:
            if topic.startswith("rmq_sys_") or topic in fmt.SYSTEM_TOPICS:
                raise Rejected(
                    f"topic {topic} is a system topic; choose another name",
                    field="topic",
                    limit="not a system topic",
                )
            fmt.check_topic_name(topic)
            raise Rejected(
                f"topic {topic} does not exist; create it first (`raymq topic create {topic}`)",
                field="topic",
                limit="an existing topic",
            )
        if not 0 <= queue_id < info.queues:
            raise Rejected(
                f"queue {queue_id} of topic {topic} does not exist; it has queues 0 to {info.queues - 1}",
                field="queue_id",
                limit=info.queues - 1,
            )

    def _check_sizes(self, prepared: Prepared) -> None:
        if isinstance(prepared, record.PreparedRow):
            largest = prepared.size
        else:
            largest = int(prepared.sizes.max())
        limit = self.config.record_bytes_max
        if largest > limit:
            row = int(prepared.sizes.argmax())
            pool = self.config.transient_pool_bytes if self.config.transient_pool else 0
            through = f" and a transient pool of {pool} bytes" if pool else ""
            raise Rejected(
                f"row {row} makes a record of {largest} bytes; with commit log files of "
                f"{self.config.segment_size_bytes} bytes{through} a record may have {limit}",
                field="record",
                limit=limit,
                row=row,
            )

    def _append(self, prepared: Prepared, request: PutRequest, skip: int) -> Append:
        log, state = self.log, self.state
        self._begin_segment()
        if isinstance(prepared, record.PreparedRow) and prepared.size <= log.room():
            now = max(state.store_time_ms, self.clock.now_ms())
            return self._append_unit(prepared, request, 0, 1, now)
        ends = np.cumsum(prepared.sizes)
        total = int(ends[-1])
        done = int(ends[skip - 1]) if skip else 0
        log.ensure_room(total - done)
        now = max(state.store_time_ms, self.clock.now_ms())
        row, count = skip, len(prepared.sizes)
        first: Append | None = None
        try:
            while row < count:
                room = log.room()
                limit = min(room, self.config.append_unit_bytes)
                if total - done <= limit:
                    stop = count
                elif limit > 0:
                    stop = int(np.searchsorted(ends, done + limit, side="right"))
                else:
                    stop = row
                if stop <= row:
                    if room < int(prepared.sizes[row]):
                        log.seal(self.epoch)
                        self._begin_segment()
                        continue
                    stop = row + 1
                appended = self._append_unit(prepared, request, row, stop, now)
                first = first or appended
                done = int(ends[stop - 1])
                row = stop
        except (OSError, RayMQError) as error:
            if first is None:
                raise
            stored = first._replace(count=row - skip, end_offset=log.end)
            raise DeliveryUnknown(
                f"rows {skip} to {row - 1} of {count} are stored, the others are not: {error}; a retry with the "
                "same sequence is safe",
                status=PutStatus.UNKNOWN_ERROR.value,
                append=stored._asdict(),
            ) from error
        require(first is not None, "a batch has a row that is new", skip=skip, count=count)
        return first._replace(count=count, end_offset=log.end)  # type: ignore[union-attr]

    def _append_unit(
        self, prepared: Prepared, request: PutRequest, row: int, stop: int, now: int
    ) -> Append:
        """Append rows [row, stop), which fit the current file."""
        log, state = self.log, self.state
        # Looked up for each unit: the snapshot of a new segment takes offsets of the internal queue.
        offset = state.next_offsets.get((request.topic, request.queue_id), 0)
        data = prepared.encode(
            row, stop, queue_offset=offset, physical_offset=log.end, store_time_ms=now
        )
        start = log.append(data, self.epoch)
        sizes = prepared.sizes[row:stop]
        self._pend(
            Pending(
                start,
                log.end,
                request.topic,
                request.queue_id,
                offset,
                start + np.cumsum(sizes) - sizes if len(sizes) > 1 else np.array([start]),
                sizes,
                prepared.tags_codes[row:stop],
            )
        )
        state.apply_rows(
            request.topic,
            request.queue_id,
            offset,
            stop - row,
            log.end,
            now,
            producer=request.producer_id,
            epoch=request.epoch,
            first_sequence=request.first_sequence + row,
        )
        return Append(offset, stop - row, 0, now, start, log.end)

    def _begin_segment(self) -> None:
        """See to it that a snapshot of the state stands in a segment before anything else does (D6).

        A broken-off one, of a crash or of a full disk, is followed by a whole one; where that finds no room any
        more, the segment ends. A state too large for a file is left out: recovery then begins earlier.
        """
        log, size = self.log, self.config.segment_size_bytes
        while self._headed != log.end - log.end % size:
            parts = [
                self._internal(SNAPSHOT, body)
                for body in self.state.snapshot(min(1 << 20, size // 8))
            ]
            needed = sum(int(part.prepared.sizes[0]) for part in parts)
            if needed <= self.config.snapshot_bytes_max:
                log.ensure_room(needed)
                if log.room() < needed:
                    log.seal(self.epoch)
                    continue
                now = max(self.state.store_time_ms, self.clock.now_ms())
                for part in parts:
                    self._append_unit(part.prepared, part.request, 0, 1, now)
                fail_point("log.after_snapshot")
            self._headed = log.end - log.end % size

    def _internal(self, kind: str, body: bytes) -> CheckedPut:
        """One record of the internal topic, ready to be appended."""
        batch = pa.record_batch(
            {
                "body": pa.array([body], pa.binary()),
                "tag": pa.array([kind], pa.string()),
                "properties": pa.array([None], pa.binary()),
                "born_time_ms": pa.array([self.clock.now_ms()], pa.int64()),
            },
            schema=record.PUT_SCHEMA,
        )
        prepared = record.prepare(
            INTERNAL_TOPIC,
            INTERNAL_QUEUE,
            batch,
            stamp=None,
            store_host=self.config.store_host,
        )
        self._check_sizes(prepared)
        request = PutRequest(INTERNAL_TOPIC, INTERNAL_QUEUE, batch, None, 0, 0, "quorum")
        return CheckedPut(request, prepared)

    def put_internal(self, kind: str, body: bytes) -> Append:
        """Append one record of the internal topic and apply it to the state."""
        with self._lock:
            checked = self._internal(kind, body)
            appended = self._append(checked.prepared, checked.request, 0)
            self.state.apply_internal(kind, body)
            return appended

    def _pend(self, unit: Pending) -> None:
        if len(self._pending) >= PENDING_MAX:
            # Dispatch is far behind (a replica is away): it will read these units back from the log.
            self._pending.clear()
        self._pending.append(unit)

    # --- dispatch -------------------------------------------------------------------------------------------

    def dispatch(self, confirmed: int) -> int:
        """Build consume queues up to `confirmed`, for at most about 2 ms. Returns: the dispatched end.

        Callers: one thread. Source: DefaultMessageStore.ReputMessageService.
        """
        deadline = self.clock.monotonic() + SLICE_MS / 1000
        while self.dispatched < confirmed:
            with self._lock:
                while self._pending and self._pending[0].start < self.dispatched:
                    self._pending.popleft()
                unit = self._pending[0] if self._pending else None
            if unit is not None and unit.start == self.dispatched:
                if unit.end > confirmed:
                    break
                self._queue(unit.topic, unit.queue_id).append(
                    unit.first_offset, unit.positions, unit.sizes, unit.tags_codes
                )
                self.dispatched = unit.end
            else:
                upto = confirmed if unit is None else min(confirmed, unit.start)
                if not self._dispatch_from_log(upto):
                    break
            if self.clock.monotonic() > deadline:
                break
        return self.dispatched

    def _dispatch_from_log(self, upto: int) -> bool:
        view, base = self.log.view(self.dispatched)
        size = self.config.segment_size_bytes
        stop = min(upto, base + size) - base
        walk = record.walk(
            view[self.dispatched - base :],
            self.dispatched,
            stop=stop - (self.dispatched - base),
            check_crc=False,
            limit=rows.SLICE_ROWS,
        )
        if len(walk.positions):
            for run in rows.runs(view, base, walk.positions, walk.sizes):
                self._queue(run.topic, run.queue_id).append(
                    run.first_offset,
                    run.positions,
                    run.sizes,
                    rows.tags_codes(run.topic, run.batch),
                )
        moved = walk.end > self.dispatched
        self.dispatched = walk.end
        if walk.reason is record.WalkStop.BLANK or (walk.end >= base + size - 7):
            self.dispatched = base + size
            moved = True
        return moved

    def sync_queues(self) -> None:
        """fdatasync every consume queue and remember how far they are complete."""
        upto = self.dispatched
        for queue in list(self._queues.values()):
            queue.sync()
        self.log.marks.dispatched_end = upto

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        key = (topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            with self._queues_lock:
                queue = self._queues.get(key)
                if queue is None:
                    directory = self.log.root / "consumequeue" / topic / str(queue_id)
                    queue = ConsumeQueue(
                        directory, self.config.consume_queue_file_size_bytes, files=self.files
                    )
                    self._queues[key] = queue
        return queue

    # --- reads ----------------------------------------------------------------------------------------------

    def queues(self) -> list[tuple[str, int]]:
        """Every (topic, queue) that has a consume queue."""
        return sorted(self._queues)

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The half-open range of readable offsets of a queue."""
        queue = self._queues.get((topic, queue_id))
        return (0, 0) if queue is None else (queue.min_offset, queue.max_offset)

    def fetch(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> FetchSlice:
        """Read records of one queue from `offset`, at least one if there is one, never past C.

        Returns: raw RocketMQ records as one binary column, zero-copy where they are neighbours.
        Raises: OffsetOutOfRange below the queue's min, or above what the log holds of it.
        """
        low, high = self.queue_range(topic, queue_id)
        if high < offset <= self.state.next_offsets.get((topic, queue_id), 0):
            # The log has it. After a restart dispatch (in a mirror C too) may come there once more only later.
            high = offset
        if offset < low or offset > high:
            raise OffsetOutOfRange(
                f"queue {queue_id} of {topic} holds offsets {low} to {high}, not {offset}; seek() to choose",
                min=low,
                max=high,
                offset=offset,
                queue_id=queue_id,
            )
        empty = pa.array([], pa.binary())
        count = min(max_records, high - offset)
        if count <= 0:
            return FetchSlice(queue_id, offset, offset, low, high, empty, None)
        units = self._queues[topic, queue_id].read(offset, count)
        # Queues of foreign stores may have gaps, filled with units that point at nothing.
        gaps = np.flatnonzero(units["size"] == BLANK_SIZE)
        if len(gaps):
            first = int(gaps[0])
            if first == 0:
                solid = np.flatnonzero(units["size"] != BLANK_SIZE)
                jump = offset + (int(solid[0]) if len(solid) else len(units))
                return FetchSlice(queue_id, offset, jump, low, high, empty, None)
            units = units[:first]
        positions = units["position"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        fits = max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right")))
        view, base = self.log.view(int(positions[0]))
        inside = positions[:fits] < base + self.config.segment_size_bytes
        fits = fits if inside.all() else int(np.argmin(inside))
        records = record.select(view, positions[:fits] - base, sizes[:fits])
        return FetchSlice(queue_id, offset, offset + fits, low, high, records, None)

    # --- administration -------------------------------------------------------------------------------------

    def create_topic(self, name: str, queues: int, shards: Iterable[int]) -> Append | None:
        """Create a topic; None when the same one exists already.

        Raises: Rejected for a bad name or number, or when it exists with other queues.
        """
        fmt.check_topic_name(name)
        if name.startswith("rmq_sys_") or name in fmt.SYSTEM_TOPICS:
            raise Rejected(
                f"topic {name} is a system topic; choose another name",
                field="topic",
                limit="not a system topic",
            )
        if not 1 <= queues <= 65_536:
            raise Rejected(
                f"{queues} queues: a topic has 1 to 65536", field="queues", limit="1..65536"
            )
        info = TopicInfo(name, queues, tuple(shards))
        have = self.state.topics.get(name)
        if have == info:
            return None
        if have is not None:
            raise Rejected(
                f"topic {name} exists with {have.queues} queues on shards {list(have.shards)}",
                field="queues",
                limit=have.queues,
            )
        value = {"name": name, "queues": queues, "shards": list(info.shards)}
        return self.put_internal(TOPIC, _json(value))

    def commit_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> Append:
        """Store a group's next offsets in the log."""
        value = {"group": group, "topic": topic, "offsets": {str(q): o for q, o in offsets.items()}}
        return self.put_internal(OFFSETS, _json(value))

    def init_producer(self, producer: int) -> tuple[int, Append]:
        """The next epoch of a producer id, stored in the log, and what to wait for."""
        epoch = self.state.producer_epochs.get(producer, -1) + 1
        return epoch, self.put_internal(PRODUCER, _json({"producer": producer, "epoch": epoch}))

    # --- shutdown -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Orderly stop: dispatch to C, sync everything, leave `abort` away only if all derived files are complete."""
        if self._closed:
            return
        self._closed = True
        log = self.log
        try:
            while self.dispatched < log.confirmed:
                before = self.dispatched
                if self.dispatch(log.confirmed) == before:
                    break
            self.sync_queues()
            log.checkpoint.physic_ms = self.state.store_time_ms
            log.checkpoint.logics_ms = self.state.store_time_ms
            log.checkpoint.sync()
            complete = self.dispatched >= log.end
        except (OSError, RayMQError):
            complete = False
            raise
        finally:
            for queue in self._queues.values():
                queue.close()
            log.close(clean=complete)

    def abandon(self) -> None:
        """Let go of every file as a crash would: nothing is synced, `abort` stays."""
        self._closed = True
        for queue in self._queues.values():
            queue.close()
        self.log.abandon()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
