"""The columns and options of a write: each is checked, and each is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.messages import queue_split
from raymq.client.messages.topic_values import TopicValues
from raymq.spark.sink_columns import (
    COLUMNS,
    SinkTopic,
    by_queue,
    check_columns,
    check_direct,
    targets,
)
from raymq.spark.sink_options import OPTIONS, SinkOptions
from raymq.store.base.errors import Rejected
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.records.properties import decode

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "spark.md"
CLUSTER = {"raymq.address": "raymq://127.0.0.1:1", "raymq.token": "secret"}
TIMES = pa.timestamp("ms", "UTC")
TOPIC = {"t": SinkTopic(1, TopicValues("t"), (0,))}


def properties(**columns: Any) -> list[dict[str, str]]:
    """The properties of rows with these columns, each with a value."""
    rows = len(next(iter(columns.values())))
    columns["value"] = [b"v"] * rows
    ((_, _, found),) = by_queue(pa.record_batch(columns), TOPIC, topic="t", first_row=0)
    return [decode(each or b"") for each in found.column("properties").to_pylist()]


def test_index_keys_become_the_property_by_which_the_index_finds_a_message() -> None:
    keys = pa.array([["k1", "k2"], [], None, ["ä"]], pa.list_(pa.string()))
    assert properties(index_keys=keys) == [{"KEYS": "k1 k2"}, {}, {}, {"KEYS": "ä"}]


def test_index_keys_stand_beside_key_and_properties() -> None:
    pairs = pa.array([[("colour", "red")], None], pa.map_(pa.string(), pa.string()))
    keys = pa.array([["k1"], ["k2"]], pa.list_(pa.string()))
    assert properties(index_keys=keys, properties=pairs, key=["a", None]) == [
        {"KEYS": "k1", "colour": "red", "__SHARDINGKEY": "a"},
        {"KEYS": "k2"},
    ]


@pytest.mark.parametrize("key", [None, "", "two words", "a\x01b", "a\x02b"])
def test_an_index_key_that_the_log_cannot_hold_is_refused_with_its_row(key: str | None) -> None:
    keys = pa.array([["fine"], [], ["fine", key]], pa.list_(pa.string()))
    with pytest.raises(Rejected, match="row 2: index key") as refused:
        properties(index_keys=keys)
    assert (refused.value.field, refused.value.row) == ("index_keys", 2)


def test_the_row_of_an_error_counts_the_rows_of_all_topics() -> None:
    keys = pa.array([["a"], ["b"], ["c"], ["d d"]], pa.list_(pa.string()))
    rows = {"value": [b"v"] * 4, "topic": ["t", "u", "t", "u"], "index_keys": keys}
    found = TOPIC | {"u": SinkTopic(1, TopicValues("u"), (0,))}
    with pytest.raises(Rejected, match="row 3: index key"):
        list(by_queue(pa.record_batch(rows), found, topic=None, first_row=0))


#: a time of after 2001
LATER = 10**12


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"value": [b"v", b"v", None, None]}, "row 3: value is null"),
        ({"partition": pa.array([0, 7, 0, 1], pa.int32())}, "row 3: partition 1 is outside 0 to 0"),
        ({"partition": [0, 7, None, 1 << 40]}, "row 3: partition 1099511627776 is outside 0 to 0"),
        (
            {"partition": pa.array([0, 7, None, (1 << 64) - 1], pa.uint64())},
            "row 3: partition 18446744073709551615 is outside 0 to 0",
        ),
        (
            {
                "value": [b"v", b"v", b"v", None],
                "deliver_at": pa.array([LATER, LATER, None, LATER], TIMES),
            },
            "row 3: value is null",
        ),
        (
            {"deliver_at": pa.array([LATER, LATER, None, -1], TIMES)},
            "row 3: deliver_at is before 2001",
        ),
    ],
)
def test_the_row_of_a_wrong_value_counts_the_rows_of_all_topics(
    columns: dict[str, Any], text: str
) -> None:
    rows = {"value": [b"v"] * 4, "topic": ["t", "u", "u", "t"]} | columns
    found = TOPIC | {"u": SinkTopic(8, TopicValues("u", allow_null=True), (0,))}
    with pytest.raises(Rejected, match=text) as refused:
        list(by_queue(pa.record_batch(rows), found, topic=None, first_row=0, takes_later=True))
    assert refused.value.row == 3


def test_a_row_that_a_schema_does_not_take_keeps_its_number_beside_rows_for_later() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    found = {"t": SinkTopic(1, TopicValues("t", schema), (0,))}
    rows = {"id": [1, 2, 3, None], "deliver_at": pa.array([LATER, None, None, LATER], TIMES)}
    with pytest.raises(Rejected, match="row 3: column id is null"):
        list(by_queue(pa.record_batch(rows), found, topic="t", first_row=0, takes_later=True))


def test_rows_for_later_go_to_the_timers_of_the_shard_of_their_queue() -> None:
    rows = {
        "value": [b"a", b"b", b"c", b"d"],
        "partition": pa.array([0, 1, 2, 2], pa.int32()),
        "key": ["k"] * 4,
        "deliver_at": pa.array([LATER + 1, None, LATER + 1, LATER + 1], TIMES),
    }
    found = {"t": SinkTopic(3, TopicValues("t"), (4, 5))}
    parts = list(by_queue(pa.record_batch(rows), found, topic="t", first_row=0, takes_later=True))
    assert [(*where, part.column("body").to_pylist()) for *where, part in parts] == [
        ("t", 1, [b"b"]),
        (TIMER_TOPIC, 4, [b"a"]),
        (TIMER_TOPIC, 4, [b"c", b"d"]),
    ]
    texts = parts[2][2].column("properties").to_pylist()
    assert [decode(text) for text in texts] == [
        {
            "__SHARDINGKEY": "k",
            "TIMER_DELIVER_MS": "1000000000001",
            "TIMER_OUT_MS": "1000000000000",
            "REAL_TOPIC": "t",
            "REAL_QID": "2",
        }
    ] * 2


def test_a_direct_write_has_no_rows_for_later() -> None:
    check_direct(["value", "key"])
    with pytest.raises(Rejected, match="delivery='staged'") as refused:
        check_direct(["value", "deliver_at"])
    assert refused.value.field == "deliver_at"


def test_a_topic_with_an_unknown_schema_is_no_obstacle_for_others() -> None:
    later = [{"name": "a", "type": "of a later version", "nullable": True}]
    known = {"queues": 1, "shards": [0]}
    topics = {"t": known, "later": known | {"schema": later}}
    assert list(targets(topics, None)) == ["t"]
    assert list(targets(topics, "t")) == ["t"]
    with pytest.raises(Rejected, match="update RayMQ"):
        targets(topics, "later")


def test_rows_of_one_queue_come_in_pieces_that_a_shard_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_split, "PIECE_BYTES", 10)
    values = [b"x" * size for size in (1, 9, 1, 30, 4, 4, 4)]
    rows = pa.record_batch({"value": values})
    pieces = [
        piece.column("body").to_pylist()
        for *_, piece in by_queue(rows, TOPIC, topic="t", first_row=0)
    ]
    assert [len(piece) for piece in pieces] == [2, 1, 1, 2, 1]
    assert [value for piece in pieces for value in piece] == values


@pytest.mark.parametrize(
    ("columns", "topic", "field"),
    [
        ([("value", "binary"), ("colour", "string")], "t", "colour"),
        ([("value", "struct<a:int>")], "t", "value"),
        ([("value", "string"), ("partition", "bigint")], "t", "partition"),
        ([("value", "string"), ("deliver_at", "timestamp_ntz")], "t", "deliver_at"),
        ([("key", "string")], "t", "value"),
        ([("value", "string")], None, "topic"),
    ],
)
def test_a_column_that_is_wrong_or_missing_is_named(
    columns: list[tuple[str, str]], topic: str | None, field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        check_columns(columns, topic=topic)
    assert refused.value.field == field


def test_options_are_checked_whatever_their_letters() -> None:
    found = SinkOptions.parse(CLUSTER | {"TOPIC": "orders", "writeid": "w"})
    assert (found.topic, found.write_id, found.token) == ("orders", "w", "secret")
    for given, field in (
        ({"topic": ""}, "topic"),
        ({"writeId": ""}, "writeId"),
        ({"acks": "leader"}, "acks"),
        ({"raymq.address": "127.0.0.1:1"}, "raymq.address"),
    ):
        with pytest.raises(Rejected) as refused:
            SinkOptions.parse(CLUSTER | given)
        assert refused.value.field == field


def test_the_documentation_has_each_option_and_each_column_of_a_write() -> None:
    text = DOCUMENT.read_text()
    section = text[text.index("### Write with Spark 4") :]
    shown = {
        name: rest
        for name, *rest in re.findall(
            r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+) \|$", section, re.M
        )
    }
    for option in OPTIONS:
        if option.meaning != "as of a read":
            assert shown[option.name] == [option.type, option.default, option.meaning]
        else:
            assert f"`{option.name}`" in section
    columns = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", section, re.M))
    assert set(columns) == set(COLUMNS)
