"""The transient store pool: shared memory through which appends pass on their way into the log's files.

One file in /dev/shm per store, native byte order (it never leaves the machine). Log offset o lies at byte
4096 + o modulo the pool's size. The header's 8-byte words have one writer, CommitLog:

    0  magic              4  id, also the end of the file's name
    1  version            5  bytes of log that the pool holds
    2  hash of boot id    6  bytes of one commit log file
    3  hash of store id   7  incarnation of the CommitLog that works with it
    8  committed: bytes below this are in the files, and their room here may be used again
    9  hole: nothing is written from this offset to the end of its commit log file; 0: no hole

The hole is the space after a blank record: it may be larger than the pool, and the file has zeros there.
If any process is killed, the pool stays, and the next CommitLog writes [committed, appended) of it into the files
before it recovers. If the machine or its /dev/shm ends, the uncommitted bytes are lost.

Source: TransientStorePool, RocketMQ 5.3.3. There it is five locked buffers of a whole file each, private to the process
and so lost with it. This module imports neither pyarrow nor numpy: CommitRealTime uses it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raymq.store.base.errors import RayMQError, StorageFull, Unavailable, require
from raymq.store.base.files import Files

if TYPE_CHECKING:
    from typing_extensions import Buffer

SHM_DIR = "/dev/shm"
HEADER_BYTES = 4096
MAGIC = int.from_bytes(b"RayMQshm", "big")
VERSION = 1
#: file of a replica that names its pool, for CommitRealTime and for operators
NAME_FILE = "raymq/pool"

_MAGIC, _VERSION, _BOOT, _STORE, _ID, _SIZE, _SEGMENT, _INCARNATION, _COMMITTED, _HOLE = range(10)


def check_room(replica_dirs: Iterable[str | Path], pool_bytes: int, *, files: Files) -> None:
    """Check that /dev/shm has room for a pool of each replica without one. Raises: StorageFull, with the numbers."""
    names = [_name_of(root, files) for root in replica_dirs]
    missing = sum(1 for name in names if name is None or not files.exists(f"{SHM_DIR}/{name}"))
    needed = missing * (HEADER_BYTES + pool_bytes)
    free = _free_bytes(files)
    if needed > free:
        raise _no_room(needed, free, missing)


class PoolReader:
    """A pool as CommitRealTime sees it."""

    def __init__(self, view: memoryview, *, files: Files) -> None:
        self._view = view
        self._files = files
        self._words = view[:HEADER_BYTES].cast("q")
        self._data = view[HEADER_BYTES:]
        #: bytes of log that the pool holds
        self.size_bytes = int(self._words[_SIZE])

    @staticmethod
    def open(replica_dir: str | Path, incarnation: int, *, files: Files) -> PoolReader:
        """The pool that this replica's CommitLog works with.

        Args: `incarnation`: that CommitLog's. Raises: Unavailable if it works with another pool, or with none.
        """
        name = _name_of(replica_dir, files)
        view = None if name is None else _map(name, files, writable=False)
        if view is not None:
            reader = PoolReader(view, files=files)
            if reader._words[_INCARNATION] == incarnation:
                return reader
            reader.close()
        fault = f"the CommitLog of {replica_dir} works with another transient pool than {name or 'none'}"
        raise Unavailable(fault, field="transient_pool")

    @property
    def hole(self) -> int:
        """The offset from which to the end of its commit log file nothing is written; 0: no hole."""
        return int(self._words[_HOLE])

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of log [start, stop), ascending, each within one commit log file, without the hole."""
        size, segment = self.size_bytes, int(self._words[_SEGMENT])
        hole = self.hole
        hole_end = _next_multiple(hole, segment)
        while start < stop:
            if hole <= start < hole_end:
                start = hole_end
                continue
            at = start % size
            end = min(stop, start - start % segment + segment, start + size - at)
            if start < hole:
                end = min(end, hole)
            yield start, self._data[at : at + end - start]
            start = end

    def close(self) -> None:
        """Unmap the pool."""
        self._words.release()
        self._data.release()
        self._files.unmap(self._view)


