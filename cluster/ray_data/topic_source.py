"""Reads topics as datasets of Ray Data. The driver fixes every offset, so that a retried task reads the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
from ray.data import Dataset, Datasource, ReadTask, read_datasource
from ray.data.block import BlockMetadata

from raymq.client.arguments import check_choice
from raymq.client.consume.consumer_config import READ_FROM, ReadFrom
from raymq.client.consume.queue_ranges import QueueRange, read_queue_range, split_ranges
from raymq.client.consume.range_reader import RangeReader
from raymq.client.consume.selector import selector_of
from raymq.client.consume.time_search import offset_at
from raymq.client.messages.columns import FetchedRows
from raymq.client.messages.topic_values import TopicValues
from raymq.client.messages.user_properties import list_offsets, user_properties
from raymq.client.transport.away import while_away
from raymq.client.transport.routes import Routes
from raymq.cluster.deploy.ray_release import read_task
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.records.requests import MessageSelector

from .topic_sink import check_transport

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

EARLIEST, LATEST = "earliest", "latest"
#: one offset or time for all queues, or one for each: {queue_id: offset}, of several topics {topic: {queue_id: offset}}
Place: TypeAlias = str | int | datetime
Places: TypeAlias = Place | Mapping[int, Place] | Mapping[str, Mapping[int, Place]]

#: what a task reads, and so the size of a block: smaller ones cost more than they gain
TASK_BYTES = 64 << 20
#: how much of a topic is read for the mean size of its messages
SAMPLE_BYTES, SAMPLE_MESSAGES = 64 << 10, 100
#: waits for a shard that cannot be reached
SAMPLE_TIMEOUT_S = 60.0
#: the code of Ray's `read_kafka` for "log append time"
_LOG_APPEND_TIME = 2
#: the columns of MESSAGE_SCHEMA that the dataset's columns are made of
_MADE_OF = (
    *("topic", "queue_id", "offset", "store_time_ms"),
    *("key", "tag", "body", "properties"),
)

#: the columns of Ray's `read_kafka`, and `tag`
SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("timestamp", pa.int64()),
        ("timestamp_type", pa.int32()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("tag", pa.string()),
    ]
)


def read_topic(
    cluster: Cluster,
    topics: str | list[str],
    *,
    start_offset: Places = EARLIEST,
    end_offset: Places = LATEST,
    read_from: ReadFrom = "leader",
    tags: str | None = None,
    sql: str | None = None,
    concurrency: int | None = None,
    override_num_blocks: int | None = None,
) -> Dataset:
    """Read topics as a dataset with the columns of `ray.data.read_kafka`, and `tag`.

    If one topic is read that has a schema, its columns take the place of `value`.

    This call fixes the offsets. So each execution of the dataset, and each retried task, reads the same messages. Tasks
    read ranges of queues from the queues' shards, by Arrow Flight, and large queues are split.

    Example:
        With a `cluster`, in a process that is connected to Ray:

        ```python
        from raymq.data import read_topic

        cluster.create_topic("clicks", queues=2)
        with cluster.producer() as producer:
            producer.send("clicks", b"home", key=b"alice")
        print(read_topic(cluster, "clicks").select_columns(["key", "value"]).take(1))
        ```

    Args:
        cluster: the cluster to read from. Its transport must be Flight.
        topics: an existing topic, or several.
        start_offset: where each queue begins. "earliest" (default), "latest", an offset, or a `datetime`: the first
            message that was stored then or later (UTC without a time zone). {queue_id: one of these} for single queues,
            and {topic: {queue_id: ...}} for several topics. Queues that it leaves out begin at "earliest".
        end_offset: the place before which each queue ends, given like `start_offset`. "latest" by default, also of
            queues that it leaves out.
        read_from: "leader" (default), or "nearest": a replica on the task's machine, rather a follower.
        tags: only messages with one of these tags, as in "new || paid"; None (default): all. The shards look at the
            others, and send nothing of them.
        sql: only messages for whose properties this SQL92 expression is true, such as "price > 5 AND region IN
            ('eu')"; None (default): all. Either `tags` or `sql`.
        concurrency: tasks that read at the same time; None (default) leaves that to Ray Data.
        override_num_blocks: tasks altogether; None (default): as many as have 64 MiB each. Each task reads one queue,
            so there is at least one for each queue that has messages. A block of the dataset has what a task read.

    Guarantees:
        Every message of the ranges is returned once, after its CRC was checked, if `tags` or `sql` wants it.

    Raises:
        Rejected: an unknown topic or queue, a malformed place, or an end before the start. For a wrong `tags` or `sql`
            it has the position of the fault.
        OffsetOutOfRange: a queue does not hold an offset. From the dataset, as the cause of Ray Data's error: messages
            have expired meanwhile.
        Corrupt: from the dataset: a body is not a row of the topic's schema.
        Unavailable: the cluster does not answer.
    """
    check_transport(cluster)
    check_choice("read_from", read_from, READ_FROM)
    selector = selector_of(tags, sql)
    # A topic that is named twice is read once, as by Spark's `subscribe`.
    names = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
    if not names:
        raise Rejected("no topic is given", field="topics", limit="a topic")
    ranges = [
        each for name in names for each in _ranges(cluster, name, names, start_offset, end_offset)
    ]
    values = values_of(cluster, names[0]) if len(names) == 1 else None
    source = TopicSource(cluster, ranges, read_from=read_from, values=values, selector=selector)
    found: Dataset = read_datasource(
        source,
        concurrency=concurrency,
        # Ray Data's own default makes 200 small blocks of any topic, which cost more than to read it.
        override_num_blocks=override_num_blocks or source.tasks_at_best(),
    )
    return found


def values_of(cluster: Cluster, topic: str) -> TopicValues:
    """What the values of a topic are."""
    return TopicValues.of(topic, while_away(cluster.topics).get(topic, {}))


class TopicSource(Datasource):
    """Fixed ranges of queues.

    Args: `values`: of the topic, if they are all of one. `selector`: only these messages; None: all. Then the sizes are
    those of all messages, which the shards look at.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranges: list[QueueRange],
        *,
        read_from: ReadFrom = "leader",
        values: TopicValues | None = None,
        selector: MessageSelector | None = None,
    ) -> None:
        """Reads the first messages, for their size. Raises: as `RangeReader.fetch`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._cluster = cluster
        self._ranges = ranges
        self._read_from: ReadFrom = read_from
        self._bytes = _size(cluster, ranges, read_from)
        self._values = values or TopicValues("")
        self._selector = selector

    def get_name(self) -> str:
        """The name that Ray Data shows."""
        return "RayMQ"

    def estimate_inmemory_data_size(self) -> int | None:
        """The size of the log records, which their columns about have."""
        return self._bytes

    def tasks_at_best(self) -> int:
        """How many tasks have about `TASK_BYTES` each; at least one for each range."""
        return max(1, len(split_ranges(self._ranges, 1 + self._bytes // TASK_BYTES)))

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,
    ) -> list[ReadTask]:
        """One task for each range, of which there are about `parallelism`. Without a range one gives the columns."""
        schema = table_schema(self._values)
        readers = [
            _reader(self._cluster, each, self._read_from, self._values, self._selector)
            for each in split_ranges(self._ranges, parallelism)
        ]
        return [
            read_task(
                reader,
                # A compacted queue has fewer messages than offsets.
                BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None),
                schema=schema,
                row_limit=per_task_row_limit,
            )
            for reader in readers or [lambda: [schema.empty_table()]]
        ]


def _size(cluster: Cluster, ranges: list[QueueRange], read_from: ReadFrom) -> int:
    """The bytes of all ranges: their messages, times the mean size of the first ones of a topic's longest range."""
    found = 0
    for topic in {each.topic for each in ranges}:
        parts = [each for each in ranges if each.topic == topic]
        longest = max(parts, key=lambda each: each.last - each.first)
        _, queue_id, shard, first, last = longest
        with closing(
            RangeReader(Routes.of(cluster), topic, queue_id, shard, read_from=read_from)
        ) as reader:
            records, _ = reader.fetch(
                first,
                last,
                max_bytes=SAMPLE_BYTES,
                max_records=SAMPLE_MESSAGES,
                timeout_s=SAMPLE_TIMEOUT_S,
            )
        rows = max(1, len(records))
        found += sum(each.last - each.first for each in parts) * records.nbytes // rows
    return found


