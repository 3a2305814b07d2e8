"""Records to columns: fields by gathered headers, bodies copied at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import require

from .binary_columns import joined_values, value_offsets
from .record_walk import gather, layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: the columns of `decode`. Hosts are "1.2.3.4:5" or "[2001:db8:0:0:0:0:0:1]:5"
RECORD_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("queue_offset", pa.int64(), nullable=False),
        pa.field("physical_offset", pa.int64(), nullable=False),
        pa.field("store_time_ms", pa.int64(), nullable=False),
        pa.field("born_time_ms", pa.int64(), nullable=False),
        pa.field("flag", pa.int32(), nullable=False),
        pa.field("sys_flag", pa.int32(), nullable=False),
        pa.field("body_crc", pa.int32(), nullable=False),
        pa.field("reconsume_times", pa.int32(), nullable=False),
        pa.field("prepared_transaction_offset", pa.int64(), nullable=False),
        pa.field("born_host", pa.string(), nullable=False),
        pa.field("store_host", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("properties", pa.binary(), nullable=False),
    ]
)

_NUMBERS = [field.name for field in RECORD_SCHEMA if pa.types.is_integer(field.type)]


def decode(
    data: Buffer,
    starts: npt.ArrayLike,
    sizes: npt.ArrayLike,
    *,
    columns: tuple[str, ...] | None = None,
) -> pa.RecordBatch:
    """The records at `starts` (relative to `data`) as a RecordBatch of RECORD_SCHEMA, in order.

    Args: `starts`, `sizes`: as `walk` found them, ascending, within 2 GiB. Any mix of V1, V2, IPv4 and IPv6 rows.
    `columns`: only these, in the schema's order.
    Raises: Bug for wrong boundaries. The result does not refer to `data`.
    """
    view = memoryview(data).cast("B")
    begins = np.asarray(starts, dtype=np.int64)
    lengths = np.asarray(sizes, dtype=np.int64)
    schema = RECORD_SCHEMA
    if columns is not None:
        schema = pa.schema([field for field in schema if field.name in columns])
    if not len(begins):
        return pa.RecordBatch.from_pylist([], schema=schema)
    _check_bounds(view, begins, lengths)
    parts, good = layout(view, begins, lengths)
    require(bool(good.all()), "decode is given whole records", row=int(good.argmin()))

    made: dict[str, Any] = _fields(view, begins, schema.names)
    # There are six ranges per record (body, gap, topic, gap, properties, gap), over the bytes as they are. Taking every
    # sixth range is the only copy.
    pieces = _pieces(view, np.stack(parts, axis=1).ravel())
    rows = np.arange(0, len(parts) * len(begins), len(parts), dtype=np.int64)
    for piece, name in ((0, "body"), (2, "topic"), (4, "properties")):
        if name in schema.names:
            made[name] = pieces.take(pa.array(rows + piece))
    if "topic" in made:
        made["topic"] = as_text(made["topic"])
    return pa.record_batch([made[name] for name in schema.names], schema=schema)


def _check_bounds(view: memoryview, starts: Int64s, sizes: Int64s) -> None:
    ends = starts + sizes
    require(
        len(starts) == len(sizes)
        and int(starts[0]) >= 0
        and int(ends[-1]) <= len(view)
        and bool((sizes >= fmt.RECORD_MIN_BYTES).all())
        and bool((starts[1:] >= ends[:-1]).all()),
        "records ascend inside their buffer",
        first=int(starts[0]),
        end=int(ends[-1]),
        length=len(view),
    )


def _fields(view: memoryview, starts: Int64s, names: list[str]) -> dict[str, object]:
    """The fixed-width columns among `names`."""
    kind = gather(view, starts + fmt.SYS_FLAG_AT, np.dtype(">i4")) & fmt.SYS_ANY_HOST_V6
    if (kind == kind[0]).all():
        return _fields_of_kind(view, starts, int(kind[0]), names)

    # Rows have several header widths: decode each kind separately, then restore the order.
    order: list[npt.NDArray[np.intp]] = []
    parts: list[dict[str, Any]] = []
    for value in np.unique(kind).tolist():
        rows = np.flatnonzero(kind == value)
        order.append(rows)
        parts.append(_fields_of_kind(view, starts[rows], value, names))

    back = pa.array(np.argsort(np.concatenate(order)))
    columns: dict[str, Any] = {}
    for name in parts[0]:
        column = pa.concat_arrays([part[name] for part in parts])
        columns[name] = column.take(back)
    return columns


def _fields_of_kind(
    view: memoryview, starts: Int64s, kind: int, names: list[str]
) -> dict[str, object]:
    dtype = fmt.header_dtype(bool(kind & fmt.SYS_BORN_HOST_V6), bool(kind & fmt.SYS_STORE_HOST_V6))
    headers = gather(view, starts, dtype)
    columns: dict[str, Any] = {
        name: pa.array(headers[name].astype(headers.dtype[name].newbyteorder("=")))
        for name in _NUMBERS
        if name in names
    }
    for host in ("born", "store"):
        if f"{host}_host" in names:
            columns[f"{host}_host"] = _hosts(headers[f"{host}_ip"], headers[f"{host}_port"])
    return columns


def _hosts(ips: npt.NDArray[np.generic], ports: npt.NDArray[np.generic]) -> pa.StringArray:
    """Hosts as text. Each different host is formatted once."""
    packed = np.empty((len(ips), ips.dtype.itemsize + 4), dtype=np.uint8)
    packed[:, :-4] = np.ascontiguousarray(ips).view(np.uint8).reshape(len(ips), -1)
    packed[:, -4:] = np.ascontiguousarray(ports).view(np.uint8).reshape(len(ips), 4)
    if (packed == packed[0]).all():
        return pa.repeat(fmt.format_host(packed[0].tobytes()), len(ips))
    rows = packed.view(f"V{packed.shape[1]}").ravel()
    different, index = np.unique(rows, return_inverse=True)
    text = pa.array([fmt.format_host(host.tobytes()) for host in different], pa.string())
    return text.take(pa.array(index))


def _pieces(view: memoryview, edges: Int64s) -> pa.BinaryArray:
    """The n - 1 ranges between n ascending edges as binary values that point into `view`."""
    base = int(edges[0])
    span = int(edges[-1]) - base
    require(span <= 0x7FFFFFFF, "records within 2 GiB", span=span)
    offsets = (edges - base).astype(np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(),
        len(edges) - 1,
        [None, pa.py_buffer(offsets), pa.py_buffer(view[base : base + span])],
    )


def as_text(values: pa.BinaryArray) -> pa.StringArray:
    """Bytes as text. Invalid UTF-8 is replaced, as in Java."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [value.decode("utf-8", "replace") for value in values.to_pylist()]
        return pa.array(texts, pa.string())


def decode_column(records: pa.BinaryArray) -> pa.RecordBatch:
    """`decode` of a column of whole records."""
    offsets = value_offsets(records).astype(np.int64)
    return decode(joined_values(records), offsets[:-1] - offsets[0], np.diff(offsets))


def select(data: Buffer, starts: npt.ArrayLike, sizes: npt.ArrayLike) -> pa.BinaryArray:
    """The records at `starts` (relative to `data`), byte for byte, as one binary column.

    Neighbours are not copied: the column then refers to `data`. Args: `starts`, `sizes`: ascending, within 2 GiB.
    """
    view = memoryview(data).cast("B")
    begins = np.asarray(starts, dtype=np.int64)
    lengths = np.asarray(sizes, dtype=np.int64)
    if not len(begins):
        return pa.array([], pa.binary())
    _check_bounds(view, begins, lengths)
    ends = begins + lengths
    if (begins[1:] == ends[:-1]).all():
        return _pieces(view, np.append(begins, ends[-1]))
    edges = np.stack([begins, ends], axis=1).ravel()
    return _pieces(view, edges).take(pa.array(np.arange(0, 2 * len(begins), 2)))
