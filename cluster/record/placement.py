"""Which node gets which replica. Labels name nodes: the values of `NODE_LABEL` in deploy/node_labels.py.

The first start decides the placement, `replace_replica` moves a replica, and `set_replicas` adds some.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from raymq.store.base.errors import Rejected

#: as `host`: each shard listens on the address that Ray knows its node by
NODE_HOST = "node"
WILDCARDS = ("0.0.0.0", "::")
#: Ray's rule for the value of a label
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

#: shard -> the node of each of its replicas, the leader's first
Placement = tuple[tuple[str, ...], ...]


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
    if host != NODE_HOST and host not in WILDCARDS:
        message = (
            f"host={host!r} together with nodes: each shard listens on its own node's address; leave host out, or say "
            "0.0.0.0 for all its addresses"
        )
        raise Rejected(message, field="host", limit="0.0.0.0")
