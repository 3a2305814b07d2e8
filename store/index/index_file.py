"""One index file, a cache: from the hash of a key to physical offsets. Its bytes are RocketMQ's and must not change.

The header has 40 bytes: first and last store time, first and last physical offset (8 each), used slots, count (4 each).
`slots` ints follow: each is the number of the newest entry of its chain. Then come entries of 20 bytes, of which number
0 is never used: hash 4, physical offset 8, seconds 4, number of the previous entry 4. The header's count is the number
of the next entry.
Source: IndexFile, IndexHeader, RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raymq.store.base.arrays import Int32s, Int64s, Structs
from raymq.store.base.errors import Corrupt, Unavailable, require
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import ZERO_CHUNK_BYTES, Files
from raymq.store.base.rules import FILE_LENGTH_RULE
from raymq.store.log.segments.read_together import read_together
from raymq.store.records.record_walk import gather

HEADER = struct.Struct(">4q2i")
SLOT_BYTES = 4
ENTRY_DTYPE = np.dtype(
    [("hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
ENTRY_BYTES = ENTRY_DTYPE.itemsize
_ENTRY = struct.Struct(">iqii")
_INT_MAX = (1 << 31) - 1

require(HEADER.size == 40, "an index header has 40 bytes", found=HEADER.size)
require(ENTRY_BYTES == 20, "an index entry has 20 bytes", found=ENTRY_BYTES)
require(_ENTRY.size == ENTRY_BYTES, "the entry's layouts agree", found=_ENTRY.size)

#: most entries of a chain that are followed one by one: a longer chain is searched by a scan of all entries
CHAIN_STEPS = 2048
#: most of these entries that are read under one hold of `_fd_lock`: the file cannot be closed meanwhile
LOCKED_STEPS = 64
#: entries of one block: a chain is followed block by block
BLOCK_ENTRIES = 200
#: blocks that a file keeps in memory (2 MB). Keys that are queried together have their chains in the same blocks
BLOCKS_KEPT = 512
#: entries that are written one by one
FEW_ENTRIES = 4
#: entries searched at a time
SCAN_ENTRIES = 1 << 16
#: slots and entries that are this close together are read in one call
ITEM_GAP_BYTES = 4096
#: most such gaps in one read
GAPS_MAX = 16
_SLOT = np.dtype(">i4")


class IndexHeader(NamedTuple):
    """The header's fields; times in ms."""

    begin_time_ms: int = 0
    end_time_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    slots_used: int = 0
    #: number of the next entry
    count: int = 1  # type: ignore[assignment]  # hides tuple.count


class _Linked(NamedTuple):
    """New entries, ready to be written."""

    entries: Any
    #: how many entries are the only one of their slot
    new_chains: int
    #: makes the slots point at the entries
    set_slots: Callable[[], None]


