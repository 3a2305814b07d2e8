"""Chain units for bytes of the log that have none: the chain is a cache of what the log says."""

from __future__ import annotations

from raymq.store.base.checksum import crc32c
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.control_files.marks import Marks
from raymq.store.log.segments.segment_paths import segment_start_of

from .chain import Chain, ChainUnit
from .epochs import EpochStarts
from .log_reads import LogReads
from .unit_bounds import RecordStarts, unit_bytes


class ChainMaker:
    """Makes the units that a log's chain lacks, and knows the epochs of those that it has lost."""

    def __init__(self, chain: Chain, marks: Marks, reads: LogReads, config: StoreConfig) -> None:
        self._chain = chain
        self._marks = marks
        self._reads = reads
        self._segment_size_bytes = config.segment_size_bytes
        self._append_unit_bytes = config.append_unit_bytes
        #: the epochs of units that the chain may lose, as far as the log's records were read
        self.epoch_starts = EpochStarts()

    def last_epoch(self, end: int) -> int:
        """The epoch of the last record of a log that ends at `end`; 0 for an empty log."""
        last = self._chain.last
        epoch = 0 if last is None else last.epoch
        if self._chain.end < end:
            # An adoption is under way, or has failed. It noted the epochs of the units that the chain lacks.
            return max(epoch, self.epoch_starts.epoch_at(end - 1))
        return epoch

    def note_epochs_from(self, offset: int, end: int) -> None:
        """Remember the epochs of the units that the chain is about to lose, but for bytes that it keeps."""
        cut = self._chain.unit_at(offset)
        begin = offset if cut is None else cut.start
        for unit in self._chain.iter_units(begin, end):
            self.epoch_starts.note(unit.start, unit.epoch)

    def complete(self, start: int, end: int, starts: RecordStarts | None = None) -> None:
        """Make units for the bytes of the log [start, end) that have none. `epoch_starts` has their epochs.

        Args: `starts`: places at which records begin, as far as they are known.
        """
        chain, size = self._chain, self._segment_size_bytes
        position = start if chain.last is None else chain.last.end
        synced = self._marks.synced_end
        while position < end:
            stop = min(end, segment_start_of(position, size) + size)
            if position < synced:
                # No unit mixes bytes that must be on disk with bytes that a power loss may take.
                stop = min(stop, synced)
            # No unit has bytes of two epochs.
            stop = min(stop, self.epoch_starts.next_start(position) or stop)
            last_epoch = 0 if chain.last is None else chain.last.epoch
            epoch = max(last_epoch, self.epoch_starts.epoch_at(position))
            data = unit_bytes(self._reads.raw, position, stop, self._append_unit_bytes, starts)
            unit = ChainUnit(position, position + len(data), epoch, crc32c(data), chain.value)
            chain.append([unit])
            position = unit.end
