"""Consume queues against the log: each record has exactly one unit, and no unit has no record.

Source: ConsumeQueue, DefaultMessageStore.CommitLogDispatcherBuildConsumeQueue, RocketMQ 5.3.3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import Corrupt
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.base.rules import MISSING_RULE, UNIT_RECORD_RULE
from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue
from raymq.store.queues.queue_files import OpenFiles
from raymq.store.queues.unit_places import UnitPlace

from .faults import NAMED_MAX
from .read_only import ReadOnlyStore
from .slices import QueueRows, by_queue

#: a tags code up to this is an address in consumequeue_ext, not a hash (ConsumeQueueExt#isExtAddr)
EXT_ADDRESS_MAX = -(1 << 31) - 1
#: queues of RocketMQ's multi-dispatch: their units point at records of other topics
LMQ_PREFIX = "%LMQ%"

HAS_UNIT_RULE = "each message has its unit"
SIZE_RULE = "a unit has its record's size"
TAGS_CODE_RULE = "a unit has its record's tags code"
ENDS_IN_ZEROS_RULE = "nothing follows the last unit"
PLACE_RULE = "a record names the queue and offset of its unit"


class _Queue:
    """One consume queue, and a mask of the units whose record was found."""

    def __init__(self, directory: Path, queue: ConsumeQueue | None) -> None:
        self.directory = directory
        self.queue = queue
        self.low = self.high = 0
        self.units: Any = np.empty(0, dtype=fmt.QUEUE_UNIT_DTYPE)
        if queue is not None:
            self.low, self.high = queue.min_offset, queue.max_offset
            self.units = queue.read(self.low, self.high - self.low)
        self.seen = np.zeros(len(self.units), dtype=np.bool_)

    def locate(self, offset: int) -> tuple[Path, int]:
        """The file of a unit and the unit's position in it."""
        if self.queue is None:
            return self.directory, offset * fmt.QUEUE_UNIT_BYTES
        return self.queue.locate(offset)


class _Unmatched(NamedTuple):
    """Records that have no unit at the places that they name, and the units there (None: there are none)."""

    rows: QueueRows
    units: Any


