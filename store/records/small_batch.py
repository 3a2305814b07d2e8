"""Up to 64 short rows to records, as Python values: for so few rows the fixed cost of arrays is many times theirs.

`record_check.check_put` and `record_encode.encode_batch` choose. Tests compare the bytes of both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.checksum import body_crc
from raymq.store.base.errors import require

from .keys import keyed_rows
from .producer_stamp import PREFIX as STAMP_PREFIX
from .producer_stamp import STAMP_BYTES, Stamp, stamp_list
from .properties import (
    PROPERTY_SEPARATOR,
    TAG_EXTRA_BYTES,
    TAG_NAME,
    ZERO_SECTOR,
    separators_absent,
)

#: columns that a producer sends: `properties` are encoded (store/records/properties.py), without the stamp and TAGS
PUT_SCHEMA = pa.schema(
    [
        pa.field("body", pa.binary(), nullable=False),
        pa.field("tag", pa.string()),
        pa.field("properties", pa.binary()),
        pa.field("born_time_ms", pa.int64()),
    ]
)

#: columns that a put may have after those, in this order. A null, and a column that is absent, is the default: 0, and
#: the address of the connection. `born_host` is a host field as in the record (store/base/format.py)
MORE_SCHEMA = pa.schema(
    [
        pa.field("flag", pa.int32()),
        pa.field("sys_flag", pa.int32()),
        pa.field("born_host", pa.binary()),
    ]
)
_PUT_COLUMNS, _MORE_NAMES = len(PUT_SCHEMA), tuple(MORE_SCHEMA.names)
_NO_MORE = (None,) * len(MORE_SCHEMA)

_is_ended = methodcaller("endswith", PROPERTY_SEPARATOR)

#: with more rows arrays cost less
SMALL_ROWS_MAX = 64
#: longer rows cost more to copy than the arrays cost
SMALL_BYTES_MAX = 128 << 10


class SmallBatch(NamedTuple):
    """The columns of a batch of PUT_SCHEMA, up to SMALL_ROWS_MAX rows and about SMALL_BYTES_MAX bytes."""

    bodies: list[bytes]
    tags: list[str | None]
    properties: list[bytes | None]
    born_times_ms: list[int]
    #: those of MORE_SCHEMA; None: absent
    flags: list[int | None] | None = None
    sys_flags: list[int | None] | None = None
    born_hosts: list[bytes | None] | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows. A RecordBatch has the same attribute."""
        return len(self.bodies)

    def take(self, rows: pa.Array) -> SmallBatch:
        """A batch of these rows. A RecordBatch has the same method."""
        wanted = rows.to_pylist()
        columns: list[Any] = [
            None if column is None else [column[row] for row in wanted] for column in self
        ]
        return SmallBatch(*columns)

    @property
    def more(self) -> tuple[str, ...]:
        """The columns of MORE_SCHEMA that it has."""
        found = zip(_MORE_NAMES, self[_PUT_COLUMNS:], strict=True)
        return tuple(name for name, column in found if column is not None)

    def to_batch(self) -> pa.RecordBatch:
        """The same as a batch of PUT_SCHEMA, and the columns of MORE_SCHEMA that it has."""
        schema = put_schema(self.more)
        columns = [column for column in self if column is not None]
        arrays = [
            pa.array(values, kind) for values, kind in zip(columns, schema.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def put_schema(names: Iterable[str] = ()) -> pa.Schema:
    """PUT_SCHEMA, and after it the columns of MORE_SCHEMA that are among `names`."""
    return _put_schema(frozenset(names))


@lru_cache(maxsize=64)
def _put_schema(names: frozenset[str]) -> pa.Schema:
    return pa.schema([*PUT_SCHEMA, *(field for field in MORE_SCHEMA if field.name in names)])


def more_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """The columns of MORE_SCHEMA that a batch has."""
    if batch.num_columns == _PUT_COLUMNS:
        return {}
    return dict(zip(batch.schema.names[_PUT_COLUMNS:], batch.columns[_PUT_COLUMNS:], strict=True))


def row_lists(batch: pa.RecordBatch) -> SmallBatch:
    """The columns of a batch as lists, however many rows it has."""
    more = more_columns(batch)
    return SmallBatch(
        *(column.to_pylist() for column in batch.columns[:_PUT_COLUMNS]),
        *(more[name].to_pylist() if name in more else None for name in _MORE_NAMES),
    )


def small_batch(batch: pa.RecordBatch) -> SmallBatch | None:
    """A valid batch as a small one; None for a large one, and for a null that is not allowed."""
    if not 0 < batch.num_rows <= SMALL_ROWS_MAX:
        return None
    body, born = batch.column(0), batch.column(3)
    if body.null_count or born.null_count or batch.get_total_buffer_size() > SMALL_BYTES_MAX:
        return None
    return row_lists(batch)


def all_rows_valid(batch: SmallBatch, max_message_bytes: int) -> bool:
    """Whether every row is right. If not, `check_put` names the fault."""
    if max(map(len, batch.bodies), default=0) > max_message_bytes:
        return False
    has_text = any(batch.tags) or any(batch.properties)
    if has_text and not _properties_valid(batch.tags, batch.properties):
        return False
    if batch.sys_flags is None and batch.born_hosts is None:
        return True
    flags, hosts = set(batch.sys_flags or ()), set(batch.born_hosts or ())
    return not any(flag and flag & ~fmt.SYS_OF_SENDER for flag in flags) and all(
        host is None or len(host) in fmt.HOST_BYTES for host in hosts
    )


def _properties_valid(tags: list[str | None], properties: list[bytes | None]) -> bool:
    tag_sizes = [0]
    for tag in {tag for tag in tags if tag}:
        data = tag.encode()
        if not separators_absent(tag) or ZERO_SECTOR in data:
            return False
        tag_sizes.append(len(data) + TAG_EXTRA_BYTES)

    texts = [text for text in properties if text]
    if not all(map(_is_ended, texts)):
        return False
    # What is searched has no separator, so it cannot begin in one text and end in the next.
    joined = b"".join(texts)
    if TAG_NAME in joined or STAMP_PREFIX in joined or ZERO_SECTOR in joined:
        return False
    if STAMP_BYTES + max(tag_sizes) + max(map(len, texts), default=0) <= fmt.PROPERTIES_MAX_BYTES:
        return True
    return all(
        STAMP_BYTES + len(text or b"") + (len(tag.encode()) + TAG_EXTRA_BYTES if tag else 0)
        <= fmt.PROPERTIES_MAX_BYTES
        for tag, text in zip(tags, properties, strict=True)
    )


class EncodedSmallBatch:
    """`record_encode.EncodedBatch` of a small batch, without arrays.

    It also encodes batches of any size whose born hosts are of both kinds: their headers have several widths.
    """

    __slots__ = (
        "_batch",
        "_born",
        "_crcs",
        "_flag",
        "_header",
        "_heads",
        "_magic",
        "_queue_id",
        "_record_sizes",
        "_store",
        "_sys_flag",
        "_tails",
        "count",
        "keyed",
        "size",
    )

    def __init__(
        self,
        topic: bytes,
        magic: int,
        queue_id: int,
        batch: SmallBatch,
        *,
        stamp: Stamp | None,
        born: bytes,
        store: bytes,
    ) -> None:
        """Args: `topic`: its field in the record. `born`, `store`: packed hosts. Raises: Rejected."""
        # Most batches have the same in each row, and rows that differ cost more.
        same = _same_head(batch)
        if same is not None:
            batch = batch._replace(flags=None, sys_flags=None, born_hosts=None)
            born = same.born or born
        self._batch = batch
        self._magic = magic
        self._queue_id = queue_id
        self._born, self._store = born, store
        self._flag = same.flag if same else 0
        self._sys_flag = fmt.host_flags(born, store) | (same.sys_flag if same else 0)
        self._header = fmt.header_struct(len(born) > 8, len(store) > 8)
        #: number of rows
        self.count = len(batch.bodies)
        self._crcs = [body_crc(body) for body in batch.bodies]

        stamps = [b""] * self.count if stamp is None else stamp_list(stamp, self.count)
        tails: list[bytes] = []
        for stored, tag, properties in zip(stamps, batch.tags, batch.properties, strict=True):
            if tag:
                stored += TAG_NAME + tag.encode() + PROPERTY_SEPARATOR
            if properties:
                stored += properties
            tails.append(topic + len(stored).to_bytes(2, "big") + stored)
        self._tails = tails

        #: what each row has in its header; None: all rows have the same there
        self._heads = None if batch[_PUT_COLUMNS:] == _NO_MORE else _heads(batch, born, store)
        if self._heads is None:
            fixed = self._header.size
            self._record_sizes = [
                fixed + len(body) + len(tail)
                for body, tail in zip(batch.bodies, tails, strict=True)
            ]
        else:
            self._record_sizes = [
                head.size + len(body) + len(tail)
                for head, body, tail in zip(self._heads, batch.bodies, tails, strict=True)
            ]
        #: bytes of all records
        self.size = sum(self._record_sizes)
        #: the properties, if one of the rows has a key
        self.keyed = keyed_rows(batch.properties) if any(batch.properties) else None

    @property
    def largest(self) -> tuple[int, int]:
        """The row with the largest record, and the bytes of that record."""
        size = max(self._record_sizes)
        return self._record_sizes.index(size), size

    @property
    def sizes(self) -> Int64s:
        """Bytes of each record."""
        return np.array(self._record_sizes, dtype=np.int64)

    def queue_units(self, start: int, stop: int, position: int) -> bytes:
        """The consume queue units of rows [start, stop). Args: `position`: physical offset of row `start`."""
        sizes = self._record_sizes[start:stop]
        positions = accumulate(sizes, initial=position)
        codes = [fmt.tags_code(tag) if tag else 0 for tag in self._batch.tags[start:stop]]
        return b"".join(map(fmt.QUEUE_UNIT.pack, positions, sizes, codes))

    def bytes_from(self, row: int) -> int:
        """Bytes of the records from `row` on."""
        return sum(self._record_sizes[row:])

    def records(
        self, start: int, stop: int, *, queue_offset: int, physical_offset: int, store_time_ms: int
    ) -> bytes:
        """The records of rows [start, stop), as `EncodedBatch.records` makes them."""
        require(0 <= start <= stop <= self.count, "rows of a batch", start=start, stop=stop)
        if self._heads is not None:
            return self._headed_records(start, stop, queue_offset, physical_offset, store_time_ms)
        bodies, born_times_ms = self._batch.bodies, self._batch.born_times_ms
        magic, queue_id, flag, sys_flag = self._magic, self._queue_id, self._flag, self._sys_flag
        born, store, pack = self._born, self._store, self._header.pack

        parts: list[bytes] = []
        for row in range(start, stop):
            body, size = bodies[row], self._record_sizes[row]
            header = pack(
                size,
                magic,
                self._crcs[row],
                queue_id,
                flag,
                queue_offset,
                physical_offset,
                sys_flag,
                born_times_ms[row],
                born,
                store_time_ms,
                store,
                0,
                0,
                len(body),
            )
            parts += (header, body, self._tails[row])
            queue_offset += 1
            physical_offset += size
        return b"".join(parts)

    def _headed_records(
        self, start: int, stop: int, queue_offset: int, physical_offset: int, store_time_ms: int
    ) -> bytes:
        """`records` of a batch that has columns of MORE_SCHEMA."""
        heads = self._heads or []
        bodies, born_times_ms = self._batch.bodies, self._batch.born_times_ms

        parts: list[bytes] = []
        for row in range(start, stop):
            head, body, size = heads[row], bodies[row], self._record_sizes[row]
            header = head.pack(
                size,
                self._magic,
                self._crcs[row],
                self._queue_id,
                head.flag,
                queue_offset,
                physical_offset,
                head.sys_flag,
                born_times_ms[row],
                head.born,
                store_time_ms,
                self._store,
                0,
                0,
                len(body),
            )
            parts += (header, body, self._tails[row])
            queue_offset += 1
            physical_offset += size
        return b"".join(parts)


class _Head(NamedTuple):
    """What a row of its own has in the header of its record."""

    pack: Callable[..., bytes]
    #: bytes of the header
    size: int
    flag: int
    sys_flag: int
    born: bytes


class _SameHead(NamedTuple):
    """What all rows of a batch have in their headers."""

    flag: int
    sys_flag: int
    born: bytes | None


def _same_head(batch: SmallBatch) -> _SameHead | None:
    """The values of the columns of MORE_SCHEMA, if each has one value in all rows; None: rows differ, or have none."""
    more: tuple[list[Any] | None, ...] = batch[_PUT_COLUMNS:]
    if more == _NO_MORE or any(column and column.count(column[0]) < len(column) for column in more):
        return None
    flag, sys_flag, born = (column[0] if column else None for column in more)
    return _SameHead(flag or 0, sys_flag or 0, born)


def _heads(batch: SmallBatch, born: bytes, store: bytes) -> list[_Head]:
    """Of each row. Args: `born`: the host of rows that name none."""
    absent: list[None] = [None] * len(batch.bodies)
    columns = zip(
        batch.flags or absent, batch.sys_flags or absent, batch.born_hosts or absent, strict=True
    )

    found: list[_Head] = []
    for flag, sys_flag, host in columns:
        host = host or born
        header = fmt.header_struct(len(host) > 8, len(store) > 8)
        bits = (sys_flag or 0) | fmt.host_flags(host, store)
        found.append(_Head(header.pack, header.size, flag or 0, bits, host))
    return found
