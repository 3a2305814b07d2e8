"""What a leader knows about itself, as the numbers that metrics.py names."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

from raymq.actors.shared.latency import Latencies
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.store import format as fmt
from raymq.store.promise import own_durable
from raymq.store.state import INTERNAL_TOPIC

from .metrics import ByTags, MetricValues

if TYPE_CHECKING:
    from .host import LeaderHost

#: (topic, group) pairs that are told; a program that makes a new group for each run must not fill Prometheus
LAGS_MAX = 500
#: the same of topics
TOPICS_MAX = 500
_PREFIX = "raymq_"


def read_leader(host: LeaderHost) -> MetricValues:
    """Everything in METRICS. Callers: any thread; cheap enough for every few seconds, not for every put."""
    log, counters = host.store.log, host.counters
    roles: dict[str, dict[str, Any]] = host.supervisor.describe()["roles"]
    flushers = [roles[role] for role in FLUSH_ROLES if role in roles]
    confirmed = log.confirmed
    durable = own_durable(host.config.flush, log.ends)
    return {
        "raymq_append_batches_total": counters.puts,
        "raymq_append_messages_total": counters.rows - counters.duplicates,
        "raymq_append_bytes_total": counters.bytes,
        "raymq_append_seconds": host.acks.latency.read(),
        "raymq_flush_seconds": host.supervisor.sync_latencies(),
        "raymq_fsyncs_total": sum(flusher["syncs"] for flusher in flushers),
        "raymq_duplicates_total": counters.duplicates,
        "raymq_rejected_total": counters.rejected,
        "raymq_unknown_total": counters.unknown,
        "raymq_fetches_total": counters.fetches,
        "raymq_role_restarts_total": sum(max(0, role["grants"] - 1) for role in roles.values()),
        "raymq_scrub_bytes_total": host.scrub.counters.bytes,
        "raymq_scrub_faults": damaged_places(host),
        "raymq_start_time_seconds": host.started_ms / 1000,
        "raymq_writable": int(host.writable),
        "raymq_waiting_puts": host.waiting_puts,
        "raymq_log_start_bytes": log.start,
        "raymq_log_appended_bytes": log.end,
        "raymq_log_synced_bytes": log.synced,
        "raymq_log_confirmed_bytes": confirmed,
        "raymq_log_dispatched_bytes": host.store.dispatched,
        "raymq_replication_lag_bytes": max(0, durable - confirmed)
        if "replication" in roles
        else None,
        "raymq_consumer_lag_messages": consumer_lags(host),
        "raymq_topic_messages": topic_messages(host),
        "raymq_disk_used_bytes": _used_bytes(host),
        "raymq_disk_free_bytes": _free_bytes(host),
    }


def damaged_places(host: LeaderHost) -> int:
    """What the scrub found, and what reads and deliveries came to that it has not come to yet."""
    faults = [fault.fields for fault in host.scrub.faults]
    known = [(int(each["offset"]), int(each.get("end", each["offset"] + 1))) for each in faults]
    met = [each for each in list(host.store.log.damage_met) if each >= host.store.log.start]
    return len(faults) + sum(
        not any(start <= offset < end for start, end in known) for offset in met
    )


def consumer_lags(host: LeaderHost) -> ByTags:
    """(topic, group) -> messages between its committed offsets and the ends of these queues.

    Only queues of this shard for which the group has committed: nobody knows where it will begin in another one.
    """
    store = host.store
    lags: ByTags = {}
    # Copies: puts change these tables meanwhile.
    for (group, topic), table in islice(list(store.state.offsets.items()), LAGS_MAX):
        lags[topic, group] = sum(
            max(0, store.queue_range(topic, queue)[1] - offset)
            for queue, offset in dict(table).items()
        )
    return lags


def topic_messages(host: LeaderHost) -> ByTags:
    """(topic,) -> messages in its queues on this shard, those that were read included; by name, the first ones."""
    store, found = host.store, Counter[tuple[str, ...]]()
    for topic, queue in store.queues():
        if topic == INTERNAL_TOPIC:
            continue
        if (topic,) not in found and len(found) == TOPICS_MAX:
            break
        low, high = store.queue_range(topic, queue)
        found[topic,] += high - low
    return found


def _used_bytes(host: LeaderHost) -> int:
    """Files of the commit log are allocated whole; consume queues by what is in them."""
    store = host.store
    ranges = (store.queue_range(topic, queue) for topic, queue in store.queues())
    units = sum(high - low for low, high in ranges)
    return len(store.log.queue.files) * host.config.segment_size_bytes + units * fmt.UNIT_BYTES


def _free_bytes(host: LeaderHost) -> int | None:
    log = host.store.log
    try:
        return log.files.free_bytes(log.root)
    except OSError:
        # A disk that does not even tell this is told of by other numbers.
        return None


def as_status(readings: MetricValues) -> dict[str, Any]:
    """The same for `status`, as JSON takes it: without the prefix, latencies as quantiles, what has tags by these."""
    shown: dict[str, Any] = {}
    for name, value in readings.items():
        if isinstance(value, Latencies):
            shown[name.removeprefix(_PREFIX)] = {
                "count": value.total,
                "sum": value.sum_s,
                "p50": value.quantile_s(0.5),
                "p99": value.quantile_s(0.99),
            }
        elif isinstance(value, dict):
            shown[name.removeprefix(_PREFIX)] = _nested(value)
        else:
            shown[name.removeprefix(_PREFIX)] = value
    return shown


def _nested(value: ByTags) -> dict[str, Any]:
    """One level for each tag."""
    tree: dict[str, Any] = {}
    for (*outer, last), number in value.items():
        level = tree
        for tag in outer:
            level = level.setdefault(tag, {})
        level[last] = number
    return tree
