"""What every replica of a cluster says of itself, for operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any

from raymq.client.transport.ask import ask, in_thread
from raymq.client.transport.flight_client import ShardConnection
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import RayMQError, Rejected, Unavailable

if TYPE_CHECKING:
    from .handle import ClusterHandle

#: how long a replica may take to answer
STATUS_TIMEOUT_S = 2.0
#: how long a hand-over may take
MOVE_TIMEOUT_S = 15.0
#: between two looks whether the leader has changed
MOVE_STEP_S = 0.1
#: the leader is asked again after so many looks: it gives up after a second if the successor's log lags
MOVE_REPEAT_STEPS = 20

#: fields of a replica's status that an operator sees
_SHOWN = (
    "mode",
    "state",
    "epoch",
    "is_complete",
    "unclean_recoveries",
    "generation",
    "replicas",
    "voters",
    "appended",
    "synced",
    "confirmed",
    "min_offset",
    "dispatched",
    "pid",
    "error",
)


def replica_endpoints(cluster: ClusterHandle) -> dict[int, dict[int, str]]:
    """shard -> replica -> host:port, as the shards know them. Raises: Unavailable when no replica answers."""
    routes = Routes.of(cluster)
    found: Mapping[str, Mapping[str, str]]
    try:
        found = routes.first("replicas", {}, STATUS_TIMEOUT_S)
    except Unavailable:
        # The leader is lost, and the others cannot elect one.
        found = routes.first_replica("replicas", {}, STATUS_TIMEOUT_S)
    if {str(shard) for shard in range(cluster.shards)} - set(found):
        # A replica that was away when shards were added does not know these.
        for _, answer in routes.ask(range(cluster.shards), "replicas", {}, STATUS_TIMEOUT_S):
            found = found if isinstance(answer, RayMQError) else {**answer, **found}
    return {
        int(shard): {int(replica): str(endpoint) for replica, endpoint in sorted(rows.items())}
        for shard, rows in sorted(found.items(), key=lambda row: int(row[0]))
    }


def statuses(cluster: ClusterHandle, shard: int | None = None) -> list[dict[str, Any]]:
    """A row for each replica, of all shards or one, in order. One that does not answer has only its error.

    Raises: Unavailable when no replica answers at all; Rejected for a shard that does not exist.
    """
    known = replica_endpoints(cluster)
    if shard is not None:
        known = {shard: _of_shard(known, shard)}
    endpoints = [
        (each, replica, endpoint)
        for each, rows in known.items()
        for replica, endpoint in rows.items()
    ]

    def begin(number: int) -> Future[dict[str, Any]]:
        each, replica, endpoint = endpoints[number]
        return in_thread(lambda: _status(cluster, each, endpoint), f"raymq-status-{each}-{replica}")

    answers: dict[int, dict[str, Any] | RayMQError] = {}
    for number, answer in ask(range(len(endpoints)), begin, timeout_s=STATUS_TIMEOUT_S):
        answers[number] = answer
    return [
        _row(each, replica, endpoint, answers[number], _node(cluster, each, replica))
        for number, (each, replica, endpoint) in enumerate(endpoints)
    ]


def _status(cluster: ClusterHandle, shard: int, endpoint: str) -> dict[str, object]:
    with closing(
        ShardConnection(endpoint, cluster.token, cluster.cluster_id, shard, ca=cluster.ca)
    ) as connection:
        return connection.call("status", timeout=STATUS_TIMEOUT_S)


def _row(
    shard: int,
    replica: int,
    endpoint: str,
    answer: dict[str, Any] | RayMQError,
    node: str | None,
) -> dict[str, object]:
    row: dict[str, Any] = {"shard": shard, "replica": replica, "endpoint": endpoint, "node": node}
    if isinstance(answer, RayMQError):
        return {**row, "mode": None, "state": "DOWN", "error": answer.message}
    roles = answer.get("supervisor", {}).get("roles", {})
    satellites = {role: lease["pid"] for role, lease in roles.items() if lease["granted"]}
    return {**row, **{name: answer.get(name) for name in _SHOWN}, "satellites": satellites}


def _node(cluster: ClusterHandle, shard: int, replica: int) -> str | None:
    # A handle that is older than a shard does not know its nodes.
    if cluster.placement is None or shard >= len(cluster.placement):
        return None
    return cluster.placement[shard][replica]


def _of_shard(known: dict[int, dict[int, str]], shard: int) -> dict[int, str]:
    if shard not in known:
        raise Rejected(
            f"shard {shard} does not exist; the cluster has {', '.join(map(str, known))}",
            field="shard",
            limit=max(known),
            found=shard,
        )
    return known[shard]


def leader_of(rows: list[dict[str, Any]]) -> int | None:
    """The replica that leads, of the rows of one shard; None: none says so."""
    leading = [row for row in rows if row["mode"] == "leader" and row["state"] == "RUNNING"]
    newest = max(leading, key=lambda row: row["epoch"], default=None)
    return None if newest is None else int(newest["replica"])


def move_leader(
    cluster: ClusterHandle, shard: int, replica: int, *, pause: Callable[[float], None]
) -> None:
    """Let a replica lead a shard, and wait until it does. Args: `pause`: called with seconds to wait.

    Raises: Rejected when it cannot lead; Unavailable when it does not lead within MOVE_TIMEOUT_S: the shard is led by
    the same replica as before.
    """
    if leader_of(statuses(cluster, shard)) == replica:
        return

    routes = Routes.of(cluster)
    for step in range(int(MOVE_TIMEOUT_S / MOVE_STEP_S)):
        if step % MOVE_REPEAT_STEPS == 0:
            try:
                routes.call(shard, "move_leader", {"replica": replica})
            except Rejected:
                # It may lead since the last look.
                if step == 0:
                    raise

        if leader_of(statuses(cluster, shard)) == replica:
            return
        pause(MOVE_STEP_S)
    raise Unavailable(
        f"replica {replica} does not lead shard {shard} after {MOVE_TIMEOUT_S:g} s: it may lag, or not answer. See "
        f"`raymq shard describe {shard}`",
        field="replica",
        shard=shard,
    )
