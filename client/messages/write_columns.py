"""The columns of rows that Spark and Ray Data write, and these rows by topic and queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.records.binary_columns import null_where
from raymq.store.records.properties import REAL_QUEUE, REAL_TOPIC, encode
from raymq.store.records.record import PUT_SCHEMA

from .delivery_times import encode_times
from .fields import INDEX_KEYS
from .message import INDEX_KEY_SEPARATOR
from .property_rows import encode_rows, joined_properties
from .queue_split import split
from .row_numbers import renumbered
from .topic_values import TopicValues

#: the columns that `split` takes, besides those of the value, with the type of one that is absent
_SPLIT = {"key": pa.binary(), "value": pa.binary(), "tag": pa.string(), "partition": pa.int32()}
#: the columns that become properties, besides `deliver_at`
_PROPERTIES = ("properties", "headers")

_INDEX_KEY = r"^[^ \x01\x02]+$"


class SinkTopic(NamedTuple):
    """A topic to which rows go."""

    queues: int
    values: TopicValues
    #: those that its queues are spread over
    shards: tuple[int, ...]

    @classmethod
    def of(cls, topic: str, facts: Mapping[str, Any]) -> SinkTopic:
        """Of an answer of `Cluster.topics`."""
        return cls(int(facts["queues"]), TopicValues.of(topic, facts), tuple(facts["shards"]))

    def shard_of(self, queue_id: int) -> int:
        """The shard that stores a queue."""
        return self.shards[queue_id % len(self.shards)]


def by_queue(
    batch: pa.RecordBatch,
    found: Mapping[str, SinkTopic],
    *,
    topic: str | None,
    first_row: int,
    takes_later: bool = False,
    of: str = "",
    start: int = 0,
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Split rows into (topic, queue id, rows as PUT_SCHEMA), in row order within each queue.

    Rows with a delivery time come as (TIMER_TOPIC, shard, rows): the shard of their queue keeps them until then.

    Args: `batch`: the value or the columns of a schema, and optionally key, tag, partition, topic, properties, headers,
    index_keys and deliver_at. `found`: topic -> its queues and values. `topic`: of all rows; None: each row names its
    own. `first_row`: see `split`. `takes_later`: whether rows may have a delivery time. `of`, `start`: for errors, what
    has the rows, such as "of partition 3", and the number of the batch's first row in it.
    Raises: Rejected, with field and row, for a value that the topic does not take, such as null, an unknown topic or
    a queue out of range.
    """
    try:
        yield from _by_queue(batch, found, topic, first_row, takes_later)
    except Rejected as error:
        if error.fields.get("row") is None:
            raise
        raise renumbered(error, start + error.fields["row"], of) from None


def _by_queue(
    batch: pa.RecordBatch,
    found: Mapping[str, SinkTopic],
    topic: str | None,
    first_row: int,
    takes_later: bool,
) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """`by_queue`, with rows numbered as in the batch."""
    later = _later(batch)
    if later is not None and not takes_later:
        refuse_later()
    rows = _Rows(batch, _all_properties(batch), later, np.arange(batch.num_rows))
    if topic is not None:
        yield from rows.of_topic(topic, found[topic], first_row)
        return

    topics = batch.column("topic").cast(pa.string())
    for name in pc.unique(topics).to_pylist():
        if name not in found:
            row = pc.index(
                topics.is_null() if name is None else pc.equal(topics, name), True
            ).as_py()
            message = f"row {row} has the topic {name!r}, which does not exist; create it first"
            raise Rejected(message, field="topic", limit="an existing topic", found=name, row=row)
        if found[name].values.schema is not None:
            row = pc.index(topics, name).as_py()
            message = f"row {row} has the topic {name!r}, which has a schema; write to it alone, by option `topic`"
            limit = "a topic without a schema"
            raise Rejected(message, field="topic", limit=limit, found=name, row=row)
        yield from rows.where(pc.equal(topics, name)).of_topic(name, found[name], first_row)


