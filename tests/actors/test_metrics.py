"""The metrics of a shard: counted cheaply, read from a real host, reported to instruments, named alike everywhere."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.leader.group_progress import LAGS_MAX, GroupProgress
from raymq.actors.leader.leader_metrics import (
    TOPICS_MAX,
    as_status,
    topic_messages,
)
from raymq.actors.leader.metrics import METRICS, Collector, MetricValues
from raymq.actors.replica import open_replica
from raymq.actors.satellites.satellite import Satellite
from raymq.actors.shared.control_block import (
    ROLES,
    ControlBlock,
    FollowerProgress,
    Registration,
)
from raymq.actors.shared.latency import (
    BOUNDS_S,
    FIELDS,
    NO_LATENCIES,
    Latencies,
    LatencyCounter,
)
from raymq.actors.shared.processes import ProcessIdentity
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.cluster.controller.controller_metrics import CONTROLLER_METRICS
from raymq.cluster.deploy.rocketmq_door import ROCKETMQ_METRICS
from raymq.store.base.errors import DeliveryUnknown, Rejected
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.requests import FetchRequest
from tests.support.batches import put_one, request
from tests.support.clock import ManualClock
from tests.support.roles import leader_of
from tests.support.waiting import until

#: of a leader, then of a controller
ALL_METRICS = (*METRICS, *CONTROLLER_METRICS, *ROCKETMQ_METRICS)
ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 256 * 1024
CONFIG = StoreConfig(
    segment_size_bytes=SEGMENT, prewrite_window_bytes=64 * 1024, sync_flush_timeout_ms=10_000
)
FLUSHER = """
import sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
config = StoreConfig(segment_size_bytes=262144, flush_interval_ms=10, flush_least_pages=0)
FlushService(sys.argv[1], sys.argv[2], config).run()
"""

# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (-1.0, 0),
        (0.0, 0),
        (31.5e-6, 0),
        (33e-6, 1),
        (100e-6, 2),
        (1e-3, 5),
        (1.0, 15),
        (16.0, 19),
        (17.0, 20),
        (1e6, 20),
    ],
)
def test_a_value_is_counted_in_the_bucket_that_holds_it(seconds: float, bucket: int) -> None:
    counter = LatencyCounter()
    counter.add(seconds)
    read = counter.read()
    assert read.counts[bucket] == read.total == 1
    bounds = (0.0, *BOUNDS_S, float("inf"))
    assert bounds[bucket] <= max(seconds, 0.0) <= bounds[bucket + 1]
    assert read.sum_s == pytest.approx(max(seconds, 0.0), abs=1e-6)


def test_a_quantile_is_the_end_of_its_bucket() -> None:
    counter = LatencyCounter()
    assert counter.read() == NO_LATENCIES
    assert NO_LATENCIES.quantile_s(0.5) is None
    for _ in range(98):
        counter.add(100e-6)
    counter.add(0.5)
    counter.add(1000)
    read = counter.read()
    assert read.quantile_s(0.5) == read.quantile_s(0.98) == pytest.approx(128e-6)
    assert read.quantile_s(0.99) == pytest.approx(0.524288)
    assert read.quantile_s(1.0) == BOUNDS_S[-1]


def test_a_sync_is_reported_before_its_time_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raymq").mkdir()
    clock, reported = ManualClock(), list[Any]()
    satellite = Satellite(tmp_path, "group_commit", clock=clock, files=Files())
    satellite.attach()
    latency = satellite._record.sync_latency
    monkeypatch.setattr(
        satellite, "publish_position", lambda end: reported.append((end, latency.read().total))
    )

    satellite.publish_sync_started(5)
    clock.advance(20)
    satellite.publish_synced(5)

    assert reported == [(5, 0)]
    assert latency.read().sum_s == pytest.approx(0.02, abs=1e-5)
    satellite.close()
    shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


def test_a_slow_sync_is_counted_and_logged_and_a_quick_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "raymq").mkdir()
    clock = ManualClock()
    satellite = Satellite(tmp_path, "group_commit", clock=clock, files=Files())
    satellite.attach()
    monkeypatch.setattr(satellite, "publish_position", lambda end: None)
    caplog.set_level(logging.DEBUG, "raymq.satellite")
    for end, ms in ((5, 20), (9, 700), (12, 600)):
        satellite.publish_sync_started(end)
        clock.advance(ms)
        satellite.publish_synced(end)
    assert satellite._record.slow_count == 2
    slow = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert slow == ["a sync took 700 ms: group_commit, up to 9"]
    assert "group_commit: synced up to 5 in 20.0 ms" in caplog.messages
    satellite.close()
    shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


def test_each_role_has_its_own_counts_and_a_new_process_continues_them(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "control")
    satellite = ControlBlock.open(path, files=Files())
    reader = ControlBlock.open(path, files=Files())

    for number, role in enumerate(ROLES, start=1):
        for _ in range(number):
            satellite.roles[role].sync_latency.add(1e9)
    for number, role in enumerate(ROLES, start=1):
        assert reader.roles[role].sync_latency.read().counts[FIELDS - 2] == number
        assert reader.roles[role].registration() is None
        assert reader.roles[role].count == 0

    replication = satellite.roles["replication"]
    replication.count, replication.slow_count = 5, 2
    replication.register(Registration(7, ProcessIdentity(1, 2)), 5)
    assert reader.roles["replication"].count == 5
    assert reader.roles["replication"].sync_latency.read().total == 3

    reader.roles["replication"].clear_counts()
    assert reader.roles["replication"].count == reader.roles["replication"].slow_count == 0
    assert reader.roles["replication"].sync_latency.read() == NO_LATENCIES
    assert reader.roles["commit_real_time"].sync_latency.read().total == len(ROLES)

    satellite.close()
    reader.close()


# --- reporting ------------------------------------------------------------------------------------


class Recorder:
    """Replaces Ray's Counter and Gauge, and is as strict as they are."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.calls = 0

    def make(self, is_counter: bool, name: str, help_: str, tags: tuple[str, ...]) -> Any:
        assert help_
        assert re.fullmatch(r"[a-z_]+", name)
        assert name not in self.kinds
        self.kinds[name] = "counter" if is_counter else "gauge"

        def record(value: float, given: dict[str, str]) -> None:
            self.calls += 1
            assert set(given) == set(tags)
            key = (name, tuple(sorted(given.items())))
            if is_counter:
                assert value > 0
                value += self.values.get(key, 0)
            self.values[key] = value

        return record

    def value(self, name: str, **tags: str) -> float:
        given = {"cluster": "c", "shard": "3", **tags}
        return self.values[name, tuple(sorted(given.items()))]


