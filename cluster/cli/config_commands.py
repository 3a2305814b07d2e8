"""The commands on options of the stores of a cluster that runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from raymq.cluster.record.store_options import find, parse_config
from raymq.store.config.store_config import IN_CLUSTER, WHILE_RUNNING

from .console import EXIT_OK, Console, cluster_of


def config_list(options: argparse.Namespace, console: Console) -> int:
    """raymq config list"""
    with cluster_of(options, console) as cluster:
        facts: dict[str, dict[str, Any]] = cluster.config()
    if options.changed:
        facts = {
            name: each
            for name, each in facts.items()
            if "by" in each or "by_shard" in each or each["value"] != each["default"]
        }
    console.result(options, facts, *(_line(name, each) for name, each in facts.items()))
    return EXIT_OK


def config_get(options: argparse.Namespace, console: Console) -> int:
    """raymq config get NAME"""
    # A wrong name needs no cluster.
    find(options.name, IN_CLUSTER)
    with cluster_of(options, console) as cluster:
        facts = cluster.config()[options.name]
    console.result(options, {options.name: facts}, _shown(facts["value"]))
    return EXIT_OK


def config_set(options: argparse.Namespace, console: Console) -> int:
    """raymq config set NAME=VALUE ..."""
    values = parse_config(options.values, WHILE_RUNNING)
    with cluster_of(options, console) as cluster:
        facts = cluster.set_config(values)
    console.result(options, facts, *(_line(name, each) for name, each in facts.items()))
    return EXIT_OK


def _line(name: str, facts: Mapping[str, Any]) -> str:
    """An option, its value, and where that comes from."""
    parts = [f"{name}={_shown(facts['value'])}"]
    if facts.get("default", facts["value"]) != facts["value"]:
        parts.append(f"default {_shown(facts['default'])}")
    if "changes" in facts:
        parts.append(_WHEN[facts["changes"]])
    if "by" in facts:
        at = datetime.fromtimestamp(facts["at_ms"] / 1000).astimezone()
        parts.append(
            f"set by {facts['by']} at {at:%Y-%m-%d %H:%M:%S%z}, before {_shown(facts['before'])}"
        )
    if "by_shard" in facts:
        values = (f"shard {shard}: {_shown(value)}" for shard, value in facts["by_shard"].items())
        parts.append(f"shards differ: {', '.join(values)}; set it again")
    return "\t".join(parts)


#: of an option that changes so
_WHEN = {
    "first start": "decided at the first start",
    "each start": "changes at a start",
    "while running": "changes while running",
}


def _shown(value: object) -> str:
    """A value as `raymq config set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
