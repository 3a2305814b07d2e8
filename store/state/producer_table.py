"""Sequences and offsets of up to a million producers and queues: rows of bytes, with objects for the newest few.

An entry is a row of 76 bytes. An index finds it by producer and queue. An entry that is written becomes an object
(`ProducerQueue`), which knows more runs than a row has room for. The object that was written least recently is stored
in its row again, so no entry is lost. Entries are dropped only when the table is full, and only those that have
expired: that were not written for `expiry_ms`, or in the staged topic for an hour. If too few are that old, new entries
are refused. A table that was read from the log may still have dropped entries: it recognises more than it must.

Callers: one thread writes, with the put lock, and makes all calls that may drop entries or remember an epoch. Any
thread may call `get`.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base.arrays import Int64s, Structs
from raymq.store.base.errors import Rejected, require
from raymq.store.base.format import STAGED_TOPIC

#: (producer id, topic, queue id)
EntryKey = tuple[int, str, int]

#: most entries that are objects
RECENT_MAX = 20_000
#: most runs of consecutive offsets per producer and queue. Offsets between them are searched (duplicates.py)
RUNS_MAX = 16
#: the newest runs, which are always kept
RUNS_RECENT = 6
#: runs that are dropped together if there are too many
RUNS_DROPPED = 5
UNKNOWN_OFFSET = -1
#: entries of the staged topic expire after this time. Each is of one attempt of a task, whose batches are resent for
#: `delivery_timeout_ms` (two minutes) at most
STAGED_EXPIRY_MS = 3_600_000
#: puts wait while a full table drops entries. So it waits until one entry in so many has expired, an hour at most
DROPPED_SHARE = 64

#: rows of one piece of memory
_CHUNK_BITS = 14
_CHUNK_ROWS = 1 << _CHUNK_BITS
_SLOTS_MIN = 1 << 10
_MASK = (1 << 64) - 1
_NEVER_MS = (1 << 63) - 1
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

# Snapshots on disk hold the names of these fields. "producer" is a producer id, "queue" an index of `queues`.
ENTRY_DTYPE = np.dtype(
    [
        ("producer", "<u8"),
        ("queue", "<u4"),
        ("time_ms", "<i8"),
        ("end_offset", "<i8"),
        # The first run and the newest: the same twice if there is only one.
        ("first_sequence", "<i8"),
        ("first_count", "<i8"),
        ("first_offset", "<i8"),
        ("last_sequence", "<i8"),
        ("last_count", "<i8"),
        ("last_offset", "<i8"),
    ]
)
EPOCH_DTYPE = np.dtype(
    [("producer", "<u8"), ("queue", "<u4"), ("time_ms", "<i8"), ("epoch", "<i8")]
)
# The same rows, one at a time: an entry is a key and its values.
_KEY_STRUCT = struct.Struct("<QI")
_VALUES_STRUCT = struct.Struct("<qqqqqqqq")
_ENTRY_STRUCT = struct.Struct("<QIqqqqqqqq")
_EPOCH_STRUCT = struct.Struct("<QIqq")
_KEY_BYTES = _KEY_STRUCT.size

for _row_bytes in (_ENTRY_STRUCT.size, _KEY_BYTES + _VALUES_STRUCT.size):
    require(_row_bytes == ENTRY_DTYPE.itemsize, "the entry's layouts agree", found=_row_bytes)
require(
    _EPOCH_STRUCT.size == EPOCH_DTYPE.itemsize,
    "the epoch's layouts agree",
    found=_EPOCH_STRUCT.size,
)


class Run(NamedTuple):
    """`count` sequences from `first_sequence` stored at consecutive offsets from `first_offset`."""

    first_sequence: int
    count: int  # type: ignore[assignment]
    first_offset: int


class FoundRun(NamedTuple):
    """A run that a search found, and the physical end of its last record."""

    first_sequence: int
    count: int  # type: ignore[assignment]
    first_offset: int
    end: int


@dataclass
class ProducerQueue:
    """The sequences and offsets of one producer in one queue."""

    #: the sequence the next row must have
    next_sequence: int = 0
    #: physical end of the last record: duplicates are as durable as this
    end_offset: int = 0
    #: the first run, some old ones, the newest. In place only the end of the list changes
    runs: list[Run] = field(default_factory=list)
    #: the result of the last search, because the next rows are usually searched next. Not part of the state
    found: FoundRun | None = field(default=None, compare=False)
    #: time of the last write
    time_ms: int = field(default=0, compare=False)
    #: row of the entry in the table
    row: int = field(default=-1, compare=False)

    def extend(self, sequence: int, count: int, offset: int, end_offset: int) -> None:
        """Record that rows [sequence, sequence+count) were stored from queue offset `offset`."""
        last = self.runs[-1] if self.runs else None
        if (
            last is not None
            and last.first_sequence + last.count == sequence
            and last.first_offset + last.count == offset
        ):
            self.runs[-1] = Run(last.first_sequence, last.count + count, last.first_offset)
        else:
            self.runs.append(Run(sequence, count, offset))
            if len(self.runs) > RUNS_MAX:
                self._thin_out()
        self.next_sequence = sequence + count
        self.end_offset = end_offset

    def _thin_out(self) -> None:
        """Drop the old runs that leave the fewest offsets to search. Both ends of a long pause stay.

        The first run stays too: an older row is from before the producer was forgotten.
        """
        runs = self.runs
        old = sorted(
            range(1, len(runs) - RUNS_RECENT),
            key=lambda i: runs[i + 1].first_offset - runs[i - 1].first_offset - runs[i - 1].count,
        )
        dropped = set(old[:RUNS_DROPPED])
        self.runs = [run for i, run in enumerate(runs) if i not in dropped]

    def span_of(self, sequence: int) -> tuple[int, int]:
        """The queue offsets [low, high) that a sequence can have; an empty range if it was never stored.

        Callers: any thread, without the put lock.
        """
        runs = list(self.runs)
        after = bisect_right(runs, sequence, key=itemgetter(0))
        if not after:
            return 0, 0

        run = runs[after - 1]
        low = run.first_offset + sequence - run.first_sequence
        if sequence < run.first_sequence + run.count:
            return low, low + 1
        if after == len(runs):
            return 0, 0

        high = runs[after].first_offset - (runs[after].first_sequence - sequence) + 1
        found = self.found
        if found is not None and found.first_sequence <= sequence:
            # Offsets never grow slower than sequences.
            low = max(low, found.first_offset + sequence - found.first_sequence)
            if sequence < found.first_sequence + found.count:
                return low, low + 1

        return low, high

    def offset_of(self, sequence: int) -> int:
        """The queue offset of a stored sequence; UNKNOWN_OFFSET if it must be searched."""
        low, high = self.span_of(sequence)
        return low if high - low == 1 else UNKNOWN_OFFSET


class _Rows:
    """Rows of one dtype. Its key (producer id, queue number) comes first. Rows are added and changed, never removed."""

    def __init__(self, dtype: np.dtype[Any], parts: Iterable[Structs] = ()) -> None:
        self.dtype = dtype
        self.nbytes = dtype.itemsize
        self.count = 0
        self._chunks: list[bytearray] = []
        self._slots = array("i", [-1]) * _SLOTS_MIN
        for part in parts:
            self._append_rows(part)
        if self.count:
            self._rebuild_slots()

    def _append_rows(self, part: Structs) -> None:
        """Copy rows after the present ones. The caller then calls `_rebuild_slots`."""
        while len(part):
            chunk, at = divmod(self.count, _CHUNK_ROWS)
            if chunk == len(self._chunks):
                self._chunks.append(bytearray(_CHUNK_ROWS * self.nbytes))
            fits = part[: _CHUNK_ROWS - at]
            np.frombuffer(self._chunks[chunk], dtype=self.dtype)[at : at + len(fits)] = fits
            self.count += len(fits)
            part = part[len(fits) :]

    def parts(self) -> Iterator[Structs]:
        """Every row, some thousands at a time. Not copied."""
        for number, chunk in enumerate(self._chunks):
            yield np.frombuffer(chunk, dtype=self.dtype)[: self.count - number * _CHUNK_ROWS]

    def address(self, row: int) -> tuple[bytearray, int]:
        """The memory chunk that has a row, and the row's first byte in it."""
        return self._chunks[row >> _CHUNK_BITS], (row & (_CHUNK_ROWS - 1)) * self.nbytes

    def find(self, producer_id: int, queue_number: int) -> int:
        """The row of a key; -1: none."""
        slots = self._slots
        mask = len(slots) - 1
        at = _hash(producer_id, queue_number) & mask
        while (row := slots[at]) >= 0:
            if _KEY_STRUCT.unpack_from(*self.address(row)) == (producer_id, queue_number):
                return row
            at = (at + 1) & mask
        return -1

    def add(self, producer_id: int, queue_number: int) -> int:
        """A new row for a key that has none."""
        row = self.count
        if row >> _CHUNK_BITS == len(self._chunks):
            self._chunks.append(bytearray(_CHUNK_ROWS * self.nbytes))
        _KEY_STRUCT.pack_into(*self.address(row), producer_id, queue_number)
        self.count += 1

        if 3 * self.count > 2 * len(self._slots):
            self._rebuild_slots()
            return row

        slots = self._slots
        mask = len(slots) - 1
        at = _hash(producer_id, queue_number) & mask
        while slots[at] >= 0:
            at = (at + 1) & mask

        # Readers may search at any time, so the row's key is written before the slot.
        slots[at] = row
        return row

    def _rebuild_slots(self) -> None:
        """Make the hash table of rows again, at most a third full. A taken slot leads to the next one."""
        size = _SLOTS_MIN
        while 3 * self.count > size:
            size *= 2

        hashes = np.empty(self.count, dtype=np.uint64)
        low = 0
        for rows in self.parts():
            hashes[low : low + len(rows)] = _hashes(rows["producer"], rows["queue"])
            low += len(rows)

        slots = np.full(size, -1, dtype=np.int32)
        unplaced = np.arange(self.count, dtype=np.int32)
        slot_of_row = (hashes & np.uint64(size - 1)).astype(np.int64)
        while len(unplaced):
            is_free = slots[slot_of_row] < 0
            # If several rows have one slot, the last row stays.
            slots[slot_of_row[is_free]] = unplaced[is_free]
            is_unplaced = slots[slot_of_row] != unplaced
            unplaced = unplaced[is_unplaced]
            slot_of_row = (slot_of_row[is_unplaced] + 1) & (size - 1)

        new_slots = array("i")
        new_slots.frombytes(slots.tobytes())
        self._slots = new_slots


