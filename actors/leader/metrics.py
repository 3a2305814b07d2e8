"""The metrics that a shard exports to Prometheus through `ray.util.metrics`, and the thread that exports them.

The hot path only keeps plain counters. Every COLLECT_S one thread reads all of them and reports them to Ray. Without
Ray's metrics agent (part of `ray[default]`) the values end there, which is harmless.

A latency is exported as the series of a Prometheus histogram (`_bucket` by `le`, `_count`, `_sum`), each as a gauge.
`ray.util.metrics.Histogram` is not used, because it takes one value per call, and Ray's agent records each value once
more, at the middle of its bucket. Gauges suffice, because `rate` and `histogram_quantile` use names and values only.
Gauges also export empty buckets, which a Ray counter cannot, because it cannot be increased by 0. Without empty buckets
a quantile would be interpolated from 0.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from raymq.actors.shared.latency import BOUNDS_S, Latencies

logger = logging.getLogger("raymq.metrics")

#: Ray reports them to its agent every 10 s
COLLECT_S = 5.0

#: values of a metric's own tags -> number
ByTags = dict[tuple[str, ...], int]
#: metric -> its number, for counters since the process began; None: no number now
MetricValues = Mapping[str, "float | Latencies | ByTags | None"]
Tags = dict[str, str]


class Metric(NamedTuple):
    """One metric. Its series are called `ray_<name>` in Prometheus, with the endings above for a latency."""

    name: str
    kind: Literal["counter", "gauge", "latency"]
    help: str
    #: beside those in `common`
    tags: tuple[str, ...] = ()
    #: tags that all values of one process have
    common: tuple[str, ...] = ("cluster", "shard")

    def series(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(name, tags) of each exported series."""
        tags = (*self.common, *self.tags)
        if self.kind != "latency":
            return ((self.name, tags),)
        return (
            (f"{self.name}_bucket", (*tags, "le")),
            (f"{self.name}_count", tags),
            (f"{self.name}_sum", tags),
        )


