"""RocketMQ's timer wheel, a cache: one slot per second, over fourteen days, with the last unit of each second.

A slot: long time in seconds, long position of its first unit, long of its last, int how many wait, int magic (0).
A slot counts for a second only when its time is that second.
Source: TimerWheel, Slot, RocketMQ 5.3.3.
"""

from __future__ import annotations

import heapq
import struct
from pathlib import Path
from typing import NamedTuple

from raymq.store.base.files import Files

from .timer_rule import PRECISION_MS, WHEEL_SLOTS

SLOT = struct.Struct(">qqqii")
FILE_BYTES = SLOT.size * WHEEL_SLOTS


class Slot(NamedTuple):
    """A second that timers wait for, with the positions of its first and last unit in the timer log."""

    first: int
    last: int
    #: cancellations count -1, as in RocketMQ
    waiting: int


class TimerWheel:
    """The seconds that anything waits for, in memory. `sync` writes them to RocketMQ's file.

    Callers: one thread; `first_ms` and `waiting`: any.
    """

    def __init__(self, path: Path, *, files: Files) -> None:
        self._path = path
        self._files = files
        self._fd = -1
        self.clear()

    def clear(self) -> None:
        """Forget every slot. The file is not touched."""
        self._slots: dict[int, Slot] = {}
        self._order: list[int] = []
        self._changed: set[int] = set()
        #: the latest second that a timer waits for
        self.latest_ms = 0

    def first_ms(self) -> int | None:
        """The second that is due first; None when nothing waits."""
        return next(iter(self._order), None)

    def get(self, time_ms: int) -> Slot | None:
        """The slot of a second."""
        return self._slots.get(time_ms)

    def waiting(self, time_ms: int) -> int:
        """How many timers wait for a second."""
        slot = self._slots.get(time_ms)
        return 0 if slot is None else max(0, slot.waiting)

    def put(self, time_ms: int, slot: Slot) -> None:
        """Set the slot of a second."""
        if time_ms not in self._slots:
            heapq.heappush(self._order, time_ms)
            self.latest_ms = max(self.latest_ms, time_ms)
        self._slots[time_ms] = slot
        self._changed.add(time_ms)

    def drop_first(self) -> None:
        """Remove the earliest second, which is delivered. Its slot in the file stays, as RocketMQ leaves it."""
        time_ms = heapq.heappop(self._order)
        del self._slots[time_ms]
        if not self._order:
            self.latest_ms = 0

    def create(self) -> None:
        """Make an empty file in place of any old one. Raises: StorageFull, OSError."""
        self.close()
        self._fd = self._files.open_file(self._path, create=True)
        self._files.truncate(self._fd, 0)
        self._files.truncate(self._fd, FILE_BYTES)
        self._files.sync(self._fd)
        self._files.sync_dir(self._path.parent)

    def sync(self) -> None:
        """Write the slots that changed. Durable: at return. Raises: StorageFull, OSError."""
        for time_ms in sorted(self._changed):
            slot = self._slots.get(time_ms)
            if slot is not None:
                data = SLOT.pack(time_ms // PRECISION_MS, slot.first, slot.last, slot.waiting, 0)
                index = time_ms // PRECISION_MS % WHEEL_SLOTS
                self._files.pwrite(self._fd, data, index * SLOT.size)
        if self._changed:
            self._files.sync_data(self._fd)
        self._changed.clear()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1
