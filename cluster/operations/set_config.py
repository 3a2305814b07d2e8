"""Changes options of the stores of a cluster that runs, and shows them with what operators have set.

Each shard keeps a change as a record of its log: its replicas follow it, and a restart finds it there. So it holds
until an operator, or a start that names the option, sets another value.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raymq.client.topics.new_topic import repeat_call
from raymq.cluster.record.store_options import check_running
from raymq.store.base.errors import RayMQError
from raymq.store.config.store_config import IN_CLUSTER, WHILE_RUNNING

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: option -> `value`; if it was set, also `before`, `at_ms` and `by`
OptionFacts = Mapping[str, Mapping[str, Any]]


def config(cluster: ClusterHandle) -> dict[str, dict[str, Any]]:
    """See `Cluster.config`."""
    by_shard: dict[int, OptionFacts] = {
        shard: cluster.call(shard, "config", {})["options"] for shard in range(cluster.shards)
    }
    return {name: _joined(name, by_shard) for name in IN_CLUSTER}


def _joined(name: str, by_shard: Mapping[int, OptionFacts]) -> dict[str, Any]:
    """What all shards say of an option."""
    option = IN_CLUSTER[name]
    # A shard of an older version does not know every option.
    found = {shard: facts[name] for shard, facts in by_shard.items() if name in facts}
    values = {shard: facts["value"] for shard, facts in found.items()}
    # The newest change stands for all of them.
    newest = max(found.values(), key=lambda facts: facts.get("at_ms", 0), default={})
    joined = {
        "value": newest.get("value"),
        "default": option.default,
        "changes": option.changes,
        **{key: newest[key] for key in ("before", "at_ms", "by") if key in newest},
    }
    if any(value != joined["value"] for value in values.values()):
        joined["by_shard"] = values
    return joined


def set_config(
    cluster: ClusterHandle, config: Mapping[str, Any], *, by: str | None = None
) -> dict[str, dict[str, Any]]:
    """See `Cluster.set_config`. Args: `by`: the operator, in the audit."""
    values, operator = check_running(config), by or operator_name()
    found: dict[str, dict[str, Any]] = {}
    failed: dict[int, RayMQError] = {}
    shard = 0
    while shard < cluster.shards:
        try:
            answer, _ = repeat_call(
                cluster, shard, "set_config", {"values": values, "by": operator}
            )
        except RayMQError as error:
            # The other shards must not miss the change.
            failed[shard] = error
        else:
            found = found or answer["options"]
            # Shards that are being added get the options by the time at which an answer counts them.
            cluster.learn_shards(int(answer.get("shards", 0)))
        shard += 1

    for number, failure in failed.items():
        raise type(failure)(
            f"shard {number}: {failure.message}. {cluster.shards - len(failed)} of {cluster.shards} shard(s) have the "
            "change; repeat the call",
            **failure.fields,
        ) from failure
    return found


def missing_options(source: OptionFacts, target: OptionFacts) -> dict[str, Any]:
    """The options that a new shard lacks. Args: `source`, `target`: what an old shard and the new one say."""
    return {
        name: source[name]["value"]
        for name in WHILE_RUNNING
        if name in source and name in target and source[name]["value"] != target[name]["value"]
    }


def differing(wanted: Mapping[str, Any], facts: OptionFacts) -> dict[str, Any]:
    """Those of the wanted values that a shard does not have. Args: `facts`: as of `config`."""
    return {
        name: value
        for name, value in wanted.items()
        if any(
            each != value
            for each in (facts[name]["value"], *facts[name].get("by_shard", {}).values())
        )
    }


def operator_name() -> str:
    """Who changes an option: user and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "?"
    return f"{user}@{socket.gethostname()}"
