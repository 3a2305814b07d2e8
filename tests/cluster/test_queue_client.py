"""The error of a `raymq.Queue` in a Ray where its cluster does not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raymq.client.transport.actor_names import actor_name
from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.cluster.queue.coordinator_calls import CoordinatorCalls
from raymq.cluster.queue.queue_client import not_in_this_ray
from raymq.store.base.errors import Unavailable
from tests.support.moving_shard import MovingShard


@pytest.mark.parametrize(
    ("runs_at", "words"),
    [
        ("10.0.0.1:7", "it runs in the Ray at 10.0.0.1:7. Leave ray.init() out"),
        (None, "it does not run. Start it: raymq start /data"),
    ],
)
def test_a_queue_says_which_cluster_it_looked_for_and_what_to_do(
    runs_at: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = None if runs_at is None else RayTarget(address=runs_at)
    monkeypatch.setattr(ray_host, "running_target", lambda paths, files: running)
    monkeypatch.setattr(ray_host, "connected_address", lambda: "127.0.0.1:6379")
    cluster: Any = SimpleNamespace(name="orders", data_dir="/data", ray_address=None)
    said = not_in_this_ray(cluster)
    assert said.startswith("looked for cluster 'orders' of /data in the Ray at 127.0.0.1:6379")
    assert words in said
    if runs_at is not None:
        assert "ray.init(raymq.connect('orders').ray_address)" in said


def test_a_queue_starts_its_coordinator_if_any_replica_of_its_shard_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {actor_name("fake", 0, 2, "commit_log")}

    def get_actor(name: str, namespace: str) -> str:
        if name not in there:
            raise ValueError(name)
        return name

    monkeypatch.setattr(ray, "get_actor", get_actor)
    shard = MovingShard()
    calls = CoordinatorCalls(shard.cluster(transport="ray"), "jobs", 0, {})
    calls._check_running()
    there.clear()
    with pytest.raises(Unavailable, match="jobs"):
        calls._check_running()
    shard.close()
