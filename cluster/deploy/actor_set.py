"""The Ray actors of one cluster: created, waited for, closed.

Functions over an initialised `ray` module.

Every actor is detached: it outlives the process that started it. It restarts without limit, and never retries a call,
because a retried append would be a second append. It reserves no CPU in Ray. All roles of a replica stay on the machine
that has its disk.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from raymq.actors.protocol.tls import TLS_PREFIX, USE_TLS
from raymq.client.transport.actor_names import (
    NAMESPACE,
    actor_name,
    coordinator_name,
    replica_of_actor,
)
from raymq.cluster.record.cluster_record import REPLICAS, ClusterRecord, store_config
from raymq.cluster.record.paths import ClusterPaths
from raymq.replication.quorum import majority
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, RayMQError, Rejected, Unavailable

from . import node_labels
from .ray_host import Progress

logger = logging.getLogger("raymq")

_PREPARE = "raymq.cluster.deploy.prepare_replica:prepare_replica"
_CALL_TIMEOUT_S = 10.0
#: how long a replica may take to say whether it leads: one that hangs must not delay the others' answers for long
LOOKUP_TIMEOUT_S = 3.0
#: fields of the cluster's record that every actor gets
_RECORD_FIELDS = (
    "cluster_id",
    "replicas",
    "candidates",
    "voters",
    "flush",
    "host",
    "tls",
    "insecure",
    "placement",
    "ephemeral",
)
#: threads for a CommitLog's own calls. Put and fetch run in threads of the Flight server
_COMMIT_LOG_CONCURRENCY = 8
#: a satellite's only call is to run in Ray's main thread
_SATELLITE_CONCURRENCY = 1
#: how a stop says that it killed a satellite whose CommitLog did not close. The next start recovers the log
WITHOUT_COMMIT_LOG = "its CommitLog did not close; ended"
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
    """One plain dict per actor, in starting order: the argument of its constructor."""
    from raymq import __version__

    common = {name: getattr(record, name) for name in _RECORD_FIELDS} | {
        "cluster": record.name,
        # `flush` is a field of its own.
        "options": {key: value for key, value in options.items() if key != "flush"},
        "token": token,
        "ca": None if ca is None else ca.decode(),
        "cluster_dir": paths.data_dir,
        "prepare": _PREPARE,
        "version": __version__,
    }

    return [
        {
            **common,
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
        }
        for shard in range(record.shards)
        for replica in reversed(range(record.replicas))
        for role in record.roles(replica)
    ]


def converge(
    ray: Any,
    record: ClusterRecord,
    paths: ClusterPaths,
    token: str,
    ca: bytes | None,
    *,
    wanted: Callable[[int, int, str], bool] = lambda *key: True,
    timeout_s: float = _CALL_TIMEOUT_S,
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
    ray: Any,
    record: ClusterRecord,
    specs: list[dict[str, Any]],
    *,
    timeout_s: float = _CALL_TIMEOUT_S,
) -> tuple[list[Member], bool]:
    """Create the actors that do not run yet. Running ones are kept.

    Args: `specs`: the result of the function `specs`. `timeout_s`: how long a running first shard may take to answer.

    Returns: all actors, and whether the cluster was started by this call (its first shard did not run).
    Raises: Rejected when another cluster of the same name runs in this Ray, or this one with
    another `flush` or another TLS.
    """
    kinds = _actor_classes(ray)
    running = _check_running(ray, record, min(timeout_s, _CALL_TIMEOUT_S))
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
                max_concurrency=_COMMIT_LOG_CONCURRENCY
                if role == "commit_log"
                else _SATELLITE_CONCURRENCY,
                label_selector=here if node is None else {node_labels.NODE_LABEL: node},
            )
            .remote(spec)
        )
        members.append(Member(spec["shard"], spec["replica"], role, name, handle, node))

    return members, not running


def _actor_classes(ray: Any) -> dict[str, Any]:
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
    return {
        "commit_log": ray.remote(concurrency_groups=dict(GROUPS))(commit_log),
        "commit_real_time": ray.remote(actor_classes.CommitActor),
        "replication": ray.remote(actor_classes.ReplicationActor),
        "group_commit": flush,
        "flush_real_time": flush,
    }


def _check_running(ray: Any, record: ClusterRecord, timeout_s: float) -> bool:
    """Whether the cluster runs already.

    Raises: Rejected if another cluster of the same name runs (they would share actors). Also if this one runs in
    another flush mode or pool mode (running actors keep theirs).
    """
    members = find(ray, record.name, _first_shard())
    if not members:
        return False

    status = _first_answer(ray, [each.handle.status.remote() for each in members], timeout_s)
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


def node_of(record: ClusterRecord, shard: int, replica: int) -> str | None:
    """The label of a replica's node; None: all are on one machine."""
    return None if record.placement is None else record.placement[shard][replica]


