"""Walked records in slices of bounded memory, and the rows of a slice by queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base.arrays import Int64s
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.config.delay_levels import DEFAULT_LEVELS_MS
from raymq.store.log.record_reads import Records, read_records
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.queues.unit_places import OtherPlaces
from raymq.store.records import record, rows

#: bytes of records decoded at a time. A larger record is decoded alone
SLICE_BYTES = 32 << 20


class RecordRange(NamedTuple):
    """Whole records of a range of a commit log, in order."""

    log: MappedFileQueue
    #: physical offset and bytes of each record
    positions: Int64s
    sizes: Int64s

    def select(self, kept: Any) -> RecordRange:
        """Some of the records, by a mask or a slice."""
        return self._replace(positions=self.positions[kept], sizes=self.sizes[kept])

    def slices(self) -> Iterator[RecordRange]:
        """At most DECODED_ROWS_MAX records and about SLICE_BYTES of them at a time."""
        ends = np.cumsum(self.sizes)
        low, count = 0, len(self.sizes)
        while low < count:
            done = int(ends[low - 1]) if low else 0
            high = int(np.searchsorted(ends, done + SLICE_BYTES, side="right"))
            high = min(max(high, low + 1), low + rows.DECODED_ROWS_MAX)
            yield self.select(slice(low, high))
            low = high

    def read(self) -> Records:
        """The records. Callers: on a slice.

        Raises: Corrupt for a record that is unreadable, or was damaged since the walk.
        """
        end = int(self.positions[-1] + self.sizes[-1]) if len(self.positions) else 0
        return read_records(self.log, self.positions, self.sizes, end, check_position=False)

    def decode(self) -> pa.RecordBatch:
        """Every record as a row of RECORD_SCHEMA. Raises: as `read`."""
        return record.decode(*self.read())


class QueueRows(NamedTuple):
    """The rows of one queue in a slice, in log order."""

    topic: str
    queue_id: int
    #: queue offset, physical offset, bytes and tags code of each row
    offsets: Int64s
    positions: Int64s
    sizes: Int64s
    tags_codes: Int64s

    def part(self, low: int, high: int) -> QueueRows:
        """Rows [low, high)."""
        return QueueRows(self.topic, self.queue_id, *(column[low:high] for column in self[2:]))

    def runs(self) -> Iterator[QueueRows]:
        """The rows in runs of consecutive queue offsets."""
        if not len(self.offsets):
            return
        cuts = np.flatnonzero(np.diff(self.offsets) != 1) + 1
        edges = [0, *cuts.tolist(), len(self.offsets)]
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            yield self.part(low, high)


def by_queue(
    part: RecordRange, levels_ms: tuple[int, ...] = DEFAULT_LEVELS_MS
) -> Iterator[QueueRows]:
    """The rows of a slice by topic and queue. Args: `levels_ms`: the delay of each level."""
    batch = part.decode()
    keep = rows.queued(batch)
    if not keep.all():
        batch = batch.filter(pa.array(keep))
        part = part.select(keep)
    if not batch.num_rows:
        return

    topics = batch.column("topic").dictionary_encode()
    names = topics.dictionary.to_pylist()
    queue_ids = batch.column("queue_id").to_numpy()
    keys = (topics.indices.to_numpy().astype(np.int64) << 32) + queue_ids

    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    offsets = batch.column("queue_offset").to_numpy()
    codes = rows.tags_codes("", batch)

    for chosen in np.split(order, edges):
        topic = names[int(keys[chosen[0]] >> 32)]
        queue_id = int(queue_ids[chosen[0]])
        positions, sizes = part.positions[chosen], part.sizes[chosen]
        code = codes[chosen]
        if topic == SCHEDULE_TOPIC:
            code = rows.tags_codes(topic, batch.take(pa.array(chosen)), levels_ms)
        yield QueueRows(topic, queue_id, offsets[chosen], positions, sizes, code)


def in_log_order(
    part: RecordRange, others: OtherPlaces, levels_ms: tuple[int, ...] = DEFAULT_LEVELS_MS
) -> list[QueueRows]:
    """The rows of a slice in runs of consecutive queue offsets, those of one queue in log order.

    Args: `others`: the places of records that name other ones. `levels_ms`: the delay of each level.
    """
    groups = by_queue(part, levels_ms)
    if not others:
        return [run for group in groups for run in group.runs()]

    found = [run for group in groups for each in _moved(group, others) for run in each.runs()]
    # A moved row comes between rows of another group.
    return sorted(found, key=lambda run: int(run.positions[0]))


def _moved(group: QueueRows, others: OtherPlaces) -> Iterator[QueueRows]:
    """The rows of a group, those of `others` alone and in their places."""
    begin = 0
    for row in [row for row, at in enumerate(group.positions.tolist()) if at in others]:
        yield group.part(begin, row)
        place = others[int(group.positions[row])]
        if place is not None:
            one = group.part(row, row + 1)
            offsets = np.array([place.offset], dtype=np.int64)
            yield one._replace(topic=place.topic, queue_id=place.queue_id, offsets=offsets)
        begin = row + 1

    yield group.part(begin, len(group.positions))
