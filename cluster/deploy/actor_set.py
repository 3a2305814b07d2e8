"""The Ray actors of one cluster: created, and waited for.

Functions over an initialised `ray` module.

Every actor is detached: it outlives the process that started it. It restarts without limit, and never retries a call,
because a retried append would be a second append. It reserves no CPU in Ray. All roles of a replica stay on the machine
that has its disk.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

from raymq.actors.protocol.tls import TLS_PREFIX, USE_TLS
from raymq.actors.ray.actor_spec import ActorSpec, ReadyRow
from raymq.client.transport.actor_names import (
    NAMESPACE,
    actor_name,
)
from raymq.cluster.record.cluster_record import ROCKETMQ, ClusterRecord, store_config
from raymq.cluster.record.paths import ClusterPaths
from raymq.replication.quorum import majority
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, Rejected, Unavailable

from . import node_labels
from .actor_states import (
    CALL_TIMEOUT_S,
    LOOKUP_TIMEOUT_S,
    Member,
    all_actor_keys,
    ask_all,
    find,
    first_answer,
    first_shard,
    leaders_of,
    node_of,
)
from .ray_host import Progress

logger = logging.getLogger("raymq")

_PREPARE = "raymq.cluster.deploy.prepare_replica:prepare_replica"
#: threads for calls by Ray. Put and fetch run in threads of the Flight server
_CONCURRENCY = {"commit_log": 8, ROCKETMQ: 2}
#: a satellite's only call is to run in Ray's main thread
_SATELLITE_CONCURRENCY = 1


def specs(
    record: ClusterRecord,
    paths: ClusterPaths,
    token: str,
    options: dict[str, object],
    ca: bytes | None = None,
) -> list[ActorSpec]:
    """One plain dict per actor, in starting order: the argument of its constructor."""
    from raymq import __version__

    return [
        {
            "cluster": record.name,
            "cluster_id": record.cluster_id,
            "cluster_dir": paths.data_dir,
            "version": __version__,
            "token": token,
            "ca": None if ca is None else ca.decode(),
            "tls": record.tls,
            "insecure": record.insecure,
            "host": record.host,
            "replicas": record.replicas,
            "candidates": record.candidates,
            "voters": record.voters,
            "flush": record.flush,
            "ephemeral": record.ephemeral,
            "placement": record.placement,
            # `flush` is a field of its own.
            "options": {key: value for key, value in options.items() if key != "flush"},
            "prepare": _PREPARE,
            "shard": shard,
            # One that is being added counts itself: topics that are created meanwhile may be on it.
            "shards": record.joined if shard < record.joined else record.shards,
            "formed": record.is_formed(shard),
            "joining": shard >= record.joined,
            "replica": replica,
            "role": role,
            "satellites": record.roles(replica)[1:],
            "data_dir": str(paths.replica(shard, replica)),
            "peers": {
                other: [
                    str(paths.replica(shard, other)),
                    actor_name(record.name, shard, other, "commit_log"),
                ]
                for other in range(record.replicas)
                if other != replica
            },
            "node": node_of(record, shard, replica),
            "generation": record.generation_of(shard, replica),
            "generations": () if record.generations is None else record.generations[shard],
            "least_epoch": record.least_epoch(shard),
            "rocketmq_port": record.rocketmq_port,
            "rocketmq_access": record.rocketmq_access,
        }
        for shard in range(record.shards)
        for replica in reversed(range(record.replicas))
        for role in (*record.roles(replica), *record.doors)
    ]


def converge(
    ray: ModuleType,
    record: ClusterRecord,
    paths: ClusterPaths,
    token: str,
    ca: bytes | None,
    *,
    wanted: Callable[[int, int, str], bool] = lambda *key: True,
    timeout_s: float = CALL_TIMEOUT_S,
) -> tuple[list[Member], bool]:
    """Make the actors that a record says and that do not run: what starts, operations and the controller share.

    No record says fewer actors than the one before it, so that none has to end.
    Args: `wanted`: of shard, replica and role, which of them (default: all). `timeout_s`: as of `create`.
    Returns, Raises: as `create`, of those that are wanted.
    """
    every = specs(record, paths, token, asdict(store_config(record)), ca)
    chosen = [each for each in every if wanted(each["shard"], each["replica"], each["role"])]
    return create(ray, record, chosen, timeout_s=timeout_s)


def create(
    ray: ModuleType,
    record: ClusterRecord,
    specs: list[ActorSpec],
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> tuple[list[Member], bool]:
    """Create the actors that do not run yet. Running ones are kept.

    Args: `specs`: the result of the function `specs`. `timeout_s`: how long a running first shard may take to answer.

    Returns: all actors, and whether the cluster was started by this call (its first shard did not run).
    Raises: Rejected when another cluster of the same name runs in this Ray, or this one with
    another `flush` or another TLS.
    """
    kinds = _actor_classes(ray, record)
    running = check_running(ray, record, min(timeout_s, CALL_TIMEOUT_S))
    here = node_labels.this_node_selector(ray)
    members = []

    for spec in specs:
        role, node = spec["role"], spec["node"]
        name = actor_name(record.name, spec["shard"], spec["replica"], role)
        handle = (
            kinds[role]
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=0,
                max_concurrency=_CONCURRENCY.get(role, _SATELLITE_CONCURRENCY),
                label_selector=here if node is None else {node_labels.NODE_LABEL: node},
            )
            .remote(spec)
        )
        members.append(Member(spec["shard"], spec["replica"], role, name, handle, node))

    return members, not running


def _actor_classes(ray: ModuleType, record: ClusterRecord) -> dict[str, Any]:
    """Role -> its class, as Ray's."""
    from raymq.actors.ray import actor_classes
    from raymq.actors.server.ray.concurrency_groups import GROUP_OF, GROUPS

    commit_log = actor_classes.CommitLogActor
    # The controller asks all the time.
    ray.method(enable_task_events=False)(commit_log.ready)
    # Else `ray list tasks` would show a task of each satellite that never ends.
    ray.method(enable_task_events=False)(actor_classes.SatelliteActor.occupy_main_thread)
    for method, group in GROUP_OF.items():
        # Without Ray's task events a call costs a fifth less.
        ray.method(concurrency_group=group, enable_task_events=False)(getattr(commit_log, method))
    flush = ray.remote(actor_classes.FlushActor)
    doors = {}
    if record.doors:
        # It needs a package of its own.
        from .rocketmq_door import RocketMQDoorActor

        doors[ROCKETMQ] = ray.remote(RocketMQDoorActor)
    return {
        **doors,
        "commit_log": ray.remote(concurrency_groups=dict(GROUPS))(commit_log),
        "commit_real_time": ray.remote(actor_classes.CommitActor),
        "replication": ray.remote(actor_classes.ReplicationActor),
        "group_commit": flush,
        "flush_real_time": flush,
    }


