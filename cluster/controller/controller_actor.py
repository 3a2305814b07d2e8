"""The actor of a cluster's controller: made by each start, ended by stop."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

from raymq.client.transport.actor_names import NAMESPACE, controller_name
from raymq.cluster.deploy import node_labels
from raymq.cluster.deploy.ray_host import Progress
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable

#: how long Ray may take to forget an actor
_END_TIMEOUT_MS = 10_000
_STEP_MS = 50
#: one thread answers `status`
_MAX_CONCURRENCY = 2


def make(
    ray: ModuleType, record: ClusterRecord, paths: ClusterPaths, *, clock: Clock, warn: Progress
) -> None:
    """Make the controller on this machine, in place of one that runs, and do not wait until it works.

    A new one loads the present code, and is where `cluster.json` is. One that runs has nothing to keep. A cluster in
    which no replica can take over from another has none. Args: `warn`: gets a line if none can be made: the shards
    serve without it.
    """
    try:
        end(ray, record.name, clock=clock)
    except Unavailable as error:
        warn(f"no new controller was made: {error}")
        return
    if len(record.candidates) == 1:
        return
    from .actor import ControllerActor

    actor = ray.remote(ControllerActor).options(
        name=controller_name(record.name),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        max_concurrency=_MAX_CONCURRENCY,
        label_selector=node_labels.this_node_selector(ray),
    )
    actor.remote({"role": "controller", "cluster_dir": paths.data_dir})


def close(ray: object, record: ClusterRecord, *, clock: Clock) -> dict[str, str]:
    """End the controller before the other actors, so that it makes none of them again.

    Returns: its name -> "closed" or why it was not ended; nothing if there was none.
    """
    try:
        was_there = end(ray, record.name, clock=clock)
    except Unavailable as error:
        # The caller has the lock of the data directory, without which a controller makes nothing.
        return {controller_name(record.name): f"failed to close: {error}"}
    return {controller_name(record.name): "closed"} if was_there else {}


def end(ray: Any, cluster: str, *, clock: Clock) -> bool:
    """End the controller, and wait until Ray has forgotten it. Returns: whether there was one. Raises: Unavailable."""
    name = controller_name(cluster)
    handle = _find(ray, name)
    if handle is None:
        return False

    ray.kill(handle, no_restart=True)
    deadline_ms = clock.monotonic_ms() + _END_TIMEOUT_MS
    while _find(ray, name) is not None:
        if clock.monotonic_ms() > deadline_ms:
            raise Unavailable(f"Ray has not ended the actor {name} within 10 s")
        clock.sleep_ms(_STEP_MS)
    return True


def _find(ray: ModuleType, name: str) -> object:
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=NAMESPACE)
    return None
