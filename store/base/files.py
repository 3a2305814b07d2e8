"""Every durable operation passes through this module.

`Files` is the real file system. Tests replace it by a simulated disk that forgets unsynced bytes, or by one whose k-th
call fails. It must import neither pyarrow nor numpy: flush satellites use it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .errors import StorageFull, Unavailable, Unreadable
from .failpoints import fail_point
from .file_maps import FileMaps
from .rules import READABLE_RULE

PathLike = str | os.PathLike[str]
#: anything with the buffer protocol
Data = Any

#: zeros that are written or compared at a time: they stay in a core's cache
ZERO_CHUNK_BYTES = 128 << 10
_ZEROS = bytes(ZERO_CHUNK_BYTES)
#: bytes of one read of `map_checked`
_READ_BYTES = 1 << 20
#: target of reads that only bring bytes into memory
_DISCARD_BUFFER = memoryview(bytearray(64 << 10))
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: errors of a disk or its file system for stored bytes that cannot be read any more
_UNREADABLE = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO)
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
#: errors of an fsync by name if no descriptor was free: nothing was tried
NOT_TRIED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def only_zeros(chunk: bytes) -> bool:
    """Whether a chunk of at most ZERO_CHUNK_BYTES has no other byte: one memcmp, eight times as fast as a count."""
    return _ZEROS.startswith(chunk)


class SyncFailed(OSError):
    """An fsync or fdatasync failed: earlier writes may be lost, and a second sync proves nothing."""


class Files(FileMaps):
    """The real file system. Its only state is the maps that callers hold."""

    #: paths of the store locks this process holds; a simulated disk has its own set
    held_locks: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        #: of the kernel, once it was read: a process does not outlive its boot, and may run out of descriptors
        self._boot_id = ""

    # --- descriptors ------------------------------------------------------------------------------

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        """Open a file, mode 0600.

        Raises: FileNotFoundError unless `create`, Unavailable for a read-only directory.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR if writable else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT
        try:
            return os.open(path, flags, 0o600)
        except OSError as error:
            raise _translate(error, path) from error

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    @contextlib.contextmanager
    def opened(
        self, path: PathLike, *, create: bool = False, writable: bool = True
    ) -> Iterator[int]:
        """`open_file`, closed after the block."""
        fd = self.open_file(path, create=create, writable=writable)
        try:
            yield fd
        finally:
            self.close(fd)

    @contextlib.contextmanager
    def created(self, path: PathLike) -> Iterator[int]:
        """A new file, which stays open after the block. A block that fails leaves no file."""
        fd = self.open_file(path, create=True)
        try:
            yield fd
        except BaseException:
            self.close(fd)
            self.unlink(path)
            raise

    def size(self, fd: int) -> int:
        """Length of a file, bytes."""
        return os.fstat(fd).st_size

    #: reads bytes of a descriptor at a position, fewer at the end of the file. It is not wrapped: queries make
    #: thousands of small reads, and a Python call costs a tenth of one
    pread = staticmethod(os.pread)

    def pread_into(self, fd: int, target: memoryview, offset: int) -> int:
        """Read at a position into memory. Returns: how many bytes."""
        return os.preadv(fd, [target], offset)

    def read_range(self, fd: int, start: int, stop: int, *, path: PathLike, base: int = 0) -> bytes:
        """Bytes [start, stop) of a file. A bad sector is an error here; through a map it kills the process.

        Args: `base`: the offset that byte 0 of the file has, for the error.
        Raises: Corrupt naming the first byte that cannot be read; OSError for other failures.
        """
        try:
            found = self.pread(fd, stop - start, start)
        except OSError as error:
            raise _unreadable(error, path, base + start) from error
        if len(found) == stop - start:
            return found
        # The kernel returns the bytes before a bad sector, and fails at the next call.
        rest = bytearray(stop - start - len(found))
        self.read_into(fd, memoryview(rest), start + len(found), path=path, base=base)
        return found + rest

    def read_each(
        self,
        fd: int,
        view: memoryview,
        starts: Sequence[int],
        nbytes: int,
        *,
        path: PathLike,
        base: int = 0,
    ) -> bytes:
        """`read_range` of `nbytes` bytes at each of `starts`, in one piece. Bytes after the file's end are zeros.

        Args: `view`: the whole file, of `map_read`.
        """
        found = self.gather(view, starts, nbytes)
        if found is not None:
            return found
        # One range is at the file's end, or the disk cannot read it.
        size = len(view)
        return b"".join(
            self.read_range(fd, at, min(at + nbytes, size), path=path, base=base).ljust(
                nbytes, b"\0"
            )
            for at in starts
        )

    def read_into(
        self, fd: int, target: memoryview, start: int, *, path: PathLike, base: int = 0
    ) -> None:
        """`read_range` into given memory: the first touch of new pages costs more than the copy."""
        done = 0
        while done < len(target):
            at = start + done
            try:
                count = self.pread_into(fd, target[done:], at)
            except OSError as error:
                raise _unreadable(error, path, base + at) from error
            if not count:
                raise Unreadable(
                    f"{path} ends at {base + at}; its bytes up to {base + start + len(target)} were stored",
                    path=str(path),
                    offset=base + at,
                    rule=READABLE_RULE,
                    expected=base + start + len(target),
                    found=base + at,
                )
            done += count

    def data_ranges(self, fd: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges within [start, stop) that may hold bytes other than zero. The rest are holes.

        Blocks that are reserved and were never written count as holes until they are read. So find all ranges before
        reading any.
        """
        found: list[tuple[int, int]] = []
        position = start
        while position < stop:
            try:
                begin = os.lseek(fd, position, os.SEEK_DATA)
                end = os.lseek(fd, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                # The file system does not support it.
                return [(start, stop)]

            if begin < stop:
                found.append((begin, min(end, stop)))
            position = end

        return found

    def drop_cached(self, fd: int, offset: int, length: int) -> None:
        """Ask the kernel to drop clean pages, so that the next read comes from the disk. This is a hint."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def read_ahead(self, fd: int, offset: int, length: int) -> None:
        """Bring these bytes into the page cache. Bytes after the file's end are left out. Raises: OSError.

        They are read and thrown away: the kernel keeps bytes that are read in sequence in large folios.
        POSIX_FADV_WILLNEED would bring single pages. Mapping large folios costs a sixth, writing to them half.
        """
        whole, rest = divmod(length, len(_DISCARD_BUFFER))
        os.preadv(fd, [_DISCARD_BUFFER] * whole + [_DISCARD_BUFFER[:rest]], offset)

    def pwrite(self, fd: int, data: Data, offset: int) -> None:
        """Write all of `data` at a position. Raises: StorageFull, OSError."""
        view = memoryview(data).cast("B")
        try:
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise _translate(error, None) from error

    def allocate(self, fd: int, size: int) -> None:
        """Reserve all blocks of a file: no later write meets a full disk. Raises: StorageFull."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise _translate(error, None) from error
        fail_point("files.allocated")

    def zero(self, fd: int, start: int, stop: int) -> None:
        """Write zeros to [start, stop)."""
        while start < stop:
            length = min(ZERO_CHUNK_BYTES, stop - start)
            self.pwrite(fd, memoryview(_ZEROS)[:length], start)
            start += length

    def truncate(self, fd: int, size: int) -> None:
        """Set a file's length."""
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            raise _translate(error, None) from error

    def sync_data(self, fd: int) -> None:
        """fdatasync. Raises: SyncFailed. The caller must not try again: the kernel has marked the lost pages clean."""
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, f"fdatasync: {error.strerror}") from error

    def sync(self, fd: int) -> None:
        """fsync. Raises: SyncFailed."""
        _fsync(fd)

    def lock(self, fd: int) -> None:
        """Acquire RocketMQ's store lock: an exclusive POSIX lock on byte 0.

        Raises: Unavailable naming the holder when another process has it.
        """
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            holder = _lock_holder(fd)
            raise Unavailable(
                f"the store is already open{f' by process {holder}' if holder else ''}; "
                "a store has one engine at a time",
                field="lock",
                pid=holder,
            ) from error

    def map_checked(self, fd: int, size: int, path: PathLike) -> memoryview:
        """Like `map_read`, after every byte that is not in a hole was read. Raises: Corrupt for bad sectors.

        For tools that read all of a file anyway.
        """
        for start, stop in self.data_ranges(fd, 0, size):
            for at in range(start, stop, _READ_BYTES):
                self.read_range(fd, at, min(at + _READ_BYTES, stop), path=path)
        return self.map_read(fd, size)

    # --- names ------------------------------------------------------------------------------------

    def sync_dir(self, path: PathLike) -> None:
        """fsync a directory: makes created, renamed and removed names durable. Raises: SyncFailed, OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: PathLike, target: PathLike) -> None:
        """Replace `target` by `source`."""
        os.replace(source, target)

    def unlink(self, path: PathLike) -> None:
        """Remove a file. A missing one is ignored."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def list(self, path: PathLike) -> list[str]:
        """Sorted names in a directory; empty when it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def exists(self, path: PathLike) -> bool:
        """Whether a path exists."""
        return os.path.lexists(path)

    def size_of(self, path: PathLike) -> int:
        """Length of a file by its name, bytes. Raises: FileNotFoundError."""
        return os.stat(path, follow_symlinks=False).st_size

    def is_dir(self, path: PathLike) -> bool:
        """Whether a path is a directory."""
        return os.path.isdir(path)

    def make_dir(self, path: PathLike, mode: int = 0o700) -> None:
        """Create a directory whose parent exists. An existing one is ignored. Durable: nothing."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode)
        except OSError as error:
            raise _translate(error, path) from error

    def make_dirs(self, path: PathLike, mode: int = 0o700) -> None:
        """Create a directory and its parents. Durable: their names.

        Without the parents' fsync a power loss can take a directory with every synced file in it.
        """
        path = Path(path)
        missing = []
        for step in (path, *path.parents):
            if step.exists():
                break
            missing.append(step)
        try:
            for step in reversed(missing):
                step.mkdir(mode, exist_ok=True)
                self.sync_dir(step.parent)
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        except OSError as error:
            raise _translate(error, path) from error

    def make_dirs_durable(self, path: PathLike) -> None:
        """Create a directory and its parents. Durable: their names, whichever process made them.

        A killed process may have left names that are in the page cache only. Every parent is synced, up to the root of
        the file system. Directories above an unreadable parent were not made by `make_dirs`.
        """
        self.make_dirs(path)
        directory = Path(os.path.realpath(path))
        try:
            device = os.stat(directory).st_dev
            for parent in directory.parents:
                if os.stat(parent).st_dev != device or not os.access(parent, os.R_OK):
                    break
                self.sync_dir(parent)
        except OSError as error:
            raise _translate(error, directory) from error

    def remove_tree(self, path: PathLike) -> None:
        """Remove a directory and all in it. A missing one is ignored."""
        shutil.rmtree(path, ignore_errors=True)

    def free_bytes(self, path: PathLike) -> int:
        """Room on the file system of `path` for this user."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def used_ratio(self, path: PathLike) -> float:
        """How full the file system of `path` is for this user, percent; 0 when it does not exist.

        Source: UtilAll#getDiskPartitionSpaceUsedPercent: used of used + usable.
        """
        try:
            stat = os.statvfs(path)
        except FileNotFoundError:
            return 0.0
        used = stat.f_blocks - stat.f_bfree
        whole = used + stat.f_bavail
        return 100.0 * used / whole if whole else 0.0

    def read_file(self, path: PathLike) -> bytes:
        """The whole content of a small file."""
        with open(path, "rb") as file:
            return file.read()

    def write_file_atomic(self, path: PathLike, data: bytes) -> None:
        """Replace a small file so that a crash leaves the old or the new content.

        Durable: content and name at return. Raises: StorageFull, OSError, and the old content stays. SyncFailed if the
        directory's sync failed.
        """
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        with self.opened(temporary, create=True) as fd:
            os.ftruncate(fd, 0)
            self.pwrite(fd, data, 0)
            # A failure is not a SyncFailed. Nothing refers to these pages, and the next try writes all of them again.
            os.fsync(fd)
        os.replace(temporary, path)
        self.sync_dir(path.parent)

    def memory_bytes(self) -> int:
        """This host's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def boot_id(self) -> str:
        """An id that changes with every boot of the machine: page cache written before a boot may be gone.

        Raises: Unavailable if the kernel does not say. A guess would trust a page cache that is gone.
        """
        if self._boot_id:
            return self._boot_id
        fault = "is empty"
        try:
            self._boot_id = self.read_file(BOOT_ID_PATH).decode().strip()
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        if not self._boot_id:
            raise Unavailable(
                f"{BOOT_ID_PATH} {fault}, so a reboot looks like a restart; mount the kernel's /proc",
                field="boot_id",
                path=BOOT_ID_PATH,
            )
        return self._boot_id

    def boot_id_hash(self) -> int:
        """The boot id in 63 bits, for fields of 8 bytes. Raises: as `boot_id`."""
        digest = hashlib.sha256(self.boot_id().encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def _fsync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailed(error.errno, f"fsync: {error.strerror}") from error


def _translate(error: OSError, path: PathLike | None) -> Exception:
    where = f" at {path}" if path is not None else ""
    if error.errno in _FULL:
        return StorageFull(
            f"the disk is full{where}; nothing was stored, reads continue. Free some room and retry.",
            field="disk",
            path=None if path is None else str(path),
        )

    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and path is not None:
        return Unavailable(
            f"{path} cannot be written: {error.strerror}; "
            "check owner, mode and mount of the directory",
            field="data_dir",
            path=str(path),
        )

    return error


def _unreadable(error: OSError, path: PathLike, offset: int) -> Exception:
    if error.errno not in _UNREADABLE:
        return error
    fault = f"{path} cannot be read at {offset}: {error.strerror}; the disk has lost these bytes"
    return Unreadable(fault, path=str(path), offset=offset, rule=READABLE_RULE)


def _lock_holder(fd: int) -> int | None:
    query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, query)
    except OSError:
        return None
    kind, _, _, _, pid = struct.unpack("hhqqi4x", answer)
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None
