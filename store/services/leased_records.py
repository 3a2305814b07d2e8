"""Reads the messages that a worker has leased."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Unavailable
from raymq.store.groups.leases.offsets import NO_OFFSETS, OffsetColumn
from raymq.store.groups.leases.requests import offsets_of
from raymq.store.put.service_host import ServiceHost
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.binary_columns import value_offsets
from raymq.store.state.topics import QueueKey


class LeasedRecords(NamedTuple):
    """What a queue has of leased offsets. All columns ascend."""

    #: raw records of the messages that are there
    records: list[pa.Array]
    #: their offsets
    offsets: OffsetColumn
    #: no message is there, or none any more
    missing: OffsetColumn
    #: offset -> why its message cannot be read
    damaged: dict[int, Corrupt]
    #: not read, since the others have as many bytes as one answer may
    rest: OffsetColumn
    size_bytes: int


def read_leased(
    store: ServiceHost, key: QueueKey, offsets: OffsetColumn, max_bytes: int
) -> LeasedRecords:
    """The messages at ascending offsets of a queue, up to so many bytes. The last one may have more.

    Raises: Unavailable while readers do not see one of them yet: a new leader has to dispatch it first.
    """
    records: list[pa.Array] = []
    found: list[OffsetColumn] = []
    missing: list[int] = []
    damaged: dict[int, Corrupt] = {}
    #: after each group of neighbours
    ends = np.append(np.flatnonzero(np.diff(offsets) != 1) + 1, len(offsets))
    at = size_bytes = 0
    while at < len(offsets) and size_bytes < max_bytes:
        first = int(offsets[at])
        run = int(ends[ends.searchsorted(at, side="right")]) - at
        left_bytes = max_bytes - size_bytes
        try:
            part = store.fetch_whole(*key, first, max_bytes=left_bytes, max_records=run)
        except OffsetOutOfRange:
            missing.append(first)
            at += 1
            continue
        except Corrupt as error:
            damaged[first] = error
            at += 1
            continue

        if part.next_offset <= first or part.records is None:
            raise Unavailable(
                f"message {first} of queue {key[1]} of {key[0]} is not in its consume queue yet; ask again",
                field="consumequeue",
            )
        there = _offsets_of(part.records, first, part.next_offset)
        passed = min(part.next_offset - first, run)
        missing += np.setdiff1d(offsets[at : at + passed], there).tolist()
        if len(there):
            records.append(part.records)
            found.append(there)
            edges = value_offsets(part.records)
            size_bytes += int(edges[-1]) - int(edges[0])
        at += passed

    together = np.concatenate(found) if found else NO_OFFSETS
    return LeasedRecords(records, together, offsets_of(missing), damaged, offsets[at:], size_bytes)


def _offsets_of(records: pa.Array, first: int, stop: int) -> OffsetColumn:
    """The offsets of records from `first` to before `stop`. There may be fewer records."""
    if len(records) == stop - first:
        return np.arange(first, stop)
    rows = decode_records(records, columns=("queue_offset",))
    return np.asarray(rows.column("queue_offset").to_numpy())
