"""A DataFrame to a topic and back, on Spark on Ray (RayDP): each row is stored once.

    python examples/spark_ingest.py [DATA_DIR]

It needs `pip install 'raymq[spark]'`, which brings Java 17 on x86_64. examples/flights.py does the same with a real
data set, two shards of three replicas, killed processes and a lost replica.
"""

from __future__ import annotations

import json
import sys

import ray
import raydp
from pyspark.sql import functions as f

import raymq
from raymq.spark import raydp_session, read, use_java, write

ROWS = 50_000


def main() -> None:
    """Write, write again, read, compare."""
    use_java()
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-spark-ingest") as cluster:
        cluster.create_topic("readings", queues=4)
        ray.init(cluster.ray_address, namespace="spark-ingest", log_to_driver=False)
        spark = raydp_session("spark-ingest")
        spark.sparkContext.setLogLevel("OFF")
        number = f.col("id").cast("string")
        sensor = f.concat(f.lit("sensor-"), (f.col("id") % 100).cast("string"))
        readings = spark.range(ROWS).select(sensor.alias("key"), number.alias("value"))

        # `key` chooses the queue, `value` is the body. With the same writeId a second run stores nothing.
        stored = write(readings, cluster, topic="readings", writeId="day-1")
        repeated = write(readings, cluster, topic="readings", writeId="day-1")

        # Kafka's columns: key, value, topic, partition, offset, timestamp...
        back = read(spark, cluster, "readings").select(f.col("value").cast("string"))
        total = back.agg(f.sum(f.col("value").cast("long"))).first()[0]
        count = back.count()
        raydp.stop_spark()
        ray.shutdown()
    answer = {"rows": stored.rows, "repeated": repeated.duplicates, "read": count, "sum": total}
    print(json.dumps(answer))
    if count != ROWS or total != ROWS * (ROWS - 1) // 2:
        sys.exit(1)


if __name__ == "__main__":
    main()
