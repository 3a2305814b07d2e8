"""A Ray of several nodes on this machine, each with a label. Away from every other Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: nodes that do not answer are given up after about a second, not after a quarter of a minute
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 300,
    "health_check_failure_threshold": 3,
}


class RayNodes:
    """The nodes of a Ray, by their labels."""

    def __init__(self, directory: Path, labels: list[str]) -> None:
        # On use: Ray reads some of its variables when it is imported.
        from ray.cluster_utils import Cluster

        self._directory = directory
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        for label in labels:
            self.add(label)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        """The argument of `ray.init(address=...)`."""
        return str(self._cluster.address)

    def add(self, label: str) -> None:
        """A node that comes, or comes back."""
        first = not self._nodes
        self._nodes[label] = self._cluster.add_node(
            wait=first,
            num_cpus=1,
            labels={"raymq-node": label},
            temp_dir=str(self._directory / "ray"),
            include_dashboard=False,
            **({"_system_config": _HEALTH} if first else {}),
        )

    def remove(self, label: str) -> None:
        """The node goes, with all its processes. Its files stay."""
        self._cluster.remove_node(self._nodes.pop(label))

    def close(self) -> None:
        """End this Ray."""
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(labels: list[str]) -> Iterator[RayNodes]:
    """A RayNodes with its own directory, its own "current cluster" file and no token."""
    # Short: Ray puts sockets below it.
    directory = Path(tempfile.mkdtemp(prefix="rqn", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        # Never left to chance: a driver that finds a token in the home would use it, these nodes not.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", str(directory))
        patch.setenv("RAYMQ_HOME", str(directory / "home"))
        patch.setenv("RAY_worker_niceness", "0")
        import ray

        raylet: Any = ray._raylet
        raylet.Config.initialize("")
        try:
            nodes = RayNodes(directory, labels)
            try:
                yield nodes
            finally:
                ray.shutdown()
                nodes.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
