"""One shard's store: RocketMQ's DefaultMessageStore, in columns.

`put` appends and returns at once, because the host of the store awaits the sync and the replica, and then moves the
confirmed end. `dispatch` builds consume queues and index below that end, and `fetch` reads them. `EmbeddedStore` is
such a host.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from raymq.store.base.clock import Clock, StoreTimeClock
from raymq.store.base.errors import Corrupt, RayMQError, Rejected, Unavailable, broken
from raymq.store.base.files import NOT_TRIED, Files
from raymq.store.base.format import (
    DECISIONS_TOPIC,
    SCHEDULE_TOPIC,
    STAGED_TOPIC,
    TIMER_TOPIC,
    check_group_name,
)
from raymq.store.base.running_flags import RunningFlags
from raymq.store.compaction.compacted_times import compacted_offset_by_time
from raymq.store.compaction.compaction_store import CompactionStore
from raymq.store.compaction.get_compacted import get_compacted
from raymq.store.config.delay_levels import DEFAULT_LEVELS
from raymq.store.config.store_config import StoreConfig
from raymq.store.config_files import config_json
from raymq.store.delay.delay_hook import DelayHook, LevelGuard
from raymq.store.groups.claims import ClaimTable
from raymq.store.groups.group_table import GroupTable
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.index.index_builder import IndexBuilder
from raymq.store.index.index_service import IndexService
from raymq.store.index.query import Boundary, Query
from raymq.store.log.believed_clock import BelievedClock
from raymq.store.log.clean import CleanService, Derived
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.control_files.meta import CHAIN_BEGIN, DELAY_LEVELS, QUEUES_DOUBTFUL
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.put.inner_put import InnerPut
from raymq.store.put.option_records import OptionRecords
from raymq.store.put.put_hooks import PutHook, TopicGuard
from raymq.store.put.put_lock import PutLock
from raymq.store.put.put_path import PutPath
from raymq.store.put.service_records import ServiceRecords
from raymq.store.put.snapshot_writer import SnapshotWriter
from raymq.store.put.stats import StoreStats
from raymq.store.put.topic_records import TopicRecords
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.queues.get_message import BYTES_MAX, GetMessage, GetMessageResult
from raymq.store.queues.message_filter import LookLimit, MessageFilter
from raymq.store.queues.raw_records import fault_of, records_before
from raymq.store.queues.reader import QueueReader, out_of_range
from raymq.store.queues.reput_service import ReputService
from raymq.store.records.requests import AppendedRows, FetchSlice, PutRequest
from raymq.store.services.checkpoint_service import CheckpointService
from raymq.store.services.staged_rows import StagedGuard
from raymq.store.services.write_decisions import DecisionGuard
from raymq.store.state.features import (
    FEATURES,
    LEVEL,
    check_feature_level,
    feature_level,
)
from raymq.store.state.producer_table import ProducerTable
from raymq.store.state.shard_state import (
    INTERNAL_TOPIC,
    NO_BUNDLE,
    OFFSETS,
    ShardState,
    offsets_body,
)
from raymq.store.state.topics import QueueKey

from .followed_log import FollowedLog
from .retention import Retention
from .store_recovery import LostQueues, StoreRecovery

logger = logging.getLogger(__name__)

_Read = TypeVar("_Read")

#: longest wait of an orderly stop for a lagging index. After it the file `abort` stays
INDEX_WAIT_MS = 5_000
#: longest wait of an orderly stop for compacted queues: RocketMQ would never serve messages that are not copied
COPY_WAIT_MS = 60_000


class MessageStore:
    """Topics, puts, dispatch and reads over one commit log.

    Threads: any may put (one put lock), one dispatches, any may fetch.
    """

    def __init__(self, log: CommitLog) -> None:
        self.log = log
        self.config = log.config
        self.files = log.files
        self.clock = log.clock

        producers = ProducerTable(
            entries_max=log.config.producer_entries_limit,
            expiry_ms=int(log.config.producer_expiry_hours * 3_600_000),
            limit_option=log.config.producer_limit_option,
        )
        #: the consumer groups that this shard coordinates
        self.groups = GroupTable()
        #: the members that may commit offsets of this shard's queues
        self.claims = ClaimTable()
        #: what workers have leased of this shard's queues
        self.leases = LeaseTable()
        self.state = ShardState(producers, (self.groups, self.claims), (self.leases,))
        self.state.on_options = self._follow_options
        #: called with the put lock when options have changed
        self.on_options: list[Callable[[], None]] = []

        self.consume_queues = ConsumeQueues(log.root, log.config, files=log.files)
        self.consume_queues.first_offset = lambda topic, queue: self.state.first_offset(
            topic, queue
        )
        self.reader = QueueReader(log, self.consume_queues, self.state)
        self.compaction = CompactionStore(log, self.consume_queues, self.state)
        self.index = IndexService(log.root, log.config, files=log.files, clock=log.clock)
        self._get_message = GetMessage(log, self.consume_queues, self.state)
        #: finds messages by key, id, offset and time
        self.query = Query(log, self.consume_queues, self.index)

        #: conditions that block reads, puts or dispatch
        self.flags = RunningFlags()
        self.stats = StoreStats()

        #: moves messages with a delivery time to the topics where they wait
        self.delay_hook = DelayHook(log.config, log.clock)
        #: called for every put but those of the store's own services
        self.hooks: list[PutHook] = [self.delay_hook]
        #: system topics that users may put columns to, and their checks
        self.topic_guards: dict[str, TopicGuard] = {
            TIMER_TOPIC: self.delay_hook,
            SCHEDULE_TOPIC: LevelGuard(log.config),
            STAGED_TOPIC: StagedGuard(log.config, self.delay_hook),
            DECISIONS_TOPIC: DecisionGuard(log.config),
        }

        self.put_lock = PutLock(log.clock)
        #: store times of records
        self.store_times = StoreTimeClock(log.clock)
        #: fills consume queues and index; its `run` is called by `dispatch`
        self.reput = ReputService(
            log, self.consume_queues, put_lock=self.put_lock, flags=self.flags
        )
        self.snapshots, self.put_path, self.inner_put, self._first_put = self._make_put_parts()
        #: creates and changes topics
        self.topics = TopicRecords(log, self.state, self.inner_put)
        #: sets options
        self.options = OptionRecords(log, self.inner_put)

        #: the writing side while another replica leads; None: this one appends
        self.followed: FollowedLog | None = None

        #: derived stores, which forget messages that the log deletes
        self.derived: list[Derived] = [self.index]
        #: each returns the physical offset from which it still needs records; None: it needs none
        self.retention_floors: list[Callable[[], int | None]] = [
            self.compaction.sync_and_find_needed_from
        ]
        #: what the log may delete, and what goes with it
        self.retention = Retention(
            log,
            self.state,
            queues=self.consume_queues,
            put_lock=self.put_lock,
            derived=self.derived,
            floors=self.retention_floors,
            sync_queues=self.sync_queues,
        )
        #: deletes old files; the host calls its `run_once`
        self.clean_service = CleanService(log, self.retention, flags=self.flags)
        #: writes checkpoint and configuration for the start after a crash; the host calls its `run_once`
        self.checkpoint_service = CheckpointService(self)

        #: recovery read a snapshot
        self._has_snapshot = False
        #: the EPOCH record of a `lead` that has not ended
        self._begun: AppendedRows | None = None
        #: the last bundle that recovery read, until this replica leads
        self._last_bundle = NO_BUNDLE
        #: the consume queues that are being rebuilt
        self._rebuilding: LostQueues | None = None
        #: each consume queue ends exactly where the log says
        self._queues_exact = False
        #: a sync of a consume queue failed
        self._queues_doubtful = False
        self._sync_lock = threading.Lock()

    def _make_put_parts(self) -> tuple[SnapshotWriter, PutPath, InnerPut, InnerPut]:
        """The parts that append: they share the put lock and the writer of service records.

        The last one appends while nothing else may: before the first put, and before `lead` has ended.
        """
        log, state, put_lock = self.log, self.state, self.put_lock
        records = ServiceRecords(
            log, state, put_lock=put_lock, store_times=self.store_times, reput=self.reput
        )

        snapshots = SnapshotWriter(log, state, put_lock=put_lock, records=records)

        put_path = PutPath(
            log,
            state,
            queues=self.consume_queues,
            reput=self.reput,
            put_lock=put_lock,
            flags=self.flags,
            stats=self.stats,
            hooks=self.hooks,
            guards=self.topic_guards,
            records=records,
            snapshots=snapshots,
        )

        make_inner_put = partial(
            InnerPut,
            log,
            state,
            put_lock=put_lock,
            stats=self.stats,
            records=records,
            snapshots=snapshots,
        )
        inner_put = make_inner_put(check_open=put_path.check_open, check_leads=put_path.check_leads)
        first_put = make_inner_put(check_open=lambda: None, check_leads=lambda: None)
        return snapshots, put_path, inner_put, first_put

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        config: StoreConfig | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
        identity: Mapping[str, object] | None = None,
        on_locked: Callable[[], None] | None = None,
        follows: bool = False,
    ) -> MessageStore:
        """Open or create the store in `root` and recover it.

        Args: `on_locked`: called with the store's lock held and before anything is recovered, to end processes that an
        earlier host left running. `follows`: another replica writes the log, so that nothing is appended here.
        Raises: Unavailable if another process has it open, Corrupt for damage that recovery may not cut off.
        """
        config = config or StoreConfig()
        files = files or Files()
        log = CommitLog(root, config, files=files, clock=clock or Clock(), identity=identity)

        store = None
        try:
            store = cls(log)
            if on_locked is not None:
                on_locked()
            store._recover(follows)
            if follows:
                store.follow()
            else:
                store._begin_to_write()
        except BaseException:
            (store or log).abandon()
            raise
        return store

    # --- recovery ---------------------------------------------------------------------------------

    def _recover(self, follows: bool) -> None:
        """Make log, state, consume queues, index and compacted queues agree."""
        self.consume_queues.on_differing = self._distrust_queue_ends
        self.consume_queues.on_lost_units = self.reput.write_again
        found = StoreRecovery(
            self.log,
            self.state,
            queues=self.consume_queues,
            snapshots=self.snapshots,
            follows=follows,
        ).run()
        check_feature_level(self.state.progress, self.log.root)

        self.reput.dispatched = found.dispatched
        self.reput.other_places = found.other_places
        self._queues_exact = found.queues_exact
        self._has_snapshot = found.has_snapshot
        self._rebuilding = found.rebuilding
        self._last_bundle = found.bundle
        self.topics.note_opened()
        BelievedClock(self.log).begin(self.state.store_time_ms)
        self._note_delay_levels()
        self._recover_index()
        self.compaction.load()

    def _follow_options(self) -> None:
        """Let the options be those with which the store was opened, and those that records of the log have set."""
        config = self.config
        if config.follow(self.state.changed_options()):
            self.state.producers.set_expiry_ms(int(config.producer_expiry_hours * 3_600_000))
            self.log.allocator.set_warm(config.warm_mapped_file)
            for call in self.on_options:
                call()

    def _note_delay_levels(self) -> None:
        levels, meta = self.config.message_delay_level, self.log.meta
        if levels != (meta.get(DELAY_LEVELS) or DEFAULT_LEVELS):
            meta.update({DELAY_LEVELS: levels})

    def follow(self) -> None:
        """Let another replica write the log, through `followed`. From now on every other append is refused.

        Callers: also after a `lead` that failed.
        """
        self.put_path.follows = True
        self._begun = None
        if self.followed is None or self.followed.ended:
            self.followed = FollowedLog(
                self.log,
                self.state,
                put_lock=self.put_lock,
                reput=self.reput,
                last_bundle=self._last_bundle,
                awaits_snapshot=not self.state_is_whole,
                on_snapshot=self._begin_queues_of_snapshot,
            )

    def begin_at(self, start: int, chain_value: int, *, epoch: int) -> None:
        """Let the empty log of this follower begin elsewhere: `FollowedLog.begin_at`, which says what callers need."""
        followed = self.followed
        if followed is None:
            raise broken("a follower's log begins where its leader's does", epoch=epoch)
        followed.begin_at(start, chain_value, epoch=epoch)
        self._has_snapshot = False
        if self.reput.index is not None:
            # A start above the new one may have counted as indexed.
            self.index.indexed = min(self.index.indexed, start)
            self.reput.index = IndexBuilder(self.log, self.index)

    def _begin_queues_of_snapshot(self, starts: dict[QueueKey, int]) -> None:
        """Let the queues that have no message in the log of a follower begin where its first snapshot says."""
        self._has_snapshot = True
        for (topic, queue_id), offset in starts.items():
            if topic != INTERNAL_TOPIC and offset:
                self.consume_queues.begin_at(topic, queue_id, offset)

    def lead(self, epoch: int) -> AppendedRows:
        """End `follow`, and begin the epoch of a leader with an EPOCH record: all that it appends is of that epoch.

        Callers: no unit is being appended, and no satellite runs if `FollowedLog.apply_all` says that the log is cut.
        Returns: as `begin_epoch`.
        Raises: as `FollowedLog.end` and `begin_epoch`. Afterwards the caller repeats the call, or calls `follow`.
        """
        followed = self.followed
        if followed is None:
            return self.begin_epoch(epoch)
        if self._begun is None or self.log.last_epoch != epoch:
            followed.end()
            self._last_bundle = NO_BUNDLE
            self.topics.forget_ends()
            self.snapshots.find_newest()
            self._begun = self.inner_put.begin_epoch(epoch)
        begun = self._begun
        self._import_config()
        self._begun = self.followed = None
        self.put_path.follows = False
        return begun

    def _begin_to_write(self) -> None:
        """Append what an empty log begins with, and what RocketMQ's configuration files say that the state does not."""
        if not self.log.segments.files:
            self.snapshots.begin_log()
        self._import_config()

    def _import_config(self) -> None:
        config_json.import_changed(self, self._first_put)
        self.topics.note_opened()

    def _distrust_queue_ends(self) -> None:
        """Make the next start open every consume queue."""
        self._queues_exact = False
        self.log.marks.dispatched_end = 0

    def _recover_index(self) -> None:
        """Open the index, if records are indexed."""
        log = self.log
        if not self.config.message_index:
            return
        begins_again = self.index.load(
            log_start=log.start,
            log_end=log.end,
            never_cut_below=log.marks.queues_synced_end,
            crashed=log.crashed,
        )
        if begins_again:
            # After a crash RocketMQ keeps the index files that ended before this time.
            log.checkpoint.index_ms = 0
            log.checkpoint.sync()
        self.reput.index = IndexBuilder(log, self.index)

    def _end_rebuilding(self) -> None:
        """Let a lost queue that has no message left in the log continue at its old offset."""
        if self._rebuilding is None or self.dispatched < self._rebuilding.log_end:
            return
        for (topic, queue_id), offset in self._rebuilding.offsets.items():
            self.consume_queues.begin_at(topic, queue_id, offset)
        self._rebuilding = None

    @property
    def state_is_whole(self) -> bool:
        """Whether the log holds all of the state. RocketMQ may have deleted the snapshots that held it."""
        return self.log.start == 0 or self._has_snapshot

    @property
    def lacks_compacted(self) -> bool:
        """Whether compacted queues of this replica may lack messages of files that its leader had deleted."""
        begun = self.log.meta.get(CHAIN_BEGIN)
        if begun is None or not begun[0]:
            return False
        return any(topic.compacted for topic in list(self.state.topics.values()))

    # --- put --------------------------------------------------------------------------------------

    def put(self, request: PutRequest) -> AppendedRows:
        """Check and append one batch of one queue, in two steps: `PutPath.check`, `PutPath.append`."""
        return self.put_path.put(request)

    def put_inner(
        self, messages: Sequence[InnerMessage], *, progress: ServiceProgress | None = None
    ) -> list[AppendedRows]:
        """Append messages of the store's own services: `InnerPut.put`."""
        return self.inner_put.put(messages, progress=progress)

    def note_feature_level(self, level: int) -> None:
        """Write that the log uses a level of features, unless it says so. Callers: before the first record of it.

        Raises: as `put_inner`.
        """
        if feature_level(self.state.progress) < level:
            self.put_inner([], progress=ServiceProgress(FEATURES, {LEVEL: level}))

    def begin_next_file(self) -> AppendedRows:
        """End the commit log file that is written, however full it is: `InnerPut.begin_next_file`."""
        return self.inner_put.begin_next_file()

    def begin_epoch(self, epoch: int) -> AppendedRows:
        """Begin the epoch of a leader with an EPOCH record: `InnerPut.begin_epoch`.

        Raises: also Unavailable while another replica writes the log: `lead` ends that.
        """
        self.put_path.check_writes_log()
        return self.inner_put.begin_epoch(epoch)

    # --- dispatch ---------------------------------------------------------------------------------

    @property
    def dispatched(self) -> int:
        """Everything below this is in the consume queues."""
        return self.reput.dispatched

    def dispatch(self, confirmed: int) -> int:
        """Build consume queues up to `confirmed`, for at most about 2 ms. Returns: the dispatched end.

        The index is complete if a call dispatched nothing and `reput.index_behind` is False.
        Callers: one thread.
        """
        dispatched = self.reput.run(confirmed)
        if self._queues_exact:
            self.log.marks.dispatched_end = dispatched
        if self._rebuilding is not None:
            self._end_rebuilding()
        return dispatched

    @property
    def damage(self) -> list[Corrupt]:
        """Damage below the confirmed end that dispatch, index or deliveries skipped, and that of compacted queues."""
        skipped = [
            error
            for offset, error in list(self.log.reads.skipped_damage.items())
            if offset >= self.log.start
        ]
        return [*skipped, *self.compaction.damage]

    def sync_queues(self, *, closing: bool = False) -> None:
        """fdatasync every consume queue and the index, and remember how far they are complete.

        Raises: OSError if a sync failed. Later calls raise Unavailable, since no second sync proves anything. The next
        start writes the queues again. Callers: any thread but the one that dispatches, which should not wait so long.
        """
        with self._sync_lock:
            if self._queues_doubtful:
                fault = "an fdatasync of a consume queue failed; the next start rebuilds all that was not synced"
                raise Unavailable(fault, field="consumequeue")

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

            self.log.marks.queues_synced_end = upto

    # --- reads ------------------------------------------------------------------------------------

    def queues(self) -> list[tuple[str, int]]:
        """Every (topic, queue) that has a consume queue."""
        return self.consume_queues.keys()

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The half-open range of readable offsets of a queue. That of a compacted queue begins at the first message
        left."""
        if self.compaction.owns(topic):
            low, high = self.compaction.queue_range(topic, queue_id)
            first = self.state.first_offset(topic, queue_id)
            return max(low, first), max(high, first)
        return self.consume_queues.range(topic, queue_id)

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The offset that a store time is mapped to: `Query.offset_by_time`, also of a compacted topic.

        Raises: Corrupt for a message on the way that is unreadable; Unavailable if the store is not readable.
        """
        self._check_readable()
        if self.compaction.owns(topic):
            found = compacted_offset_by_time(self.compaction, topic, queue_id, time_ms, boundary)
        else:
            found = self.query.offset_by_time(topic, queue_id, time_ms, boundary)
        return max(found, self.state.first_offset(topic, queue_id))

    def fetch(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_bytes: int,
        max_records: int,
        wanted: MessageFilter | None = None,
        look: LookLimit | None = None,
    ) -> FetchSlice:
        """Read records: `QueueReader.fetch`, or for a compacted topic `CompactionStore.fetch`, which needs no `look`.

        Raises: also Unavailable if the store is not readable.
        """
        self._check_readable()
        read = partial(self.reader.fetch, look=look)
        if self.compaction.owns(topic):
            read = partial(self.compaction.fetch)
            if offset < self.state.first_offset(topic, queue_id):
                # Any other offset may be asked for: superseded messages are passed over.
                raise out_of_range(topic, queue_id, offset, *self.queue_range(topic, queue_id))
        fetch = partial(read, max_bytes=max_bytes, max_records=max_records, wanted=wanted)
        found = self._with_sound_unit(fetch, topic, queue_id, offset)
        self.stats.note_get(0 if found.records is None else len(found.records))
        return found

    def _with_sound_unit(
        self, read: Callable[[str, int, int], _Read], topic: str, queue_id: int, offset: int
    ) -> _Read:
        """The result of a read. If it fails, the unit at the offset is compared with the log, and made again."""
        try:
            return read(topic, queue_id, offset)
        except Corrupt:
            if self.compaction.owns(topic) or not self.reput.make_again(topic, queue_id, offset):
                raise
        return read(topic, queue_id, offset)

    def fetch_whole(
        self, topic: str, queue_id: int, offset: int, *, max_bytes: int, max_records: int
    ) -> FetchSlice:
        """`fetch` for callers that decode the records here: up to the first damaged one.

        Raises: Corrupt if that is the message at `offset`.
        """
        found = self.fetch(topic, queue_id, offset, max_bytes=max_bytes, max_records=max_records)
        fault = fault_of(found)
        if fault is None:
            return found
        if fault.row:
            return records_before(found, fault.row)
        self.check_record(topic, queue_id, found.first_offset)
        # The check may have mended the record.
        found = self.fetch(topic, queue_id, offset, max_bytes=max_bytes, max_records=max_records)
        again = fault_of(found)
        if again is None or again.row:
            return found if again is None else records_before(found, again.row)
        raise Unavailable(
            f"message {offset} of queue {queue_id} of {topic} was read damaged ({fault.rule}), and intact on the "
            "second read. Suspect faulty memory; test the machine's RAM",
            field="store",
        )

    def check_record(self, topic: str, queue_id: int, offset: int) -> None:
        """Check that the message at an offset is whole. Without a message nothing happens.

        Raises: Corrupt naming the file and the physical offset. The damage is noted for status.
        """
        if self.compaction.owns(topic):
            self.compaction.read(topic, queue_id, offset, max_bytes=1, max_records=1)
            return
        try:
            self._with_sound_unit(self.reader.check, topic, queue_id, offset)
        except Corrupt as error:
            self.log.reads.note_damage(error)
            raise

    def _check_readable(self) -> None:
        if self.put_path.closed:
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
        """Read as RocketMQ's brokers do: `GetMessage.get`.

        Raises: Unavailable if the store is not readable.
        """
        self._check_readable()
        get = self._get_message.get
        if self.compaction.owns(topic):
            get = partial(get_compacted, self.compaction, self._get_message)
        get = partial(get, max_nums=max_nums, max_bytes=max_bytes, wanted=wanted)
        found = self._with_sound_unit(get, topic, queue_id, offset)
        self.stats.note_get(len(found.queue_offsets))
        return found

    # --- administration ---------------------------------------------------------------------------

    def known_producers(self, producer_ids: Sequence[int]) -> list[int]:
        """Those of these producer ids that have an epoch, in their order."""
        with self.put_lock:
            producers = self.state.producers
            return [each for each in producer_ids if producers.epoch(each) is not None]

    def commit_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> AppendedRows:
        """Store a group's next offsets in the log.

        Raises: Rejected for a name that no group may have, and while workers of the group have messages of the topic:
        their next settlement would take these offsets back.
        """
        check_group_name(group)

        def decide() -> list[tuple[str, bytes]]:
            if self.leases.is_used(group, topic):
                raise Rejected(
                    f"workers of group {group} have leased messages of {topic}: their settlements commit its offsets",
                    field="group",
                    limit="a group without workers",
                    found=group,
                )
            return [(OFFSETS, offsets_body(group, topic, offsets))]

        return self.inner_put.put_decided(decide) or AppendedRows.up_to(self.log.end)

    # --- shutdown ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Orderly stop: dispatch all, sync all, and remove `abort` only if all derived files are complete."""
        if self.put_path.closed:
            return

        self.put_path.closed = True
        log = self.log
        complete = False

        try:
            while self.dispatched < log.confirmed:
                before = self.dispatched
                if self.dispatch(log.confirmed) == before:
                    break

            until_ms = self.clock.monotonic_ms() + INDEX_WAIT_MS
            while self.reput.index_behind and self.clock.monotonic_ms() < until_ms:
                self.dispatch(log.confirmed)

            agree = self._erase_after_queues()
            until_ms = self.clock.monotonic_ms() + INDEX_WAIT_MS
            while self.reput.units_behind and self.clock.monotonic_ms() < until_ms:
                self.dispatch(log.confirmed)
            copied = self._copy_compacted()
            self.sync_queues(closing=True)
            config_json.write_back(self)
            self.compaction.close()

            log.checkpoint.physic_ms = self.state.store_time_ms
            log.checkpoint.logics_ms = self.state.store_time_ms
            log.checkpoint.sync()

            complete = copied and agree and not self.reput.units_behind
            complete = complete and self.dispatched >= log.end
            if self.config.message_index:
                complete = complete and self.index.indexed >= log.end
        finally:
            self.compaction.abandon()
            self.consume_queues.close()
            self.index.close()
            log.close(clean=complete)

    def _erase_after_queues(self) -> bool:
        """Erase the bytes after all consume queues. Returns: False if one differs from the log: the next start rebuilds
        it."""
        try:
            self.consume_queues.erase_after_ends()
        except Corrupt as error:
            logger.warning("%s", error)
            return False
        return True

    def _copy_compacted(self) -> bool:
        """Copy all records that compacted queues lack. Returns: whether they are complete."""
        until_ms = self.clock.monotonic_ms() + COPY_WAIT_MS
        try:
            while self.compaction.advance_all():
                if self.clock.monotonic_ms() > until_ms:
                    return False
        except (OSError, RayMQError) as error:
            # The next start continues. Until then the log keeps these records.
            logger.warning("compacted queues are not complete: %s", error)
            return False
        return True

    def abandon(self) -> None:
        """Release every file as a crash would, without a sync. `abort` stays."""
        self.put_path.closed = True
        self.compaction.abandon()
        self.consume_queues.close()
        self.index.close()
        self.log.abandon()
