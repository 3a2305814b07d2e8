"""The lines of `raymq status`: health first, then the facts of each shard. `verbose` adds bytes and pids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raymq.actors.protocol.tls import TLS_PREFIX, is_loopback
from raymq.cluster.record.cluster_record import protection
from raymq.store.groups.leases.pauses import PAUSES, pause_text

_KIB = 1024
_MIB = 1024 * _KIB
_GIB = 1024 * _MIB

#: role -> the name of RocketMQ's service
_SERVICES = {
    "group_commit": "GroupCommit",
    "flush_real_time": "FlushRealTime",
    "commit_real_time": "CommitRealTime",
    "replication": "Replication",
}
_INDENT = " " * 13

StatusFacts = Mapping[str, Any]


def status_lines(
    status: StatusFacts, topics: Mapping[str, object] | None, *, verbose: bool
) -> Iterator[str]:
    """The text of a cluster's status.

    Args: `status`: the result of `Cluster.status`; `topics`: the result of `Cluster.topics` (None: not known).
    """
    shards = status["shards"]
    metrics = [shard["metrics"] for shard in shards if shard.get("metrics")]
    complete = len(metrics) == len(shards)

    yield f"cluster {status['name']}: {status['state']}"
    yield _line("directory", status.get("data_dir") or "on another machine")
    yield _line("shards", _shards(shards))
    for shard in shards:
        yield from _shard(shard, verbose)

    yield from _doors(shards)
    yield _line("topics", "unknown" if topics is None else str(len(topics)))
    yield _line("messages", _messages(metrics) if complete else "unknown")
    yield _line("disk", _disk(metrics))
    yield _line("lag", _lag(metrics))
    yield _line("groups", _groups(metrics))
    yield from _halves(shards)
    yield from _pauses(shards)

    if verbose:
        yield _line("cluster id", status["cluster_id"])
        if status.get("ray_address"):
            yield _line(
                "Ray",
                f"{status['ray_address']}, from Python: ray.init(raymq.connect({status['name']!r}).ray_address)",
            )


def size_text(count: float) -> str:
    """Bytes, as people read them."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if count >= unit:
            decimals = 0 if name == "MiB" else 1
            return f"{count / unit:.{decimals}f} {name}"
    return f"{count:.0f} bytes"


