"""The ends of the log and of its consume queues, and the last look at the clocks, in one page that processes map.

It survives kill -9 exactly, as the page cache does, and a reboot as a lower bound. A mark is written before any
answer that relies on it, by one aligned 8-byte store: `struct.pack_into` was measured to tear.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from raymq.store.base.errors import broken
from raymq.store.base.files import Files

#: bytes of `raymq/marks`: one page
FILE_BYTES = 4096
_APPENDED, _SYNCED, _CONFIRMED, _QUEUES_SYNCED, _SNAPSHOT, _SNAPSHOT_BEFORE, _DISPATCHED = range(7)
_WORDS = 7
#: the words of `clock_look` follow those of the offsets
_LOOK_WORDS = slice(_WORDS, _WORDS + 5)


class ClockLook(NamedTuple):
    """Wall and monotonic clock at one time, in ms, and how far the wall clock is not believed (`BelievedClock`).

    The order is that of the stores: a kill between two of them never loses a jump.
    """

    #: by how much the wall clock jumped ahead, and the monotonic time of the jump
    jumped_ms: int
    jumped_at_ms: int
    wall_ms: int
    monotonic_ms: int
    #: of the boot whose monotonic clock it was; 0: there was no look
    boot_id_hash: int


class _Word:
    """One offset of the page, by its index. If it `rises`, a lower value is an error."""

    def __init__(self, index: int, *, rises: bool = False) -> None:
        self._index = index
        self._rises = rises

    def __get__(self, marks: Marks, owner: type[Marks]) -> int:
        return marks._words[self._index]

    def __set__(self, marks: Marks, offset: int) -> None:
        words, index = marks._words, self._index
        if self._rises and offset < words[index]:
            raise broken("a mark moves up", mark=index, is_=words[index], to=offset)
        words[index] = offset


class Marks:
    """Offsets of the log. Callers: one process writes.

    Invariant: appended_end, synced_end and confirmed_end move only up, but for `lower`.
    """

    #: end of the last append
    appended_end = _Word(_APPENDED, rises=True)
    #: everything below this was synced
    synced_end = _Word(_SYNCED, rises=True)
    #: the confirmed end
    confirmed_end = _Word(_CONFIRMED, rises=True)
    #: everything below this is in synced consume queues; it falls when those are rebuilt
    queues_synced_end = _Word(_QUEUES_SYNCED)
    #: Up to here consume queues agree exactly with the log, in the page cache at least; 0: unknown.
    #: Invariant: each queue ends at the next offset that the state has here.
    dispatched_end = _Word(_DISPATCHED)

    def __init__(self, fd: int, view: memoryview, files: Files) -> None:
        self._fd = fd
        self._view = view
        self._words = view.cast("q")
        self._files = files

    @classmethod
    def open(cls, path: Path, *, files: Files) -> Marks:
        """Open or create the page."""
        fd = files.open_file(path, create=True)
        if files.size(fd) < FILE_BYTES:
            # Reserve the blocks first: a store into a hole of a mapped file on a full disk is SIGBUS, not an error.
            files.allocate(fd, FILE_BYTES)
            files.sync(fd)
            files.sync_dir(path.parent)
        return cls(fd, files.map_words(fd, FILE_BYTES), files)

    @property
    def snapshots(self) -> tuple[int, int]:
        """Offsets of the newest snapshot of the state and of the one before it.

        They are a hint: no snapshot may be there, because the kernel decides when the page reaches the disk.
        """
        return self._words[_SNAPSHOT], self._words[_SNAPSHOT_BEFORE]

    def note_snapshot(self, offset: int) -> None:
        """Note that a snapshot begins at `offset`."""
        self._words[_SNAPSHOT_BEFORE] = self._words[_SNAPSHOT]
        self._words[_SNAPSHOT] = offset

    @property
    def clock_look(self) -> ClockLook:
        """The last look at the clocks, by any process of this replica."""
        return ClockLook(*self._words[_LOOK_WORDS].tolist())

    @clock_look.setter
    def clock_look(self, look: ClockLook) -> None:
        for index, value in enumerate(look, start=_WORDS):
            self._words[index] = value

    def forget_queues(self, offset: int) -> None:
        """Note that consume queues are rebuilt from `offset` on. Durable: at return."""
        self._words[_QUEUES_SYNCED] = min(offset, self._words[_QUEUES_SYNCED])
        self._words[_DISPATCHED] = 0
        self.sync()

    def lower(self, offset: int) -> None:
        """Lower every mark to `offset`, before a cut. Durable: at return."""
        if self._words[_DISPATCHED] > offset:
            # Consume queues reach beyond it: the next start must check them.
            self._words[_DISPATCHED] = 0
        for index in range(_WORDS):
            if self._words[index] > offset:
                self._words[index] = offset
        self.sync()

    def sync(self) -> None:
        """Make all marks durable: at return."""
        self._files.sync(self._fd)

    def close(self) -> None:
        """Unmap the page and close its file."""
        self._words.release()
        self._files.unmap(self._view)
        self._files.close(self._fd)


class MarkValues(NamedTuple):
    """The marks as they were in the file."""

    appended_end: int = 0
    synced_end: int = 0
    confirmed_end: int = 0
    queues_synced_end: int = 0


def read_marks(path: Path, *, files: Files) -> MarkValues:
    """The marks without opening them for writing; zeros if there are none."""
    data = files.read_file(path) if files.exists(path) else b""
    return MarkValues(*struct.unpack_from("=4q", data)) if len(data) >= FILE_BYTES else MarkValues()