def wait_running(
    ray: Any,
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
    ray.get(calls, timeout=_CALL_TIMEOUT_S)
    return found


def await_leaders(
    ray: Any,
    logs: list[Member],
    *,
    clock: Clock,
    timeout_s: float,
    progress: Progress,
    warn: Progress,
) -> tuple[dict[int, Member], dict[str, dict[str, Any]]]:
    """Wait until all these CommitLogs are up and each of their shards has a leader.

    A RUNNING one is up when all of its satellites work: Ray starts none while its head is away. A READ_ONLY one is up:
    it serves reads, and only an operator ends that state. `warn` gets its line.

    Returns: shard -> its leader; actor name -> its state. Raises: Unavailable with each shard's state and error,
    Corrupt as soon as a shard finds its store damaged.
    """
    leaders: dict[int, Member] = {}
    states: dict[str, dict[str, Any]] = {}
    deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)
    left = logs

    while left:
        left_ms = max(1000, deadline_ms - clock.monotonic_ms())
        for member, state in _ask_all(ray, left, clock, min(int(_CALL_TIMEOUT_S * 1000), left_ms)):
            line = _line(member, state)
            if member.name not in states or line != _line(member, states[member.name]):
                report = warn if state["state"] == "READ_ONLY" else progress
                report(line)
            states[member.name] = state
        left = [member for member in left if not _is_up(states[member.name])]
        if not left:
            # The replicas of a shard without a leader elect one.
            leaders = _leaders(logs, states)
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
    ray: Any,
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
        for member, state in _ask_all(ray, logs, clock, int(LOOKUP_TIMEOUT_S * 1000))
    }
    up = [member for member in logs if states[member.name]["endpoint"]]
    leaders = _leaders(up, states)
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


def _placed(ray: Any, record: ClusterRecord) -> list[Member]:
    """The CommitLogs that Ray knows, with their nodes."""
    keys = [key for key in all_actor_keys(record) if key[2] == "commit_log"]
    return [
        replace(each, node=node_of(record, each.shard, each.replica))
        for each in find(ray, record.name, keys)
    ]


def end_replica(ray: Any, record: ClusterRecord, shard: int, replica: int, *, clock: Clock) -> None:
    """End all actors of one replica without an orderly close, and wait until Ray has forgotten them.

    Raises: Unavailable when Ray does not end one.
    """
    keys = [key for key in all_actor_keys(record) if key[:2] == (shard, replica)]
    members = find(ray, record.name, keys)
    for member in members:
        ray.kill(member.handle, no_restart=True)
    _wait_gone(ray, record.name, members, clock)


def close_replica(
    ray: Any, record: ClusterRecord, shard: int, replica: int, *, clock: Clock, timeout_s: float
) -> None:
    """Close the actors of one replica in order, end them, and wait until Ray has forgotten them.

    Raises: Unavailable when Ray does not end one.
    """
    keys = [key for key in all_actor_keys(record) if key[:2] == (shard, replica)]
    members = sorted(find(ray, record.name, keys), key=lambda each: _CLOSING_RANK[each.role])
    for member in members:
        if member.role == "commit_log":
            call = member.handle.close.remote(timeout_s / 2)
            outcome = _outcome(ray, call, clock, clock.monotonic() + timeout_s)
            if outcome != "closed":
                logger.warning("%s: %s", member.name, outcome)
        ray.kill(member.handle, no_restart=True)
    _wait_gone(ray, record.name, members, clock)


