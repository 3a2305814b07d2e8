"""All consume queues of a store, by topic and queue.

Source: ConsumeQueueStore, RocketMQ 5.3.3.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.segments.segment_paths import file_name
from raymq.store.state.topics import QueueKey

from .consume_queue import ConsumeQueue, queue_directories, queue_directory
from .queue_files import OpenFiles, QueueFile

#: for more dirty queues than this, writing begins in all of them before the first sync
SYNCED_ALONE_MAX = 16


class ConsumeQueues:
    """The consume queues of a store, some of them not open yet.

    Callers: one thread appends and truncates, one syncs, any may look up and read.
    """

    def __init__(self, root: Path, config: StoreConfig, *, files: Files) -> None:
        self._root = root
        self._directory = root / "consumequeue"
        self._file_size = config.consume_queue_file_size_bytes
        #: units of one file
        self.file_units = self._file_size // fmt.QUEUE_UNIT_BYTES
        self._files = files

        #: files that have a descriptor
        self.opened = OpenFiles(files)
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        #: queues that are not open yet, and their ends
        self._unopened: dict[QueueKey, int] = {}
        #: the physical offset up to which unopened queues are dispatched, and the log's start
        self._dispatched = self._min_physical = 0
        #: an earlier process may have left unopened queues unsynced
        self._unsynced = False
        self._lock = threading.Lock()
        #: called if a queue does not agree with the log, or will not
        self.on_differing: Callable[[], None] = lambda: None
        #: called with the range of the log whose records may have lost their units
        self.on_lost_units: Callable[[int, int], None] = lambda start, stop: None
        #: the first offset that a queue may have: those below were of a deleted topic
        self.first_offset: Callable[[str, int], int] = lambda topic, queue_id: 0

    def load(self, *, after_crash: bool, sound_below: int, erases: bool = True) -> None:
        """Find and recover all queues. Args: as of `ConsumeQueue.recover`. Raises: Corrupt."""
        self._unopened = {}
        for topic, queue_id, _ in queue_directories(self._directory, self._files):
            queue = self.get(topic, queue_id)
            queue.load()
            queue.recover(after_crash=after_crash, sound_below=sound_below, erases=erases)
            if after_crash:
                queue.note_unsynced()

    def load_known_ends(
        self, ends: dict[QueueKey, int], dispatched: int, *, unsynced: bool
    ) -> None:
        """Take the known end of each queue, and open a queue at its first use. Callers: instead of `load`.

        Args: `dispatched`: all messages below this physical offset have units. `unsynced`: some units may not be on
        disk.
        """
        self._unopened = {key: end for key, end in ends.items() if end}
        self._dispatched, self._unsynced = dispatched, unsynced

    def is_unopened(self, topic: str, queue_id: int) -> bool:
        """Whether a queue of `load_known_ends` was not opened yet."""
        return (topic, queue_id) in self._unopened

    def missing(self) -> list[QueueKey]:
        """The queues of `load_known_ends` whose last file is gone."""
        return [key for key, end in self._unopened.items() if not self._has_file(*key, end)]

    def _has_file(self, topic: str, queue_id: int, end: int) -> bool:
        # A queue that continues without messages (`begin_at`) may have only the file of its next unit.
        for unit in (end - 1, end):
            at = unit * fmt.QUEUE_UNIT_BYTES
            name = file_name(at - at % self._file_size)
            try:
                length = self._files.size_of(f"{self._directory}/{topic}/{queue_id}/{name}")
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue
            return length == self._file_size
        return False

    def get(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, created if it is missing. Its files are created with its first unit.

        Raises: Corrupt for a queue that is not on disk as it was dispatched.
        """
        key = (topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            with self._lock:
                queue = self._queues.get(key)
                if queue is None:
                    queue = self._open(key)
        return queue

    def _open(self, key: QueueKey) -> ConsumeQueue:
        directory = queue_directory(self._root, *key)
        queue = ConsumeQueue(directory, self._file_size, files=self._files, opened=self.opened)

        end = self._unopened.get(key)
        if end is not None:
            try:
                queue.load()
                is_whole = queue.resume(end, self._dispatched)
            except Corrupt:
                self.on_differing()
                raise
            if not is_whole:
                self.on_differing()
                self.on_lost_units(max(queue.max_physical_offset, 0), self._dispatched)
            queue.correct_min_offset(self._min_physical)
            if self._unsynced:
                queue.note_unsynced()

        self._queues[key] = queue
        self._unopened.pop(key, None)
        return queue

    def begin_at(self, topic: str, queue_id: int, offset: int) -> None:
        """Let a queue continue at an offset for which the log has no message: `ConsumeQueue.begin_at`."""
        if self.get(topic, queue_id).begin_at(offset):
            self.on_differing()

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, if there is one. Raises: as `get`."""
        queue = self._queues.get((topic, queue_id))
        if queue is None and (topic, queue_id) in self._unopened:
            return self.get(topic, queue_id)
        return queue

    def range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The half-open range of readable offsets of a queue; (0, 0) without one. Raises: as `get`."""
        low, high = self._range_on_disk(topic, queue_id)
        first = self.first_offset(topic, queue_id)
        return (low, high) if low >= first else (first, max(high, first))

    def _range_on_disk(self, topic: str, queue_id: int) -> tuple[int, int]:
        end = self._unopened.get((topic, queue_id))
        if end is not None and not self._min_physical:
            # Nothing was ever deleted, so the queue begins at 0.
            return 0, end
        queue = self.find(topic, queue_id)
        return (0, 0) if queue is None else (queue.min_offset, queue.max_offset)

    def keys(self) -> list[QueueKey]:
        """Every (topic, queue), sorted."""
        return sorted({*list(self._queues), *list(self._unopened)})

    def queue_ids(self, topic: str) -> list[int]:
        """Every queue of a topic, sorted."""
        keys = {*list(self._queues), *list(self._unopened)}
        return sorted(queue_id for name, queue_id in keys if name == topic)

    def all(self) -> list[ConsumeQueue]:
        """Every queue that is open now."""
        return list(self._queues.values())

    def items(self) -> list[tuple[QueueKey, ConsumeQueue]]:
        """Every queue that is open now, by topic and queue id."""
        return list(self._queues.items())

    def _wake(self, ends_above: int = 0) -> None:
        """Open the unopened queues that end above a queue offset."""
        for key, end in list(self._unopened.items()):
            if end > ends_above:
                self.get(*key)

    @property
    def max_physical_offset(self) -> int:
        """The end of the last record that has a unit in any open queue; -1: none."""
        return max((queue.max_physical_offset for queue in self.all()), default=-1)

    def has_unit(self, position: int, size: int) -> bool:
        """Whether any open queue has a unit of this position and size."""
        return any(queue.has_unit(position, size) for queue in self.all())

    def truncate(self, physical_offset: int) -> None:
        """Drop the units of records that end above `physical_offset`."""
        for queue in self.all():
            queue.truncate(physical_offset)

    def erase_after_ends(self) -> None:
        """Erase the bytes after the last unit of the queues that were never used. Callers: an orderly stop.

        RocketMQ would take them for messages. A queue that is opened erases them at once.
        Raises: Corrupt for a queue that is not on disk as it was dispatched.
        """
        for key, end in list(self._unopened.items()):
            if self._has_bytes_after(*key, end):
                self.get(*key)

    def _has_bytes_after(self, topic: str, queue_id: int, end: int) -> bool:
        """Whether there is a file, or a byte that is not zero, after the last unit of an unopened queue."""
        at = end * fmt.QUEUE_UNIT_BYTES
        directory = self._directory / topic / str(queue_id)
        begin = at - at % self._file_size
        if self._files.exists(directory / file_name(begin + self._file_size)):
            return True
        path = directory / file_name(begin)
        if not self._files.exists(path):
            return False
        file = QueueFile(path, begin, self._file_size, self.opened, False)
        try:
            return file.data_after(at - begin) is not None
        finally:
            file.end()

    def correct_min_offsets(self, min_physical: int) -> None:
        """Begin each queue at its first message at or above `min_physical`, the log's start."""
        with self._lock:
            # Queues that are opened later use it in `_open`.
            self._min_physical = min_physical
            opened = self.all()
        for queue in opened:
            queue.correct_min_offset(min_physical)

    def delete_expired(self) -> None:
        """Delete the files that have only messages out of range."""
        # Other queues have one file, which stays.
        self._wake(self._file_size // fmt.QUEUE_UNIT_BYTES)
        for queue in self.all():
            queue.delete_expired()

    def sync(self) -> None:
        """fdatasync all queues. Durable: units written since the last sync, and names of files. Raises: OSError."""
        if self._unsynced:
            self._wake()
            self._unsynced = False
        dirty = [queue for queue in self.all() if queue.dirty]
        if len(dirty) > SYNCED_ALONE_MAX:
            for queue in dirty:
                queue.start_writeback()
        for queue in dirty:
            queue.sync()
        self.opened.sync_names()

    def close(self) -> None:
        """Close every file."""
        for queue in self.all():
            queue.close()