class QueueCheck:
    """Compares every record below the end with its unit, then every unit with the records.

    Units that a start would cut and rebuild are left out. They are units of records after the log's end and, after a
    power loss, above the queues' synced end. A start dispatches records above the last one that any queue knows.
    """

    def __init__(self, store: ReadOnlyStore) -> None:
        self._store = store
        self._faults = store.faults
        self._opened = OpenFiles(store.files)
        self._queues: dict[tuple[str, int], _Queue] = {}
        #: end of the last record that any queue knows
        self.known = -1
        self._unreadable: set[tuple[str, int]] = set()
        #: rows whose unit is not where their record says
        self._unmatched: list[_Unmatched] = []

    def run(self) -> None:
        """Find every fault of the consume queues."""
        store = self._store
        try:
            directories = store.queue_directories()
            size = store.usual_size([directory for _, _, directory in directories])
            for topic, queue_id, directory in directories:
                self._open(topic, queue_id, directory, size)

            #: a start dispatches the records above this
            self._dispatched_end = min(store.queues_end, self.known)
            #: a start compares all units of such a store with the log, and makes those that are missing
            self._made_at_start = store.crashed and not store.is_own_store
            if self._made_at_start:
                self._dispatched_end = store.end
            for part in store.slices("consume queues"):
                for rows in by_queue(part):
                    self._compare(rows)

            self._check_unmatched()
            for (topic, queue_id), queue in sorted(self._queues.items()):
                self._check_unseen(topic, queue_id, queue)
        finally:
            for queue in self._queues.values():
                if queue.queue is not None:
                    queue.queue.close()

    def _open(self, topic: str, queue_id: int, directory: Path, size: int) -> None:
        size = size or fmt.QUEUE_UNIT_BYTES
        queue = ConsumeQueue(
            directory, size, files=self._store.files, writable=False, opened=self._opened
        )

        try:
            queue.load()
            queue.recover()
        except Corrupt as error:
            queue.close()
            self._faults.error(error)
            self._unreadable.add((topic, queue_id))
            return

        self.known = max(self.known, queue.max_physical_offset)
        self._queues[topic, queue_id] = _Queue(directory, queue)

        if not self._store.crashed:
            at = queue.bytes_after_end()
            if at is not None:
                self._faults.add(
                    *queue.locate(at), ENDS_IN_ZEROS_RULE, "bytes that no dispatch wrote"
                )

    def _compare(self, rows: QueueRows) -> None:
        key = (rows.topic, rows.queue_id)
        if key in self._unreadable:
            return

        queue = self._queues.get(key)
        if queue is None:
            directory = self._store.root / "consumequeue" / rows.topic / str(rows.queue_id)
            queue = self._queues[key] = _Queue(directory, None)

        inside = (rows.offsets >= queue.low) & (rows.offsets < queue.high)
        missing = ~inside & (rows.positions + rows.sizes <= self._dispatched_end)
        self._note_unmatched(rows, missing, None)
        unit_rows = rows.offsets[inside] - queue.low
        if not len(unit_rows):
            return

        units = queue.units[unit_rows]
        positions, sizes = rows.positions[inside], rows.sizes[inside]
        end = self._store.end if self._made_at_start else self._store.queues_end
        kept = positions + sizes <= end
        at_record = units["position"] == positions

        # If two records have one queue offset, it belongs to the record at which its unit points.
        queue.seen[unit_rows[at_record]] = True
        elsewhere = np.zeros(len(rows.offsets), dtype=np.bool_)
        elsewhere[inside] = kept & ~at_record
        self._note_unmatched(rows, elsewhere, units[kept & ~at_record])

        if rows.topic == SCHEDULE_TOPIC:
            # Levels are configurable, but with any delay no message is due before it was stored.
            other_code = units["tags_code"] < 0
        else:
            other_code = units["tags_code"] != rows.tags_codes[inside]
            other_code &= units["tags_code"] > EXT_ADDRESS_MAX

        of_record = kept & at_record & (not self._made_at_start)
        for rule, wrong in (
            (SIZE_RULE, of_record & (units["size"] != sizes)),
            (TAGS_CODE_RULE, of_record & other_code),
        ):
            self._report(key, rows.offsets[inside], wrong, rule, units, positions)

    def _note_unmatched(self, rows: QueueRows, wrong: Bools, units: object) -> None:
        if wrong.any():
            columns = (column[wrong] for column in rows[2:])
            self._unmatched.append(_Unmatched(QueueRows(*rows[:2], *columns), units))

    def _check_unmatched(self) -> None:
        """Add the records that name another place than their unit has, and those that have none."""
        unseen = self._unseen_units()
        next_offsets: dict[tuple[str, int], int] = {}
        for rows, units in self._unmatched:
            pairs = zip(rows.positions.tolist(), rows.sizes.tolist(), strict=True)
            places = [unseen.get(pair) for pair in pairs]
            for row, place in enumerate(places):
                if place is not None:
                    self._add_other_place(rows, row, place)
            left = np.array([place is None for place in places], dtype=np.bool_)
            if self._made_at_start:
                self._check_offsets(rows, left, next_offsets)
            else:
                self._report_unmatched(rows, units, left)

    def _unseen_units(self) -> dict[tuple[int, int], UnitPlace]:
        """The units that no record claims, by position and size."""
        found: dict[tuple[int, int], UnitPlace] = {}
        for (topic, queue_id), queue in self._queues.items() if self._unmatched else ():
            for row in np.flatnonzero(~queue.seen & (queue.units["size"] != BLANK_SIZE)).tolist():
                unit = (int(queue.units["position"][row]), int(queue.units["size"][row]))
                found[unit] = UnitPlace(topic, queue_id, queue.low + row)
        return found

    def _add_other_place(self, rows: QueueRows, row: int, place: UnitPlace) -> None:
        queue = self._queues[place.topic, place.queue_id]
        queue.seen[place.offset - queue.low] = True
        position = int(rows.positions[row])
        self._store.other_places[position] = place
        self._add_damaged(
            rows,
            row,
            f"its unit is message {place.offset} of queue {place.queue_id} of {place.topic}",
        )

    def _add_damaged(self, rows: QueueRows, row: int, detail: str) -> None:
        """Add a record whose place is damaged: no CRC covers it."""
        position = int(rows.positions[row])
        log = self._store.log
        file = None if log is None else log.find(position)
        if file is not None:
            named = f"message {int(rows.offsets[row])} of queue {rows.queue_id} of {rows.topic}"
            self._faults.add(
                file.path,
                position,
                PLACE_RULE,
                f"the record names {named}; {detail}; a start serves it there, and nothing can mend the record",
            )

    def _check_offsets(
        self, rows: QueueRows, left: Bools, next_offsets: dict[tuple[str, int], int]
    ) -> None:
        """Check that the records without a unit continue their queue."""
        key = (rows.topic, rows.queue_id)
        queue = self._queues[key]
        known = queue.queue is not None or not self._store.start
        chosen = np.flatnonzero(left).tolist()
        offsets = rows.offsets[left].tolist()
        for index, (row, offset) in enumerate(zip(chosen, offsets, strict=True)):
            expected = next_offsets.get(key, queue.high if known else offset)
            following = offsets[index + 1] if index + 1 < len(offsets) else None
            if offset != expected and offset >= queue.low and following != offset + 1:
                self._add_damaged(rows, row, f"the next one is message {expected}")
                offset = expected
            next_offsets[key] = offset + 1

    def _report_unmatched(self, rows: QueueRows, units: npt.NDArray[np.void], left: Bools) -> None:
        key = (rows.topic, rows.queue_id)
        if units is None:
            self._report(key, rows.offsets, left, HAS_UNIT_RULE, None, rows.positions)
            return
        queue = self._queues[key]
        blank = units["size"] == BLANK_SIZE
        # If two records have one queue offset, it belongs to the record at which its unit points.
        pointing = left & ~blank & ~queue.seen[rows.offsets - queue.low]
        for rule, wrong in ((HAS_UNIT_RULE, left & blank), (UNIT_RECORD_RULE, pointing)):
            self._report(key, rows.offsets, wrong, rule, units, rows.positions)
        queue.seen[rows.offsets - queue.low] = True

    def _report(
        self,
        key: tuple[str, int],
        offsets: Int64s,
        wrong: npt.NDArray[np.bool_],
        rule: str,
        units: npt.NDArray[np.void],
        positions: Int64s | None,
    ) -> None:
        """Name the first wrong rows and count the others. Args: `positions`: None: no record is known."""
        found = np.flatnonzero(wrong)
        if not len(found):
            return

        queue = self._queues[key]
        for row in found[:NAMED_MAX].tolist():
            offset = int(offsets[row])
            detail = f"queue offset {offset}; "
            if units is not None:
                position, size, code = units[row].tolist()
                detail += f"the unit says position {position}, size {size}, tags code {code}; "
            if positions is None:
                detail += "no record of this queue and offset is there"
            else:
                detail += f"the record is at {int(positions[row])}"
            self._faults.add(*queue.locate(offset), rule, detail)

        file, _ = queue.locate(int(offsets[found[0]]))
        self._faults.count_more(file, rule, len(found) - NAMED_MAX)

    def _check_unseen(self, topic: str, queue_id: int, queue: _Queue) -> None:
        """Add the units that no record claims."""
        if topic.startswith(LMQ_PREFIX):
            return
        units = queue.units
        self._check_gaps((topic, queue_id), queue)
        ends = units["position"].astype(np.int64) + units["size"]
        orphans = ~queue.seen & (units["size"] != BLANK_SIZE) & (ends <= self._store.queues_end)
        # Units of records that retention deleted stay until their file is deleted.
        orphans &= units["position"] >= self._store.start
        offsets = np.arange(queue.low, queue.high)
        self._report((topic, queue_id), offsets, orphans, UNIT_RECORD_RULE, units, None)

    def _check_gaps(self, key: tuple[str, int], queue: _Queue) -> None:
        """Add the offsets above the first unit for which there is no message."""
        gaps = ~queue.seen & (queue.units["size"] == BLANK_SIZE)
        offsets = np.arange(queue.low, queue.high)
        self._report(key, offsets, gaps, MISSING_RULE, queue.units, None)
