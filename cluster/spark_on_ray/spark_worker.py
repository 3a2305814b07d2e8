"""The actor of one executor: it holds the executor's cores and memory in Ray, and runs Spark's Worker."""

from __future__ import annotations

import ray

from raymq.store.base.clock import Clock

from .guarded_daemon import GuardedDaemon, private_directory
from .standalone_options import Secrets, daemon_options

_WORKER = "org.apache.spark.deploy.worker.Worker"


class SparkWorker:
    """Runs a Worker on this node, as long as the actor lives."""

    def __init__(self, master_url: str, shared: Secrets, cores: int, memory: str) -> None:
        directory = private_directory()
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        words = [
            *(_WORKER, "--host", host, "--port", "0"),
            *("--cores", str(cores), "--memory", memory),
            *("--work-dir", str(directory / "work"), master_url),
        ]
        self._daemon = GuardedDaemon(
            directory, daemon_options(shared, directory), words, clock=Clock()
        )

    def wait_until_registered(self, timeout_s: float) -> None:
        """Returns when the Master knows the Worker. Raises: Unavailable, with what the Worker logged."""
        self._daemon.wait_for("Successfully registered with master", timeout_s)

    def stop(self) -> None:
        """End the Worker, its executor and their Python processes. Returns when they are gone."""
        self._daemon.stop()
