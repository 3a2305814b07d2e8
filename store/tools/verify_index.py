"""Index files against the log: headers, hash chains, and an entry for each key of each record they span.

The layout of a file is that of `store/index/index_file.py`. Usually a file has four times as many entries as slots.
Source: IndexFile, IndexHeader, IndexService#buildIndex, RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Corrupt
from raymq.store.index.index_file import ENTRY_BYTES, ENTRY_DTYPE, HEADER, SLOT_BYTES, IndexHeader
from raymq.store.index.index_keys import Hashes, hash_keys, topic_hash
from raymq.store.log.control_files.meta import read_meta
from raymq.store.records.keys import keyed_column
from raymq.store.records.record_walk import gather

from .read_only import ReadOnlyStore, joined

#: place of the physical offset within an entry
_OFFSET_AT = ENTRY_DTYPE.fields["physical_offset"][1]  # type: ignore[index]

LENGTH_RULE = "an index file has its header, slots and entries"
HEADER_RULE = "an index header says what its entries say"
SLOT_CHAIN_RULE = "entries of a slot are linked, newest first"
KEY_RULE = "an index entry is of a key of its record"
TIME_RULE = "an index entry has its record's time"
COMPLETE_RULE = "each key of a record has an index entry"

#: entries per slot, in RocketMQ's default sizes and in ours
ENTRIES_PER_SLOT = 4
PER_SLOT_BYTES = SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY_BYTES
SLOTS_PER_ENTRY = ENTRY_BYTES // SLOT_BYTES
_MAX_INT = 0x7FFFFFFF


class _Kept(NamedTuple):
    """The part of a crashed store's index that a start keeps, by the index's mark. See `IndexService.load`."""

    #: the last file; empty: none
    name: str
    #: entries of that file, with the unused one
    entries: int
    #: entries of records below this offset are kept
    below: int


class _File(NamedTuple):
    path: Path
    header: IndexHeader
    slots: npt.NDArray[Any]
    #: entries 1, 2, ...: number n is row n - 1
    entries: npt.NDArray[Any]
    #: a start rebuilds header and slots if they refer to other entries
    cut: bool


class StoredKeys(NamedTuple):
    """The keys of the log's records. `codes`: number of the record << 31 | hash of the key, ascending."""

    codes: Int64s
    starts: Int64s
    store_times_ms: Int64s


def hashes_of_batch(batch: pa.RecordBatch) -> Hashes:
    """Row and hash of each key of a decoded slice, by row, in the order in which the index has them."""
    keyed = keyed_column(batch.column("properties"))
    if keyed is None:
        return Hashes(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))
    topics = batch.column("topic").dictionary_encode()
    table = np.array([topic_hash(name) for name in topics.dictionary.to_pylist()], np.uint32)
    rows, values = hash_keys(table[topics.indices.to_numpy()], keyed)
    kinds = batch.column("sys_flag").to_numpy() & fmt.SYS_TRANSACTION_MASK
    kept = kinds[rows] != fmt.SYS_ROLLBACK
    return Hashes(rows[kept], values[kept])


def stored_keys(store: ReadOnlyStore) -> StoredKeys:
    """Every key of every record below the log's end."""
    starts, _ = joined(store.records)
    codes: list[Int64s] = [np.empty(0, dtype=np.int64)]
    times: list[Int64s] = [np.empty(0, dtype=np.int64)]
    count = 0
    for part in store.slices("index"):
        batch = part.decode()
        rows, hashes = hashes_of_batch(batch)
        codes.append(((rows + count) << 31) | hashes)
        times.append(batch.column("store_time_ms").to_numpy())
        count += batch.num_rows
    return StoredKeys(np.sort(np.concatenate(codes)), starts, np.concatenate(times))


