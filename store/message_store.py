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
from .errors import OffsetOutOfRange, RayMQError, Rejected, Unavailable
from .failpoints import fail_point
from .files import Files
from .producer_stamp import Stamp
from .put import Append, FetchSlice, PutRequest
from .state import (
    INTERNAL_QUEUE,
    INTERNAL_TOPIC,
    OFFSETS,
    PRODUCER,
    SNAPSHOT,
    TOPIC,
    ShardState,
    TopicInfo,
)

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
            log.close(clean=False)
            raise
        return store

    # --- recovery -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        log = self.log
        self._load_queues()
        known = max((queue.max_physical_offset for queue in self._queues.values()), default=-1)
        # Consume queues are synced rarely; after a reboot only what the marks say about them is trusted.
        complete = (
            known if log.same_boot or not log.crashed else min(known, log.marks.dispatched_end)
        )
        begin = min(self._snapshot_segment(), max(complete, log.start))
        if not log.same_boot and log.own:
            begin = min(begin, max(log.synced, log.start))
        log.recover(begin, self._visit)
        if log.recovered is not None and log.recovered.row == "K" and not log.own:
            log.note_synced(log.end)
        # After a reboot a unit above what was synced may be torn: it is dispatched again.
        keep = log.end if log.same_boot or not log.crashed else min(log.end, max(complete, 0))
        for queue in self._queues.values():
            queue.truncate(keep)
        self.dispatched = min(max(complete, log.start), log.end)
        if not log.queue.files:
            with self._lock:
                self._roll()

    def _load_queues(self) -> None:
        base = self.log.root / "consumequeue"
        for topic in self.files.list(base):
            for name in self.files.list(base / topic):
                if name.isdigit():
                    queue = self._queue(topic, int(name))
                    queue.load()
                    queue.recover(after_crash=self.log.crashed)

    def _snapshot_segment(self) -> int:
        """Start of the newest segment that begins with a snapshot; the log's start when there is none."""
        for file in reversed(self.log.queue.files):
            walk = record.walk(
                file.read_view(), file.start, stop=self.config.segment_size_bytes, limit=1
            )
            if len(walk.positions):
                batch = record.decode(file.read_view(), walk.positions - file.start, walk.sizes)
                if batch.column("topic")[0].as_py() == INTERNAL_TOPIC:
                    return file.start
        return self.log.start

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
        return CheckedPut(request, prepared)

    def append(self, checked: CheckedPut) -> Append:
        """Append a checked batch. The ack is the caller's: nothing is synced at return.

        Raises: Rejected for a gap in the sequences, Fenced, StorageFull, Unavailable; nothing was stored.
        Source: CommitLog#asyncPutMessages; the order of steps is design section 3.
        """
        request, prepared = checked
        count = prepared.count
        with self._lock:
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
            if skip:
                appended = appended._replace(first_offset=admission.first_offset, duplicates=skip)
            return appended._replace(count=count)

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
        largest = int(prepared.sizes.max())
        limit = self.config.segment_size_bytes // 2
        if largest > limit:
            row = int(prepared.sizes.argmax())
            raise Rejected(
                f"row {row} makes a record of {largest} bytes; with commit log files of "
                f"{self.config.segment_size_bytes} bytes a record may have {limit}",
                field="record",
                limit=limit,
                row=row,
            )

    def _append(self, prepared: Prepared, request: PutRequest, skip: int) -> Append:
        log, state = self.log, self.state
        ends = np.cumsum(prepared.sizes)
        total = int(ends[-1])
        done = int(ends[skip - 1]) if skip else 0
        log.ensure_room(total - done)
        now = max(state.store_time_ms, self.clock.now_ms())
        key = (request.topic, request.queue_id)
        first_offset = offset = state.next_offsets.get(key, 0)
        physical = -1
        row, count = skip, len(prepared.sizes)
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
                    self._roll()
                    continue
                stop = row + 1
            data = prepared.encode(
                row, stop, queue_offset=offset, physical_offset=log.end, store_time_ms=now
            )
            start = log.append(data, self.epoch)
            if physical < 0:
                physical = start
            sizes = prepared.sizes[row:stop]
            positions = start + ends[row:stop] - sizes - done
            self._pend(
                Pending(
                    start,
                    log.end,
                    request.topic,
                    request.queue_id,
                    offset,
                    positions,
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
            offset += stop - row
            done = int(ends[stop - 1])
            row = stop
        return Append(
            first_offset=first_offset,
            count=count,
            duplicates=0,
            store_time_ms=now,
            physical_offset=physical,
            end_offset=log.end,
        )

    def _roll(self) -> None:
        """Seal the current file; the next one begins with a snapshot of the state (D6)."""
        self.log.seal(self.epoch)
        for body in self.state.snapshot(min(1 << 20, self.config.segment_size_bytes // 8)):
            self._append_internal(SNAPSHOT, body)
        fail_point("log.after_snapshot")

    def _append_internal(self, kind: str, body: bytes) -> Append:
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
        request = PutRequest(INTERNAL_TOPIC, INTERNAL_QUEUE, batch, None, 0, 0, "quorum")
        return self._append(prepared, request, 0)

    def put_internal(self, kind: str, body: bytes) -> Append:
        """Append one record of the internal topic and apply it to the state."""
        with self._lock:
            self.log.ensure_room(len(body) + 1024)
            appended = self._append_internal(kind, body)
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
        Raises: OffsetOutOfRange below the queue's min or above its max.
        """
        low, high = self.queue_range(topic, queue_id)
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


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