class TransientPool(PoolReader):
    """A pool as CommitLog uses it. Callers: one writer; `committed` may be raised by another thread."""

    def __init__(self, name: str, fd: int, view: memoryview, *, files: Files) -> None:
        super().__init__(view, files=files)
        #: name of the file in /dev/shm
        self.name = name
        self._fd = fd

    @classmethod
    def create(
        cls,
        replica_dir: str | Path,
        store_id: str,
        size_bytes: int,
        segment_bytes: int,
        *,
        files: Files,
    ) -> TransientPool:
        """Create a new, empty pool. Other pools of this replica are removed.

        Raises: StorageFull, with the numbers, if /dev/shm has no room. Nothing is left there then.
        """
        remove_pools(replica_dir, store_id, files=files)
        needed, free = HEADER_BYTES + size_bytes, _free_bytes(files)
        if needed > free:
            raise _no_room(needed, free)

        number = int.from_bytes(os.urandom(8), "big") >> 1
        name = f"{_prefix(replica_dir, store_id)}{number:016x}"
        path = f"{SHM_DIR}/{name}"
        fd = files.open_file(path, create=True)

        try:
            files.allocate(fd, needed)
            view = files.map_words(fd, needed)
        except (OSError, RayMQError) as error:
            free = _free_bytes(files)
            files.close(fd)
            files.unlink(path)
            if isinstance(error, StorageFull):
                raise _no_room(needed, free) from error
            raise

        words = view[:HEADER_BYTES].cast("q")
        words[_VERSION] = VERSION
        words[_BOOT] = files.boot_id_hash()
        words[_STORE] = _hash(store_id)
        words[_ID] = number
        words[_SIZE] = size_bytes
        words[_SEGMENT] = segment_bytes
        words[_MAGIC] = MAGIC
        words.release()

        return cls(name, fd, view, files=files)

    @classmethod
    def attach(
        cls, replica_dir: str | Path, name: str, store_id: str, *, files: Files
    ) -> TransientPool | None:
        """The pool of this name; None if it is gone, or of another boot, store or directory.

        A copy of a directory names the pool of the original, which may be using it.
        """
        if not name.startswith(_prefix(replica_dir, store_id)):
            return None
        view = _map(name, files, writable=True)
        if view is None:
            return None
        pool = cls(name, files.open_file(f"{SHM_DIR}/{name}"), view, files=files)
        if pool._words[_STORE] == _hash(store_id):
            return pool
        pool.close()
        return None

    def fits(self, size_bytes: int, segment_bytes: int) -> bool:
        """Whether the pool has the size that the options ask for."""
        return (self.size_bytes, self._words[_SEGMENT]) == (size_bytes, segment_bytes)

    @property
    def committed(self) -> int:
        """Everything below this is in the log's files."""
        return int(self._words[_COMMITTED])

    @committed.setter
    def committed(self, offset: int) -> None:
        self._words[_COMMITTED] = offset

    @property
    def hole_end(self) -> int:
        """End of the hole and of its commit log file; 0 without a hole."""
        return _next_multiple(self.hole, int(self._words[_SEGMENT]))

    def note_hole(self, offset: int) -> None:
        """Note that no record lies between `offset` and the end of the commit log file.

        Callers: before the hole's end is published as appended, and after the previous hole is committed.
        """
        require(self.committed >= self.hole_end, "one hole at a time", hole=self.hole)
        self._words[_HOLE] = offset

    def write(self, offset: int, data: Buffer) -> None:
        """Store log bytes. Callers: after making room. A pwrite is used because other threads run during it."""
        data = memoryview(data).cast("B")
        at = offset % self.size_bytes
        first = min(len(data), self.size_bytes - at)
        self._files.pwrite(self._fd, data[:first], HEADER_BYTES + at)
        if first < len(data):
            self._files.pwrite(self._fd, data[first:], HEADER_BYTES)

    def reset(self, end: int) -> None:
        """Empty the pool: the log ends at `end`, and all of it is in the files. Callers: while no CommitRealTime
        runs."""
        self._words[_INCARNATION] = 0
        self._words[_HOLE] = 0
        self._words[_COMMITTED] = end

    def publish(self, replica_dir: str | Path, incarnation: int) -> None:
        """Let the CommitRealTime that this CommitLog will grant find the pool."""
        self._words[_INCARNATION] = incarnation
        self._files.write_file_atomic(Path(replica_dir) / NAME_FILE, self.name.encode())

    def close(self) -> None:
        """Unmap the pool, which stays."""
        super().close()
        self._files.close(self._fd)


def remove_pools(replica_dir: str | Path, store_id: str, *, files: Files) -> None:
    """Remove every pool that this replica has or had."""
    prefix = _prefix(replica_dir, store_id)
    for name in files.list(SHM_DIR):
        if name.startswith(prefix):
            files.unlink(f"{SHM_DIR}/{name}")
    files.unlink(Path(replica_dir) / NAME_FILE)


def _map(name: str, files: Files, *, writable: bool) -> memoryview | None:
    """The whole pool file; None if it is gone, or not of this boot and name."""
    try:
        with files.opened(f"{SHM_DIR}/{name}", writable=writable) as fd:
            size = files.size(fd)
            if size <= HEADER_BYTES:
                return None
            view = files.map_words(fd, size) if writable else files.map_read(fd, size)
    except FileNotFoundError:
        return None

    words = view[:HEADER_BYTES].cast("q")
    facts = (words[_MAGIC], words[_VERSION], words[_BOOT], f"{words[_ID]:016x}", words[_SIZE])
    words.release()

    expected = (MAGIC, VERSION, files.boot_id_hash(), name.rpartition("-")[2], size - HEADER_BYTES)
    if facts == expected:
        return view
    files.unmap(view)
    return None


def _name_of(replica_dir: str | Path, files: Files) -> str | None:
    try:
        return files.read_file(Path(replica_dir) / NAME_FILE).decode()
    except FileNotFoundError:
        return None


def _prefix(replica_dir: str | Path, store_id: str) -> str:
    """The prefix of this replica's pool names. A copied directory, or the same path elsewhere, has another prefix."""
    identity = f"{store_id} {os.path.realpath(replica_dir)}"
    return f"raymq-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _next_multiple(offset: int, step: int) -> int:
    return (offset + step - 1) // step * step


def _free_bytes(files: Files) -> int:
    try:
        return files.free_bytes(SHM_DIR)
    except FileNotFoundError:
        return 0


def _no_room(needed: int, free: int, pools: int = 1) -> StorageFull:
    what = "the transient pool needs" if pools == 1 else f"{pools} transient pools need"
    return StorageFull(
        f"{what} {needed} bytes ({needed >> 20} MiB) of {SHM_DIR}, which has {free} ({free >> 20} MiB) free: make it "
        "larger (a container: --shm-size), take smaller slices, or start without the pool",
        field="transient_pool",
        limit=free,
        needed=needed,
    )
