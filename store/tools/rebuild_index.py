"""Makes the index files of a store again from its log, in the order in which IndexService would have.

Source: IndexFile#putKey, IndexService#buildIndex, RocketMQ 5.3.3.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raymq.store.files import Files

from .read_only import ReadOnlyStore
from .rebuild import begin, swap
from .verify_index import (
    ENTRIES_PER_SLOT,
    ENTRY_DTYPE,
    HEADER_STRUCT,
    PER_SLOT_BYTES,
    key_hashes,
    slots_of,
)

Int64s = npt.NDArray[np.int64]

#: maxHashSlotNum
SLOTS = 5_000_000
_MAX_INT = 0x7FFFFFFF


class _IndexWriter:
    """One index file, written entry by entry in order and finished with its slots and header."""

    def __init__(
        self, path: Path, slots: int, entries: int, begin_ms: int, *, files: Files
    ) -> None:
        self._files = files
        self._slots = np.zeros(slots, dtype=np.int64)
        self._entries = entries
        self._count = 0
        self._begin_ms = begin_ms
        self._header = [0, 0, 0, 0]
        self._fd = files.open_file(path, create=True)
        size = HEADER_STRUCT.size + 4 * slots + ENTRY_DTYPE.itemsize * entries
        files.truncate(self._fd, size)

    @property
    def room(self) -> int:
        """Entries that fit; number 0 is never used."""
        return self._entries - 1 - self._count

    @property
    def end_ms(self) -> int:
        """Store time of the last entry's record."""
        return self._header[1]

    def put(self, hashes: Int64s, positions: Int64s, times_ms: Int64s) -> None:
        """Append entries, at most `room`."""
        count = len(hashes)
        numbers = self._count + 1 + np.arange(count)
        slot = hashes % len(self._slots)
        order = np.argsort(slot, kind="stable")
        same = np.flatnonzero(np.diff(slot[order]) == 0)
        previous = self._slots[slot]
        previous[order[same + 1]] = numbers[order[same]]
        entries: Any = np.zeros(count, dtype=ENTRY_DTYPE)
        entries["hash"], entries["position"], entries["previous"] = hashes, positions, previous
        entries["seconds"] = self._seconds(times_ms)
        at = HEADER_STRUCT.size + 4 * len(self._slots)
        self._files.pwrite(
            self._fd, entries.tobytes(), at + (self._count + 1) * ENTRY_DTYPE.itemsize
        )
        # Of several entries of a slot the last one stays.
        self._slots[slot] = numbers
        if not self._count:
            self._header[0], self._header[2] = int(times_ms[0]), int(positions[0])
        self._header[1], self._header[3] = int(times_ms[-1]), int(positions[-1])
        self._count += count

    def _seconds(self, times_ms: Int64s) -> Int64s:
        first = int(times_ms[0]) if not self._count else self._header[0]
        base = np.full(len(times_ms), first, dtype=np.int64)
        if not self._count:
            # RocketMQ counts the first entry's time from the end of the file before.
            base[0] = self._begin_ms if self._begin_ms > 0 else first
        seconds: Int64s = np.clip((times_ms - base) // 1000, 0, _MAX_INT)
        return seconds

    def finish(self) -> None:
        """Slots and header; sync. Durable: at return, but for the name."""
        used = int(np.count_nonzero(self._slots))
        head = HEADER_STRUCT.pack(*self._header, used, self._count + 1)
        self._files.pwrite(self._fd, head, 0)
        for low in range(0, len(self._slots), 1 << 18):
            piece = self._slots[low : low + (1 << 18)]
            if piece.any():
                data = piece.astype(">i4").tobytes()
                self._files.pwrite(self._fd, data, HEADER_STRUCT.size + 4 * low)
        self._files.sync(self._fd)

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)


def rebuild_index(store: ReadOnlyStore) -> None:
    """All keys of all records, in files of the size that most have (RocketMQ's default without any)."""
    files, target = store.files, store.root / "index"
    slots, entries = _sizes(store)
    directory = begin(target, files=files)
    writer: _IndexWriter | None = None
    last_name, end_ms = "", 0
    try:
        for part in store.slices():
            batch = part.decode()
            rows, hashes = key_hashes(batch)
            positions = part.positions[rows]
            times = batch.column("store_time_ms").to_numpy()[rows]
            done = 0
            while done < len(rows):
                if writer is None:
                    last_name = _file_name(int(times[done]), last_name)
                    writer = _IndexWriter(
                        directory / last_name, slots, entries, end_ms, files=files
                    )
                stop = min(len(rows), done + writer.room)
                writer.put(hashes[done:stop], positions[done:stop], times[done:stop])
                done = stop
                if not writer.room:
                    writer.finish()
                    end_ms = writer.end_ms
                    writer.close()
                    writer = None
            store.progress(
                "index", int(part.positions[-1]) - store.start, max(1, store.end - store.start)
            )
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.close()
    files.sync_dir(directory)
    # The mark is of the old files; without a mark a complete index is taken as it is.
    files.unlink(store.root / "raymq" / "index")
    swap(target, files=files)


def _sizes(store: ReadOnlyStore) -> tuple[int, int]:
    """Slots and entries of the files that are there, else of RocketMQ's defaults."""
    target, files = store.root / "index", store.files
    size = store.usual_size([target])
    for name in files.list(target) if size > HEADER_STRUCT.size + PER_SLOT_BYTES else ():
        fd = files.open_file(target / name, writable=False)
        try:
            slots = None
            if files.size(fd) == size:
                view = files.map_checked(fd, size, target / name)
                slots = slots_of(view)
                files.unmap(view)
        finally:
            files.close(fd)
        if slots is not None:
            return slots, (size - HEADER_STRUCT.size - 4 * slots) // ENTRY_DTYPE.itemsize
    return SLOTS, ENTRIES_PER_SLOT * SLOTS


def _file_name(time_ms: int, last: str) -> str:
    """The local time as yyyyMMddHHmmssSSS, above the name of the file before."""
    name = f"{datetime.fromtimestamp(time_ms / 1000):%Y%m%d%H%M%S}{time_ms % 1000:03d}"
    return name if name > last else f"{int(last) + 1:017d}"