def _line(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _shards(shards: list[StatusFacts]) -> str:
    running = sum(shard["state"] == "RUNNING" for shard in shards)
    words = [f"{running} of {len(shards)} RUNNING"]
    for key in ("replicas", "flush"):
        found = {str(shard[key]) for shard in shards if shard.get(key)}
        if found:
            words.append(f"{key} {' and '.join(sorted(found))}")
    if any(shard.get("transient_pool") for shard in shards):
        words.append("transient pool")
    return ", ".join(words)


def _shard(shard: StatusFacts, verbose: bool) -> Iterator[str]:
    leases = shard.get("supervisor", {}).get("roles", {})
    text = str(shard["state"])
    if shard.get("error"):
        text += f" ({shard['error']})"

    running = [_SERVICES.get(role, role) for role, lease in leases.items() if lease["granted"]]
    if running:
        text += f", {', '.join(running)} {'runs' if len(running) == 1 else 'run'}"
    yield _line(f"shard {shard['shard']}", text)

    for role, lease in leases.items():
        if not lease["granted"]:
            reason = lease["last_stop_reason"] or "none"
            yield f"{_INDENT}{_SERVICES.get(role, role)} does not run (its last stop: {reason})"

    protection = _protection(shard)
    if protection:
        yield _INDENT + protection
    if verbose:
        yield from _positions(shard, leases)


def _protection(shard: StatusFacts) -> str:
    """The protection that several replicas give, which depends on their machines."""
    replicas = shard.get("replicas", 1)
    if replicas == 1:
        return ""
    if shard.get("nodes"):
        return protection(replicas, shard["nodes"])
    host = str(shard.get("endpoint") or "").removeprefix(TLS_PREFIX).rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return protection(replicas, None)
    # This program may not know the nodes.
    return ""


def _positions(shard: StatusFacts, leases: Mapping[str, Any]) -> Iterator[str]:
    keys = ["appended", "synced", "confirmed"]
    if shard.get("transient_pool"):
        keys.insert(1, "committed")
    ends = ", ".join(f"{key} {shard[key]}" for key in keys if key in shard)
    process = ", ".join(f"{key} {shard[key]}" for key in ("endpoint", "pid") if shard.get(key))
    if shard.get("replicas", 1) > 2 and shard.get("mode") == "leader":
        yield f"{_INDENT}replica {shard.get('replica')} leads in epoch {shard.get('epoch')}"
    if ends or process:
        yield _INDENT + "; ".join(part for part in (ends and f"{ends} bytes", process) if part)
    for role, lease in leases.items():
        if lease["granted"]:
            starts = f"{lease['grants']} start{'' if lease['grants'] == 1 else 's'}"
            name = _SERVICES.get(role, role)
            yield f"{_INDENT}{name}: at {lease['position']} bytes, pid {lease['pid']}, {starts}"


def _doors(shards: list[StatusFacts]) -> Iterator[str]:
    """A line for each protocol whose clients are served."""
    protocols = sorted({each for shard in shards for each in shard.get("doors", {})})
    for protocol in protocols:
        found = [
            facts for shard in shards for facts in shard.get("doors", {}).get(protocol, {}).values()
        ]
        nodes = sorted(
            {f"{each['address'][0]}:{each['node_port']}" for each in found if each["node_port"]}
        )
        where = f"name server {', '.join(nodes)}" if nodes else "no name server port"
        yield _line(protocol, f"{where}, {len(found)} server(s)")


def _messages(metrics: list[StatusFacts]) -> str:
    return f"{sum(sum(shard['topic_messages'].values()) for shard in metrics):,}"


def _disk(metrics: list[StatusFacts]) -> str:
    used = [shard["disk_used_bytes"] for shard in metrics if shard.get("disk_used_bytes")]
    free = [shard["disk_free_bytes"] for shard in metrics if shard.get("disk_free_bytes")]
    if not used or not free:
        return "unknown"
    # Shards of one machine share its disk. On several machines the fullest disk is the one that matters.
    return f"{size_text(sum(used))} used, {size_text(min(free))} free"


def _groups(metrics: list[StatusFacts]) -> str:
    """The groups with members, by the shards that coordinate them."""
    counts = [
        count for shard in metrics for count in shard.get("group_members", {}).values() if count
    ]
    if not metrics:
        return "unknown"
    return f"{len(counts)} with {sum(counts)} members" if counts else "none with members"


def _halves(shards: list[StatusFacts]) -> Iterator[str]:
    """The open half messages of each shard that has some."""
    found = []
    for shard in shards:
        metrics = shard.get("metrics") or {}
        count = metrics.get("open_half_messages") or 0
        if count:
            age_s = metrics["oldest_half_message_seconds"]
            found.append(f"shard {shard['shard']}: {count:,} open, the oldest of {age_s:,} s ago")
    if found:
        yield _line("halves", "; ".join(found))


def _pauses(shards: list[StatusFacts]) -> Iterator[str]:
    """The groups whose workers get nothing, on some shards."""
    found: dict[str, list[str]] = {}
    for shard in shards:
        for group, why in (shard.get("metrics") or {}).get("paused_workers", {}).items():
            if why:
                text = f"group {group} {pause_text(PAUSES[why])}"
                found.setdefault(text, []).append(str(shard["shard"]))
    if found:
        texts = [f"{text} on shard {', '.join(on)}" for text, on in sorted(found.items())]
        yield _line("workers", "; ".join(texts))


def _lag(metrics: list[StatusFacts]) -> str:
    groups: dict[tuple[str, str], int] = {}
    ages_s: dict[tuple[str, str], int] = {}
    for shard in metrics:
        seconds = shard.get("consumer_lag_seconds", {})
        for topic, lags in shard["consumer_lag_messages"].items():
            for group, count in lags.items():
                key, age_s = (topic, group), seconds.get(topic, {}).get(group, 0)
                groups[key] = groups.get(key, 0) + count
                ages_s[key] = max(ages_s.get(key, 0), age_s)

    lags = [
        f"topic {topic}, group {group}: {count:,} messages, {ages_s[topic, group]:,} s"
        for (topic, group), count in sorted(groups.items())
        if count
    ]

    replication = [shard.get("replication_lag_bytes") or 0 for shard in metrics]
    if any(replication):
        lags.append(f"replication: {size_text(max(replication))}")

    if not metrics:
        return "unknown"
    return "; ".join(lags) or "none"
