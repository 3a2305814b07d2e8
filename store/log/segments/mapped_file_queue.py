"""A directory of equal files that together are one growing sequence of bytes.

Source: MappedFileQueue and AllocateMappedFileService, RocketMQ 5.3.3.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, StorageFull, StoreDamaged, Unavailable, require
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.base.rules import FILE_NAME_RULE
from raymq.store.base.status import PutStatus
from raymq.store.log.flush import FlushFailed

from .mapped_file import MappedFile, not_yet_made
from .segment_paths import file_name, list_segments
from .spare_files import SpareFiles

logger = logging.getLogger("raymq.store")

#: zeros written ahead at a time: few, so that the flush service's sync never waits long for them
PREWRITE_CHUNK_BYTES = 2 << 20
#: no zeros are written for PREWRITE_PAUSE_MS if the log grew by more than this while one chunk was written
PREWRITE_GROWTH_BYTES = PREWRITE_CHUNK_BYTES // 4
PREWRITE_PAUSE_MS = 200
#: how often to check the log's end: while it rests, while it moves
IDLE_WAIT_S, BUSY_WAIT_S = 0.5, 0.01


class MappedFileQueue:
    """Files named by 20-digit start offsets, contiguous, all of `file_size` bytes."""

    def __init__(
        self,
        directory: Path,
        file_size: int,
        *,
        files: Files,
        writable: bool = True,
        write_to: Sequence[Path] = (),
        read_from: Sequence[Path] = (),
    ) -> None:
        """Args: `write_to`: directories for new files in turn, instead of `directory`. `read_from`: more with old
        files."""
        self.directory = directory
        self.write_to = tuple(write_to) or (directory,)
        self._read_from = tuple(dict.fromkeys((directory, *self.write_to, *read_from)))
        #: the directories of `write_to` that get no new files while another has room
        self.full: frozenset[Path] = frozenset()
        #: deleted files that become new ones; None: files are not used again
        self.spares: SpareFiles | None = None
        self.file_size = file_size
        self._files = files
        self._writable = writable
        #: held by growth and cuts: the writer and `FileAllocator` both create files
        self._growth_lock = threading.Lock()
        #: ascending by start, contiguous
        self.files: list[MappedFile] = []

    def load(self) -> None:
        """Open the files.

        A last file that is shorter and has only zeros is an unfinished creation. It is deleted (RocketMQ deletes only
        one of length zero). Raises: Corrupt for a name that is not an offset, a wrong length, a gap.
        """
        self.close()
        found = list_segments(self._read_from, files=self._files)
        paths = [path for path in found if not is_other_directory(path, files=self._files)]
        for path in paths:
            check_name(path)

        if paths and not_yet_made(paths[-1], self.file_size, files=self._files):
            unfinished = paths.pop()
            if self._writable:
                self._files.unlink(unfinished)
                self._files.sync_dir(unfinished.parent)

        size = self.file_size
        before: int | None = None
        try:
            for path in paths:
                before = check_contiguous(path, before, size)
                self.files.append(
                    MappedFile.open(path, before, size, files=self._files, writable=self._writable)
                )
        except BaseException:
            self.close()
            raise

    @property
    def min_offset(self) -> int:
        """Start of the oldest file; 0 when there is none."""
        return self.files[0].start if self.files else 0

    def find(self, offset: int) -> MappedFile | None:
        """The file that holds `offset`; None if no file does."""
        files = self.files
        if not files:
            return None
        index = (offset - files[0].start) // self.file_size
        return files[index] if 0 <= index < len(files) else None

    def create_next(self, start: int = 0) -> MappedFile:
        """Create the next file, or the first one at `start` (rounded down). Raises: StorageFull."""
        with self._growth_lock:
            if self.files:
                start = self.files[-1].start + self.file_size
            else:
                start -= start % self.file_size
                self._files.make_dirs(self.directory)
            file = self._create(start)
            self.files.append(file)
            return file

    def _create(self, start: int) -> MappedFile:
        """The file that begins at `start`. Needs the growth lock. Raises: StorageFull."""
        path = self._directory_of(start) / file_name(start)
        given = self.spares is not None and self.spares.give(path)
        make = MappedFile.open if given else MappedFile.create
        return make(path, start, self.file_size, files=self._files)

    def _directory_of(self, start: int) -> Path:
        """The directory of a new file: in turn, over the directories that are not full.

        Source: MultiPathMappedFileQueue#tryCreateMappedFile.
        """
        usable = [path for path in self.write_to if path not in self.full] or self.write_to
        return usable[start // self.file_size % len(usable)]

    def delete_first(self) -> None:
        """Delete the oldest file. There must be another one. Readers keep the bytes of the deleted file.

        Durable: at return, so that no crash leaves a younger file deleted and an older one not.
        """
        with self._growth_lock:
            require(len(self.files) > 1, "the last file stays", files=len(self.files))
            first = self.files[0]
            # If one of these fails, the file stays in the list, and is unlinked again before any younger one.
            spare = None if self.spares is None else self.spares.take(first.path)
            if spare is None:
                self._files.unlink(first.path)
                fail_point("files.unlinked")
            self._files.sync_dir(first.path.parent)
            # A new list: readers look files up in the one they took.
            self.files = self.files[1:]
            unread = first.retire()
            if spare is not None and self.spares is not None:
                self.spares.add(spare, unread)

    def replace(self, file: MappedFile, copy: Path, still_patched: Collection[int]) -> bool:
        """`MappedFile.replace`. Returns: False, and the copy is deleted, if the file was deleted meanwhile."""
        with self._growth_lock:
            if file in self.files:
                file.replace(copy, still_patched)
                return True
            self._files.unlink(copy)
            return False

    def begin_at(self, start: int) -> None:
        """Replace all files, which hold nothing, by an empty one at `start`. Durable. Raises: StorageFull."""
        # Under one lock: the allocator would make the first file of an empty queue, at 0.
        with self._growth_lock:
            before, self.files = self.files, []
            for file in reversed(before):
                file.destroy()
                self._files.sync_dir(file.path.parent)
            self.files = [self._create(start)]

    def truncate_to(self, offset: int) -> None:
        """Cut at `offset`: later files are destroyed, the rest of its file is made zero.

        Durable: at return. RocketMQ only moves positions back, so that old records after the cut become readable again.
        The oldest file stays even if it begins at `offset` or above.
        """
        with self._growth_lock:
            while len(self.files) > 1 and self.files[-1].start >= offset:
                # A new list: readers look files up in the one they took.
                last, self.files = self.files[-1], self.files[:-1]
                last.destroy()
                # Names are removed one by one. If two were lost in the wrong order, the next start would find a gap.
                self._files.sync_dir(last.path.parent)
            for file in self.files[-1:]:
                if file.start + self.file_size > offset:
                    file.clear(max(offset - file.start, 0))
                    file.sync()

    def sync_range(self, start: int, stop: int) -> None:
        """fdatasync every file that overlaps [start, stop), oldest first. Raises: OSError."""
        for file in list(self.files):
            if file.start < stop and file.start + self.file_size > start:
                file.sync()

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()
        self.files = []


def is_other_directory(path: Path, *, files: Files) -> bool:
    """Whether a path is a directory that nothing reads: RocketMQ passes over them (MappedFileQueue#doLoad)."""
    return not path.name.isdecimal() and files.is_dir(path)


def check_name(path: Path) -> None:
    """Raises: Corrupt for a file whose name is not an offset."""
    if len(path.name) != 20 or not path.name.isdigit():
        fault = (
            f"{path} does not belong here: files are named by a 20-digit offset; move it elsewhere"
        )
        raise Corrupt(fault, path=str(path), rule=FILE_NAME_RULE)


def check_contiguous(path: Path, before: int | None, file_size: int) -> int:
    """The start of a file, by its name. Raises: Corrupt if it does not follow the file that starts at `before`."""
    start = int(path.name)
    expected = start if before is None else before + file_size
    if start != expected or start % file_size:
        raise StoreDamaged(
            f"{path.parent} has a gap: {path.name} was found, {file_name(expected)} was expected "
            f"(files follow each other and begin at multiples of {file_size})",
            path=str(path),
            offset=start,
            rule="files are contiguous",
            expected=expected,
            found=start,
        )
    return start


@dataclass(eq=False)
class _FileRequest:
    """A file that the writer waits for."""

    start: int
    #: why the last attempt to make it failed
    error: StorageFull | OSError | None = None


class FileAllocator:
    """Prepares the next file and pre-writes zeros ahead of the log's end, in paced chunks.

    Small appends into pre-written blocks sync faster than into merely reserved ones. Large appends gain nothing, and
    zeros beside them were measured to halve their rate: both need the disk, a core and the file's lock. While the log
    grows, no zeros are written until half of the window is used up. While the log grows fast, none are written at all,
    except with `warm`.

    If half of the window was used up, the window doubles, so that the next burst finds more zeros. Every zero is
    written once with any window. A full disk only stops this work: the append that needs the space gets the error
    itself. A failed sync ends the worker and is reported: appended records may be lost with it. No later sync of
    another descriptor would report that.
    """

    def __init__(
        self,
        queue: MappedFileQueue,
        tail: Callable[[], int],
        *,
        clock: Clock,
        window_bytes: int,
        warm: bool = False,
        on_sync_failed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Args: `warm`: whole files are written ahead, the last one and the next, and locked in memory.

        Then zeros are written also beside fast appends.
        """
        self._queue = queue
        self._tail = tail
        self._clock = clock
        self._window_bytes = window_bytes
        self._begin_window(warm)
        self._on_sync_failed = on_sync_failed

        #: the failed sync after which nothing is written or synced any more
        self._stop_error: FlushFailed | None = None
        #: files from the log's end on that are locked in memory, if that is permitted
        self._locked: list[MappedFile] = []
        #: the whole window was ready at least once since it grew last
        self.caught_up = False
        self._last_tail = queue.files[0].start if queue.files else 0
        #: the log grows fast: no zeros before this time
        self._paused_until_ms = 0
        self._wake = threading.Event()
        #: the last failure, for status; None again after the next success
        self.last_error: StorageFull | FlushFailed | OSError | None = None

        #: held while `_request` changes; notified when its file was made, or could not be
        self._file_made = threading.Condition()
        self._request: _FileRequest | None = None
        self._running = False

    def _begin_window(self, warm: bool) -> None:
        size = self._queue.file_size
        self._window_max = 2 * size if warm else size
        self._window = self._window_max if warm else min(self._window_bytes, size)
        self._warm = warm

    def set_warm(self, warm: bool) -> None:
        """Begin, or end, to write whole files ahead. Callers: any thread."""
        if warm != self._warm:
            self._begin_window(warm)
            self.wake()

    def next_file(self, timeout_ms: int) -> None:
        """Let this worker make one more file, so that no disk blocks the caller for long.

        If the worker does not run, the caller makes it. Callers: one at a time.
        Raises: StorageFull; Unavailable with CREATE_MAPPED_FILE_FAILED after `timeout_ms`, or at once if the last
        attempt failed. The worker keeps trying. Source: AllocateMappedFileService#putRequestAndReturnMappedFile.
        """
        queue = self._queue
        if self._stop_error is not None:
            raise self._stop_error
        if not self._running:
            try:
                queue.create_next()
            except OSError as failure:
                raise _no_file(f"it cannot be made: {failure}") from failure
            return

        start = queue.files[-1].start + queue.file_size if queue.files else 0
        with self._file_made:
            request = self._request
            if request is None or request.start != start:
                request = self._request = _FileRequest(start)
            self._wake.set()
            if request.error is None:
                self._file_made.wait_for(
                    lambda: self._has(start) or self._error_of(request) or not self._running,
                    timeout_ms / 1000,
                )
            if self._has(start):
                return
            error = self._error_of(request)

        if isinstance(error, StorageFull):
            raise error
        if error is not None:
            raise _no_file(f"it cannot be made: {error}") from error
        raise _no_file(f"it was not made within {timeout_ms} ms (allocate_timeout_ms)")

    def _has(self, start: int) -> bool:
        files = self._queue.files
        return bool(files) and files[-1].start >= start

    def _error_of(self, request: _FileRequest) -> StorageFull | FlushFailed | OSError | None:
        return request.error or self._stop_error

    def _make_requested(self) -> bool:
        """Make the file that the writer waits for. Returns: False if it waits for none."""
        request = self._request
        if request is None:
            return False

        error: StorageFull | OSError | None = None
        if not self._has(request.start):
            try:
                self._queue.create_next()
            except (StorageFull, OSError) as failure:
                error = failure

        with self._file_made:
            request.error = error
            if error is None and self._request is request:
                self._request = None
            self._file_made.notify_all()

        if error is not None:
            raise error
        return True

    def step(self) -> bool:
        """Do one small piece of work. Returns: whether there may be more at once."""
        if self._stop_error is not None:
            return False
        try:
            worked = self._step()
        except FlushFailed as error:
            self.break_off(error)
            self._on_sync_failed(str(error))
            return False
        except (StorageFull, OSError) as error:
            self.last_error = error
            return False
        if worked:
            self.last_error = None
        return worked

    def break_off(self, error: FlushFailed) -> None:
        """Write and sync nothing more, after a failed sync here or elsewhere. Callers: any thread."""
        with self._file_made:
            self._stop_error = self.last_error = error
            self._file_made.notify_all()

    def _step(self) -> bool:
        if self._make_requested():
            return True
        files = self._queue.files
        if not files:
            return False

        tail, ready = self._tail(), self.ready
        moved = tail != self._last_tail
        self._last_tail = tail

        if self.caught_up and ready < self._window // 2:
            self._window = min(2 * self._window, self._window_max)
            self.caught_up = False

        enough = ready >= self._window // 2
        if moved and enough:
            return False

        size = self._queue.file_size
        at = max(0, (tail - files[0].start) // size)
        # With whole files nothing is written during appends until the log's end reaches the next file.
        want = files[0].start + at * size + 2 * size if self._warm else tail + self._window

        paused = self._paused
        for file in files[at:] if not paused else ():
            position = min(want - file.start, file.size)
            if file.prewritten < position:
                file.prewrite(min(file.prewritten + PREWRITE_CHUNK_BYTES, position))
                if self._tail() - tail > PREWRITE_GROWTH_BYTES and not self._warm:
                    self._paused_until_ms = self._clock.monotonic_ms() + PREWRITE_PAUSE_MS
                return True
        if files[-1].start + size < want:
            self._queue.create_next()
            return True
        if paused:
            return False

        self.caught_up = True
        if self._warm:
            self._lock_files(tail)
        else:
            self._unlock_files()
        return self._queue.spares is not None and self._queue.spares.step()

    @property
    def _paused(self) -> bool:
        """Whether no zeros are written now, because the log grew fast."""
        return self._clock.monotonic_ms() < self._paused_until_ms

    def _lock_files(self, tail: int) -> None:
        """Lock the files from the log's end on in memory, and unlock those before it. Failures are only logged.

        Source: DefaultMappedFile#warmMappedFile, #mlock, #munlock.
        """
        size = self._queue.file_size
        for file in [file for file in self._locked if file.start + size <= tail]:
            self._locked.remove(file)
            file.unlock_memory()
        for file in self._queue.files:
            if file.start + size > tail and file not in self._locked:
                self._locked.append(file)
                try:
                    file.lock_memory()
                except OSError as error:
                    logger.warning("%s is not locked in memory: %s", file.path, error)

    def _unlock_files(self) -> None:
        """Unlock the files that were locked while whole files were written ahead."""
        while self._locked:
            self._locked.pop().unlock_memory()

    @property
    def ready(self) -> int:
        """Pre-written bytes after the log's end."""
        tail, files = self._tail(), self._queue.files
        return sum(max(0, file.start + file.prewritten - max(tail, file.start)) for file in files)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping` returns True: the body of a thread."""
        self._running = True
        try:
            while not stopping():
                tail = self._tail()
                while not stopping() and self.step():
                    pass
                idle = tail == self._tail() and self._request is None
                wait_s = IDLE_WAIT_S if idle else BUSY_WAIT_S
                self._wake.wait(PREWRITE_PAUSE_MS / 1000 if self._paused else wait_s)
                self._wake.clear()
        finally:
            with self._file_made:
                self._running = False
                self._file_made.notify_all()

    def wake(self) -> None:
        """End the worker's wait."""
        self._wake.set()


def _no_file(why: str) -> Unavailable:
    return Unavailable(
        f"the log needs its next file, and {why}. Nothing was stored; retry later, and look at the disk",
        field="disk",
        status=PutStatus.CREATE_MAPPED_FILE_FAILED.value,
    )
