"""Ray Serve: deployments whose tasks are messages of a topic. `pip install "raymq[serve]"`, with Ray 2.51 or newer.

Example:
    ```python
    from ray.serve.schema import TaskProcessorConfig
    from raymq.serve import RayMQAdapterConfig, RayMQTaskProcessorAdapter

    config = TaskProcessorConfig(
        queue_name="thumbnails",
        adapter=RayMQTaskProcessorAdapter,
        adapter_config=RayMQAdapterConfig(cluster="raymq-data"),
    )
    print(config.max_retries)
    ```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raymq._lazy import lazy_names

if TYPE_CHECKING:
    from raymq.cluster.ray_serve.adapter_config import RayMQAdapterConfig
    from raymq.cluster.ray_serve.lag_policy import LagAutoscalingPolicy
    from raymq.cluster.ray_serve.task_adapter import RayMQTaskProcessorAdapter

__all__ = ["LagAutoscalingPolicy", "RayMQAdapterConfig", "RayMQTaskProcessorAdapter"]

__getattr__ = lazy_names(
    __name__,
    {
        "LagAutoscalingPolicy": "raymq.cluster.ray_serve.lag_policy",
        "RayMQAdapterConfig": "raymq.cluster.ray_serve.adapter_config",
        "RayMQTaskProcessorAdapter": "raymq.cluster.ray_serve.task_adapter",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
