"""Plans a batch: the ranges of queues that its tasks read."""

from __future__ import annotations

import logging

from raymq.client.consume.queue_ranges import QueueRange, split_ranges

from .offsets import TopicQueue, check_ends, check_order, resolve
from .pushed_filters import PushedFilters
from .queue_lookup import QueueLookup
from .source_options import SourceOptions

logger = logging.getLogger("raymq")

NO_FILTERS = PushedFilters()


def plan_batch(
    lookup: QueueLookup, options: SourceOptions, filters: PushedFilters = NO_FILTERS
) -> list[QueueRange]:
    """The ranges of a batch, with the offsets of now.

    Args: `filters`: of the query. They leave ranges out.

    Raises: Rejected for wrong options; OffsetOutOfRange for offsets that a queue does not hold.
    """
    if options.max_offsets_per_trigger is not None:
        logger.warning("maxOffsetsPerTrigger has no effect on a batch")
    starting, ending = options.batch_positions()
    queues = lookup.queues()

    def offset_at(queue: TopicQueue, time_ms: int) -> int | None:
        return lookup.offset_at(queue, queues[queue], time_ms)

    first = resolve(starting, queues, offset_at, without_match=options.without_match)
    last = resolve(ending, queues, offset_at, without_match="latest")
    fail = options.fail_on_data_loss
    first = check_ends(first, queues, option=starting.option, fail_on_data_loss=fail)
    last = check_ends(last, queues, option=ending.option, fail_on_data_loss=fail)

    check_order(starting, first, ending, last)

    ranges = [
        QueueRange(*queue, queues[queue].shard, first[queue], last[queue])
        for queue in queues
        if last[queue] > first[queue]
    ]
    chosen = filters.chosen(
        ranges, lambda part, time_ms: offset_at(TopicQueue(part.topic, part.queue_id), time_ms)
    )
    return split_ranges(chosen, options.min_partitions)
