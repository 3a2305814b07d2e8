"""Filters of a query that choose what is read: Spark hands them to the source with `pushDownPredicate`.

They only leave out what no row of the result needs. Spark evaluates every filter again on the rows that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raymq.actors.api.call_arguments import EXPRESSION_CHARS_MAX
from raymq.client.consume.queue_ranges import QueueRange
from raymq.store.records.requests import MessageSelector

#: class of Spark's filter -> how it compares
_OPERATORS = {
    "EqualTo": "in",
    "EqualNullSafe": "in",
    "In": "in",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
#: the offset of a queue's first message that was stored at a time (ms) or later; None: there is none
OffsetAt = Callable[[QueueRange, int], int | None]


class Comparison(NamedTuple):
    """One filter on one column: of `in` any of the values, of the others the only one."""

    column: str
    operator: str
    values: tuple[Any, ...]


class PushedFilters(NamedTuple):
    """The filters of a query of which a read makes use. All of them hold for the rows of its result."""

    comparisons: tuple[Comparison, ...] = ()

    @classmethod
    def of(cls, filters: Iterable[Any]) -> PushedFilters:
        """Those of Spark's filters that compare one of the columns topic, partition, offset, timestamp or tag."""
        found = []
        for each in filters:
            operator = _OPERATORS.get(type(each).__name__)
            if operator is None or len(each.attribute) != 1:
                continue
            values = tuple(each.value) if type(each).__name__ == "In" else (each.value,)
            comparison = Comparison(each.attribute[0], operator, values)
            if _is_of_use(comparison):
                found.append(comparison)
        return cls(tuple(found))

    @property
    def tags(self) -> tuple[str, ...] | None:
        """The tags of the rows of the result; None: any."""
        chosen = [set(each.values) for each in self.comparisons if each.column == "tag"]
        return tuple(sorted(set.intersection(*chosen))) if chosen else None

    def chosen(self, ranges: Iterable[QueueRange], offset_at: OffsetAt) -> list[QueueRange]:
        """The parts of ranges that may have rows of the result."""
        found = []
        for each in ranges:
            part: QueueRange | None = each
            for comparison in self.comparisons:
                part = part and _part(part, comparison, offset_at)
            if part is not None and part.first < part.last:
                found.append(part)
        return found


def with_tags(rows: pa.RecordBatch, tags: tuple[str, ...] | None) -> pa.RecordBatch:
    """The rows with one of the tags. Args: `rows`: with a column `tag`."""
    if tags is None:
        return rows
    return rows.filter(pc.is_in(rows.column("tag"), value_set=pa.array(tags, pa.string())))


def tag_selector(tags: tuple[str, ...] | None) -> MessageSelector | None:
    """The filter by which the shards leave other tags out; None: they cannot, or all are wanted."""
    if not tags or not all(map(_is_plain, tags)):
        return None
    expression = " || ".join(tags)
    return MessageSelector("TAG", expression) if len(expression) <= EXPRESSION_CHARS_MAX else None


def _is_plain(tag: str) -> bool:
    """Whether a tag means itself in a filter by tags."""
    return tag not in ("", "*") and "||" not in tag and tag == tag.strip()


def _is_of_use(comparison: Comparison) -> bool:
    """Whether the values have the type of the column, of which Spark's optimizer leaves no other."""
    column, operator, values = comparison
    kinds = {"topic": str, "tag": str, "partition": int, "offset": int, "timestamp": datetime}
    if column not in kinds or (column in ("topic", "tag") and operator != "in"):
        return False
    # A comparison with null keeps no row, which is Spark's to say.
    return bool(values) and all(isinstance(each, kinds[column]) for each in values)


def _part(part: QueueRange, comparison: Comparison, offset_at: OffsetAt) -> QueueRange | None:
    """The part of a range that may satisfy a comparison; None: no message of it does."""
    column, operator, values = comparison
    if column == "topic":
        return part if part.topic in values else None
    if column == "partition":
        return part if _holds(part.queue_id, operator, values) else None
    if column == "offset":
        return _between(part, *_bounds(operator, values))
    if column == "timestamp":
        return _stored_between(
            part, *_bounds(operator, tuple(map(_milliseconds, values))), offset_at
        )
    return part


def _holds(value: int, operator: str, values: tuple[int, ...]) -> bool:
    low, high = _bounds(operator, values)
    is_inside = (low is None or value >= low) and (high is None or value <= high)
    return is_inside and (operator != "in" or value in values)


def _bounds(operator: str, values: tuple[int, ...]) -> tuple[int | None, int | None]:
    """The least and the greatest whole number that a comparison allows; None: no limit."""
    if operator == "in":
        return min(values), max(values)
    limit = values[0]
    if operator.startswith(">"):
        return limit + (operator == ">"), None
    return None, limit - (operator == "<")


def _between(part: QueueRange, low: int | None, high: int | None) -> QueueRange:
    first = part.first if low is None else max(part.first, low)
    last = part.last if high is None else min(part.last, high + 1)
    return part._replace(first=first, last=last)


def _stored_between(
    part: QueueRange, low_ms: int | None, high_ms: int | None, offset_at: OffsetAt
) -> QueueRange | None:
    """The messages that were stored from one time to another. A millisecond more on each side does no harm."""
    first, last = part.first, part.last
    if low_ms is not None:
        found = offset_at(part, low_ms - 1)
        if found is None:
            return None
        first = max(first, found)
    if high_ms is not None:
        found = offset_at(part, high_ms + 2)
        last = last if found is None else min(last, found)
    return part._replace(first=first, last=last)


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
