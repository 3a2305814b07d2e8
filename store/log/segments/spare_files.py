"""Deleted commit log files that are used again: their blocks are allocated and were written before.

A file becomes a spare only after its name is durably gone from the log. It is zeroed after its last reader is gone, and
used again after the zeros are synced. A start deletes all spares, since they have no content. RocketMQ reuses a file's
memory, never the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files

#: most spares: further files are unlinked
SPARES_MAX = 2
ZERO_STEP_BYTES = 2 << 20


@dataclass
class Spare:
    """One deleted file that will be used again."""

    path: Path
    #: whether the last reader of its old content is gone
    unread: Callable[[], bool]
    #: zeros up to here; -1: zeroed and synced
    zeroed: int = 0


class SpareFiles:
    """The spares of one log, in `raymq/spare/`. Callers: one that deletes, one that prepares, one that creates."""

    def __init__(self, directory: Path, file_size: int, *, files: Files) -> None:
        self._directory = directory
        self._file_size = file_size
        self._files = files
        self._spares: list[Spare] = []
        files.make_dirs(directory)
        for name in files.list(directory):
            files.unlink(directory / name)

    def take(self, path: Path) -> Path | None:
        """Move a file of the log here. Returns: its new path; None if the caller must unlink it.

        Durable: its new name.
        """
        if len(self._spares) >= SPARES_MAX or not self._files.exists(path):
            return None
        target = self._directory / path.name
        try:
            self._files.rename(path, target)
        except OSError:
            # The file may be on another disk, for example.
            return None
        fail_point("files.moved_to_spares")
        self._files.sync_dir(self._directory)
        return target

    def add(self, path: Path, unread: Callable[[], bool]) -> None:
        """Add a file that `take` has moved. Callers: after its name is durably gone from the log."""
        self._spares.append(Spare(path, unread))

    def step(self) -> bool:
        """Zero a piece of a file that has no reader any more. Returns: whether there may be more at once.

        Raises: OSError. The file is dropped then.
        """
        for spare in self._spares:
            if spare.zeroed >= 0 and spare.unread():
                try:
                    self._zero(spare)
                except OSError:
                    self._spares.remove(spare)
                    self._files.unlink(spare.path)
                    raise
                return True
        return False

    def _zero(self, spare: Spare) -> None:
        """Zero and sync the next piece of a spare."""
        stop = min(spare.zeroed + ZERO_STEP_BYTES, self._file_size)
        with self._files.opened(spare.path) as fd:
            self._files.zero(fd, spare.zeroed, stop)
            self._files.sync_data(fd)
        spare.zeroed = stop
        if stop == self._file_size:
            fail_point("files.spare_zeroed")
            spare.zeroed = -1

    def give(self, path: Path) -> bool:
        """Make a zeroed spare the file `path`. Returns: whether there was one.

        Durable: the name, at return.
        """
        spare = next((each for each in self._spares if each.zeroed < 0), None)
        if spare is None:
            return False
        self._spares.remove(spare)
        try:
            self._files.rename(spare.path, path)
        except OSError:
            # Usually the spare is on another disk.
            self._files.unlink(spare.path)
            return False
        self._files.sync_dir(path.parent)
        self._files.sync_dir(self._directory)
        return True