METRICS = (
    Metric("raymq_append_batches_total", "counter", "Batches appended to the commit log."),
    Metric("raymq_append_messages_total", "counter", "Messages appended, repeated ones left out."),
    Metric("raymq_append_bytes_total", "counter", "Bytes of the records of these messages."),
    Metric(
        "raymq_append_seconds",
        "latency",
        "From a batch's arrival at the shard until its promise is kept.",
    ),
    Metric("raymq_flush_seconds", "latency", "One sync of the flush service."),
    Metric("raymq_fsyncs_total", "counter", "Syncs of the flush service."),
    Metric("raymq_duplicates_total", "counter", "Messages sent again and stored only once."),
    Metric("raymq_rejected_total", "counter", "Batches refused, with nothing stored."),
    Metric("raymq_unknown_total", "counter", "Batches answered with DeliveryUnknown."),
    Metric("raymq_slow_puts_total", "counter", "Batches acknowledged after more than 500 ms."),
    Metric("raymq_slow_lock_waits_total", "counter", "Waits for the put lock of over 500 ms."),
    Metric("raymq_slow_syncs_total", "counter", "Syncs of the flush service of over 500 ms."),
    Metric(
        "raymq_replica_timeouts_total",
        "counter",
        "Batches that not enough replicas had in time.",
    ),
    Metric("raymq_fetches_total", "counter", "Read requests."),
    Metric("raymq_role_restarts_total", "counter", "Flush and replication services replaced."),
    Metric("raymq_scrub_bytes_total", "counter", "Stored bytes read and compared with their CRCs."),
    Metric(
        "raymq_scrub_faults", "gauge", "Places of the log that do not read as they were stored."
    ),
    Metric(
        "raymq_repaired_units_total",
        "counter",
        "Damaged units replaced by those of other replicas.",
    ),
    Metric("raymq_start_time_seconds", "gauge", "When the shard began to serve, since 1970."),
    Metric("raymq_writable", "gauge", "1 while the shard takes messages, 0 while it refuses them."),
    Metric("raymq_waiting_puts", "gauge", "Batches that wait for sync or replica."),
    Metric("raymq_log_start_bytes", "gauge", "Where the commit log begins."),
    Metric("raymq_log_appended_bytes", "gauge", "Where the commit log ends."),
    Metric("raymq_log_synced_bytes", "gauge", "Everything below is on disk."),
    Metric("raymq_log_confirmed_bytes", "gauge", "Everything below may be read."),
    Metric("raymq_log_dispatched_bytes", "gauge", "Everything below is in the consume queues."),
    Metric(
        "raymq_replication_lag_bytes",
        "gauge",
        "Bytes that are durable on the leader and not yet confirmed by followers; shards with followers only.",
    ),
    Metric(
        "raymq_under_replicated",
        "gauge",
        "1 while a follower gets no log bytes, 0 while each does; shards with followers only.",
    ),
    Metric("raymq_epoch", "gauge", "The epoch that this replica leads; each leader has its own."),
    Metric(
        "raymq_incomplete_followers",
        "gauge",
        "Followers that lack confirmed messages or were not heard yet; shards with followers only.",
    ),
    Metric(
        "raymq_follower_match_lag_bytes",
        "gauge",
        "Bytes of the leader's log that a follower is not known to have.",
        ("replica",),
    ),
    Metric(
        "raymq_follower_sync_lag_bytes",
        "gauge",
        "Bytes that are durable on the leader and not known to be durable on a follower.",
        ("replica",),
    ),
    Metric(
        "raymq_follower_durable_bytes",
        "gauge",
        "Everything below is durable on a follower, and equals the leader's log.",
        ("replica",),
    ),
    Metric(
        "raymq_unclean_recoveries",
        "gauge",
        "How often a majority of the shard's replicas was lost: confirmed messages may be missing.",
    ),
    Metric(
        "raymq_consumer_lag_messages",
        "gauge",
        "Messages after the offsets that a group has committed.",
        ("topic", "group"),
    ),
    Metric(
        "raymq_consumer_lag_seconds",
        "gauge",
        "Age of the oldest message that a group has not committed.",
        ("topic", "group"),
    ),
    Metric(
        "raymq_group_members",
        "gauge",
        "Members of a group that the shard coordinates.",
        ("group",),
    ),
    Metric(
        "raymq_open_half_messages",
        "gauge",
        "Half messages of transactions that are neither committed nor rolled back.",
    ),
    Metric(
        "raymq_oldest_half_message_seconds",
        "gauge",
        "How long ago the oldest open half message was stored; 0: none is open.",
    ),
    Metric(
        "raymq_transactions_total",
        "counter",
        "Transactions of producers that the shard has decided.",
        ("decision",),
    ),
    Metric(
        "raymq_leased_messages",
        "gauge",
        "Messages that workers of a group have, and have not settled.",
        ("group",),
    ),
    Metric(
        "raymq_undelivered_messages",
        "gauge",
        "Messages of a group of workers that wait for their next delivery.",
        ("group",),
    ),
    Metric(
        "raymq_lease_outcomes_total",
        "counter",
        "What became of messages that workers of a group had.",
        ("group", "outcome"),
    ),
    Metric(
        "raymq_highest_attempts",
        "gauge",
        "The most deliveries of a message that workers of a group have not settled; 0: there is none.",
        ("group",),
    ),
    Metric(
        "raymq_dead_letters",
        "gauge",
        "Messages that a group could not handle, and that were not put back.",
        ("group",),
    ),
    Metric(
        "raymq_paused_workers",
        "gauge",
        "Whether the workers of a group get nothing: 0: no; 1: too many dead letters; 2: an operator wants it.",
        ("group",),
    ),
    Metric(
        "raymq_uncopied_messages_total",
        "counter",
        "Messages of workers that were settled as dead without a dead letter: none could be made of them.",
    ),
    Metric("raymq_topic_messages", "gauge", "Messages that a topic has on the shard.", ("topic",)),
    Metric("raymq_disk_used_bytes", "gauge", "Commit log files and consume queues."),
    Metric("raymq_disk_free_bytes", "gauge", "Free space on the disk of the shard's directory."),
)


