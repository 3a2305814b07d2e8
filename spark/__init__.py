"""PySpark: write a DataFrame to a topic, each row once, and read a topic as a DataFrame.

Spark's workers speak Arrow Flight to the shards and never import Ray.

Example:
    With a SparkSession `spark` (`raydp_session` makes one on Ray) and a `cluster`:

    ```python
    from raymq.spark import read, write

    cluster.create_topic("readings", queues=2)
    frame = spark.createDataFrame([("sensor-1", "20.5"), ("sensor-2", "21.0")], "key string, value string")
    print(write(frame, cluster, topic="readings", write_id="day-1").rows)
    print(read(spark, cluster, "readings").count())
    ```
"""

# The modules:
# session  a Spark session on Ray by RayDP
# sink     writes a DataFrame to a topic, each row once
# source   reads a topic as a DataFrame

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from .session import raydp_session, use_java
    from .sink import QueueReceipt, WriteResult, write
    from .source import read

__all__ = ["QueueReceipt", "WriteResult", "raydp_session", "read", "use_java", "write"]

__getattr__ = lazy_names(
    __name__,
    {
        "QueueReceipt": "raymq.spark.sink",
        "WriteResult": "raymq.spark.sink",
        "raydp_session": "raymq.spark.session",
        "read": "raymq.spark.source",
        "use_java": "raymq.spark.session",
        "write": "raymq.spark.sink",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