class IndexFile:
    """One file of the index: a hash table of slots, and chains of entries.

    Callers: one thread appends, cuts and syncs; any may look up.
    Entries are written with pwrite. Slots lie anywhere in 20 MB, and stores into a shared map are 50 times faster than
    as many small writes. They are harmless in a cache, which is cut back to a synced state after a crash. The slots'
    blocks are reserved first, because a store into a hole on a full disk kills the process. The entries' blocks are not
    reserved: most files never fill.
    Invariant: an entry is written before a slot or the header refers to it.
    """

    def __init__(self, path: Path, slots: int, entries: int, fd: int, *, files: Files) -> None:
        self.path = path
        self._slot_count = slots
        self._entries_max = entries
        self._fd = fd
        self._files = files
        self._slot_map: memoryview | None = None
        #: a failed write may have left slots that point at entries which do not count
        self._torn = False
        #: held while descriptor and map are used or closed
        self._fd_lock = threading.Lock()
        #: number -> a block of entries that changes only if the file is cut. Guarded by `_fd_lock`
        self._blocks: dict[int, bytes] = {}
        #: something was written since the last sync
        self.dirty = False

        self.header = self._read_header()

    @staticmethod
    def size_of(slots: int, entries: int) -> int:
        """Bytes of a file."""
        return HEADER.size + slots * SLOT_BYTES + entries * ENTRY_BYTES

    @classmethod
    def create(
        cls, path: Path, slots: int, entries: int, before: IndexHeader | None, *, files: Files
    ) -> IndexFile:
        """Create a sparse file that continues the one whose header was `before`.

        Durable: the file and its name. Raises: StorageFull, and then leaves no file.
        """
        with files.created(path) as fd:
            files.allocate(fd, HEADER.size + slots * SLOT_BYTES)
            files.truncate(fd, cls.size_of(slots, entries))
            if before is not None:
                # The count stays 0 in an empty file. Readers take it for 1.
                time_ms, offset = before.end_time_ms, before.end_offset
                files.pwrite(fd, HEADER.pack(time_ms, time_ms, offset, offset, 0, 0), 0)
            files.sync(fd)

        files.sync_dir(path.parent)
        return cls(path, slots, entries, fd, files=files)

    @classmethod
    def open(cls, path: Path, slots: int, entries: int, *, files: Files) -> IndexFile:
        """Open an existing file. Raises: Corrupt if its length is not that of the options."""
        fd = files.open_file(path)
        found, expected = files.size(fd), cls.size_of(slots, entries)
        if found != expected:
            files.close(fd)
            raise Corrupt(
                f"{path} has {found} bytes; an index file of {slots} slots and {entries} entries has {expected}",
                path=str(path),
                rule=FILE_LENGTH_RULE,
                expected=expected,
                found=found,
            )
        return cls(path, slots, entries, fd, files=files)

    def _read_header(self) -> IndexHeader:
        found = IndexHeader(*HEADER.unpack(self._files.pread(self._fd, HEADER.size, 0)))
        return found._replace(count=min(max(found.count, 1), self._entries_max))

    @property
    def room(self) -> int:
        """Entries that can still be written."""
        return self._entries_max - self.header.count

    @property
    def empty(self) -> bool:
        """Whether no entry was written."""
        return self.header.count <= 1

    # --- writing ----------------------------------------------------------------------------------

    def append(self, hashes: Int32s, physical_offsets: Int64s, times_ms: Int64s) -> None:
        """Write entries, in order. Callers: with no more entries than there is `room` for.

        Raises: StorageFull, OSError. The entries do not count then.
        """
        count, header = len(hashes), self.header
        require(0 < count <= self.room, "entries fit the file", count=count, room=self.room)

        if self._torn:
            self.truncate(header.count)

        link = self._link_few if count <= FEW_ENTRIES else self._link
        linked = link(hashes, physical_offsets, times_ms)
        at = self._entries_at + header.count * ENTRY_BYTES

        self.dirty = self._torn = True
        self._files.pwrite(self._fd, linked.entries, at)
        fail_point("index.entries_written")
        linked.set_slots()
        fail_point("index.slots_written")

        first = header.count <= 1
        self._write_header(
            IndexHeader(
                int(times_ms[0]) if first else header.begin_time_ms,
                int(times_ms[-1]),
                int(physical_offsets[0]) if first else header.begin_offset,
                int(physical_offsets[-1]),
                header.slots_used + linked.new_chains,
                header.count + count,
            )
        )

        self._torn = False

    def _link(self, hashes: Int32s, physical_offsets: Int64s, times_ms: Int64s) -> _Linked:
        """Put new entries at the head of the chains of their slots."""
        slots = self._slots()
        first = self.header.count
        numbers = np.arange(first, first + len(hashes), dtype=np.int32)
        # numpy takes and stores items fastest by indexes of 64 bits and in the byte order of the machine.
        slot_indexes = hashes % np.int64(self._slot_count)
        before = slots.view(np.int32).take(slot_indexes).view(slots.dtype).astype(np.int32)
        starts_chain = before == 0

        # If two new entries have one slot, the later one follows the earlier: they are neighbours in a stable sort by
        # slot.
        order = _stable_order(slot_indexes)
        in_order = slot_indexes.take(order)
        same = np.flatnonzero(in_order[1:] == in_order[:-1])
        later = order[same + 1]
        before[later] = numbers[order[same]]
        starts_chain[later] = False

        entries = np.empty(len(hashes), dtype=ENTRY_DTYPE)
        entries["hash"] = hashes
        entries["physical_offset"] = physical_offsets
        entries["seconds"] = np.clip(self._seconds(times_ms), 0, _INT_MAX)
        entries["previous"] = before

        def set_slots() -> None:
            # Of several entries of one slot the last one stays.
            slots.view(np.int32)[slot_indexes] = numbers.astype(slots.dtype).view(np.int32)

        return _Linked(entries.view(np.uint8), int(np.count_nonzero(starts_chain)), set_slots)

    def _seconds(self, times_ms: Int64s) -> Int64s:
        """Seconds from the file's begin time to each new entry.

        The first entry of a file counts from the time that the file inherited. The file's own begin time is the first
        entry's, and the others count from that.
        """
        begin, first_time = self.header.begin_time_ms, int(times_ms[0])
        if self.header.count > 1:
            return (times_ms - begin) // 1000 if begin > 0 else np.zeros_like(times_ms)
        seconds = (times_ms - first_time) // 1000 if first_time > 0 else np.zeros_like(times_ms)
        seconds[0] = (first_time - begin) // 1000 if begin > 0 else 0
        return seconds

    def _link_few(self, hashes: Int32s, physical_offsets: Int64s, times_ms: Int64s) -> _Linked:
        """`_link` without arrays, which for few entries take eight times as long."""
        self._slots()
        slots, header = self._slot_map, self.header
        require(slots is not None, "the slots are mapped")

        begin, number = header.begin_time_ms, header.count
        entries = []
        heads: dict[int, bytes] = {}
        new_chains = 0

        columns = (hashes.tolist(), physical_offsets.tolist(), times_ms.tolist())
        for hashed, offset, time_ms in zip(*columns, strict=True):
            slot_at = HEADER.size + hashed % self._slot_count * SLOT_BYTES
            head = heads.get(slot_at) or bytes(slots[slot_at : slot_at + SLOT_BYTES])  # type: ignore[index]
            seconds = (time_ms - begin) // 1000 if begin > 0 else 0
            previous = int.from_bytes(head, "big")
            entries.append(_ENTRY.pack(hashed, offset, min(max(seconds, 0), _INT_MAX), previous))
            heads[slot_at] = number.to_bytes(SLOT_BYTES, "big")
            new_chains += not previous
            if number == 1:
                begin = time_ms
            number += 1

        def set_slots() -> None:
            for slot_at, head in heads.items():
                slots[slot_at : slot_at + SLOT_BYTES] = head  # type: ignore[index]

        return _Linked(b"".join(entries), new_chains, set_slots)

    def _write_header(self, header: IndexHeader) -> None:
        self._files.pwrite(self._fd, HEADER.pack(*header), 0)
        self.header = header

    def _slots(self) -> Structs:
        """The slots as an array over the map, which is made at first use. Their blocks are reserved before."""
        if self._slot_map is None:
            size = self._entries_at
            # A file of RocketMQ's may have holes here.
            self._files.allocate(self._fd, size)
            for at in range(0, 0 if self.empty else size, ZERO_CHUNK_BYTES):
                # A bad sector is an error here. Through the map it would end the process.
                self._read(at, min(at + ZERO_CHUNK_BYTES, size))
            self._slot_map = self._files.map_words(self._fd, size)
        return np.frombuffer(self._slot_map, dtype=">i4", offset=HEADER.size)

    def truncate(self, count: int) -> None:
        """Drop the entries from number `count` on, and repair the slots."""
        slots, header = self._slots(), self.header
        require(1 <= count <= header.count, "an index is cut", count=count, of=header.count)

        beyond = (slots >= count) | (slots < 0)
        slots[beyond] = 0

        if beyond.any():
            for low in range(1, count, SCAN_ENTRIES):
                high = min(low + SCAN_ENTRIES, count)
                slot_indexes = self._entries(low, high)["hash"] % np.int32(self._slot_count)
                rows = np.flatnonzero(beyond[slot_indexes])
                slots[slot_indexes[rows]] = (rows + low).astype(np.int32)

        if count < header.count:
            at = self._entries_at
            self._files.zero(self._fd, at + count * ENTRY_BYTES, at + header.count * ENTRY_BYTES)

        end_offset, end_time = header.begin_offset, header.begin_time_ms
        if count > 1:
            last = self._entries(count - 1, count)[0]
            end_offset = int(last["physical_offset"])
            seconds = int(last["seconds"]) if count > 2 else 0
            end_time = min(header.begin_time_ms + 1000 * seconds + 999, header.end_time_ms)

        self._write_header(
            header._replace(
                end_time_ms=end_time,
                end_offset=end_offset,
                slots_used=int(np.count_nonzero(slots)),
                count=count,
            )
        )

        self.dirty, self._torn = True, False
        with self._fd_lock:
            self._blocks.clear()

    def sync(self) -> None:
        """fdatasync. Raises: OSError."""
        self._files.sync_data(self._fd)
        self.dirty = False

    # --- reading ----------------------------------------------------------------------------------

    def _read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Raises: Corrupt for unreadable bytes, Unavailable after a close."""
        with self._fd_lock:
            return self._files.read_range(self._open_fd(), start, stop, path=self.path)

    def _read_into(self, target: memoryview, start: int) -> None:
        with self._fd_lock:
            self._files.read_into(self._open_fd(), target, start, path=self.path)

    def _open_fd(self) -> int:
        """The open descriptor. Callers: with `_fd_lock`."""
        if self._fd < 0:
            raise Unavailable(f"{self.path} was closed", path=str(self.path))
        return self._fd

    @property
    def _entries_at(self) -> int:
        return HEADER.size + self._slot_count * SLOT_BYTES

    def _entries(self, low: int, high: int) -> Structs:
        """Entries [low, high)."""
        at = self._entries_at
        data = self._read(at + low * ENTRY_BYTES, at + high * ENTRY_BYTES)
        return np.frombuffer(data, dtype=ENTRY_DTYPE)

    def _items(self, at: int, numbers: Int64s, dtype: np.dtype[np.generic]) -> Structs:
        """The items with these numbers of a table that begins at `at`."""
        if not len(numbers):
            return np.empty(0, dtype=dtype)
        low, high = int(numbers.min()), int(numbers.max()) + 1
        if (high - low) * dtype.itemsize <= ITEM_GAP_BYTES * min(len(numbers), GAPS_MAX):
            data = self._read(at + low * dtype.itemsize, at + high * dtype.itemsize)
            return np.frombuffer(data, dtype=dtype)[numbers - low]
        different, rows = np.unique(numbers, return_inverse=True)
        starts = at + different * dtype.itemsize
        items, item_starts = read_together(
            self._read, self._read_into, starts, starts + dtype.itemsize, gap_bytes=ITEM_GAP_BYTES
        )
        return gather(items, item_starts, dtype)[rows]

    def _follow(
        self,
        header: IndexHeader,
        number: int,
        steps: int,
        key_hash: int,
        begin_ms: int,
        end_ms: int,
    ) -> tuple[list[int], int]:
        """Follow a chain for at most `steps` entries. Returns: offsets of hits, and the next number (0: the chain
        ends)."""
        # Entries hold whole seconds since the file's begin time. RocketMQ stops at a negative one, too.
        first_second = max(0, (begin_ms - header.begin_time_ms) // 1000)
        last_second = (end_ms - header.begin_time_ms) // 1000
        count, blocks = header.count, self._blocks
        unpack_from = _ENTRY.unpack_from
        offsets: list[int] = []

        with self._fd_lock:
            self._open_fd()
            for _ in range(steps):
                if number <= 0:
                    break
                entries = blocks.get(number // BLOCK_ENTRIES) or self._read_block(
                    number // BLOCK_ENTRIES
                )
                entry_hash, offset, seconds, previous = unpack_from(
                    entries, number % BLOCK_ENTRIES * ENTRY_BYTES
                )

                # Entries written since the header was read are passed over.
                if number < count:
                    if number == 1 and seconds > 0:
                        # The first entry counts from another time: that of the file before.
                        seconds = 0
                    if seconds < first_second:
                        return offsets, 0
                    if entry_hash == key_hash and seconds <= last_second:
                        offsets.append(offset)
                if previous >= number:
                    return offsets, 0
                number = previous

        return offsets, number

    def _read_block(self, block: int) -> bytes:
        """Read a block of entries. Keep it if all of them count. Callers: with `_fd_lock`. Raises: as `_read`."""
        low = block * BLOCK_ENTRIES
        high = min(low + BLOCK_ENTRIES, self._entries_max)
        start = self._entries_at
        found = self._files.read_range(
            self._open_fd(), start + low * ENTRY_BYTES, start + high * ENTRY_BYTES, path=self.path
        )
        if high <= self.header.count:
            if len(self._blocks) >= BLOCKS_KEPT:
                # This is rare, and cheaper than to note the last use of each block at every step.
                self._blocks.clear()
            self._blocks[block] = found
        return found

    def number_from(self, physical_offset: int) -> int:
        """Number of the first entry of a record at or above `physical_offset`."""
        return 1 + bisect_left(
            range(1, self.header.count),
            physical_offset,
            key=lambda number: int(self._entries(number, number + 1)["physical_offset"][0]),
        )

    def find(
        self, key_hash: int, begin_ms: int, end_ms: int, page_size: int = CHAIN_STEPS
    ) -> Iterator[list[int]]:
        """Physical offsets of a hash's records that may be stored in [begin_ms, end_ms], newest first, in pages.

        Source: IndexFile#selectPhyOffset. An entry knows only the second. RocketMQ leaves out records of the
        first one. Here the caller compares exactly. RocketMQ also takes the first entry's time for the file's begin
        time.
        """
        header = self.header
        slot_at = HEADER.size + key_hash % self._slot_count * SLOT_BYTES
        number = int.from_bytes(self._read(slot_at, slot_at + SLOT_BYTES), "big", signed=True)
        page_size = min(page_size, LOCKED_STEPS)

        for _ in range(0, CHAIN_STEPS, page_size):
            if not 0 < number < self._entries_max:
                break
            offsets, number = self._follow(header, number, page_size, key_hash, begin_ms, end_ms)
            if offsets:
                yield offsets

        while number > 0:
            low = max(1, number + 1 - SCAN_ENTRIES)
            entries = self._entries(low, min(number + 1, self._entries_max))
            rows = np.flatnonzero(entries["hash"] == key_hash)[::-1]
            seconds = entries["seconds"][rows].astype(np.int64)
            # The first entry counts from another time: that of the file before.
            seconds[rows + low == 1] = 0
            times_ms = header.begin_time_ms + 1000 * seconds
            in_span = (times_ms <= end_ms) & (times_ms + 999 >= begin_ms)

            if in_span.any():
                yield entries["physical_offset"][rows[in_span]].tolist()
            if len(rows) and times_ms[-1] + 999 < begin_ms:
                break
            number = low - 1

    def find_many(
        self, key_hashes: Int64s, wanted: Int64s, begin_ms: int, end_ms: int
    ) -> tuple[Int64s, Int64s]:
        """`find` for many hashes together: all chains are followed in step.

        Args: `wanted`: how many entries of each hash. Returns: rows of `key_hashes` and physical offsets of their
        entries, for each hash newest first.
        """
        header, start = self.header, self._entries_at
        left = wanted.copy()
        rows = np.flatnonzero(left > 0)
        slots = key_hashes[rows] % self._slot_count
        numbers = self._items(HEADER.size, slots, _SLOT).astype(np.int64)

        found_rows: list[Int64s] = [np.empty(0, np.int64)]
        found_offsets: list[Int64s] = [np.empty(0, np.int64)]
        for _ in range(CHAIN_STEPS):
            inside = (numbers > 0) & (numbers < self._entries_max)
            rows, numbers = rows[inside], numbers[inside]
            if not len(rows):
                break

            entries = self._items(start, numbers, ENTRY_DTYPE)

            is_known = numbers < header.count
            seconds = np.where(numbers > 1, entries["seconds"].astype(np.int64), 0)
            times_ms = header.begin_time_ms + 1000 * seconds
            too_old = is_known & (times_ms + 999 < begin_ms)
            has_hash = entries["hash"] == key_hashes[rows]
            is_hit = is_known & has_hash & (times_ms <= end_ms) & ~too_old

            found_rows.append(rows[is_hit])
            found_offsets.append(entries["physical_offset"][is_hit].astype(np.int64))
            left[rows[is_hit]] -= 1

            previous = entries["previous"].astype(np.int64)
            goes_on = (previous < numbers) & ~too_old & (left[rows] > 0)
            rows, numbers = rows[goes_on], previous[goes_on]

        # A chain of thousands is scanned as a whole.
        for row in rows.tolist():
            followed = sum(int((part == row).sum()) for part in found_rows)
            every = list(chain.from_iterable(self.find(int(key_hashes[row]), begin_ms, end_ms)))
            rest = np.array(every[followed : int(wanted[row])], dtype=np.int64)
            found_rows.append(np.full(len(rest), row, np.int64))
            found_offsets.append(rest)

        return np.concatenate(found_rows), np.concatenate(found_offsets)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file without a sync."""
        with self._fd_lock:
            if self._slot_map is not None:
                self._files.unmap(self._slot_map)
                self._slot_map = None
            if self._fd >= 0:
                self._files.close(self._fd)
                self._fd = -1

    def destroy(self) -> None:
        """Close and delete. Durable: after an fsync of the directory."""
        self.close()
        self._files.unlink(self.path)


def _stable_order(values: Int64s) -> Int64s:
    """`np.argsort(values, kind="stable")` of values that are not negative, in a fifth of the time.

    numpy sorts 16-bit integers by radix, so the values are ordered by their low half, then by their high half.
    """
    order = np.argsort(values.astype(np.uint16), kind="stable")
    high = (values >> 16).astype(np.uint16)
    return order.take(np.argsort(high.take(order), kind="stable"))
