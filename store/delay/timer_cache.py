"""The timer wheel and the timer log together: a cache of the timer topic, rebuilt when it may be wrong.

On disk they are complete up to the offset in `config/timercheck`. Units after it are cut and rebuilt at the start.
That file has 4096 bytes. It begins with seven big-endian longs::

     0  read_time_ms          the second that is read next
     8  log_end               end of the synced timer log
    16  queue_offset          next offset of the timer topic
    24  master_queue_offset   the same of the master
    32  state_version         of the data version
    40  version_time_ms
    48  counter

Source: TimerMessageStore#recover, #doEnqueue, TimerCheckpoint, RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Corrupt
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.log.commit_log import CommitLog

from .timer_log import NONE, TIMER_UNIT_BYTES, TIMER_UNIT_DTYPE, TimerLog, TimerUnits
from .timer_rule import MAGIC_DELETE, PRECISION_MS, ROLL_WINDOW_MS, WHEEL_SLOTS, Due
from .timer_wheel import Slot, TimerWheel

CHECKPOINT_BYTES = 4096
#: state version that RayMQ writes. RocketMQ replaces it by its own with the first second that it has read
OURS = int.from_bytes(b"RayMQ", "big")
_LONGS = struct.Struct(">7q")
_MAGIC_ALL = 7
#: a unit has 4 bytes for second minus store time: an earlier store time does not fit
_BEFORE_MAX_MS = 24 * 86_400 * PRECISION_MS


class TimerCheckpoint(NamedTuple):
    """How far the timer's files are complete on disk."""

    read_time_ms: int
    log_end: int
    queue_offset: int
    master_queue_offset: int
    state_version: int = 0
    version_time_ms: int = 0
    counter: int = 0

    @property
    def foreign(self) -> bool:
        """Whether RocketMQ wrote the file."""
        return self.state_version != OURS


def read_checkpoint(path: Path, *, files: Files) -> TimerCheckpoint | None:
    """The file's content; None when it is missing or too short."""
    if not files.exists(path):
        return None
    with files.opened(path, writable=False) as fd:
        data = files.pread(fd, _LONGS.size, 0)
    return TimerCheckpoint(*_LONGS.unpack(data)) if len(data) == _LONGS.size else None


def write_checkpoint(path: Path, checkpoint: TimerCheckpoint, *, files: Files) -> None:
    """Write the file. Durable: all of it, or the old content. Raises: StorageFull, OSError."""
    files.make_dirs(path.parent)
    files.write_file_atomic(path, _LONGS.pack(*checkpoint).ljust(CHECKPOINT_BYTES, b"\0"))


def remove_checkpoint(path: Path, *, files: Files) -> None:
    """Delete the file: the timer's files are not trusted. Durable."""
    if files.exists(path):
        files.unlink(path)
        files.sync_dir(path.parent)


