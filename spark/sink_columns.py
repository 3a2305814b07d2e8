"""The columns of a write with Spark 4: which a DataFrame may have, and its rows by topic and queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raymq.cluster.messages.message import SYSTEM_PROPERTIES
from raymq.cluster.messages.queue_split import split
from raymq.store.base.errors import Rejected
from raymq.store.records.properties import encode

#: column -> its types in Spark, and its type in Arrow
COLUMNS: Mapping[str, tuple[tuple[str, ...], pa.DataType]] = {
    "key": (("binary", "string"), pa.binary()),
    "value": (("binary", "string"), pa.binary()),
    "topic": (("string",), pa.string()),
    "partition": (("int",), pa.int32()),
    "tag": (("string",), pa.string()),
    "headers": (
        ("array<struct<key:string,value:binary>>",),
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    ),
    "properties": (("map<string,string>",), pa.map_(pa.string(), pa.string())),
}
#: the columns that `split` takes
_SPLIT = {name: COLUMNS[name][1] for name in ("key", "value", "tag", "partition")}


def check_columns(given: Sequence[tuple[str, str]], *, topic: str | None) -> None:
    """Check the columns of a DataFrame: name and type of each, the type as Spark's `simpleString` writes it.

    Raises: Rejected naming a column that is missing, unknown or of another type.
    """
    for name, kind in given:
        if name not in COLUMNS:
            message = f"unknown column {name!r}; a topic takes {', '.join(COLUMNS)}"
            raise Rejected(message, field=name, limit=", ".join(COLUMNS), found=name)
        kinds = COLUMNS[name][0]
        if kind not in kinds:
            advice = "turn it into JSON with to_json(struct(...))" if name == "value" else "cast it"
            message = f"column {name} has type {kind}, expected {' or '.join(kinds)}; {advice}"
            raise Rejected(message, field=name, limit=" or ".join(kinds), found=kind)

    names = [name for name, _ in given]
    if "value" not in names:
        message = f"the DataFrame has columns {names}; `value` (binary or string) is needed"
        raise Rejected(message, field="value", limit=", ".join(COLUMNS), found=names)
    if topic is None and "topic" not in names:
        message = "no topic is given; set the option `topic`, or add a column `topic`"
        raise Rejected(message, field="topic", limit="an option or a column")


def by_queue(
    batch: pa.RecordBatch, queues: Mapping[str, int], *, topic: str | None, turn: int
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Split rows into (topic, queue id, rows as PUT_SCHEMA), in row order.

    Args: `queues`: topic -> number of queues. `topic`: of all rows; None: each row names its own. `turn`: see `split`.
    Raises: Rejected for a null value, an unknown topic or a queue out of range.
    """
    if topic is not None:
        for queue_id, rows in _of_topic(batch, queues[topic], turn):
            yield topic, queue_id, rows
        return

    topics = batch.column("topic").cast(pa.string())
    for name in pc.unique(topics).to_pylist():
        if name not in queues:
            message = f"a row has the topic {name!r}, which does not exist; create it first"
            raise Rejected(message, field="topic", limit="an existing topic", found=name)
        chosen = batch.filter(pc.equal(topics, name))
        for queue_id, rows in _of_topic(chosen, queues[name], turn):
            yield name, queue_id, rows


def _of_topic(
    batch: pa.RecordBatch, queues: int, turn: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    names = batch.schema.names
    columns = [
        batch.column(name).cast(kind) if name in names else pa.nulls(batch.num_rows, kind)
        for name, kind in _SPLIT.items()
    ]
    plain = pa.record_batch(columns, names=list(_SPLIT))
    return split(plain, queues, turn, properties=_properties(batch))


def _properties(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded properties of each row, of the columns `properties` and `headers`; None without such columns."""
    names = [name for name in ("properties", "headers") if name in batch.schema.names]
    if not names:
        return None

    found: list[bytes | None] = []
    lists = [batch.column(name).to_pylist() for name in names]
    for row, values in enumerate(zip(*lists, strict=True)):
        pairs: dict[str, str] = {}
        for name, value in zip(names, values, strict=True):
            for key, text in _pairs(name, value):
                if key in SYSTEM_PROPERTIES:
                    raise Rejected(
                        f"row {row}: property {key} belongs to the system; choose another name",
                        field=name,
                        limit="not a system property",
                        row=row,
                    )
                pairs[key] = _text(name, key, text, row)
        found.append(encode(pairs) if pairs else None)
    return pa.array(found, pa.binary())


def _pairs(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Names and values of one row's properties or headers."""
    if value is None:
        return ()
    if name == "headers":
        return [(each["key"], each["value"]) for each in value]
    return list(value)


def _text(name: str, key: str, value: Any, row: int) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value or "")
    except UnicodeDecodeError:
        raise Rejected(
            f"row {row}: header {key} is not UTF-8; encode it, for example as base64",
            field=name,
            limit="UTF-8",
            row=row,
        ) from None
