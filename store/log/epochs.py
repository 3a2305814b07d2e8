"""Where epochs begin in the log, as its EPOCH records say.

The chain has the epoch of each unit, but the chain is a cache that is not synced with acknowledgements. Recovery reads
the EPOCH records again, so that rebuilt units have their epochs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from raymq.store.records import properties, rows
from raymq.store.state.shard_state import SNAPSHOT, ShardState


class EpochStarts:
    """Offsets at which epochs are known to begin. Before the first of them the epochs are not known.

    Invariant: offsets and epochs rise together, because a log's epochs never fall.
    """

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._epochs: list[int] = []

    def note(self, offset: int, epoch: int) -> None:
        """An epoch begins at `offset`, or before. Epoch 0 says nothing. Callers: in any order.

        Of two notes that contradict each other, the higher epoch counts: a unit that was made again before its epoch
        was known has a lower one.
        """
        low = bisect_left(self._offsets, offset)
        if epoch <= self.epoch_at(offset):
            return
        # Later starts of no higher epoch are not the first ones.
        high = bisect_right(self._epochs, epoch)
        self._offsets[low:high] = [offset]
        self._epochs[low:high] = [epoch]

    def epoch_at(self, offset: int) -> int:
        """The epoch of the byte at `offset`; 0 if no start at or below it is known."""
        index = bisect_right(self._offsets, offset)
        return self._epochs[index - 1] if index else 0

    def next_start(self, offset: int) -> int | None:
        """The first start above `offset`; None if there is none."""
        index = bisect_right(self._offsets, offset)
        return self._offsets[index] if index < len(self._offsets) else None

    def truncate(self, offset: int) -> None:
        """Forget the epochs that begin at or above `offset`."""
        while self._offsets and self._offsets[-1] >= offset:
            self._offsets.pop()
            self._epochs.pop()


class EpochVisitor:
    """Finds where epochs begin in the records that a recovery walks.

    A leader begins its epoch with an EPOCH record. A snapshot of the shard's state names the epoch that wrote it.
    """

    def __init__(self, starts: EpochStarts, state: ShardState) -> None:
        """Args: `state`: the caller applies each state record to it before `note`."""
        self._starts = starts
        self._state = state
        #: offset of the first part of the snapshot that is being read; -1: none is
        self._snapshot_at = -1

    def note(self, kind: str, at: int) -> None:
        """The state record at physical offset `at` was just applied to the state."""
        if kind != SNAPSHOT:
            self._snapshot_at = -1
        elif self._snapshot_at < 0:
            self._snapshot_at = at
        begin = at if self._snapshot_at < 0 else self._snapshot_at
        if self._state.log_epoch:
            self._starts.note(begin, self._state.log_epoch)


def state_records(run: rows.RowRun) -> Iterator[tuple[str, bytes, int]]:
    """Kind, body and physical offset of each record of a run of the internal topic."""
    texts = run.batch.column("properties").to_pylist()
    bodies = run.batch.column("body").to_pylist()
    for text, body, at in zip(texts, bodies, run.positions.tolist(), strict=True):
        yield properties.decode(text).get(properties.TAGS, ""), body, at
