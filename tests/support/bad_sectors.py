"""A disk that has lost some of the bytes it took: reading them is EIO, and any other read succeeds."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from raymq.store.base.files import Files, PathLike

SECTOR = 4096


class BadSectors(Files):
    """The real files with bad sectors. A map of a file that has one would be a SIGBUS: it is refused."""

    def __init__(self) -> None:
        super().__init__()
        #: path -> start of each bad sector
        self.bad: dict[str, list[int]] = {}
        self._paths: dict[int, str] = {}
        self._paths_of_maps: dict[int, str] = {}

    def lose(self, path: Path, offset: int) -> int:
        """Lose the sector of a file that holds `offset`. Returns: the start of the sector."""
        start = offset - offset % SECTOR
        self.bad.setdefault(os.path.abspath(path), []).append(start)
        return start

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        """As the real one."""
        fd = super().open_file(path, create=create, writable=writable)
        self._paths[fd] = os.path.abspath(path)
        return fd

    def rename(self, source: PathLike, target: PathLike) -> None:
        """As the real one: the other file has other sectors."""
        super().rename(source, target)
        self.bad.pop(os.path.abspath(target), None)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Read up to the bad sector, or raise EIO if the read begins in it, as a kernel does."""
        for start in sorted(self.bad.get(self._paths[fd], ())):
            if start <= offset < start + SECTOR and nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if offset < start < offset + nbytes:
                return super().pread(fd, start - offset, offset)
        return super().pread(fd, nbytes, offset)

    def pread_into(self, fd: int, target: memoryview, offset: int) -> int:
        """As `pread`."""
        found = self.pread(fd, len(target), offset)
        target[: len(found)] = found
        return len(found)

    def map_read(self, fd: int, size: int, *, gathered: bool = False) -> memoryview:
        """As the real one, but a file with a bad sector only to gather from it."""
        if not gathered:
            self._refuse(fd)
        view = super().map_read(fd, size, gathered=gathered)
        self._paths_of_maps[id(view)] = self._paths[fd]
        return view

    def gather(self, view: memoryview, starts: Sequence[int], nbytes: int) -> bytes | None:
        """As the real one, or None if a bad sector lies in one of the ranges, as in a map of a failing disk."""
        for sector in self.bad.get(self._paths_of_maps[id(view)], ()):
            if any(start < sector + SECTOR and sector < start + nbytes for start in starts):
                return None
        return super().gather(view, starts, nbytes)

    def map_words(self, fd: int, size: int) -> memoryview:
        """As the real one, but no file with a bad sector."""
        self._refuse(fd)
        return super().map_words(fd, size)

    def _refuse(self, fd: int) -> None:
        assert self._paths[fd] not in self.bad, "a map of a file with a bad sector is a SIGBUS"