def collector(values: dict[str, Any]) -> tuple[Collector, Recorder]:
    recorder = Recorder()

    def read() -> MetricValues:
        return dict(values)

    return Collector(read, recorder.make, tags={"cluster": "c", "shard": "3"}), recorder


def test_a_counter_is_increased_by_the_difference_and_only_when_there_is_one() -> None:
    values: dict[str, Any] = {"raymq_fsyncs_total": 10}
    metrics, recorder = collector(values)
    metrics.collect()
    assert recorder.value("raymq_fsyncs_total") == 10

    metrics.collect()
    assert recorder.calls == 1
    values["raymq_fsyncs_total"] = 12
    metrics.collect()
    assert recorder.value("raymq_fsyncs_total") == 12

    # The total is made of two counts that were read while they grew.
    values["raymq_fsyncs_total"] = 11
    metrics.collect()
    values["raymq_fsyncs_total"] = 13
    metrics.collect()
    assert recorder.value("raymq_fsyncs_total") == 13


def test_a_counter_with_tags_is_increased_for_each_of_them() -> None:
    changes: dict[tuple[str, ...], int] = {("0",): 1, ("1",): 0}
    recorder = Recorder()
    metrics = Collector(
        lambda: {"raymq_leader_changes_total": changes},
        recorder.make,
        tags={"cluster": "c"},
        metrics=CONTROLLER_METRICS,
    )
    metrics.collect()
    changes["0",] = 3
    metrics.collect()
    key = ("raymq_leader_changes_total", (("cluster", "c"), ("shard", "0")))
    assert recorder.values == {key: 3}