def _reader(
    cluster: Cluster,
    wanted: QueueRange,
    read_from: ReadFrom,
    values: TopicValues,
    selector: MessageSelector | None,
) -> Callable[[], Iterable[pa.Table]]:
    def read() -> Iterator[pa.Table]:
        is_empty = True
        for records in read_queue_range(cluster, wanted, read_from=read_from, selector=selector):
            is_empty = False
            yield as_table(wanted.shard, records, values)
        if is_empty:
            # Without a block the dataset would have no columns.
            yield table_schema(values).empty_table()

    return read


def table_schema(values: TopicValues) -> pa.Schema:
    """SCHEMA, or with the columns of the topic's schema in the place of `value`."""
    if values.schema is None:
        return SCHEMA
    own = [each.with_nullable(True) for each in values.schema]
    fields = [[field] if field.name != "value" else own for field in SCHEMA]
    return pa.schema([each for some in fields for each in some])


def as_table(shard: int, records: pa.Array, values: TopicValues) -> pa.Table:
    """Raw records of a fetch as `table_schema`. Raises: Corrupt for a body that is not a row of the topic's schema."""
    rows = FetchedRows(shard, records, columns=_MADE_OF)
    row_of_pair, names, texts = user_properties(rows.properties)
    offsets = list_offsets(row_of_pair, rows.num_rows)
    made = {
        "value": rows.column("body"),
        "partition": rows.column("queue_id"),
        "timestamp": rows.column("store_time_ms"),
        "timestamp_type": pa.array(np.full(rows.num_rows, _LOG_APPEND_TIME, dtype=np.int32)),
        "headers": pa.MapArray.from_arrays(pa.array(offsets), names, texts),
    }
    if values.schema is not None:
        own = values.schema.names
        decoded = values.decode(rows.column("body"), rows.column("offset"), names=own)
        made |= dict(zip(own, decoded, strict=True))

    schema = table_schema(values)
    columns = [made[name] if name in made else rows.column(name) for name in schema.names]
    return pa.table(columns, schema=schema)


