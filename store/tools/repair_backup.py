"""Copies of the files that a repair changes, made and synced before the first change."""

from __future__ import annotations

from pathlib import Path

from raymq.store.base.files import ZERO_CHUNK_BYTES, Files, only_zeros


class RepairBackup:
    """A directory that gets a copy of each file, with the name that the file has in the store."""

    def __init__(self, root: Path, directory: Path, *, files: Files) -> None:
        self.directory = directory
        self._root = root
        self._files = files
        #: files that are copied: a file that two steps change is kept as it was before the first step
        self._copied: set[Path] = set()

    def copy(self, path: Path) -> None:
        """Copy a file, or a directory and all in it. Durable: at return. A missing one is ignored."""
        if not self._files.exists(path):
            return
        if self._files.is_dir(path):
            for name in self._files.list(path):
                self.copy(path / name)
            return
        if path in self._copied:
            return
        target = self.directory / path.relative_to(self._root)
        with self._files.opened(path, writable=False) as fd:
            self._write_copy(fd, target, 0, self._files.size(fd))
        self._copied.add(path)

    def copy_range(self, path: Path, start: int, stop: int, name: str) -> None:
        """Copy the bytes [start, stop) of a file as `name`. Zeros at their end are left out."""
        with self._files.opened(path, writable=False) as fd:
            chunk = b""
            while stop > start and not chunk:
                low = max(start, stop - ZERO_CHUNK_BYTES)
                chunk = self._files.pread(fd, stop - low, low).rstrip(b"\0")
                stop = low + len(chunk)
            if chunk:
                self._write_copy(fd, self.directory / path.parent.name / name, start, stop)

    def _write_copy(self, source: int, target: Path, start: int, stop: int) -> None:
        self._files.make_dirs(target.parent)
        with self._files.opened(target, create=True) as fd:
            self._files.truncate(fd, stop - start)
            for position in range(start, stop, ZERO_CHUNK_BYTES):
                chunk = self._files.pread(source, min(ZERO_CHUNK_BYTES, stop - position), position)
                # Zeros stay holes: a file of 1 GiB may have few bytes.
                if not only_zeros(chunk):
                    self._files.pwrite(fd, chunk, position - start)
            self._files.sync(fd)
        self._files.sync_dir(target.parent)
