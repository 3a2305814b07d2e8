"""Topics as datasets of Ray Data: which ranges are read, and as which columns, without Ray's processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.consume.queue_ranges import QueueRange
from raymq.cluster.ray_data import micro_batches, topic_source
from raymq.cluster.ray_data.topic_source import SCHEMA, TopicSource
from raymq.errors import OffsetOutOfRange, Rejected
from tests.support.served_shard import ServedShard


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("source") / "shard") as made:
        made.start_flusher()
        for topic in ("t", "u"):
            made.cluster.create_topic(topic, queues=2)
            with made.cluster.producer() as producer:
                for row in range(10):
                    producer.send(
                        topic,
                        b"%d" % row,
                        queue_id=row % 2,
                        key=b"k" if row == 4 else None,
                        tag="red" if row == 4 else None,
                        properties={"a": "1", "b": "x"} if row == 4 else None,
                    )
        yield made


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> list[TopicSource]:
    """What Ray Data would read."""
    found: list[TopicSource] = []

    def read(source: TopicSource, **options: Any) -> TopicSource:
        # Without a number Ray Data makes 200 small blocks of anything.
        assert options["override_num_blocks"] >= 1
        found.append(source)
        return source

    monkeypatch.setattr(topic_source, "read_datasource", read)
    monkeypatch.setattr(micro_batches, "read_datasource", read)
    return found


def tables(source: Any, parallelism: int = 1) -> list[pa.Table]:
    return [table for task in source.get_read_tasks(parallelism) for table in task.read_fn()]


def bodies(source: Any) -> list[int]:
    return sorted(
        int(value) for table in tables(source) for value in table.column("value").to_pylist()
    )


def test_rows_have_the_columns_of_read_kafka_and_a_tag(shard: ServedShard) -> None:
    rows = pa.concat_tables(tables(topic_source.read_topic(shard.cluster, "t")))
    assert rows.schema == SCHEMA
    assert rows.num_rows == 10
    (row,) = (each for each in rows.to_pylist() if each["value"] == b"4")
    assert row.pop("timestamp") > 1_700_000_000_000
    assert row == {
        "offset": 2,
        "key": b"k",
        "value": b"4",
        "topic": "t",
        "partition": 0,
        "timestamp_type": 2,
        "headers": [("a", b"1"), ("b", b"x")],
        "tag": "red",
    }


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("earliest", "latest", range(10)),
        ("latest", "latest", []),
        (3, "latest", [6, 7, 8, 9]),
        ("earliest", 1, [0, 1]),
        ({0: 4}, "latest", [1, 3, 5, 7, 8, 9]),
        ({"t": {1: "latest"}}, {"t": {0: 2}}, [0, 2]),
        (datetime(2001, 1, 1), datetime(2100, 1, 1, tzinfo=timezone.utc), range(10)),
        (datetime(2100, 1, 1), "latest", []),
    ],
)
def test_places_may_be_words_offsets_and_times(
    shard: ServedShard, start: Any, end: Any, expected: Any
) -> None:
    read = topic_source.read_topic(shard.cluster, "t", start_offset=start, end_offset=end)
    assert bodies(read) == list(expected)


def test_an_empty_range_is_a_table_without_rows(shard: ServedShard) -> None:
    (table,) = tables(topic_source.read_topic(shard.cluster, "t", start_offset="latest"), 4)
    assert table.equals(SCHEMA.empty_table())


def test_the_offsets_are_those_of_the_call(shard: ServedShard) -> None:
    shard.cluster.create_topic("later", queues=1)
    with shard.cluster.producer() as producer:
        producer.send("later", b"0").result()
        source = topic_source.read_topic(shard.cluster, "later")
        producer.send("later", b"1").result()
    assert bodies(source) == [0]
    assert bodies(source) == [0]


def test_several_topics_are_one_dataset(shard: ServedShard) -> None:
    places = {"t": {0: 4}, "u": {0: 5, 1: 3}}
    source = topic_source.read_topic(shard.cluster, ["t", "u"], start_offset=places)
    assert bodies(source) == [1, 3, 5, 7, 7, 8, 9, 9]


def test_a_filter_chooses_messages_and_the_ranges_stay(shard: ServedShard) -> None:
    read = topic_source.read_topic
    assert bodies(read(shard.cluster, "t", tags="blue || red")) == [4]
    assert bodies(read(shard.cluster, ["t", "u"], sql="a = 1 AND b = 'x'")) == [4, 4]
    assert bodies(read(shard.cluster, "t", sql="a = 1", end_offset={0: 2})) == []
    found = tables(read(shard.cluster, "t", tags="none"))
    assert [(table.schema, table.num_rows) for table in found] == [(SCHEMA, 0)] * 2


def test_batches_of_a_filter_commit_what_it_did_not_want(shard: ServedShard) -> None:
    batches = micro_batches.micro_batches(
        *(shard.cluster, "t", "filtered"), max_rows=6, start="earliest", idle_s=0, tags="red"
    )
    assert [bodies(batch) for batch in batches] in ([[4], []], [[], [4]])
    (found,) = [shard.cluster.call(0, "offsets", {"group": "filtered", "topic": "t"})]
    assert found == {"0": 5, "1": 5}


@pytest.mark.parametrize(
    ("topics", "options", "kind", "field"),
    [
        ("missing", {}, Rejected, "topic"),
        ([], {}, Rejected, "topics"),
        ("t", {"start_offset": "yesterday"}, Rejected, "start_offset"),
        ("t", {"end_offset": 1.5}, Rejected, "end_offset"),
        ("t", {"start_offset": {0: 1}, "end_offset": {0: 0}}, Rejected, "end_offset"),
        ("t", {"start_offset": {2: 0}}, Rejected, "start_offset"),
        ("t", {"start_offset": {"u": {0: 0}}}, Rejected, "start_offset"),
        ("t", {"start_offset": {"t": 3}}, Rejected, "start_offset"),
        (["t", "u"], {"end_offset": {0: 1}}, Rejected, "end_offset"),
        ("t", {"start_offset": 77}, OffsetOutOfRange, "start_offset"),
        ("t", {"read_from": "anywhere"}, Rejected, "read_from"),
        ("t", {"tags": "||"}, Rejected, "tags"),
        ("t", {"sql": "a >"}, Rejected, "sql"),
        ("t", {"sql": "a > 1", "tags": "a"}, Rejected, "tags"),
    ],
)
def test_wrong_places_are_refused_by_name(
    shard: ServedShard, topics: Any, options: dict[str, Any], kind: type[Rejected], field: str
) -> None:
    with pytest.raises(kind) as refused:
        topic_source.read_topic(shard.cluster, topics, **options)
    assert refused.value.fields["field"] == field


def test_a_large_queue_is_split_by_the_size_of_its_messages_and_a_small_one_is_not(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = QueueRange("t", 0, 0, 0, 100_000)
    source = TopicSource(shard.cluster, [large])
    size = source.estimate_inmemory_data_size()
    # The first messages say how large one is.
    assert 100 * 100_000 < size < 1000 * 100_000
    monkeypatch.setattr(topic_source, "TASK_BYTES", size // 20)
    assert source.tasks_at_best() == 21
    assert TopicSource(shard.cluster, [large._replace(last=10)]).tasks_at_best() == 1
    assert TopicSource(shard.cluster, []).tasks_at_best() == 1
    # A caller may ask for another number.
    assert len(source.get_read_tasks(8)) == 8


def test_a_loop_reads_what_is_new_and_commits_each_body_that_ends(shard: ServedShard) -> None:
    def loop(stop_after: int) -> list[list[int]]:
        found = []
        batches = micro_batches.micro_batches(
            shard.cluster, "t", "loop", max_rows=4, start="earliest", idle_s=0
        )
        for batch in batches:
            found.append(bodies(batch))
            if len(found) == stop_after:
                break
        return found

    first = loop(2)
    assert [len(each) for each in first] == [4, 4]
    # The second body was left by `break`: its messages come again.
    second = loop(9)
    assert second[0] == first[1]
    assert sorted(sum([first[0], *second], [])) == list(range(10))
    assert loop(9) == []


def test_a_loop_from_latest_begins_there_after_a_restart_too(shard: ServedShard) -> None:
    def loop() -> list[int]:
        batches = micro_batches.micro_batches(
            shard.cluster, "u", "tail", max_rows=100, start="latest", idle_s=0
        )
        return sum(map(bodies, batches), [])

    assert loop() == []
    with shard.cluster.producer() as producer:
        producer.send("u", b"77").result()
    assert loop() == [77]


@pytest.mark.parametrize("start", ["latest", None])
def test_a_queue_that_was_added_while_no_loop_ran_begins_at_its_first_message(
    shard: ServedShard, start: str | None
) -> None:
    topic = f"grown-{start}"
    shard.cluster.create_topic(topic, queues=2)

    def loop(start: str | None) -> list[int]:
        batches = micro_batches.micro_batches(
            shard.cluster, topic, "tail", max_rows=100, start=start, idle_s=0
        )
        return sum(map(bodies, batches), [])

    assert loop("latest") == []
    shard.cluster.add_queues(topic, 3)
    with shard.cluster.producer() as producer:
        producer.send(topic, b"5", queue_id=2).result()
    assert loop(start) == [5]


def test_a_loop_that_died_between_two_first_commits_begins_the_other_queues_at_start(
    shard: ServedShard,
) -> None:
    # Queue 1 has no offset, as if its shard had not been reached any more.
    offsets = {"group": "died", "topic": "t", "offsets": {"0": 5}}
    shard.cluster.call(0, "commit_offsets", offsets)

    def loop(start: str | None) -> list[int]:
        batches = micro_batches.micro_batches(
            shard.cluster, "t", "died", max_rows=100, start=start, idle_s=0
        )
        return sum(map(bodies, batches), [])

    with pytest.raises(Rejected, match="no offset of queue 1"):
        loop(None)
    assert loop("latest") == []


@pytest.mark.parametrize(
    ("options", "field"),
    [({}, "start"), ({"start": "now"}, "start"), ({"start": "latest", "max_rows": 0}, "max_rows")],
)
def test_a_loop_without_a_beginning_is_refused(
    shard: ServedShard, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        next(micro_batches.micro_batches(shard.cluster, "t", "new", **{"max_rows": 1, **options}))
    assert refused.value.field == field
