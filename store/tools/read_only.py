"""A store's directory opened for reading only: recovery in memory, over the whole log.

Sizes are taken from the files, and nothing is locked or changed. The store may be RocketMQ's or RayMQ's, running or
not.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, Rejected
from raymq.store.base.files import Files
from raymq.store.base.rules import CRC_RULE
from raymq.store.config.delay_levels import DEFAULT_LEVELS, parse_levels
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import Chain, ChainUnit
from raymq.store.log.control_files.marks import read_marks
from raymq.store.log.control_files.meta import ADOPTING, DELAY_LEVELS, TRUNCATING, read_meta
from raymq.store.log.record_reads import may_be_record, walk_piece
from raymq.store.log.recovery import log_scan
from raymq.store.log.recovery.recovery_table import Decision
from raymq.store.log.segments.log_files import read_of
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.log.segments.segment_paths import other_directories, segment_start_of
from raymq.store.queues.consume_queue import ConsumeQueue, queue_directories
from raymq.store.queues.queue_files import OpenFiles
from raymq.store.queues.unit_places import UnitPlace
from raymq.store.records import record
from raymq.store.records.rows import tag_column
from raymq.store.state.shard_state import INTERNAL_TOPIC, PROGRESS

from .faults import Faults, LogVerdict, ReportProgress
from .slices import RecordRange

_BLANK = record.WalkStop.BLANK
META_RULE = "a store with marks has a meta"
LOG_FILES_RULE = "files of the commit log are there"


class ReadOnlyStore:
    """The files of a store. Call `scan` first. Its findings are in `faults`."""

    def __init__(
        self, root: Path, files: Files | None = None, progress: ReportProgress | None = None
    ) -> None:
        self.root = root
        self.files = files or Files()
        self.progress: ReportProgress = progress or (lambda what, done, total: None)
        if not self.files.exists(root / "commitlog"):
            fault = f"{root} is not a store: it has no commitlog directory"
            raise Rejected(fault, field="DIR", limit="a store directory")

        self.faults = Faults(root)
        others = other_directories(root, files=self.files)
        self.segment_size_bytes = self.usual_size([root / "commitlog", *others])

        self.log: MappedFileQueue | None = None
        if self.segment_size_bytes:
            self.log = MappedFileQueue(
                root / "commitlog",
                self.segment_size_bytes,
                files=self.files,
                writable=False,
                read_from=others,
            )
            self.log.load()

        self.meta = read_meta(root / "raymq" / "meta", files=self.files)
        #: the delay of each level
        self.levels_ms = parse_levels(self.meta.get(DELAY_LEVELS) or DEFAULT_LEVELS)
        #: read before the scan: later appends are above them
        self.marks = read_marks(root / "raymq" / "marks", files=self.files)
        self.is_own_store = self.meta.get("store_id") is not None
        #: the last process crashed, or the store is open
        self.crashed = self.files.exists(root / "abort")

        self.verdict: LogVerdict | None = None
        self.start = self.log.min_offset if self.log is not None else 0
        self.end = self.start
        #: the records below `end`
        self.records: list[RecordRange] = []
        #: records after damage, and the damaged ranges [start, stop) before and between them
        self.after_damage: list[RecordRange] = []
        self.damaged: list[tuple[int, int]] = []
        #: records that the consume queues have in other places than the records name
        self.other_places: dict[int, UnitPlace | None] = {}

    def usual_size(self, directories: list[Path]) -> int:
        """The size that most files have, so that a fault names the file of another size; 0 if all are empty.

        Two files that follow each other say it by their names, too.
        """
        sizes: Counter[int] = Counter()
        steps: list[int] = []
        for directory in directories:
            names = [name for name in self.files.list(directory) if name.isdecimal()]
            sizes.update(self.files.size_of(directory / name) for name in names)
            steps += [int(second) - int(first) for first, second in pairwise(names)]
        sizes.update(2 * [step for step in steps if step in sizes])
        # An unfinished file is shorter.
        return max(filter(None, sizes), key=lambda size: (sizes[size], size), default=0)

    @property
    def same_boot(self) -> bool:
        """Whether this machine still has the page cache of the last writer."""
        # Bytes that only the pool has are not read. Without them the log ends as after a power loss.
        in_pool = self.meta.get("pool") is not None
        return bool(self.meta.get("boot_id") == self.files.boot_id()) and not in_pool

    # --- the log ----------------------------------------------------------------------------------

    def scan(self, *, trust_chain: bool = True) -> None:
        """Walk the whole log in memory as recovery does. Damage that recovery would report becomes a fault.

        After damage, readable records are searched too. Without `trust_chain` only the records decide about the end.
        """
        poisoned = self.meta.get("poisoned")
        meta_path = self.root / "raymq" / "meta"
        if poisoned:
            self.faults.add(meta_path, 0, "poisoned", str(poisoned))
        if not self.is_own_store and self.marks.appended_end and not self.meta.get(ADOPTING):
            self.faults.add(
                meta_path, 0, META_RULE, "this replica's identity and promises are gone"
            )

        if self.log is None:
            if self.marks.synced_end:
                self._fault_at(
                    0, LOG_FILES_RULE, f"none is; {self.marks.synced_end} bytes were synced"
                )
            return

        chain = self.chain() if trust_chain else None
        try:
            found = self._scan(self.log, chain)
            self.end, row = found.end, found.row
            self.verdict = LogVerdict(
                found.end, row.decision.value, row.name, found.fault, row.cause
            )
            if row.decision is Decision.CORRUPT:
                self._fault_at(found.end, f"recovery row {row.name}", f"{found.fault}: {row.cause}")
                self._find_readable_after_end(self.log, chain)
            elif self.is_own_store:
                self._leave_out_half_bundle()
        finally:
            if chain is not None:
                chain.close()

    def forget(self) -> None:
        """Forget the scan and its faults."""
        self.faults = Faults(self.root)
        self.verdict, self.end = None, self.start
        self.records = []
        self.after_damage = []
        self.damaged = []
        self.other_places = {}

    def _leave_out_half_bundle(self) -> None:
        """Leave out a bundle if a crash left only its first messages: a start cuts the whole bundle off."""
        if not self.records:
            return

        last = self.records[-1]
        # A bundle is one append unit, so its first record is within that distance.
        reach = StoreConfig(segment_size_bytes=self.segment_size_bytes).bundle_bytes_max
        first = int(np.searchsorted(last.positions, self.end - reach))
        tail = last.select(slice(first, None))
        batch = tail.decode()

        begins = pc.and_(
            pc.equal(batch.column("topic"), INTERNAL_TOPIC),
            pc.equal(tag_column(batch.column("properties")), PROGRESS.encode()),
        )
        rows = np.flatnonzero(begins.fill_null(False).to_numpy(zero_copy_only=False))
        if not len(rows):
            return

        row = int(rows[-1])
        if int(json.loads(batch.column("body")[row].as_py())["end"]) > self.end:
            self.end = int(tail.positions[row])
            self.records[-1] = last.select(slice(first + row))

    def _scan(self, log: MappedFileQueue, chain: Chain | None) -> log_scan.Scan:
        """Walk the log to its end, as a start does, and keep its records."""
        marks = self.marks
        total = len(log.files) * log.file_size
        # The next start finishes a cut that was begun, before it reads the log.
        truncating_to = self.meta.get(TRUNCATING)

        def visit(view: memoryview, base: int, walk: record.Walk) -> None:
            self.records.append(RecordRange(log, walk.positions, walk.sizes))
            self.progress("commit log", walk.end - log.min_offset, total)

        appended = marks.appended_end
        if not self.is_own_store:
            appended = log_scan.foreign_end(log, self._known_end(), crashed=self.crashed)
        return log_scan.scan(
            log,
            chain,
            log_scan.NotedEnds(self.is_own_store, self.same_boot, marks.synced_end, appended),
            files=self.files,
            scan_from=self.start,
            visit=visit,
            top=log_scan.NO_TOP if truncating_to is None else truncating_to,
            has_unit=self._has_unit,
        )

    def _has_unit(self, position: int, size: int) -> bool:
        """Whether any consume queue has a unit of this position and size."""
        try:
            for _, _, queue in self.queues():
                with closing(queue):
                    if queue.has_unit(position, size):
                        return True
        except Corrupt:
            # `check_derived` names the damage.
            pass
        return False

    def _known_end(self) -> int:
        """End of the last record that any consume queue knows, -1 without one."""
        end = -1
        try:
            for _, _, queue in self.queues():
                if self.log is not None and not self.is_own_store:
                    queue.drop_end(partial(may_be_record, self.log))
                end = max(end, queue.max_physical_offset)
                queue.close()
        except Corrupt:
            # `check_derived` names the damage. Until it is repaired the queues prove nothing.
            return sys.maxsize
        return end

    def chain(self) -> Chain | None:
        """The chain, not loaded yet; None if the store has none."""
        directory = self.root / "raymq" / "chain"
        if not self.files.exists(directory):
            return None
        return Chain(directory, self.segment_size_bytes, files=self.files, writable=False)

    def _fault_at(self, offset: int, rule: str, detail: str) -> None:
        """Add a fault of the log at a physical offset."""
        file = None if self.log is None else self.log.find(offset)
        path = self.root / "commitlog" if file is None else file.path
        self.faults.add(path, offset, rule, detail)

    def _find_readable_after_end(self, log: MappedFileQueue, chain: Chain | None) -> None:
        """Find every differing chain unit and every whole record after damage.

        Such a record must have the right position, which a record of an earlier file seldom has.
        """
        units = [] if chain is None else chain.units(self.end, log.files[-1].start + log.file_size)
        differing = self._units_that_differ(log, units)
        for unit in differing:
            if unit.start > self.end:
                self._fault_at(
                    unit.start,
                    CRC_RULE,
                    f"the bytes [{unit.start}, {unit.end}) differ from their unit's CRC",
                )

        at = self.end
        start = log_scan.next_record(log, at + 1)
        while start is not None:
            # A hole is damage. The end of a file after a blank record is not.
            if _is_hole(log, at, start):
                self.damaged.append((at, start))
                is_known = any(unit.start <= at < unit.end for unit in differing)
                if at != self.end and not is_known:
                    self._fault_at(at, "records follow each other", f"none is whole up to {start}")

            at = self._walk_readable(log, start)
            start = log_scan.next_record(log, at)

    def _walk_readable(self, log: MappedFileQueue, at: int) -> int:
        """Keep the whole records of one file from `at` on. Returns: the position at which the walk stops."""
        stop = segment_start_of(at, log.file_size) + log.file_size
        while at < stop:
            walk = walk_piece(partial(read_of, log, end=stop), at, stop).walk
            if len(walk.positions):
                self.after_damage.append(RecordRange(log, walk.positions, walk.sizes))
            at = walk.end
            if walk.reason is not record.WalkStop.STOPPED:
                break
        return at

    @staticmethod
    def _units_that_differ(log: MappedFileQueue, units: list[ChainUnit]) -> list[ChainUnit]:
        """The units whose bytes are there, but are unreadable or have another CRC."""
        found = []
        for unit in units:
            file = log.find(unit.start)
            if file is None or unit.end > file.start + file.size:
                continue
            try:
                same = crc32c(read_of(log, unit.start, unit.end, unit.end)) == unit.crc
            except Corrupt:
                same = False
            if not same:
                found.append(unit)
        return found

    def slices(self, job: str = "", *, after_damage: bool = False) -> Iterator[RecordRange]:
        """The records below `end`, in slices. Args: `job`: name of reported progress. `after_damage`: also those after
        damage."""
        total = max(1, self.end - self.start)
        ranges = [*self.records, *self.after_damage] if after_damage else self.records
        for each in ranges:
            for part in each.slices():
                yield part
                if job:
                    self.progress(job, int(part.positions[-1]) - self.start, total)

    # --- consume queues ---------------------------------------------------------------------------

    def queues(self) -> Iterator[tuple[str, int, ConsumeQueue]]:
        """Every consume queue on disk, by topic and queue id. Callers close each queue."""
        found = self.queue_directories()
        size = self.usual_size([directory for _, _, directory in found])
        opened = OpenFiles(self.files)
        for topic, queue_id, directory in found if size else []:
            queue = ConsumeQueue(directory, size, files=self.files, writable=False, opened=opened)
            queue.load()
            queue.recover()
            # Units of deleted log files stay as long as another unit of their queue's file is of a present log file.
            queue.correct_min_offset(self.start)
            yield topic, queue_id, queue

    def queue_directories(self) -> list[tuple[str, int, Path]]:
        """Topic, queue id and directory of every consume queue."""
        return queue_directories(self.root / "consumequeue", self.files)

    @property
    def queues_end(self) -> int:
        """The end up to which consume queues are trusted. A start cuts their units of later records."""
        if self.same_boot or not self.crashed:
            return self.end
        return min(self.end, self.marks.queues_synced_end)

    def close(self) -> None:
        """Close every file."""
        if self.log is not None:
            self.log.close()


def _is_hole(log: MappedFileQueue, at: int, start: int) -> bool:
    """Whether records are missing between `at` and the record at `start`."""
    file = log.find(at)
    if file is None or at >= start:
        return False
    end = file.start + file.size
    last = walk_piece(partial(read_of, log, end=end), at, end, limit=1)
    return not (start == end and last.walk.reason is _BLANK)


def joined(ranges: list[RecordRange]) -> tuple[np.ndarray, np.ndarray]:
    """Positions and sizes of all records, ascending."""
    if not ranges:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    positions = np.concatenate([each.positions for each in ranges])
    return positions, np.concatenate([each.sizes for each in ranges])
