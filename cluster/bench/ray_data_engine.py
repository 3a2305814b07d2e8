"""The load test of Ray Data, `raymq bench data`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from raymq.cluster.cluster import Cluster
from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.cluster.ray_data.topic_sink import TopicSink
from raymq.cluster.ray_data.topic_source import read_topic
from raymq.store.base.errors import Rejected

from .dataset_load import (
    FILL,
    KEYS,
    DatasetEngine,
    DatasetPlan,
    QueueOffsets,
    RowCount,
)


@contextmanager
def engine(cluster: Cluster, plan: DatasetPlan) -> Iterator[DatasetEngine]:
    """The engine, while this process is connected to the cluster's Ray. Raises: Rejected."""
    if plan.delivery != "staged":
        raise Rejected("Ray Data writes are staged", field="delivery", limit="staged")
    if cluster.ray_address is None:
        raise Rejected(
            "the cluster's Ray is not known from here: name the cluster by its data directory or name instead of "
            "raymq://",
            field="cluster",
            limit="a data directory or name",
        )
    target = ray_host.running_target_of(cluster.data_dir) or RayTarget(
        address=str(cluster.ray_address)
    )
    with ray_host.session(target):
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield RayDataEngine(cluster)


class RayDataEngine(DatasetEngine):
    """Rows made, written and read by Ray Data's tasks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def write(self, plan: DatasetPlan, write_id: str) -> None:
        """Make the rows in tasks, and write them."""
        numbers = ray.data.range(plan.messages, override_num_blocks=plan.tasks)
        make: Any = _rows
        rows = numbers.map_batches(make, batch_format="pyarrow", fn_kwargs={"size": plan.size})
        rows.write_datasink(TopicSink(self._cluster, plan.topic, write_id=write_id))

    def read(self, plan: DatasetPlan, begin: QueueOffsets, end: QueueOffsets) -> RowCount:
        """Compare the rows in tasks, and count their numbers here."""
        rows = read_topic(self._cluster, plan.topic, start_offset=begin, end_offset=end)
        check: Any = _checked
        checked = rows.map_batches(check, batch_format="pyarrow", fn_kwargs={"size": plan.size})
        seen = np.zeros(plan.messages, dtype=np.bool_)
        count = damaged = 0
        batch: Any
        for batch in checked.iter_batches(batch_size=None, batch_format="pyarrow"):
            numbers = batch.column("number").to_numpy()
            is_known = (numbers >= 0) & (numbers < plan.messages)
            seen[numbers[is_known]] = True
            count += len(numbers)
            damaged += int((~is_known).sum())
        return RowCount(count - damaged, int(seen.sum()), damaged)


def _rows(batch: pa.Table, *, size: int) -> pa.Table:
    """Rows of a plan from their numbers."""
    numbers = batch.column("id")
    keys = pa.array(numbers.to_numpy() % KEYS).cast(pa.string())
    return pa.table(
        {
            "key": pc.binary_join_element_wise(pa.scalar("key-"), keys, ""),
            "value": pc.utf8_rpad(numbers.cast(pa.string()), size, FILL),
        }
    )


def _checked(batch: pa.Table, *, size: int) -> pa.Table:
    """The number of each row; -1 for a row that is not as it was written."""
    values = batch.column("value").cast(pa.string(), safe=False)
    digits = pc.utf8_rtrim(values, FILL)
    is_number = pc.match_substring_regex(digits, "^[0-9]{1,18}$")
    numbers = pc.if_else(is_number, digits, "-1").cast(pa.int64())
    is_whole = pc.equal(pc.utf8_rpad(numbers.cast(pa.string()), size, FILL), values)
    return pa.table({"number": pc.if_else(is_whole, numbers, -1)})
