"""Raw records as the columns of a read, without Spark."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest

from raymq.spark.columns import COLUMNS, check_columns, columns, spark_schema
from raymq.store.base.errors import Rejected
from raymq.store.records import record
from raymq.store.records.properties import encode
from tests.support.batches import batch

NOW_MS = 1_767_225_600_123
NAMES = tuple(COLUMNS)


def read(*properties: bytes | None, tag: str | None = None, names: Any = NAMES) -> pa.RecordBatch:
    """One message with each of these properties."""
    rows = batch([b"body %d" % n for n in range(len(properties))], tag=tag)
    rows = rows.set_column(
        2, record.PUT_SCHEMA.field("properties"), pa.array(properties, pa.binary())
    )
    for name, value in (("flag", 7), ("sys_flag", 0x301)):
        field = record.MORE_SCHEMA.field(name)
        rows = rows.append_column(field, pa.array([value] * rows.num_rows, field.type))
    encoded = record.encode_batch("t", 3, rows, stamp=None, store_host=("127.0.0.1", 10911))
    data = encoded.records(
        0, encoded.count, queue_offset=40, physical_offset=0, store_time_ms=NOW_MS
    ).to_pybytes()
    found, start = [], 0
    for size in encoded.sizes.tolist():
        found.append(data[start : start + size])
        start += size
    return columns(pa.array(found, pa.binary()), 1, names)


def test_every_column_has_its_type_and_its_value() -> None:
    text = encode(
        {
            "__SHARDINGKEY": "alice",
            "KEYS": "k1 k2",
            "colour": "rot",
            "size": "9",
            "TIMER_DELIVER_MS": str(NOW_MS),
        }
    )
    rows = read(text, tag="bar")
    assert rows.schema == pa.schema([(name, kind.arrow) for name, kind in COLUMNS.items()])
    (row,) = rows.to_pylist()
    time = datetime.datetime.fromtimestamp(NOW_MS / 1000, datetime.timezone.utc)
    assert row == {
        "key": b"alice",
        "value": b"body 0",
        "topic": "t",
        "partition": 3,
        "offset": 40,
        "timestamp": time,
        "timestampType": 1,
        "headers": [{"key": "colour", "value": b"rot"}, {"key": "size", "value": b"9"}],
        "tag": "bar",
        "properties": [("colour", "rot"), ("size", "9")],
        "index_keys": ["k1", "k2"],
        "deliver_at": time,
        "shard": 1,
        "message_flag": 7,
        "sys_flag": 0x301,
        "born_host": "127.0.0.1:10911",
    }


def test_lists_of_a_message_without_properties_are_null() -> None:
    rows = read(None, encode({"a": "1"}), None)
    assert rows.column("headers").to_pylist() == [None, [{"key": "a", "value": b"1"}], None]
    assert rows.column("properties").to_pylist() == [None, [("a", "1")], None]
    assert rows.column("index_keys").null_count == 3
    assert rows.column("deliver_at").null_count == 3
    assert rows.column("key").null_count == 3


def test_of_two_properties_of_one_name_the_last_one_wins() -> None:
    rows = read(b"a\x011\x02b\x012\x02a\x013\x02", b"a\x014\x02")
    found = [dict(pairs) for pairs in rows.column("properties").to_pylist()]
    assert found == [{"a": "3", "b": "2"}, {"a": "4"}]
    assert [len(pairs) for pairs in rows.column("properties").to_pylist()] == [2, 1]


def test_properties_are_what_other_readers_see() -> None:
    # No name, no value, a second separator, bytes that are not UTF-8, no separator at the end.
    rows = read(b"\x01x\x02y\x01\x02z\x02n\x01v\x01w\x02bad\x01\xff\x02end\x01line\nline")
    (pairs,) = rows.column("properties").to_pylist()
    assert dict(pairs) == {"n": "v\x01w", "bad": "\ufffd", "end": "line\nline"}


def test_columns_may_be_chosen_in_any_order() -> None:
    rows = read(None, names=("offset", "value"))
    assert rows.to_pylist() == [{"offset": 40, "value": b"body 0"}]
    assert spark_schema(("offset", "value")) == "offset bigint, value binary"


@pytest.mark.parametrize(
    ("wanted", "field", "words"),
    [
        ([("value", "binary"), ("colour", "string")], "colour", "a topic has key, value, topic"),
        ([("value", "string")], "value", "declare it as binary"),
    ],
)
def test_a_column_that_no_message_has_is_refused(wanted: Any, field: str, words: str) -> None:
    with pytest.raises(Rejected, match=words) as refused:
        check_columns(wanted)
    assert refused.value.field == field


def test_a_part_of_the_columns_is_taken_as_it_is_given() -> None:
    assert check_columns([("offset", "bigint"), ("key", "binary")]) == ("offset", "key")
