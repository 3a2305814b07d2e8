"""One shard's store: RocketMQ's DefaultMessageStore, columnar (design D3, D6, D7, section 3).

`put` appends and returns at once; who waits for the sync, the replica and C is the host's business. `dispatch`
builds consume queues from log[0, C); `fetch` reads them. The engine is usable alone: see `embedded.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from raymq.store.log.snapshot_head import read_head
from raymq.store.queues.raw_records import before, fault_of

from . import config_json, record
from .clock import Clock
from .compaction.compaction_store import CompactionStore
from .compaction.get_compacted import get_compacted
from .config import StoreConfig
from .delay.delay_hook import DelayHook
from .delay_levels import LEVELS_SERVICE, TIMERS_SERVICE
from .errors import Corrupt, RayMQError, Unavailable
from .failpoints import fail_point
from .files import NOT_TRIED, Files
from .format import TIMER_TOPIC, check_group_name
from .index.index_builder import IndexBuilder
from .index.index_service import IndexService
from .index.query import TIME_MAX_MS, Boundary, Query, QueryResult
from .index.query_keys import KeyHits, by_keys
from .log.clean import CleanService, Derived
from .log.commit_log import QUEUES_DOUBTFUL, CommitLog
from .put.inner_message import InnerMessage, Progress
from .put.put_hooks import PutHook
from .put.put_path import CheckedPut, PutPath
from .put_lock import PutLock
from .queues.consume_queues import ConsumeQueues
from .queues.dispatch import Dispatch
from .queues.get_message import BYTES_MAX, GetMessage, GetMessageResult
from .queues.message_filter import MessageFilter
from .queues.reader import Reader
from .records import properties, rows
from .requests import Append, FetchSlice, PutRequest
from .running_flags import RunningFlags
from .services.upkeep import Upkeep
from .state import (
    INTERNAL_TOPIC,
    OFFSETS,
    PROGRESS,
    TOPIC,
    ShardState,
    reading_internal,
)
from .stats import StoreStats
from .topics import check_new_topic

logger = logging.getLogger(__name__)

#: an orderly stop waits this long for an index that is behind; later `abort` stays (reference 7, step 7)
INDEX_WAIT_MS = 5_000
#: and for compacted queues; what is not copied by then RocketMQ would never serve
COPY_WAIT_MS = 60_000
#: earlier looks at what can be deleted that wait for a sync
HELD_MAX = 8


class MessageStore:
    """Topics, puts, dispatch and reads over one commit log.

    Threads: any may put (one put lock), one dispatches, any may fetch.
    """

    def __init__(self, log: CommitLog) -> None:
        self.log = log
        self.config = log.config
        self.files = log.files
        self.clock = log.clock
        self.state = ShardState(
            producer_entries_max=log.config.producer_entries_limit,
            producer_expiry_ms=int(log.config.producer_expiry_hours * 3_600_000),
            producer_limit_option=log.config.producer_limit_option,
        )
        self.consume_queues = ConsumeQueues(log.root, log.config, files=log.files)
        self.reader = Reader(log, self.consume_queues, self.state)
        self.compaction = CompactionStore(log, self.consume_queues, self.state)
        self.index = IndexService(
            log.root / "index",
            log.root / "raymq" / "index",
            log.config,
            files=log.files,
            clock=log.clock,
        )
        self._get_message = GetMessage(log, self.consume_queues, self.state)
        self.query = Query(log, self.consume_queues, self.index)
        #: what is allowed at present
        self.flags = RunningFlags()
        self.stats = StoreStats()
        #: moves what is to be delivered later to where it waits
        self.delay_hook = DelayHook(log.config, log.clock)
        #: see every put on its way
        self.hooks: list[PutHook] = [self.delay_hook]
        lock = PutLock(log.clock)
        self._dispatch = Dispatch(
            log, self.consume_queues, put_lock=lock, clock=log.clock, flags=self.flags
        )
        self.put_path = PutPath(
            log,
            self.state,
            self.consume_queues,
            self._dispatch,
            lock=lock,
            flags=self.flags,
            stats=self.stats,
            hooks=self.hooks,
            guards={TIMER_TOPIC: self.delay_hook},
        )
        self._put_lock = lock
        #: stores made from the log, which forget what is deleted there
        self.derived: list[Derived] = [self.index]
        #: each tells from which physical offset on records are still needed; None: it needs none
        self.holds: list[Callable[[], int | None]] = [self.compaction.holds_from]
        #: the log's end and what could be deleted, as of earlier looks
        self._held: list[tuple[int, int]] = []
        #: deletes old files; its `run_once` is called by whoever owns this store
        self.cleaner = CleanService(log, self, flags=self.flags)
        #: writes what a start after a crash needs; its `run_once` is called by whoever owns this store
        self.upkeep = Upkeep(self)
        #: whether recovery met a snapshot
        self._met_snapshot = False
        #: up to where the consume queues are complete by their own word, and the next queue offsets there
        self._complete = -1
        self._at_complete: dict[tuple[str, int], int] | None = None
        #: up to where consume queues are being built anew, and the next offsets of those that were lost
        self._rebuilding: tuple[int, dict[tuple[str, int], int]] | None = None
        #: where the records of topics end that were created since the store was opened, and where the log ended then
        self._topic_ends: dict[str, int] = {}
        self._opened_end = 0
        #: held from the look whether a topic exists until its record's end is noted
        self._topics_lock = threading.Lock()
        self._closed = False
        #: the log alone says where each consume queue ends
        self._exact = False
        #: a sync of a consume queue failed
        self._queues_doubtful = False
        self._syncing = threading.Lock()

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
        store = None
        try:
            store = cls(log)
            if on_locked is not None:
                on_locked()
            store._recover()
            config_json.import_changed(store)
            store._opened_end = log.end
        except BaseException:
            if store is None:
                log.abandon()
            else:
                store.abandon()
            raise
        return store

    # --- recovery -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        log = self.log
        log.restore_pool()
        # Consume queues are synced rarely; after a reboot only what the marks say about them is trusted. After a
        # failed sync too: what is in the page cache counts as clean, and nothing but a second write brings it to disk.
        doubt = bool(log.crashed and (not log.same_boot or log.meta.get(QUEUES_DOUBTFUL)))
        resting = not doubt and self._queues_may_rest()
        self.consume_queues.on_differing = self._look_at_queues
        if resting:
            complete = known = log.marks.queued_end
        else:
            log.marks.queued_end = 0
            complete = known = self._load_queues()
            if doubt:
                complete = min(complete, log.marks.dispatched_end)
        low = complete if log.same_boot or not log.own else min(complete, log.synced)

        at_boundary = False

        def visit(view: memoryview, base: int, walk: record.Walk) -> None:
            nonlocal at_boundary
            if base <= complete <= walk.end:
                ends = walk.positions + walk.sizes
                at_boundary |= complete == base or bool((ends == complete).any())
            self._visit(view, base, walk)

        def settle(end: int) -> None:
            nonlocal complete
            damaged = log.start < complete < end and not at_boundary
            if resting and not damaged and complete <= end:
                # Not synced: what a process that was killed has written.
                self.consume_queues.rest(self._expected_ends(), complete, unsynced=log.crashed)
                return
            if resting:
                log.marks.queued_end = 0
                self._load_queues()
            if damaged:
                # They end inside a record: all of them are built anew.
                complete = -1
            # Above what was synced a unit may be torn: it is dispatched again. What is below the log's start cannot be,
            # and was synced before that was deleted.
            trusted = max(complete, log.start) if doubt or damaged else end
            self.consume_queues.truncate(min(end, trusted))

        self._complete = complete
        scan_start = self._scan_start(low)
        log.recover(scan_start, visit, settle, queues_end=known)
        if self.put_path.group[1] > log.end:
            self._cut_half_group(scan_start)
            self.consume_queues.truncate(log.end)
        if log.recovered is not None and log.recovered.row == "K" and not log.own:
            log.note_synced(log.end)
        self.consume_queues.correct_min_offsets(log.start)
        lost = self._lost_queues()
        if lost and resting:
            self._load_queues()
            self.consume_queues.correct_min_offsets(log.start)
        self._exact = not lost and complete >= 0 and self._queues_end_as_expected()
        self._count_on_from_queues()
        if lost or complete < 0:
            # Durably, before anything is built anew: after another crash the old mark would vouch for the gaps.
            log.marks.forget_dispatched(log.start)
            log.checkpoint.logics_ms = 0
            log.checkpoint.sync()
            self.consume_queues.truncate(log.start)
            complete = log.start
            self._rebuilding = log.end, lost
            # From an empty start on the queues grow with what the log says.
            self._exact = not log.start and not any(
                queue.max_offset for queue in self.consume_queues.all()
            )
        self._dispatch.dispatched = min(max(complete, log.start), log.end)
        if self._exact:
            log.marks.queued_end = self._dispatch.dispatched
        tail = log.queue.find(log.end)
        if tail is not None:
            complete_at, parts_end = read_head(tail)
            if complete_at is not None or parts_end < log.end:
                self.put_path.headed = tail.start
        newest = next(self._snapshot_starts(log.end), None)
        if newest is not None:
            self.put_path.note_snapshot(newest)
        self._recover_index()
        if not log.queue.files:
            self.put_path.begin_log()
        self.compaction.load()

    def _queues_may_rest(self) -> bool:
        """Whether all is known of the consume queues without a look at them: nobody else wrote here meanwhile."""
        log = self.log
        complete, appended = log.marks.queued_end, log.marks.appended_end
        low = complete if log.same_boot else min(complete, log.synced)
        if not log.own or not log.start < complete <= min(appended, log.end_max):
            return False
        if log.start and next(self._snapshot_starts(low), None) is None:
            # RocketMQ deleted the files that told where queues end.
            return False
        file = log.queue.find(appended)
        if file is None:
            return True
        at = appended - file.start
        return not any(file.read(at, min(at + 8, file.size)))

    def _load_queues(self) -> int:
        """Look at every consume queue. Returns: the end of the last record that any of them has."""
        log = self.log
        # With the page cache intact only the last units can be half written.
        sound_below = log.end_max if log.same_boot else log.marks.dispatched_end
        self.consume_queues.load(after_crash=log.crashed, sound_below=sound_below)
        return self.consume_queues.max_physical_offset

    def _count_on_from_queues(self) -> None:
        """Where RocketMQ deleted all messages of a queue, only the consume queue knows how far they were numbered."""
        offsets = self.state.next_offsets
        for key, queue in self.consume_queues.items():
            offsets[key] = max(offsets.get(key, 0), queue.max_offset)

    def _queues_end_as_expected(self) -> bool:
        """Whether the log alone says where each consume queue ends; in stores of others it may not."""
        ends = self._expected_ends()
        return all(
            ends.get(key, 0) == queue.max_offset for key, queue in self.consume_queues.items()
        )

    def _look_at_queues(self) -> None:
        """The next start shall look at every consume queue."""
        self._exact = False
        self.log.marks.queued_end = 0

    def _expected_ends(self) -> dict[tuple[str, int], int]:
        """Where each consume queue ends, if all of them are complete up to where they say."""
        return self.state.next_offsets if self._at_complete is None else self._at_complete

    @property
    def state_is_whole(self) -> bool:
        """Whether the log tells all of the state; RocketMQ may have deleted the snapshots that told it."""
        return self.log.start == 0 or self._met_snapshot

    def _lost_queues(self) -> dict[tuple[str, int], int]:
        """Consume queues with fewer units than were dispatched, and the offset that each had come to."""
        expected = self._expected_ends()
        lost = {key: expected[key] for key in self.consume_queues.missing()}
        for (topic, queue_id), offset in expected.items():
            if self.consume_queues.rests(topic, queue_id):
                continue
            queue = self.consume_queues.find(topic, queue_id)
            if offset and (queue is None or queue.max_offset < offset):
                lost[topic, queue_id] = offset
        return lost

    def _end_rebuilding(self) -> None:
        """A lost queue of which the log has no message any more goes on where it was."""
        if self._rebuilding is None or self.dispatched < self._rebuilding[0]:
            return
        for (topic, queue_id), offset in self._rebuilding[1].items():
            self.consume_queues.begin_at(topic, queue_id, offset)
        self._rebuilding = None

    def _recover_index(self) -> None:
        log = self.log
        if not self.config.message_index:
            return
        self.index.load(
            log_start=log.start,
            log_end=log.end,
            uncut=log.marks.dispatched_end,
            crashed=log.crashed,
            time_ms=log.checkpoint.index_ms,
        )
        self._dispatch.index = IndexBuilder(log, self.index, self.clock)

    def _cut_half_group(self, scan_start: int) -> None:
        """A crash left the first messages of a group only: it was never told to be stored, all of it goes."""
        start = self.put_path.group[0]
        # In memory mode C may have followed the page cache into the group, which a power loss then took.
        self.log.marks.lower(start)
        self.log.truncate(start)
        self.put_path.group = (0, 0)
        self.state.clear()
        for file in self.log.queue.files:
            if scan_start - file.size < file.start < self.log.end:
                at, stop = file.start, min(self.log.end, file.start + file.size)
                while at < stop:
                    view, base, walk = self.log.walk(at, stop, check_crc=False)
                    self._visit(view, base, walk)
                    if walk.reason is not record.WalkStop.STOPPED:
                        break
                    at = walk.end

    def _scan_start(self, low: int) -> int:
        """Start of the newest snapshot that is complete and ends at or below `low`; else the log's start.

        Below `low` nothing can be cut: no torn tail takes away the snapshot that the state is made from.
        """
        return next(self._snapshot_starts(low), self.log.start)

    def _snapshot_starts(self, low: int) -> Iterator[int]:
        """Where snapshots begin that end at or below `low`, newest first."""
        log = self.log
        heads = [file.start for file in log.queue.files]
        for start in sorted({*heads, *log.marks.snapshots}, reverse=True):
            file = log.queue.find(start)
            if file is not None and start < low:
                complete_at, _ = read_head(file, start)
                if complete_at is not None and complete_at <= low:
                    yield start

    def _visit(self, view: memoryview, base: int, walk: record.Walk) -> None:
        columns = (*rows.RUN_COLUMNS, "body")
        for run in rows.runs(view, base, walk.positions, walk.sizes, columns=columns):
            self._apply(run)

    def _apply(self, run: rows.RowRun) -> None:
        if self._at_complete is None and run.positions[-1] >= self._complete:
            self._at_complete = dict(self.state.next_offsets)
            before = int(run.positions.searchsorted(self._complete))
            if before:
                self._at_complete[run.topic, run.queue_id] = run.first_offset + before
        if run.topic == INTERNAL_TOPIC:
            written = run.batch.column("properties").to_pylist()
            bodies = run.batch.column("body").to_pylist()
            for text, body, at in zip(written, bodies, run.positions.tolist(), strict=True):
                kind = properties.decode(text).get(properties.TAGS, "")
                with reading_internal(kind, at):
                    if kind == PROGRESS:
                        self.put_path.group = (at, int(json.loads(body)["end"]))
                    restored = self.state.apply_internal(kind, body)
                self._met_snapshot |= restored
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
        """See `PutPath.put`."""
        return self.put_path.put(request)

    def check(self, request: PutRequest) -> CheckedPut:
        """See `PutPath.check`."""
        return self.put_path.check(request)

    def append(self, checked: CheckedPut) -> Append:
        """See `PutPath.append`."""
        return self.put_path.append(checked)

    def put_inner(
        self, messages: Sequence[InnerMessage], *, progress: Progress | None = None
    ) -> list[Append]:
        """See `PutPath.put_inner`."""
        return self.put_path.put_inner(messages, progress=progress)

    def put_internal(self, kind: str, body: bytes) -> Append:
        """See `PutPath.put_internal`."""
        return self.put_path.put_internal(kind, body)

    # --- dispatch -------------------------------------------------------------------------------------------

    @property
    def dispatched(self) -> int:
        """Everything below this is in the consume queues."""
        return self._dispatch.dispatched

    @property
    def delayed(self) -> int:
        """Grows when a message is dispatched that is to be delivered later."""
        return self._dispatch.delayed

    def dispatch(self, confirmed: int) -> int:
        """Build consume queues up to `confirmed`, for at most about 2 ms. Returns: the dispatched end.

        The index has it all when a call dispatched nothing and `index_behind` is False.
        Callers: one thread.
        """
        dispatched = self._dispatch.run(confirmed)
        if self._exact:
            self.log.marks.queued_end = dispatched
        if self._rebuilding is not None:
            self._end_rebuilding()
        return dispatched

    def take_touched(self) -> set[tuple[str, int]]:
        """The queues in which `dispatch` put messages since the last call. Callers: the one that dispatches."""
        return self._dispatch.take_touched()

    def dispatch_concerns(self, queues: Container[tuple[str, int]], confirmed: int) -> bool:
        """Whether what `dispatch` would do up to `confirmed` has messages of one of `queues`, or may have."""
        return self._dispatch.concerns(queues, confirmed)

    @property
    def damage(self) -> list[Corrupt]:
        """Damage below C that dispatch, index or deliveries came to and passed over."""
        return list(self.log.damage_met.values())

    @property
    def index_behind(self) -> bool:
        """Whether `dispatch` has records to index that are in the consume queues already."""
        return self._dispatch.index_behind

    def sync_queues(self, *, closing: bool = False) -> None:
        """fdatasync every consume queue and the index, and remember how far they are complete.

        Raises: OSError; then Unavailable, for no second sync proves anything. The next start writes them again.
        Callers: any thread but the one that dispatches, which should not wait so long.
        """
        with self._syncing:
            self._sync_queues(closing=closing)

    def _sync_queues(self, *, closing: bool) -> None:
        if self._queues_doubtful:
            raise Unavailable(
                "an fdatasync of a consume queue failed; the next start builds anew what was not synced",
                field="consumequeue",
            )
        upto = self.dispatched
        try:
            self.consume_queues.sync()
            if self.config.message_index:
                checkpoint = self.log.checkpoint
                checkpoint.index_ms = max(checkpoint.index_ms, self.index.sync(closing=closing))
        except OSError as error:
            if error.errno in NOT_TRIED:
                raise
            self._queues_doubtful = True
            with contextlib.suppress(OSError, RayMQError):
                self.log.meta.update({QUEUES_DOUBTFUL: True})
            raise
        self.log.marks.dispatched_end = upto

    # --- deletion: what `cleaner` asks ------------------------------------------------------------------------

    def deletable_end(self) -> int:
        """What is in the consume queues, durably: a power loss must not bring them back behind the log's start."""
        self.sync_queues()
        log = self.log
        held = [end for hold in self.holds if (end := hold()) is not None]
        if not any(
            self.state.progress.get(service) for service in (LEVELS_SERVICE, TIMERS_SERVICE)
        ):
            return min([log.marks.dispatched_end, *held])
        # What no longer waits was delivered by records that must be on disk before their origins go.
        self._held.append((log.end, min([log.marks.dispatched_end, *held])))
        certain = [each for each in self._held if each[0] <= log.synced]
        self._held = [*certain[-1:], *(each for each in self._held if each not in certain)][
            -HELD_MAX:
        ]
        return certain[-1][1] if certain else log.start

    def forget_before(self, start: int) -> None:
        """Messages below physical offset `start` are out of range from now on."""
        self.consume_queues.correct_min_offsets(start)

    def delete_derived(self, start: int) -> None:
        """Delete chain, consume queue files and indexes of what stood below `start`."""
        with self._put_lock:
            self.log.chain.delete_before(start)
        fail_point("clean.after_chain")
        self.consume_queues.delete_expired()
        fail_point("clean.after_queues")
        for derived in self.derived:
            derived.delete_expired(start)

    # --- reads ----------------------------------------------------------------------------------------------

    def queues(self) -> list[tuple[str, int]]:
        """Every (topic, queue) that has a consume queue."""
        return self.consume_queues.keys()

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The half-open range of readable offsets of a queue; when compacted, from the first message that is left."""
        if self.compaction.owns(topic):
            return self.compaction.queue_range(topic, queue_id)
        return self.reader.queue_range(topic, queue_id)

    def fetch(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> FetchSlice:
        """See `Reader.fetch`; of a compaction topic `CompactionStore.fetch`.

        Raises: Unavailable, too, when the store is not readable.
        """
        self._check_readable()
        reader: CompactionStore | Reader = self.reader
        if self.compaction.owns(topic):
            reader = self.compaction
        found = reader.fetch(topic, queue_id, offset, max_bytes=max_bytes, max_records=max_records)
        self.stats.note_get(0 if found.records is None else len(found.records))
        return found

    def fetch_whole(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> FetchSlice:
        """As `fetch`, for whoever takes the records out of their bytes here: up to the first that is damaged.

        Raises: Corrupt where that is the one at `offset`.
        """
        found = self.fetch(topic, queue_id, offset, max_bytes=max_bytes, max_records=max_records)
        fault = fault_of(found)
        if fault is None:
            return found
        if fault.row:
            return before(found, fault.row)
        self.check_record(topic, queue_id, found.first_offset)
        raise Unavailable(
            f"message {offset} of queue {queue_id} of {topic} was read damaged ({fault.rule}) and then whole: memory "
            "changes bytes",
            field="store",
        )

    def check_record(self, topic: str, queue_id: int, offset: int) -> None:
        """Look whether the message at an offset is whole; where there is none, nothing is said.

        Raises: Corrupt naming the file and the place, which is noted for status.
        """
        try:
            if self.compaction.owns(topic):
                self.compaction.read(topic, queue_id, offset, max_bytes=1, max_records=1)
            else:
                self.reader.check(topic, queue_id, offset)
        except Corrupt as error:
            self.log.note_damage(error)
            raise

    def _check_readable(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed; open it again to read", field="store")
        self.flags.check_readable()

    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_nums: int,
        *,
        max_bytes: int = BYTES_MAX,
        wanted: MessageFilter | None = None,
    ) -> GetMessageResult:
        """See `GetMessage.get`.

        Raises: Unavailable when the store is not readable.
        """
        self._check_readable()
        get = self._get_message.get
        if self.compaction.owns(topic):
            get = partial(get_compacted, self.compaction, self._get_message)
        found = get(topic, queue_id, offset, max_nums, max_bytes=max_bytes, wanted=wanted)
        self.stats.note_get(len(found.queue_offsets))
        return found

    # --- queries --------------------------------------------------------------------------------------------

    def query_message(
        self,
        topic: str,
        key: str,
        *,
        max_num: int = 64,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX_MS,
        exact: bool = False,
    ) -> QueryResult:
        """See `Query.by_key`."""
        return self.query.by_key(
            topic, key, max_num=max_num, begin_ms=begin_ms, end_ms=end_ms, exact=exact
        )

    def query_messages(
        self,
        topic: str,
        keys: Sequence[str],
        *,
        max_num: int = 64,
        begin_ms: int = 0,
        end_ms: int = TIME_MAX_MS,
        exact: bool = False,
    ) -> KeyHits:
        """Many keys at once; see `query_keys.by_keys`."""
        return by_keys(
            self.log,
            self.index,
            topic,
            keys,
            max_num=max_num,
            begin_ms=begin_ms,
            end_ms=end_ms,
            exact=exact,
        )

    def look_message_by_offset(self, offset: int) -> pa.RecordBatch:
        """See `Query.by_offset`."""
        return self.query.by_offset(offset)

    def look_message_by_id(self, message_id: str) -> pa.RecordBatch:
        """See `Query.by_id`."""
        return self.query.by_id(message_id)

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """See `Query.offset_by_time`."""
        return self.query.offset_by_time(topic, queue_id, time_ms, boundary)

    def earliest_store_time(self, topic: str, queue_id: int) -> int | None:
        """See `Query.earliest_store_time`."""
        return self.query.earliest_store_time(topic, queue_id)

    # --- administration -------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        queues: int,
        shards: Iterable[int],
        attributes: Mapping[str, str] | None = None,
    ) -> Append | None:
        """Create a topic; None when the same one exists already.

        Raises: Rejected for a bad name, number or attribute, or when it exists with others.
        """
        with self._topics_lock:
            info = check_new_topic(name, queues, tuple(shards), self.state.topics, attributes)
            if info is None:
                return None
            value: dict[str, Any] = {"name": name, "queues": queues, "shards": list(info.shards)}
            if info.attributes:
                value["attributes"] = dict(info.attributes)
            appended = self.put_internal(TOPIC, _json(value))
            self._topic_ends[name] = appended.end_offset
            return appended

    def topic_end(self, name: str) -> int:
        """A physical offset: a topic that exists is as durable as the log below it."""
        with self._topics_lock:
            return self._topic_ends.get(name, self._opened_end)

    def commit_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> Append:
        """Store a group's next offsets in the log. Raises: Rejected for a name that no group may have."""
        check_group_name(group)
        value = {"group": group, "topic": topic, "offsets": {str(q): o for q, o in offsets.items()}}
        return self.put_internal(OFFSETS, _json(value))

    def init_producer(self, producer: int) -> tuple[int, Append]:
        """The next epoch of a producer id, stored in the log, and what to wait for.

        Raises: Rejected where the shard remembers as many producers as it may.
        """
        return self.put_path.init_producer(producer)

    # --- shutdown -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Orderly stop: dispatch to C, sync everything, leave `abort` away only if all derived files are complete."""
        if self._closed:
            return
        self._closed = self.put_path.closed = True
        log = self.log
        complete = False
        try:
            while self.dispatched < log.confirmed:
                before = self.dispatched
                if self.dispatch(log.confirmed) == before:
                    break
            until_ms = self.clock.monotonic_ms() + INDEX_WAIT_MS
            while self.index_behind and self.clock.monotonic_ms() < until_ms:
                self.dispatch(log.confirmed)
            copied = self._copy_compacted()
            self.sync_queues(closing=True)
            config_json.write_back(self)
            self.compaction.close()
            log.checkpoint.physic_ms = self.state.store_time_ms
            log.checkpoint.logics_ms = self.state.store_time_ms
            log.checkpoint.sync()
            complete = copied and self.dispatched >= log.end
            if self.config.message_index:
                complete = complete and self.index.indexed >= log.end
        finally:
            self.compaction.abandon()
            self.consume_queues.close()
            self.index.close()
            log.close(clean=complete)

    def _copy_compacted(self) -> bool:
        """Bring the compacted queues up to date. Returns: whether they are."""
        until_ms = self.clock.monotonic_ms() + COPY_WAIT_MS
        try:
            while self.compaction.advance_all():
                if self.clock.monotonic_ms() > until_ms:
                    return False
        except (OSError, RayMQError) as error:
            # The next start goes on; nothing of it is deleted from the log before.
            logger.warning("compacted queues are not complete: %s", error)
            return False
        return True

    def abandon(self) -> None:
        """Let go of every file as a crash would: nothing is synced, `abort` stays."""
        self._closed = self.put_path.closed = True
        self.compaction.abandon()
        self.consume_queues.close()
        self.index.close()
        self.log.abandon()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