def state_of(ray: Any, member: Member, clock: Clock) -> dict[str, Any]:
    """What a CommitLog says of itself: `state`, `endpoint`, `error`, `mode`, `epoch`."""
    ((_, state),) = _ask_all(ray, [member], clock, int(LOOKUP_TIMEOUT_S * 1000))
    return state


def _leaders(members: list[Member], states: dict[str, dict[str, Any]]) -> dict[int, Member]:
    """Shard -> the CommitLog that leads it. Of two that say so, the one of the higher epoch."""
    leaders: dict[int, Member] = {}
    for member in members:
        state = states.get(member.name, {})
        if state.get("mode") != "leader" or not state.get("endpoint"):
            continue
        known = leaders.get(member.shard)
        if known is None or state["epoch"] > states[known.name]["epoch"]:
            leaders[member.shard] = member
    return leaders


def _ask_all(
    ray: Any, members: list[Member], clock: Clock, timeout_ms: int
) -> Iterator[tuple[Member, dict[str, Any]]]:
    """The state of each member. All are asked at once: several silent ones then take the time of one."""
    present = node_labels.present(ray) if any(member.node for member in members) else {}
    # Ray would hold a call to an actor whose node is away until the node is back.
    asked = [m for m in members if m.node is None or m.node in present]
    calls = {member.name: member.handle.ready.remote() for member in asked}
    deadline_ms = clock.monotonic_ms() + timeout_ms
    for member in members:
        if member.name in calls:
            left_s = max(0.0, (deadline_ms - clock.monotonic_ms()) / 1000)
            yield member, answer(ray, calls[member.name], left_s)
        else:
            yield member, absent("PENDING", node_labels.describe_away(str(member.node)))


def _check_damaged(
    members: list[Member], states: dict[str, dict[str, Any]], logs: list[Member]
) -> None:
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


def _is_up(state: dict[str, Any]) -> bool:
    """Whether a CommitLog serves, with all of its satellites."""
    return state["state"] == "READ_ONLY" or (
        state["state"] == "RUNNING" and not state["missing_roles"]
    )


def _lines(members: list[Member], states: dict[str, dict[str, Any]]) -> str:
    return "; ".join(_line(member, states[member.name]) for member in members)


def answer(ray: Any, call: Any, timeout_s: float) -> dict[str, Any]:
    """The answer of a CommitLog's `ready`, or why there is none: state PENDING or DOWN."""
    try:
        state: dict[str, Any] = ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        return absent("PENDING", "Ray has not started the actor yet")
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
        return absent("DOWN", str(error).strip().splitlines()[-1])
    return state


def absent(state: str, error: str) -> dict[str, Any]:
    """In place of the answer of `ready`."""
    return {
        "state": state,
        "endpoint": None,
        "error": error,
        "mode": None,
        "epoch": 0,
        "missing_roles": [],
    }


def _line(member: Member, state: dict[str, Any]) -> str:
    missing = state["missing_roles"] if state["state"] == "RUNNING" else []
    error = state.get("error") or (f"waiting for {', '.join(missing)}" if missing else None)
    line = f"shard {member.shard} replica {member.replica}: {state['state']}"
    return f"{line} ({error})" if error else line


def missing(record: ClusterRecord, names: Iterable[str]) -> set[tuple[int, int, str]]:
    """(shard, replica, role) of the actors that should run and are not among `names`, the result of `actor_names`."""
    known = set(names)
    return {
        (shard, replica, role)
        for shard in range(record.shards)
        for replica in range(record.replicas)
        for role in record.roles(replica)
        if actor_name(record.name, shard, replica, role) not in known
    }