def _hash(producer_id: int, queue_number: int) -> int:
    """The hash of a producer and a queue. Source: splitmix64, because producer ids may be numbers of any pattern."""
    mixed = producer_id ^ ((queue_number * _MIX[0]) & _MASK)
    mixed = ((mixed ^ (mixed >> 30)) * _MIX[1]) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX[2]) & _MASK
    return mixed ^ (mixed >> 31)


def _hashes(
    producer_ids: npt.NDArray[np.uint64], queue_numbers: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint64]:
    """`_hash` of each key."""
    first, second, third = (np.uint64(factor) for factor in _MIX)
    mixed: npt.NDArray[np.uint64] = producer_ids ^ (queue_numbers.astype(np.uint64) * first)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * second
    mixed = (mixed ^ (mixed >> np.uint64(27))) * third
    hashed: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashed


def _expiries(entries: Structs, lifetimes_ms: Int64s) -> Int64s:
    """When each entry expires. Args: `lifetimes_ms`: of the entries of each queue."""
    expiries: Int64s = entries["time_ms"] + lifetimes_ms[entries["queue"]]
    return expiries


def _chosen(
    parts: Iterable[Structs], is_chosen: Iterable[npt.NDArray[np.bool_]]
) -> Iterator[Structs]:
    for rows, chosen in zip(parts, is_chosen, strict=True):
        yield rows[chosen]


