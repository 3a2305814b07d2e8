"""The life of a real cluster from the command line: started, stopped, resumed, and nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.deploy import owned_ray, process_tree, ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files


class Shell:
    """Runs `raymq` as a user does, each command in a process of its own."""

    def __init__(self, home: Path) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY")}
        self.environment = {
            **inherited,
            "RAYMQ_HOME": str(home / "home"),
            "RAY_AUTH_TOKEN_PATH": str(home / "ray-token"),
        }

    def __call__(self, *words: str, stdin: str = "") -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "raymq", *words, "--json"],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=90,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def python(self, code: str) -> str:
        """The last line that a program prints."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]


#: a plain program that knows neither the address nor the token of the cluster's Ray
SECOND = """
{early}
import raymq
cluster = raymq.connect("default")
import ray
ray.init(cluster.ray_address, log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: "a task of the second program").remote()))
"""


@pytest.mark.timeout(200)
def test_a_cluster_is_started_stopped_and_resumed_from_the_command_line(tmp_path: Path) -> None:
    data, raymq = tmp_path / "data", Shell(tmp_path)
    paths, files = ClusterPaths(data), Files()
    try:
        size = str(16 * 1024 * 1024)
        first = raymq("start", str(data), "--ephemeral", "--segment-size-bytes", size)
        assert raymq("topic", "create", "t", "--queues", "3")["created"]
        assert raymq("status")["state"] == "RUNNING"
        assert raymq("produce", "t", "--key-separator", "=", stdin="k=one\n")["sent"] == 1
        owned = ray_host.load_owned(paths, files)
        assert owned is not None
        for early in ("", "import ray"):
            assert raymq.python(SECOND.format(early=early)) == "a task of the second program"
        stopped = raymq("stop")
        assert stopped["clean"], stopped
        assert stopped["ray"] == "stopped"
        assert process_tree.members(owned.family, files) == []
        assert raymq("store", "verify", str(data))["faults"] == []
        again = raymq("start", str(data))
        assert again["cluster_id"] == first["cluster_id"]
        assert list(raymq("topic", "list")) == ["t"]
        message = raymq("consume", "t")
        assert (message["key"], message["body"], message["offset"]) == ("k", "one", 0)
        assert raymq("stop", str(data))["clean"]
    finally:
        owned_ray.stop_owned(paths, files=files, clock=Clock())
