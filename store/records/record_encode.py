"""Columns to records: one Arrow kernel joins the pieces, without a Python object per message.

Source: MessageExtEncoder of RocketMQ 5.3.3; the byte table is in store/base/format.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int32s, Int64s
from raymq.store.base.checksum import body_crc, body_crcs
from raymq.store.base.errors import PropertiesTooLong, Rejected, require

from .binary_columns import one_value, value_bytes, value_lengths, value_offsets
from .keys import Keyed, keyed_column
from .producer_stamp import STAMP_BYTES, Stamp, stamped_rows
from .properties import PROPERTY_SEPARATOR, TAG_NAME
from .small_batch import EncodedSmallBatch, SmallBatch, more_columns, row_lists

#: of a host field: the port comes last
_PORT_BYTES = 4


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """A checked batch, encoded but for the fields that need the put lock.

    These are queue offset, physical offset and store time.
    """

    #: rows
    count: int
    #: bytes of each record
    sizes: Int64s
    #: consume-queue tags code of each row
    tags_codes: Int64s
    _headers: npt.NDArray[Any]
    #: properties of the rows when one of them has a key
    keyed: Keyed | None
    #: the columns after the header: arrays of `count` values or one scalar for all rows
    _pieces: tuple[Any, ...]

    @property
    def largest(self) -> tuple[int, int]:
        """The row with the largest record, and the bytes of that record."""
        row = int(self.sizes.argmax())
        return row, int(self.sizes[row])

    def bytes_from(self, row: int) -> int:
        """Bytes of the records from `row` on."""
        return int(self.sizes[row:].sum())

    def queue_units(self, start: int, stop: int, position: int) -> bytes:
        """The consume queue units of rows [start, stop). Args: `position`: physical offset of row `start`."""
        sizes = self.sizes[start:stop]
        positions = position + np.cumsum(sizes) - sizes
        return fmt.pack_queue_units(positions, sizes, self.tags_codes[start:stop])

    def records(
        self, start: int, stop: int, *, queue_offset: int, physical_offset: int, store_time_ms: int
    ) -> pa.Buffer:
        """The records of rows [start, stop), one after the other, as they go to the log.

        Args: queue and physical offset of row `start`. Callers: one thread, under the put lock.
        """
        require(0 <= start <= stop <= self.count, "rows of a batch", start=start, stop=stop)
        headers = self._headers[start:stop]
        count = stop - start
        if not count:
            return pa.py_buffer(b"")

        sizes = self.sizes[start:stop]
        ends = np.cumsum(sizes)
        headers["queue_offset"] = np.arange(queue_offset, queue_offset + count)
        headers["physical_offset"] = ends + (physical_offset - sizes)
        headers["store_time_ms"] = store_time_ms

        pieces = [
            piece if isinstance(piece, pa.Scalar) else piece.slice(start, count)
            for piece in self._pieces
        ]
        joined = pc.binary_join_element_wise(
            _fixed_column(headers.view(np.uint8).reshape(count, -1)),
            *pieces,
            b"",
            null_handling="replace",
            null_replacement="",
        )
        return joined.buffers()[2].slice(0, int(ends[-1]))


def encode_batch(
    topic: str,
    queue_id: int,
    batch: pa.RecordBatch | SmallBatch,
    *,
    stamp: Stamp | None,
    store_host: tuple[str, int],
    born_host: tuple[str, int] | None = None,
    small: SmallBatch | None = None,
    crcs: Int32s | None = None,
) -> EncodedBatch | EncodedSmallBatch:
    """Encode the parts of a batch that need no put lock. The batch must have passed `check_put`.

    Args: `stamp` is that of row 0; None writes none. `born_host` is that of rows that name none, and defaults to
    `store_host`; IPv6 sets the sys_flag bits. `small` is what `check_put` returned. `crcs`: of the
    bodies, if they are known; None: they are computed.
    Raises: Rejected for a stamp or host that cannot be written.
    """
    store_bytes = fmt.pack_host(*store_host)
    born_bytes = fmt.pack_host(*born_host) if born_host else store_bytes
    topic_bytes, magic = _topic_field(topic)
    if small is None:
        columns = batch.to_batch() if isinstance(batch, SmallBatch) else batch
        more = more_columns(columns)
        if "born_host" in more and columns.num_rows:
            more["born_host"] = more["born_host"].fill_null(born_bytes)
            widths = value_lengths(more["born_host"])
            if (widths == widths[0]).all():
                born_bytes = bytes(int(widths[0]))
            else:
                # Headers of several widths: few batches have them, and row by row is simplest.
                small = row_lists(columns)
    if small is not None:
        return EncodedSmallBatch(
            topic_bytes, magic, queue_id, small, stamp=stamp, born=born_bytes, store=store_bytes
        )

    count = columns.num_rows
    body, tag, properties, born = columns.columns[:4]

    # topic, and the length of all properties, which is set below; the stamp is the first property
    head = topic_bytes + b"\0\0"
    fixed = (
        np.frombuffer(bytearray(head * count), dtype=np.uint8).reshape(count, len(head))
        if stamp is None
        else stamped_rows(head, stamp, count)
    )
    pieces: list[Any] = [body, _fixed_column(fixed)]

    stored: Int64s = np.full(count, STAMP_BYTES if stamp else 0, dtype=np.int64)
    tags_codes: Int64s = np.zeros(count, dtype=np.int64)
    if tag.null_count < count:
        piece, lengths, tags_codes = _tag_piece(tag)
        pieces.append(piece)
        stored += lengths
    if properties.null_count < count:
        pieces.append(properties)
        stored += value_lengths(properties)

    fixed[:, len(head) - 2 : len(head)].view(">i2")[:, 0] = stored

    template = _header_template(magic, queue_id, born_bytes, store_bytes)
    headers = np.repeat(template, count)
    if more:
        _set_more(headers, more)
    body_lengths = value_lengths(body)
    sizes = body_lengths + stored + (headers.dtype.itemsize + len(head))
    headers["size"] = sizes
    headers["body_crc"] = body_crcs(body) if crcs is None else crcs
    headers["born_time_ms"] = born.to_numpy()
    headers["body_length"] = body_lengths
    keyed = keyed_column(properties)
    return EncodedBatch(count, sizes, tags_codes, headers, keyed, tuple(pieces))


@lru_cache(maxsize=256)
def _header_template(magic: int, queue_id: int, born: bytes, store: bytes) -> npt.NDArray[Any]:
    """The header fields that all records of a batch share; the others are 0."""
    template = np.zeros(1, dtype=fmt.header_dtype(len(born) > 8, len(store) > 8))
    template["magic"] = magic
    template["queue_id"] = queue_id
    template["sys_flag"] = fmt.host_flags(born, store)
    template["born_ip"], template["born_port"] = np.void(born[:-4]), _port(born)
    template["store_ip"], template["store_port"] = np.void(store[:-4]), _port(store)
    return template


def _set_more(headers: npt.NDArray[Any], more: dict[str, pa.Array]) -> None:
    """Set the fields of MORE_SCHEMA. Args: `more`: their columns; the hosts are of one width, none of them null."""
    if "flag" in more:
        headers["flag"] = more["flag"].fill_null(0).to_numpy()
    if "sys_flag" in more:
        headers["sys_flag"] |= more["sys_flag"].fill_null(0).to_numpy()
    if "born_host" in more:
        hosts = more["born_host"]
        start, stop = value_offsets(hosts)[[0, -1]].tolist()
        rows = value_bytes(hosts)[start:stop].reshape(len(hosts), -1)
        width = rows.shape[1] - _PORT_BYTES
        headers["born_ip"] = np.ascontiguousarray(rows[:, :width]).view(f"V{width}")[:, 0]
        headers["born_port"] = np.ascontiguousarray(rows[:, width:]).view(">i4")[:, 0]


def _port(packed: bytes) -> int:
    return int.from_bytes(packed[-4:], "big", signed=True)


@lru_cache(maxsize=256)
def _topic_field(topic: str) -> tuple[bytes, int]:
    """Length and name of a topic, and the magic that goes with the length's width.

    Source: CommitLog#asyncPutMessage: V2 when the name has more than 127 characters.
    """
    name = topic.encode()
    if len(topic) > fmt.TOPIC_V1_MAX_CHARS:
        return len(name).to_bytes(2, "big") + name, fmt.MAGIC_V2
    return len(name).to_bytes(1, "big") + name, fmt.MAGIC_V1


def _tag_piece(tag: pa.StringArray) -> tuple[object, Int64s, Int64s]:
    """The TAGS properties as a piece to join, their lengths, their tags codes.

    Empty and null tags write nothing.
    """
    count = len(tag)
    same = one_value(tag)
    if same is not None:
        tags, length, code = _tag_property(same)
        return tags, np.full(count, length, np.int64), np.full(count, code, np.int64)

    encoded = tag.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    written = [TAG_NAME + value.encode() + PROPERTY_SEPARATOR if value else b"" for value in values]
    codes = list(map(fmt.tags_code, values))
    # The null index -1 takes the entry after the last value.
    index = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    piece = pa.array(written, pa.binary()).take(encoded.indices)
    lengths = np.array([*map(len, written), 0], dtype=np.int64)[index]
    return piece, lengths, np.array([*codes, 0], dtype=np.int64)[index]


@lru_cache(maxsize=256)
def _tag_property(tag: bytes) -> tuple[pa.Scalar, int, int]:
    """The TAGS property with a tag, its length, and the tag's code."""
    property_ = TAG_NAME + tag + PROPERTY_SEPARATOR
    return pa.scalar(property_, pa.binary()), len(property_), fmt.tags_code(tag.decode())


