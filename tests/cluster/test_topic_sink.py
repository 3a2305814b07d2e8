"""A topic as a sink of Ray Data: what its tasks and its driver do, without Ray's processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.datasource.datasink import WriteResult

from raymq.client.messages.partitioner import queue_of
from raymq.cluster.ray_data.sink_columns import COLUMNS
from raymq.data import TopicSink
from raymq.store.base.errors import Rejected
from tests.support.served_shard import ServedShard


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("sink") / "shard") as made:
        made.start_flusher()
        yield made


def context(task: int, write_uuid: str = "u1") -> TaskContext:
    return TaskContext(task_idx=task, op_name="write", kwargs={"write_uuid": write_uuid})


def complete(sink: TopicSink, returns: list[Any]) -> None:
    sink.on_write_complete(WriteResult(num_rows=0, size_bytes=0, write_returns=returns))


def bodies(shard: ServedShard, topic: str) -> list[tuple[bytes, bytes | None, str | None, int]]:
    count = shard.cluster.describe_topic(topic)["messages"]
    found: list[Any] = []
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        while len(found) < count:
            found += consumer.poll(timeout=20)
    return sorted((each.body, each.key, each.tag, each.queue_id) for each in found)


def test_rows_of_retried_tasks_are_stored_once_with_their_columns(shard: ServedShard) -> None:
    shard.cluster.create_topic("columns", queues=3)
    sink = TopicSink(shard.cluster, "columns")
    first = pa.table({"value": ["a", "b"], "key": [b"k1", b"k2"], "tag": ["x", None]})
    second = pa.table({"value": [b"c"], "partition": pa.array([2], pa.int64())})
    sink.write([first], context(0))
    returns = [sink.write([first], context(0)), sink.write([second, second.slice(1)], context(1))]
    assert bodies(shard, "columns") == []
    complete(sink, returns)
    assert sink.result is not None
    assert (sink.result.write_id, sink.result.rows) == ("u1", 3)
    assert bodies(shard, "columns") == [
        (b"a", b"k1", "x", queue_of(b"k1", 3)),
        (b"b", b"k2", None, queue_of(b"k2", 3)),
        (b"c", None, None, 2),
    ]


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
LARGE_HEADERS = pa.large_list(pa.struct([("key", pa.large_string()), ("value", pa.large_binary())]))
PROPERTIES = pa.map_(pa.string(), pa.string())
LONG_PAST = datetime(2001, 9, 9, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "kinds",
    [
        (HEADERS, PROPERTIES, pa.list_(pa.string()), pa.timestamp("us", "UTC")),
        (
            LARGE_HEADERS,
            LARGE_HEADERS,
            pa.large_list(pa.large_string()),
            pa.timestamp("s", "Asia/Tokyo"),
        ),
    ],
)
def test_rows_have_headers_properties_index_keys_and_times(
    shard: ServedShard, kinds: tuple[pa.DataType, ...]
) -> None:
    topic = f"all-{kinds[3].unit}"
    shard.cluster.create_topic(topic, queues=2)
    headers, properties, index_keys, deliver_at = kinds
    pairs = [("p", "q"), ("h", "hidden")]
    if not pa.types.is_map(properties):
        pairs = [{"key": name, "value": value} for name, value in pairs]  # type: ignore[misc]
    table = pa.table(
        {
            "value": ["a", "b"],
            "headers": pa.array([[{"key": "h", "value": b"1"}], None], headers),
            "properties": pa.array([pairs, []], properties),
            "index_keys": pa.array([["k1", "k2"], None], index_keys),
            "deliver_at": pa.array([LONG_PAST, None], deliver_at),
        }
    )
    sink = TopicSink(shard.cluster, topic, write_id=topic)
    nothing = pa.table({"value": ["c"]} | {name: pa.nulls(1) for name in table.column_names[1:]})
    complete(sink, [sink.write([table, nothing], context(0))])
    assert sink.result is not None
    assert sink.result.rows == 3

    found: list[Any] = []
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        while len(found) < 3:
            found += consumer.poll(timeout=20)
    shown = {each.body: (each.properties, each.index_keys) for each in found}
    assert shown == {b"a": ({"p": "q", "h": "1"}, ("k1", "k2")), b"b": ({}, ()), b"c": ({}, ())}


def test_a_null_value_deletes_its_key_from_a_compacted_topic(shard: ServedShard) -> None:
    shard.cluster.create_topic("latest", queues=1, compacted=True, allow_null_values=True)
    table = pa.table({"value": ["a", None], "index_keys": [["k"], ["k"]]})
    sink = TopicSink(shard.cluster, "latest", write_id="latest")
    complete(sink, [sink.write([table], context(0))])
    with pytest.raises(Rejected, match="has no KEYS"):
        TopicSink(shard.cluster, "latest").write([pa.table({"value": ["a"]})], context(0))
    assert sink.result is not None
    assert sink.result.rows == 2


def test_the_documentation_has_each_column_of_a_write() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "ray-data.md").read_text()
    section = text[text.index("## Write") :]
    shown = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", section, re.M))
    assert shown == {name: words for name, (_, words) in COLUMNS.items()}


def test_the_same_write_again_stores_nothing_more(shard: ServedShard) -> None:
    shard.cluster.create_topic("again", queues=1)
    for is_repeated in (False, True):
        sink = TopicSink(shard.cluster, "again", write_id="w")
        rows = pa.table({"value": ["a", "b"]})
        complete(sink, [sink.write([rows], context(0, f"uuid-{is_repeated}"))])
        assert sink.result is not None
        assert sink.result.is_repeated == is_repeated
    assert len(bodies(shard, "again")) == 2
    sink = TopicSink(shard.cluster, "again", write_id="w")
    with pytest.raises(Rejected, match="was committed before with 2 other rows"):
        complete(sink, [sink.write([pa.table({"value": ["c", "d"]})], context(0))])


def test_a_dataset_without_rows_is_written(shard: ServedShard) -> None:
    shard.cluster.create_topic("empty", queues=1)
    sink = TopicSink(shard.cluster, "empty")
    complete(sink, [])
    assert sink.result is not None
    assert sink.result.rows == 0


@pytest.mark.parametrize(
    ("table", "field"),
    [
        (pa.table({"key": ["a"]}), "value"),
        (pa.table({"value": ["a"], "colour": ["red"]}), "colour"),
        (pa.table({"value": [1]}), "value"),
        (pa.table({"value": ["a"], "partition": ["0"]}), "partition"),
        (pa.table({"value": ["a"], "partition": [7]}), "partition"),
        (pa.table({"value": ["a"], "tag": [1]}), "tag"),
        (pa.table({"value": ["a"], "headers": [["h"]]}), "headers"),
        (pa.table({"value": ["a"], "headers": [[{"key": "h", "value": b"\xff"}]]}), "headers"),
        (pa.table({"value": ["a"], "properties": [{"p": "q"}]}), "properties"),
        (pa.table({"value": ["a"], "properties": [[{"key": "TAGS", "value": "q"}]]}), "properties"),
        (pa.table({"value": ["a"], "index_keys": ["k"]}), "index_keys"),
        (pa.table({"value": ["a"], "index_keys": [["two words"]]}), "index_keys"),
        (pa.table({"value": ["a"], "deliver_at": [datetime(2001, 9, 9)]}), "deliver_at"),
        (pa.table({"value": ["a"], "deliver_at": [LONG_PAST.replace(year=1969)]}), "deliver_at"),
        (pa.table({"value": ["a", None]}), "value"),
    ],
)
def test_rows_that_a_topic_cannot_take_are_refused_by_the_columns_name(
    shard: ServedShard, table: pa.Table, field: str
) -> None:
    shard.cluster.create_topic("refused", queues=2)
    with pytest.raises(Rejected) as refused:
        TopicSink(shard.cluster, "refused").write([table], context(0))
    assert refused.value.field == field


def test_a_missing_topic_and_a_cluster_without_flight_are_refused_at_once(
    shard: ServedShard,
) -> None:
    with pytest.raises(Rejected, match="create it"):
        TopicSink(shard.cluster, "missing")
    shard.cluster.create_topic("options", queues=1)
    shard.cluster.transport = "ray"
    try:
        with pytest.raises(Rejected, match="need Flight"):
            TopicSink(shard.cluster, "options")
    finally:
        shard.cluster.transport = "flight"
