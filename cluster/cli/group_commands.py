"""`raymq group`: what consumer groups do."""

from __future__ import annotations

import argparse
from typing import Any

from raymq.client.times import at_ms
from raymq.store.base.clock import Clock
from raymq.store.groups.leases.pauses import pause_text

from .console import EXIT_FAULT, EXIT_OK, ClusterOperation, Console, Show, cluster_of

#: seconds between two looks of `raymq group lag --watch`
WATCH_S = 2.0


def _listed(
    options: argparse.Namespace, cluster: object, groups: dict[str, Any]
) -> tuple[dict[str, object], list[str]]:
    lines = [
        f"{name}\t{facts['kind']}\t{facts['state']}\t{facts['members']} members\t"
        f"{facts['clients']} clients of RocketMQ"
        for name, facts in groups.items()
    ]
    return groups, lines


GROUP_LIST = ClusterOperation("groups", "", "", _listed)


def _described(
    options: argparse.Namespace, cluster: object, facts: dict[str, Any]
) -> tuple[dict[str, object], list[str]]:
    lines = [
        f"{facts['group']}: {_paused(facts)}{len(facts['members'])} members, "
        f"{facts['lag']} messages left, coordinated by shard {facts['coordinator']}"
    ]

    for member in facts["members"]:
        instance = f", instance {member['instance_id']}" if member["instance_id"] else ""
        silent = "?" if member["silent_ms"] is None else f"{member['silent_ms'] / 1000:.1f}"
        lines.append(
            f"  member {member['member'][:8]} of {member['client']}{instance}: {member['state']}, last heartbeat "
            f"{silent} s ago of {member['session_timeout_ms'] / 1000:g}"
        )
    for client in facts["clients"]:
        since = at_ms(client["since_ms"]).astimezone()
        lines.append(
            f"  client {client['client']} of {client['protocol']} at {client['address']}: {client['language']} "
            f"{client['version']}, since {since:%Y-%m-%d %H:%M:%S}"
        )

    for queue in facts["queues"]:
        owner = "no member" if queue["member"] is None else f"member {queue['member'][:8]}"
        if queue["revoking"]:
            owner += ", which releases it"
        if queue["locked_by"] is not None:
            owner = f"locked by {queue['locked_by']}, renewed {queue['lock_age_s']:.0f} s ago"
        if queue["leased"] is not None:
            owner = (
                f"workers, {queue['leased']} leased, {queue['waiting']} wait to be delivered again"
            )
        lines.append(f"  {_queue(queue)}: {owner}, {_progress(queue)}")
    return facts, lines


def _paused(facts: dict[str, Any]) -> str:
    """That a group is paused, and why, with the shards on which its workers get nothing."""
    if not facts["paused"]:
        return ""
    shards: dict[str, list[str]] = {}
    for pause in facts["pauses"]:
        shards.setdefault(pause_text(pause["reason"]), []).append(str(pause["shard"]))
    found = [f"{text} on shard {', '.join(on)}" for text, on in sorted(shards.items())]
    return f"{'; '.join(found) or 'paused'}".replace("paused", "PAUSED", 1) + ", "


GROUP_DESCRIBE = ClusterOperation("describe_group", "group", "", _described)


def _where(row: dict[str, Any]) -> str:
    before = "none" if row["from"] is None else row["from"]
    return f"{row['topic']}\t{row['queue_id']}\t{before}\t{row['to']}"


def _reset(
    options: argparse.Namespace, cluster: Any, rows: list[dict[str, Any]]
) -> tuple[dict[str, object], list[str]]:
    done = "nothing is changed" if options.dry_run else "reset"
    lines = ["topic\tqueue\tfrom\tto", *map(_where, rows), f"{options.group}: {done}"]
    if options.force and rows and not options.dry_run:
        clients = len(cluster.describe_group(options.group)["clients"])
        if clients:
            lines.append(f"clients of RocketMQ that are notified within 10 s: {clients}")
    facts = {"group": options.group, "dry_run": options.dry_run, "queues": rows}
    return facts, lines


GROUP_RESET = ClusterOperation("reset_group", "group to", "topic queue_ids dry_run force", _reset)


def _deleted(
    options: argparse.Namespace, cluster: object, topics: list[str]
) -> tuple[dict[str, object], list[str]]:
    of = f", with its offsets of {', '.join(topics)}" if topics else ""
    return {"group": options.group, "topics": topics}, [f"{options.group}: deleted{of}"]


GROUP_DELETE = ClusterOperation("delete_group", "group", "", _deleted)


def _state(text: str) -> Show:
    """What is shown after a change of a group's state."""

    def show(
        options: argparse.Namespace, cluster: object, nothing: None
    ) -> tuple[dict[str, object], list[str]]:
        return {"group": options.group, "state": text}, [f"{options.group}: {text}"]

    return show


GROUP_PAUSE = ClusterOperation("pause_group", "group", "", _state("paused"))
GROUP_RESUME = ClusterOperation("resume_group", "group", "", _state("resumed"))


def _released(
    options: argparse.Namespace, cluster: object, count: int
) -> tuple[dict[str, object], list[str]]:
    facts = {"group": options.group, "topic": options.topic, "released": count}
    return facts, [f"{options.group}: messages taken back from their workers: {count}"]


LEASE_RELEASE = ClusterOperation("release_leases", "group", "topic", _released)


def group_lag(options: argparse.Namespace, console: Console) -> int:
    """raymq group lag GROUP"""
    clock = Clock()
    with cluster_of(options, console) as cluster:
        while True:
            facts = cluster.describe_group(options.group)
            _show_lag(options, console, facts)
            if options.max is not None and facts["lag"] > options.max:
                return EXIT_FAULT
            if options.watch is None:
                return EXIT_OK
            console.flush()
            clock.sleep_ms(options.watch * 1000)


def _show_lag(options: argparse.Namespace, console: Console, facts: dict[str, Any]) -> None:
    names = ("topic", "queue_id", "committed", "max_offset", "lag", "lag_s")
    queues = [{name: queue[name] for name in names} for queue in facts["queues"]]
    found = {"group": options.group, "lag": facts["lag"], "lag_s": facts["lag_s"], "queues": queues}
    lines = [f"{options.group}: {facts['lag']} messages, {facts['lag_s']:.0f} s"]
    lines += [f"  {_queue(queue)}: {_progress(queue)}" for queue in facts["queues"]]
    console.result(options, found, *lines)


def _queue(queue: dict[str, Any]) -> str:
    return f"queue {queue['queue_id']} of {queue['topic']}"


def _progress(queue: dict[str, Any]) -> str:
    if queue["committed"] is None:
        return f"no offset, ends at {queue['max_offset']}"
    age = f", the oldest of {queue['lag_s']:.0f} s ago" if queue["lag"] else ""
    return f"committed {queue['committed']} of {queue['max_offset']}, {queue['lag']} left{age}"
