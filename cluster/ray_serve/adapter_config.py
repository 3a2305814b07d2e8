"""The options of the adapter for Ray Serve's task consumers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raymq.client.workers.workers_config import WorkersConfig

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class RayMQAdapterConfig:
    """Where `RayMQTaskProcessorAdapter` has its tasks, and how they are tried.

    Example:
        ```python
        from raymq.serve import RayMQAdapterConfig

        print(RayMQAdapterConfig(cluster="raymq-data", lease_s=30).lease_s)
        ```

    Args:
        cluster: the cluster with the tasks: a `Cluster`, or what `raymq.connect` takes: a data directory, a name or
            raymq://host:port. None (default): the only cluster that this user started on the replica's machine.
        group: the workers' group; None (default): the name of the task queue. Deployments with one group share the
            tasks, and each group gets all of them.
        queues: queues of the topics that are created (default 4).
        codec: how tasks and results become bytes: "msgpack" (default) or "json". Tasks of other programs may be JSON.
        lease_s: seconds after which the tasks of a replica that died come to another one (default 60, 1 to 3,600).
            Replicas that work renew their leases.
        max_lease_s: seconds after which a task that still runs comes to another replica as well (default 43,200: 12
            hours).
        backoff: seconds until a failed task is tried again, by its attempts so far (default 1, 2, 5, 10, 30, 60).
        results: whether the results of tasks are kept (default True). It costs a durable put for each task. Without,
            `get_task_status_sync` is refused.
    """

    cluster: Cluster | str | None = None
    group: str | None = None
    queues: int = 4
    codec: str = "msgpack"
    lease_s: float = 60.0
    max_lease_s: float = 43_200.0
    backoff: Sequence[float] = (1, 2, 5, 10, 30, 60)
    results: bool = True

    def workers(self, queue: str, max_retries: int | None) -> WorkersConfig:
        """The options of the workers. Args: `max_retries`: None: a task is tried without limit."""
        return WorkersConfig(
            group=self.group or queue,
            lease_s=self.lease_s,
            max_lease_s=self.max_lease_s,
            # A task that waits in one replica could run in another one.
            prefetch=0,
            max_attempts=None if max_retries is None else max_retries + 1,
            backoff=self.backoff,
        )
