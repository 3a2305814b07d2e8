"""One queue of a group: how each offset between the low mark and the next one stands, as columns.

The columns are rings: an offset's place is its last bits. They grow and shrink with the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from raymq.store.state.topics import QueueKey

from .entries import LeasedPart, QueueEntry
from .offsets import OffsetColumn

#: how an offset stands
FREE, OPEN, WAITING, SETTLED = 0, 1, 2, 3
#: a time that does not come
NEVER = np.iinfo(np.int64).max

#: attempts that are counted
ATTEMPTS_MAX = (1 << 16) - 1
#: offsets of one entry of a snapshot
_ENTRY_OFFSETS = 8_192
#: offsets that a queue without any has room for
_FIRST_ROOM = 64
#: columns of so many places shrink when this share of them, one of so many, is left
_SHRUNK_ROOM_MIN, _SHARE_LEFT = 4_096, 16
#: offsets that the low mark passes in one look
_LOOK = 4_096


class QueueColumns:
    """How the offsets of one queue stand. Not thread-safe: the put lock guards it."""

    def __init__(self, low: int) -> None:
        #: everything below is settled: the group's committed offset
        self.low = low
        #: the first offset that was never leased
        self.next = low
        #: offsets that are leased and not settled
        self.open_count = 0
        #: ... and those that wait
        self.waiting_count = 0
        #: offsets that were settled because their messages were deleted before
        self.expired_count = 0
        self._make(_FIRST_ROOM)

    def _make(self, room: int) -> None:
        self._mask = room - 1
        self.status = np.zeros(room, dtype=np.uint8)
        #: of the lease, where an offset is open
        self.number = np.zeros(room, dtype=np.int64)
        #: deliveries so far
        self.attempts = np.zeros(room, dtype=np.uint16)
        #: where an offset waits: its delay
        self.delay_ms = np.zeros(room, dtype=np.uint32)
        #: when it may be leased again, on the leader's monotonic clock. No record has it
        self.due_ms = np.full(room, NEVER, dtype=np.int64)
        #: slot of the message's key, where a leader has looked at it. No record has it
        self.slot = np.zeros(room, dtype=np.uint16)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(each.nbytes for each in self._columns())

    @property
    def highest_attempts(self) -> int:
        """The most deliveries of an offset that is not settled; 0: there is none. Any thread may read it."""
        status, attempts = self.status, self.attempts
        if len(status) != len(attempts):
            # They are just made larger or smaller.
            return 0
        left = attempts[(status == OPEN) | (status == WAITING)]
        return int(left.max()) if len(left) else 0

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.status, self.number, self.attempts, self.delay_ms, self.due_ms, self.slot

    # --- places -----------------------------------------------------------------------------------

    def at(self, offsets: OffsetColumn) -> OffsetColumn:
        """The places of offsets in the columns."""
        return offsets & self._mask

    def inside(self, offsets: OffsetColumn) -> npt.NDArray[np.bool_]:
        """Which offsets are between the low mark and the next one."""
        return (offsets >= self.low) & (offsets < self.next)

    def unsettled(self, stop: int | None = None) -> OffsetColumn:
        """The offsets below `stop` that are open or wait, ascending. Cost: that of the window."""
        offsets = np.arange(self.low, self.next if stop is None else min(stop, self.next))
        return np.asarray(offsets[self.status[self.at(offsets)] != SETTLED])

    def open_under(self, number: int, offsets: OffsetColumn) -> OffsetColumn:
        """Those of these offsets that a lease still holds."""
        inside = offsets[self.inside(offsets)]
        places = self.at(inside)
        is_held = (self.status[places] == OPEN) & (self.number[places] == number)
        return np.asarray(inside[is_held])

    def permitted(self, offsets: OffsetColumn, now_ms: int) -> npt.NDArray[np.bool_]:
        """Which offsets may be leased again by now."""
        places = self.at(offsets)
        status = self.status[places]
        is_left = (status == OPEN) | (status == WAITING)
        return np.asarray(self.inside(offsets) & is_left & (self.due_ms[places] <= now_ms))

    def _make_room(self, next_offset: int) -> None:
        """Let the columns hold the offsets up to this one."""
        room = self._mask + 1
        wanted = next_offset - self.low
        if wanted <= room:
            return
        while room < wanted:
            room *= 2
        self._resize(room)

    def _resize(self, room: int) -> None:
        """Make columns of so many places, which has room for the window."""
        offsets = np.arange(self.low, self.next)
        before, columns = self.at(offsets), self._columns()
        self._make(room)
        for old, new in zip(columns, self._columns(), strict=True):
            new[self.at(offsets)] = old[before]

    # --- records ----------------------------------------------------------------------------------

    def lease(self, number: int, part: LeasedPart) -> OffsetColumn:
        """Account for the part of a lease. Returns: the leases that lost an offset to it, one for each offset.

        Raises: ValueError for offsets that cannot be leased.
        """
        fresh = self._check_lease(part)
        self._make_room(self.next + len(fresh))
        before = self.next
        self.next += len(fresh)

        places = self.at(fresh)
        self.attempts[places] = 0
        if len(part.before):
            used = fresh[np.isin(fresh, part.filtered, assume_unique=True, invert=True)]
            self.attempts[self.at(used)] = part.before

        self._set(part.filtered[part.filtered >= before], SETTLED)
        self._set(part.passed, WAITING)
        places = self.at(part.taken)
        lost = self.number[places[(part.taken < before) & (self.status[places] == OPEN)]]
        self._set(part.taken, OPEN, number=number)
        self._count(places, 1)
        self.open_count += len(part.taken) - len(lost)
        self.advance()
        return np.asarray(lost)

    def _check_lease(self, part: LeasedPart) -> OffsetColumn:
        """The offsets of a part that were never leased, which follow each other. Raises: ValueError."""
        offsets = np.concatenate((part.taken, part.filtered, part.passed))
        old = part.taken[part.taken < self.next]
        if len(old):
            status = self.status[self.at(old)]
            if int(old[0]) < self.low or ((status != OPEN) & (status != WAITING)).any():
                raise ValueError(f"a lease of settled offsets of {part.key}")

        fresh = np.sort(offsets[offsets >= self.next])
        if len(fresh) and (
            int(fresh[-1]) != self.next + len(fresh) - 1 or (np.diff(fresh) != 1).any()
        ):
            raise ValueError(f"a lease of {part.key} that leaves offsets out")
        if len(offsets) - len(old) != len(fresh):
            raise ValueError(f"a lease of {part.key} that filters offsets of another one")
        if len(part.before) not in (0, len(fresh) - len(part.filtered)):
            raise ValueError(f"a lease of {part.key} with attempts of other offsets")
        _check_range(part.key, part.before, ATTEMPTS_MAX)
        return fresh

    def settle(self, offsets: OffsetColumn) -> None:
        """Account for settled offsets, which were open or waiting."""
        self._leave_open(offsets)
        self._set(offsets, SETTLED)

    def wait(self, offsets: OffsetColumn, delay_ms: int, *, is_counted: bool) -> None:
        """Account for offsets that wait, which were open. Args: `is_counted`: their attempt counts."""
        self._leave_open(offsets)
        self._set(offsets, WAITING, delay_ms=delay_ms)
        if not is_counted:
            self._count(self.at(offsets), -1)

    def _leave_open(self, offsets: OffsetColumn) -> None:
        self.open_count -= int(np.count_nonzero(self.status[self.at(offsets)] == OPEN))

    def _count(self, places: OffsetColumn, by: int) -> None:
        counted = self.attempts[places].astype(np.int64) + by
        self.attempts[places] = np.clip(counted, 0, ATTEMPTS_MAX)

    def _set(
        self, offsets: OffsetColumn, status: int, *, number: int = 0, delay_ms: int = 0
    ) -> None:
        places = self.at(offsets)
        self.waiting_count -= int(np.count_nonzero(self.status[places] == WAITING))
        if status == WAITING:
            self.waiting_count += len(places)
        self.status[places] = status
        self.number[places] = number
        self.delay_ms[places] = delay_ms

    def trim(self, min_offset: int) -> None:
        """Settle all offsets below this one: their messages are deleted."""
        if min_offset <= self.low:
            return
        left = self.unsettled(min_offset)
        self.expired_count += len(left)
        self._leave_open(left)
        if min_offset >= self.next:
            self.expired_count += min_offset - self.next
            self._set(np.arange(self.low, self.next), FREE)
            self.low = self.next = min_offset
        else:
            self._set(left, SETTLED)
            self.advance()

    def advance(self) -> None:
        """Move the low mark over what is settled."""
        while self.low < self.next:
            first = self.low & self._mask
            stop = min(first + _LOOK, self._mask + 1, first + self.next - self.low)
            is_left = self.status[first:stop] != SETTLED
            passed = int(is_left.argmax()) if is_left.any() else stop - first
            # Places that are free are alike, so that equal states have equal columns.
            self.status[first : first + passed] = FREE
            self.attempts[first : first + passed] = 0
            self.low += passed
            if passed < stop - first:
                break

        room = self._mask + 1
        if room >= _SHRUNK_ROOM_MIN and (self.next - self.low) * _SHARE_LEFT <= room:
            self._resize(room // 4)

    # --- snapshots --------------------------------------------------------------------------------

    def entries(self, key: QueueKey) -> Iterator[QueueEntry]:
        """The columns as entries of a snapshot."""
        first = self.low
        while True:
            stop = min(first + _ENTRY_OFFSETS, self.next)
            offsets = np.arange(first, stop)
            is_settled = self.status[self.at(offsets)] == SETTLED
            places = self.at(offsets[~is_settled])
            yield QueueEntry(
                key,
                self.low,
                first,
                stop,
                offsets[is_settled],
                np.where(self.status[places] == OPEN, self.number[places], 0),
                self.attempts[places].astype(np.int64),
                self.delay_ms[places].astype(np.int64),
            )
            first = stop
            if first == self.next:
                return

    def load(self, entry: QueueEntry) -> None:
        """Take the next entry of a snapshot. Raises: ValueError unless it goes on where the last one ended."""
        if (entry.low, entry.first) != (self.low, self.next):
            raise ValueError(f"offsets {entry.first} of {entry.key} do not follow {self.next}")
        offsets = np.arange(entry.first, entry.stop)
        if len(entry.settled) and not (
            entry.first <= entry.settled[0] and entry.settled[-1] < entry.stop
        ):
            raise ValueError(f"settled offsets of {entry.key} are of another part")
        _check_range(entry.key, entry.numbers, NEVER)
        _check_range(entry.key, entry.attempts, ATTEMPTS_MAX)
        _check_range(entry.key, entry.delays_ms, (1 << 32) - 1)

        self._make_room(entry.stop)
        self.next = entry.stop
        is_left = np.ones(len(offsets), dtype=np.bool_)
        is_left[entry.settled - entry.first] = False
        self._set(entry.settled, SETTLED)
        places = self.at(offsets[is_left])
        self.status[places] = np.where(entry.numbers > 0, OPEN, WAITING)
        self.number[places] = entry.numbers
        self.attempts[places] = entry.attempts
        self.delay_ms[places] = entry.delays_ms
        open_count = int(np.count_nonzero(entry.numbers > 0))
        self.open_count += open_count
        self.waiting_count += len(entry.numbers) - open_count


def _check_range(key: QueueKey, column: OffsetColumn, most: int) -> None:
    """Raises: ValueError unless all numbers are between 0 and `most`."""
    if len(column) and not (column.min() >= 0 and column.max() <= most):
        raise ValueError(f"a column of {key} has a number that is not between 0 and {most}")