def check_running(
    ray: ModuleType, record: ClusterRecord, timeout_s: float = CALL_TIMEOUT_S
) -> bool:
    """Whether the cluster runs already.

    Raises: Rejected if another cluster of the same name runs (they would share actors). Also if this one runs in
    another flush mode or pool mode (running actors keep theirs).
    """
    members = find(ray, record.name, first_shard())
    if not members:
        return False

    status = first_answer(ray, [each.handle.status.remote() for each in members], timeout_s)
    if status is None:
        return True

    if status.get("cluster_id") != record.cluster_id:
        message = (
            f"another cluster named {record.name!r} runs in this Ray: stop it, or start this one in another Ray (a "
            "new data directory can also take another name)"
        )
        raise Rejected(message, field="name", limit=record.name)

    if status.get("flush", record.flush) != record.flush:
        message = (
            f"the cluster runs with flush={status['flush']!r}; to change it, stop it and start it with "
            f"flush={record.flush!r}"
        )
        raise Rejected(message, field="flush", limit=status["flush"])

    if status.get("transient_pool", record.transient_pool) != record.transient_pool:
        message = (
            f"the cluster runs {'without' if record.transient_pool else 'with'} the transient pool; to change that, "
            f"stop it and start it with transient_pool={record.transient_pool}"
        )
        raise Rejected(message, field="transient_pool", limit=status["transient_pool"])

    endpoint = status.get("endpoint")
    if endpoint and endpoint.startswith(TLS_PREFIX) != record.tls:
        raise Rejected(
            f"the cluster runs {'without' if record.tls else 'with'} TLS and {USE_TLS} says "
            "otherwise: to change it, stop it and start it again",
            field=USE_TLS,
        )

    return True


def wait_running(
    ray: ModuleType,
    members: list[Member],
    *,
    clock: Clock,
    timeout_s: float,
    progress: Progress,
    warn: Progress,
) -> dict[int, str]:
    """Wait as `await_leaders`, then send all endpoints to each CommitLog. Returns, raises: as that."""
    logs = [member for member in members if member.role == "commit_log"]
    leaders, states = await_leaders(
        ray, logs, clock=clock, timeout_s=timeout_s, progress=progress, warn=warn
    )
    found = {shard: str(states[each.name]["endpoint"]) for shard, each in leaders.items()}
    routes = {str(shard): endpoint for shard, endpoint in found.items()}
    replicas: dict[str, dict[str, str]] = {}
    for member in logs:
        endpoint = str(states[member.name]["endpoint"])
        replicas.setdefault(str(member.shard), {})[str(member.replica)] = endpoint
    calls = [member.handle.set_routes.remote(routes, replicas) for member in logs]
    ray.get(calls, timeout=CALL_TIMEOUT_S)
    return found


