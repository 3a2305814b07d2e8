"""`raymq dlq`: messages that groups could not handle, and the way back."""

from __future__ import annotations

import argparse
import base64
from typing import TYPE_CHECKING, Any

from .console import EXIT_FAULT, EXIT_OK, ClusterOperation, Console, cluster_of
from .query_commands import text_of
from .time_text import shown_time

if TYPE_CHECKING:
    from raymq.client.dead_letters import DeadLetter

#: dead letters that stay, of which lines are printed
_REFUSED_SHOWN = 20


def _listed(
    options: argparse.Namespace, cluster: object, groups: dict[str, Any]
) -> tuple[dict[str, object], list[str]]:
    lines = [
        f"{name}\t{facts['count']} dead letters\toldest {_time(facts['oldest_ms'])}\t"
        f"newest {_time(facts['newest_ms'])}"
        for name, facts in groups.items()
    ]
    return groups, lines or ["no dead letters"]


def _time(time_ms: int | None) -> str:
    return "?" if time_ms is None else shown_time(time_ms)


DLQ_LIST = ClusterOperation("dead_letter_groups", "group", "", _listed)


def _shown(
    options: argparse.Namespace, cluster: object, letters: list[DeadLetter]
) -> tuple[list[dict[str, object]], list[str]]:
    return [_facts(each) for each in letters], [_line(each) for each in letters]


DLQ_SHOW = ClusterOperation("dead_letters", "group", "max_records where", _shown)


def _facts(letter: DeadLetter) -> dict[str, object]:
    """A dead letter as JSON. Bytes that are no text are in base64, under another name."""
    message = letter.message
    facts: dict[str, object] = {
        "group": letter.group,
        "shard": message.shard,
        "queue_id": message.queue_id,
        "offset": message.offset,
        "died_ms": message.store_time_ms,
        "message_id": message.message_id,
        "original_topic": letter.original_topic,
        "original_queue_id": letter.original_queue_id,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "holder": letter.holder,
        "redrives": letter.redrives,
        "tag": message.tag,
        "index_keys": list(message.index_keys),
        "properties": message.properties,
    }

    for name, value in (("key", message.key), ("body", message.body)):
        if value is None or (name == "body" and message.is_null):
            facts[name] = None
            continue
        try:
            facts[name] = value.decode()
        except UnicodeDecodeError:
            facts[f"{name}_base64"] = base64.b64encode(value).decode()
    return facts


def _line(letter: DeadLetter) -> str:
    """When it died, its place, where it came from, its attempts and reason, keys, and the begin of its body."""
    message = letter.message
    queue = "?" if letter.original_queue_id is None else letter.original_queue_id
    words = [
        shown_time(message.store_time_ms),
        f"{message.shard}/{message.queue_id}/{message.offset}",
        f"from {letter.original_topic or '?'}/{queue}",
        f"{letter.attempts} attempts",
        letter.reason or "sent back",
    ]

    if letter.holder:
        words.append(f"holder={letter.holder[:8]}")
    if letter.redrives:
        words.append(f"redrives={letter.redrives}")
    if message.index_keys:
        words.append(f"keys={','.join(message.index_keys)}")
    if message.key is not None:
        words.append(f"key={text_of(message.key)}")
    if message.tag is not None:
        words.append(f"tag={message.tag}")
    words.append("null" if message.is_null else text_of(message.body))
    return "  ".join(words)


def redrive(options: argparse.Namespace, console: Console) -> int:
    """raymq dlq redrive GROUP: exits with 1 if some stay dead letters."""
    with cluster_of(options, console) as cluster:
        found = cluster.redrive(
            options.group,
            max_records=options.max_records,
            rate=options.rate,
            to=options.to,
            where=options.where,
            dry_run=options.dry_run,
            progress=console.note,
        )

    verb = "would go" if options.dry_run else "went"
    lines = [f"{count} {verb} to {topic}" for topic, count in found["topics"].items()]
    lines += [
        f"stays: {each['shard']}/{each['queue_id']}/{each['offset']}: {each['why']}"
        for each in found["refused"][:_REFUSED_SHOWN]
    ]
    counts = f"{found['redriven']} put back, {len(found['refused'])} stay"
    if options.dry_run:
        counts = f"{found['redriven']} would be put back, {len(found['refused'])} stay"
    if found["by_others"]:
        counts += f", {found['by_others']} were put back by others or have expired"
    console.result(options, found, *lines, f"{options.group}: {counts}")
    return EXIT_FAULT if found["refused"] else EXIT_OK
