"""Errors of rows count as the user does, whatever batches and parts the rows came in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.messages.message import Message
from raymq.client.messages.queue_split import numbered, start_of
from raymq.client.messages.row_numbers import renumbered
from raymq.client.messages.topic_values import TopicValues
from raymq.client.messages.write_columns import SinkTopic, by_queue
from raymq.client.produce.producer import Producer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.times import EARLIEST_MS
from raymq.cluster.cluster import Cluster
from raymq.cluster.ray_data.topic_sink import TopicSink
from raymq.cluster.ray_data.topic_source import read_topic
from raymq.store.base.errors import Rejected
from raymq.store.base.format import STAGED_TOPIC
from tests.cluster.test_queue_coordinator import QueueCluster
from tests.support.fake_backend import FakeCluster

ROWS, BATCH = 20_000, 10_000
#: in the second batch of a partition
BAD = 15_000

TIMES = pa.timestamp("ms", "UTC")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def column(kind: pa.DataType, usual: Any, bad: Any) -> pa.Array:
    values = [usual] * ROWS
    values[BAD] = bad
    return pa.array(values, kind)


COLUMNS: dict[str, pa.Array] = {
    "value": column(pa.string(), "v", None),
    "partition": column(pa.int32(), 1, 9),
    "tag": column(pa.string(), "t", "t\x01"),
    "properties": column(pa.map_(pa.string(), pa.string()), [("a", "1")], [("a", "")]),
    "headers": column(HEADERS, [], [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]),
    "index_keys": column(pa.list_(pa.string()), ["k"], ["k k"]),
    "deliver_at": column(TIMES, None, 1000),
    "key": column(pa.string(), "k", "x" * 40_000),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("partition", [0, 3])
def test_a_wrong_row_has_its_number_among_the_rows_of_its_partition(
    name: str, partition: int
) -> None:
    columns = {"value": pa.array(["v"] * ROWS), "key": pa.array([f"{n}" for n in range(ROWS)])}
    table = pa.table(columns | {name: COLUMNS[name]})
    found = {"t": SinkTopic(4, TopicValues("t"), (0,))}

    def write() -> None:
        for row, batch in numbered(table.to_batches(max_chunksize=BATCH), partition):
            start = start_of(row, partition)
            of = f"of partition {partition}"
            options = {"first_row": row, "takes_later": True, "of": of, "start": start}
            list(by_queue(batch, found, topic="t", **options))

    with pytest.raises(Rejected, match=rf"\brow {BAD} of partition {partition}\b") as refused:
        write()
    assert refused.value.row == BAD


def test_a_row_of_an_unknown_topic_has_its_number() -> None:
    rows = pa.record_batch({"value": ["v"] * 3, "topic": ["t", "t", "u"]})
    found = {"t": SinkTopic(4, TopicValues("t"), (0,))}
    with pytest.raises(Rejected, match="row 7 of task 1 has the topic 'u'"):
        list(by_queue(rows, found, topic=None, first_row=0, of="of task 1", start=5))


def test_only_the_number_of_the_row_is_replaced() -> None:
    error = Rejected("row 5: partition 5 is outside of row 5", field="partition", limit=3, row=5)
    found = renumbered(error, 15, "of partition 2")
    assert str(found) == "row 15 of partition 2: partition 5 is outside of row 5"
    assert (found.field, found.limit, found.row) == ("partition", 3, 15)


@pytest.fixture
def cluster() -> Iterator[QueueCluster]:
    cluster = QueueCluster()
    cluster.create_topic("t", queues=2)
    yield cluster
    cluster.close()


def test_a_write_task_of_ray_data_names_the_row(cluster: QueueCluster) -> None:
    sink = TopicSink(cluster, "t")  # type: ignore[arg-type]
    blocks = [pa.table({"value": ["v"] * 10}), pa.table({"value": ["v", None]})]
    with pytest.raises(Rejected, match="row 11 of task 2: value is null"):
        sink.write(blocks, SimpleNamespace(task_idx=2, kwargs={}))


def test_a_row_that_the_shard_refuses_is_named_with_its_queue(cluster: QueueCluster) -> None:
    backend = cluster.backends[0]
    backend.create(STAGED_TOPIC, 1)
    backend.refusals = [Rejected("row 4 has 9 bytes of body, the limit is 8", field="body", row=4)]
    with StagedWriter(cluster.routes()) as writer:
        found = {"t": SinkTopic(2, TopicValues("t"), (0,))}
        rows = pa.record_batch({"value": ["v"] * 6, "partition": [0, 0, 0, 1, 1, 1]})
        for part in by_queue(rows, found, topic="t", first_row=0):
            writer.write(*part)
        with pytest.raises(Rejected, match="row 1 of a batch for queue 1 of t has 9 bytes"):
            writer.finish()


def test_a_topic_that_is_named_twice_is_read_once(
    cluster: QueueCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(cluster) as producer:  # type: ignore[arg-type]
        producer.send_many([Message(topic="t", body=b"x")] * 3)
    given: list[Any] = []
    monkeypatch.setattr(
        "raymq.cluster.ray_data.topic_source.read_datasource",
        lambda source, **_: given.append(source),
    )
    handle = Cluster(
        name="fake",
        cluster_id=cluster.cluster_id,
        shards=1,
        token=cluster.token,
        endpoints=dict(cluster.endpoints),
    )
    with handle:
        for topics in (["t", "t"], ["t"], "t"):
            read_topic(handle, topics)
    counts = [sum(each.last - each.first for each in source._ranges) for source in given]
    assert counts == [3, 3, 3]


@pytest.mark.parametrize("time", [1_790_000_000, 0, -1, EARLIEST_MS - 1])
def test_a_delivery_time_in_seconds_is_refused(cluster: FakeCluster, time: int) -> None:
    with Producer(cluster) as producer:  # type: ignore[arg-type]
        for send in (
            lambda: producer.send("t", b"x", deliver_at_ms=time),
            lambda: producer.send_many([Message(topic="t", body=b"x", deliver_at_ms=time)]),
        ):
            with pytest.raises(Rejected, match="before 2001: give milliseconds") as refused:
                send()
            assert refused.value.field == "deliver_at_ms"
    assert not cluster.backends[0].puts
