"""All index files of a store, a cache of the log below the confirmed end: from a key to the records that have it.

Source: IndexService, RocketMQ 5.3.3. After a crash it drops the last file and may leave its records unindexed. Here a
mark in `raymq/index` has the end up to which files and log agree. The records after it are indexed again. An index
without a mark is that of RocketMQ, which nothing proves: it is built again from the log.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raymq.store.base.arrays import Int32s, Int64s
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, StorageFull, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.control_files.meta import Meta

from .index_file import CHAIN_STEPS, IndexFile
from .index_keys import key_hash

_NAME_FORMAT = "%Y%m%d%H%M%S"
#: most bytes of log without keys that are indexed again after a crash
MARK_STEP_BYTES = 64 << 20


class IndexEnd(NamedTuple):
    """The content of `raymq/index`: the state of the last sync."""

    #: name of the newest file with an entry; empty without one
    file: str
    #: number of the file's next entry: its header's count
    next_number: int
    #: everything below this is indexed
    indexed: int


class IndexService:
    """The index files of a store, and the end up to which the log is indexed.

    Callers: one thread builds, cuts, syncs and deletes; any may look up.
    Invariant: every key of every record below `indexed` is in the files, and none of a record above it.
    """

    def __init__(self, root: Path, config: StoreConfig, *, files: Files, clock: Clock) -> None:
        """Args: `root`: the store's directory."""
        self._directory = root / "index"
        self._mark_path = root / "raymq" / "index"
        self._slots, self._entries = config.max_hash_slot_num, config.max_index_num
        self._files = files
        self._clock = clock
        #: oldest first; replaced, never changed in place: readers keep the list that they took
        self._index_files: tuple[IndexFile, ...] = ()
        self._mark: Meta | None = None
        self._synced: IndexEnd | None = None
        #: everything below this is indexed
        self.indexed = 0
        #: held by dispatch, which appends, and by the checkpoint and cleaning threads, which sync and delete
        self._files_lock = threading.Lock()

    # --- opening ----------------------------------------------------------------------------------

    def load(self, *, log_start: int, log_end: int, never_cut_below: int, crashed: bool) -> bool:
        """Open the files and bring them to a state that agrees with the log.

        Without a mark the index is built again. RocketMQ wrote it, or a crash came before its first sync: nothing says
        that its bytes are right, and how far they go.

        Args: `never_cut_below`: no cut went below this offset since the index was synced. Returns: whether the index is
        built again.
        """
        self._mark = self._open_mark()
        upto = self._mark.get("indexed")

        if upto is None:
            self._drop_all(log_start)
            return True
        try:
            self._open_files()
            self.indexed = max(min(upto, never_cut_below, log_end), log_start)
            self._restore(self._mark.get("file"), self._mark.get("count"), crashed=crashed)
            self._truncate_to(self.indexed)
        except (Corrupt, StorageFull):
            # The index is damaged, was made with other options, or cannot be repaired for lack of space: it is only a
            # cache.
            self._mark.update({"file": None, "count": 1, "indexed": log_start})
            self._drop_all(log_start)
            return True
        return False

    def _open_mark(self) -> Meta:
        """Open the mark. Of a damaged one nothing is used: the index is built again."""
        try:
            return Meta.open(self._mark_path, files=self._files)
        except Corrupt:
            self._files.unlink(self._mark_path)
            mark = Meta.open(self._mark_path, files=self._files)
            mark.update({"file": None, "count": 1, "indexed": 0})
            return mark

    def _open_files(self) -> None:
        for path in self._paths():
            file = IndexFile.open(path, self._slots, self._entries, files=self._files)
            self._index_files = (*self._index_files, file)

    def _paths(self) -> list[Path]:
        """The files of the index, oldest first."""
        paths = [self._directory / name for name in self._files.list(self._directory)]
        return [path for path in paths if not self._files.is_dir(path)]

    def _restore(self, name: str | None, count: int, *, crashed: bool) -> None:
        """Drop the entries written after the mark."""
        if name is None:
            self._drop_all(self.indexed)
            return
        self._delete([file for file in self._index_files if file.path.name > name])
        last = self._index_files[-1] if self._index_files else None
        if last is None or last.path.name != name or not 1 < count <= last.header.count:
            # The file was removed or changed: its records must be indexed again.
            raise Corrupt(f"{self._directory / name} does not fit its mark", rule="index mark")
        if crashed or count < last.header.count:
            last.truncate(count)

    def _truncate_to(self, physical_offset: int) -> None:
        """Drop the entries of records at or above an offset."""
        while self._index_files:
            last = self._index_files[-1]
            count = last.number_from(physical_offset)
            if count > 1:
                if count < last.header.count:
                    last.truncate(count)
                return
            self._delete([last])

    def _drop_all(self, log_start: int) -> None:
        """Delete every file: the index is only a cache."""
        for file in self._index_files:
            file.close()
        self._index_files = ()
        for path in self._paths():
            self._files.unlink(path)
        if self._files.exists(self._directory):
            self._files.sync_dir(self._directory)
        self.indexed = log_start

    def _delete(self, files: list[IndexFile]) -> None:
        if files:
            self._index_files = tuple(file for file in self._index_files if file not in files)
            for file in files:
                file.destroy()
            self._files.sync_dir(self._directory)

    # --- building ---------------------------------------------------------------------------------

    def append(
        self, hashes: Int32s, physical_offsets: Int64s, times_ms: Int64s, *, upto: int
    ) -> None:
        """Index records: one item per key, in the order of the log. Afterwards everything below `upto` is indexed.

        Raises: StorageFull, OSError. The same items must be appended again then.
        """
        done = 0
        with self._files_lock:
            try:
                while done < len(hashes):
                    file = self._file_with_room()
                    stop = min(done + file.room, len(hashes))
                    file.append(hashes[done:stop], physical_offsets[done:stop], times_ms[done:stop])
                    done = stop
            except BaseException:
                if done:
                    # Otherwise the first items would be indexed twice.
                    self._truncate_to(int(physical_offsets[0]))
                raise
            self.indexed = max(self.indexed, upto)

    def _file_with_room(self) -> IndexFile:
        """The newest file, or a new one if that is full or there is none."""
        last = self._index_files[-1] if self._index_files else None
        if last is not None and last.room > 0:
            return last
        self._files.make_dirs(self._directory)
        file = IndexFile.create(
            self._directory / self._next_name(),
            self._slots,
            self._entries,
            None if last is None else last.header,
            files=self._files,
        )
        fail_point("index.file_created")
        self._index_files = (*self._index_files, file)
        return file

    def _next_name(self) -> str:
        """The local time as RocketMQ names index files, but later than the newest file's name."""
        name = _name_of(datetime.fromtimestamp(self._clock.now_ms() / 1000))
        last = self._index_files[-1].path.name if self._index_files else ""
        if name > last:
            return name
        time = datetime.strptime(last[:14], _NAME_FORMAT) + timedelta(milliseconds=int(last[14:]))
        return _name_of(time + timedelta(milliseconds=1))

    def entries_between(self, start: int, stop: int) -> int:
        """How many keys of the records in [start, stop) are indexed."""
        files = [file for file in self._index_files if not file.empty]
        return sum(file.number_from(stop) - file.number_from(start) for file in files)

    def forget_from(self, physical_offset: int) -> None:
        """Drop the entries of records at or above an offset, so that these are indexed again."""
        with self._files_lock:
            self._truncate_to(physical_offset)
            self.indexed = min(self.indexed, physical_offset)

    def sync(self, *, closing: bool = False) -> int:
        """fdatasync the files, then the mark. Returns: end time of the newest full file, 0 without one.

        Durable: every entry. Records without keys do not move the mark at once, unless `closing`: to scan them again is
        quick. Raises: OSError.
        """
        with self._files_lock:
            files, upto = self._index_files, self.indexed
            for file in files:
                if file.dirty:
                    file.sync()
            fail_point("index.synced")

            # A new file without an entry does not count.
            last = next((file for file in reversed(files) if not file.empty), None)
            mark = IndexEnd("", 1, upto)
            if last is not None:
                mark = IndexEnd(last.path.name, last.header.count, upto)

            if self._mark is not None and _must_write_mark(self._synced, mark, closing=closing):
                noted = {"file": mark.file or None, "count": mark.next_number, "indexed": upto}
                self._mark.update(noted)
                self._synced = mark

            return files[-2].header.end_time_ms if len(files) > 1 else 0

    def delete_expired(self, min_physical_offset: int) -> int:
        """Delete the files whose records were all deleted, never the newest file. Returns: how many.

        Source: IndexService#deleteExpiredFile.
        """
        with self._files_lock:
            older = self._index_files[:-1]
            expired = [file for file in older if file.header.end_offset < min_physical_offset]
            self._delete(expired)
            return len(expired)

    # --- looking up -------------------------------------------------------------------------------

    def _newest_first(self, begin_ms: int, end_ms: int) -> Iterator[IndexFile]:
        """The files that may have records stored in [begin_ms, end_ms]."""
        for file in reversed(self._index_files):
            header = file.header
            if file.empty or header.begin_time_ms > end_ms:
                continue
            if header.end_time_ms < begin_ms:
                return
            yield file
            if header.begin_time_ms < begin_ms:
                return

    def find(
        self, topic: str, key: str, begin_ms: int, end_ms: int, page_size: int = CHAIN_STEPS
    ) -> Iterator[list[int]]:
        """Physical offsets of records that may have a key and be stored in [begin_ms, end_ms], newest first.

        Yields pages of `page_size`. Another key may have the same hash. Source: IndexService#queryOffset.
        """
        hashed = key_hash(topic, key)
        for file in self._newest_first(begin_ms, end_ms):
            try:
                yield from file.find(hashed, begin_ms, end_ms, page_size)
            except Unavailable:
                # The file was deleted, and its records with it.
                continue

    def find_many(
        self, key_hashes: Int64s, wanted: int, begin_ms: int, end_ms: int
    ) -> tuple[Int64s, Int64s]:
        """`find` for many keys together: rows of `key_hashes`, and physical offsets of records that may match."""
        left = np.full(len(key_hashes), wanted, dtype=np.int64)
        rows: list[Int64s] = [np.empty(0, np.int64)]
        offsets: list[Int64s] = [np.empty(0, np.int64)]
        for file in self._newest_first(begin_ms, end_ms):
            if not (left > 0).any():
                break
            # The file may be deleted meanwhile, and its records with it.
            with contextlib.suppress(Unavailable):
                found_rows, found_offsets = file.find_many(key_hashes, left, begin_ms, end_ms)
                left -= np.bincount(found_rows, minlength=len(left))
                rows.append(found_rows)
                offsets.append(found_offsets)
        return np.concatenate(rows), np.concatenate(offsets)

    @property
    def last(self) -> tuple[int, int]:
        """Store time (ms) and physical offset of the newest indexed record; (0, 0) without one."""
        files = self._index_files
        header = files[-1].header if files else None
        return (header.end_time_ms, header.end_offset) if header else (0, 0)

    def close(self) -> None:
        """Close every file."""
        files, self._index_files = self._index_files, ()
        for file in files:
            file.close()
        if self._mark is not None:
            self._mark.close()
            self._mark = None


def _must_write_mark(synced: IndexEnd | None, mark: IndexEnd, *, closing: bool) -> bool:
    """Whether to write the mark: after each new entry, after much log without keys, and at a stop."""
    if synced is None or (mark.file, mark.next_number) != (synced.file, synced.next_number):
        return True
    if not 0 <= mark.indexed - synced.indexed < MARK_STEP_BYTES:
        return True
    return closing and mark != synced


def _name_of(time: datetime) -> str:
    return time.strftime(_NAME_FORMAT) + f"{time.microsecond // 1000:03d}"
