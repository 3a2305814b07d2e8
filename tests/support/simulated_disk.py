"""A disk in memory with the methods of `Files`, which knows what a power loss could leave of it.

Every call is applied at once to the live state (what the page cache shows) and written to a trace. `crash_states.py`
replays the trace and makes from it the disks that a crash may leave. The assumptions are weaker than ext4's or XFS's:

- A block (4096 bytes, or 512 for torn blocks) is written as a whole, in any order, in any version that it had since
  the last sync. So is a file's length. fdatasync and fsync settle both, but not the file's name.
- A name (create, rename, unlink, mkdir) is settled only by an fsync of its directory, each name independently.
- After a failed sync the kernel marks the pages clean. They may or may not be on disk, and no later sync of the same
  bytes changes that.

Stores through `map_words` are seen at the next call of any method.
"""

from __future__ import annotations

import errno
import os
import posixpath
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from raymq.store.base.errors import Corrupt, Unavailable
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Data, Files, PathLike, _translate

Blocks = dict[int, bytes]


class Op(NamedTuple):
    """One entry of the trace. `node` is a file's or a directory's number."""

    kind: str
    node: int = 0
    #: write: ({block: content}, new length or None); resize: new length; unlink: name;
    #: link, moved_in and mkdir: (name, node); rename: (old, new, node); stores: writes through maps
    value: Any = None


class Node:
    """A file: content in a bytearray that grows, made from `blocks` when it is first needed."""

    def __init__(self, number: int, blocks: Blocks, size: int) -> None:
        self.number = number
        self.size = size
        #: the content before the first access. Shared with other images
        self.blocks = blocks
        self.data: bytearray | None = None
        #: a shared map is out: stores into it are found by comparing
        self.words: memoryview | None = None
        self.words_seen = b""


class Base(NamedTuple):
    """The certain content of a disk when it is first used. Never changed."""

    #: number -> (blocks, length). Blocks of zeros are left out
    files: dict[int, tuple[Blocks, int]]
    #: number -> names; 0 is the root
    dirs: dict[int, dict[str, int]]


class Killed(NamedTuple):
    """The disk of a killed process: all its writes are in the page cache, and some of it nowhere else."""

    #: what was on the disk before its first operation
    durable: Base
    #: its trace, how much of that was done, and what it did of the next operation
    trace: list[Op]
    done: int
    torn: tuple[Op, ...]
    last_number: int
    #: (directory, change): names that no sync of their directory had settled
    open_names: frozenset[tuple[int, Op]]

    def operations(self) -> list[Op]:
        """All that it did."""
        return [*self.trace[: self.done], *self.torn]


class Fault(NamedTuple):
    """The `at`-th call of `kind` from when it was set fails, and all later ones if `forever`."""

    kind: str
    at: int
    error: int
    forever: bool


