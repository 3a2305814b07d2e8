"""The Ray actors of one cluster that run, and what their CommitLogs say of themselves.

Functions over an initialised `ray` module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from raymq.actors.ray.actor_spec import Credentials, ReadyRow
from raymq.client.transport.actor_names import (
    NAMESPACE,
    actor_name,
    replica_of_actor,
)
from raymq.cluster.record.cluster_record import REPLICAS, ROCKETMQ, ClusterRecord
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable

from . import node_labels

#: how long a call of an actor may take
CALL_TIMEOUT_S = 10.0
#: how long a replica may take to say whether it leads: one that hangs must not delay the others' answers for long
LOOKUP_TIMEOUT_S = 3.0
#: every role, by the order in which they are closed: clients of a door are sent away first, and a CommitLog needs its
#: satellites to the end
CLOSING_RANK = {
    ROCKETMQ: -1,
    "commit_log": 0,
    "replication": 1,
    "group_commit": 2,
    "flush_real_time": 2,
    "commit_real_time": 2,
}


#: the servers for foreign clients, one beside each replica
DOOR_ROLES = (ROCKETMQ,)


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


def node_of(record: ClusterRecord, shard: int, replica: int) -> str | None:
    """The label of a replica's node; None: all are on one machine."""
    return None if record.placement is None else record.placement[shard][replica]


def all_actor_keys(record: ClusterRecord) -> list[tuple[int, int, str]]:
    """Every (shard, replica, role) that may run, for all flush modes."""
    return [
        (shard, replica, role)
        for shard in range(record.shards)
        for replica in range(record.replicas)
        for role in CLOSING_RANK
    ]


def actor_names(ray: ModuleType) -> list[str]:
    """The names of all actors in the namespace of RayMQ, sorted."""
    known = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in known if actor["namespace"] == NAMESPACE)


def find(ray: ModuleType, cluster: str, actor_keys: Iterable[tuple[int, int, str]]) -> list[Member]:
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


def missing(record: ClusterRecord, names: Iterable[str]) -> set[tuple[int, int, str]]:
    """(shard, replica, role) of the actors that should run and are not among `names`, the result of `actor_names`."""
    known = set(names)
    return {
        (shard, replica, role)
        for shard in range(record.shards)
        for replica in range(record.replicas)
        for role in (*record.roles(replica), *record.doors)
        if actor_name(record.name, shard, replica, role) not in known
    }


def answer(ray: ModuleType, call: object, timeout_s: float) -> ReadyRow:
    """The answer of a CommitLog's `ready`, or why there is none: state PENDING or DOWN."""
    try:
        state: ReadyRow = ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        return absent("PENDING", "Ray has not started the actor yet")
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
        return absent("DOWN", str(error).strip().splitlines()[-1])
    return state


def absent(state: str, error: str) -> ReadyRow:
    """In place of the answer of `ready`."""
    return {
        "state": state,
        "endpoint": None,
        "error": error,
        "mode": None,
        "epoch": 0,
        "missing_roles": [],
    }


def state_of(ray: ModuleType, member: Member, clock: Clock) -> ReadyRow:
    """What a CommitLog says of itself: `state`, `endpoint`, `error`, `mode`, `epoch`."""
    ((_, state),) = ask_all(ray, [member], clock, int(LOOKUP_TIMEOUT_S * 1000))
    return state


def ask_all(
    ray: ModuleType, members: list[Member], clock: Clock, timeout_ms: int
) -> Iterator[tuple[Member, ReadyRow]]:
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


def leaders_of(members: list[Member], states: dict[str, ReadyRow]) -> dict[int, Member]:
    """Shard -> the CommitLog that leads it. Of two that say so, the one of the higher epoch."""
    leaders: dict[int, Member] = {}
    for member in members:
        state = states.get(member.name)
        if state is None or state["mode"] != "leader" or not state["endpoint"]:
            continue
        known = leaders.get(member.shard)
        if known is None or state["epoch"] > states[known.name]["epoch"]:
            leaders[member.shard] = member
    return leaders


def endpoints(ray: ModuleType, cluster: str) -> dict[int, str]:
    """shard -> endpoint of the leaders that serve now, of all shards that this Ray knows."""
    # Ray's list has the shards that were added since the caller was made.
    named = [replica_of_actor(name, cluster, "commit_log") for name in actor_names(ray)]
    members = find(ray, cluster, [(*each, "commit_log") for each in named if each is not None])
    states = {
        member.name: state
        for member, state in ask_all(ray, members, Clock(), int(LOOKUP_TIMEOUT_S * 1000))
    }
    leaders = leaders_of(members, states)
    return {shard: str(states[each.name]["endpoint"]) for shard, each in leaders.items()}


def is_another(ray: ModuleType, record: ClusterRecord, *, clock: Clock) -> bool:
    """Whether the cluster of this name in this Ray has another identity, as the first shard that answers says.

    When no shard answers, it counts as the one that was started here.
    """
    logs = [key for key in all_actor_keys(record) if key[2] == "commit_log"]
    calls = [member.handle.status.remote() for member in find(ray, record.name, logs)]
    deadline_s = clock.monotonic() + CALL_TIMEOUT_S
    for call in calls:
        with contextlib.suppress(ray.exceptions.RayError):
            status = ray.get(call, timeout=max(0.0, deadline_s - clock.monotonic()))
            return bool(status["cluster_id"] != record.cluster_id)
    return False


def credentials(ray: ModuleType, cluster: str) -> Credentials:
    """The facts that a client needs which reaches the cluster through Ray: cluster_id, shards, token.

    Raises: Rejected when no such cluster runs in this Ray, Unavailable when its first shard does not answer.
    """
    members = find(ray, cluster, first_shard())
    if not members:
        message = (
            f"no cluster {cluster!r} runs in the Ray to which this process is connected: start it with `raymq start "
            "DIR`, or name its data directory"
        )
        raise Rejected(message, field="target", limit=cluster)
    calls = [each.handle.credentials.remote() for each in members]
    facts: Credentials | None = first_answer(ray, calls, CALL_TIMEOUT_S)
    if facts is None:
        raise Unavailable(f"the first shard of {cluster!r} does not answer")
    return facts


def first_shard() -> list[tuple[int, int, str]]:
    """All replicas that the first shard may have."""
    return [(0, replica, "commit_log") for replica in range(REPLICAS[-1])]


def first_answer(ray: ModuleType, calls: Sequence[object], timeout_s: float) -> Any:
    """The first answer of several calls that were begun together; None: none is answered in time."""
    clock = Clock()
    deadline_s = clock.monotonic() + timeout_s
    for number, call in enumerate(calls):
        # A silent replica leaves time for the others.
        left_s = max(0.0, deadline_s - clock.monotonic()) / (len(calls) - number)
        with contextlib.suppress(ray.exceptions.RayError):
            return ray.get(call, timeout=left_s)
    return None
