"""Reads the values of the metrics that metrics.py names from a leader."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any, Protocol

from raymq.actors.shared.latency import Latencies
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.actors.supervise.supervisor import Supervisor
from raymq.store import format as fmt
from raymq.store.config import StoreConfig
from raymq.store.log.scrub import Scrub
from raymq.store.message_store import MessageStore
from raymq.store.promise import own_durable
from raymq.store.state import INTERNAL_TOPIC

from .metrics import ByTags, MetricValues
from .put_acks import PutAcks, PutCounters

#: (topic, group) pairs that are reported; a program that makes a new group for each run must not fill Prometheus
LAGS_MAX = 500
#: the same of topics
TOPICS_MAX = 500
_PREFIX = "raymq_"


class MeasuredLeader(Protocol):
    """The part of `host.LeaderHost` that the metrics use."""

    config: StoreConfig
    store: MessageStore
    supervisor: Supervisor
    acks: PutAcks
    counters: PutCounters
    scrub: Scrub
    started_ms: int

    @property
    def writable(self) -> bool:
        """Whether puts are taken now."""

    @property
    def waiting_puts(self) -> int:
        """Puts that are not answered yet."""


def read_leader(host: MeasuredLeader) -> MetricValues:
    """The values of METRICS. Callers: any thread; cheap enough for every few seconds, not for every put."""
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


def damaged_places(host: MeasuredLeader) -> int:
    """Places that the scrub found, and others that reads and deliveries met."""
    faults = [fault.fields for fault in host.scrub.faults]
    known = [(int(each["offset"]), int(each.get("end", each["offset"] + 1))) for each in faults]
    met = [each for each in list(host.store.log.damage_met) if each >= host.store.log.start]
    return len(faults) + sum(
        not any(start <= offset < end for start, end in known) for offset in met
    )


def consumer_lags(host: MeasuredLeader) -> ByTags:
    """(topic, group) -> messages between its committed offsets and the ends of these queues.

    Only queues of this shard for which the group has committed offsets: in others its start is not known.
    """
    store = host.store
    lags: ByTags = {}
    # Copies: puts change these tables meanwhile.
    for (group, topic), table in islice(list(store.state.offsets.items()), LAGS_MAX):
        lags[topic, group] = sum(
            max(0, store.queue_range(topic, queue_id)[1] - offset)
            for queue_id, offset in dict(table).items()
        )
    return lags


def topic_messages(host: MeasuredLeader) -> ByTags:
    """(topic,) -> messages in its queues on this shard, read or not; by name, for the first TOPICS_MAX topics."""
    store, found = host.store, Counter[tuple[str, ...]]()
    for topic, queue_id in store.queues():
        if topic == INTERNAL_TOPIC:
            continue
        if (topic,) not in found and len(found) == TOPICS_MAX:
            break
        low, high = store.queue_range(topic, queue_id)
        found[topic,] += high - low
    return found


def _used_bytes(host: MeasuredLeader) -> int:
    """Files of the commit log are allocated whole; consume queues by what is in them."""
    store = host.store
    ranges = (store.queue_range(topic, queue_id) for topic, queue_id in store.queues())
    units = sum(high - low for low, high in ranges)
    return len(store.log.queue.files) * host.config.segment_size_bytes + units * fmt.UNIT_BYTES


def _free_bytes(host: MeasuredLeader) -> int | None:
    log = host.store.log
    try:
        return log.files.free_bytes(log.root)
    except OSError:
        # Other metrics show that this disk does not work.
        return None


def as_status(values: MetricValues) -> dict[str, Any]:
    """The same for `status`, as JSON: names without prefix, latencies as quantiles, tags as nested keys."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
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
