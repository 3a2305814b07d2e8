"""A Spark driver that writes the flights with a plan that differs in each attempt, for `test_flight_faults.py`.

Its arguments are one JSON object. It prints one: the rows and the checksum that it read back, and those of its source.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import raymq
from raymq.errors import Unavailable
from raymq.spark import read, write
from raymq.spark.session import JAVA_OPTIONS, local_session

PARTS = 24
#: rows of a batch in Spark's Python workers
BATCH_ROWS = "2000"


def session(options: dict[str, Any]) -> Any:
    """A Spark of two executors, each a process of its own."""
    configs = {
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "spark.local.dir": options["scratch"],
        "spark.sql.shuffle.partitions": str(PARTS),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": BATCH_ROWS,
        **options["settings"],
    }
    found = local_session("flights", master="local-cluster[2,1,1024]", configs=configs)
    found.sparkContext.setLogLevel("OFF")
    return found


def watched(directory: str, *, kills: bool, slows: bool) -> Callable[[Any], Iterator[Any]]:
    """Rows as they are. Each task says by a file that it has begun. One worker dies, or one attempt is slow."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise RuntimeError("outside of a task")
        part, attempt = context.partitionId(), context.attemptNumber()
        for number, batch in enumerate(batches):
            (Path(directory) / f"began-{part}").touch()
            died = Path(directory) / f"died-{part}"
            if kills and part % 7 == 3 and number == 1 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if slows and part % 9 == 4 and attempt == 0 and number == 1:
                # Spark starts a second attempt beside this one, which goes on as a zombie.
                time.sleep(6)
            yield batch

    return work


def checksum(frame: Any) -> tuple[int, int]:
    """The rows of a frame, and the sum of their hashes."""
    row = frame.selectExpr(
        "count(1)", "cast(sum(cast(xxhash64(key, value) as decimal(38, 0))) as string)"
    ).first()
    return int(row[0]), int(row[1] or 0)


def read_when_up(spark: Any, cluster: raymq.Cluster, topic: str) -> Any:
    """The frame of a topic. A leader may have been killed just before: then the call is made again."""
    until = time.monotonic() + 60
    while True:
        try:
            return read(spark, cluster, topic)
        except Unavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def main() -> None:
    """Write, read back, print."""
    options = json.loads(sys.argv[1])
    spark = session(options)
    with Path(options["csv"]).open(encoding="utf-8") as file:
        columns = next(csv.reader(file))
    flights = spark.read.csv(options["csv"], header=True)
    if len(flights.columns) != len(columns):
        raise RuntimeError("the source is not what it was")
    rows = flights.selectExpr(
        "cast(concat(carrier, flight) as binary) as key",
        "cast(to_json(struct(*)) as binary) as value",
    )
    # Each attempt of a task sees its rows in an order of its own: they arrive from the shuffle in any order, and get
    # random numbers in that order. No shuffle comes after rand(): if an executor is lost then, Spark itself repeats
    # some rows and loses others (SPARK-38160).
    mixed = rows.repartition(PARTS).selectExpr("key", "value", "rand() as r")
    mixed = mixed.sortWithinPartitions("r").select("key", "value")
    work = watched(options["scratch"], kills=options["kills"], slows=options["slows"])
    watched_rows = mixed.mapInArrow(work, mixed.schema)

    with raymq.connect(options["cluster"]) as cluster:
        done = write(
            watched_rows,
            cluster,
            topic=options["topic"],
            writeId=options["topic"],
            delivery="staged",
        )
        found = checksum(read_when_up(spark, cluster, options["topic"]))
    answer = {"written": done.rows, "found": found, "expected": checksum(rows)}
    print(json.dumps(answer), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
