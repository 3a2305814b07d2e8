"""What anything outside the log reads of it: bytes, records, walks, and the damage that such reads have met."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Corrupt
from raymq.store.log.recovery.log_scan import next_record
from raymq.store.log.segments.log_files import read_each, read_of
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.log.segments.segment_paths import segment_start_of
from raymq.store.records import record

from . import record_reads
from .record_reads import WALK_BYTES, Records, RecordsAtOffsets, WalkedPiece

logger = logging.getLogger("raymq.store")

_Read = TypeVar("_Read")

#: the bytes at the end of a walk are damaged
_DAMAGED = (
    record.WalkStop.BAD_MAGIC,
    record.WalkStop.BAD_LENGTH,
    record.WalkStop.BAD_CRC,
    record.WalkStop.WRONG_POSITION,
    record.WalkStop.END_OF_DATA,
    record.WalkStop.UNREADABLE,
)
#: most damaged records that are remembered
DAMAGE_MAX = 100
#: most mended ranges that wait for dispatch
MENDED_MAX = 1000


class LogReads:
    """Reads of one commit log. Callers: any thread.

    Args: `end`: the log's end. `check_positions`: the physical offsets inside records count, too. RocketMQ never
    checked them, so that those of a foreign store may be wrong.
    """

    def __init__(
        self, segments: MappedFileQueue, *, end: Callable[[], int], check_positions: bool
    ) -> None:
        self._segments = segments
        self._end = end
        self._check_positions = check_positions
        #: offset -> damage below the confirmed end that reads, dispatch or deliveries skipped
        self.skipped_damage: dict[int, Corrupt] = {}
        #: mends damage at an offset, if another replica has the bytes. Returns: whether to read again. None: no other
        #: replica exists
        self.mend: Callable[[int], bool] | None = None
        #: ranges [start, stop) that were found sound after damage, until dispatch has looked at their units
        self.mended: deque[tuple[int, int]] = deque(maxlen=MENDED_MAX)
        #: lets another thread mend damage at an offset soon
        self.mend_later: Callable[[int], None] = lambda offset: None

    # --- bytes ------------------------------------------------------------------------------------

    def raw(self, start: int, stop: int) -> bytes:
        """Log bytes [start, stop), which lie in one file.

        Raises: OffsetOutOfRange below the log's start, Corrupt naming the first unreadable byte.
        """
        try:
            return self._raw(start, stop)
        except Corrupt:
            return self.mending(lambda: self._raw(start, stop))

    def _raw(self, start: int, stop: int) -> bytes:
        return read_of(self._segments, start, stop, self._end())

    def raw_each(self, offsets: Sequence[int], nbytes: int) -> bytes:
        """The first `nbytes` at each offset, in one piece: `log_files.read_each`."""
        try:
            return read_each(self._segments, offsets, nbytes, self._end())
        except Corrupt:
            return self.mending(lambda: read_each(self._segments, offsets, nbytes, self._end()))

    # --- records at known offsets -----------------------------------------------------------------

    def records(
        self, positions: Int64s, sizes: Int64s, *, check_crc: bool = True, check: bool = True
    ) -> Records:
        """The records at ascending physical offsets, in any files. `check=False`: they may be damaged.

        Raises: OffsetOutOfRange below the log's start, Corrupt for the first record that is damaged or unreadable.
        """
        read = partial(record_reads.read_unchecked, self._segments, positions, sizes, self._end())
        if check:
            read = partial(
                record_reads.read_records,
                self._segments,
                positions,
                sizes,
                self._end(),
                check_crc=check_crc,
                check_position=self._check_positions,
            )
        return self.mending(read)

    def properties(self, positions: Int64s, sizes: Int64s) -> pa.Array:
        """The properties strings of records at ascending physical offsets: `record_reads.read_properties`.

        Raises: as `records`.
        """
        return self.mending(
            lambda: record_reads.read_properties(
                self._segments,
                positions,
                sizes,
                self._end(),
                check_position=self._check_positions,
            )
        )

    def undamaged_records(
        self, positions: Int64s, sizes: Int64s, *, check_crc: bool = True, check: bool = True
    ) -> tuple[Records, Int64s]:
        """`records` without the damaged ones, which are noted. Returns: also the rows of the undamaged ones."""
        rows = np.arange(len(positions))
        while True:
            try:
                records = self.records(
                    positions[rows], sizes[rows], check_crc=check_crc, check=check
                )
                return records, rows
            except Corrupt as error:
                self.note_damage(error)
                at = int(error.fields["offset"])
                bad = max(0, int(np.searchsorted(positions[rows], at, side="right")) - 1)
                rows = np.delete(rows, bad)

    def records_at(self, offsets: Int64s) -> RecordsAtOffsets:
        """The records that begin at these offsets: `record_reads.stored_at`."""
        return self.mending(lambda: record_reads.stored_at(self._segments, offsets, self._end()))

    # --- walks ------------------------------------------------------------------------------------

    def walk(
        self,
        at: int,
        stop: int,
        *,
        limit: int | None = None,
        nbytes: int = WALK_BYTES,
        check_crc: bool = True,
        check_position: bool = True,
        mends: bool = True,
    ) -> WalkedPiece:
        """Walk records of the file that holds `at`, up to `stop`: `record_reads.walk_piece`.

        Args: `mends`: wait for other replicas at damage. A caller with a lock that others need does not.
        """
        walk = partial(
            record_reads.walk_piece,
            self.raw if mends else self._raw,
            at,
            min(stop, self._file_end(at)),
            limit=limit,
            nbytes=nbytes,
            check_crc=check_crc,
            check_position=check_position,
        )
        found = walk()
        if mends and found.walk.reason in _DAMAGED and self._try_mend(found.walk.end):
            return walk()
        return found

    def next_walk_start(self, at: int, walk: record.Walk) -> int:
        """The start of the walk after `walk` from `at`: its end, or the next file if only a blank record follows."""
        file_end = self._file_end(at)
        is_full = walk.end > file_end - fmt.BLANK_BYTES
        return file_end if is_full or walk.reason is record.WalkStop.BLANK else walk.end

    def next_record_after(self, offset: int, upto: int) -> int:
        """Offset of the next whole record after a damaged one at `offset`; `upto` if none begins below it."""
        next_start = next_record(self._segments, offset + 1, upto)
        return upto if next_start is None else next_start

    def _file_end(self, offset: int) -> int:
        """End of the file that holds `offset`."""
        size = self._segments.file_size
        return segment_start_of(offset, size) + size

    # --- damage -----------------------------------------------------------------------------------

    def _try_mend(self, offset: int) -> bool:
        return self.mend is not None and self.mend(offset)

    def mending(self, read: Callable[[], _Read]) -> _Read:
        """The result of a read. Damage that it meets is mended, place by place. Raises: Corrupt if that fails."""
        last = -1
        while True:
            try:
                return read()
            except Corrupt as error:
                offset = int(error.fields["offset"])
                # Each place comes once, because those before it are mended.
                if offset <= last or not self._try_mend(offset):
                    raise
                last = offset

    def damage(self, offset: int, fault: str) -> Corrupt:
        """The error for a damaged record at a physical offset."""
        return record_reads.damaged(self._segments, offset, fault)

    def note_damage(self, error: Corrupt) -> None:
        """Remember damage that is skipped, for status. Each offset is logged once."""
        offset = int(error.fields.get("offset", -1))
        if offset not in self.skipped_damage and len(self.skipped_damage) < DAMAGE_MAX:
            self.skipped_damage[offset] = error
            logger.error("%s", error)

    def note_mended(self, start: int, stop: int) -> None:
        """Let dispatch look at the units of records that were damaged: it may have passed over them."""
        if (start, stop) not in self.mended:
            self.mended.append((start, stop))

    def forget_damage(self, is_sound: Callable[[int], bool]) -> None:
        """Forget the damage at offsets that are sound again."""
        for offset in filter(is_sound, list(self.skipped_damage)):
            self.skipped_damage.pop(offset, None)
