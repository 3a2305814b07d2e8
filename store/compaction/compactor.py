"""The choice of a queue's records that stay: the latest of each key, unless it has no body. Columns, not a map of keys.

Source: CompactionLog#getOffsetMap, #shouldRetainMsg, RocketMQ 5.3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Bools
from raymq.store.records import record
from raymq.store.records.keys import key_column

from .sparse_log import SegmentPair, SparseLog

#: units decoded at a time
_SLICE_UNITS = 8192


def slices(pair: SegmentPair) -> Iterator[pa.RecordBatch]:
    """The records of a pair, decoded, some thousands at a time."""
    units = pair.units()
    for low in range(0, pair.count, _SLICE_UNITS):
        part = units[low : low + _SLICE_UNITS]
        yield record.decode(*pair.records_of(part), part["size"])


def rows_to_keep(pairs: list[SegmentPair]) -> list[Bools]:
    """For each pair, a mask of the records that stay.

    Memory: the keys of all of them, once each, and some 20 bytes per record.
    """
    keys: list[pa.Array] = []
    bodies: list[Bools] = []
    for pair in pairs:
        for batch in slices(pair):
            keys.append(key_column(batch.column("properties")))
            lengths = pc.binary_length(batch.column("body")).to_numpy(zero_copy_only=False)
            bodies.append(lengths > 0)

    if not keys:
        return [np.zeros(0, dtype=np.bool_) for _ in pairs]

    encoded = pa.chunked_array(keys).combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.arange(len(codes))
    # Queue offsets ascend, so the last row of a key is its latest; of equal indices numpy keeps the last.
    latest = np.full(len(encoded.dictionary) + 1, -1, dtype=np.int64)
    latest[codes] = rows
    keep = (latest[codes] == rows) & np.concatenate(bodies) & (codes >= 0)

    ends = np.cumsum([pair.count for pair in pairs])
    return np.split(keep, ends[:-1])


def write_compacted(pairs: list[SegmentPair], log: SparseLog) -> list[str]:
    """Write the records of sealed pairs that stay into `compacting` beside them; sealed and synced.

    Returns: the names of the new files. Callers: sealed pairs never change, so no lock is needed.
    """
    keep = rows_to_keep(pairs)
    with closing(log.compacting()) as new:
        for pair, is_kept in zip(pairs, keep, strict=True):
            units = pair.units()[is_kept]
            for low in range(0, len(units), _SLICE_UNITS):
                part = units[low : low + _SLICE_UNITS]
                new.append(*pair.records_of(part), part)
        if new.pairs:
            new.seal()
        return [pair.log.path.name for pair in new.pairs]
