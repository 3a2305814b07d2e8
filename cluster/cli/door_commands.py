"""`raymq door ...`: servers for clients of other systems."""

from __future__ import annotations

import argparse
from typing import Any

from .console import ClusterOperation


def _list(
    options: argparse.Namespace, cluster: Any, found: dict[str, list[dict[str, Any]]]
) -> tuple[Any, list[str]]:
    lines = [
        f"{protocol}\tshard {row['shard']} replica {row['replica']}\t{row['address']}\tpid {row['pid']}"
        + (f"\tname server port {row['node_port']}" if row["node_port"] else "")
        + ("\tleads" if row["leads"] else "")
        for protocol, rows in sorted(found.items())
        for row in rows
    ]
    return found, lines or ["none: raymq door enable rocketmq"]


LIST = ClusterOperation("doors", "", "", _list)
ENABLE = ClusterOperation(
    "enable_door",
    "protocol",
    "port access timeout_s",
    lambda options, cluster, _: (cluster.doors(), [f"{options.protocol} clients are served"]),
    long=True,
)
DISABLE = ClusterOperation(
    "disable_door",
    "protocol",
    "",
    lambda options, cluster, _: (
        {"cluster": cluster.name, "protocol": options.protocol},
        [f"{options.protocol} clients are served no more"],
    ),
    long=True,
)
