"""Filters that Spark hands to the source: they leave out only what no row of the result needs."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.consume.queue_ranges import QueueRange
from raymq.spark.pushed_filters import PushedFilters, tag_selector, with_tags
from raymq.store.records.requests import MessageSelector

RANGES = [
    QueueRange("red", 0, 0, 10, 20),
    QueueRange("red", 1, 0, 0, 5),
    QueueRange("blue", 0, 0, 0, 100),
]


def filter_of(kind: str, column: str, value: Any, *more: str) -> Any:
    """As PySpark 4 makes it: only the name of its class, `attribute` and `value` are looked at."""
    made = type(kind, (), {})()
    made.attribute, made.value = (column, *more), value
    return made


def offset_at(part: QueueRange, time_ms: int) -> int | None:
    """Message n was stored at second n, and none after the end."""
    offset = max(part.first, -(-time_ms // 1000))
    return offset if offset < part.last else None


def chosen(*filters: Any) -> list[tuple[str, int, int, int]]:
    found = PushedFilters.of(filters).chosen(RANGES, offset_at)
    return [(each.topic, each.queue_id, each.first, each.last) for each in found]


RED_0, RED_1, BLUE = ("red", 0, 10, 20), ("red", 1, 0, 5), ("blue", 0, 0, 100)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([("EqualTo", "topic", "blue")], [BLUE]),
        ([("In", "topic", ("red", "green"))], [RED_0, RED_1]),
        ([("EqualTo", "partition", 1)], [RED_1]),
        ([("GreaterThan", "partition", 0)], [RED_1]),
        ([("LessThanOrEqual", "partition", 0)], [RED_0, BLUE]),
        ([("In", "partition", (0, 7))], [RED_0, BLUE]),
        ([("EqualTo", "offset", 12)], [("red", 0, 12, 13), ("blue", 0, 12, 13)]),
        ([("In", "offset", (3, 11))], [("red", 0, 10, 12), ("red", 1, 3, 5), ("blue", 0, 3, 12)]),
        ([("GreaterThan", "offset", 18)], [("red", 0, 19, 20), ("blue", 0, 19, 100)]),
        ([("LessThan", "offset", 11)], [("red", 0, 10, 11), RED_1, ("blue", 0, 0, 11)]),
        (
            [("GreaterThanOrEqual", "offset", 15), ("EqualTo", "topic", "red")],
            [("red", 0, 15, 20)],
        ),
        ([("EqualTo", "topic", "red"), ("EqualTo", "topic", "blue")], []),
        # These are Spark's alone.
        ([("EqualTo", "key", b"k")], [RED_0, RED_1, BLUE]),
        ([("EqualTo", "topic", None)], [RED_0, RED_1, BLUE]),
        ([("StringStartsWith", "topic", "r")], [RED_0, RED_1, BLUE]),
        ([("GreaterThan", "topic", "r")], [RED_0, RED_1, BLUE]),
        ([("EqualTo", "offset", "12")], [RED_0, RED_1, BLUE]),
    ],
    ids=str,
)
def test_ranges_are_left_out_or_cut(filters: list[Any], expected: list[Any]) -> None:
    assert chosen(*(filter_of(*each) for each in filters)) == expected


def test_a_time_becomes_an_offset_of_each_queue() -> None:
    def at(second: int) -> datetime:
        return datetime.fromtimestamp(second, timezone.utc)

    assert chosen(filter_of("GreaterThanOrEqual", "timestamp", at(15))) == [
        ("red", 0, 15, 20),
        ("blue", 0, 15, 100),
    ]
    # The message of that second may be among them: Spark looks again.
    assert chosen(filter_of("LessThan", "timestamp", at(3))) == [
        ("red", 1, 0, 4),
        ("blue", 0, 0, 4),
    ]
    assert chosen(filter_of("EqualTo", "timestamp", at(50))) == [("blue", 0, 50, 51)]


def test_a_field_of_a_column_is_not_the_column() -> None:
    assert PushedFilters.of([filter_of("EqualTo", "topic", "red", "field")]).comparisons == ()


def test_rows_of_other_tags_are_left_out() -> None:
    rows = pa.record_batch({"tag": ["a", None, "b", "c"], "offset": [0, 1, 2, 3]})
    both = PushedFilters.of(
        [filter_of("In", "tag", ("a", "b", "x")), filter_of("In", "tag", ("b", "a"))]
    )
    assert both.tags == ("a", "b")
    assert with_tags(rows, both.tags).column("offset").to_pylist() == [0, 2]
    assert with_tags(rows, PushedFilters().tags).num_rows == 4
    none = PushedFilters.of([filter_of("EqualTo", "tag", "a"), filter_of("EqualTo", "tag", "b")])
    assert with_tags(rows, none.tags).num_rows == 0


def test_the_shards_leave_other_tags_out_where_a_filter_can_name_them() -> None:
    def asked(*values: Any) -> MessageSelector | None:
        return tag_selector(PushedFilters.of([filter_of("In", "tag", values)]).tags)

    assert asked("b", "a") == MessageSelector("TAG", "a || b")
    # These mean something else in a filter by tags: the task leaves the rows out.
    assert [asked("a", each) for each in ("*", "", " b", "b||c")] == [None] * 4
    assert asked(*(f"tag {number}" for number in range(2000))) is None
    assert tag_selector(None) is None