def test_gauges_are_set_and_missing_values_are_not_reported() -> None:
    metrics, recorder = collector(
        {
            "raymq_waiting_puts": 0,
            "raymq_replication_lag_bytes": None,
            "raymq_under_replicated": None,
            "raymq_consumer_lag_messages": {("t", "g"): 4, ("t", "h"): 0},
        }
    )
    metrics.collect()
    assert recorder.value("raymq_waiting_puts") == 0
    assert recorder.value("raymq_consumer_lag_messages", topic="t", group="g") == 4
    assert recorder.value("raymq_consumer_lag_messages", topic="t", group="h") == 0
    assert len(recorder.values) == 3


def test_a_latency_is_reported_as_the_series_of_a_histogram() -> None:
    counts = [0] * (FIELDS - 1)
    counts[1], counts[5], counts[-1] = 2, 3, 1
    metrics, recorder = collector({"raymq_append_seconds": Latencies(tuple(counts), 20.5)})
    metrics.collect()

    def bucket(bound: str) -> float:
        return recorder.value("raymq_append_seconds_bucket", le=bound)

    assert [bucket(le) for le in ("0.000032", "0.000064", "0.000512", "0.001024")] == [0, 2, 2, 5]
    assert (bucket("16.777216"), bucket("+Inf")) == (5, 6)
    assert recorder.value("raymq_append_seconds_count") == 6
    assert recorder.value("raymq_append_seconds_sum") == 20.5
    assert {
        recorder.kinds[f"raymq_append_seconds_{end}"] for end in ("bucket", "sum", "count")
    } == {"gauge"}
    bounds = [dict(tags).get("le") for _, tags in recorder.values if "le" in dict(tags)]
    assert [float(bound or 0) for bound in bounds] == [*BOUNDS_S, float("inf")]


def test_a_collection_that_fails_is_logged_once_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raymq.actors.leader.metrics.COLLECT_S", 0.001)
    stopped, turns = threading.Event(), 0

    def read() -> MetricValues:
        nonlocal turns
        turns += 1
        if turns < 4:
            raise OSError("the disk does not answer")
        stopped.set()
        return {"raymq_writable": 1}

    recorder = Recorder()
    Collector(read, recorder.make, tags={"cluster": "c", "shard": "3"}).run(stopped)
    assert recorder.value("raymq_writable") == 1
    assert [record.message for record in caplog.records] == ["metrics are not reported for now"]


def test_without_a_metrics_agent_the_instruments_of_ray_stay_silent() -> None:
    code = """
from raymq.actors.shared.latency import NO_LATENCIES
from raymq.actors.leader.metrics import METRICS, Collector, ray_instrument

kinds = {"counter": 3, "gauge": 4, "latency": NO_LATENCIES}
values = {m.name: {m.tags: 1} if m.tags else kinds[m.kind] for m in METRICS}
collector = Collector(lambda: values, ray_instrument, tags={"cluster": "c", "shard": "0"})
for _ in range(2):
    collector.collect()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- a real host ----------------------------------------------------------------------------------


class Leader:
    """A host in this process, its flusher in another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.flushers: list[subprocess.Popen[bytes]] = []

    def open(self, config: StoreConfig, role: str = "group_commit") -> ReplicaHost:
        self.host = open_replica(
            self.root, config, identity={"cluster_id": "c", "shard": 0}, roles=(role,)
        )
        self.start_flusher(role)
        self.host.call("create_topic", {"name": "t", "queues": 2, "shards": [0]})
        return self.host

    def start_flusher(self, role: str = "group_commit") -> None:
        self.flushers.append(
            subprocess.Popen(
                [sys.executable, "-c", FLUSHER, str(self.root), role],
                cwd=ROOT,
                env=dict(os.environ),
                stderr=subprocess.DEVNULL,
            )
        )

    def close(self) -> None:
        if "host" in vars(self):
            self.host.close(1.0)
        for flusher in self.flushers:
            flusher.kill()
            flusher.wait()


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    made = Leader(tmp_path / "store")
    yield made
    made.close()


