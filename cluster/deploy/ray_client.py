"""Clusters reached through Ray Client (`ray://`): from outside of the Ray cluster, with only Ray's port open."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from types import ModuleType
from typing import Any

from raymq.client.handle import ClusterHandle
from raymq.client.transport.actor_names import actor_name
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.config.delay_levels import DEFAULT_LEVEL_COUNT

from . import actor_states, ray_release

SCHEME = "ray://"
#: the process that serves a client sometimes dies at its start (a fork beside gRPC's threads, Ray issue 63202), and
#: Ray does not retry
TRIES = 4
RETRY_MS = 500
#: a server that has not answered by then, in spite of Ray's retries, does not listen
SILENT_S = 10.0


def is_connected() -> bool:
    """Whether this process reaches Ray through Ray Client. Imports nothing."""
    client = sys.modules.get("ray.util.client")
    return client is not None and bool(client.ray.is_connected())


def connect_url(url: str) -> ClusterHandle:
    """The cluster at ray://host:port. If there are several, ray://host:port/NAME names one.

    Connects this process as `ray.init(url)` does, unless it is connected, and leaves it connected.
    Raises: Rejected (no grpcio, connected otherwise, no such cluster); Unavailable.
    """
    address, _, name = url.removeprefix(SCHEME).partition("/")
    if importlib.util.find_spec("grpc") is None:
        message = (
            f"{url} needs grpcio: pip install 'ray[client]', the same version as the cluster's Ray"
        )
        raise Rejected(message, field="target", limit="ray[client]")
    import ray

    if not is_connected():
        if ray.is_initialized():
            raise Rejected(
                f"this process is connected to a Ray without Ray Client, so it cannot reach {url}: give the cluster's "
                "name alone, or call ray.shutdown() first",
                field="target",
            )
        _init(ray, SCHEME + address)
    elif (connected := ray_release.client_address()) != address:
        message = f"this process is connected to ray://{connected}, not to {url}: call ray.shutdown() first"
        raise Rejected(message, field="target", limit=f"ray://{connected}")
    return find(name or None)


def find(name: str | None) -> ClusterHandle:
    """A cluster in the Ray that this process is connected to; None: the only one, or "default".

    Raises: Rejected (no such cluster), Unavailable (its first shard does not answer).
    """
    import ray

    if name is None:
        names = _names(ray)
        if len(names) > 1 and "default" not in names:
            message = f"several clusters run in this Ray ({', '.join(names)}): say which one"
            raise Rejected(message, field="target", limit=", ".join(names))
        name = names[0] if len(names) == 1 else "default"
    cluster = handle_of(ray, name)
    cluster.transport = "ray"
    return cluster


def handle_of(ray: ModuleType, name: str) -> ClusterHandle:
    """A cluster in the Ray that this process is connected to, as its shards describe it.

    Raises: Rejected (no such cluster), Unavailable (its first shard does not answer).
    """
    facts = actor_states.credentials(ray, name)
    ca = facts.get("ca")
    return ClusterHandle(
        name=name,
        cluster_id=facts["cluster_id"],
        shards=int(facts["shards"]),
        token=facts["token"],
        endpoints=actor_states.endpoints(ray, name),
        ca=ca.encode() if ca else None,
        placement=facts.get("placement"),
        replicas=int(facts.get("replicas", 1)),
        delay_levels=int(facts.get("delay_levels", DEFAULT_LEVEL_COUNT)),
    )


def _names(ray: Any) -> list[str]:
    """The clusters whose first shard is in this Ray, sorted."""
    prefix, suffix = actor_name("\n", 0, 0, "commit_log").split("\n")
    return [
        name.removeprefix(prefix).removesuffix(suffix)
        for name in actor_states.actor_names(ray)
        if name.startswith(prefix) and name.endswith(suffix)
    ]


def _init(ray: ModuleType, address: str, clock: Clock | None = None) -> None:
    # Ray Client warns about large arguments of calls. Here they are batches of messages.
    warnings.filterwarnings("ignore", "More than 10MB of messages", UserWarning)
    clock = clock or Clock()

    for attempt in range(1, TRIES + 1):
        began = clock.monotonic()
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            refusal = ray_release.mismatch(str(error), address)
            if refusal is not None:
                raise refusal from error
            # Ray's proxy sometimes reports only after half a minute that its process died.
            died = isinstance(error, ConnectionAbortedError)
            silent = not died and clock.monotonic() - began > SILENT_S
            if attempt == TRIES or silent:
                raise Unavailable(
                    f"{address} does not answer: {error}. Is it the port of Ray Client (10001 by default), and "
                    f"{ray_release.access_question(ray_release.installed())}",
                    address=address,
                ) from error

            ray.shutdown()
            clock.sleep_ms(RETRY_MS)