def slots_of(view: memoryview) -> int | None:
    """The number of slots of an index file; None: no number agrees with its length and its header.

    The length gives the number if the file has the usual four entries a slot. Otherwise an entry does whose physical
    offset the header repeats: its place depends on the number of slots.
    """
    slots, rest = divmod(len(view) - HEADER.size, PER_SLOT_BYTES)
    usual = None if rest else slots
    _, _, first_offset, last_offset, _, count = HEADER.unpack_from(view)
    if usual is not None and (
        not first_offset or _have_offset(view, np.array([usual]), 1, first_offset)[0]
    ):
        return usual

    # Entry 0 is not used. The first record of a log may be at 0, and bytes that were never written are 0, too.
    entry, offset = (1, first_offset) if first_offset else (count - 1, last_offset)
    slots_by_offset = _slots_by_offset(view, entry, offset) if offset and entry > 0 else None
    return usual if slots_by_offset is None else slots_by_offset


def _slots_by_offset(view: memoryview, entry: int, offset: int) -> int | None:
    """The least number of slots with which an entry has a physical offset; None: there is none.

    An entry is as long as five slots, so the length of slots and entries gives the number of slots modulo 5. There are
    at least two entries.
    """
    room = len(view) - HEADER.size
    if room % SLOT_BYTES:
        return None
    least = room // SLOT_BYTES % SLOTS_PER_ENTRY or SLOTS_PER_ENTRY
    most = (room - 2 * ENTRY_BYTES) // SLOT_BYTES
    candidates = np.arange(least, most + 1, SLOTS_PER_ENTRY)
    fitting = candidates[_have_offset(view, candidates, entry, offset)]
    return int(fitting[0]) if len(fitting) else None


def _have_offset(
    view: memoryview, slot_counts: Int64s, entry: int, offset: int
) -> npt.NDArray[np.bool_]:
    """Whether an entry would have a physical offset, for each number of slots."""
    places = HEADER.size + SLOT_BYTES * slot_counts + entry * ENTRY_BYTES + _OFFSET_AT
    fits = places + 8 <= len(view)
    fits[fits] = gather(view, places[fits], np.dtype(">i8")) == offset
    return np.asarray(fits)


