"""Filters of the messages that a reader wants: first by the units, then by the records.

Source: MessageFilter, ExpressionMessageFilter, FilterAPI, RocketMQ 5.3.3. There the client makes the last step of the
tag filter, and tags of the same hash reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import Rejected
from raymq.store.records import rows

#: the subscription to everything
ALL = "*"
_OR = "||"
#: records whose properties are read in one go at first. Each further time it is twice as many, because a step costs as
#: much as a thousand records
RECORDS_AT_ONCE, RECORDS_AT_ONCE_MAX = 128, 2048


class MessageFilter(Protocol):
    """A filter in two steps: by units, which costs nothing, and then by the records of the remaining units."""

    #: whether there is a second step
    needs_records: bool

    def units(self, tags_codes: Int64s) -> Bools | None:
        """A mask of the units that may be wanted; None: all units."""

    def records(self, properties: pa.Array) -> Bools:
        """A mask of the records that are wanted, by their properties strings."""


class LookLimit(NamedTuple):
    """How much of a queue one read with a filter looks at."""

    #: units at most
    units: int
    #: whether the time is over. Some records are looked at all the same, so that each read moves on
    is_over: Callable[[], bool]


def matching(
    wanted: MessageFilter,
    tags_codes: Int64s,
    good: Bools,
    properties: Callable[[Int64s], pa.Array],
    most: int,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> Bools:
    """A mask of the units that a filter wants, by both steps.

    Args: `good`: a mask of the units that may be read. `properties`: reads the properties strings of the records of
        some rows. `most`: records are read until more of them are wanted; the mask has none of those after them.
        `is_over`: of a LookLimit. The mask then ends after the units that were looked at.
    """
    by_units = wanted.units(tags_codes)
    if by_units is not None:
        good = good & by_units
    if not wanted.needs_records:
        return good

    rows = np.flatnonzero(good)
    good, found = np.zeros(len(good), dtype=np.bool_), 0
    at, step = 0, RECORDS_AT_ONCE
    while at < len(rows):
        part = rows[at : at + step]
        at, step = at + len(part), min(2 * step, RECORDS_AT_ONCE_MAX)
        kept = part[wanted.records(properties(part))]
        good[kept] = True
        found += len(kept)
        if found > most:
            break
        if is_over():
            return good[: int(part[-1]) + 1]
    return good


class TagFilter:
    """Messages of one or more tags, `TagA || TagB`. `*` means all messages."""

    def __init__(self, expression: str = ALL) -> None:
        """Raises: Rejected for an expression without a tag."""
        parts = [part.strip() for part in expression.split(_OR)]
        tags = [tag for tag in parts if tag]
        self.needs_records = bool(tags) and ALL not in tags
        if expression.strip() and not tags:
            fault = f"{expression!r} names no tag; write TagA || TagB, or {ALL}"
            raise Rejected(fault, field="filter", limit="tags", position=1)
        self._tags = pa.array([tag.encode() for tag in tags], pa.binary())
        # Units hold the hash as 64 bits, of which RocketMQ compares the lower 32.
        self._codes = np.array([fmt.tags_code(tag) for tag in tags], dtype=np.int32)

    def units(self, tags_codes: Int64s) -> Bools | None:
        """Whether each unit has the code of one of the tags; None: every message is wanted."""
        if not self.needs_records:
            return None
        return np.isin(tags_codes.astype(np.int32), self._codes)

    def records(self, properties: pa.Array) -> Bools:
        """Whether each message has one of the tags, since tags may share a code."""
        found = pc.is_in(rows.tag_column(properties), value_set=self._tags)
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)