def await_leaders(
    ray: ModuleType,
    logs: list[Member],
    *,
    clock: Clock,
    timeout_s: float,
    progress: Progress,
    warn: Progress,
) -> tuple[dict[int, Member], dict[str, ReadyRow]]:
    """Wait until all these CommitLogs are up and each of their shards has a leader.

    A RUNNING one is up when all of its satellites work: Ray starts none while its head is away. A READ_ONLY one is up:
    it serves reads, and only an operator ends that state. `warn` gets its line.

    Returns: shard -> its leader; actor name -> its state. Raises: Unavailable with each shard's state and error,
    Corrupt as soon as a shard finds its store damaged.
    """
    leaders: dict[int, Member] = {}
    states: dict[str, ReadyRow] = {}
    deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)
    left = logs

    while left:
        left_ms = max(1000, deadline_ms - clock.monotonic_ms())
        for member, state in ask_all(ray, left, clock, min(int(CALL_TIMEOUT_S * 1000), left_ms)):
            line = _line(member, state)
            if member.name not in states or line != _line(member, states[member.name]):
                report = warn if state["state"] == "READ_ONLY" else progress
                report(line)
            states[member.name] = state
        left = [member for member in left if not _is_up(states[member.name])]
        if not left:
            # The replicas of a shard without a leader elect one.
            leaders = leaders_of(logs, states)
            left = [member for member in logs if member.shard not in leaders]

        _check_damaged(left, states, logs)
        if left and clock.monotonic_ms() > deadline_ms:
            raise Unavailable(
                f"{len(left)} of {len(logs)} replicas do not serve in the remaining {timeout_s:.0f} s: "
                f"{_lines(left, states)}. They keep trying: see `raymq status`; `raymq stop` ends them",
                shards={member.name: states[member.name] for member in left},
            )
        if left:
            clock.sleep_ms(100)

    return leaders, states


def publish_endpoints(
    ray: ModuleType,
    record: ClusterRecord,
    endpoints: dict[int, str],
    replicas: dict[int, dict[int, str]],
    clock: Clock,
) -> dict[int, str]:
    """Tell every CommitLog that answers where all replicas listen, after one of them was made anew.

    Args: `endpoints`, `replicas`: as known so far, for those that do not answer. Returns: shard -> its leader's
    endpoint.
    """
    logs = _placed(ray, record)
    states = {
        member.name: state
        for member, state in ask_all(ray, logs, clock, int(LOOKUP_TIMEOUT_S * 1000))
    }
    up = [member for member in logs if states[member.name]["endpoint"]]
    leaders = leaders_of(up, states)
    found = endpoints | {
        shard: str(states[each.name]["endpoint"]) for shard, each in leaders.items()
    }
    known = {shard: dict(rows) for shard, rows in replicas.items()}
    for member in up:
        known.setdefault(member.shard, {})[member.replica] = str(states[member.name]["endpoint"])

    routes = {str(shard): endpoint for shard, endpoint in found.items()}
    rows = {str(shard): {str(each): at for each, at in row.items()} for shard, row in known.items()}
    calls = [member.handle.set_routes.remote(routes, rows) for member in up]
    for call in calls:
        # One that ends now reads them at its next start, or learns them from the others.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(call, timeout=LOOKUP_TIMEOUT_S)
    return found


def _placed(ray: ModuleType, record: ClusterRecord) -> list[Member]:
    """The CommitLogs that Ray knows, with their nodes."""
    keys = [key for key in all_actor_keys(record) if key[2] == "commit_log"]
    return [
        replace(each, node=node_of(record, each.shard, each.replica))
        for each in find(ray, record.name, keys)
    ]


def _check_damaged(members: list[Member], states: dict[str, ReadyRow], logs: list[Member]) -> None:
    """Raises: Corrupt when a replica found its store damaged, which waiting does not repair.

    A replica that may begin again does so once the others of its shard are led, if a majority of them is sound.
    Args: `logs`: the CommitLogs of all replicas of these shards.
    """
    damaged = [m for m in members if states[m.name].get("is_damaged")]
    lost = Counter(member.shard for member in damaged)
    replicas = Counter(member.shard for member in logs)
    damaged = [
        each
        for each in damaged
        if not states[each.name].get("may_begin_again")
        or replicas[each.shard] - lost[each.shard] < majority(replicas[each.shard])
    ]
    if damaged:
        message = (
            f"{_lines(damaged, states)}. The cluster is left as it is: end it with `raymq stop`"
        )
        raise Corrupt(message, shards={member.name: states[member.name] for member in damaged})


def _is_up(state: ReadyRow) -> bool:
    """Whether a CommitLog serves, with all of its satellites."""
    return state["state"] == "READ_ONLY" or (
        state["state"] == "RUNNING" and not state["missing_roles"]
    )


def _lines(members: list[Member], states: dict[str, ReadyRow]) -> str:
    return "; ".join(_line(member, states[member.name]) for member in members)


def _line(member: Member, state: ReadyRow) -> str:
    missing = state["missing_roles"] if state["state"] == "RUNNING" else []
    error = state.get("error") or (f"waiting for {', '.join(missing)}" if missing else None)
    line = f"shard {member.shard} replica {member.replica}: {state['state']}"
    return f"{line} ({error})" if error else line
