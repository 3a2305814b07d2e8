"""Index files against the log: headers, hash chains, and an entry for each key of each record they span.

A file: 40 bytes header, `slots` int32 (number of the newest entry of a slot, 0 none), 4 times as many entries of 20
bytes, of which number 0 is never used. Source: IndexFile, IndexHeader, IndexService#buildIndex,
RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store import format as fmt
from raymq.store.errors import Corrupt
from raymq.store.files import ZERO_CHUNK_BYTES, only_zeros
from raymq.store.log.meta import read_meta
from raymq.store.records.record_walk import gather

from .read_only import ReadOnlyStore, joined

Int64s = npt.NDArray[np.int64]

LENGTH = "an index file has its header, slots and entries"
HEADER = "an index header says what its entries say"
CHAINS = "entries of a slot are linked, newest first"
OF_RECORD = "an index entry is of a key of its record"
TIME = "an index entry has its record's time"
COMPLETE = "each key of a record has an index entry"

HEADER_STRUCT = struct.Struct(">4q2i")
ENTRY_DTYPE = np.dtype(
    [("hash", ">i4"), ("position", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
#: entries per slot, in RocketMQ's default sizes and in RayMQ's
ENTRIES_PER_SLOT = 4
PER_SLOT_BYTES = 4 + ENTRIES_PER_SLOT * ENTRY_DTYPE.itemsize
_MAX_INT = 0x7FFFFFFF


class _Kept(NamedTuple):
    """The part of a crashed store's index that a start keeps: what its mark vouches for. See `IndexService.load`."""

    #: the last file; empty: none
    name: str
    #: of it, the unused one counted
    entries: int
    #: of records below this offset
    below: int


class _File(NamedTuple):
    path: Path
    slots: npt.NDArray[Any]
    #: entries 1, 2, ...: number n is row n - 1
    entries: npt.NDArray[Any]
    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    used_slots: int
    #: a start rebuilds header and slots where they refer to other entries
    cut: bool = False


class StoredKeys(NamedTuple):
    """The keys of the log's records: `codes` = number of the record << 31 | hash of the key, ascending."""

    codes: Int64s
    starts: Int64s
    store_times_ms: Int64s


def java_hashes(texts: pa.Array) -> npt.NDArray[np.int32]:
    """Java's String.hashCode of each text, which must not be null."""
    count = len(texts)
    if not count:
        return np.empty(0, dtype=np.int32)
    data = texts.cast(pa.binary())
    edges = np.frombuffer(data.buffers()[1], dtype=np.int32)[data.offset : data.offset + count + 1]
    base, stop = int(edges[0]), int(edges[-1])
    out = np.zeros(count, dtype=np.uint32)
    if stop > base:
        units = np.frombuffer(data.buffers()[2], dtype=np.uint8)[base:stop]
        starts = (edges[:-1] - base).astype(np.int64)
        lengths = np.diff(edges).astype(np.int64)
        powers = np.full(int(lengths.max()), 31, dtype=np.uint32)
        powers[0] = 1
        powers = np.cumprod(powers, dtype=np.uint32)
        left = np.repeat(starts + lengths, lengths) - np.arange(len(units)) - 1
        sums = np.zeros(len(units) + 1, dtype=np.uint32)
        np.cumsum(units * powers[left], dtype=np.uint32, out=sums[1:])
        out = sums[starts + lengths] - sums[starts]
        wide = np.flatnonzero(np.add.reduceat(units > 0x7F, starts[lengths > 0]))
        for row in np.flatnonzero(lengths > 0)[wide].tolist():
            text = data[row].as_py().decode("utf-8", "replace")
            out[row] = fmt.java_hash(text) & 0xFFFFFFFF
    return np.ascontiguousarray(out).view(np.int32)


