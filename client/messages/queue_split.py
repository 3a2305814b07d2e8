"""Splits rows of Spark and Ray Data by the queue of each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.records.binary_columns import value_offsets
from raymq.store.records.record import PUT_SCHEMA, check_put

from .keys import key_properties
from .partitioner import queues_of
from .property_rows import joined_properties
from .row_numbers import renumbered
from .topic_values import TopicValues

#: so many neighbours without a key go to one queue
TURN_ROWS = 10_000
#: bytes of a piece of one queue's rows, if they are not one row
PIECE_BYTES = 16 << 20

#: what the check of rows does not look at: sender and shard do
_ANY_TOPIC, _ANY_SIZE = "rows", 2**31 - 1


def numbered(
    batches: Iterable[pa.RecordBatch], partition: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches of a task, each with the number of its first row for `split`. Tasks begin with different queues.

    The numbers do not depend on the size of the batches: a repeated task, whose batches may be others, gives each row
    the same number.
    """
    row = partition * TURN_ROWS
    for batch in batches:
        yield row, batch
        row += batch.num_rows


def start_of(first_row: int, partition: int) -> int:
    """The number of a row among those of its task. Args: `first_row`: as `numbered` gives it."""
    return first_row - partition * TURN_ROWS


def split(
    batch: pa.RecordBatch,
    queues: int,
    first_row: int,
    *,
    values: TopicValues,
    properties: pa.Array | None = None,
    numbers: Int64s | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split columns key, tag, partition and those of the value into (queue_id, rows as PUT_SCHEMA), in row order.

    Args: `first_row`: the number of the first row, which chooses the queue of rows without a key (`numbered`).
    `values`: of the topic. `properties`: the encoded ones of each row besides its key. `numbers`: those of the rows in
    their batch, by default their places.
    Raises: Rejected for a queue out of range, a value that the topic does not take, such as null, or a row that the log
    cannot hold.
    """
    count = batch.num_rows
    if not count:
        return

    keys = pc.cast(batch.column("key"), pa.binary())
    if values.schema is None:
        bodies = pc.cast(batch.column("value"), pa.binary())
    else:
        bodies = values.encode(batch, numbers)
    bodies, null_properties = values.stored(bodies, numbers)
    tags = pc.cast(batch.column("tag"), pa.string())
    partition_column = batch.column("partition")

    places = np.arange(count) if numbers is None else numbers
    queue_of_row = ((first_row + places) // TURN_ROWS % queues).astype(np.int32)
    if keys.null_count < count:
        hashed = queues_of(keys.fill_null(b""), queues)
        queue_of_row = np.where(
            keys.is_valid().to_numpy(zero_copy_only=False), hashed, queue_of_row
        )

    if partition_column.null_count < count:
        if not pa.types.is_integer(partition_column.type):
            partition_column = pc.cast(partition_column, pa.int32())
        partitions = partition_column.fill_null(0).to_numpy()
        has_partition = partition_column.is_valid().to_numpy(zero_copy_only=False)
        is_outside = has_partition & ((partitions < 0) | (partitions >= queues))
        if is_outside.any():
            place = int(np.argmax(is_outside))
            row = place if numbers is None else int(numbers[place])
            message = f"row {row}: partition {int(partitions[place])} is outside 0 to {queues - 1}"
            raise Rejected(message, field="partition", limit=queues - 1, row=row)
        queue_of_row = np.where(has_partition, partitions.astype(np.int32), queue_of_row)

    text = key_properties(keys)
    for more in (properties, null_properties):
        if more is not None:
            text = joined_properties(text, more)
    table = pa.record_batch(
        [bodies, tags, text, pa.array(np.zeros(count, dtype=np.int64))],
        schema=pa.schema([field.with_nullable(True) for field in PUT_SCHEMA]),
    )

    order = np.argsort(queue_of_row, kind="stable")
    taken = table.take(pa.array(order))
    taken = pa.record_batch(taken.columns, schema=PUT_SCHEMA)
    try:
        # A later check would count in the rows of one queue.
        check_put(_ANY_TOPIC, taken, max_message_bytes=_ANY_SIZE)
    except Rejected as error:
        if error.fields.get("row") is None:
            raise
        raise renumbered(error, int(places[order[error.fields["row"]]])) from None
    edges = np.searchsorted(queue_of_row[order], np.arange(queues + 1))

    for queue_id in range(queues):
        low, high = int(edges[queue_id]), int(edges[queue_id + 1])
        if high > low:
            for piece in pieces(taken.slice(low, high - low), PIECE_BYTES):
                yield queue_id, piece


def pieces(rows: pa.RecordBatch, piece_bytes: int) -> Iterator[pa.RecordBatch]:
    """Rows of one queue, of PUT_SCHEMA, in pieces of at most `piece_bytes`, or of one row.

    A shard takes no larger ones, and a batch of Spark or Ray Data may have hundreds of MiB.
    """
    columns = [rows.column(name) for name in ("body", "tag", "properties")]
    ends: Int64s = np.sum([value_offsets(column) for column in columns], axis=0, dtype=np.int64)
    first = 0
    while first < rows.num_rows:
        fitting = int(np.searchsorted(ends, ends[first] + piece_bytes, side="right")) - 1
        last = max(first + 1, fitting)
        yield rows.slice(first, last - first)
        first = last
