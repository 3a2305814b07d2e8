"""What a task of a write gets: batches, and its place among the tasks. Spark imports are deferred."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pyarrow as pa

from raymq.store.base.errors import require


def without_empty(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch] | None:
    """The batches that have rows; None if there is none. Most tasks of a filtered plan may be empty."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    return None if first is None else chain([first], filled)


def task_context() -> Any:
    """The context of the task that this process runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    require(context is not None, "rows are written in tasks")
    return context


def partition_of_task() -> int:
    """The number of the partition that this process writes."""
    return int(task_context().partitionId())
