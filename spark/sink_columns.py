"""The columns of a write: which a DataFrame may have, and its rows by topic and queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raymq.cluster.messages.message import INDEX_KEY_SEPARATOR, INDEX_KEYS
from raymq.cluster.messages.property_rows import encode_rows, joined_properties
from raymq.cluster.messages.queue_split import split
from raymq.cluster.messages.topic_schema import spark_type
from raymq.cluster.messages.topic_values import TopicValues
from raymq.store.base.errors import Rejected

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
    "index_keys": (("array<string>",), pa.list_(pa.string())),
}
#: the columns that `split` takes
_SPLIT = {name: COLUMNS[name][1] for name in ("key", "value", "tag", "partition")}

_INDEX_KEY = r"^[^ \x01\x02]+$"


class SinkTopic(NamedTuple):
    """A topic to which rows go."""

    queues: int
    values: TopicValues

    @classmethod
    def of(cls, topic: str, facts: Mapping[str, Any]) -> SinkTopic:
        """Of an answer of `Cluster.topics`."""
        return cls(int(facts["queues"]), TopicValues.of(topic, facts))


def targets(topics: Mapping[str, Mapping[str, Any]], topic: str | None) -> dict[str, SinkTopic]:
    """The topics to which rows may go, by name. Raises: Rejected if `topic`, that of all rows, does not exist."""
    if topic is not None and topic not in topics:
        raise Rejected(
            f"topic {topic!r} does not exist; create it: raymq topic create {topic}",
            field="topic",
            limit="an existing topic",
            found=topic,
        )
    if topic is not None:
        return {topic: SinkTopic.of(topic, topics[topic])}
    found = {}
    for name, facts in topics.items():
        # A topic whose schema this version does not know is not a target, and does not disturb the others.
        with contextlib.suppress(Rejected):
            found[name] = SinkTopic.of(name, facts)
    return found


def check_columns(
    given: Sequence[tuple[str, str]], *, topic: str | None, values: TopicValues | None = None
) -> None:
    """Check the columns of a DataFrame: name and type of each, the type as Spark's `simpleString` writes it.

    Args: `values`: of the topic of all rows, if that is known.
    Raises: Rejected naming a column that is missing, unknown or of another type.
    """
    values = values or TopicValues(topic or "")
    others = {name: kinds for name, (kinds, _) in COLUMNS.items()}
    if values.schema is not None:
        del others["value"]
        values.check_names([name for name, _ in given], list(others))
        others |= {each.name: (spark_type(each.type),) for each in values.schema}
    for name, kind in given:
        if name not in others:
            message = (
                f"unknown column {name!r}; a topic takes {', '.join(others)}. raymq.spark.to_value makes one value of "
                "several columns, or create the topic with a schema"
            )
            raise Rejected(message, field=name, limit=", ".join(others), found=name)
        kinds = others[name]
        if kind not in kinds:
            advice = "make it one with raymq.spark.to_value" if name == "value" else "cast it"
            message = f"column {name} has type {kind}, expected {' or '.join(kinds)}; {advice}"
            raise Rejected(message, field=name, limit=" or ".join(kinds), found=kind)

    names = [name for name, _ in given]
    if values.schema is None and "value" not in names:
        message = f"the DataFrame has columns {names}; `value` (binary or string) is needed"
        raise Rejected(message, field="value", limit=", ".join(COLUMNS), found=names)
    if topic is None and "topic" not in names:
        message = "no topic is given; set the option `topic`, or add a column `topic`"
        raise Rejected(message, field="topic", limit="an option or a column")


def by_queue(
    batch: pa.RecordBatch, found: Mapping[str, SinkTopic], *, topic: str | None, turn: int
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Split rows into (topic, queue id, rows as PUT_SCHEMA), in row order.

    Args: `found`: topic -> its queues and values. `topic`: of all rows; None: each row names its own. `turn`: see
    `split`.
    Raises: Rejected for a value that the topic does not take, such as null, an unknown topic or a queue out of range.
    """
    properties = _all_properties(batch)
    if topic is not None:
        for queue_id, rows in _of_topic(batch, found[topic], turn, properties):
            yield topic, queue_id, rows
        return

    topics = batch.column("topic").cast(pa.string())
    for name in pc.unique(topics).to_pylist():
        if name not in found:
            message = f"a row has the topic {name!r}, which does not exist; create it first"
            raise Rejected(message, field="topic", limit="an existing topic", found=name)
        if found[name].values.schema is not None:
            message = f"a row has the topic {name!r}, which has a schema; write to it alone, with the option `topic`"
            raise Rejected(message, field="topic", limit="a topic without a schema", found=name)
        is_chosen = pc.equal(topics, name)
        own = None if properties is None else properties.filter(is_chosen)
        for queue_id, rows in _of_topic(batch.filter(is_chosen), found[name], turn, own):
            yield name, queue_id, rows


def _of_topic(
    batch: pa.RecordBatch, target: SinkTopic, turn: int, properties: pa.Array | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    names = batch.schema.names
    columns = {
        name: batch.column(name).cast(kind) if name in names else pa.nulls(batch.num_rows, kind)
        for name, kind in _SPLIT.items()
    }
    schema = target.values.schema
    if schema is not None:
        # `split` checks and encodes them.
        columns |= {name: batch.column(name) for name in schema.names if name in names}
    plain = pa.record_batch(list(columns.values()), names=list(columns))
    return split(plain, target.queues, turn, values=target.values, properties=properties)


def _all_properties(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded properties of each row, index keys included; None without a column of them."""
    properties, index_keys = _properties(batch), _index_keys(batch)
    if properties is None or index_keys is None:
        return index_keys if properties is None else properties
    return joined_properties(index_keys, properties)


def _index_keys(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded property KEYS of each row; None without a column `index_keys`."""
    if "index_keys" not in batch.schema.names:
        return None
    lists = batch.column("index_keys").cast(COLUMNS["index_keys"][1])
    keys = pc.list_flatten(lists)
    is_wrong = pc.or_kleene(keys.is_null(), pc.invert(pc.match_substring_regex(keys, _INDEX_KEY)))
    if pc.any(is_wrong).as_py():
        place = pc.index(is_wrong, True).as_py()
        row = pc.list_parent_indices(lists)[place].as_py()
        raise Rejected(
            f"row {row}: index key {keys[place].as_py()!r} is null, empty, or has a blank, \\x01 or \\x02",
            field="index_keys",
            limit="a text without blanks",
            row=row,
        )

    words = pc.binary_join(lists, INDEX_KEY_SEPARATOR).cast(pa.binary())
    found = pc.binary_join_element_wise(
        pa.scalar(f"{INDEX_KEYS}\x01".encode()), words, pa.scalar(b"\x02"), b""
    )
    has_keys = pc.greater(pc.list_value_length(lists), 0).fill_null(False)
    return pc.if_else(has_keys, found, pa.scalar(None, pa.binary()))


def _properties(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded properties of each row, of the columns `properties` and `headers`; None without such columns."""
    names = [name for name in ("properties", "headers") if name in batch.schema.names]
    return encode_rows({name: batch.column(name) for name in names}) if names else None
