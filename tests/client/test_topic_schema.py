"""Topics with a schema and topics with null values, on one real shard: written, read, extended, recovered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.datasource.datasink import WriteResult

from raymq.client.consume.queue_ranges import QueueRange
from raymq.client.messages.topic_values import TopicValues
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.cluster.cli.main import main
from raymq.cluster.cli.put_back import of_line
from raymq.cluster.ray_data.topic_source import TopicSource, values_of
from raymq.data import TopicSink
from raymq.store.base.errors import Corrupt, Rejected
from raymq.store.state.topic_schema import SCHEMA as SCHEMA_NAME
from tests.support.batches import batch
from tests.support.served_shard import ServedShard

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("amount", pa.decimal128(9, 2)),
        pa.field("address", pa.struct([("city", pa.string())])),
    ]
)
NOTE = pa.field("note", pa.string())


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("schema") / "shard") as made:
        made.start_flusher()
        yield made


def send(shard: ServedShard, topic: str, rows: Any) -> None:
    with shard.cluster.producer() as producer:
        for future in producer.send_batch(topic, rows):
            future.result(30)


def poll(shard: ServedShard, topic: str, count: int) -> list[dict[str, Any]]:
    """The rows of a topic, of all columns."""
    found: list[dict[str, Any]] = []
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        while len(found) < count:
            found += consumer.poll_batch(timeout=20).to_pylist()
    return found


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(row["id"] for row in rows)


def orders(*numbers: int, **columns: Any) -> pa.Table:
    return pa.table({"id": pa.array(numbers, pa.int32()), **columns})


def test_rows_of_a_schema_are_written_and_read_as_columns(shard: ServedShard) -> None:
    assert shard.cluster.create_topic("orders", queues=2, schema=SCHEMA)
    assert not shard.cluster.create_topic("orders", queues=2, schema=SCHEMA)
    rows = orders(1, 2, key=["a", "b"], address=[{"city": "Bonn"}, None])
    send(shard, "orders", rows)
    found = {row["id"]: row for row in poll(shard, "orders", 2)}
    assert (found[1]["key"], found[1]["address"]) == (b"a", {"city": "Bonn"})
    assert (found[2]["amount"], found[2]["address"], found[2]["tag"]) == (None, None, None)
    assert "body" not in found[1]
    with shard.cluster.consumer("orders", start="latest") as consumer:
        assert consumer.poll_batch(timeout=0).schema.names[8:11] == ["id", "amount", "address"]
    assert shard.cluster.topics()["orders"]["schema"][0] == {
        "name": "id",
        "type": "int64",
        "nullable": False,
    }


@pytest.mark.parametrize(
    ("rows", "field", "advice"),
    [
        (orders(1, colour=["red"]), "colour", "add_column"),
        (pa.table({"amount": pa.array([None], pa.decimal128(9, 2))}), "id", "is missing"),
        (pa.table({"id": pa.array([1, None])}), "id", "row 1: column id is null"),
        (orders(1, amount=["1.5"]), "amount", "cast it"),
        (orders(1, address=[{"town": "Bonn"}]), "address", "cast it"),
        (pa.table({"body": [b"{}"]}), "body", "unknown column"),
        (
            orders(1, amount=pa.array([1], pa.decimal128(30, 0)).cast(pa.decimal128(38, 4))),
            None,
            "",
        ),
    ],
    ids=["unknown", "missing", "null", "type", "nested", "body", "fits"],
)
def test_rows_that_do_not_fit_are_refused_with_the_columns_name(
    shard: ServedShard, rows: pa.Table, field: str | None, advice: str
) -> None:
    shard.cluster.create_topic("strict", queues=1, schema=SCHEMA)
    if field is None:
        send(shard, "strict", rows)
        return
    with pytest.raises(Rejected, match=advice) as caught:
        send(shard, "strict", rows)
    assert caught.value.field == field


def test_a_value_that_the_schemas_type_cannot_hold_is_refused(shard: ServedShard) -> None:
    shard.cluster.create_topic("tiny", queues=1, schema=pa.schema([("n", pa.int8())]))
    with pytest.raises(Rejected, match="no int8") as caught:
        send(shard, "tiny", pa.table({"n": [300]}))
    assert caught.value.field == "n"


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, 253_402_300_800_000_000], pa.timestamp("us", tz="UTC")),
        pa.array([0, -62_135_596_800_000_001], pa.timestamp("us")),
        pa.array([None, 2_932_897], pa.date32()),
        pa.array([{"t": 0}, {"t": 1 << 60}], pa.struct([("t", pa.timestamp("us"))])),
        pa.array([[], [1 << 60]], pa.list_(pa.timestamp("us"))),
        pa.array([[("a", 1 << 60)], []], pa.map_(pa.string(), pa.timestamp("us"))),
    ],
    ids=lambda values: str(values.type)[:30],
)
def test_a_time_that_json_cannot_hold_is_refused_before_it_is_stored(values: pa.Array) -> None:
    ours = TopicValues("times", pa.schema([("at", values.type)]))
    with pytest.raises(Rejected, match="years 1 to 9999") as caught:
        ours.encode(pa.table({"at": values}))
    assert caught.value.field == "at"


def test_the_first_and_the_last_time_come_back() -> None:
    kinds = (pa.timestamp("us"), pa.timestamp("us", tz="UTC"))
    ends = [-62_135_596_800_000_000, 253_402_300_799_999_999]
    columns = [pa.array(ends, kind) for kind in kinds]
    columns.append(pa.array([-719_162, 2_932_896], pa.date32()))
    schema = pa.schema([(f"c{number}", each.type) for number, each in enumerate(columns)])
    ours = TopicValues("times", schema)
    bodies = ours.encode(pa.table(columns, schema=schema))
    found = ours.decode(bodies, pa.array([0, 1]), names=schema.names)
    assert [each.equals(back) for each, back in zip(columns, found, strict=True)] == [True] * 3


def test_a_single_message_must_be_a_row_too(shard: ServedShard) -> None:
    shard.cluster.create_topic("single", queues=1, schema=SCHEMA)
    with shard.cluster.producer(codec="json") as producer:
        producer.send("single", {"id": 1, "address": {"city": "Köln"}}).result(30)
        with pytest.raises(Rejected, match="column id") as caught:
            producer.send("single", {"id": "one"})
        assert caught.value.field == "body"
        with pytest.raises(Rejected, match="column id is null"):
            producer.send("single", {"amount": 1})
    (row,) = poll(shard, "single", 1)
    assert (row["id"], row["address"]) == (1, {"city": "Köln"})


def test_a_nullable_column_may_be_added_and_nothing_else(shard: ServedShard) -> None:
    cluster = shard.cluster
    cluster.create_topic("growing", queues=1, schema=SCHEMA)
    send(shard, "growing", orders(1))
    assert cluster.add_column("growing", NOTE)
    assert not cluster.add_column("growing", NOTE)
    send(shard, "growing", orders(2, note=["new"]))
    assert [(row["id"], row["note"]) for row in poll(shard, "growing", 2)] == [
        (1, None),
        (2, "new"),
    ]
    # A program that creates its topics at its start may know the first columns alone.
    assert not cluster.create_topic("growing", queues=1, schema=SCHEMA)

    cluster.create_topic("plain", queues=1)
    for topic, column, field in (
        ("growing", pa.field("note", pa.int64()), "note"),
        ("growing", pa.field("must", pa.int64(), nullable=False), "must"),
        ("growing", pa.field("tag", pa.int64()), "tag"),
        ("plain", NOTE, "topic"),
        ("nowhere", NOTE, "topic"),
    ):
        with pytest.raises(Rejected) as caught:
            cluster.add_column(topic, column)
        assert caught.value.field == field
    for schema in (pa.schema([NOTE]), None):
        with pytest.raises(Rejected, match="stay") as caught:
            cluster.create_topic("growing", queues=1, schema=schema)
        assert caught.value.field == "schema"
    for wrong in ('[{"name":"id","type":"int64","nullable":true}]', "[]", "{", "7"):
        with pytest.raises(Rejected):
            cluster.call(0, "set_schema", {"name": "growing", "schema": wrong})


def test_the_command_line_creates_describes_and_extends_a_topic_with_a_schema(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYMQ_TOKEN", shard.cluster.token)

    def run(verb: str, *words: str) -> tuple[int, str]:
        code = main(["topic", verb, *words, "-c", f"raymq://{shard.endpoints[0]}"])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    columns = ["--column", "id:bigint not null", "--column", "amount:decimal(9,2)"]
    columns += ["--column", "address:struct<city:string>", "--allow-null-values", "--queues", "1"]
    assert run("create", "typed", *columns) == (0, "typed: created\n")
    assert run("create", "typed", *columns) == (0, "typed: was there already\n")
    assert not shard.cluster.create_topic("typed", queues=1, schema=SCHEMA, allow_null_values=True)
    assert run("add-column", "typed", "note:string") == (0, "typed: has column note\n")
    assert run("add-column", "typed", "note:string") == (0, "typed: has column note already\n")
    assert run("describe", "typed")[1].splitlines() == [
        "typed: 0 messages",
        "  column id:bigint not null",
        "  column amount:decimal(9,2)",
        "  column address:struct<city:string>",
        "  column note:string",
        "  null values are allowed",
        "  queue 0 on shard 0: [0, 0)",
    ]
    facts = json.loads(run("describe", "typed", "--json")[1])
    assert (facts["schema"][3]["name"], facts["allow_null_values"]) == ("note", True)

    send(shard, "typed", orders(1, note=["x"]))
    assert poll(shard, "typed", 1)[0]["note"] == "x"
    for words, outcome in (
        (("create", "typed", "--column", "id:int"), "schema"),
        (("create", "other", "--column", "id:int64"), "bigint"),
        (("create", "other", "--column", "key:string"), "rename it"),
        (("add-column", "typed", "must:int not null"), "make it nullable"),
    ):
        code, text = run(*words)
        assert (code, outcome in text) == (2, True), text


def test_a_schema_survives_a_restart_and_is_in_rocketmqs_file(shard: ServedShard) -> None:
    cluster = shard.cluster
    cluster.create_topic("kept", queues=1, schema=SCHEMA, allow_null_values=True)
    cluster.add_column("kept", NOTE)
    send(shard, "kept", orders(1, note=["x"]))
    before = cluster.topics()["kept"]
    assert [column["name"] for column in before["schema"]][-1] == "note"
    shard.down()
    file = json.loads((shard.root / "config" / "topics.json").read_text())
    attributes = file["topicConfigTable"]["kept"]["attributes"]
    assert json.loads(attributes["raymq.schema"]) == before["schema"]
    assert attributes["raymq.null.values"] == "true"
    shard.up()
    assert cluster.topics()["kept"] == before
    assert poll(shard, "kept", 1)[0]["note"] == "x"


def test_a_schema_of_a_later_version_is_no_obstacle_for_other_topics(shard: ServedShard) -> None:
    later = '[{"name":"a","type":"of a later version","nullable":true}]'
    arguments = {"name": "later", "queues": 1, "shards": [0], "attributes": {SCHEMA_NAME: later}}
    shard.cluster.call(0, "create_topic", arguments)
    shard.cluster.create_topic("present", queues=1)
    with shard.cluster.producer() as producer:
        producer.send("present", b"x").result(30)
        with pytest.raises(Rejected, match="a type that this version does not know"):
            producer.send("later", b"x")


def test_a_null_value_stays_one_where_the_topic_allows_it(shard: ServedShard) -> None:
    cluster = shard.cluster
    cluster.create_topic("nulls", queues=1, allow_null_values=True)
    send(shard, "nulls", pa.table({"body": [b"x", None, b""], "key": ["a", "b", "c"]}))
    with cluster.producer() as producer:
        producer.send("nulls", None, key=b"d").result(30)
    found = [(row["key"], row["body"]) for row in poll(shard, "nulls", 4)]
    assert found == [(b"a", b"x"), (b"b", None), (b"c", b""), (b"d", None)]

    with cluster.consumer("nulls", start="earliest") as consumer:
        messages = consumer.poll(max_records=4, timeout=20)
    assert [each.value for each in messages] == [b"x", None, b"", None]
    assert [each.is_null for each in messages] == [False, True, False, True]
    assert messages[1].properties == {}

    # A message that is sent on is what it was.
    cluster.create_topic("copies", queues=1, allow_null_values=True)
    with cluster.producer() as producer:
        for each in messages:
            producer.send(dataclasses.replace(each, topic="copies")).result(30)
    assert [row["body"] for row in poll(shard, "copies", 4)] == [b"x", None, b"", None]


def test_a_null_value_is_refused_by_name_elsewhere(shard: ServedShard) -> None:
    shard.cluster.create_topic("full", queues=1)
    with pytest.raises(Rejected, match="row 1: value is null.*allow_null_values=True") as caught:
        send(shard, "full", pa.table({"body": [b"x", None]}))
    assert (caught.value.field, caught.value.row) == ("value", 1)
    with shard.cluster.producer() as producer, pytest.raises(Rejected, match="value is null"):
        producer.send("full", None)


def test_a_row_of_nothing_but_nulls_is_a_null_value_of_a_schema(shard: ServedShard) -> None:
    shard.cluster.create_topic("deletes", queues=1, schema=SCHEMA, allow_null_values=True)
    send(shard, "deletes", pa.table({"id": pa.array([1, None]), "key": ["a", "a"]}))
    with shard.cluster.consumer("deletes", start="earliest") as consumer:
        messages = consumer.poll(max_records=2, timeout=20)
    assert [(each.body, each.is_null) for each in messages] == [(b'{"id":1}', False), (b"", True)]
    assert [row["id"] for row in poll(shard, "deletes", 2)] == [1, None]


def test_a_body_that_is_no_row_stops_the_columns_and_not_the_messages(shard: ServedShard) -> None:
    shard.cluster.create_topic("foreign", queues=1, schema=SCHEMA)
    send(shard, "foreign", orders(1, 2))
    # Another program does not check.
    with closing(BatchSender(Routes.of(shard.cluster), producer_id=7)) as sender:
        sender.send("foreign", 0, batch([b"not JSON"])).result(30)
    with shard.cluster.consumer("foreign", start="earliest") as consumer:
        found: list[int] = []
        while len(found) < 2:
            found += consumer.poll_batch(max_records=1, timeout=20).column("id").to_pylist()
        for _ in range(2):
            with pytest.raises(Corrupt, match="offset 2 is not a row") as caught:
                consumer.poll_batch(timeout=20)
            assert caught.value.offset == 2
        assert consumer.position(0) == 2
        (message,) = consumer.poll(timeout=20)
        assert message.body == b"not JSON"


def test_ray_data_writes_and_reads_the_columns(shard: ServedShard) -> None:
    shard.cluster.create_topic("rayed", queues=1, schema=SCHEMA)
    sink = TopicSink(shard.cluster, "rayed", write_id="rayed")
    context = TaskContext(task_idx=0, op_name="write", kwargs={"write_uuid": "u"})
    returned = sink.write([orders(5, key=["k"], address=[{"city": "Ulm"}])], context)
    sink.on_write_complete(WriteResult(num_rows=0, size_bytes=0, write_returns=[returned]))
    with pytest.raises(Rejected) as caught:
        sink.write([orders(5, value=["x"])], context)
    assert caught.value.field == "value"

    values = values_of(shard.cluster, "rayed")
    source = TopicSource(shard.cluster, [QueueRange("rayed", 0, 0, 0, 1)], values=values)
    (task,) = source.get_read_tasks(1)
    (table,) = task()
    assert table.schema.names == [
        *("offset", "key", "id", "amount", "address", "topic", "partition", "timestamp"),
        *("timestamp_type", "headers", "tag"),
    ]
    assert table.select(["key", "id", "address"]).to_pylist() == [
        {"key": b"k", "id": 5, "address": {"city": "Ulm"}}
    ]


def test_a_printed_null_value_can_be_put_back() -> None:
    message = of_line(b'{"topic": "t", "key": "k", "body": null}', 1)
    assert message is not None
    assert message.fields == {"key": b"k", "body": None}
