"""Puts the sound bytes of another replica in the place of damaged ones.

A unit that was lost is read from memory as soon as its bytes have come. When its file is full, a copy of the file with
these bytes takes the file's name. Only confirmed and synced bytes are mended, and only with bytes that have the CRC of
this replica's own chain unit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.log.chain import ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.segment_paths import segment_start_of

from .fitting import SoundBytes, misfit
from .mended_copy import replace_by_copy
from .sound_bytes import mendable_end, window_of

logger = logging.getLogger("raymq.store")

#: how long a read waits while another thread mends
WAIT_S = 2.0
#: a read asks the other replicas for the same unit only once in this time
ASK_AGAIN_MS = 3_000
#: from a copy of a file that failed to the next one, twice as long after each further failure
FILE_RETRY_MS = 30_000
FILE_RETRY_MAX_MS = 3_600_000
#: most bytes that are read from memory. Further units wait until a file was replaced
PATCHED_BYTES_MAX = 64 << 20


class LogMender:
    """Mends one log. Callers: any thread calls `mend`, one calls `replace_files`."""

    def __init__(
        self,
        log: CommitLog,
        ask: Callable[[int, int], Iterable[SoundBytes]],
        *,
        on_patched: Callable[[], None] = lambda: None,
        on_replaced: Callable[[Callable[[int], bool]], None] = lambda _: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args: `ask`: asks other replicas for log bytes [start, stop); it skips those that do not have them.

        `on_patched`: a unit is read from memory now, so its file is to be replaced. `on_replaced`: gets a function that
        says whether the byte at a physical offset is in a file that was replaced, and sound. `is_stopping`: a copy of a
        file ends early.
        """
        self._log = log
        self._ask = ask
        self._on_patched = on_patched
        self._on_replaced = on_replaced
        self._is_stopping = is_stopping
        #: start of a file that could not be replaced -> how long it waits, and until when, ms
        self._waits_ms: dict[int, tuple[int, int]] = {}
        #: held while a unit is mended
        self._lock = threading.Lock()
        #: start of a unit -> when no replica had its bytes, ms
        self._asked_ms: dict[int, int] = {}
        #: starts of the files with patches
        self._patched_files: set[int] = set()
        #: units mended since this object was made, and files replaced
        self.units = self.files = 0
        #: why a file could not be replaced; None: each could
        self.last_error: str | None = None

    @property
    def patched_files(self) -> list[MappedFile]:
        """The files of which some bytes are read from memory."""
        found = map(self._log.segments.find, sorted(self._patched_files))
        return [file for file in found if file is not None]

    def status(self) -> dict[str, Any]:
        """For status displays."""
        return {
            "units": self.units,
            "files": self.files,
            "bytes_in_memory": sum(file.patched_bytes for file in self.patched_files),
            "error": self.last_error,
        }

    def is_chain_broken(self, offset: int) -> bool:
        """Whether this replica's chain does not prove what the bytes at an offset were. Then nothing mends them."""
        try:
            return not window_of(self._log, offset, offset + 1).is_linked
        except (OSError, RayMQError):
            return True

    # --- one unit ---------------------------------------------------------------------------------

    def mend(self, offset: int, *, again: bool = False) -> bool:
        """Mend the unit that holds the byte at `offset`, if it is damaged. Returns: whether its bytes are sound now.

        Args: `again`: ask the other replicas even if none had the bytes a moment ago.
        """
        if not self._log.start <= offset < mendable_end(self._log):
            return False
        if not self._lock.acquire(timeout=WAIT_S):
            return False
        try:
            return self._mend(offset, again)
        except Exception as error:
            # The caller has an error of its own. Chain files may be cut while they are read.
            expected = isinstance(error, (OSError, RayMQError))
            logger.warning(
                "the damage at %d cannot be mended now: %s", offset, error, exc_info=not expected
            )
            return False
        finally:
            self._lock.release()

    def _mend(self, offset: int, again: bool) -> bool:
        log = self._log
        try:
            window = window_of(log, offset, offset + 1)
        except FileNotFoundError:
            return False
        # Bytes that fit a damaged unit of the chain would prove nothing.
        if not window.is_linked or window.units[0].end > mendable_end(log):
            return False

        unit = window.units[0]
        file = log.segments.find(unit.start)
        if file is None:
            return False
        if _is_sound(file, unit):
            log.reads.note_mended(unit.start, unit.end)
            return True
        now_ms = log.clock.monotonic_ms()
        asked_ms = self._asked_ms.get(unit.start)
        if not again and asked_ms is not None and now_ms - asked_ms < ASK_AGAIN_MS:
            return False

        if not self._patch(file, unit):
            self._asked_ms[unit.start] = now_ms
            return False
        self._asked_ms.pop(unit.start, None)
        log.reads.note_mended(unit.start, unit.end)
        self._on_patched()
        return True

    def _patch(self, file: MappedFile, unit: ChainUnit) -> bool:
        """Let a unit be read from memory, with the bytes of another replica. Returns: False if none has them."""
        patched = sum(each.patched_bytes for each in self.patched_files)
        if patched + unit.end - unit.start > PATCHED_BYTES_MAX:
            return False

        for found in self._ask(unit.start, unit.end):
            fault = misfit(unit, found)
            if fault is not None:
                logger.warning("another replica cannot mend %d: %s", unit.start, fault)
                continue
            file.patch(unit.start - file.start, found.data)
            self._patched_files.add(file.start)
            self.units += 1
            logger.warning(
                "%s: the damaged bytes [%d, %d) are replaced by those of another replica",
                file.path,
                unit.start,
                unit.end,
            )
            return True
        return False

    # --- whole files ------------------------------------------------------------------------------

    def replace_files(self) -> None:
        """Replace each full file of which bytes are read from memory by a copy with these bytes."""
        now_ms = self._log.clock.monotonic_ms()
        for start in sorted(self._patched_files):
            file = self._log.segments.find(start)
            if file is None:
                # It was deleted.
                self._patched_files.discard(start)
                self._waits_ms.pop(start, None)
                continue

            wait_ms, until_ms = self._waits_ms.get(start, (FILE_RETRY_MS // 2, now_ms))
            if not self._is_full(file) or now_ms < until_ms:
                continue

            try:
                self._replace(file)
                self._waits_ms.pop(start, None)
            except (OSError, RayMQError) as error:
                # A copy costs a whole file of reads and writes.
                wait_ms = min(2 * wait_ms, FILE_RETRY_MAX_MS)
                self._waits_ms[start] = (wait_ms, now_ms + wait_ms)
                logger.warning("%s is not replaced: %s", file.path, error)
                self.last_error = f"{file.path} is not replaced: {error}"

        if not self._waits_ms:
            self.last_error = None

    def _is_full(self, file: MappedFile) -> bool:
        """Whether nothing is written to a file any more, by this process or by a flush service."""
        is_last = file is self._log.segments.files[-1]
        return not is_last and file.start + file.size <= mendable_end(self._log)

    def _replace(self, file: MappedFile) -> None:
        unsound = replace_by_copy(
            self._log,
            file,
            lambda offset: self.mend(offset, again=True),
            is_stopping=self._is_stopping,
        )
        if unsound is None:
            # It was deleted, or the process is ending.
            return
        self.files += 1
        with self._lock:
            if not file.patched_bytes:
                self._patched_files.discard(file.start)
        logger.warning("%s was replaced by a copy with sound bytes", file.path)

        def is_sound(offset: int) -> bool:
            inside = segment_start_of(offset, file.size) == file.start
            return inside and not any(start <= offset < stop for start, stop in unsound)

        self._on_replaced(is_sound)


def _is_sound(file: MappedFile, unit: ChainUnit) -> bool:
    try:
        return crc32c(file.read(unit.start - file.start, unit.end - file.start)) == unit.crc
    except Corrupt:
        return False
