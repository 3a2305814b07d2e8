"""Ranges of queues, which Spark's tasks read: how they are split, and how one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from raymq.cluster.consume.consumer_config import ReadFrom
from raymq.cluster.consume.range_reader import read_range
from raymq.cluster.messages.message import queue_offsets
from raymq.store.base.errors import OffsetOutOfRange

from .columns import columns

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster


class QueueRange(NamedTuple):
    """The messages [first, last) of one queue, which one task reads."""

    topic: str
    queue_id: int
    shard: int
    first: int
    last: int


def split_ranges(ranges: list[QueueRange], at_least: int) -> list[QueueRange]:
    """Split large ranges, into about `at_least` altogether."""
    total = sum(whole.last - whole.first for whole in ranges)
    if not total or len(ranges) >= at_least:
        return ranges

    found: list[QueueRange] = []
    for whole in ranges:
        count = whole.last - whole.first
        parts = max(1, round(at_least * count / total))
        step = -(-count // parts)
        for first in range(whole.first, whole.last, step):
            found.append(whole._replace(first=first, last=min(first + step, whole.last)))
    return found


def read_queue_range(
    cluster: Cluster,
    wanted: QueueRange,
    names: Sequence[str],
    *,
    read_from: ReadFrom = "leader",
    on_loss: Callable[[QueueRange], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read a range as the named columns.

    Args: `on_loss`: called with messages that expired before they were read, which are passed over then. None: they
    are an error.
    Raises: as `RangeReader.fetch`; what `on_loss` raises.
    """
    topic, queue_id, shard, first, last = wanted
    while first < last:
        try:
            for records in read_range(
                cluster, topic, queue_id, shard, first, last, read_from=read_from
            ):
                yield columns(records, shard, names)
                first = int(queue_offsets(records)[-1]) + 1
            return
        except OffsetOutOfRange as error:
            lowest = int(error.fields.get("min", first))
            if on_loss is None or lowest <= first:
                raise
            on_loss(wanted._replace(first=first, last=min(lowest, last)))
            first = lowest
