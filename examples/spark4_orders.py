"""Spark 4 on Ray: a batch of orders to a topic, and a stream from topic to topic that goes on from its checkpoint.

    python examples/spark4_orders.py [DATA_DIR]

It needs `pip install 'raymq[spark4]'` and a JDK 17 or newer. The stream is stopped and started again, and its sink
still has each order once. So it has after another run: the checkpoint of the stream is kept in DATA_DIR.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import raymq
from raymq.spark import options, standalone_session

ORDERS = 10_000


def write_orders(spark: SparkSession, reach: dict[str, str], day: int) -> None:
    """Write a day's orders. `key` chooses the queue, and a repeated `writeId` stores nothing more."""
    first = day * ORDERS
    number = f.col("id")
    orders = spark.range(first, first + ORDERS).select(
        f.concat(f.lit("customer-"), number % 100).alias("key"),
        number.cast("string").alias("value"),
        f.when(number % 2 == 0, "paid").otherwise("open").alias("tag"),
    )
    named = {"topic": "orders", "writeId": f"day-{day}"}
    orders.write.format("raymq").mode("append").options(**reach, **named).save()


def copy_paid(spark: SparkSession, reach: dict[str, str], checkpoint: Path) -> None:
    """Copy the paid orders that have come since the checkpoint, and end."""
    source = spark.readStream.format("raymq").options(**reach)
    orders = source.option("subscribe", "orders").option("startingOffsets", "earliest").load()
    paid = orders.where("tag = 'paid'").select("key", "value")
    sink = paid.writeStream.format("raymq").options(**reach).option("topic", "paid")
    query = sink.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()


def totals(spark: SparkSession, reach: dict[str, str], topic: str) -> tuple[int, int]:
    """How many rows a topic has, and the sum of their numbers."""
    rows = spark.read.format("raymq").options(**reach).option("subscribe", topic).load()
    number = f.col("value").cast("string").cast("long")
    found: Any = rows.agg(f.count("*"), f.sum(number)).first()
    return found[0], found[1]


def main() -> None:
    """Write and copy two days, the second day twice."""
    data_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "raymq-spark4-orders").absolute()
    with raymq.start(data_dir) as cluster:
        cluster.create_topic("orders", queues=4)
        cluster.create_topic("paid", queues=2)
        ray.init(cluster.ray_address, namespace="spark4-orders", log_to_driver=False)
        reach = options(cluster)
        with standalone_session("spark4-orders", executors=1, cores=2, memory="1GB") as spark:
            spark.sparkContext.setLogLevel("OFF")
            for day in (0, 1, 1):
                write_orders(spark, reach, day)
                copy_paid(spark, reach, data_dir / "paid.checkpoint")
            answer = {topic: totals(spark, reach, topic) for topic in ("orders", "paid")}
        ray.shutdown()
    print(json.dumps(answer))
    numbers = range(2 * ORDERS)
    expected = {"orders": (len(numbers), sum(numbers)), "paid": (ORDERS, sum(numbers[::2]))}
    if answer != expected:
        sys.exit(1)


if __name__ == "__main__":
    main()