def find(ray: Any, cluster: str, actor_keys: Iterable[tuple[int, int, str]]) -> list[Member]:
    """The actors, of those named, that Ray knows."""
    members = []
    for shard, replica, role in actor_keys:
        name = actor_name(cluster, shard, replica, role)
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            continue
        members.append(Member(shard, replica, role, name, handle))
    return members


def all_actor_keys(record: ClusterRecord) -> list[tuple[int, int, str]]:
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
    logs = [key for key in all_actor_keys(record) if key[2] == "commit_log"]
    calls = [member.handle.status.remote() for member in find(ray, record.name, logs)]
    deadline_s = clock.monotonic() + _CALL_TIMEOUT_S
    for call in calls:
        with contextlib.suppress(ray.exceptions.RayError):
            status = ray.get(call, timeout=max(0.0, deadline_s - clock.monotonic()))
            return bool(status["cluster_id"] != record.cluster_id)
    return False


def close(ray: Any, record: ClusterRecord, *, clock: Clock, timeout_s: float) -> dict[str, str]:
    """Close every actor in order, end it, and wait until Ray has forgotten it.

    The caller has ended the controller, which would make them again. First come leaders: they answer waiting calls and
    sync the rest of the log, for which the satellites must still run and followers must answer. Then followers, then
    satellites. Coordinators of durable queues come last and lose nothing. A waiting getter asks for a new one at once,
    and is refused only when the shards have ended.

    Args: `timeout_s`: how long the orderly close of all CommitLogs may take, of which leaders leave half to followers.
    Returns: actor name -> "closed" or why it was ended without an orderly close.
    """
    outcomes: dict[str, str] = {}
    members = find(ray, record.name, all_actor_keys(record))
    present = node_labels.present(ray) if record.placement else {}

    leaders = _leading(ray, record, members, present, clock)

    def rank(member: Member) -> tuple[int, int]:
        """The order of closing: within a role leaders before followers."""
        return _CLOSING_RANK[member.role], int(member.name not in leaders)

    deadline_s = clock.monotonic() + timeout_s
    waves_left = len({rank(member) for member in members if member.role == "commit_log"})
    for _, group in itertools.groupby(sorted(members, key=rank), key=rank):
        wave, calls = list(group), []
        # Leaders that hang leave time to followers, which would otherwise be ended without a try.
        wave_s = max(0.0, deadline_s - clock.monotonic()) / max(1, waves_left)
        wave_deadline_s = clock.monotonic() + wave_s
        waves_left -= 1
        for member in wave:
            node = node_of(record, member.shard, member.replica)
            if node is not None and node not in present:
                outcomes[member.name] = f"its node {node} is away; ended"
                continue
            if member.role == "commit_log":
                calls.append((member, member.handle.close.remote(wave_s / 2)))
            else:
                # A CommitLog that closes syncs everything itself, and lets its satellites finish.
                log = actor_name(record.name, member.shard, member.replica, "commit_log")
                outcomes[member.name] = (
                    "closed" if outcomes.get(log) == "closed" else WITHOUT_COMMIT_LOG
                )

        for member, call in calls:
            outcomes[member.name] = _outcome(ray, call, clock, wave_deadline_s)
        for member in wave:
            # `kill` ends the process and frees the name. After close() alone Ray would restart the actor.
            ray.kill(member.handle, no_restart=True)

    _wait_gone(ray, record.name, members, clock)
    coordinators = coordinator_name(record.name, "")
    for name in actor_names(ray):
        if not name.startswith(coordinators):
            continue
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        outcomes[name] = "closed"

    return outcomes


