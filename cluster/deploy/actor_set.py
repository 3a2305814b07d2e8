"""The Ray actors of one cluster: created, waited for, closed.

Functions over an initialised `ray` module.

Every actor is detached (it outlives the process that started it), restarts without limit and never retries a call
(a retried append would be a second append). It reserves no CPU in Ray. All roles of a replica stay on the machine that
has its disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raymq.cluster.cluster_record import ClusterRecord
from raymq.cluster.paths import NAMESPACE, ClusterPaths, actor_name, coordinator_name
from raymq.cluster.transport.tls import TLS_PREFIX, USE_TLS
from raymq.store.clock import Clock
from raymq.store.errors import Corrupt, RayMQError, Rejected, Unavailable

from . import placement
from .ray_host import HOST_LABEL, Progress

_SERVER = "raymq.cluster.transport.flight_server:serve"
_TRANSPORT = "raymq.cluster.transport.flight_client:ReplicaTransport"
_PREPARE = "raymq.cluster.deploy.placement:prepare_replica"
_CALL_TIMEOUT_S = 10.0
#: states in which a CommitLog serves
_UP = ("RUNNING", "READ_ONLY")
#: threads for the actor's own calls; put and fetch run in threads of the Flight server
_MAX_CONCURRENCY = {"commit_log": 8}
#: every role, by the order in which they are closed: a CommitLog needs its satellites to the end
_CLOSING_RANK = {
    "commit_log": 0,
    "replication": 1,
    "group_commit": 2,
    "flush_real_time": 2,
    "commit_real_time": 2,
}


@dataclass(frozen=True)
class Member:
    """One actor of the cluster."""

    shard: int
    replica: int
    role: str
    name: str
    #: Ray's actor handle
    handle: Any
    #: the label of the node it stays on; None: this machine
    node: str | None = None


def specs(
    record: ClusterRecord,
    paths: ClusterPaths,
    token: str,
    options: dict[str, Any],
    ca: bytes | None = None,
) -> list[dict[str, Any]]:
    """One plain dict per actor, in starting order: what its constructor gets."""
    from raymq import __version__

    # `flush` is a field of its own.
    options = {key: value for key, value in options.items() if key != "flush"}
    found = []
    for shard in range(record.shards):
        for replica in reversed(range(record.replicas)):
            for role in record.roles(replica):
                found.append(
                    {
                        "cluster": record.name,
                        "cluster_id": record.cluster_id,
                        "shard": shard,
                        "shards": record.shards,
                        "replica": replica,
                        "role": role,
                        "data_dir": str(paths.replica(shard, replica)),
                        "peer_data_dir": str(paths.replica(shard, 1))
                        if record.replicas > 1
                        else None,
                        "peer_name": actor_name(record.name, shard, 1, "commit_log")
                        if record.replicas > 1
                        else None,
                        "mode": "leader" if replica == 0 else "follower",
                        "replication": record.replication,
                        "flush": record.flush,
                        "options": options,
                        "token": token,
                        "host": record.host,
                        "tls": record.tls,
                        "ca": None if ca is None else ca.decode(),
                        "insecure": record.insecure,
                        "node": node_of(record, shard, replica),
                        "placement": record.placement,
                        "formed": record.formed,
                        "ephemeral": record.ephemeral,
                        "cluster_dir": paths.data_dir,
                        "prepare": _PREPARE,
                        "server": _SERVER,
                        "transport": _TRANSPORT,
                        "version": __version__,
                    }
                )
    return found


def create(
    ray: Any,
    record: ClusterRecord,
    paths: ClusterPaths,
    token: str,
    options: dict[str, Any],
    ca: bytes | None = None,
    *,
    timeout_s: float = _CALL_TIMEOUT_S,
) -> tuple[list[Member], bool]:
    """Create the actors that do not run yet; running ones are kept.

    Args: `timeout_s` is how long a running first shard may take to answer.

    Returns: all actors, and whether the cluster was started by this call (its first shard did not
    run).
    Raises: Rejected when another cluster of the same name runs in this Ray, or this one with
    another `flush` or another TLS.
    """
    from raymq.actors.ray.actor_classes import (
        CommitActor,
        CommitLogActor,
        FlushActor,
        ReplicationActor,
    )
    from raymq.actors.ray.concurrency_groups import GROUP_OF, GROUPS

    for method, group in GROUP_OF.items():
        # Without Ray's task events a call costs a fifth less.
        ray.method(concurrency_group=group, enable_task_events=False)(
            getattr(CommitLogActor, method)
        )
    kinds = {
        "commit_log": ray.remote(concurrency_groups=dict(GROUPS))(CommitLogActor),
        "commit_real_time": ray.remote(CommitActor),
        "replication": ray.remote(ReplicationActor),
    }
    satellite = ray.remote(FlushActor)
    running = _check_running(ray, record, min(timeout_s, _CALL_TIMEOUT_S))
    here = _placement(ray)
    members = []
    for spec in specs(record, paths, token, options, ca):
        role, node = spec["role"], spec["node"]
        name = actor_name(record.name, spec["shard"], spec["replica"], role)
        handle = (
            kinds.get(role, satellite)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=0,
                max_concurrency=_MAX_CONCURRENCY.get(role, 2),
                label_selector=here if node is None else placement.selector(node),
            )
            .remote(spec)
        )
        members.append(Member(spec["shard"], spec["replica"], role, name, handle, node))
    return members, not running


def _check_running(ray: Any, record: ClusterRecord, timeout_s: float) -> bool:
    """Whether the cluster runs already.

    Raises: Rejected when what runs is another cluster of the same name (they would share actors),
    or this one in another flush mode or pool mode (running actors keep theirs).
    """
    members = find(ray, record.name, [(0, 0, "commit_log")])
    if not members:
        return False
    try:
        status = ray.get(members[0].handle.status.remote(), timeout=timeout_s)
    except ray.exceptions.RayError:
        return True
    if status.get("cluster_id") != record.cluster_id:
        raise Rejected(
            f"another cluster named {record.name!r} runs in this Ray: stop it, or "
            "start this one in "
            "another Ray (a new data directory can also take another name)",
            field="name",
            limit=record.name,
        )
    if status.get("flush", record.flush) != record.flush:
        raise Rejected(
            f"the cluster runs with flush={status['flush']!r}; to change it, stop "
            "it and start it with "
            f"flush={record.flush!r}",
            field="flush",
            limit=status["flush"],
        )
    if status.get("transient_pool", record.transient_pool) != record.transient_pool:
        raise Rejected(
            f"the cluster runs {'without' if record.transient_pool else 'with'} the transient pool; "
            f"to change that, stop it and start it with transient_pool={record.transient_pool}",
            field="transient_pool",
            limit=status["transient_pool"],
        )
    endpoint = status.get("endpoint")
    if endpoint and endpoint.startswith(TLS_PREFIX) != record.tls:
        raise Rejected(
            f"the cluster runs {'without' if record.tls else 'with'} TLS and {USE_TLS} says "
            "otherwise: to change it, stop it and start it again",
            field=USE_TLS,
        )
    return True


def node_of(record: ClusterRecord, shard: int, replica: int) -> str | None:
    """The label of a replica's node; None: all are on one machine."""
    return None if record.placement is None else record.placement[shard][replica]


