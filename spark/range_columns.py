"""Reads a range of a queue as the columns of a DataFrame, in a task of Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from raymq.client.consume.consumer_config import ReadFrom
from raymq.client.consume.queue_ranges import QueueRange, read_queue_range
from raymq.client.messages.topic_values import TopicValues
from raymq.store.base.errors import Bug, RayMQError
from raymq.store.records.requests import MessageSelector

from .columns import columns
from .offsets import report_loss
from .pushed_filters import with_tags

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


class HowToRead(NamedTuple):
    """What a task needs to know beside its range."""

    read_from: ReadFrom
    fail_on_data_loss: bool
    values: TopicValues
    #: of the rows that the query needs; None: all
    tags: tuple[str, ...] | None = None
    #: only these messages; None: all
    selector: MessageSelector | None = None


def read_columns(
    cluster: ClusterHandle, wanted: QueueRange, names: Sequence[str], how: HowToRead
) -> Iterator[pa.RecordBatch]:
    """The named columns of a range. Raises: RayMQError."""
    try:
        for records in read_queue_range(
            cluster,
            wanted,
            read_from=how.read_from,
            selector=how.selector,
            on_loss=partial(report_loss, fail=how.fail_on_data_loss),
        ):
            if how.tags is None:
                yield columns(records, wanted.shard, names, how.values)
            else:
                rows = columns(records, wanted.shard, {*names, "tag"}, how.values)
                yield with_tags(rows, how.tags).select(list(names))
    except Bug:
        raise
    except RayMQError as error:
        # Spark prints the traces of an error and of its causes before the text. The text says it all.
        raise error.with_traceback(None) from None
