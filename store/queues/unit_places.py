"""The places that units of consume queues give to records of a log, which damage or RocketMQ may have made differ.

RocketMQ's CRC covers the body of a record only. A flipped bit in a record's topic, queue id or queue offset leaves a
whole record with a wrong place, while the unit that RocketMQ wrote at first still points at it. So the unit counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.records.rows import RowRun
from raymq.store.state.shard_state import INTERNAL_TOPIC, ShardState
from raymq.store.state.topics import QueueKey

from .consume_queue import BLANK_SIZE, may_be_queue
from .consume_queues import ConsumeQueues

#: units read at a time while those of a piece of the log are looked for
UNITS_AT_ONCE = 1024
#: claims of one queue that are remembered until the walk ends
CLAIMS_MAX = 100
#: queue offsets above this are damage: their units would be above the largest offset of a file
OFFSET_MAX = (1 << 62) // fmt.QUEUE_UNIT_BYTES


class UnitPlace(NamedTuple):
    """The place of a record among the messages of its queue."""

    topic: str
    queue_id: int
    offset: int


#: physical offset -> the place of a record that names another one; None: it has none
OtherPlaces = Mapping[int, UnitPlace | None]


class _Held(NamedTuple):
    """A record whose queue offset is not the next one of its queue. The next record of the queue decides about it."""

    run: RowRun
    next_offset: int


class UnitPlaces:
    """Finds the places of records while their log is walked. Callers: one thread.

    A record whose unit is missing keeps the place that it names. If its queue offset is not the next one, but the next
    record of its queue goes on as if it were, then the offset is damaged, and the record gets the next one.
    """

    def __init__(
        self, queues: ConsumeQueues, upto: int, *, state: ShardState, is_whole: bool
    ) -> None:
        """Args: `upto`: units of records below this physical offset count. `state`: the caller applies the runs to it.
        `is_whole`: the log begins at 0, so that its queues do."""
        self._queues = queues
        self._upto = upto
        self._state = state
        self._is_whole = is_whole
        #: records that name another place than they have
        self.others: dict[int, UnitPlace | None] = {}
        #: the physical offset of the first record without a unit; None: there is none
        self.first_missing: int | None = None
        #: queue -> offsets that records without a unit name, which the queue has a unit for
        self._claims: dict[QueueKey, list[int]] = {}
        self._held: dict[QueueKey, _Held] = {}
        self._has_ended = False
        self._cursors: dict[QueueKey, int] = {}
        self._piece = (0, 0)
        self._units: dict[tuple[int, int], UnitPlace] = {}

    # --- the walk ---------------------------------------------------------------------------------

    def place_all(self, runs: Iterable[RowRun], piece: tuple[int, int]) -> Iterator[RowRun]:
        """The rows of runs in their places. A row may come later, or not at all if no queue can have it.

        Args: `piece`: the range of the log that has the runs. After `end` it may be one that was walked before.
        """
        if self._has_ended:
            yield from placed(runs, self.others)
            return
        for run in runs:
            yield from self._place(run, piece)

    def _place(self, run: RowRun, piece: tuple[int, int]) -> Iterator[RowRun]:
        if run.topic == INTERNAL_TOPIC:
            yield run
            return

        agree = self._agree(run)
        known = int(np.searchsorted(run.positions + run.sizes, self._upto, side="right"))
        differing = np.flatnonzero(~agree[:known])
        if not len(differing) and known == len(run.positions):
            yield from self._go_on(run, has_unit=True)
            return

        elsewhere = self._find_elsewhere(run, differing, piece)
        low = 0
        for row in sorted(elsewhere):
            yield from self._in_halves(part_of(run, low, row), agree[low:row])
            place = elsewhere[row]
            position = int(run.positions[row])
            self.others[position] = place
            yield from self._go_on(moved(part_of(run, row, row + 1), place), has_unit=True)
            low = row + 1
        yield from self._in_halves(part_of(run, low, len(agree)), agree[low:])

    def end(self) -> Iterator[RowRun]:
        """The rows that still wait for the next record of their queue."""
        self._has_ended = True
        held, self._held = self._held, {}
        for key, (run, next_offset) in held.items():
            yield from self._without_next(key, run, next_offset)

    def _agree(self, run: RowRun) -> Bools:
        """A mask of the rows at which the unit points that they name."""
        count = len(run.positions)
        agree = np.zeros(count, dtype=np.bool_)
        queue = self._queues.find(run.topic, run.queue_id)
        if queue is None:
            return agree
        low = max(run.first_offset, queue.min_offset)
        high = min(run.first_offset + count, queue.max_offset)
        if low < high:
            units = queue.read(low, high - low)
            rows = slice(low - run.first_offset, low - run.first_offset + len(units))
            agree[rows] = (units["position"] == run.positions[rows]) & (
                units["size"] == run.sizes[rows]
            )
        return agree

    def _find_elsewhere(
        self, run: RowRun, differing: Int64s, piece: tuple[int, int]
    ) -> dict[int, UnitPlace]:
        """The rows that have their unit at another place. Of the others it is noted that they have none."""
        if not len(differing):
            return {}
        units = self._units_of(piece)
        elsewhere: dict[int, UnitPlace] = {}
        for row in differing.tolist():
            position, size = int(run.positions[row]), int(run.sizes[row])
            place = units.get((position, size))
            if place is not None:
                elsewhere[row] = place
                continue
            if self.first_missing is None or position < self.first_missing:
                self.first_missing = position
            self._note_claim((run.topic, run.queue_id), run.first_offset + row)
        return elsewhere

    def _units_of(self, piece: tuple[int, int]) -> dict[tuple[int, int], UnitPlace]:
        """The units that point into a piece of the log, by position and size. Pieces are asked for in order."""
        if piece != self._piece:
            self._piece = piece
            self._units = {}
            for (topic, queue_id), queue in self._queues.items():
                at = self._cursors.get((topic, queue_id), queue.min_offset)
                self._cursors[topic, queue_id] = self._add_units(topic, queue_id, at, piece)
        return self._units

    def _add_units(self, topic: str, queue_id: int, at: int, piece: tuple[int, int]) -> int:
        """Add a queue's units of a piece. Returns: where to begin with the next piece."""
        low, high = piece
        queue = self._queues.get(topic, queue_id)
        while at < queue.max_offset:
            units = queue.read(at, UNITS_AT_ONCE)
            if not len(units):
                break
            positions = units["position"].astype(np.int64)
            inside = (positions >= low) & (positions < high) & (units["size"] != BLANK_SIZE)
            for row in np.flatnonzero(inside).tolist():
                unit = (int(positions[row]), int(units["size"][row]))
                self._units.setdefault(unit, UnitPlace(topic, queue_id, at + row))
            # A damaged unit may say any position, also one above all units.
            if ((positions >= high) & (positions < self._upto)).any():
                break
            at += len(units)
        return at

    def _note_claim(self, key: QueueKey, offset: int) -> None:
        queue = self._queues.find(*key)
        claims = self._claims.setdefault(key, [])
        if queue is not None and offset < queue.max_offset and len(claims) < CLAIMS_MAX:
            claims.append(offset)

    def claims(self) -> Iterable[tuple[QueueKey, list[int]]]:
        """Queues, and the offsets that records without a unit name although the queue has a unit for them."""
        return [(key, sorted(offsets)) for key, offsets in self._claims.items() if offsets]

    # --- records without a unit -------------------------------------------------------------------

    def _in_halves(self, run: RowRun, agree: Bools) -> Iterator[RowRun]:
        """The rows of a run whose records name their place, those with a unit and those without one apart."""
        edges = [0, *(np.flatnonzero(agree[1:] != agree[:-1]) + 1).tolist(), len(agree)]
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            if low < high:
                yield from self._go_on(part_of(run, low, high), has_unit=bool(agree[low]))

    def _go_on(self, run: RowRun, *, has_unit: bool) -> Iterator[RowRun]:
        """The rows of a run, after a held one of the same queue. A single row at an unexpected offset is held."""
        key = (run.topic, run.queue_id)
        held = self._held.pop(key, None)
        if held is not None:
            if run.first_offset == held.next_offset + 1:
                yield self._corrected(held)
            else:
                yield from self._without_next(key, held.run, held.next_offset)

        default = 0 if self._is_whole else None
        next_offset = self._state.next_offsets.get(key, default)
        expected = next_offset is None or run.first_offset == next_offset
        if not has_unit and len(run.positions) == 1 and next_offset is not None and not expected:
            self._held[key] = _Held(run, next_offset)
        elif may_be_queue(*key) and 0 <= run.first_offset < OFFSET_MAX:
            yield run
        else:
            self._drop(run)

    def _corrected(self, held: _Held) -> RowRun:
        place = UnitPlace(held.run.topic, held.run.queue_id, held.next_offset)
        self.others[int(held.run.positions[0])] = place
        return moved(held.run, place)

    def _without_next(self, key: QueueKey, run: RowRun, next_offset: int) -> Iterator[RowRun]:
        """A held row that no later record puts at the next offset. Source: ConsumeQueue#putMessagePositionInfo."""
        if not may_be_queue(*key) or run.first_offset < next_offset:
            self._drop(run)
        elif run.first_offset - next_offset < self._queues.file_units:
            yield run
        elif self._queues.find(*key) is None and run.first_offset < OFFSET_MAX:
            # The first message of a queue.
            yield run
        else:
            yield self._corrected(_Held(run, next_offset))

    def _drop(self, run: RowRun) -> None:
        for position in run.positions.tolist():
            self.others[position] = None