def key_hashes(batch: pa.RecordBatch) -> tuple[Int64s, Int64s]:
    """The row and the index hash of each key of a decoded slice, by row: UNIQ_KEY, then the words of KEYS."""
    found_rows: list[Int64s] = []
    hashes: list[Int64s] = []
    kept = (batch.column("sys_flag").to_numpy() & fmt.SYS_TRANSACTION_MASK) != fmt.SYS_ROLLBACK
    for name, split in (("UNIQ_KEY", False), ("KEYS", True)):
        values = _property(batch.column("properties"), name)
        rows = np.flatnonzero(kept & values.is_valid().to_numpy(zero_copy_only=False))
        values = values.take(pa.array(rows))
        if split:
            lists = pc.split_pattern(values.cast(pa.string()), " ")
            rows = rows[pc.list_parent_indices(lists).to_numpy()]
            values = pc.list_flatten(lists)
        values = values.cast(pa.string())
        filled = pc.not_equal(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)
        rows, values = rows[filled], values.filter(pa.array(filled))
        topics = batch.column("topic").take(pa.array(rows))
        found_rows.append(rows)
        hashes.append(_index_hash(java_hashes(pc.binary_join_element_wise(topics, values, "#"))))
    rows = np.concatenate(found_rows)
    order = np.argsort(rows, kind="stable")
    return rows[order], np.concatenate(hashes)[order]


def _index_hash(hashes: npt.NDArray[np.int32]) -> Int64s:
    absolute = np.abs(hashes.astype(np.int64))
    absolute[absolute > _MAX_INT] = 0
    return absolute


def _property(properties: pa.Array, name: str) -> pa.Array:
    """The last value of a property that a properties string has, null without one."""
    pattern = rf"(?s)^(?:.*\x02)?{name}\x01(?P<v>[^\x02]+)"
    return pc.struct_field(pc.extract_regex(properties, pattern), 0)


def keys_of(store: ReadOnlyStore) -> StoredKeys:
    """Every key of every record below the log's end."""
    starts, _ = joined(store.records)
    codes: list[Int64s] = [np.empty(0, dtype=np.int64)]
    times: list[Int64s] = [np.empty(0, dtype=np.int64)]
    count = 0
    for part in store.slices():
        batch = part.decode()
        rows, hashes = key_hashes(batch)
        codes.append(((rows.astype(np.int64) + count) << 31) | hashes)
        times.append(batch.column("store_time_ms").to_numpy())
        count += batch.num_rows
        store.progress(
            "index", int(part.positions[-1]) - store.start, max(1, store.end - store.start)
        )
    return StoredKeys(np.sort(np.concatenate(codes)), starts, np.concatenate(times))


