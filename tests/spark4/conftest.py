"""Spark 4 on a real shard without Ray. Collected only where PySpark 4 is installed (`nox -s spark4`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from raymq.store.config.store_config import StoreConfig
from tests.support.quick_java import QUICK_JAVA
from tests.support.served_shard import PATIENT, ROOT, ServedShard
from tests.support.spark_query import Query


def has_spark_4() -> bool:
    """Whether PySpark 4 is what `import pyspark` finds."""
    try:
        return metadata.version("pyspark").startswith("4.")
    except metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if has_spark_4() else ["test_*.py"]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """One session: it takes long to start."""
    from raymq.spark.session import local_session

    os.environ.update(QUICK_JAVA)
    # The Python workers of Spark find the modules of this tree.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    configs = {"spark.sql.shuffle.partitions": "1", "spark.task.maxFailures": "1"}
    session = local_session("raymq-spark4", configs=configs)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def config() -> StoreConfig:
    """The shard's."""
    return PATIENT


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory, config: StoreConfig) -> Iterator[ServedShard]:
    """A leader with a store of small files, and its flusher."""
    with ServedShard(tmp_path_factory.mktemp("shard"), config) as served:
        served.start_flusher()
        yield served


@pytest.fixture
def put(shard: ServedShard) -> Iterator[Callable[..., None]]:
    """Send bodies to a queue of a topic, which is made if it is not there."""
    with closing(shard.cluster.producer(linger_ms=0)) as producer:

        def send(topic: str, queue: int, *bodies: bytes, queues: int = 1, **fields: Any) -> None:
            shard.cluster.create_topic(topic, queues=queues)
            futures = [producer.send(topic, each, queue_id=queue, **fields) for each in bodies]
            for future in futures:
                future.result(60)

        yield send


@pytest.fixture
def options(shard: ServedShard) -> dict[str, str]:
    """The options that every read needs."""
    address = f"raymq://{shard.endpoints[0]}"
    return {"raymq.address": address, "raymq.token": shard.cluster.token}


@pytest.fixture
def query(spark: Any, tmp_path: Path, options: dict[str, str]) -> Query:
    """A query of that shard, which has not run yet."""
    return Query(spark, tmp_path, options)
