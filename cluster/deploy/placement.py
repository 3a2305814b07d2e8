"""Which node has which replica. Labels name nodes.

The first start decides the placement, `replace_replica` moves a replica, and `set_replicas` adds some. The name of a
node is the value of its Ray label `raymq-node` (`ray start --labels raymq-node=a`). It is never the node id, which is
new at each start of a raylet. A machine that gets the label of another one must have its disk. `prepare_replica` checks
that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raymq.actors.protocol import tls
from raymq.cluster.paths import prepare_data_dir
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.base.files import Files

from .ray_host import HOST_LABEL, RayTarget, session
from .replaced_store import take_place

#: the Ray node label whose values `nodes` names
NODE_LABEL = "raymq-node"
#: as `host`: each shard listens on the address that Ray knows its node by
NODE_HOST = "node"
_WILDCARDS = ("0.0.0.0", "::")
#: Ray's rule for the value of a label
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

#: shard -> the node of each of its replicas, the leader's first
Placement = tuple[tuple[str, ...], ...]


class Address(NamedTuple):
    """The address on which a replica listens, and the address that it gives to clients."""

    bind: str
    advertised: str


def place_shards(nodes: Sequence[str], shards: int, replicas: int) -> Placement:
    """Leaders in turn over the nodes. No node has two replicas of a shard.

    The followers of one node's leaders go in turn to all other nodes, so that these share the work of a lost node.
    Raises: as `add_replicas`, but for a node that is not there.
    """
    leaders = tuple((nodes[shard % len(nodes)],) for shard in range(shards) if nodes)
    return add_replicas(leaders, nodes, replicas)


def add_replicas(leaders: Placement, nodes: Sequence[str], replicas: int) -> Placement:
    """Followers for the leaders of all shards, spread as `place_shards` does it.

    Args: `leaders`: shard -> the node of its only replica, which stays.
    Raises: Rejected for names that Ray does not take, a repeated name, too few nodes, or if a leader's node is missing.
    """
    _check_names(nodes, replicas)
    missing = sorted({node for (node,) in leaders} - set(nodes))
    if missing:
        message = f"nodes={list(nodes)}: the replicas on {', '.join(missing)} stay there: name these nodes, too"
        raise Rejected(message, field="nodes", limit=", ".join(missing))

    rows = []
    for shard, (leader,) in enumerate(leaders):
        # Each round over the leaders begins with another of the other nodes.
        place = nodes.index(leader)
        others = [*nodes[place + 1 :], *nodes[:place]]
        round_number = shard // len(nodes)
        row = [others[(round_number + turn) % len(others)] for turn in range(replicas - 1)]
        rows.append((leader, *row))

    return tuple(rows)


def _check_names(nodes: Sequence[str], replicas: int) -> None:
    """Raises: Rejected for names that Ray does not take, a repeated name, or too few nodes."""
    for node in nodes:
        check_label(node)
    if len(set(nodes)) != len(nodes):
        raise Rejected(f"nodes={list(nodes)} names a node twice", field="nodes")
    if len(nodes) < replicas:
        message = (
            f"nodes={list(nodes)}: {replicas} replicas need {replicas} nodes, because those on one node are lost "
            "together"
        )
        raise Rejected(message, field="nodes", limit=replicas)


def check_label(node: str) -> None:
    """Raises: Rejected for a name of a node that Ray does not take as the value of a label."""
    if not _VALUE.fullmatch(node):
        message = (
            f"node {node!r}: use the value of a label as Ray takes it, 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning and ending with a letter or digit"
        )
        raise Rejected(message, field="nodes", limit=63)


def check_host(host: str) -> None:
    """Raises: Rejected for a `host` on which shards on several nodes cannot all listen."""
    if host != NODE_HOST and host not in _WILDCARDS:
        message = (
            f"host={host!r} together with nodes: each shard listens on its own node's address; leave host out, or say "
            "0.0.0.0 for all its addresses"
        )
        raise Rejected(message, field="host", limit="0.0.0.0")


def present(ray: Any) -> dict[str, list[str]]:
    """Label -> the addresses of the nodes that live and have it: one each, if all is well."""
    found: dict[str, list[str]] = {}
    for node in ray.nodes():
        label = node.get("Labels", {}).get(NODE_LABEL)
        if label is not None and node["Alive"]:
            found.setdefault(label, []).append(node["NodeManagerAddress"])
    return found


def check_nodes(ray: Any, nodes: Iterable[str], *, first: bool) -> list[str]:
    """The addresses of the nodes that are present.

    Raises: Rejected when two nodes have one label, or, at the `first` start, no node has a label.
    """
    wanted = sorted(nodes)
    found = present(ray)

    twice = [node for node in wanted if len(found.get(node, [])) > 1]
    if twice:
        message = (
            f"several nodes have the label {NODE_LABEL}={twice[0]}: an actor could move away from its disk; give each "
            "node a value of its own"
        )
        raise Rejected(message, field="nodes", limit=twice[0])

    missing = [node for node in wanted if node not in found]
    if first and missing:
        message = (
            f"no node of this Ray has the label {NODE_LABEL}={missing[0]}: start Ray there with `ray start ... "
            f"--labels {NODE_LABEL}={missing[0]}`. There are: {', '.join(sorted(found)) or 'none with such a label'}"
        )
        raise Rejected(message, field="nodes", limit=", ".join(sorted(found)))

    return [address for node in wanted for address in found.get(node, [])]


def this_node_selector(ray: Any) -> dict[str, str]:
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


def describe_away(node: str) -> str:
    """Instructions for an absent node."""
    return f"node {node} is away: start Ray on the machine that has its disk with --labels {NODE_LABEL}={node}"


def away(ray_address: str, nodes: Iterable[str]) -> list[str]:
    """The nodes that the Ray at this address lacks; empty if that Ray does not answer."""
    try:
        with session(RayTarget(address=ray_address)) as ray:
            found = present(ray)
    except RayMQError:
        return []
    return sorted(set(nodes) - set(found))


def prepare_replica(spec: dict[str, Any], *, restarted: bool) -> Address:
    """Run by a replica's CommitLog before it opens its store: the directory and the address.

    With nodes, the data directory is made here (0700), where the actor runs. It is refused when it belongs to another
    replica, or is empty although this replica's store was made before and no other replica may lead: with a new, empty
    disk it would assign offsets a second time. Args: `restarted`: Ray has restarted the actor.

    Raises: Rejected (directory or address cannot be used), Unavailable (the store is not here).
    """
    files = Files()
    if spec["node"] is not None:
        prepare_data_dir(spec["cluster_dir"], ephemeral=spec["ephemeral"], files=files, member=True)
    take_place(spec, files, Clock())
    if spec["node"] is not None:
        _check_store(spec, files, made_before=restarted or spec["formed"])
    host = spec["host"]
    bind = _node_address() if host == NODE_HOST else host
    tls.check_exposed(bind, tls=spec["tls"], insecure=spec["insecure"])
    return Address(bind, _node_address() if bind in _WILDCARDS else bind)


def _check_store(spec: dict[str, Any], files: Files, *, made_before: bool) -> None:
    # Imported on use: it loads Arrow, which neither start nor the controller needs.
    from raymq.store.log.control_files.meta import Meta

    path = Path(spec["data_dir"]) / "raymq" / "meta"
    if not files.exists(path):
        if made_before and spec["candidates"] == (spec["replica"],):
            message = (
                f"node {spec['node']} has no store in {spec['data_dir']}, where this replica's was made: mount its "
                "disk there, or start Ray with this label on the machine that has it. If nothing was stored yet, "
                "`raymq stop` and `raymq start` make it"
            )
            raise Unavailable(message, path=spec["data_dir"], node=spec["node"])
        return

    with contextlib.closing(Meta.open(path, files=files)) as meta:
        for name in ("cluster_id", "shard", "replica"):
            found = meta.get(name)
            if found is not None and found != spec[name]:
                message = (
                    f"{spec['data_dir']} of node {spec['node']} is the store of {name} {found!r}, not {spec[name]!r}: "
                    "is it the disk of another node or cluster?"
                )
                raise Rejected(message, field=name, limit=spec[name], path=spec["data_dir"])


def _node_address() -> str:
    # Only actors come here. Clients that only name a placement need no Ray.
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
