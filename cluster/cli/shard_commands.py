"""The commands on shards and their replicas."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from raymq.store.base.errors import Rejected

from .console import EXIT_FAULT, EXIT_OK, ClusterOperation, Console, cluster_of


def shard_list(options: argparse.Namespace, console: Console) -> int:
    """raymq shard list"""
    # Here: it imports Arrow, which a wrong command need not wait for.
    from raymq.client import replica_status

    with cluster_of(options, console) as cluster:
        rows = replica_status.statuses(cluster)
    shards = [
        _summary(shard, list(group)) for shard, group in groupby(rows, lambda row: row["shard"])
    ]
    console.result(options, {"shards": shards}, *map(_line, shards))
    return EXIT_OK if all(shard["healthy"] for shard in shards) else EXIT_FAULT


def shard_describe(options: argparse.Namespace, console: Console) -> int:
    """raymq shard describe SHARD"""
    from raymq.client import replica_status

    with cluster_of(options, console) as cluster:
        rows = replica_status.statuses(cluster, options.shard)
    facts = {**_summary(options.shard, rows), "replicas": rows}
    console.result(options, facts, _line(facts), *(_replica_line(row) for row in rows))
    return EXIT_OK if facts["healthy"] else EXIT_FAULT


def shard_recover(options: argparse.Namespace, console: Console) -> int:
    """raymq shard recover SHARD --unclean"""
    if not options.unclean:
        raise Rejected(
            "shards recover by themselves when a majority of their replicas runs; `--unclean` goes on without one, and "
            "may lose confirmed messages",
            field="--unclean",
        )
    nodes = dict(map(_node_of_replica, options.node))

    with cluster_of(options, console) as cluster:
        plan = cluster.plan_recovery(options.shard, nodes=nodes)
        for line in plan.lines():
            console.note(line)

        if not options.yes_lose_messages:
            _ask(console, f"To go on type the name of the cluster ({cluster.name}): ", cluster.name)
            _ask(console, "Messages may be lost. Type `lose messages`: ", "lose messages")
        cluster.recover_shard(
            plan,
            accept_loss=True,
            nodes=nodes,
            timeout_s=options.timeout_s,
            progress=console.note,
        )

    facts = {"shard": plan.shard, "lost": list(plan.lost), "survivors": list(plan.survivors)}
    console.result(options, facts, f"shard {plan.shard} goes on without {plan.lost_replicas}")
    return EXIT_OK


def _node_of_replica(text: str) -> tuple[int, str]:
    """The replica and the node of `REPLICA=LABEL`. Raises: Rejected."""
    replica, _, node = text.partition("=")
    if not replica.isdigit() or not node:
        raise Rejected(
            f"--node {text!r} is not REPLICA=LABEL, such as 1=d", field="--node", found=text
        )
    return int(replica), node


def _ask(console: Console, question: str, expected: str) -> None:
    """Ask for a line of text. Raises: Rejected for another one, with nothing changed."""
    console.ask(question)
    if console.stdin.readline().decode(errors="replace").strip() != expected:
        raise Rejected(
            "not confirmed, and nothing was changed; without a terminal use --yes-lose-messages",
            field="confirmation",
            limit=expected,
        )


def _drained(
    options: argparse.Namespace, cluster: Any, report: Any
) -> tuple[dict[str, object], list[str]]:
    stays = ", ".join(f"shard {shard} replica {replica}" for shard, replica in report.followers)
    return asdict(report), [
        f"node {report.node} leads nothing; {len(report.moved)} shard(s) are led elsewhere now",
        f"followers that stay there: {stays}",
    ]


MOVE_LEADER = ClusterOperation(
    "move_leader",
    "shard replica",
    "",
    lambda options, cluster, _: (
        {"shard": options.shard, "leader": options.replica},
        [f"replica {options.replica} leads shard {options.shard}"],
    ),
)
REPLACE_REPLICA = ClusterOperation(
    "replace_replica",
    "shard replica",
    "node timeout_s",
    lambda options, cluster, _: (
        {"shard": options.shard, "replica": options.replica, "is_complete": True},
        [f"replica {options.replica} of shard {options.shard} is complete"],
    ),
    long=True,
)
SET_REPLICAS = ClusterOperation(
    "set_replicas",
    "replicas",
    "nodes timeout_s",
    lambda options, cluster, _: (
        {
            "cluster": cluster.name,
            "replicas": options.replicas,
            "placement": cluster.placement,
        },
        [f"each shard has {options.replicas} replicas, and all count"],
    ),
    long=True,
)
ADD = ClusterOperation(
    "add_shards",
    "count",
    "nodes timeout_s",
    lambda options, cluster, added: (
        {"added": added, "shards": cluster.shards},
        [f"shard(s) {', '.join(map(str, added))} added; the cluster has {cluster.shards}"],
    ),
    long=True,
)
RESTART_ALL = ClusterOperation(
    "rolling_restart",
    "",
    "replica_timeout_s",
    lambda options, cluster, _: (
        {"cluster": cluster.name, "shards": cluster.shards},
        [f"all replicas of {cluster.shards} shard(s) have restarted"],
    ),
    long=True,
)
DRAIN_NODE = ClusterOperation("drain_node", "node", "timeout_s", _drained, long=True)


def _summary(shard: int, rows: list[dict[str, Any]]) -> dict[str, object]:
    """Leader, epoch and health of one shard."""
    from raymq.client.replica_status import leader_of

    leader = leader_of(rows)
    up = [row for row in rows if row["state"] == "RUNNING"]
    complete = [row for row in up if row["is_complete"]]
    ends = [int(row["synced"]) for row in up]
    return {
        "shard": shard,
        "leader": leader,
        "epoch": max((int(row["epoch"]) for row in up), default=None),
        "replicas": len(rows),
        "running": len(up),
        "complete": len(complete),
        "lag_bytes": max(ends) - min(ends) if ends else None,
        "unclean_recoveries": max(
            (row["unclean_recoveries"] or [] for row in up), key=len, default=[]
        ),
        "healthy": leader is not None and len(complete) == len(rows),
    }


def _line(shard: dict[str, object]) -> str:
    leader = "no replica leads" if shard["leader"] is None else f"replica {shard['leader']} leads"
    lost = "; DATA-LOSS-POSSIBLE: a majority was lost" if shard["unclean_recoveries"] else ""
    return (
        f"shard {shard['shard']}: {leader}, epoch {shard['epoch']}; {shard['running']} of "
        f"{_count(shard)} replicas run, {shard['complete']} complete; lag {shard['lag_bytes']} bytes{lost}"
    )


def _count(shard: dict[str, Any]) -> int:
    replicas = shard["replicas"]
    return len(replicas) if isinstance(replicas, list) else int(replicas)


def _replica_line(row: Mapping[str, object]) -> str:
    where = row["endpoint"] if row["node"] is None else f"{row['endpoint']} on {row['node']}"
    if row["mode"] is None:
        return f"  replica {row['replica']}  {where}  {row['state']} ({row['error']})"
    complete = "complete" if row["is_complete"] else "not complete"
    error = f" ({row['error']})" if row["error"] else ""
    return (
        f"  replica {row['replica']}  {where}  {row['mode']}, {row['state']}, {complete}; "
        f"synced {row['synced']}, confirmed {row['confirmed']}{error}"
    )
