"""RocketMQ's `abort` and `lock` files.

`abort` exists while a store is open, so its presence at start means a crash. `lock` is held by a POSIX lock on byte
0. Closing any descriptor of the file in the process releases such a lock, so the file is opened once per process.
"""

from __future__ import annotations

import os
from pathlib import Path

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files


class AbortFile:
    """The mark of an open store."""

    def __init__(self, root: Path, *, files: Files) -> None:
        self._path = root / "abort"
        self._files = files

    def exists(self) -> bool:
        """Whether the last process crashed."""
        return self._files.exists(self._path)

    def create(self) -> None:
        """Write this process's pid, as RocketMQ does. Durable: at return."""
        with self._files.opened(self._path, create=True) as fd:
            self._files.truncate(fd, 0)
            self._files.pwrite(fd, str(os.getpid()).encode(), 0)
            self._files.sync(fd)
        self._files.sync_dir(self._path.parent)

    def remove(self) -> None:
        """Remove the file, once everything is complete and synced. Durable: at return."""
        self._files.unlink(self._path)
        self._files.sync_dir(self._path.parent)


class StoreLock:
    """The exclusive lock of a store."""

    def __init__(self, root: Path, *, files: Files) -> None:
        self._path = root / "lock"
        self._files = files
        self._fd = -1

    def acquire(self) -> None:
        """Lock the store. Raises: Unavailable if the store is open, in another process or in this one."""
        name = os.path.realpath(self._path)
        if name in self._files.held_locks:
            fault = f"the store is already open in this process ({self._path.parent})"
            raise Unavailable(fault, field="lock")

        fd = self._files.open_file(self._path, create=True)
        try:
            self._files.lock(fd)
            self._files.truncate(fd, 0)
            self._files.pwrite(fd, b"lock", 0)
        except BaseException:
            self._files.close(fd)
            raise

        self._fd = fd
        self._files.held_locks.add(name)

    def release(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            self._files.held_locks.discard(os.path.realpath(self._path))
            self._files.close(self._fd)
            self._fd = -1


def refuse_foreign_directory(root: Path, *, files: Files) -> None:
    """Refuse a directory that cannot be opened as a store. Raises: Rejected.

    A directory that holds other things and no store is a mistake. In a directory with queues of inner batches (BatchCQ)
    RayMQ would make plain queues for the same topics. RocketMQ refuses a store that has both.
    """
    if files.list(root / "batchconsumequeue"):
        raise Rejected(
            f"{root} has topics of RocketMQ's queue type BatchCQ (batchconsumequeue/), which are not supported; use a "
            "store without them",
            field="data_dir",
            limit="no batchconsumequeue",
        )

    # A disk that is mounted here has a directory of its own, and stores that were moved aside may be in it.
    names = {
        name
        for name in files.list(root)
        if name != "lost+found" and not name.startswith(("damaged-", "replaced-"))
    }
    is_store = bool(names & {"commitlog", "raymq", "lock"})
    # A store that was created or copied in part may have only these.
    derived = {"consumequeue", "checkpoint", "abort", "abort.bak", "config", "index"}
    if not is_store and names - derived:
        raise Rejected(
            f"{root} is not empty and not a store (it holds {', '.join(sorted(names)[:3])}...); give an empty or new "
            "directory",
            field="data_dir",
            limit="an empty directory or a store",
        )
