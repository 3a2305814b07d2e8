"""Tasks of a Serve deployment that outlive its replicas: one is killed in the middle of a task.

    pip install "raymq[serve]" "ray>=2.55"; python examples/serve_tasks.py [DATA_DIR]

The deployment takes its tasks from a topic, and no broker runs beside Ray. A task is durable once it is enqueued. The
task of a replica that dies comes to another replica when its lease is over, and each task has one result. The number
of replicas follows the number of tasks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import TaskProcessorConfig
from ray.serve.task_consumer import (
    instantiate_adapter_from_config,
    task_consumer,
    task_handler,
)

import raymq
from raymq.serve import LagAutoscalingPolicy, RayMQAdapterConfig, RayMQTaskProcessorAdapter

TASKS, REPLICAS_MAX = 60, 3
#: how long each task takes
TASK_S = 0.3
#: seconds after which the task of a replica that died comes to another one. As a rule a minute
LEASE_S = 3.0
TIMEOUT_S = 120.0


def deployment_of(config: TaskProcessorConfig, directory: str) -> Any:
    """A deployment whose replicas do the tasks of a queue."""
    policy = AutoscalingPolicy(
        policy_function=LagAutoscalingPolicy,
        policy_kwargs={
            "queue_name": config.queue_name,
            "cluster": directory,
            "poll_interval_s": 0.5,
        },
    )
    scaling = AutoscalingConfig(
        min_replicas=1,
        max_replicas=REPLICAS_MAX,
        target_ongoing_requests=2,
        upscale_delay_s=0.5,
        metrics_interval_s=0.5,
        policy=policy,
    )

    @serve.deployment(
        autoscaling_config=scaling, max_ongoing_requests=1, ray_actor_options={"num_cpus": 0.2}
    )
    @task_consumer(task_processor_config=config)
    class Squares:
        """Squares numbers."""

        @task_handler(name="square")
        def square(self, number: int, killed_once: str) -> int:
            """Square a number. The first replica that gets the number 7 is killed."""
            time.sleep(TASK_S)
            if number == 7 and not os.path.exists(killed_once):
                with open(killed_once, "x"):
                    os.kill(os.getpid(), signal.SIGKILL)
            return number * number

    return Squares


def replicas_of(application: str) -> int:
    """How many replicas run."""
    (deployment,) = serve.status().applications[application].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


def main() -> None:
    """Enqueue tasks, let replicas do them while one is killed, and compare the results."""
    directory = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "raymq-tasks")
    with raymq.start(directory) as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        config = TaskProcessorConfig(
            queue_name="numbers",
            adapter=RayMQTaskProcessorAdapter,
            adapter_config=RayMQAdapterConfig(cluster=cluster, lease_s=LEASE_S),
        )
        # These tasks come from a topic: no HTTP is needed.
        serve.start(http_options={"location": "NoServer"})
        serve.run(deployment_of(config, directory).bind(), name="squares", route_prefix=None)

        adapter = instantiate_adapter_from_config(config)
        killed_once = os.path.join(directory, "killed-once")
        tasks = {
            number: adapter.enqueue_task_sync("square", args=[number, killed_once]).id
            for number in range(TASKS)
        }
        results: dict[int, Any] = {}
        replicas = 0
        until_s = time.monotonic() + TIMEOUT_S
        while len(results) < TASKS and time.monotonic() < until_s:
            replicas = max(replicas, replicas_of("squares"))
            for number in tasks.keys() - results.keys():
                found = adapter.get_task_status_sync(tasks[number])
                if found.status == "SUCCESS":
                    results[number] = found.result

        killed = os.path.exists(killed_once)
        adapter.stop_consumer()
        serve.shutdown()
        ray.shutdown()

    facts = {"tasks": TASKS, "done": len(results), "killed": killed, "grew": replicas > 1}
    print(json.dumps(facts))
    if results != {number: number * number for number in range(TASKS)} or not killed:
        sys.exit(1)


if __name__ == "__main__":
    main()