def _ascending(parts: Iterable[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    return np.sort(np.concatenate([np.empty(0, dtype=np.uint64), *parts]))


def _is_in(
    values: npt.NDArray[np.uint64], ascending: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Whether each value is one of `ascending`. `np.isin` would sort these again for each part of a table."""
    if not len(ascending):
        return np.zeros(len(values), dtype=np.bool_)
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[places] == values
    return found


class ProducerTable:
    """Entries by (producer id, topic, queue id), and the epochs of producers. Callers: as the module says."""

    def __init__(
        self,
        *,
        entries_max: int = 1_000_000,
        expiry_ms: int = 7 * 24 * 3_600_000,
        limit_option: str = "producer_entries_max",
    ) -> None:
        self.entries_max = entries_max
        #: the option that `entries_max` comes from, as errors name it
        self.limit_option = limit_option
        self.expiry_ms = expiry_ms
        self.clear()

    def set_expiry_ms(self, expiry_ms: int) -> None:
        """Let entries expire after another time from now on."""
        self.expiry_ms = expiry_ms
        # With the new time enough may have expired.
        self._next_drop_ms = 0

    def clear(self) -> None:
        """Forget everything."""
        self._rows = _Rows(ENTRY_DTYPE)
        self._epoch_rows = _Rows(EPOCH_DTYPE)
        #: the entries written last, the newest at the end
        self.recent: OrderedDict[EntryKey, ProducerQueue] = OrderedDict()
        #: the epochs of some producers
        self.recent_epochs: dict[int, int] = {}
        #: the queues that have entries
        self.queues: list[tuple[str, int]] = []
        self._queue_numbers: dict[tuple[str, int], int] = {}
        #: before this store time too few entries have expired to look for them
        self._next_drop_ms = 0

    # --- entries ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._rows.count

    def get(self, key: EntryKey) -> ProducerQueue | None:
        """An entry for reading. Callers: any thread."""
        entry = self.recent.get(key)
        return self._read(key) if entry is None else entry

    def open(self, key: EntryKey) -> ProducerQueue | None:
        """An entry that may be extended, and is kept as an object for a while. Callers: the writer."""
        recent = self.recent
        entry = recent.get(key)
        if entry is not None:
            recent.move_to_end(key)
            return entry
        entry = self._read(key)
        if entry is not None:
            self._keep_recent(key, entry)
        return entry

    def make(self, key: EntryKey) -> ProducerQueue:
        """An entry that `open` did not find."""
        producer_id, topic, queue_id = key
        entry = ProducerQueue()
        entry.row = self._rows.add(producer_id, self._queue_number((topic, queue_id)))
        self._write(entry)
        self._keep_recent(key, entry)
        return entry

    def _keep_recent(self, key: EntryKey, entry: ProducerQueue) -> None:
        self.recent[key] = entry
        if len(self.recent) > RECENT_MAX:
            # Write the row first: readers use it as soon as the object is gone.
            self._write(next(iter(self.recent.values())))
            self.recent.popitem(last=False)

    def _queue_number(self, queue: tuple[str, int]) -> int:
        number = self._queue_numbers.get(queue)
        if number is None:
            number = len(self.queues)
            self.queues.append(queue)
            self._queue_numbers[queue] = number
        return number

    def _read(self, key: EntryKey) -> ProducerQueue | None:
        """The entry of a row as an object; None without a row."""
        producer_id, topic, queue_id = key
        number = self._queue_numbers.get((topic, queue_id))
        # Read `_rows` once: another thread may replace it.
        rows = self._rows
        row = -1 if number is None else rows.find(producer_id, number)
        if row < 0:
            return None

        _, _, time_ms, end_offset, *run_fields = _ENTRY_STRUCT.unpack_from(*rows.address(row))
        first, last = Run(*run_fields[:3]), Run(*run_fields[3:])
        runs = [last] if first == last else [first, last]
        return ProducerQueue(
            next_sequence=last.first_sequence + last.count,
            end_offset=end_offset,
            # An entry without a run has zeros there.
            runs=runs if last.count else [],
            time_ms=time_ms,
            row=row,
        )

    def _write(self, entry: ProducerQueue) -> None:
        chunk, at = self._rows.address(entry.row)
        runs = entry.runs or [Run(0, 0, 0)]
        values = (entry.time_ms, entry.end_offset, *runs[0], *runs[-1])
        _VALUES_STRUCT.pack_into(chunk, at + _KEY_BYTES, *values)

    # --- epochs -----------------------------------------------------------------------------------

    def epoch(self, producer_id: int) -> int | None:
        """The highest epoch that a producer had; None: unknown. Callers: the writer."""
        known = self.recent_epochs.get(producer_id)
        if known is None:
            row = self._epoch_rows.find(producer_id, 0)
            if row < 0:
                return None
            known = int(_EPOCH_STRUCT.unpack_from(*self._epoch_rows.address(row))[3])
            self._keep_epoch(producer_id, known)
        return known

    def raise_epoch(self, producer_id: int, epoch: int, time_ms: int) -> None:
        """Remember the highest epoch of a producer."""
        known = self.epoch(producer_id)
        if known is not None and epoch <= known:
            return
        rows = self._epoch_rows
        row = rows.add(producer_id, 0) if known is None else rows.find(producer_id, 0)
        _EPOCH_STRUCT.pack_into(*rows.address(row), producer_id, 0, time_ms, epoch)
        self._keep_epoch(producer_id, epoch)

    def _keep_epoch(self, producer_id: int, epoch: int) -> None:
        if len(self.recent_epochs) >= RECENT_MAX:
            self.recent_epochs.clear()
        self.recent_epochs[producer_id] = epoch

    # --- the limit --------------------------------------------------------------------------------

    def check_room(self, producer_id: int, now_ms: int) -> None:
        """Check that the table has room for a new entry of a producer. In a full table expired entries are dropped.

        Args: `now_ms`: the store time. Raises: Rejected if too few entries are old enough.
        """
        if self._is_full(producer_id):
            self.drop_expired(now_ms)
            if self._is_full(producer_id):
                raise Rejected(
                    f"the shard remembers the sequences of {self._rows.count} (producer, topic, queue) entries and "
                    f"{self._epoch_rows.count} producers, the limit is {self.entries_max} "
                    f"({self.limit_option}), and too few were unused for {self.expiry_ms / 3_600_000:g} hours "
                    "(producer_expiry_hours). Use fewer producers or queues, a longer trigger interval of streams, or "
                    "start the cluster with fewer hours",
                    field="producer",
                    limit=self.entries_max,
                )

    def _is_full(self, producer_id: int) -> bool:
        most = self.entries_max
        epochs_full = self._epoch_rows.count >= most and self.epoch(producer_id) is None
        return self._rows.count >= most or epochs_full

    def drop_expired(self, now_ms: int) -> int:
        """Forget the expired entries, and expired producers without any. Returns: how many entries.

        Producers whose last entries were of the staged topic are forgotten with them.
        """
        if now_ms < self._next_drop_ms:
            return 0

        self._write_recent()
        lifetimes_ms = self._lifetimes_ms()
        is_kept = [_expiries(rows, lifetimes_ms) > now_ms for rows in self._rows.parts()]
        # Readers use the old rows until the new ones are complete.
        kept = _Rows(ENTRY_DTYPE, _chosen(self._rows.parts(), is_kept))
        alive = _ascending(rows["producer"] for rows in kept.parts())
        is_alive = [_is_in(rows["producer"], alive) for rows in self._epoch_rows.parts()]

        is_staged = np.array([topic == STAGED_TOPIC for topic, _ in self.queues], dtype=np.bool_)
        ended = _ascending(
            rows["producer"][~chosen & is_staged[rows["queue"]]]
            for rows, chosen in zip(self._rows.parts(), is_kept, strict=True)
        )
        is_kept = [
            with_entry
            | (rows["time_ms"] + self.expiry_ms > now_ms) & ~_is_in(rows["producer"], ended)
            for rows, with_entry in zip(self._epoch_rows.parts(), is_alive, strict=True)
        ]
        epochs = _Rows(EPOCH_DTYPE, _chosen(self._epoch_rows.parts(), is_kept))
        idle_expiries = [
            rows["time_ms"][chosen & ~with_entry] + self.expiry_ms
            for rows, chosen, with_entry in zip(
                self._epoch_rows.parts(), is_kept, is_alive, strict=True
            )
        ]

        dropped = self._rows.count - kept.count
        if dropped:
            self._rows = kept
            self.recent = OrderedDict()
        if epochs.count < self._epoch_rows.count:
            self._epoch_rows = epochs
            self.recent_epochs = {}

        self._next_drop_ms = min(
            now_ms + min(STAGED_EXPIRY_MS, self.expiry_ms),
            self._worth_dropping_ms(_expiries(rows, lifetimes_ms) for rows in kept.parts()),
            self._worth_dropping_ms(idle_expiries),
        )
        return dropped

    def _lifetimes_ms(self) -> Int64s:
        """How long an entry of each queue is kept after its last write."""
        staged_ms = min(STAGED_EXPIRY_MS, self.expiry_ms)
        lifetimes_ms = [
            staged_ms if topic == STAGED_TOPIC else self.expiry_ms for topic, _ in self.queues
        ]
        return np.array(lifetimes_ms, dtype=np.int64)

    def _worth_dropping_ms(self, expiries: Iterable[Int64s]) -> int:
        """When so many rows have expired that dropping them is worth its time. Args: `expiries`: of all rows."""
        all_expiries = np.concatenate([np.empty(0, dtype=np.int64), *expiries])
        fewest = self.entries_max // DROPPED_SHARE
        if len(all_expiries) <= fewest:
            return _NEVER_MS
        return int(np.partition(all_expiries, fewest)[fewest])

    def _write_recent(self) -> None:
        for entry in self.recent.values():
            self._write(entry)

    # --- as columns -------------------------------------------------------------------------------

    def entries(self) -> Iterator[Structs]:
        """All entries, of ENTRY_DTYPE, not copied. Their queues are indexes of `queues`."""
        self._write_recent()
        return self._rows.parts()

    def epoch_rows(self) -> Iterator[Structs]:
        """All epochs, of EPOCH_DTYPE. Not copied."""
        return self._epoch_rows.parts()

    def load(self, entries: list[Structs], epochs: list[Structs]) -> None:
        """Add these rows, whose queues have numbers of `queue_numbers`."""
        self._write_recent()
        self.recent.clear()
        self.recent_epochs.clear()
        self._rows = _Rows(ENTRY_DTYPE, [*self._rows.parts(), *entries])
        self._epoch_rows = _Rows(EPOCH_DTYPE, [*self._epoch_rows.parts(), *epochs])
        self._next_drop_ms = 0

    def queue_numbers(self, queues: list[tuple[str, int]]) -> npt.NDArray[np.uint32]:
        """The numbers that queues have here."""
        return np.array([self._queue_number(queue) for queue in queues], dtype=np.uint32)