def wait_a_little() -> None:
    threading.Event().wait(0.01)


def test_the_metrics_of_a_shard_are_read_from_its_host(leader: Leader) -> None:
    host = leader.open(CONFIG)
    before: dict[str, Any] = dict(host.metrics())
    assert before["raymq_append_batches_total"] == before["raymq_append_seconds"].total == 0

    for number in range(10):
        put_one(host, request([b"x" * 100] * 3, producer_id=7, sequence=3 * number)).wait(30)
    # The last batch again, with one message more.
    put_one(host, request([b"x" * 100] * 4, producer_id=7, sequence=27)).wait(30)
    with pytest.raises(Rejected):
        put_one(host, request([b"x"], queue=9))
    assert host.fetch(FetchRequest("t", {0: 0}, 1 << 20, 100, 1000))

    until(
        lambda: (
            dict(host.metrics())["raymq_flush_seconds"].total >= 11
            and host.store.dispatched == host.store.log.end
        ),
        wait_a_little,
    )

    now: dict[str, Any] = dict(host.metrics())
    assert set(now) == {metric.name for metric in METRICS}
    assert now["raymq_append_batches_total"] == 11
    assert now["raymq_append_messages_total"] == 31
    stored = now["raymq_log_appended_bytes"] - before["raymq_log_appended_bytes"]
    assert now["raymq_append_bytes_total"] == stored
    assert now["raymq_duplicates_total"] == 3
    assert now["raymq_rejected_total"] == 1
    assert now["raymq_unknown_total"] == 0
    assert now["raymq_fetches_total"] == 1
    assert now["raymq_append_seconds"].total == 11
    assert now["raymq_append_seconds"].sum_s > now["raymq_flush_seconds"].sum_s / 2 > 0
    assert now["raymq_fsyncs_total"] >= 11
    assert now["raymq_role_restarts_total"] == now["raymq_waiting_puts"] == 0
    assert now["raymq_writable"] == 1

    positions = [
        now[f"raymq_log_{name}_bytes"] for name in ("start", "dispatched", "confirmed", "synced")
    ]
    assert positions[0] == 0
    assert positions[1:] == [now["raymq_log_appended_bytes"]] * 3
    assert now["raymq_replication_lag_bytes"] is None
    # 31 messages, and three records of the shard: the snapshot, the epoch and the topic.
    assert now["raymq_disk_used_bytes"] % SEGMENT == 20 * (31 + 3)
    assert now["raymq_disk_free_bytes"] > 0


def test_every_fsync_of_the_async_flush_service_is_measured(leader: Leader) -> None:
    host = leader.open(
        StoreConfig(flush="async", segment_size_bytes=SEGMENT, prewrite_window_bytes=64 * 1024),
        "flush_real_time",
    )
    puts = 0

    def put() -> None:
        nonlocal puts
        put_one(host, request([b"x" * 100])).wait(30)
        puts += 1
        wait_a_little()

    # The host syncs the bytes that were appended before the grant.
    until(lambda: host.supervisor.sync_latencies().total > 0, put)
    until(lambda: dict(host.metrics())["raymq_fsyncs_total"] != 0, wait_a_little)
    assert leader_of(host).acks.latency.read().total == puts


