"""Ray Data: read topics as datasets, and write a dataset to a topic, each row once.

Example:
    With a `cluster`, in a process that is connected to Ray:

    ```python
    import ray
    from raymq.data import TopicSink, read_topic

    cluster.create_topic("numbers", queues=2)
    rows = ray.data.range(100).map(lambda row: {"value": str(row["id"])})
    rows.write_datasink(TopicSink(cluster, "numbers"))
    print(read_topic(cluster, "numbers").count())
    ```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from raymq.cluster.ray_data.lease_batches import lease_batches
    from raymq.cluster.ray_data.micro_batches import micro_batches
    from raymq.cluster.ray_data.topic_sink import TopicSink
    from raymq.cluster.ray_data.topic_source import read_topic

__all__ = ["TopicSink", "lease_batches", "micro_batches", "read_topic"]

__getattr__ = lazy_names(
    __name__,
    {
        "TopicSink": "raymq.cluster.ray_data.topic_sink",
        "lease_batches": "raymq.cluster.ray_data.lease_batches",
        "micro_batches": "raymq.cluster.ray_data.micro_batches",
        "read_topic": "raymq.cluster.ray_data.topic_source",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