def _placement(ray: Any) -> dict[str, str]:
    """The label selector of this machine's node, where the data directory is.

    The host label survives a restart of the node's raylet, its node id does not. In a Ray that was started without the
    label the id is used, and after a raylet's restart `start` must be run again.
    """
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            label = node.get("Labels", {}).get(HOST_LABEL)
            if label is not None:
                return {HOST_LABEL: label}
    return {"ray.io/node-id": node_id}


def wait_running(
    ray: Any,
    members: list[Member],
    *,
    clock: Clock,
    timeout_s: float,
    progress: Progress,
    warn: Progress,
) -> dict[int, str]:
    """Wait until every CommitLog is up, then send the endpoints of all leaders to each of them.

    A READ_ONLY one is up: it serves reads, and only an operator ends that state. `warn` gets its line.

    Returns: shard -> endpoint of its leader. Raises: Unavailable with each shard's state and error,
    Corrupt as soon as a shard finds its store damaged.
    """
    logs = [member for member in members if member.role == "commit_log"]
    states: dict[str, dict[str, Any]] = {}
    reported: dict[str, str] = {}
    deadline = clock.monotonic_ms() + int(timeout_s * 1000)
    while True:
        # All at once: several silent ones then take the time of one.
        wanted = [m for m in logs if states.get(m.name, {}).get("state") not in _UP]
        calls = [(member, _ask_ready(ray, member)) for member in wanted]
        left_ms = max(1000, deadline - clock.monotonic_ms())
        give_up = clock.monotonic_ms() + min(int(_CALL_TIMEOUT_S * 1000), left_ms)
        for member, call in calls:
            answer_s = max(0.0, (give_up - clock.monotonic_ms()) / 1000)
            state = states[member.name] = _ready(ray, member, call, answer_s)
            line = _line(member, state)
            if reported.get(member.name) != line:
                reported[member.name] = line
                (warn if state["state"] == "READ_ONLY" else progress)(line)
        left = [member for member in logs if states[member.name]["state"] not in _UP]
        if not left:
            break
        damaged = [m for m in left if str(states[m.name].get("error")).startswith("Corrupt: ")]
        if damaged:
            # Waiting does not repair a store.
            raise Corrupt(
                "; ".join(_line(member, states[member.name]) for member in damaged)
                + ". The cluster is left as it is: end it with `raymq stop`",
                shards={member.name: states[member.name] for member in damaged},
            )
        if clock.monotonic_ms() > deadline:
            raise Unavailable(
                f"{len(left)} of {len(logs)} replicas do not serve in the remaining {timeout_s:.0f} s: "
                + "; ".join(_line(member, states[member.name]) for member in left)
                + ". They keep trying: see `raymq status`; `raymq stop` ends them",
                shards={member.name: states[member.name] for member in left},
            )
        clock.sleep_ms(100)
    found = {
        member.shard: str(states[member.name]["endpoint"]) for member in logs if member.replica == 0
    }
    routes = {str(shard): endpoint for shard, endpoint in found.items()}
    leaders = [member for member in logs if member.replica == 0]
    ray.get(
        [member.handle.set_routes.remote(routes) for member in leaders], timeout=_CALL_TIMEOUT_S
    )
    return found


