"""The load tests through Spark and Ray Data: what they report, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.cluster.bench import ray_data_engine
from raymq.cluster.bench.dataset_load import (
    DatasetEngine,
    DatasetPlan,
    QueueOffsets,
    RowCount,
    as_dict,
    lines,
    run,
)
from raymq.store.base.errors import Rejected
from tests.support.served_shard import ServedShard

PLAN = DatasetPlan(mode="data", messages=3, size=30, queues=2)


class Sends(DatasetEngine):
    """Sends the rows one by one, and reads what `found` says."""

    def __init__(self, cluster: Any, found: RowCount) -> None:
        self.cluster = cluster
        self.found = found
        self.range: tuple[QueueOffsets, QueueOffsets] = ({}, {})

    def write(self, plan: DatasetPlan, write_id: str) -> None:
        with self.cluster.producer() as producer:
            for number in range(plan.messages):
                producer.send(plan.topic, b"%d" % number, queue_id=number % plan.queues).result(20)

    def read(self, plan: DatasetPlan, begin: QueueOffsets, end: QueueOffsets) -> RowCount:
        self.range = (begin, end)
        return self.found


def test_a_load_test_reads_what_it_wrote_and_reports_its_rates(tmp_path: Path) -> None:
    said: list[str] = []
    with ServedShard(tmp_path / "shard") as shard:
        shard.start_flusher()
        for begin in (0, 2):
            engine = Sends(shard.cluster, RowCount(3, 3, 0))
            result = run(shard.cluster, PLAN, engine, said.append)
            assert engine.range == (
                {0: begin, 1: begin // 2},
                {0: begin + 2, 1: begin // 2 + 1},
            )
    assert result.sound
    assert said == ["writing 3 rows (0 MB), staged, with 4 tasks", "reading them back"] * 2
    report = json.loads(json.dumps(as_dict(result)))
    assert report["write"]["rows_per_s"] == pytest.approx(3 / result.write_s)
    assert lines(report)[-1] == "  read back: 3 rows, 0 lost, 0 repeated, 0 damaged"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (RowCount(2, 2, 0), "2 rows, 1 lost, 0 repeated, 0 damaged"),
        (RowCount(4, 3, 0), "4 rows, 0 lost, 1 repeated, 0 damaged"),
        (RowCount(3, 3, 1), "3 rows, 0 lost, 0 repeated, 1 damaged"),
    ],
)
def test_rows_that_are_lost_repeated_or_damaged_are_a_fault(
    tmp_path: Path, found: RowCount, text: str
) -> None:
    with ServedShard(tmp_path / "shard") as shard:
        shard.start_flusher()
        result = run(shard.cluster, PLAN, Sends(shard.cluster, found), lambda _: None)
    assert not result.sound
    assert lines(as_dict(result))[-1] == f"  read back: {text}"


def test_a_value_has_room_for_its_number() -> None:
    with pytest.raises(Rejected, match="size is 19"):
        DatasetPlan(mode="spark", size=19)


def test_ray_data_knows_the_rows_that_it_made_from_all_others() -> None:
    rows = ray_data_engine._rows(pa.table({"id": [0, 1001]}), size=20)
    assert rows.column("key").to_pylist() == ["key-0", "key-1"]
    values = [*rows.column("value").to_pylist(), "7xxx", "x" * 20, "1002" + "x" * 15 + "y"]
    checked = ray_data_engine._checked(
        pa.table({"value": [each.encode() for each in values]}), size=20
    )
    assert checked.column("number").to_pylist() == [0, 1001, -1, -1, -1]
