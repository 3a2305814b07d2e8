"""The first query of a session of Spark, in a process of its own: `python -m benchmarks.first_query JSON`.

The JSON has what `Wanted` has. It prints the seconds of the query, without the start of the session.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import raymq
from benchmarks import spark_peers
from raymq.spark.session import local_session

#: options of each session of the benchmark
CONFIGS = {"spark.driver.memory": "2g", "spark.ui.showConsoleProgress": "false"}


class Wanted(NamedTuple):
    """A query."""

    #: "kafka", "raymq" or "ready"
    peer: str
    #: "write" or "read"
    action: str
    topic: str
    rows: int
    #: the address of a broker or a shard
    address: str
    token: str
    #: of the connector for Kafka, separated by commas
    jars: str


def seconds(wanted: Wanted) -> float:
    """How long the query takes in a new process. Raises: CalledProcessError."""
    words = [sys.executable, "-m", "benchmarks.first_query", json.dumps(wanted)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True, cwd=root, timeout=300
    )
    return float(done.stdout.splitlines()[-1])


def _peer(wanted: Wanted, spark: Any) -> spark_peers.Peer:
    if wanted.peer == "kafka":
        return spark_peers.Kafka(wanted.address, tuned=True)
    if wanted.peer == "ready":
        return spark_peers.Ready(wanted.rows)
    cluster = raymq.connect(wanted.address, token=wanted.token)
    if spark_peers.has_spark_4(spark):
        from raymq.spark import options

        return spark_peers.RayMQ(options(cluster), "direct")
    return spark_peers.RayMQOnSpark3(cluster, "direct")


def main(text: str) -> None:
    """Run the query and print its seconds."""
    wanted = Wanted(*json.loads(text))
    configs = {**CONFIGS, "spark.jars": wanted.jars}
    spark = local_session("first", master="local[2]", configs=configs)
    begin = time.perf_counter()
    peer = _peer(wanted, spark)
    rows = spark_peers.frame(spark, wanted.rows)
    if wanted.action == "write":
        peer.write(rows, wanted.topic)
    else:
        spark_peers.consume(peer.read(spark, wanted.topic))
    print(time.perf_counter() - begin, flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