def part_of(run: RowRun, low: int, high: int) -> RowRun:
    """Rows [low, high) of a run."""
    return run._replace(
        first_offset=run.first_offset + low,
        positions=run.positions[low:high],
        sizes=run.sizes[low:high],
        first_sequence=run.first_sequence + (low if run.producer_id is not None else 0),
        batch=run.batch.slice(low, high - low),
        tag_hashes=None if run.tag_hashes is None else run.tag_hashes[low:high],
    )


def moved(run: RowRun, place: UnitPlace) -> RowRun:
    """A run with another place."""
    return run._replace(topic=place.topic, queue_id=place.queue_id, first_offset=place.offset)


def placed(runs: Iterable[RowRun], others: OtherPlaces) -> Iterator[RowRun]:
    """Runs with their rows in the places that `UnitPlaces` has found."""
    known = np.array(sorted(others), dtype=np.int64)
    for run in runs:
        low, high = np.searchsorted(known, (run.positions[0], run.positions[-1] + 1)).tolist()
        begin = 0
        for position in known[low:high].tolist():
            row = int(np.searchsorted(run.positions, position))
            if run.positions[row] != position:
                continue
            if begin < row:
                yield part_of(run, begin, row)
            place = others[position]
            if place is not None:
                yield moved(part_of(run, row, row + 1), place)
            begin = row + 1
        if begin < len(run.positions):
            yield part_of(run, begin, len(run.positions)) if begin else run
