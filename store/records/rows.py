"""Stored records as runs: consecutive rows of one queue (and one producer), found without a loop over rows.

State (store/state/shard_state.py) and consume queues are rebuilt from these on recovery.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.config.delay_levels import DEFAULT_LEVELS_MS

from .binary_columns import value_bytes, value_offsets
from .producer_stamp import STAMP_BYTES, Stamps, read_column
from .properties import TAG_NAME, TAGS
from .property_columns import property_column
from .record_decode import decode

#: most rows decoded at a time: a limit for memory, and for the time during which the GIL is held
DECODED_ROWS_MAX = 8192

_TAGS = re.compile(rb"(?:^|(?<=\x02))TAGS\x01([^\x02]+)")
_DELAY = re.compile(rb"(?s)^(?:.*\x02)?DELAY\x01(\d+)")
#: the columns that decide about the edges of runs, and those of `tags_codes`
RUN_COLUMNS = ("topic", "queue_id", "queue_offset", "store_time_ms", "sys_flag", "properties")


class RowRun(NamedTuple):
    """Consecutive rows of one queue. `batch` has their decoded columns."""

    topic: str
    queue_id: int
    first_offset: int
    store_time_ms: int
    positions: Int64s
    sizes: Int64s
    #: None if the rows have no producer stamp
    producer_id: int | None
    epoch: int
    first_sequence: int
    batch: pa.RecordBatch
    #: the hash of each row's TAGS; None if `runs` was not asked for them
    tag_hashes: Int64s | None


def tag_column(properties: pa.Array) -> pa.Array:
    """TAGS of each row's properties string; null without one.

    If there are several, the last counts: RocketMQ appends a batch's properties to each message's.
    """
    return property_column(properties, TAGS)


def tags_codes(
    topic: str,
    batch: pa.RecordBatch,
    levels_ms: tuple[int, ...] = DEFAULT_LEVELS_MS,
    *,
    hashes: Int64s | None = None,
) -> Int64s:
    """The consume-queue tagsCode of each row.

    Args: `levels_ms`: the delay of each level. `hashes`: of the rows' TAGS, if they are known.
    Source: CommitLog#checkMessageAndReturnSize: the hash of TAGS, or for delayed records the delivery time.
    """
    codes = _tag_hashes(batch) if hashes is None else hashes
    if topic == SCHEDULE_TOPIC:
        at = [
            _deliver_at(row["properties"], row["store_time_ms"], levels_ms)
            for row in batch.select(["properties", "store_time_ms"]).to_pylist()
        ]
        return np.where(at, np.array(at, dtype=np.int64), codes)
    return codes


def _tag_hashes(batch: pa.RecordBatch) -> Int64s:
    encoded = tag_column(batch.column("properties")).dictionary_encode()
    codes = [fmt.tags_code(tag.as_py().decode("utf-8", "replace")) for tag in encoded.dictionary]
    table = np.array([0, *codes], dtype=np.int64)
    codes_of_rows: Int64s = table[
        encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
    ]
    return codes_of_rows


def _deliver_at(properties: bytes, store_time_ms: int, levels_ms: tuple[int, ...]) -> int:
    """The delivery time of a record of the schedule topic; 0 if it names no level."""
    found = _DELAY.match(properties)
    if not found or not int(found[1]):
        return 0
    return store_time_ms + levels_ms[min(int(found[1]), len(levels_ms)) - 1]


def tags_code_of(
    topic: str,
    properties: bytes,
    store_time_ms: int,
    levels_ms: tuple[int, ...] = DEFAULT_LEVELS_MS,
) -> int:
    """`tags_codes` of one record."""
    if topic == SCHEDULE_TOPIC:
        at = _deliver_at(properties, store_time_ms, levels_ms)
        if at:
            return at
    if TAG_NAME not in properties:
        return 0
    # If there are several, the last counts, as in `properties.decode`.
    found = _TAGS.findall(properties)
    return fmt.tags_code(found[-1].decode("utf-8", "replace")) if found else 0


def queued(batch: pa.RecordBatch) -> Bools:
    """A mask of the rows that have a unit in a consume queue: those of no transaction, and committed ones."""
    kind = batch.column("sys_flag").to_numpy() & fmt.SYS_TRANSACTION_MASK
    return np.asarray(~np.isin(kind, fmt.SYS_UNQUEUED), dtype=np.bool_)


def runs(
    view: memoryview,
    base_offset: int,
    positions: Int64s,
    sizes: Int64s,
    *,
    columns: tuple[str, ...] | None = None,
    hashes_tags: bool = False,
) -> Iterator[RowRun]:
    """Split walked records into runs, in log order.

    Args: `view`: the segment that starts at physical offset `base_offset`. `positions`: physical offsets. `columns`: of
    the batches (all), at least RUN_COLUMNS. `hashes_tags`: the runs have `tag_hashes`, which cost as much for all runs
    as for one. PREPARED and ROLLBACK records belong to no queue and are left out.
    """
    for low in range(0, len(positions), DECODED_ROWS_MAX):
        part_positions = positions[low : low + DECODED_ROWS_MAX]
        part_sizes = sizes[low : low + DECODED_ROWS_MAX]
        batch = decode(view, part_positions - base_offset, part_sizes, columns=columns)
        is_queued = queued(batch)
        if not is_queued.all():
            batch = batch.filter(pa.array(is_queued))
            part_positions = part_positions[is_queued]
            part_sizes = part_sizes[is_queued]
        if batch.num_rows:
            hashes = _tag_hashes(batch) if hashes_tags else None
            yield from _split(batch, part_positions, part_sizes, hashes)


def _split(
    batch: pa.RecordBatch, positions: Int64s, sizes: Int64s, hashes: Int64s | None
) -> Iterator[RowRun]:
    topics = batch.column("topic").dictionary_encode()
    codes = topics.indices.to_numpy()
    queues = batch.column("queue_id").to_numpy()
    offsets = batch.column("queue_offset").to_numpy()
    valid, producer_ids, epochs, sequences = producer_stamps(batch.column("properties"))

    rows = np.arange(batch.num_rows)
    same_queue = (codes[1:] == codes[:-1]) & (queues[1:] == queues[:-1])
    same_producer = (producer_ids[1:] == producer_ids[:-1]) & (epochs[1:] == epochs[:-1])
    same_stamping = same_producer & (valid[1:] == valid[:-1])
    next_sequence = ~valid[1:] | (np.diff(sequences) == 1)
    continues = same_queue & (np.diff(offsets) == 1) & same_stamping & next_sequence

    cuts = [0, *(rows[1:][~continues]).tolist(), batch.num_rows]
    times = batch.column("store_time_ms").to_numpy()
    names: list[Any] = topics.dictionary.to_pylist()
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        stamped = bool(valid[start])
        yield RowRun(
            topic=names[codes[start]],
            queue_id=int(queues[start]),
            first_offset=int(offsets[start]),
            store_time_ms=int(times[stop - 1]),
            positions=positions[start:stop],
            sizes=sizes[start:stop],
            producer_id=int(producer_ids[start]) if stamped else None,
            epoch=int(epochs[start]) if stamped else 0,
            first_sequence=int(sequences[start]) if stamped else 0,
            batch=batch.slice(start, stop - start),
            tag_hashes=None if hashes is None else hashes[start:stop],
        )


def producer_stamps(properties: pa.Array) -> Stamps:
    """The producer of each row, by its properties string.

    Returns: whether the row has a stamp, its producer id, epoch and sequence. Without a stamp the numbers are 0.
    """
    count = len(properties)
    stamps = np.zeros((count, STAMP_BYTES), dtype=np.uint8)
    offsets = value_offsets(properties).astype(np.int64)
    long_enough = np.diff(offsets) >= STAMP_BYTES
    if long_enough.any():
        starts = offsets[:-1][long_enough, None]
        stamps[long_enough] = value_bytes(properties)[starts + np.arange(STAMP_BYTES)]
    return read_column(stamps)
