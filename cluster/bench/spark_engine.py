"""The load test of Spark, `raymq bench spark`: by `write` and `read` with Spark 3.5, format("raymq") with 4."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raymq.spark.cluster_options import options
from raymq.spark.session import local_session
from raymq.spark.sink import write
from raymq.spark.source import read

from .dataset_load import (
    FILL,
    KEYS,
    DatasetEngine,
    DatasetPlan,
    QueueOffsets,
    RowCount,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from raymq.client.handle import ClusterHandle


@contextmanager
def engine(cluster: ClusterHandle, plan: DatasetPlan) -> Iterator[DatasetEngine]:
    """The engine, with a Spark of this process that has a core for each task."""
    import pyspark

    is_spark_4 = not pyspark.__version__.startswith("3.")
    spark = local_session(
        "raymq-bench",
        master=f"local[{plan.tasks}]",
        configs={"spark.ui.showConsoleProgress": "true"},
    )
    try:
        yield Spark4Engine(spark, cluster) if is_spark_4 else SparkEngine(spark, cluster)
    finally:
        spark.stop()


class SparkEngine(DatasetEngine):
    """Rows made, written and read by Spark 3.5."""

    def __init__(self, spark: SparkSession, cluster: ClusterHandle) -> None:
        self.spark = spark
        self.cluster = cluster

    def write(self, plan: DatasetPlan, write_id: str) -> None:
        """Write by `raymq.spark.write`."""
        frame = self._rows(plan)
        write(frame, self.cluster, topic=plan.topic, writeId=write_id, delivery=plan.delivery)

    def read(self, plan: DatasetPlan, begin: QueueOffsets, end: QueueOffsets) -> RowCount:
        """Read by `raymq.spark.read`."""
        return self._count(plan, self._frame(plan, begin, end))

    def _frame(self, plan: DatasetPlan, begin: QueueOffsets, end: QueueOffsets) -> object:
        return read(
            self.spark,
            self.cluster,
            plan.topic,
            startingOffsets={plan.topic: begin},
            endingOffsets={plan.topic: end},
            schema="value binary",
        )

    def _rows(self, plan: DatasetPlan) -> Any:
        from pyspark.sql import functions as f

        number = f.col("id").cast("string")
        return self.spark.range(0, plan.messages, 1, plan.tasks).select(
            f.concat(f.lit("key-"), (f.col("id") % KEYS).cast("string")).alias("key"),
            f.rpad(number, plan.size, FILL).alias("value"),
        )

    def _count(self, plan: DatasetPlan, frame: Any) -> RowCount:
        """Compare each row in the tasks, and count the different numbers."""
        from pyspark.sql import functions as f

        text = f.col("value").cast("string")
        number = f.expr(f"try_cast(rtrim('{FILL}', cast(value as string)) as bigint)")
        is_whole = f.coalesce(f.rpad(number.cast("string"), plan.size, FILL) == text, f.lit(False))
        checked = frame.select(f.when(is_whole, number).alias("number"))
        rows, whole, different = checked.agg(
            f.count(f.lit(1)), f.count("number"), f.count_distinct("number")
        ).first()
        return RowCount(int(whole), int(different), int(rows - whole))


class Spark4Engine(SparkEngine):
    """Rows made, written and read by Spark 4."""

    def write(self, plan: DatasetPlan, write_id: str) -> None:
        """Write by format("raymq")."""
        writer = self._rows(plan).write.format("raymq").mode("append")
        writer = writer.options(**options(self.cluster))
        writer = writer.option("topic", plan.topic).option("writeId", write_id)
        writer.option("delivery", plan.delivery).save()

    def _frame(self, plan: DatasetPlan, begin: QueueOffsets, end: QueueOffsets) -> object:
        found = self.spark.read.format("raymq").schema("value binary")
        found = found.options(**options(self.cluster))
        for name, offsets in (("startingOffsets", begin), ("endingOffsets", end)):
            found = found.option(name, json.dumps({plan.topic: offsets}))
        return found.option("subscribe", plan.topic).load()
