"""Ranges of queues, which tasks of Spark and Ray Data read: how they are split, and how one is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pyarrow as pa

from raymq.client.messages.message import queue_offsets
from raymq.store.base.errors import OffsetOutOfRange
from raymq.store.records.requests import MessageSelector

from .consumer_config import ReadFrom
from .range_reader import read_range

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


#: whatever names a queue; sorted
QueueName = TypeVar("QueueName", bound=Hashable)


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
    cluster: ClusterHandle,
    wanted: QueueRange,
    *,
    read_from: ReadFrom = "leader",
    selector: MessageSelector | None = None,
    on_loss: Callable[[QueueRange], None] | None = None,
) -> Iterator[pa.Array]:
    """Read a range as raw records.

    Args: `selector`: only these messages; None: all. `on_loss`: called with messages that expired before they were
    read, which are passed over then. None: they are an error.
    Raises: as `RangeReader.fetch`; what `on_loss` raises.
    """
    topic, queue_id, shard, first, last = wanted
    while first < last:
        try:
            for records in read_range(
                *(cluster, topic, queue_id, shard, first, last),
                read_from=read_from,
                selector=selector,
            ):
                yield records
                first = int(queue_offsets(records)[-1]) + 1
            return
        except OffsetOutOfRange as error:
            lowest = int(error.fields.get("min", first))
            if on_loss is None or lowest <= first:
                raise
            on_loss(wanted._replace(first=first, last=min(lowest, last)))
            first = lowest


def split_by_lag(lags: Mapping[QueueName, int], limit: int, *, turn: int) -> dict[QueueName, int]:
    """How many messages of each queue a batch of at most `limit` messages takes, in proportion to the queues' lags.

    A queue with a lag gets one message at least. If there are more such queues than `limit`, they take turns.
    Args: `turn`: the number of messages that earlier batches took, or any other number that grows by them.
    """
    waiting = {queue: lags[queue] for queue in sorted(lags) if lags[queue] > 0}  # type: ignore[type-var]
    total = sum(waiting.values())
    if total <= limit:
        return waiting
    if limit <= len(waiting):
        queues = list(waiting)
        begin = turn % len(queues)
        return dict.fromkeys((queues[begin:] + queues[:begin])[:limit], 1)

    found = {queue: limit * lag // total for queue, lag in waiting.items()}
    starved = [queue for queue, count in found.items() if not count]
    found |= dict.fromkeys(starved, 1)

    # The divisions left some messages, which go to the largest remainders. Or the starved queues took some too many,
    # which the largest shares give.
    left = limit - sum(found.values())
    served = [queue for queue in found if queue not in set(starved)]
    served.sort(key=lambda queue: limit * waiting[queue] % total, reverse=True)
    for queue in served[: max(0, left)]:
        found[queue] += 1
    for queue in sorted(served, key=lambda queue: -found[queue]):
        given = min(found[queue] - 1, max(0, -left))
        found[queue] -= given
        left += given
    return found