class TimerCache:
    """Which record waits for which second. Callers: one thread."""

    def __init__(self, log: CommitLog) -> None:
        self._files = log.files
        self._checkpoint_path = log.root / "config" / "timercheck"
        self._log_directory = log.root / "timerlog"
        self._timer_log = TimerLog(
            self._log_directory, log.config.timer_log_file_size_bytes, files=self._files
        )
        self.wheel = TimerWheel(log.root / "timerwheel", files=self._files)
        #: records above this were not in the log that was recovered, nor added since
        self._known_end = log.end if log.recovered is None else log.recovered.end
        self._last: TimerCheckpoint | None = None

    def read_checkpoint(self) -> TimerCheckpoint | None:
        """The content of `config/timercheck`."""
        return read_checkpoint(self._checkpoint_path, files=self._files)

    def load(self, checkpoint: TimerCheckpoint | None, time_ms: int) -> bool:
        """Load the complete part of the files, for the seconds from `time_ms` on.

        Returns: whether the files are valid. If not, the cache is empty and must be filled from the timer topic.
        """
        self.wheel.clear()
        if checkpoint is not None and self._load(checkpoint, time_ms):
            self._last = checkpoint
            self.wheel.create()
            return True
        self.reset()
        self.wheel.create()
        return False

    def reset(self) -> None:
        """Delete the cache. Durable: no later start reads its remains."""
        remove_checkpoint(self._checkpoint_path, files=self._files)
        self._timer_log.close()
        self._files.remove_tree(self._log_directory)
        self._timer_log.load(0)
        self.wheel.clear()
        self._last = None

    def _load(self, checkpoint: TimerCheckpoint, time_ms: int) -> bool:
        """Open the timer log and check its units. Returns: False if the files are not valid."""
        try:
            self._timer_log.load(checkpoint.log_end)
            if not self._timer_log.holds(checkpoint.log_end):
                return False
            positions, units = self._timer_log.units(time_ms - ROLL_WINDOW_MS - PRECISION_MS)
        except Corrupt:
            return False

        records = units["position"].astype(np.int64)
        ends = records + units["record_size"]
        magic = units["magic"]
        sizes_right = (units["size"] == TIMER_UNIT_BYTES).all()
        magics_right = ((magic > 0) & (magic <= _MAGIC_ALL)).all()
        ascending = (records >= 0).all() and (records[1:] >= ends[:-1]).all()
        within_log = not len(ends) or int(ends[-1]) <= self._known_end
        if not (sizes_right and magics_right and ascending and within_log):
            return False

        return self._fill(positions, units, time_ms)

    def _fill(self, positions: Int64s, units: TimerUnits, time_ms: int) -> bool:
        """Set the wheel from the units. Returns: False if a unit does not name the one before it."""
        slots = units["enqueue_time_ms"].astype(np.int64) + units["delay_ms"]
        if bool(((units["delay_ms"] == -_BEFORE_MAX_MS) & (slots >= time_ms)).any()):
            return False

        rows = np.flatnonzero(slots >= time_ms)
        rows = rows[np.argsort(slots[rows], kind="stable")]
        slots = slots[rows]
        unit_positions = positions[rows]

        previous = units["previous"][rows].astype(np.int64)
        begins_second = slots[1:] != slots[:-1]
        is_linked = (previous[1:] == unit_positions[:-1]) | (previous[1:] == NONE)
        if not (begins_second | is_linked).all():
            return False

        waiting = np.where(units["magic"][rows] & MAGIC_DELETE, -1, 1)
        for low, high in _runs(slots):
            first, last = int(unit_positions[low]), int(unit_positions[high - 1])
            slot = Slot(first, last, int(waiting[low:high].sum()))
            self.wheel.put(int(slots[low]), slot)
        return True

    def takes(self, slots_ms: Int64s) -> bool:
        """Whether these seconds and those that wait lie within the wheel's fourteen days."""
        first_ms = self.wheel.first_ms()
        seconds = (
            slots_ms if first_ms is None else np.append(slots_ms, (first_ms, self.wheel.latest_ms))
        )
        return not len(seconds) or int(np.ptp(seconds)) < WHEEL_SLOTS * PRECISION_MS

    def add(self, due: Due, positions: Int64s, sizes: Int64s, time_ms: int) -> None:
        """Add records of the timer topic, in its order. Records before the second `time_ms` do not wait any more.

        Raises: StorageFull, OSError. The cache must be loaded again then.
        """
        count = len(positions)
        unit_positions = self._timer_log.next_positions(count)

        units = np.zeros(count, dtype=TIMER_UNIT_DTYPE)
        units["size"] = TIMER_UNIT_BYTES
        units["magic"] = due.magic
        units["enqueue_time_ms"] = due.enqueue_ms
        units["delay_ms"] = np.maximum(due.slot_ms - due.enqueue_ms, -_BEFORE_MAX_MS)
        units["position"] = positions
        units["record_size"] = sizes
        units["topic_hash"] = due.topic_hash

        order = np.argsort(due.slot_ms, kind="stable")
        slots, in_order = due.slot_ms[order], unit_positions[order]
        previous = np.full(count, NONE, dtype=np.int64)
        previous[1:] = np.where(slots[1:] == slots[:-1], in_order[:-1], NONE)
        weights = np.where(due.magic[order] & MAGIC_DELETE, -1, 1)

        changed: list[tuple[int, Slot]] = []
        for low, high in _runs(slots):
            second_ms = int(slots[low])
            if second_ms < time_ms:
                previous[low:high] = NONE
                continue
            first = int(in_order[low])
            waiting = int(weights[low:high].sum())
            old = self.wheel.get(second_ms)
            if old is not None:
                previous[low] = old.last
                first = old.first
                waiting += old.waiting
            changed.append((second_ms, Slot(first, int(in_order[high - 1]), waiting)))

        units["previous"][order] = previous
        self._timer_log.append(units)
        for second_ms, slot in changed:
            self.wheel.put(second_ms, slot)
        self._known_end = max(self._known_end, int(positions[-1] + sizes[-1]))

    def units_of(self, time_ms: int) -> TimerUnits:
        """The units of a second in their order."""
        slot = self.wheel.get(time_ms)
        return self._timer_log.chain(NONE if slot is None else slot.last)

    def sync(self, read_time_ms: int, queue_offset: int, now_ms: int) -> None:
        """Complete the files up to `read_time_ms` and `queue_offset`. Raises: StorageFull, OSError.

        After the clock was set back a wheel may have more than fourteen days. No file can hold it, so none is written.
        Callers: only if the log is synced up to the last record that the cache has.
        """
        if not self.takes(np.empty(0, np.int64)):
            remove_checkpoint(self._checkpoint_path, files=self._files)
            self._last = None
            return

        last = self._last
        progress = (read_time_ms, self._timer_log.end, queue_offset, queue_offset)
        if last is not None and last[:4] == progress:
            return

        self._timer_log.sync()
        self.wheel.sync()
        fail_point("timer.files_synced")
        counter = 1 if last is None else last.counter + 1
        checkpoint = TimerCheckpoint(*progress, OURS, now_ms, counter)
        write_checkpoint(self._checkpoint_path, checkpoint, files=self._files)
        self._last = checkpoint

        # No record waits for longer than the roll window.
        self._timer_log.drop(read_time_ms - ROLL_WINDOW_MS - PRECISION_MS)

    def close(self) -> None:
        """Close every file."""
        self._timer_log.close()
        self.wheel.close()


def _runs(values: Int64s) -> list[tuple[int, int]]:
    """The runs of equal neighbours: (first row, end)."""
    if not len(values):
        return []
    cuts = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(values)], strict=True))