class IndexCheck:
    """Compares every index file with itself and with the log."""

    def __init__(self, store: ReadOnlyStore) -> None:
        self._store = store

    def run(self) -> None:
        """Find every fault of `index/`. Parts that a start rebuilds after a crash do not count."""
        store = self._store
        directory = store.root / "index"
        names = store.files.list(directory)
        names = [name for name in names if not store.files.is_dir(directory / name)]
        if not names:
            return

        mark = self._mark()
        kept, kept_until = self._kept(names, mark), self._kept_until()
        # In order RocketMQ stops with a complete index, and RayMQ notes how far its index goes.
        self._complete_end = -1 if store.crashed else mark.get("indexed") or store.end
        keys: StoredKeys | None = None
        found: list[tuple[_File, Int64s]] = []

        with ExitStack() as opened:
            for name in names:
                if kept is not None and name > kept.name:
                    self._note_rebuilt(name)
                    continue
                file = self._open(directory / name, opened, kept)
                if file is None:
                    continue
                if kept is None and kept_until is not None and file.header.end_time_ms > kept_until:
                    self._note_rebuilt(name)
                    continue

                self._check_header(file)
                self._check_chains(file)
                keys = keys or stored_keys(store)
                found.append((file, self._check_entries(file, keys)))

            if keys is not None:
                # The keys of one record may begin in one file and end in the next.
                goes_on = found[-1][0].path.name != names[-1]
                self._check_complete(found, keys, goes_on=goes_on)

    def _mark(self) -> dict[str, object]:
        """The content of `raymq/index`; without it, and in a store of RocketMQ, nothing."""
        store = self._store
        if not store.is_own_store:
            return {}
        try:
            return read_meta(store.root / "raymq" / "index", files=store.files)
        except Corrupt:
            return {"indexed": 0}

    def _kept(self, names: list[str], mark: dict[str, Any]) -> _Kept | None:
        """The part that a start keeps; None without a crash, or without a mark."""
        store = self._store
        if not store.crashed or not store.is_own_store:
            return None
        if mark.get("indexed") is None:
            return None
        below = min(mark["indexed"], store.marks.queues_synced_end, store.end)
        name = mark.get("file") or ""
        # If the file that the mark names is missing, the whole index is rebuilt.
        return _Kept(name if name in names else "", mark.get("count", 1), below)

    def _note_rebuilt(self, name: str) -> None:
        self._store.faults.rebuilt_at_start.append(f"index/{name}")

    def _kept_until(self) -> int | None:
        """The checkpoint's index time, ms. After a crash only files that ended before it stay; None: all files."""
        store, path = self._store, self._store.root / "checkpoint"
        if not store.crashed:
            return None
        data = store.files.read_file(path) if store.files.exists(path) else b""
        return int(struct.unpack_from(">3q", data)[2]) if len(data) >= 24 else 0

    def _add(self, file: Path, offset: int, rule: str, detail: str) -> None:
        self._store.faults.add(file, offset, rule, detail)

    def _open(self, path: Path, opened: ExitStack, kept: _Kept | None) -> _File | None:
        files = self._store.files
        fd = files.open_file(path, writable=False)
        opened.callback(files.close, fd)
        size = files.size(fd)
        if size < HEADER.size + PER_SLOT_BYTES:
            if kept is None and self._store.crashed:
                # A crash while the file was made. Without a mark no sync of the index has ended, so nothing is lost.
                self._note_rebuilt(path.name)
                return None
            self._add(path, size, LENGTH_RULE, f"{size} bytes")
            return None

        try:
            view = files.map_checked(fd, size, path)
        except Corrupt as error:
            self._store.faults.error(error)
            return None
        opened.callback(files.unmap, view)

        header = IndexHeader(*HEADER.unpack_from(view))
        slot_count = slots_of(view)
        if slot_count is None:
            # The number of slots of a new file, without an entry, is unknown and not needed.
            if header.count > 1 or np.frombuffer(view, np.uint8, offset=HEADER.size).any():
                self._add(path, size, LENGTH_RULE, f"{size} bytes")
            return None

        count, cut = header.count, False
        if kept is not None and path.name == kept.name:
            count, cut = kept.entries, True

        entries_at = HEADER.size + SLOT_BYTES * slot_count
        room = (size - entries_at) // ENTRY_BYTES
        if not 0 <= count <= room:
            self._add(path, 36, HEADER_RULE, f"{count - 1} entries; there is room for {room - 1}")
            return None

        entries = np.frombuffer(view, ENTRY_DTYPE, max(count, 1), entries_at)[1:]
        slots = np.frombuffer(view, ">i4", slot_count, HEADER.size)
        if kept is not None:
            left = int(np.searchsorted(entries["physical_offset"], kept.below))
            cut = cut or left < len(entries)
            entries = entries[:left]

        if cut:
            self._note_rebuilt(path.name)
        return _File(path, header, slots, entries, cut)

    def _check_header(self, file: _File) -> None:
        if file.cut or not len(file.entries):
            return
        header, positions = file.header, file.entries["physical_offset"]
        first, last = int(positions[0]), int(positions[-1])
        if (header.begin_offset, header.end_offset) != (first, last):
            detail = f"offsets {header.begin_offset} to {header.end_offset}; its entries {first} to {last}"
            self._add(file.path, 16, HEADER_RULE, detail)
        used = int(np.count_nonzero(file.slots))
        if header.slots_used != used:
            detail = f"{header.slots_used} slots in use; there are {used}"
            self._add(file.path, 32, HEADER_RULE, detail)

    def _check_chains(self, file: _File) -> None:
        """Compare the chains of all slots with those that the entries' hashes make."""
        count = len(file.entries)
        slot = file.entries["hash"].astype(np.int64) % len(file.slots)
        # In a stable sort by slot an entry follows the one that it must name.
        order = np.argsort(slot, kind="stable")
        same = np.flatnonzero(np.diff(slot[order]) == 0)
        previous = np.zeros(count, dtype=np.int64)
        previous[order[same + 1]] = order[same] + 1

        named = file.entries["previous"]
        for row in np.flatnonzero(named != previous).tolist():
            detail = f"entry {row + 1} names {int(named[row])}, not {int(previous[row])}"
            self._add(file.path, self._entry_at(file, row), SLOT_CHAIN_RULE, detail)

        newest = np.zeros(len(file.slots), dtype=np.int64)
        newest[slot] = np.arange(1, count + 1)
        wrong = file.slots != newest
        if file.cut:
            wrong &= (file.slots >= 0) & (file.slots <= count)

        for row in np.flatnonzero(wrong).tolist():
            detail = f"slot {row} names entry {int(file.slots[row])}, not {int(newest[row])}"
            self._add(file.path, HEADER.size + SLOT_BYTES * row, SLOT_CHAIN_RULE, detail)

    def _entry_at(self, file: _File, row: int) -> int:
        return HEADER.size + SLOT_BYTES * len(file.slots) + (row + 1) * ENTRY_BYTES

    def _check_entries(self, file: _File, keys: StoredKeys) -> Int64s:
        """Compare every entry with its record. Returns: the codes of the file's entries."""
        store, entries = self._store, file.entries
        positions = entries["physical_offset"].astype(np.int64)
        if not store.crashed:
            for row in np.flatnonzero(positions >= store.end).tolist():
                detail = f"position {int(positions[row])}; the log ends at {store.end}"
                self._add(file.path, self._entry_at(file, row), KEY_RULE, detail)

        # Without a record no position is inside the log.
        rows = np.flatnonzero((positions >= store.start) & (positions < store.end))
        positions, hashes = positions[rows], entries["hash"][rows].astype(np.int64)
        number = np.minimum(np.searchsorted(keys.starts, positions), len(keys.starts) - 1)
        codes: Int64s = (number << 31) | hashes

        at_record = keys.starts[number] == positions
        of_key = at_record & np.isin(codes, keys.codes)
        for index in np.flatnonzero(~of_key).tolist():
            what = "has no key of this hash" if at_record[index] else "is no record"
            detail = f"{int(positions[index])} {what} ({int(hashes[index])})"
            self._add(file.path, self._entry_at(file, int(rows[index])), KEY_RULE, detail)

        begin_ms = file.header.begin_time_ms
        wanted = np.clip((keys.store_times_ms[number] - begin_ms) // 1000, 0, _MAX_INT)
        wanted *= begin_ms > 0
        seconds = entries["seconds"][rows]
        # The first entry's time counts from the file's first begin time, the end time of the file before.
        wrong = of_key & (seconds != wanted) & (rows > 0)
        for index in np.flatnonzero(wrong).tolist():
            detail = f"{int(seconds[index])} s after the file's begin, not {int(wanted[index])}"
            self._add(file.path, self._entry_at(file, int(rows[index])), TIME_RULE, detail)

        return codes

    def _check_complete(
        self, found: list[tuple[_File, Int64s]], keys: StoredKeys, *, goes_on: bool
    ) -> None:
        """Check that each key of a file's range has an entry, in that file or at its ends in a neighbour.

        Args: `goes_on`: a later file was not checked. It may have the rest of the last record's entries.
        """
        have = np.concatenate([codes for _, codes in found])
        missing = keys.codes[~np.isin(keys.codes, have)]
        positions = keys.starts[missing >> 31]

        for file, _ in found:
            if not len(file.entries):
                continue
            last = file.header.end_offset
            if file.cut:
                last = int(file.entries["physical_offset"][-1])
            if goes_on and file is found[-1][0]:
                last -= 1
            within = (positions >= file.header.begin_offset) & (positions <= last)
            if file is found[-1][0]:
                within |= (positions > last) & (positions < self._complete_end)
            for position in positions[within].tolist():
                detail = f"none for the record at {position}"
                self._add(file.path, HEADER.size, COMPLETE_RULE, detail)
