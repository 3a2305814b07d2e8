"""The maps of files that this process reads, and reads that go through them.

It must import neither pyarrow nor numpy: flush satellites use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from .errors import Corrupt
from .rules import FILE_LENGTH_RULE

#: most bytes of one `gather`
GATHER_BYTES = 512 << 10
#: at least the size of CPython's Py_buffer, in words
_PY_BUFFER_WORDS = 16


class FileMaps:
    """Maps of open files. A bad sector that is read through a map ends the process (SIGBUS): `gather` does not."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        #: the memory file of `gather`, and its map. Guarded by `_gather_lock`
        self._gathered: tuple[int, mmap.mmap] | None = None
        self._gather_lock = threading.Lock()

    def map_read(self, fd: int, size: int, *, gathered: bool = False) -> memoryview:
        """A read-only view of the first `size` bytes.

        Args: `gathered`: only `gather` reads the view, and needs no pages around what it reads.
        Raises: Corrupt when the file is shorter: touching its missing end would be SIGBUS.
        """
        view = self._map(fd, size, mmap.PROT_READ)
        if gathered:
            self._maps[id(view)].madvise(mmap.MADV_RANDOM)
        return view

    def map_words(self, fd: int, size: int) -> memoryview:
        """A shared writable view. The caller casts it to "q"."""
        return self._map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)

    def _map(self, fd: int, size: int, protection: int) -> memoryview:
        have = os.fstat(fd).st_size
        if have < size:
            fault = f"a file has {have} bytes, expected {size}"
            raise Corrupt(fault, rule=FILE_LENGTH_RULE, expected=size, found=have)
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        view = memoryview(mapped)
        self._maps[id(view)] = mapped
        return view

    def unmap(self, view: memoryview) -> None:
        """Release a view. A reader that still holds a slice keeps the map alive."""
        mapped = self._maps.pop(id(view), None)
        with contextlib.suppress(BufferError):
            view.release()
            if mapped is not None:
                mapped.close()

    def lock_memory(self, view: memoryview) -> None:
        """mlock the pages of a view of `map_read`, and read them in (MADV_WILLNEED).

        Raises: OSError, mostly because RLIMIT_MEMLOCK is lower.
        """
        mapped = self._maps[id(view)]
        _lock_call("mlock", mapped, len(view))
        mapped.madvise(mmap.MADV_WILLNEED)

    def unlock_memory(self, view: memoryview) -> None:
        """munlock. Pages that are not locked are ignored."""
        with contextlib.suppress(OSError):
            _lock_call("munlock", self._maps[id(view)], len(view))

    def release_when_unread(self, view: memoryview) -> Callable[[], bool]:
        """Release a view. A reader that still uses the view or a slice keeps its map alive.

        Returns: a function that says whether the last reader is gone, and the map with it.
        """
        mapped = self._maps.pop(id(view), None)
        alive = (lambda: None) if mapped is None else weakref.ref(mapped)
        return lambda: alive() is None

    def gather(self, view: memoryview, starts: Sequence[int], nbytes: int) -> bytes | None:
        """`nbytes` bytes of a view at each of `starts`, in one piece.

        One system call takes half the time of as many reads. The kernel copies the bytes from the map to a memory file.
        At a bad sector the kernel returns an error, while a read through the map would kill this process (SIGBUS).
        Returns: None if one of the ranges cannot be read so, or another thread gathers.
        """
        total = nbytes * len(starts)
        if total > GATHER_BYTES:
            return None

        parts = [view[start : start + nbytes] for start in starts]
        # Cold pages come from the disk meanwhile, and another query must not wait for them.
        if not self._gather_lock.acquire(blocking=False):
            return None

        try:
            fd, mapped = self._gathered = self._gathered or self._memory_file()
            return mapped[:total] if os.pwritev(fd, parts, 0) == total else None
        except OSError:
            # A bad sector, more ranges than a system call takes, or no descriptor for the memory file.
            return None
        finally:
            self._gather_lock.release()

    def _memory_file(self) -> tuple[int, mmap.mmap]:
        fd = os.memfd_create("raymq-gather")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, GATHER_BYTES)
        return fd, mmap.mmap(fd, GATHER_BYTES)


def _lock_call(name: str, mapped: mmap.mmap, size: int) -> None:
    """Call mlock or munlock on a map. Raises: OSError."""
    # Without numpy CPython's Py_buffer is the only way to the address of a read-only map: its first field.
    buffer = (ctypes.c_void_p * _PY_BUFFER_WORDS)()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapped), buffer, 0)
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
        if call(ctypes.c_void_p(buffer[0]), ctypes.c_size_t(size)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        ctypes.pythonapi.PyBuffer_Release(buffer)