def _leading(
    ray: Any, record: ClusterRecord, members: list[Member], present: dict[str, Any], clock: Clock
) -> set[str]:
    """The actors of replicas that lead, all roles of them."""
    led = {(shard, 0) for shard in range(record.shards)}
    if len(record.candidates) > 1:
        logs = [
            replace(each, node=node_of(record, each.shard, each.replica))
            for each in members
            if each.role == "commit_log"
        ]
        asked = [each for each in logs if each.node is None or each.node in present]
        states = {
            each.name: state
            for each, state in _ask_all(ray, asked, clock, int(LOOKUP_TIMEOUT_S * 1000))
        }
        led = {(each.shard, each.replica) for each in _leaders(asked, states).values()}
    return {each.name for each in members if (each.shard, each.replica) in led}


def actor_names(ray: Any) -> list[str]:
    """The names of all actors in the namespace of RayMQ, sorted."""
    known = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in known if actor["namespace"] == NAMESPACE)


def _outcome(ray: Any, call: Any, clock: Clock, deadline_s: float) -> str:
    """How the call of `close` of a CommitLog ended: "closed", or why it did not close."""
    try:
        ray.get(call, timeout=max(0.0, deadline_s - clock.monotonic()))
    except ray.exceptions.GetTimeoutError:
        return "did not close in time; ended"
    except ray.exceptions.RayActorError as error:
        return f"was down: {str(error).strip().splitlines()[0]}"
    except (RayMQError, ray.exceptions.RayTaskError) as error:
        return f"failed to close: {str(error).strip().splitlines()[-1]}"
    return "closed"


def _wait_gone(ray: Any, cluster: str, members: list[Member], clock: Clock) -> None:
    deadline_ms = clock.monotonic_ms() + 10_000
    for member in members:
        while find(ray, cluster, [(member.shard, member.replica, member.role)]):
            if clock.monotonic_ms() > deadline_ms:
                raise Unavailable(f"Ray has not ended the actor {member.name} within 10 s")
            clock.sleep_ms(50)


def endpoints(ray: Any, cluster: str) -> dict[int, str]:
    """shard -> endpoint of the leaders that serve now, of all shards that this Ray knows."""
    # Ray's list has the shards that were added since the caller was made.
    named = [replica_of_actor(name, cluster, "commit_log") for name in actor_names(ray)]
    members = find(ray, cluster, [(*each, "commit_log") for each in named if each is not None])
    states = {
        member.name: state
        for member, state in _ask_all(ray, members, Clock(), int(LOOKUP_TIMEOUT_S * 1000))
    }
    leaders = _leaders(members, states)
    return {shard: str(states[each.name]["endpoint"]) for shard, each in leaders.items()}


def credentials(ray: Any, cluster: str) -> dict[str, Any]:
    """The facts that a client needs which reaches the cluster through Ray: cluster_id, shards, token.

    Raises: Rejected when no such cluster runs in this Ray, Unavailable when its first shard does not answer.
    """
    members = find(ray, cluster, _first_shard())
    if not members:
        message = (
            f"no cluster {cluster!r} runs in the Ray to which this process is connected: start it with `raymq start "
            "DIR`, or name its data directory"
        )
        raise Rejected(message, field="target", limit=cluster)
    calls = [each.handle.credentials.remote() for each in members]
    facts = _first_answer(ray, calls, _CALL_TIMEOUT_S)
    if facts is None:
        raise Unavailable(f"the first shard of {cluster!r} does not answer")
    return facts


def _first_shard() -> list[tuple[int, int, str]]:
    """All replicas that the first shard may have."""
    return [(0, replica, "commit_log") for replica in range(REPLICAS[-1])]


def _first_answer(ray: Any, calls: list[Any], timeout_s: float) -> dict[str, Any] | None:
    """The first answer of several calls that were begun together; None: none is answered in time."""
    clock = Clock()
    deadline_s = clock.monotonic() + timeout_s
    for number, call in enumerate(calls):
        # A silent replica leaves time for the others.
        left_s = max(0.0, deadline_s - clock.monotonic()) / (len(calls) - number)
        with contextlib.suppress(ray.exceptions.RayError):
            answer: dict[str, Any] = ray.get(call, timeout=left_s)
            return answer
    return None
