"""All consume queues of a store, by topic and queue.

Source: ConsumeQueueStore, RocketMQ 5.3.3.
"""

from __future__ import annotations

import threading
from pathlib import Path

from raymq.store.config import StoreConfig
from raymq.store.files import Files

from .consume_queue import ConsumeQueue, queue_directory
from .queue_files import OpenFiles

Key = tuple[str, int]

#: the syncs of more queues than that are begun together
SYNCED_ALONE_MAX = 16


class ConsumeQueues:
    """One thread appends and truncates; one syncs; any may look up and read."""

    def __init__(self, root: Path, config: StoreConfig, *, files: Files) -> None:
        self._root = root
        self._directory = root / "consumequeue"
        self._file_size = config.consume_queue_file_size_bytes
        self._files = files
        #: files that have a descriptor
        self.opened = OpenFiles(files)
        self._queues: dict[Key, ConsumeQueue] = {}
        self._lock = threading.Lock()

    def load(self, *, after_crash: bool, sound_below: int) -> None:
        """Find and recover what is there. Args: as of `ConsumeQueue.recover`. Raises: Corrupt."""
        for topic in self._files.list(self._directory):
            for name in self._files.list(self._directory / topic):
                if name.isdigit():
                    queue = self.get(topic, int(name))
                    queue.load()
                    queue.recover(after_crash=after_crash, sound_below=sound_below)
                    if after_crash:
                        queue.note_unsynced()

    def get(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made if there is none; its files come with its first unit."""
        key = (topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            with self._lock:
                queue = self._queues.get(key)
                if queue is None:
                    directory = queue_directory(self._root, topic, queue_id)
                    queue = ConsumeQueue(
                        directory, self._file_size, files=self._files, opened=self.opened
                    )
                    self._queues[key] = queue
        return queue

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, if there is one."""
        return self._queues.get((topic, queue_id))

    def keys(self) -> list[Key]:
        """Every (topic, queue), sorted."""
        return sorted(self._queues)

    def all(self) -> list[ConsumeQueue]:
        """Every queue there is now."""
        return list(self._queues.values())

    @property
    def max_physical_offset(self) -> int:
        """The end of the last record that has a unit in any queue; -1: none."""
        return max((queue.max_physical_offset for queue in self.all()), default=-1)

    def truncate(self, physical_offset: int) -> None:
        """Drop the units of records that end above `physical_offset`."""
        for queue in self.all():
            queue.truncate(physical_offset)

    def correct_min_offsets(self, min_physical: int) -> None:
        """Begin each queue at its first message at or above `min_physical`, the log's start."""
        for queue in self.all():
            queue.correct_min_offset(min_physical)

    def delete_expired(self) -> None:
        """Delete the files that are only about messages out of range."""
        for queue in self.all():
            queue.delete_expired()

    def sync(self) -> None:
        """Durable: what was written since the last sync, with its names. Raises: OSError."""
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
