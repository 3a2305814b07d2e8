"""Spark 4 writes and reads three replicas with TLS, whose leader is killed in the middle of each job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import raymq.spark
from tests.support.certificates import Certificates, make_node_certificates
from tests.support.leader_kills import leader_killed, stop_until_killed
from tests.support.replicated_shard import ReplicatedShard, kill_leader, started_shard

# pyspark leaves the sockets of its collect() calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: several fetches of each queue
ROWS, VALUE_BYTES, QUEUES = 16_000, 1024, 2
BATCH_ROWS = "500"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_node_certificates(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def replicated(certificates: Certificates) -> Iterator[ReplicatedShard]:
    with started_shard(3, "spark4", certificates.environment()) as shard:
        shard.cluster.create_topic("rows", queues=QUEUES)
        yield shard


def stopped(place: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Rows as they are. Each task stops after its first batch."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 1:
                stop_until_killed(place)
            yield batch

    return work


def count(frame: Any) -> tuple[int, int, int]:
    """The rows of a frame: how many, how many different ones, and the sum of their numbers."""
    number = "cast(rtrim('x', cast(value as string)) as bigint)"
    found = frame.selectExpr(f"{number} as n").selectExpr("count(n)", "count(distinct n)", "sum(n)")
    rows, different, total = found.first()
    return rows, different, total


def test_rows_are_written_and_read_once_although_leaders_are_killed_with_tls(
    spark: Any, replicated: ReplicatedShard, certificates: Certificates, tmp_path: Path
) -> None:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH_ROWS)
    options = raymq.spark.options(replicated.cluster) | {"raymq.ca": str(certificates.ca)}
    addresses = options["raymq.address"].split(",")
    assert len(addresses) == 3
    assert all(each.startswith("raymq+tls://") for each in addresses)
    everything = (ROWS, ROWS, ROWS * (ROWS - 1) // 2)

    rows = spark.range(0, ROWS, 1, 2).selectExpr(
        f"rpad(cast(id as string), {VALUE_BYTES}, 'x') as value"
    )
    with leader_killed(replicated, tmp_path / "write") as place:
        written = rows.mapInArrow(stopped(place), "value string")
        written.write.format("raymq").mode("append").options(**options, topic="rows").save()

    def load(read_from: str) -> Any:
        reader = spark.read.format("raymq").options(**options, subscribe="rows")
        return reader.option("readFrom", read_from).schema("value binary").load()

    for read_from in ("leader", "nearest"):
        with leader_killed(replicated, tmp_path / read_from) as place:
            assert count(load(read_from).mapInArrow(stopped(place), "value binary")) == everything

    # The driver plans while there is no leader.
    kill_leader(replicated)
    assert count(load("leader")) == everything
