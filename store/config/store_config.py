"""Options of one store. If RocketMQ's MessageStoreConfig has the option, name and default are its."""

from __future__ import annotations

from dataclasses import dataclass, fields

from raymq.store.base.errors import Rejected

from .delay_levels import DEFAULT_LEVELS, parse_levels
from .promise import FLUSHES, Flush

MIB = 1024 * 1024
#: entries are numbered by int32, and RocketMQ maps a file whole: at most 2 GiB
INDEX_NUMBER_MAX = 80_000_000
#: bytes of a snapshot that the limit of producers counts for each: entry and epoch have at most 104, parts have headers
PRODUCER_SNAPSHOT_BYTES = 128
#: option -> its least and largest value
_RANGES = {
    "max_hash_slot_num": (1, INDEX_NUMBER_MAX),
    "max_index_num": (2, INDEX_NUMBER_MAX),
    "timer_log_file_size_bytes": (4096, 1 << 62),
    "disk_max_used_space_ratio": (10, 95),
    "disk_space_clean_forcibly_ratio": (30, 95),
    "disk_space_warning_level_ratio": (35, 99),
    "delete_file_batch_max": (1, 1_000_000),
    "file_reserved_hours": (0, 1_000_000),
    "producer_expiry_hours": (1, 1_000_000),
    "catch_up_bytes_per_s": (0, 1 << 62),
}


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of one store. Every store of a replica set uses the same."""

    #: bytes of one commit log file (mappedFileSizeCommitLog)
    segment_size_bytes: int = 1024 * MIB
    #: bytes of one consume queue file, a multiple of 20 (mappedFileSizeConsumeQueue)
    consume_queue_file_size_bytes: int = 6_000_000
    #: records are indexed by their keys (messageIndexEnable)
    message_index: bool = True
    #: hash slots of one index file (maxHashSlotNum)
    max_hash_slot_num: int = 5_000_000
    #: entries of one index file, one of which is never used (maxIndexNum)
    max_index_num: int = 20_000_000
    #: most messages that a query by key returns (maxMsgsNumBatch)
    max_msgs_num_batch: int = 64
    #: most bytes of units that one read scans, unless it may return more messages (maxFilterMessageSize)
    max_filter_message_size: int = 16_000
    #: most consume queue files that one read scans while it finds nothing (travelCqFileNumWhenGetMessage)
    travel_cq_file_num_when_get_message: int = 1
    #: percent of this host's memory: records within that distance of the log's end count as being in the page cache
    #: (accessMessageInMemoryMaxRatio)
    access_message_in_memory_max_ratio: int = 40
    #: most bytes and messages of one read: in the page cache, and on disk (maxTransfer...OnMessageIn...)
    max_transfer_bytes_on_message_in_memory: int = 262_144
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_disk: int = 65_536
    max_transfer_count_on_message_in_disk: int = 8
    #: "sync": acknowledged after fdatasync (SYNC_FLUSH); "async": flushed in the background (ASYNC_FLUSH)
    flush: Flush = "sync"
    #: a sync flush that takes longer answers FLUSH_DISK_TIMEOUT (syncFlushTimeout)
    sync_flush_timeout_ms: int = 5_000
    #: a replica that takes longer answers FLUSH_SLAVE_TIMEOUT (slaveTimeout)
    slave_timeout_ms: int = 3_000
    #: FlushRealTime's period (flushIntervalCommitLog)
    flush_interval_ms: int = 500
    #: FlushRealTime flushes only from this many dirty 4 KiB pages on... (flushCommitLogLeastPages)
    flush_least_pages: int = 4
    #: ...unless this long passed since the last thorough flush (flushCommitLogThoroughInterval)
    flush_thorough_interval_ms: int = 10_000
    #: appends go into a pool in shared memory, and CommitRealTime writes them to the file (transientStorePoolEnable)
    transient_pool: bool = False
    #: slices of the pool: one fills while the others are committed (transientStorePoolSize, there 5 whole files)
    transient_pool_slices: int = 2
    #: bytes of one slice
    transient_pool_slice_bytes: int = 64 * MIB
    #: CommitRealTime's period (commitIntervalCommitLog)
    commit_interval_ms: int = 200
    #: CommitRealTime commits only from this many waiting 4 KiB pages on... (commitCommitLogLeastPages)
    commit_least_pages: int = 4
    #: ...unless this long passed since it last committed (commitCommitLogThoroughInterval)
    commit_thorough_interval_ms: int = 200
    #: largest body (maxMessageSize)
    max_message_bytes: int = 4 * MIB
    #: zeros are written this far ahead of a log that grows slowly: small appends into written blocks sync faster
    prewrite_window_bytes: int = 64 * MIB
    #: log bytes between two snapshots of the state; recovery reads about twice as much
    snapshot_interval_bytes: int = 32 * MIB
    #: the scrub reads stored bytes and compares them with the chain's CRCs, at most this many per second; 0: never
    scrub_bytes_per_s: int = 64 * MIB
    #: log bytes per second that a leader sends to a follower that catches up while no put waits for it; 0: no limit
    catch_up_bytes_per_s: int = 0
    #: how often the scrub reads all stored bytes; at least twice within `file_reserved_hours`
    scrub_interval_ms: int = 24 * 3600 * 1000
    #: bytes of one file of a compacted queue (compactionMappedFileSize); see `file_sizes` for the rounding of both
    compaction_file_size_bytes: int = 100 * MIB
    #: bytes of the file of its units (compactionCqMappedFileSize)
    compaction_queue_file_size_bytes: int = 10 * MIB
    #: how often compacted queues are compacted (compactionScheduleInternal)
    compaction_interval_ms: int = 15 * 60 * 1000
    #: the delays of levels 1, 2, ... in s, m, h or d (messageDelayLevel)
    message_delay_level: str = DEFAULT_LEVELS
    #: False refuses messages that name a delivery time; those that wait are delivered (timerWheelEnable)
    timer_wheel_enabled: bool = True
    #: the longest time from a put to its delivery (timerMaxDelaySec)
    timer_max_delay_s: int = 3 * 86_400
    #: most messages that may wait for one second (timerCongestNumEachSlot)
    timer_congest_num_each_slot: int = 0x7FFFFFFF
    #: bytes of one timer log file (mappedFileSizeTimerLog)
    timer_log_file_size_bytes: int = 100 * MIB
    #: an append that is under way for longer makes further puts answer OS_PAGE_CACHE_BUSY (osPageCacheBusyTimeOutMills)
    os_page_cache_busy_timeout_ms: int = 1_000
    #: a put that waits longer for the next file answers CREATE_MAPPED_FILE_FAILED (AllocateMappedFileService, fixed)
    allocate_timeout_ms: int = 5_000
    #: how often old files are looked for (cleanResourceInterval)
    clean_resource_interval_ms: int = 10_000
    #: hours of the day, local time, in which expired files are deleted: "04" or "04;16" (deleteWhen)
    delete_when: str = "04"
    #: time after its last message until a commit log file expires (fileReservedTime)
    file_reserved_hours: float = 72
    #: above it expired files are deleted at any hour, percent (diskMaxUsedSpaceRatio)
    disk_max_used_space_ratio: int = 75
    #: above it files are deleted before they expire, percent (diskSpaceCleanForciblyRatio)
    disk_space_clean_forcibly_ratio: int = 85
    #: above it puts are refused, percent (diskSpaceWarningLevelRatio); not while 8 commit log files would still fit
    disk_space_warning_level_ratio: int = 90
    #: whether files are ever deleted before they expire (cleanFileForciblyEnable, there True). With True, any program
    #: that fills the disk causes the loss of acknowledged messages
    clean_file_forcibly: bool = False
    #: commit log files that one pass deletes at most (deleteFileBatchMax)
    delete_file_batch_max: int = 10
    #: whole files are written ahead, and locked in memory if permitted (warmMapedFileEnable)
    warm_mapped_file: bool = False
    #: deleted files are zeroed and used again after the last reader releases them (not by a leader with followers)
    recycle_commit_log_files: bool = False
    #: directories on other disks, in which new commit log files are made in turn (storePathCommitLog as a list). With
    #: an empty tuple they are made in `commitlog/`, whose files are read in any case
    commit_log_paths: tuple[str, ...] = ()
    #: directories whose commit log files are read and deleted; new files are made elsewhere
    #: (readOnlyCommitLogStorePaths)
    read_only_commit_log_paths: tuple[str, ...] = ()
    #: pause between two deletions (deleteCommitLogFilesInterval, deleteConsumeQueueFilesInterval)
    delete_files_interval_ms: int = 100
    #: (producer, topic, queue) entries, and producers, of which sequences and epochs are remembered: about 120 bytes of
    #: memory each. A new one above it is refused. Small commit log files allow fewer (`producer_entries_limit`)
    producer_entries_max: int = 1_000_000
    #: at that limit, entries that were not written for this long make room; those of the staged topic after an hour
    producer_expiry_hours: float = 168
    #: written into every record as storeHost: IP address and port. In a cluster each replica writes the address under
    #: which it serves clients
    store_host: tuple[str, int] = ("127.0.0.1", 10911)

    def __post_init__(self) -> None:
        """Raises: Rejected naming the option, its limit and the value."""
        self._check_kinds()
        self._check_multiple("consume_queue_file_size_bytes", 20)
        self._check_multiple("segment_size_bytes", 4096)

        for field, (low, high) in _RANGES.items():
            # RocketMQ clamps a value out of range silently.
            inside = low <= getattr(self, field) <= high
            self._check(inside, field, f"it must be {low} to {high}", f"{low}..{high}")

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
            fault = f"{field} is {getattr(self, field)!r}; {advice}"
            raise Rejected(fault, field=field, limit=limit)

    def _check_multiple(self, field: str, unit: int) -> None:
        value = getattr(self, field)
        good = value >= unit and not value % unit
        self._check(good, field, f"it must be a positive multiple of {unit}", unit)

    def _check_kinds(self) -> None:
        """Refuse values of a wrong type, and numbers below 0."""
        for field in fields(self):
            name, kind = field.name, field.type
            value = getattr(self, name)
            is_bool = isinstance(value, bool)
            if kind == "bool":
                self._check(is_bool, name, "it must be True or False", "True|False")
            elif kind in ("int", "float"):
                is_number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
                whole = ", without a fraction" if kind == "int" else ""
                good = is_number and not is_bool and value >= 0
                self._check(good, name, f"it must be a number of 0 or more{whole}", "0 or more")

    def _check_pool(self) -> None:
        self._check(
            self.transient_pool_slices >= 2,
            "transient_pool_slices",
            "use 2 or more: one fills while another is committed",
            2,
        )
        self._check_multiple("transient_pool_slice_bytes", 4096)
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
