"""Values of a leader's metrics that take more than one counter, and all of them as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from raymq.actors.shared.latency import Latencies
from raymq.store.base import format as fmt
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.scrub import Scrub
from raymq.store.state.shard_state import INTERNAL_TOPIC

from .metrics import ByTags, MetricValues

#: topics that are reported, so that a program with a new topic for each run cannot fill Prometheus
TOPICS_MAX = 500


def damaged_places(scrub: Scrub, store: MessageStore) -> int:
    """Places that the scrub found, others that reads and deliveries skipped, and those of compacted queues."""
    log = store.log
    faults = [fault.fields for fault in scrub.faults]
    known = [(int(each["offset"]), int(each.get("end", each["offset"] + 1))) for each in faults]
    skipped = [each for each in list(log.reads.skipped_damage) if each >= log.start]
    others = [offset for offset in skipped if not _is_inside(offset, known)]
    return len(faults) + len(others) + len(store.compaction.damage)


def _is_inside(offset: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= offset < stop for start, stop in ranges)


def topic_messages(store: MessageStore) -> ByTags:
    """(topic,) -> messages in its queues on this shard, read or not. The topics are the first TOPICS_MAX by name."""
    found = Counter[tuple[str, ...]]()
    for topic, queue_id in store.queues():
        if topic == INTERNAL_TOPIC:
            continue
        if (topic,) not in found and len(found) == TOPICS_MAX:
            break
        low, high = store.queue_range(topic, queue_id)
        found[topic,] += high - low
    return found


def used_bytes(store: MessageStore) -> int:
    """Bytes of commit log files, which are allocated whole, and of the units in consume queues."""
    ranges = (store.queue_range(topic, queue_id) for topic, queue_id in store.queues())
    units = sum(high - low for low, high in ranges)
    segments = len(store.log.segments.files) * store.log.config.segment_size_bytes
    return segments + units * fmt.QUEUE_UNIT_BYTES


def free_bytes(log: CommitLog) -> int | None:
    """None: the disk does not say."""
    try:
        return log.files.free_bytes(log.root)
    except OSError:
        # Other metrics show that this disk does not work.
        return None


def as_status(values: MetricValues) -> dict[str, Any]:
    """The same for `status`, as JSON: names without prefix, latencies as quantiles, tags as nested keys."""
    return {name.removeprefix("raymq_"): _as_json(value) for name, value in values.items()}


def _as_json(value: float | Latencies | ByTags | None) -> object:
    if isinstance(value, Latencies):
        return {
            "count": value.total,
            "sum": value.sum_s,
            "p50": value.quantile_s(0.5),
            "p99": value.quantile_s(0.99),
        }

    if not isinstance(value, dict):
        return value

    tree: dict[str, Any] = {}
    for (*outer, last), number in value.items():
        level = tree
        for tag in outer:
            level = level.setdefault(tag, {})
        level[last] = number
    return tree