def slots_of(view: memoryview) -> int | None:
    """How many slots an index file has: its length says that only for the usual ratio, else an entry does."""
    room = len(view) - HEADER_STRUCT.size
    usual, odd = divmod(room, PER_SLOT_BYTES)
    _, _, first, last, _, count = HEADER_STRUCT.unpack_from(view)
    # Entry 0 is not used. The first record of a log may be at 0, as are bytes that were never written.
    number, position = (1, first) if first else (count - 1, last)

    def leads_to_it(counts: Int64s) -> npt.NDArray[np.bool_]:
        # The position is the second field of an entry.
        at = HEADER_STRUCT.size + 4 * counts + number * ENTRY_DTYPE.itemsize + 4
        inside = at + 8 <= len(view)
        inside[inside] = gather(view, at[inside], np.dtype(">i8")) == position
        return np.asarray(inside)

    if not odd and (first == 0 or bool(leads_to_it(np.array([usual]))[0])):
        return usual
    # 4 bytes per slot and 20 per entry, two entries at least.
    counts = np.arange(room // 4 % 5 or 5, (room - 2 * ENTRY_DTYPE.itemsize) // 4 + 1, 5)
    found = counts[leads_to_it(counts)] if position and number > 0 and room % 4 == 0 else counts[:0]
    if len(found):
        return int(found[0])
    return None if odd else usual


def _only_zeros(view: memoryview) -> bool:
    return all(
        only_zeros(bytes(view[at : at + ZERO_CHUNK_BYTES]))
        for at in range(0, len(view), ZERO_CHUNK_BYTES)
    )


class IndexCheck:
    """Compares every index file with itself and with the log."""

    def __init__(self, store: ReadOnlyStore) -> None:
        self._store = store

    def run(self) -> None:
        """Find every fault of `index/`. Parts that a start rebuilds after a crash do not count."""
        store = self._store
        directory = store.root / "index"
        names = store.files.list(directory)
        if not names:
            return
        kept, kept_until = self._kept(names), self._kept_until()
        keys: StoredKeys | None = None
        held: list[tuple[int, memoryview]] = []
        found: list[tuple[_File, Int64s]] = []
        try:
            for name in names:
                if kept is not None and name > kept.name:
                    self._anew(name)
                    continue
                file = self._open(directory / name, held, kept)
                if file is None:
                    continue
                if kept is None and kept_until is not None and file.end_ms > kept_until:
                    self._anew(name)
                    continue
                self._check_header(file)
                self._check_chains(file)
                if keys is None:
                    keys = keys_of(store)
                found.append((file, self._check_entries(file, keys)))
            if keys is not None:
                # The keys of one record may begin in one file and end in the next.
                goes_on = bool(found) and found[-1][0].path.name != names[-1]
                self._check_complete(found, keys, goes_on=goes_on)
        finally:
            for fd, view in held:
                store.files.unmap(view)
                store.files.close(fd)

    def _kept(self, names: list[str]) -> _Kept | None:
        """The part that a start keeps; None without a crash, or without a mark."""
        store = self._store
        if not store.crashed or not store.own:
            return None
        try:
            mark = read_meta(store.root / "raymq" / "index", files=store.files)
        except Corrupt:
            mark = {"indexed": 0}
        if mark.get("indexed") is None:
            return None
        below = min(mark["indexed"], store.marks.dispatched_end, store.end)
        name = mark.get("file") or ""
        # Without the file that the mark names all of the index is rebuilt.
        return _Kept(name if name in names else "", mark.get("count", 1), below)

    def _anew(self, name: str) -> None:
        self._store.faults.anew.append(f"index/{name}")

    def _kept_until(self) -> int | None:
        """After a crash only files that ended before the checkpoint's index time stay; None: all."""
        store, path = self._store, self._store.root / "checkpoint"
        if not store.crashed:
            return None
        data = store.files.read_file(path) if store.files.exists(path) else b""
        return int(struct.unpack_from(">3q", data)[2]) if len(data) >= 24 else 0

    def _add(self, file: Path, offset: int, rule: str, detail: str) -> None:
        self._store.faults.add(file, offset, rule, detail)

    def _open(
        self, path: Path, held: list[tuple[int, memoryview]], kept: _Kept | None
    ) -> _File | None:
        files = self._store.files
        fd = files.open_file(path, writable=False)
        size = files.size(fd)
        if size < HEADER_STRUCT.size + PER_SLOT_BYTES:
            files.close(fd)
            self._add(path, size, LENGTH, f"{size} bytes")
            return None
        try:
            view = files.map_checked(fd, size, path)
        except Corrupt as error:
            files.close(fd)
            self._store.faults.error(error)
            return None
        held.append((fd, view))
        begin_ms, end_ms, begin, end, used, entry_count = HEADER_STRUCT.unpack_from(view)
        count = slots_of(view)
        if count is None and entry_count <= 1 and _only_zeros(view[HEADER_STRUCT.size :]):
            # A new file: without an entry its number of slots is unknown, and not needed.
            return None
        if count is None:
            self._add(path, size, LENGTH, f"{size} bytes")
            return None
        cut = kept is not None and path.name == kept.name
        if kept is not None and cut:
            entry_count = kept.entries
        at = HEADER_STRUCT.size + 4 * count
        room = (size - at) // ENTRY_DTYPE.itemsize
        if not 0 <= entry_count <= room:
            self._add(path, 36, HEADER, f"{entry_count - 1} entries; there is room for {room - 1}")
            return None
        entries = np.frombuffer(view, ENTRY_DTYPE, max(entry_count, 1), at)[1:]
        slots = np.frombuffer(view, ">i4", count, HEADER_STRUCT.size)
        if kept is not None:
            left = int(np.searchsorted(entries["position"], kept.below))
            cut, entries = cut or left < len(entries), entries[:left]
        if cut:
            self._anew(path.name)
        return _File(path, slots, entries, begin_ms, end_ms, begin, end, used, cut)

    def _check_header(self, file: _File) -> None:
        if file.cut or not len(file.entries):
            return
        first, last = int(file.entries["position"][0]), int(file.entries["position"][-1])
        if (file.begin_offset, file.end_offset) != (first, last):
            detail = (
                f"offsets {file.begin_offset} to {file.end_offset}; its entries {first} to {last}"
            )
            self._add(file.path, 16, HEADER, detail)
        used = int(np.count_nonzero(file.slots))
        if file.used_slots != used:
            self._add(file.path, 32, HEADER, f"{file.used_slots} slots in use; there are {used}")

    def _check_chains(self, file: _File) -> None:
        count = len(file.entries)
        slot = file.entries["hash"].astype(np.int64) % len(file.slots)
        order = np.argsort(slot, kind="stable")
        same = np.flatnonzero(np.diff(slot[order]) == 0)
        previous = np.zeros(count, dtype=np.int64)
        previous[order[same + 1]] = order[same] + 1
        for row in np.flatnonzero(file.entries["previous"] != previous).tolist():
            self._add(
                file.path,
                self._entry_at(file, row),
                CHAINS,
                f"entry {row + 1} names {int(file.entries['previous'][row])}, not {int(previous[row])}",
            )
        newest = np.zeros(len(file.slots), dtype=np.int64)
        newest[slot] = np.arange(1, count + 1)
        wrong = file.slots != newest
        if file.cut:
            wrong &= (file.slots >= 0) & (file.slots <= count)
        for row in np.flatnonzero(wrong).tolist():
            self._add(
                file.path,
                HEADER_STRUCT.size + 4 * row,
                CHAINS,
                f"slot {row} names entry {int(file.slots[row])}, not {int(newest[row])}",
            )

    def _entry_at(self, file: _File, row: int) -> int:
        return HEADER_STRUCT.size + 4 * len(file.slots) + (row + 1) * ENTRY_DTYPE.itemsize

    def _check_entries(self, file: _File, keys: StoredKeys) -> Int64s:
        """Every entry against its record. Returns: the codes of the file's entries."""
        store, entries = self._store, file.entries
        positions = entries["position"].astype(np.int64)
        inside = (positions >= store.start) & (positions < store.end)
        if not store.crashed:
            for row in np.flatnonzero(positions >= store.end).tolist():
                detail = f"position {int(positions[row])}; the log ends at {store.end}"
                self._add(file.path, self._entry_at(file, row), OF_RECORD, detail)
        rows = np.flatnonzero(inside)
        number = np.searchsorted(keys.starts, positions[rows])
        number = np.minimum(number, max(len(keys.starts) - 1, 0))
        codes: Int64s = (number << 31) | entries["hash"][rows].astype(np.int64)
        at_record = keys.starts[number] == positions[rows] if len(rows) else np.empty(0, np.bool_)
        of_key = at_record & np.isin(codes, keys.codes)
        for index in np.flatnonzero(~of_key).tolist():
            row = int(rows[index])
            what = "has no key of this hash" if at_record[index] else "is no record"
            detail = f"{int(positions[row])} {what} ({int(entries['hash'][row])})"
            self._add(file.path, self._entry_at(file, row), OF_RECORD, detail)
        times = keys.store_times_ms[number] if len(rows) else np.empty(0, dtype=np.int64)
        wanted = np.clip((times - file.begin_ms) // 1000, 0, _MAX_INT) * (file.begin_ms > 0)
        # The first entry's time counts from the file's first begin time, the end time of the file before.
        wrong = of_key & (entries["seconds"][rows] != wanted) & (rows > 0)
        for index in np.flatnonzero(wrong).tolist():
            row = int(rows[index])
            detail = f"{int(entries['seconds'][row])} s behind the file's begin, not {int(wanted[index])}"
            self._add(file.path, self._entry_at(file, row), TIME, detail)
        return codes

    def _check_complete(
        self, found: list[tuple[_File, Int64s]], keys: StoredKeys, *, goes_on: bool
    ) -> None:
        """In the range of a file each key has an entry: in it, or at its ends in a neighbour.

        `goes_on`: there is a later file that was not looked at, which may have the rest of the last record's.
        """
        if not found:
            return
        have = np.concatenate([codes for _, codes in found])
        missing = keys.codes[~np.isin(keys.codes, have)]
        positions = keys.starts[missing >> 31]
        for file, _ in found:
            if not len(file.entries):
                continue
            last = int(file.entries["position"][-1]) if file.cut else file.end_offset
            if goes_on and file is found[-1][0]:
                last -= 1
            within = (positions >= file.begin_offset) & (positions <= last)
            for position in positions[within].tolist():
                self._add(
                    file.path, HEADER_STRUCT.size, COMPLETE, f"none for the record at {position}"
                )