class SimulatedDisk(Files):
    """`Files` in memory. One process. Calls from several threads are serialised."""

    def __init__(
        self,
        *,
        block_bytes: int = 4096,
        record: bool = True,
        boot: int = 0,
        base: Base | None = None,
        killed: Killed | None = None,
    ) -> None:
        """Args: `killed`: the process on this disk was killed, and left some of `base` unsynced."""
        self.block_bytes = block_bytes
        self.boot = boot
        #: what is on the disk or in the page cache when it is first used
        self.base = base or Base({}, {0: {}})
        self.killed = killed

        #: what a power loss cannot take any more
        self.durable = self.base if killed is None else killed.durable
        #: how many calls of each method there were
        self.calls: Counter[str] = Counter()

        #: the point of the crash in the trace of the disk from which this one was made, and the notes up to it
        self.crashed_at = 0
        self.notes: tuple[Any, ...] = ()
        #: of a disk that a crash left: a hash of every name, length and byte
        self.key = 0

        # Another disk is another machine: it shares no lock with this process's other stores.
        self.held_locks: set[str] = set()  # type: ignore[misc]
        self._trace: list[Op] | None = None
        #: the point in the trace at which its own operations begin, after those of the killed process
        self.begins_at = 0

        if record:
            self._trace = [] if killed is None else killed.operations()
            self.begins_at = len(self._trace)

        self._nodes = {n: Node(n, blocks, size) for n, (blocks, size) in self.base.files.items()}
        #: directory -> names. Its number is in `_dirs`
        self._names: dict[str, dict[str, int]] = {}
        self._dirs: dict[str, int] = {}
        self._add_dir("/", 0)
        self._last_number = max((0, *self.base.files, *self.base.dirs))
        if killed is not None:
            self._last_number = killed.last_number

        self._fds: dict[int, tuple[Node, bool]] = {}
        self._last_fd = 1000
        self._locks: dict[int, int] = {}
        self._faults: list[Fault] = []
        self._mapped: list[Node] = []
        self._arrays: dict[int, weakref.ref[Any]] = {}

        #: what `used_ratio` answers, percent, by directory. Others are at 0
        self.used: dict[str, float] = {}
        self._mutex = threading.RLock()

    def _add_dir(self, path: str, number: int) -> None:
        self._dirs[path] = number
        self._names[path] = dict(self.base.dirs[number])
        for name, child in self._names[path].items():
            if child in self.base.dirs:
                self._add_dir(posixpath.join(path, name), child)

    # --- what tests ask for -----------------------------------------------------------------------

    def fail(
        self, kind: str, *, at: int = 1, error: int = errno.EIO, forever: bool = False
    ) -> None:
        """Make the `at`-th next call of a method fail. A failing pwrite writes the first half."""
        self._faults.append(Fault(kind, self.calls[kind] + at, error, forever))

    def heal(self) -> None:
        """No further faults."""
        self._faults.clear()

    def note(self, value: Any) -> None:
        """Remember at this place of the trace that something was promised, such as an ack."""
        with self._mutex:
            self._log(Op("note", 0, value))

    def snapshot(self) -> list[Op]:
        """The trace so far. Raises: ValueError when this disk does not record."""
        with self._mutex:
            if self._trace is None:
                raise ValueError("this disk was made with record=False; use recording()")
            self._see_maps()
            return list(self._trace)

    def recording(self) -> SimulatedDisk:
        """The same disk, unused, with a trace: to crash again while it recovers."""
        made = SimulatedDisk(
            block_bytes=self.block_bytes, boot=self.boot, base=self.base, killed=self.killed
        )
        made.crashed_at, made.notes = self.crashed_at, self.notes
        return made

    def tree(self) -> dict[str, bytes]:
        """Every file's path and content."""
        with self._mutex:
            return {
                posixpath.join(directory, name): bytes(self._content(self._nodes[number]))
                for directory, names in sorted(self._names.items())
                for name, number in sorted(names.items())
                if number in self._nodes
            }

    def number_of(self, path: str) -> int | None:
        """The node that a file or directory is in the trace."""
        return self._look_up(path)

    def content(self, root: str) -> Iterator[tuple[str, bytes]]:
        """Path and content of the files in a directory and those below it."""
        with self._mutex:
            for directory, names in self._names.items():
                if directory.startswith(root):
                    for name, number in names.items():
                        if number in self._nodes:
                            yield f"{directory}/{name}", bytes(self._content(self._nodes[number]))

    def crash_states(self, limit_per_point: int = 64, seed: int = 0) -> Iterator[SimulatedDisk]:
        """Disks that a power loss may leave, at every place of the trace. See `crash_states.py`."""
        from .crash_states import power_loss_states

        return power_loss_states(self, limit_per_point, seed)

    @property
    def last_number(self) -> int:
        """The newest node's."""
        return self._last_number

    def kill_states(self) -> Iterator[SimulatedDisk]:
        """Disks that SIGKILL leaves: the page cache survives, a pwrite may be torn.

        Unsynced bytes stay unsynced: a power loss in the next life may take them.
        """
        from .crash_states import kill_states

        return kill_states(self)

    # --- the machinery ----------------------------------------------------------------------------

    def _enter(self, kind: str) -> None:
        self.calls[kind] += 1
        if self._faults:
            count = self.calls[kind]
            for fault in self._faults:
                if fault.kind == kind and (
                    count == fault.at or (fault.forever and count > fault.at)
                ):
                    raise OSError(fault.error, os.strerror(fault.error))

    def _log(self, op: Op) -> None:
        if self._trace is not None:
            self._see_maps()
            self._trace.append(op)

    def _see_maps(self) -> None:
        """Put into the trace what was stored through shared maps since the last look."""
        seen = []
        for node in self._mapped:
            now = bytes(node.words or b"")  # bytes compare 50 times faster than views
            if now != node.words_seen:
                node.words_seen = now
                seen.append(Op("write", node.number, (self._cut(node, 0, len(now)), None)))
        if seen and self._trace is not None:
            # One entry: in which order they were stored is not known.
            self._trace.append(Op("stores", 0, tuple(seen)))

    def _cut(self, node: Node, start: int, stop: int) -> Blocks:
        """The blocks that overlap [start, stop), padded with zeros."""
        data = self._content(node)
        width = self.block_bytes
        return {
            block: bytes(data[block * width : (block + 1) * width]).ljust(width, b"\0")
            for block in range(start // width, -(-stop // width))
        }

    def _content(self, node: Node) -> bytearray:
        if node.data is None:
            data = bytearray(node.size)
            width = self.block_bytes
            for block, content in node.blocks.items():
                start = block * width
                if start < node.size:
                    data[start : start + width] = content[: node.size - start]
            node.data = data
        return node.data

    def _node(self, fd: int) -> Node:
        try:
            return self._fds[fd][0]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def _split(self, path: PathLike) -> tuple[str, str]:
        directory, name = posixpath.split(_normal(path))
        return directory, name

    def _look_up(self, path: PathLike) -> int | None:
        directory, name = self._split(path)
        return self._names.get(directory, {}).get(name)

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _resize(self, node: Node, size: int) -> None:
        data = self._content(node)
        if size < node.size:
            del data[size:]
        elif not data:
            # Not a page of it is touched before it is written.
            node.data = bytearray(size)
        else:
            data.extend(bytes(size - node.size))
        self._log(Op("resize", node.number, size))
        node.size = size

    # --- Files: descriptors -----------------------------------------------------------------------

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        with self._mutex:
            try:
                self._enter("open_file")
            except OSError as error:
                raise _translate(error, path) from error

            directory, name = self._split(path)
            number = self._names.get(directory, {}).get(name)
            if number is None:
                if not create or directory not in self._names:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
                number = self._new_number()
                self._nodes[number] = Node(number, {}, 0)
                self._names[directory][name] = number
                self._log(Op("link", self._dirs[directory], (name, number)))
            if number not in self._nodes:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))

            self._last_fd += 1
            self._fds[self._last_fd] = (self._nodes[number], writable)
            return self._last_fd

    def close(self, fd: int) -> None:
        with self._mutex:
            node = self._node(fd)
            if self._locks.get(node.number) == fd:
                del self._locks[node.number]
            del self._fds[fd]

    def size(self, fd: int) -> int:
        return self._node(fd).size

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        with self._mutex:
            self._enter("pread")
            return bytes(self._content(self._node(fd))[offset : offset + nbytes])

    def pread_into(self, fd: int, target: memoryview, offset: int) -> int:
        found = self.pread(fd, len(target), offset)
        target[: len(found)] = found
        return len(found)

    def gather(self, view: memoryview, starts: Sequence[int], nbytes: int) -> bytes | None:
        with self._mutex:
            self._enter("pread")
            found = b"".join(view[start : start + nbytes] for start in starts)
            return found if len(found) == nbytes * len(starts) else None

    def data_ranges(self, fd: int, start: int, stop: int) -> list[tuple[int, int]]:
        return [(start, stop)] if start < stop else []

    def drop_cached(self, fd: int, offset: int, length: int) -> None:
        self._node(fd)

    def read_ahead(self, fd: int, offset: int, length: int) -> None:
        self._node(fd)

    def pwrite(self, fd: int, data: Data, offset: int) -> None:
        with self._mutex:
            view = memoryview(data).cast("B")
            try:
                self._enter("pwrite")
            except OSError as error:
                self._write(fd, view[: len(view) // 2], offset)
                raise _translate(error, None) from error
            self._write(fd, view, offset)

    def _write(self, fd: int, view: memoryview, offset: int) -> None:
        node, writable = self._node(fd), self._fds[fd][1]
        if not writable:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if not view:
            return

        stop = offset + len(view)
        content = self._content(node)
        old = node.size
        if stop > old:
            content.extend(bytes(stop - old))
            node.size = stop
        content[offset:stop] = view

        if self._trace is not None:
            grown = stop if stop > old else None
            self._log(Op("write", node.number, (self._cut(node, offset, stop), grown)))

    def allocate(self, fd: int, size: int) -> None:
        with self._mutex:
            node = self._node(fd)
            try:
                self._enter("allocate")
            except OSError as error:
                raise _translate(error, None) from error
            if size > node.size:
                # A machine that dies meanwhile may leave any length between.
                self._resize(node, (node.size + size) // 2)
                self._resize(node, size)
        fail_point("files.allocated")

    def zero(self, fd: int, start: int, stop: int) -> None:
        if start < stop:
            self.pwrite(fd, bytes(stop - start), start)

    def truncate(self, fd: int, size: int) -> None:
        with self._mutex:
            try:
                self._enter("truncate")
            except OSError as error:
                raise _translate(error, None) from error
            if size != self._node(fd).size:
                self._resize(self._node(fd), size)

    def sync_data(self, fd: int) -> None:
        self._sync(fd, "sync_data")

    def sync(self, fd: int) -> None:
        self._sync(fd, "sync")

    def _sync(self, fd: int, kind: str) -> None:
        with self._mutex:
            number = self._node(fd).number
            try:
                self._enter(kind)
            except OSError:
                self._log(Op("sync_failed", number))
                raise
            self._log(Op("sync", number))

    def lock(self, fd: int) -> None:
        with self._mutex:
            if self._locks.setdefault(self._node(fd).number, fd) != fd:
                raise Unavailable("the store is already open", field="lock", pid=None)

    # --- Files: maps ------------------------------------------------------------------------------

    def map_read(self, fd: int, size: int, *, gathered: bool = False) -> memoryview:
        with self._mutex:
            return self._map(fd, size)

    def map_words(self, fd: int, size: int) -> memoryview:
        with self._mutex:
            node = self._node(fd)
            view = self._whole(node, size)
            node.words, node.words_seen = view, bytes(view)
            if self._trace is not None and node not in self._mapped:
                self._mapped.append(node)
            return memoryview(view)

    def _map(self, fd: int, size: int) -> memoryview:
        # The array is to the view what the mmap is on a real disk: it lives as long as any slice of the view.
        array = np.frombuffer(self._whole(self._node(fd), size), dtype=np.uint8)
        view = memoryview(array).toreadonly()
        self._arrays[id(view)] = weakref.ref(array)
        return view

    def _whole(self, node: Node, size: int) -> memoryview:
        if node.size < size:
            raise Corrupt(
                f"a file has {node.size} bytes, expected {size}",
                rule="file length",
                expected=size,
                found=node.size,
            )
        return memoryview(self._content(node))[:size]

    def release_when_unread(self, view: memoryview) -> Callable[[], bool]:
        with self._mutex:
            array = self._arrays.pop(id(view))
            return lambda: array() is None

    def memory_bytes(self) -> int:
        return 1 << 34

    def lock_memory(self, view: memoryview) -> None:
        with self._mutex:
            self._enter("lock_memory")

    def unlock_memory(self, view: memoryview) -> None:
        with self._mutex:
            self._enter("unlock_memory")

    def unmap(self, view: memoryview) -> None:
        with self._mutex:
            self._see_maps()
            self._arrays.pop(id(view), None)
            try:
                view.release()
            except BufferError:
                return

    # --- Files: names -----------------------------------------------------------------------------

    def sync_dir(self, path: PathLike) -> None:
        with self._mutex:
            self._enter("sync_dir")
            number = self._dirs.get(_normal(path))
            if number is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            self._log(Op("sync_dir", number))

    def rename(self, source: PathLike, target: PathLike) -> None:
        with self._mutex:
            self._enter("rename")
            directory, old = self._split(source)
            into, new = self._split(target)

            names = self._names[directory]
            if old not in names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
            if directory.split("/")[1] != into.split("/")[1]:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

            if directory != into:
                # Each directory is settled for itself: a crash may leave both names, or none.
                number = self._names[into][new] = names.pop(old)
                self._log(Op("moved_in", self._dirs[into], (new, number)))
                self._log(Op("unlink", self._dirs[directory], old))
                return

            names[new] = names.pop(old)
            self._move_dirs(_normal(source), _normal(target))
            self._log(Op("rename", self._dirs[directory], (old, new, names[new])))

    def _move_dirs(self, source: str, target: str) -> None:
        """A renamed directory takes all in it along."""
        for table in (self._dirs, self._names):
            for path in [p for p in table if p == source or p.startswith(source + "/")]:
                table[target + path.removeprefix(source)] = table.pop(path)  # type: ignore[attr-defined]

    def is_dir(self, path: PathLike) -> bool:
        with self._mutex:
            return _normal(path) in self._dirs

    def unlink(self, path: PathLike) -> None:
        with self._mutex:
            self._enter("unlink")
            directory, name = self._split(path)
            if self._names.get(directory, {}).pop(name, None) is not None:
                self._log(Op("unlink", self._dirs[directory], name))

    def list(self, path: PathLike) -> list[str]:
        with self._mutex:
            return sorted(self._names.get(_normal(path), {}))

    def exists(self, path: PathLike) -> bool:
        with self._mutex:
            return _normal(path) in self._dirs or self._look_up(path) is not None

    def size_of(self, path: PathLike) -> int:
        with self._mutex:
            number = self._look_up(path)
            if number is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return self._nodes[number].size

    def make_dir(self, path: PathLike, mode: int = 0o700) -> None:
        with self._mutex:
            normal = _normal(path)
            if normal not in self._dirs:
                try:
                    self._enter("make_dir")
                except OSError as error:
                    raise _translate(error, path) from error
                self._make_dir(normal)

    def make_dirs(self, path: PathLike, mode: int = 0o700) -> None:
        with self._mutex:
            normal = _normal(path)
            if normal in self._dirs:
                return
            parent = posixpath.dirname(normal)
            self.make_dirs(parent, mode)
            self._enter("make_dirs")
            self._make_dir(normal)
            self.sync_dir(parent)

    def make_dirs_durable(self, path: PathLike) -> None:
        with self._mutex:
            self.make_dirs(path)
            directory = _normal(path)
            while directory != "/":
                directory = posixpath.dirname(directory)
                self.sync_dir(directory)

    def _make_dir(self, normal: str) -> None:
        parent, name = posixpath.split(normal)
        if parent not in self._dirs:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), normal)
        number = self._new_number()
        self._dirs[normal] = number
        self._names[normal] = {}
        self._names[parent][name] = number
        self._log(Op("mkdir", self._dirs[parent], (name, number)))

    def remove_tree(self, path: PathLike) -> None:
        with self._mutex:
            normal = _normal(path)
            for name in self.list(normal):
                self.remove_tree(posixpath.join(normal, name))
            self.unlink(normal)
            self._dirs.pop(normal, None)
            self._names.pop(normal, None)

    def free_bytes(self, path: PathLike) -> int:
        return 0 if self.used_ratio(path) > 90 else 1 << 40

    def used_ratio(self, path: PathLike) -> float:
        return self.used.get(_normal(path), 0.0)

    def read_file(self, path: PathLike) -> bytes:
        with self._mutex:
            number = self._look_up(path)
            if number is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return bytes(self._content(self._nodes[number]))

    def write_file_atomic(self, path: PathLike, data: bytes) -> None:
        temporary = f"{_normal(path)}.tmp"
        fd = self.open_file(temporary, create=True)
        try:
            self.truncate(fd, 0)
            self.pwrite(fd, data, 0)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(temporary, path)
        self.sync_dir(posixpath.dirname(_normal(path)))

    def boot_id(self) -> str:
        return f"boot-{self.boot}"


def _normal(path: PathLike) -> str:
    text = os.fspath(path)
    if text.startswith("/") and "//" not in text and "/." not in text:
        return text
    return os.path.abspath(text)
