"""Compares rows with those that an earlier attempt has stored in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.client.consume.range_reader import read_range
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.binary_columns import ranges, value_bytes, value_offsets
from raymq.store.records.producer_stamp import STAMP_BYTES
from raymq.store.records.properties import PROPERTY_SEPARATOR, TAG_NAME
from raymq.store.records.rows import producer_stamps

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

_COLUMNS = ("queue_offset", "body", "properties")


class StoredRows(NamedTuple):
    """Where the rows of a producer are. Rows of others may be between them."""

    producer_id: int
    topic: str
    queue_id: int
    shard: int
    #: of the first row
    first_sequence: int
    #: of the first row; -1: deleted
    first_offset: int
    #: of the last row; -1: deleted
    last_offset: int


def check_same(cluster: ClusterHandle, rows: pa.RecordBatch, stored: StoredRows) -> None:
    """Compare body, tag and properties of rows of PUT_SCHEMA with those that are stored. Deleted ones are passed over.

    Raises: Rejected if one differs; as `read_range`.
    """
    if stored.last_offset < 0:
        return
    try:
        _compare(cluster, rows, stored, max(stored.first_offset, 0))
    except OffsetOutOfRange as error:
        # The first ones were deleted.
        _compare(cluster, rows, stored, int(error.fields["min"]))


def _compare(cluster: ClusterHandle, rows: pa.RecordBatch, stored: StoredRows, first: int) -> None:
    bodies, texts = rows.column("body"), _texts(rows)
    where = (stored.topic, stored.queue_id, stored.shard)
    for records in read_range(cluster, *where, first, stored.last_offset + 1):
        found = decode_records(records, columns=_COLUMNS)
        properties = found.column("properties")
        stamps = producer_stamps(properties)
        places = stamps.sequences - stored.first_sequence
        is_own = stamps.valid & (stamps.producer_ids == np.uint64(stored.producer_id))
        is_own &= (places >= 0) & (places < rows.num_rows)

        mask, indices = pa.array(is_own), pa.array(places[is_own])
        own_texts = _after_stamp(properties.filter(mask))
        is_same = pc.and_(
            pc.equal(found.column("body").filter(mask), bodies.take(indices)),
            pc.equal(own_texts, texts.take(indices)),
        )
        if not pc.all(is_same, min_count=0).as_py():
            offset = found.column("queue_offset").filter(mask)[pc.index(is_same, False).as_py()]
            raise other_rows(
                f"another row at offset {offset} of queue {stored.queue_id} of {stored.topic}"
            )


def other_rows(what: str) -> Rejected:
    """The error of a task whose rows are not those of an earlier attempt. Args: `what`: that attempt has stored."""
    return Rejected(
        f"an earlier attempt of this task, or an earlier write under the same writeId, has stored {what}: the plan "
        "gives other rows, or another order, each time. Use delivery='staged' under another writeId, for a stream with "
        "a new checkpoint; or, with the same number of partitions, verify=False, which takes the rows that are stored",
        field="writeId",
        limit="the same rows in the same order",
    )


def _after_stamp(properties: pa.Array) -> pa.Array:
    """The properties of records with a producer's stamp, without that."""
    offsets = value_offsets(properties).astype(np.int64)
    return ranges(value_bytes(properties), offsets[:-1] + STAMP_BYTES, offsets[1:])


def _texts(rows: pa.RecordBatch) -> pa.Array:
    """The properties of rows of PUT_SCHEMA as a record has them after the producer's stamp: the tag comes first."""
    tag = rows.column("tag").cast(pa.binary()).fill_null(b"")
    texts = rows.column("properties").fill_null(b"")
    with_tag = pc.binary_join_element_wise(
        pa.scalar(TAG_NAME), tag, pa.scalar(PROPERTY_SEPARATOR), texts, b""
    )
    return pc.if_else(pc.equal(pc.binary_length(tag), 0), texts, with_tag)