def _fixed_column(rows: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    """uint8[n, width] as n binary values, without a copy."""
    count, width = rows.shape
    require(count * width <= 0x7FFFFFFF, "rows of one batch fit 32-bit offsets", rows=count)
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )


def blank(size: int) -> bytes:
    """The 8 bytes of the blank record that fills the last `size` bytes of a file."""
    require(size >= fmt.BLANK_BYTES, "a blank record has at least 8 bytes", size=size)
    return fmt.PREFIX.pack(size, fmt.MAGIC_BLANK)


def encode_record(
    *,
    topic: str,
    body: bytes,
    properties: bytes = b"",
    queue_id: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    flag: int = 0,
    sys_flag: int = 0,
    born_time_ms: int = 0,
    born_host: tuple[str, int] = ("127.0.0.1", 0),
    store_time_ms: int = 0,
    store_host: tuple[str, int] = ("127.0.0.1", 0),
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
) -> bytes:
    """One record with any fields, V1 or V2 by its topic, IPv6 by its hosts.

    The slow general way: for records that `encode_batch` does not write (prepared and retried messages), and as its
    check.
    Raises: Rejected when properties or topic are too long for their length fields.
    """
    topic_field, magic = _topic_field(topic)
    topic_limit = 0x7FFF if magic == fmt.MAGIC_V2 else fmt.TOPIC_V1_MAX_CHARS
    for field, value, limit, kind in (
        ("properties", properties, fmt.PROPERTIES_MAX_BYTES, PropertiesTooLong),
        ("topic", topic.encode(), topic_limit, Rejected),
    ):
        if len(value) > limit:
            fault = f"the {field} has {len(value)} bytes, the limit is {limit}"
            raise kind(fault, field=field, limit=limit)
    born, store = fmt.pack_host(*born_host), fmt.pack_host(*store_host)
    sys_flag |= fmt.host_flags(born, store)

    def number(value: int, width: int) -> bytes:
        return value.to_bytes(width, "big", signed=True)

    rest = b"".join(
        (
            magic.to_bytes(4, "big"),
            number(body_crc(body), 4),
            number(queue_id, 4),
            number(flag, 4),
            number(queue_offset, 8),
            number(physical_offset, 8),
            number(sys_flag, 4),
            number(born_time_ms, 8),
            born,
            number(store_time_ms, 8),
            store,
            number(reconsume_times, 4),
            number(prepared_transaction_offset, 8),
            number(len(body), 4),
            body,
            topic_field,
            number(len(properties), 2),
            properties,
        )
    )
    return number(len(rest) + 4, 4) + rest
