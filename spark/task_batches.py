"""What a task of a write gets: batches, and its place among the tasks. Spark imports are deferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pyarrow as pa

from raymq.store.base.errors import require

#: argument and result of a task
Batches = Iterator[pa.RecordBatch]


def map_in_arrow(frame: Any, work: Callable[[Batches], Batches], schema: Any) -> Any:
    """Call `frame.mapInArrow`, whatever the columns are called: PySpark parses their names, as `a.b`: field b of a.

    Args: `work`: gets the batches under the names of the frame.
    """
    names = frame.columns
    if not any("." in name or "`" in name for name in names):
        return frame.mapInArrow(work, schema)

    def named(batches: Batches) -> Batches:
        return work(pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)

    return frame.toDF(*(f"c{at}" for at in range(len(names)))).mapInArrow(named, schema)


def without_empty(batches: Batches) -> Batches | None:
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