#: a metric's name, its tags
_Series = tuple[str, tuple[tuple[str, str], ...]]
#: adds to a counter (more than 0), or sets a gauge
Instrument = Callable[[float, Tags], None]
#: (is a counter, name, help, tag keys)
MakeInstrument = Callable[[bool, str, str, tuple[str, ...]], Instrument]


class Collector:
    """Reports values to the instruments. Callers: one thread."""

    def __init__(
        self,
        read: Callable[[], MetricValues],
        make: MakeInstrument,
        *,
        tags: Tags,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        """Args: `tags`: the values of the tags that all `metrics` have in common."""
        self._read = read
        self._tags = tags
        self._metrics = metrics
        #: (counter, its tags) -> the total reported to Ray so far
        self._reported: dict[_Series, float] = {}
        #: the gauges that were reported last
        self._gauges: set[_Series] = set()
        self._instruments: dict[str, Instrument] = {}
        for metric in metrics:
            for name, keys in metric.series():
                self._instruments[name] = make(metric.kind == "counter", name, metric.help, keys)

    def collect(self) -> None:
        """Read all values once and report them.

        Ray repeats the last value of a gauge for ever. Those of a replica that does not lead any more become 0, so that
        the maximum over all replicas is the leader's.
        """
        values = self._read()
        before, self._gauges = self._gauges, set()
        for metric in self._metrics:
            value = values.get(metric.name)
            if value is None:
                continue

            report = self._report_total if metric.kind == "counter" else self._set_gauge
            if isinstance(value, Latencies):
                self._report_latencies(metric.name, value)
            elif isinstance(value, dict):
                for names, number in value.items():
                    tags = dict(zip(metric.tags, names, strict=True))
                    report(metric.name, number, {**self._tags, **tags})
            else:
                report(metric.name, value, self._tags)

        if not values:
            for name, items in before:
                self._instruments[name](0, dict(items))

    def _set_gauge(self, name: str, value: float, tags: Tags) -> None:
        self._gauges.add((name, tuple(tags.items())))
        self._instruments[name](value, tags)

    def run(self, stopped: threading.Event) -> None:
        """Collect every COLLECT_S until `stopped`. Repeated failures are logged once."""
        failed = False
        while not stopped.wait(COLLECT_S):
            try:
                self.collect()
                failed = False
            except Exception:
                # Any error: metrics must not stop the shard. A shard that is closing has no values to report.
                if not failed and not stopped.is_set():
                    logger.exception("metrics are not reported for now")
                failed = True

    def _report_total(self, name: str, total: float, tags: Tags) -> None:
        series = (name, tuple(tags.items()))
        more = total - self._reported.get(series, 0)
        # A total made of two counts that were read while they grew may be too large, and the next one smaller.
        if more > 0:
            self._instruments[name](more, tags)
            self._reported[series] = total

    def _report_latencies(self, name: str, value: Latencies) -> None:
        cumulative = list(accumulate(value.counts))
        for bound, count in zip(_LE, cumulative, strict=True):
            self._instruments[f"{name}_bucket"](count, {**self._tags, "le": bound})
        self._instruments[f"{name}_count"](cumulative[-1], self._tags)
        self._instruments[f"{name}_sum"](value.sum_s, self._tags)


#: values of the tag `le`
_LE = (*(f"{bound:.6f}".rstrip("0").rstrip(".") for bound in BOUNDS_S), "+Inf")


def ray_instrument(is_counter: bool, name: str, help_: str, tags: tuple[str, ...]) -> Instrument:
    """An instrument of Ray. Callers: a process that Ray has started."""
    from ray.util.metrics import Counter, Gauge

    instrument: Instrument = (
        Counter(name, help_, tags).inc if is_counter else Gauge(name, help_, tags).set
    )
    return instrument