# --- places ---------------------------------------------------------------------------------------


def _ranges(
    cluster: Cluster, topic: str, names: list[str], start: Places, end: Places
) -> Iterator[QueueRange]:
    """The ranges of one topic that have messages."""
    queues = while_away(lambda: cluster.describe_topic(topic))["queues"]
    held = [
        QueueRange(topic, each["queue_id"], each["shard"], each["min_offset"], each["max_offset"])
        for each in queues
    ]
    starts = _of_topic("start_offset", start, topic, names, len(held), EARLIEST)
    ends = _of_topic("end_offset", end, topic, names, len(held), LATEST)

    for each in held:
        places = starts.get(each.queue_id, EARLIEST), ends.get(each.queue_id, LATEST)
        first = _offset("start_offset", places[0], each, cluster)
        last = _offset("end_offset", places[1], each, cluster)
        # An offset and a time are not compared: what came after an offset until a time may well be nothing.
        if last < first and len({isinstance(place, datetime) for place in places}) == 1:
            raise Rejected(
                f"end_offset: topic {topic} queue {each.queue_id} ends at {last}, before start_offset, {first}; "
                "give an end at the start or after it",
                field="end_offset",
                limit=first,
                found=last,
            )
        if last > first:
            yield each._replace(first=first, last=last)


def _of_topic(
    option: str, places: Places, topic: str, names: list[str], queues: int, default: Place
) -> dict[int, Place]:
    """The place of each queue of a topic, as far as one is given."""
    if not isinstance(places, Mapping):
        return dict.fromkeys(range(queues), places)

    found: Any = places
    if any(isinstance(key, str) for key in places):
        for name in places:
            if name not in names:
                raise Rejected(
                    f"{option} names topic {name!r}, which is not read",
                    field=option,
                    limit=", ".join(names),
                )
        found = places.get(topic, {})  # type: ignore[call-overload]
    elif len(names) > 1:
        raise Rejected(
            f"{option}: several topics are read; give {{topic: {{queue_id: {default!r}}}}}",
            field=option,
            limit="{topic: {queue_id: offset}}",
        )

    if not isinstance(found, Mapping):
        raise Rejected(
            f"{option} of topic {topic} is {found!r}; give {{queue_id: offset}}",
            field=option,
            limit="{queue_id: offset}",
        )
    for queue_id in found:
        if type(queue_id) is not int or not 0 <= queue_id < queues:
            raise Rejected(
                f"{option}: topic {topic} has the queues 0 to {queues - 1}, not {queue_id!r}",
                field=option,
                limit=queues - 1,
                found=queue_id,
            )
    return dict(found)


def _offset(option: str, place: Place, held: QueueRange, cluster: Cluster) -> int:
    """The offset that a place means in a queue."""
    if isinstance(place, datetime):
        moment = place if place.tzinfo else place.replace(tzinfo=timezone.utc)
        time_ms = int(moment.timestamp() * 1000)
        found = while_away(lambda: offset_at(Routes.of(cluster), held, time_ms))
        return held.last if found is None else found

    if place in (EARLIEST, LATEST):
        return held.first if place == EARLIEST else held.last
    if type(place) is not int:
        raise Rejected(
            f"{option} is {place!r}; use 'earliest', 'latest', an offset or a datetime",
            field=option,
            limit="earliest|latest|offset|datetime",
            found=repr(place),
        )

    if not held.first <= place <= held.last:
        raise OffsetOutOfRange(
            f"{option}: topic {held.topic} queue {held.queue_id} holds the offsets {held.first} to {held.last}, not "
            f"{place}",
            field=option,
            min=held.first,
            max=held.last,
            offset=place,
            queue_id=held.queue_id,
        )
    return place
