"""As many replicas of a Serve deployment as there are tasks to do."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from raymq.client.arguments import check_number, check_text
from raymq.client.client_thread import ClientThread
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

logger = logging.getLogger("raymq")


class LagAutoscalingPolicy:
    """Scales a deployment of tasks by the messages that its group has not settled.

    The group's lag is what waits and what runs. A replica is wanted for each `target_ongoing_requests` of them, within
    `min_replicas` and `max_replicas`, and as smoothly as the deployment's `autoscaling_config` says. While the cluster
    does not answer the number of replicas stays.

    Example:
        ```python
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
        from raymq.serve import LagAutoscalingPolicy

        config = AutoscalingConfig(
            min_replicas=0,
            max_replicas=8,
            target_ongoing_requests=4,
            policy=AutoscalingPolicy(
                policy_function=LagAutoscalingPolicy,
                policy_kwargs={"queue_name": "thumbnails", "cluster": "raymq-data"},
            ),
        )
        print(config.max_replicas)
        ```

    Args:
        queue_name: the task queue: a topic.
        cluster: what `raymq.connect` takes; None (default): the only cluster that this user started on the machine of
            Serve's controller.
        group: the group of the replicas; None (default): `queue_name`.
        poll_interval_s: how often the cluster is asked (default 5).
    """

    def __init__(
        self,
        queue_name: str,
        cluster: Cluster | str | None = None,
        group: str | None = None,
        poll_interval_s: float = 5.0,
    ) -> None:
        """Ask the cluster from the first decision on."""
        check_text("queue_name", queue_name)
        check_number("poll_interval_s", poll_interval_s, 0.1, whole=False)
        self._queue_name = queue_name
        self._group = group or queue_name
        self._target = cluster
        self._poll_interval_s = poll_interval_s
        self._clock = Clock()
        self._handle: Cluster | None = None
        self._asked_s = -poll_interval_s
        self._is_asking = threading.Lock()
        #: unsettled messages; None: not known yet
        self._lag: int | None = None

    def __call__(self, context: Any) -> tuple[int | float, dict[str, Any]]:
        """Decide, without waiting for the cluster. Args: `context`: Serve's AutoscalingContext."""
        self._ask()
        state = {"lag": self._lag}
        if self._lag is None:
            return context.target_num_replicas, state
        work = self._lag + context.total_num_requests
        running = context.current_num_replicas
        if not running:
            return (1 if work else 0), state
        return work / context.config.get_target_ongoing_requests(), state

    def _ask(self) -> None:
        """Ask for the lag in a thread, unless that was done lately: a controller serves all deployments."""
        now_s = self._clock.monotonic()
        if now_s - self._asked_s < self._poll_interval_s or not self._is_asking.acquire(False):
            return
        self._asked_s = now_s
        ClientThread(self._look, "raymq-lag-policy").start()

    def _look(self) -> None:
        try:
            if self._handle is None:
                self._handle = connected(self._target)
            try:
                self._lag = int(self._handle.describe_group(self._group)["lag"])
            except Rejected:
                # No replica has begun yet: all there is waits.
                self._lag = self._waiting(self._handle)
        except Exception as error:
            logger.warning("the lag of group %s is not known: %s", self._group, error)
        finally:
            self._is_asking.release()

    def _waiting(self, cluster: Cluster) -> int:
        if self._queue_name not in cluster.topics():
            return 0
        return int(cluster.describe_topic(self._queue_name)["messages"])


def connected(target: Cluster | str | None) -> Cluster:
    """A handle on a cluster. Args: `target`: a handle, or what `raymq.connect` takes. Raises: as that."""
    from raymq.cluster.cluster import Cluster
    from raymq.cluster.connect import connect

    return target if isinstance(target, Cluster) else connect(target)
