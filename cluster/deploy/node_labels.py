"""The nodes of a Ray by their labels.

The name of a node is the value of its Ray label `raymq-node` (`ray start --labels raymq-node=a`). It is never the node
id, which is new at each start of a raylet. A machine that gets the label of another one must have its disk.
`prepare_replica` checks that.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from raymq.store.base.errors import RayMQError, Rejected

from .ray_host import HOST_LABEL, RayTarget, session

#: the Ray node label whose values `nodes` names
NODE_LABEL = "raymq-node"


def present(ray: Any) -> dict[str, list[str]]:
    """Label -> the addresses of the nodes that live and have it: one each, if all is well."""
    found: dict[str, list[str]] = {}
    for node in ray.nodes():
        label = node.get("Labels", {}).get(NODE_LABEL)
        if label is not None and node["Alive"]:
            found.setdefault(label, []).append(node["NodeManagerAddress"])
    return found


def check_nodes(ray: object, nodes: Iterable[str], *, first: bool) -> list[str]:
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


def this_node_selector(ray: ModuleType) -> dict[str, str]:
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
