"""Options of one store, each declared once. Where RocketMQ's MessageStoreConfig has the option, the default is its."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.store.base.errors import Rejected

from .delay_levels import DEFAULT_LEVELS, parse_levels
from .option import INT_MAX, Option, option, options_of
from .promise import FLUSHES, Flush

MIB = 1024 * 1024
#: entries are numbered by int32, and RocketMQ maps a file whole: at most 2 GiB
INDEX_NUMBER_MAX = 80_000_000
#: bytes of a snapshot that the limit of producers counts for each: entry and epoch have at most 104, parts have headers
PRODUCER_SNAPSHOT_BYTES = 128
#: why a cluster does not take some options
PULLS = "consumers of a cluster say how much they read (`fetch_bytes`, `fetch_records`)"
QUERIES = "a cluster has no queries by key"
DIRECTORIES = (
    "each replica has one directory; several disks are several shards, or an array of disks"
)


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of one store. Every store of a replica set uses the same."""

    #: bytes of one commit log file
    segment_size_bytes: int = option(
        1024 * MIB,
        least=4096,
        multiple_of=4096,
        changes="first start",
        rocketmq="mappedFileSizeCommitLog",
    )
    #: bytes of one consume queue file, a multiple of 20
    consume_queue_file_size_bytes: int = option(
        6_000_000,
        least=20,
        most=INT_MAX,
        multiple_of=20,
        changes="first start",
        rocketmq="mappedFileSizeConsumeQueue",
    )
    #: records are indexed by their keys
    message_index: bool = option(True, changes="first start", rocketmq="messageIndexEnable")
    #: hash slots of one index file
    max_hash_slot_num: int = option(
        5_000_000, least=1, most=INDEX_NUMBER_MAX, changes="first start", rocketmq="maxHashSlotNum"
    )
    #: entries of one index file, one of which is never used
    max_index_num: int = option(
        20_000_000, least=2, most=INDEX_NUMBER_MAX, changes="first start", rocketmq="maxIndexNum"
    )
    #: most messages that a query by key returns
    max_msgs_num_batch: int = option(
        64, least=0, most=INT_MAX, not_in_cluster=QUERIES, rocketmq="maxMsgsNumBatch"
    )
    #: most bytes of units that one read scans, unless it may return more messages
    max_filter_message_size: int = option(
        16_000, least=0, most=INT_MAX, not_in_cluster=PULLS, rocketmq="maxFilterMessageSize"
    )
    #: most consume queue files that one read scans while it finds nothing
    travel_cq_file_num_when_get_message: int = option(
        1, least=0, most=INT_MAX, not_in_cluster=PULLS, rocketmq="travelCqFileNumWhenGetMessage"
    )
    #: percent of this host's memory: records within that distance of the log's end count as being in the page cache
    access_message_in_memory_max_ratio: int = option(
        40, least=0, most=100, not_in_cluster=PULLS, rocketmq="accessMessageInMemoryMaxRatio"
    )
    #: most bytes and messages of one read: in the page cache, and on disk
    max_transfer_bytes_on_message_in_memory: int = option(
        262_144,
        least=0,
        most=INT_MAX,
        not_in_cluster=PULLS,
        rocketmq="maxTransferBytesOnMessageInMemory",
    )
    max_transfer_count_on_message_in_memory: int = option(
        32,
        least=0,
        most=INT_MAX,
        not_in_cluster=PULLS,
        rocketmq="maxTransferCountOnMessageInMemory",
    )
    max_transfer_bytes_on_message_in_disk: int = option(
        65_536,
        least=0,
        most=INT_MAX,
        not_in_cluster=PULLS,
        rocketmq="maxTransferBytesOnMessageInDisk",
    )
    max_transfer_count_on_message_in_disk: int = option(
        8, least=0, most=INT_MAX, not_in_cluster=PULLS, rocketmq="maxTransferCountOnMessageInDisk"
    )
    #: "sync": acknowledged after fdatasync (SYNC_FLUSH); "async": flushed in the background (ASYNC_FLUSH)
    flush: Flush = option("sync", changes="each start", rocketmq="flushDiskType")
    #: a sync flush that takes longer answers FLUSH_DISK_TIMEOUT
    sync_flush_timeout_ms: int = option(
        5_000, least=1, most=INT_MAX, changes="while running", rocketmq="syncFlushTimeout"
    )
    #: a replica that takes longer answers FLUSH_SLAVE_TIMEOUT
    slave_timeout_ms: int = option(
        3_000, least=1, most=INT_MAX, changes="while running", rocketmq="slaveTimeout"
    )
    #: FlushRealTime works by its period. With False a put, or a commit from the pool, wakes it in between, so that it
    #: flushes as soon as enough pages are dirty
    flush_commit_log_timed: bool = option(
        True, changes="while running", rocketmq="flushCommitLogTimed"
    )
    #: FlushRealTime's period
    flush_interval_ms: int = option(
        500, least=1, most=INT_MAX, changes="while running", rocketmq="flushIntervalCommitLog"
    )
    #: FlushRealTime flushes only from this many dirty 4 KiB pages on...
    flush_least_pages: int = option(
        4, least=0, most=INT_MAX, changes="while running", rocketmq="flushCommitLogLeastPages"
    )
    #: ...unless this long passed since the last thorough flush
    flush_thorough_interval_ms: int = option(
        10_000,
        least=1,
        most=INT_MAX,
        changes="while running",
        rocketmq="flushCommitLogThoroughInterval",
    )
    #: appends go into a pool in shared memory, and CommitRealTime writes them to the file
    transient_pool: bool = option(False, changes="each start", rocketmq="transientStorePoolEnable")
    #: slices of the pool: one fills while the others are committed (RocketMQ: 5 whole files)
    transient_pool_slices: int = option(
        2, least=2, most=1024, changes="each start", rocketmq="transientStorePoolSize"
    )
    #: bytes of one slice
    transient_pool_slice_bytes: int = option(
        64 * MIB, least=4096, multiple_of=4096, changes="each start"
    )
    #: CommitRealTime's period
    commit_interval_ms: int = option(
        200, least=1, most=INT_MAX, changes="while running", rocketmq="commitIntervalCommitLog"
    )
    #: CommitRealTime commits only from this many waiting 4 KiB pages on...
    commit_least_pages: int = option(
        4, least=0, most=INT_MAX, changes="while running", rocketmq="commitCommitLogLeastPages"
    )
    #: ...unless this long passed since it last committed
    commit_thorough_interval_ms: int = option(
        200,
        least=1,
        most=INT_MAX,
        changes="while running",
        rocketmq="commitCommitLogThoroughInterval",
    )
    #: largest body
    max_message_bytes: int = option(
        4 * MIB,
        least=1,
        most=INT_MAX,
        changes="while running",
        most_in_cluster=32 * MIB,
        rocketmq="maxMessageSize",
    )
    #: zeros are written this far ahead of a log that grows slowly: small appends into written blocks sync faster
    prewrite_window_bytes: int = option(64 * MIB, least=0, most=INT_MAX, changes="each start")
    #: log bytes between two snapshots of the state; recovery reads about twice as much
    snapshot_interval_bytes: int = option(32 * MIB, least=1, most=INT_MAX, changes="while running")
    #: the scrub reads stored bytes and compares them with the chain's CRCs, at most this many per second; 0: never
    scrub_bytes_per_s: int = option(64 * MIB, least=0, changes="each start")
    #: log bytes per second that a leader sends to a follower that catches up while no put waits for it; 0: no limit
    catch_up_bytes_per_s: int = option(0, least=0, most=1 << 50, changes="while running")
    #: how often the scrub reads all stored bytes; at least twice within `file_reserved_hours`
    scrub_interval_ms: int = option(24 * 3600 * 1000, least=1, most=INT_MAX, changes="each start")
    #: bytes of one file of a compacted queue; see `file_sizes` for the rounding of both
    compaction_file_size_bytes: int = option(
        100 * MIB, least=1, most=INT_MAX, changes="first start", rocketmq="compactionMappedFileSize"
    )
    #: bytes of the file of its units
    compaction_queue_file_size_bytes: int = option(
        10 * MIB,
        least=46,
        most=INT_MAX,
        changes="first start",
        rocketmq="compactionCqMappedFileSize",
    )
    #: how often compacted queues are compacted
    compaction_interval_ms: int = option(
        15 * 60 * 1000,
        least=1,
        most=INT_MAX,
        changes="each start",
        rocketmq="compactionScheduleInternal",
    )
    #: the delays of levels 1, 2, ... in s, m, h or d
    message_delay_level: str = option(
        DEFAULT_LEVELS, changes="first start", rocketmq="messageDelayLevel"
    )
    #: False refuses messages that name a delivery time; those that wait are delivered
    timer_wheel_enabled: bool = option(True, changes="while running", rocketmq="timerWheelEnable")
    #: the longest time from a put to its delivery
    timer_max_delay_s: int = option(
        3 * 86_400,
        least=1,
        most=INT_MAX,
        changes="while running",
        most_in_cluster=3 * 86_400,
        rocketmq="timerMaxDelaySec",
    )
    #: most messages that may wait for one second
    timer_congest_num_each_slot: int = option(
        0x7FFFFFFF,
        least=0,
        most=INT_MAX,
        changes="while running",
        rocketmq="timerCongestNumEachSlot",
    )
    #: bytes of one timer log file
    timer_log_file_size_bytes: int = option(
        100 * MIB,
        least=4096,
        most=INT_MAX,
        changes="first start",
        rocketmq="mappedFileSizeTimerLog",
    )
    #: an append that is under way for longer makes further puts answer OS_PAGE_CACHE_BUSY
    os_page_cache_busy_timeout_ms: int = option(
        1_000,
        least=1,
        most=INT_MAX,
        changes="while running",
        rocketmq="osPageCacheBusyTimeOutMills",
    )
    #: a put that waits longer for the next file answers CREATE_MAPPED_FILE_FAILED (RocketMQ: fixed)
    allocate_timeout_ms: int = option(5_000, least=1, most=INT_MAX, changes="while running")
    #: how often old files are looked for
    clean_resource_interval_ms: int = option(
        10_000, least=1, most=INT_MAX, changes="each start", rocketmq="cleanResourceInterval"
    )
    #: hours of the day, local time, in which expired files are deleted: "04" or "04;16"
    delete_when: str = option("04", changes="while running", rocketmq="deleteWhen")
    #: time after its last message until a commit log file expires
    file_reserved_hours: float = option(
        72, least=0, most=1_000_000, changes="while running", rocketmq="fileReservedTime"
    )
    #: above it expired files are deleted at any hour, percent
    disk_max_used_space_ratio: int = option(
        75, least=10, most=95, changes="while running", rocketmq="diskMaxUsedSpaceRatio"
    )
    #: above it files are deleted before they expire, percent
    disk_space_clean_forcibly_ratio: int = option(
        85, least=30, most=95, changes="while running", rocketmq="diskSpaceCleanForciblyRatio"
    )
    #: above it puts are refused, percent; not while 8 commit log files would still fit
    disk_space_warning_level_ratio: int = option(
        90, least=35, most=99, changes="while running", rocketmq="diskSpaceWarningLevelRatio"
    )
    #: whether files are ever deleted before they expire (RocketMQ: True). With True, any program
    #: that fills the disk causes the loss of acknowledged messages
    clean_file_forcibly: bool = option(
        False, changes="while running", rocketmq="cleanFileForciblyEnable"
    )
    #: commit log files that one pass deletes at most
    delete_file_batch_max: int = option(
        10, least=1, most=1_000_000, changes="while running", rocketmq="deleteFileBatchMax"
    )
    #: whole files are written ahead, and locked in memory if permitted
    warm_mapped_file: bool = option(False, changes="while running", rocketmq="warmMapedFileEnable")
    #: deleted files are zeroed and used again after the last reader releases them (not by a leader with followers)
    recycle_commit_log_files: bool = option(False, changes="each start")
    #: directories on other disks, in which new commit log files are made in turn. With
    #: an empty tuple they are made in `commitlog/`, whose files are read in any case
    commit_log_paths: tuple[str, ...] = option(
        (), not_in_cluster=DIRECTORIES, rocketmq="storePathCommitLog"
    )
    #: directories whose commit log files are read and deleted; new files are made elsewhere
    read_only_commit_log_paths: tuple[str, ...] = option(
        (), not_in_cluster=DIRECTORIES, rocketmq="readOnlyCommitLogStorePaths"
    )
    #: pause between two deletions
    delete_files_interval_ms: int = option(
        100,
        least=0,
        most=INT_MAX,
        changes="while running",
        rocketmq="deleteCommitLogFilesInterval, deleteConsumeQueueFilesInterval",
    )
    #: (producer, topic, queue) entries, and producers, of which sequences and epochs are remembered: about 120 bytes of
    #: memory each. A new one above it is refused. Small commit log files allow fewer (`producer_entries_limit`)
    producer_entries_max: int = option(1_000_000, least=1, most=100_000_000, changes="each start")
    #: at that limit, entries that were not written for this long make room; those of the staged topic after an hour
    producer_expiry_hours: float = option(168, least=1, most=1_000_000, changes="while running")
    #: a consumer group that had neither a member nor a commit for this long is forgotten, with its offsets
    group_expiry_hours: float = option(720, least=1, most=1_000_000, changes="while running")
    #: written into every record as storeHost: IP address and port. In a cluster each replica writes the address under
    #: which it serves clients
    store_host: tuple[str, int] = option(
        ("127.0.0.1", 10911),
        not_in_cluster="each replica writes the address under which it serves clients",
    )

    def __post_init__(self) -> None:
        """Raises: Rejected naming the option, its limit and the value."""
        for each in OPTIONS.values():
            self._check_kind(each)

        known = " or ".join(map(repr, FLUSHES))
        self._check(self.flush in FLUSHES, "flush", f"use {known}", "|".join(FLUSHES))
        parse_levels(self.message_delay_level)
        hours = self.delete_when.split(";")
        self._check(
            all(hour.isascii() and hour.isdigit() and int(hour) < 24 for hour in hours),
            "delete_when",
            "use hours from 00 to 23 such as '04' or '04;16'",
            "00..23",
        )

        if self.transient_pool:
            self._check_pool()

    def _check(self, good: bool, field: str, advice: str, limit: object) -> None:
        if not good:
            found = getattr(self, field)
            fault = f"{field} is {found!r}; {advice}"
            raise Rejected(fault, field=field, limit=limit, found=found)

    def _check_kind(self, option: Option) -> None:
        """Refuse a value of a wrong type, and a number out of range. RocketMQ clamps some numbers silently."""
        name, value = option.name, getattr(self, option.name)
        if option.kind == "bool":
            self._check(isinstance(value, bool), name, "it must be True or False", "True|False")
        elif option.kind == "str":
            self._check(isinstance(value, str), name, "it must be text", "str")
        elif option.is_number:
            whole = option.kind == "int"
            is_number = isinstance(value, int if whole else (int, float))
            good = is_number and not isinstance(value, bool)
            good = good and (option.least or 0) <= value
            good = good and (option.most is None or value <= option.most)
            good = good and not (whole and value % option.multiple_of)
            kind = "a whole number" if whole else "a number"
            limit = option.range_text()
            self._check(good, name, f"it must be {kind}, {limit}", limit)

    def _check_pool(self) -> None:
        if self.transient_pool_bytes < self.append_unit_bytes:
            raise Rejected(
                f"the transient pool has {self.transient_pool_bytes} bytes; with commit log files of "
                f"{self.segment_size_bytes} bytes it needs {self.append_unit_bytes}, room for one append unit",
                field="transient_pool_slice_bytes",
                limit=self.append_unit_bytes,
            )

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delays of levels 1, 2, ..., ms."""
        return parse_levels(self.message_delay_level)

    @property
    def transient_pool_bytes(self) -> int:
        """Bytes of log that the pool holds."""
        return self.transient_pool_slices * self.transient_pool_slice_bytes

    @property
    def record_bytes_max(self) -> int:
        """A larger record is refused: two must fit a file, and one the pool."""
        half = self.segment_size_bytes // 2
        return min(half, self.transient_pool_bytes) if self.transient_pool else half

    @property
    def append_unit_bytes(self) -> int:
        """Most bytes of one append unit: each is contiguous in one file and has one chain unit."""
        return min(4 * MIB + 64 * 1024, self.segment_size_bytes // 4)

    @property
    def bundle_bytes_max(self) -> int:
        """Most bytes of messages that the store appends together: one append unit."""
        return self.append_unit_bytes

    @property
    def snapshot_bytes_max(self) -> int:
        """A larger snapshot is left out: with the largest record, half a file, it must fit one file."""
        return self.segment_size_bytes * 3 // 8

    @property
    def producer_entries_limit(self) -> int:
        """`producer_entries_max`, or fewer if the snapshot of that many might not fit a file."""
        return min(self.producer_entries_max, self.snapshot_bytes_max // PRODUCER_SNAPSHOT_BYTES)

    @property
    def producer_limit_option(self) -> str:
        """The option that `producer_entries_limit` comes from, for errors."""
        if self.producer_entries_limit == self.producer_entries_max:
            return "producer_entries_max"
        return (
            "from segment_size_bytes: the snapshot of more might not fit a commit log file of "
            f"{self.segment_size_bytes} bytes"
        )


#: every option of a store
OPTIONS = options_of(StoreConfig)
#: those that a cluster takes
IN_CLUSTER = {name: each for name, each in OPTIONS.items() if each.changes is not None}
#: those of them that may change while the store is open
WHILE_RUNNING = {name: each for name, each in OPTIONS.items() if each.changes == "while running"}


def check_in_cluster(option: Option, value: object) -> None:
    """Raises: Rejected for a value that the option cannot have in a cluster, alone or with the defaults of others."""
    StoreConfig(**{option.name: value})  # type: ignore[arg-type]
    most = option.most_in_cluster
    if most is not None and isinstance(value, (int, float)) and value > most:
        limit = option.range_text(in_cluster=True)
        raise Rejected(
            f"{option.name} is {value!r}; in a cluster it must be {limit}",
            field=option.name,
            limit=limit,
            found=value,
        )