def test_status_shows_the_same_values_as_json(leader: Leader) -> None:
    host = leader.open(CONFIG)
    put_one(host, request([b"x"], producer_id=7)).wait(30)
    host.call("commit_offsets", {"group": "g", "topic": "t", "offsets": {"0": 0}})
    until(lambda: GroupProgress(host.store).lags() == {("t", "g"): 1}, wait_a_little)
    reported = json.loads(json.dumps(host.call("status", {})))["metrics"]
    assert {f"raymq_{name}" for name in reported} == {metric.name for metric in METRICS}
    assert reported["append_messages_total"] == 1
    assert reported["consumer_lag_messages"] == {"t": {"g": 1}}
    assert reported["consumer_lag_seconds"]["t"]["g"] >= 0
    assert reported["group_members"] == {}
    assert reported["topic_messages"] == {"t": 1}
    latency = reported["append_seconds"]
    assert latency["count"] == 1
    assert 0 < latency["sum"] < latency["p50"] <= latency["p99"]


def test_consumer_lag_is_counted_per_group_and_topic_over_queues_with_an_offset(
    leader: Leader,
) -> None:
    host = leader.open(CONFIG)
    put_one(host, request([b"x"] * 5, queue=0)).wait(30)
    put_one(host, request([b"x"] * 7, queue=1)).wait(30)
    for group, offsets in (("slow", {"0": 1, "1": 2}), ("half", {"1": 7})):
        host.call("commit_offsets", {"group": group, "topic": "t", "offsets": offsets})
    # No client can commit it. A RocketMQ that lost messages may have left it.
    host.store.commit_offsets("ahead", "t", {0: 9})
    until(lambda: host.store.dispatched == host.store.log.end, wait_a_little)
    assert topic_messages(host.store) == {("t",): 12}
    assert GroupProgress(host.store).lags() == {
        ("t", "slow"): 9,
        ("t", "half"): 0,
        ("t", "ahead"): 0,
    }


