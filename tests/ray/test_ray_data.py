"""Ray Data writes and reads a topic: exactly once, whatever happens to its tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

import raymq
from raymq.cluster.bench.dataset_load import DatasetPlan, run
from raymq.cluster.bench.ray_data_engine import RayDataEngine
from raymq.cluster.deploy import owned_ray
from raymq.cluster.ray_data.topic_source import SCHEMA
from raymq.cluster.record.paths import ClusterPaths
from raymq.data import TopicSink, micro_batches, read_topic
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from tests.support.docstrings import examples
from tests.support.ray_environment import ray_environment

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[raymq.Cluster]:
    place = tmp_path_factory.mktemp("ray-data")
    with ray_environment(place):
        try:
            made = raymq.start(
                place / "data", name="ray-data", ephemeral=True, segment_size_bytes=16 << 20
            )
            ray.init(made.ray_address, namespace="test", log_to_driver=False)
            yield made
            made.close()
        finally:
            ray.shutdown()
            owned_ray.stop_owned(ClusterPaths(place / "data"), files=Files(), clock=Clock())


def test_a_shuffled_dataset_of_which_a_worker_dies_is_stored_once(
    cluster: raymq.Cluster, tmp_path: Path
) -> None:
    cluster.create_topic("shuffled", queues=4)
    flag = tmp_path / "died"

    def row(value: dict[str, Any]) -> dict[str, Any]:
        return {"key": str(value["id"] % 97), "value": str(value["id"])}

    def die_once(batch: dict[str, Any]) -> dict[str, Any]:
        if "1234" in batch["value"] and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    rows = ray.data.range(5000, override_num_blocks=8).random_shuffle().map(row)
    sink = TopicSink(cluster, "shuffled")
    rows.map_batches(die_once, batch_size=200).write_datasink(sink)
    assert flag.exists()
    assert sink.result is not None
    assert (sink.result.rows, sink.result.is_repeated) == (5000, False)
    assert cluster.describe_topic("shuffled")["messages"] == 5000
    read = read_topic(cluster, "shuffled").select_columns(["value"]).to_pandas()
    assert sorted(map(int, read["value"])) == list(range(5000))
    batches = micro_batches(
        cluster, "shuffled", "counting", max_rows=2000, start="earliest", idle_s=0
    )
    assert [batch.count() for batch in batches] == [2000, 2000, 1000]


def test_rows_of_python_have_every_column(cluster: raymq.Cluster) -> None:
    cluster.create_topic("columns", queues=2)
    row = {
        "value": "v",
        "headers": [{"key": "h", "value": b"1"}],
        "properties": [{"key": "p", "value": "q"}],
        "index_keys": ["k"],
    }
    now = {"value": "now", "headers": [], "properties": None, "index_keys": []}

    def with_time(batch: pa.Table) -> pa.Table:
        times = [None if each == "now" else 10**9 for each in batch["value"].to_pylist()]
        return batch.append_column("deliver_at", pa.array(times, pa.timestamp("s", "UTC")))

    rows = ray.data.from_items([row, now]).map_batches(with_time, batch_format="pyarrow")
    rows.write_datasink(TopicSink(cluster, "columns"))
    found: list[Any] = []
    with cluster.consumer("columns", start="earliest") as consumer:
        while len(found) < 2:
            found += consumer.poll(timeout=20)
    shown = {each.body: (each.properties, each.index_keys) for each in found}
    assert shown == {b"v": ({"h": "1", "p": "q"}, ("k",)), b"now": ({}, ())}


def test_a_topic_without_messages_has_columns(cluster: raymq.Cluster) -> None:
    schema = pa.schema([("id", pa.int64())])
    cluster.create_topic("empty", queues=2)
    cluster.create_topic("empty-typed", queues=2, schema=schema)
    found = read_topic(cluster, "empty")
    assert (found.count(), found.schema().names) == (0, SCHEMA.names)
    typed = read_topic(cluster, "empty-typed").schema()
    assert dict(zip(typed.names, typed.types, strict=True))["id"] == pa.int64()


def test_a_load_test_finds_each_row_once(cluster: raymq.Cluster) -> None:
    plan = DatasetPlan(mode="data", topic="load", messages=3000, size=64)
    assert run(cluster, plan, RayDataEngine(cluster), lambda _: None).sound
    assert cluster.describe_topic("load")["messages"] == 3000


@pytest.mark.parametrize(
    "example",
    [each for each in examples() if each.name.startswith("raymq.data")],
    ids=lambda example: example.name,
)
def test_the_example_in_a_docstring_runs(cluster: raymq.Cluster, example: Any) -> None:
    exec(compile(example.code, example.name, "exec"), {"cluster": cluster})
