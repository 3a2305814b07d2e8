"""One row to one record, without arrays. With arrays of one item a put of a single message takes many times as long.

`record_check.check_put` and `record_encode.prepare` choose. Tests compare the bytes of both ways.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store import format as fmt
from raymq.store.arrays import Int64s
from raymq.store.checksum import body_crc
from raymq.store.errors import broken

from .keys import keyed_row
from .producer_stamp import PREFIX as STAMP_PREFIX
from .producer_stamp import STAMP_BYTES, Stamp, stamp_bytes
from .properties import PROPERTY_SEPARATOR, TAG_EXTRA_BYTES, TAG_NAME, separators_absent

#: columns that a producer sends: `properties` are encoded (store/records/properties.py), without the stamp and TAGS
PUT_SCHEMA = pa.schema(
    [
        pa.field("body", pa.binary(), nullable=False),
        pa.field("tag", pa.string()),
        pa.field("properties", pa.binary()),
        pa.field("born_time_ms", pa.int64()),
    ]
)

#: copying a longer row costs more than the arrays cost
BATCH_BYTES_MAX = 64 << 10

_HEADER = fmt.HEADER


class Row(NamedTuple):
    """The values of the only row of a batch of PUT_SCHEMA."""

    body: bytes
    tag: str | None
    properties: bytes | None
    born_time_ms: int

    @property
    def num_rows(self) -> int:
        """1, as a batch of this row would have."""
        return 1

    def to_batch(self) -> pa.RecordBatch:
        """This row as a batch of PUT_SCHEMA."""
        return pa.RecordBatch.from_arrays(
            [
                pa.array([self.body], pa.binary()),
                pa.array([self.tag], pa.string()),
                pa.array([self.properties], pa.binary()),
                pa.array([self.born_time_ms], pa.int64()),
            ],
            schema=PUT_SCHEMA,
        )


def only_row(batch: pa.RecordBatch) -> Row | None:
    """The row of a small batch of one; None for other batches, and for a null that is not allowed."""
    if batch.num_rows != 1:
        return None
    body, _, _, born = batch.columns
    if body.null_count or born.null_count or batch.get_total_buffer_size() > BATCH_BYTES_MAX:
        return None
    return Row(*(column.to_pylist()[0] for column in batch.columns))


def plain(row: Row, max_message_bytes: int) -> bool:
    """Whether a row is right. If not, `check_put` names the fault."""
    if len(row.body) > max_message_bytes:
        return False
    stored = STAMP_BYTES
    if row.tag:
        if not separators_absent(row.tag):
            return False
        stored += len(row.tag.encode()) + TAG_EXTRA_BYTES
    if row.properties:
        if row.properties[-1:] != PROPERTY_SEPARATOR:
            return False
        if TAG_NAME in row.properties or STAMP_PREFIX in row.properties:
            return False
        stored += len(row.properties)
    return stored <= fmt.PROPERTIES_MAX_BYTES


class PreparedRow:
    """`record_encode.Prepared` for one row, without arrays. Hosts are IPv4, flags 0."""

    __slots__ = (
        "_body",
        "_born_time_ms",
        "_host",
        "_magic",
        "_queue_id",
        "_tail",
        "keyed",
        "_tag",
        "size",
    )

    #: number of rows
    count = 1

    def __init__(
        self, topic: bytes, magic: int, queue_id: int, row: Row, *, stamp: Stamp | None, host: bytes
    ) -> None:
        """Args: `topic`: its field in the record. `host`: the 8 bytes of born and store host."""
        self._magic = magic
        self._queue_id = queue_id
        self._host = host
        self._body, self._tag, properties, self._born_time_ms = row
        tag = self._tag
        stored = b"" if stamp is None else stamp_bytes(*stamp)
        if tag:
            stored += TAG_NAME + tag.encode() + b"\x02"
        stored += properties or b""
        #: the properties, if they have a key
        self.keyed = keyed_row(properties) if properties else None
        self._tail = topic + len(stored).to_bytes(2, "big") + stored
        #: bytes of the record
        self.size = _HEADER.size + len(self._body) + len(self._tail)

    @property
    def sizes(self) -> Int64s:
        """Bytes of each record, an array of one. It is made on demand, after the row is in the log."""
        return np.array([self.size], dtype=np.int64)

    @property
    def tags_codes(self) -> Int64s:
        """The consume queue's tags code of each row, an array of one."""
        return np.array([fmt.tags_code(self._tag)], dtype=np.int64)

    def bytes_from(self, row: int) -> int:
        """Bytes of the records from `row` on."""
        return 0 if row else self.size

    def encode(
        self, start: int, stop: int, *, queue_offset: int, physical_offset: int, store_time_ms: int
    ) -> bytes:
        """The record, as `Prepared.encode` makes it. The only rows are [0, 1)."""
        if start or stop != 1:
            raise broken("the row of a batch of one", start=start, stop=stop)

        body = self._body
        header = _HEADER.pack(
            self.size,
            self._magic,
            body_crc(body),
            self._queue_id,
            0,
            queue_offset,
            physical_offset,
            0,
            self._born_time_ms,
            self._host,
            store_time_ms,
            self._host,
            0,
            0,
            len(body),
        )

        return b"".join((header, body, self._tail))