def test_the_age_of_a_lag_is_that_of_the_oldest_message_which_is_read_once(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = leader.open(CONFIG)
    for queue in (1, 0):
        put_one(host, request([b"x"] * 2, queue=queue)).wait(30)
    for group, offsets in (("slow", {"0": 0, "1": 0}), ("ahead", {"0": 2, "1": 2})):
        host.call("commit_offsets", {"group": group, "topic": "t", "offsets": offsets})
    until(lambda: host.store.dispatched == host.store.log.end, wait_a_little)

    progress, store = GroupProgress(host.store), host.store
    first_ms = store.query.earliest_store_time("t", 1)
    assert first_ms is not None
    monkeypatch.setattr(store.clock, "now_ms", lambda: first_ms + 90_500)
    assert progress.lag_seconds() == {("t", "slow"): 90, ("t", "ahead"): 0}
    assert progress.ages_ms("t", {1: 1, 0: 2}) == {1: 90_500}
    monkeypatch.setattr(store.query, "store_time_at", lambda place: None)
    assert progress.lag_seconds() == {("t", "slow"): 90, ("t", "ahead"): 0}
    assert GroupProgress(store).lag_seconds() == {("t", "slow"): 0, ("t", "ahead"): 0}


def test_the_number_of_series_is_bounded_for_many_groups_and_topics(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = leader.open(CONFIG)
    for number in range(LAGS_MAX + 5):
        host.store.state.offsets[f"g{number}", "t"] = {0: 0}
    assert len(GroupProgress(host.store).lags()) == LAGS_MAX
    many = [(f"t{number:04}", queue) for number in range(TOPICS_MAX + 5) for queue in range(2)]
    monkeypatch.setattr(host.store, "queues", lambda: many)
    assert list(topic_messages(host.store)) == [(f"t{number:04}",) for number in range(TOPICS_MAX)]


def test_the_lags_of_a_follower_are_those_that_replication_last_reported(tmp_path: Path) -> None:
    host = open_replica(
        tmp_path / "store",
        StoreConfig(flush="async", segment_size_bytes=SEGMENT, prewrite_window_bytes=64 * 1024),
        identity={"cluster_id": "c", "shard": 0, "replica": 0, "replicas": 2, "incarnation": 1},
        # Its process is not there: the test writes what that one would report.
        roles=("replication",),
        members=range(2),
        candidates=(0,),
    )
    with contextlib.closing(host):
        until(lambda: host.roles.led is not None and bool(host.metrics()), wait_a_little)
        assert host.roles.led is not None
        record, epoch, end = (
            host.supervisor.control.followers[1],
            host.roles.led.epoch,
            host.log.end,
        )
        for progress in (None, FollowerProgress(epoch + 1, end, 5, True, matched_end=end)):
            if progress is not None:
                # Of another leadership.
                record.write(progress)
            assert host.metrics()["raymq_incomplete_followers"] == 1
            assert host.metrics()["raymq_follower_match_lag_bytes"] == {}

        record.write(FollowerProgress(epoch, end - 30, 5, True, matched_end=end - 10))
        values = host.metrics()
        assert values["raymq_incomplete_followers"] == 0
        assert values["raymq_follower_match_lag_bytes"] == {("1",): 10}
        assert values["raymq_follower_sync_lag_bytes"] == {("1",): 30}
        assert values["raymq_follower_durable_bytes"] == {("1",): end - 30}


def test_a_flusher_that_is_replaced_and_a_put_without_answer_are_counted(leader: Leader) -> None:
    host = leader.open(
        StoreConfig(
            segment_size_bytes=SEGMENT, prewrite_window_bytes=64 * 1024, sync_flush_timeout_ms=2_000
        )
    )

    def lease() -> dict[str, Any]:
        found: dict[str, Any] = host.supervisor.describe()["roles"]["group_commit"]
        return found

    until(lambda: lease()["granted"], wait_a_little)
    put_one(host, request([b"x"], producer_id=7)).wait(30)
    assert lease()["grants"] == 1
    leader.flushers[0].kill()
    leader.flushers[0].wait()
    ticket = put_one(host, request([b"y"], producer_id=7, sequence=1))
    assert leader_of(host).report.waiting_puts == 1
    with pytest.raises(DeliveryUnknown):
        ticket.wait(30)
    leader.start_flusher()
    until(lambda: host.metrics()["raymq_role_restarts_total"] == 1, wait_a_little)
    now: dict[str, Any] = dict(host.metrics())
    assert (now["raymq_unknown_total"], now["raymq_waiting_puts"]) == (1, 0)
    # Only kept promises have a latency.
    assert now["raymq_append_seconds"].total == 1


def test_a_disk_whose_free_space_is_unknown_lacks_only_that_metric(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = leader.open(CONFIG)

    def broken(path: object) -> int:
        raise OSError(5, "the disk does not answer")

    monkeypatch.setattr(host.store.log.files, "free_bytes", broken)
    values = host.metrics()
    assert values["raymq_disk_free_bytes"] is None
    assert as_status(values)["writable"] == 1


# --- one set of names -----------------------------------------------------------------------------


def test_metric_names_end_with_unit_and_kind() -> None:
    names = [metric.name for metric in ALL_METRICS]
    assert len(set(names)) == len(names)
    for metric in ALL_METRICS:
        assert metric.name.startswith("raymq_")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        if metric.kind == "latency":
            assert metric.name.endswith("_seconds")
        assert {*metric.common, *metric.tags} <= {
            *("cluster", "shard", "replica", "topic", "group", "code", "outcome", "decision")
        }


def test_the_documentation_has_every_metric_with_its_kind_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(raymq_\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(metric.name, metric.kind) for metric in ALL_METRICS]
    series = {name for metric in ALL_METRICS for name, _ in metric.series()}
    shown = set(re.findall(r"\bray_(raymq_[a-z_]+)", text))
    assert shown <= series