def refuse_later() -> None:
    """Refuse delivery times of a direct write. Raises: Rejected."""
    raise Rejected(
        "rows with the column deliver_at are written with delivery='staged'; set it, or drop the column",
        field="deliver_at",
        limit="absent, or delivery='staged'",
    )


class _Rows(NamedTuple):
    """Rows of a batch."""

    columns: pa.RecordBatch
    #: those of each row, encoded, besides its key; None: none has any
    properties: pa.Array | None
    #: the encoded delivery time; None: all rows are for now
    later: pa.Array | None
    #: the number of each row in its batch
    numbers: Int64s

    def where(self, mask: pa.BooleanArray) -> _Rows:
        """The rows of a mask."""
        return _Rows(
            self.columns.filter(mask),
            None if self.properties is None else self.properties.filter(mask),
            None if self.later is None else self.later.filter(mask),
            self.numbers[mask.fill_null(False).to_numpy(zero_copy_only=False)],
        )

    def of_topic(
        self, topic: str, target: SinkTopic, first_row: int
    ) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """See `by_queue`, of rows that all go to one topic."""
        if self.later is None:
            for queue_id, part in self._split(target, first_row, self.properties):
                yield topic, queue_id, part
            return

        waits = self.later.is_valid()
        yield from (
            self.where(pc.invert(waits))._replace(later=None).of_topic(topic, target, first_row)
        )
        waiting = self.where(waits)
        properties = waiting.later
        if waiting.properties is not None:
            properties = joined_properties(waiting.properties, properties)
        for queue_id, part in waiting._split(target, first_row, properties):
            yield TIMER_TOPIC, target.shard_of(queue_id), _with_queue(part, topic, queue_id)

    def _split(
        self, target: SinkTopic, first_row: int, properties: pa.Array | None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        batch, names = self.columns, self.columns.schema.names
        columns = {
            name: batch.column(name) if name in names else pa.nulls(len(batch), kind)
            for name, kind in _SPLIT.items()
        }
        schema = target.values.schema
        if schema is not None:
            # `split` checks and encodes them, as it casts the others.
            columns |= {name: batch.column(name) for name in schema.names if name in names}
        plain = pa.record_batch(list(columns.values()), names=list(columns))
        return split(
            plain,
            target.queues,
            first_row,
            values=target.values,
            properties=properties,
            numbers=self.numbers,
        )


def _with_queue(rows: pa.RecordBatch, topic: str, queue_id: int) -> pa.RecordBatch:
    """Rows of PUT_SCHEMA as the timer topic has them: their properties end with their topic and queue."""
    real = pa.scalar(encode({REAL_TOPIC: topic, REAL_QUEUE: str(queue_id)}))
    properties = pc.binary_join_element_wise(rows.column("properties"), real, b"")
    columns = [rows.column("body"), rows.column("tag"), properties, rows.column("born_time_ms")]
    return pa.record_batch(columns, schema=PUT_SCHEMA)


def _later(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded delivery time of each row; None if all are for now."""
    if "deliver_at" not in batch.schema.names:
        return None
    times = batch.column("deliver_at")
    if times.null_count == len(times):
        return None
    return encode_times(times)


def _all_properties(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded properties of each row, index keys included; None without a column of them."""
    names = [name for name in _PROPERTIES if name in batch.schema.names]
    properties = encode_rows({name: batch.column(name) for name in names}) if names else None
    index_keys = _index_keys(batch)
    if properties is None or index_keys is None:
        return index_keys if properties is None else properties
    return joined_properties(index_keys, properties)


def _index_keys(batch: pa.RecordBatch) -> pa.Array | None:
    """The encoded property KEYS of each row; None without a column `index_keys`."""
    if "index_keys" not in batch.schema.names:
        return None
    lists = batch.column("index_keys").cast(pa.list_(pa.string()))
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
    has_none = pc.equal(pc.list_value_length(lists), 0).fill_null(True)
    return null_where(has_none, found)