def _ask_ready(ray: Any, member: Member) -> Any:
    """The call; None when the member's node is away, because Ray would hold the call until it is back."""
    if member.node is not None and member.node not in placement.present(ray):
        return None
    return member.handle.ready.remote()


def _ready(ray: Any, member: Member, call: Any, timeout_s: float) -> dict[str, Any]:
    """The member's answer to `_ask_ready`."""
    if call is None:
        error = placement.describe_away(str(member.node))
        return {"state": "PENDING", "endpoint": None, "error": error}
    try:
        state: dict[str, Any] = ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        return {"state": "PENDING", "endpoint": None, "error": "Ray has not started the actor yet"}
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
        return {"state": "DOWN", "endpoint": None, "error": str(error).strip().splitlines()[-1]}
    return state


def _line(member: Member, state: dict[str, Any]) -> str:
    error = state.get("error")
    where = f"shard {member.shard} replica {member.replica}: {state['state']}"
    return f"{where} ({error})" if error else where


def find(ray: Any, cluster: str, record_roles: Iterable[tuple[int, int, str]]) -> list[Member]:
    """The actors, of those named, that Ray knows."""
    members = []
    for shard, replica, role in record_roles:
        name = actor_name(cluster, shard, replica, role)
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            continue
        members.append(Member(shard, replica, role, name, handle))
    return members


def all_roles(record: ClusterRecord) -> list[tuple[int, int, str]]:
    """Every (shard, replica, role) that may run, for all flush modes."""
    return [
        (shard, replica, role)
        for shard in range(record.shards)
        for replica in range(record.replicas)
        for role in _CLOSING_RANK
    ]


def is_another(ray: Any, record: ClusterRecord, *, clock: Clock) -> bool:
    """Whether the cluster of this name in this Ray has another identity, as the first shard that answers says.

    When no shard answers, it counts as the one that was started here.
    """
    roles = [role for role in all_roles(record) if role[2] == "commit_log"]
    calls = [member.handle.status.remote() for member in find(ray, record.name, roles)]
    give_up = clock.monotonic() + _CALL_TIMEOUT_S
    for call in calls:
        with contextlib.suppress(ray.exceptions.RayError):
            status = ray.get(call, timeout=max(0.0, give_up - clock.monotonic()))
            return bool(status["cluster_id"] != record.cluster_id)
    return False


