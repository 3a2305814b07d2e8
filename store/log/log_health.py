"""Whether a log takes appends: what a failed append or a failed sync leaves, and what mends it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.base.status import PutStatus
from raymq.store.log.control_files.meta import TRUNCATING, Meta
from raymq.store.log.segments.mapped_file import MappedFile

from .flush import FlushFailed


class LogHealth:
    """Why nothing more is appended to a log, if so.

    A failed append that could not be taken back stops appends until it can be. A failed sync stops them for good, and
    the next start refuses the store.
    """

    def __init__(self, meta: Meta, *, end: Callable[[], int]) -> None:
        self._meta = meta
        self._end = end
        #: why nothing more is appended; None: all is well
        self.poisoned: str | None = None
        #: a sync failed: no later start may trust bytes that are not proved to be on disk. After other errors the next
        #: start repairs the log.
        self.sync_failed = False
        #: (file, position, length) of a failed append that could not be taken back yet; None: there is none
        self._untaken: tuple[MappedFile, int, int] | None = None
        #: called with the first failed sync, before it is noted
        self.on_sync_failed: Callable[[FlushFailed], None] = lambda _: None
        #: called if a sync failed that neither the owner nor a flush service asked for: no put may be acknowledged any
        #: more. Callers: another thread
        self.on_poisoned: Callable[[str], None] = lambda _: None

    def check(self) -> None:
        """Check that the log takes appends. Raises: Unavailable."""
        if self.poisoned is not None:
            raise Unavailable(
                f"the store stopped writing: {self.poisoned}",
                field="store",
                status=PutStatus.SERVICE_NOT_AVAILABLE.value,
            )

    def zero(self, file: MappedFile, position: int, length: int) -> None:
        """Write zeros over a failed append. If that fails too, appends stop until it works, or the next start cuts."""
        try:
            file.pwrite(bytes(length), position)
        except (OSError, RayMQError) as error:
            self._untaken = (file, position, length)
            self.poisoned = f"a failed append could not be taken back: {error}"
            with contextlib.suppress(OSError, RayMQError):
                self._meta.update({TRUNCATING: self._end()})
            return
        self._sync(file)

    def _sync(self, file: MappedFile) -> bool:
        """Sync the zeros. Returns: whether they are on disk; if not, the log is poisoned."""
        try:
            file.sync()
        except OSError as error:
            self.poison(f"fdatasync: {error}")
            return False
        return True

    @property
    def may_take_back(self) -> bool:
        """Whether appends have stopped for a failed one alone, which `take_back` may take back later."""
        return self._untaken is not None and not self.sync_failed

    def take_back(self) -> bool:
        """Try again to take back a failed append. Callers: with the put lock held.

        Returns: whether the log takes appends again. Durable: the next start does not cut at what is appended then.
        """
        if self._untaken is None or self.sync_failed:
            return self.poisoned is None
        file, position, length = self._untaken

        try:
            file.pwrite(bytes(length), position)
        except (OSError, RayMQError) as error:
            self.poisoned = f"a failed append could not be taken back: {error}"
            return False
        if not self._sync(file):
            return False
        try:
            self._meta.update({TRUNCATING: None})
        except (OSError, RayMQError) as error:
            self.poisoned = f"a failed append was taken back, and that cannot be noted: {error}"
            return False

        self._untaken = self.poisoned = None
        return True

    def poison(self, reason: str) -> None:
        """Record a failed sync: nothing is appended or synced any more, and the next start refuses the store."""
        if not self.sync_failed:
            self.sync_failed = True
            self.poisoned = reason
            self.on_sync_failed(FlushFailed(reason, offset=self._end(), errno=errno.EIO))
            with contextlib.suppress(OSError, RayMQError):
                self._meta.update({"poisoned": reason})

    def fail_prewrite(self, reason: str) -> None:
        """Poison the log, because a sync of the allocator failed. Callers: the thread of `FileAllocator`."""
        self.poison(reason)
        self.on_poisoned(reason)