def close(ray: Any, record: ClusterRecord, *, clock: Clock, timeout_s: float) -> dict[str, str]:
    """Close every actor in order, end it, and wait until Ray has forgotten it.

    Leaders come first: they answer waiting calls and sync what is left, for which the satellites must still run. Then
    followers, then satellites. Coordinators of durable queues come last and lose nothing. A waiting getter asks for a
    new one at once, and is refused only when the shards are gone.
    Returns: actor name -> "closed" or why it was ended without an orderly close.
    """
    members = find(ray, record.name, all_roles(record))
    present = placement.present(ray) if record.placement else {}
    outcomes: dict[str, str] = {}
    for rank in sorted({_rank(m) for m in members}):
        group = [m for m in members if _rank(m) == rank]
        wave = []
        for member in group:
            node = node_of(record, member.shard, member.replica)
            if node is None or node in present:
                wave.append(member)
            else:
                outcomes[member.name] = f"its node {node} is away; ended"
        calls = [
            m.handle.close.remote(timeout_s / 2)
            if m.role == "commit_log"
            else m.handle.close.remote()
            for m in wave
        ]
        wait_s = timeout_s if rank[0] == 0 else _CALL_TIMEOUT_S
        for member, call in zip(wave, calls, strict=True):
            outcomes[member.name] = _outcome(ray, member, call, wait_s)
        for member in group:
            # This ends the process and frees the name; after close() alone Ray would restart the actor.
            ray.kill(member.handle, no_restart=True)
    _wait_gone(ray, record.name, members, clock)
    for name in _coordinators(ray, record.name):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        outcomes[name] = "closed"
    return outcomes


def _rank(member: Member) -> tuple[int, int]:
    """The order of closing; within a role leaders before followers."""
    return _CLOSING_RANK[member.role], member.replica


def _coordinators(ray: Any, cluster: str) -> list[str]:
    """The names of the coordinators of the cluster's durable queues."""
    prefix = coordinator_name(cluster, "")
    known = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"]
        for actor in known
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)
    )


def _outcome(ray: Any, member: Member, call: Any, timeout_s: float) -> str:
    try:
        ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        return f"did not close within {timeout_s:g} s; ended"
    except ray.exceptions.RayActorError as error:
        if member.role != "commit_log":
            # A CommitLog that closes ends its satellites itself. They have no data of their own.
            return "closed"
        return f"was down: {str(error).strip().splitlines()[0]}"
    except (RayMQError, ray.exceptions.RayTaskError) as error:
        return f"failed to close: {str(error).strip().splitlines()[-1]}"
    return "closed"


def _wait_gone(ray: Any, cluster: str, members: list[Member], clock: Clock) -> None:
    deadline = clock.monotonic_ms() + 10_000
    for member in members:
        while find(ray, cluster, [(member.shard, member.replica, member.role)]):
            if clock.monotonic_ms() > deadline:
                raise Unavailable(f"Ray has not ended the actor {member.name} within 10 s")
            clock.sleep_ms(50)


def endpoints(ray: Any, cluster: str, shards: int) -> dict[int, str]:
    """shard -> endpoint of the leaders that serve now."""
    members = find(ray, cluster, [(shard, 0, "commit_log") for shard in range(shards)])
    found = {}
    for member in members:
        state = _ready(ray, member, _ask_ready(ray, member), _CALL_TIMEOUT_S)
        if state.get("endpoint"):
            found[member.shard] = str(state["endpoint"])
    return found


def credentials(ray: Any, cluster: str) -> dict[str, Any]:
    """The facts that a client needs which reaches the cluster through Ray: cluster_id, shards, token.

    Raises: Rejected when no such cluster runs in this Ray, Unavailable when its first shard does
    not answer.
    """
    members = find(ray, cluster, [(0, 0, "commit_log")])
    if not members:
        raise Rejected(
            f"no cluster {cluster!r} runs in the Ray to which this process is connected: start it "
            "with `raymq start DIR`, or name its data directory",
            field="target",
            limit=cluster,
        )
    try:
        facts: dict[str, Any] = ray.get(
            members[0].handle.credentials.remote(), timeout=_CALL_TIMEOUT_S
        )
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the first shard of {cluster!r} does not answer: {error}") from error
    return facts
