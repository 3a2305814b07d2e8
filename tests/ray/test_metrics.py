"""A real Ray with its metrics agent and its dashboard: what Prometheus would read, and where Grafana looks."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.leader.metrics import METRICS
from raymq.cluster.cli import grafana
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.thorough

#: one process is a driver of its own Ray, runs a cluster in it and answers questions line by line
PROGRAM = """
import contextlib, json, os, signal, sys, threading
import ray
import raymq
from raymq.actors.ray.replica_files import read_endpoint
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.flight_client import ShardConnection
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.deploy.owned_ray import free_ports
from raymq.client.transport.routes import Routes
from raymq.cluster.stop import stop
from raymq.store.records.small_batch import SmallBatch

dashboard, metrics = free_ports(2)
context = ray.init(
    num_cpus=1, include_dashboard=True, dashboard_port=dashboard, _temp_dir=sys.argv[1],
    _metrics_export_port=metrics, configure_logging=False, logging_level="ERROR",
)
cluster = raymq.start(
    sys.argv[2], name="watched", replicas=2, ephemeral=True, segment_size_bytes=1 << 24
)
cluster.create_topic("t", queues=1)
with cluster.producer() as producer:
    for number in range(20):
        producer.send("t", b"%d" % number).result(30)
with cluster.consumer("t", group="g", start="earliest") as consumer:
    first = consumer.poll(5, 10.0)
    consumer.commit({0: 5})
workers = cluster.workers("t", group="w", prefetch=0)
with cluster.producer() as producer, producer.transaction() as txn:
    txn.ack(workers.get(timeout=30))
held = workers.get(timeout=30)

def shown():
    return cluster.status()["shards"][0]

def until(seen):
    for _ in range(600):
        if seen():
            return
        threading.Event().wait(0.05)
    raise SystemExit(f"not seen: {shown()}")

# A put whose answer is unknown, sent again by its sender; one that is refused; a service that is replaced.
endpoint = read_endpoint(ClusterPaths(sys.argv[2]).replica(0, 1))
connection = ShardConnection(endpoint, cluster.token, cluster.cluster_id, 0)
follower = connection.call("status")["pid"]
connection.close()
os.kill(follower, signal.SIGSTOP)
with cluster.producer() as producer:
    late = producer.send("t", b"20")
    until(lambda: shown()["metrics"]["unknown_total"])
    lag = shown()["metrics"]["replication_lag_bytes"]
    with contextlib.suppress(ProcessLookupError):
        # On a slow machine its satellite had it replaced.
        os.kill(follower, signal.SIGCONT)
    late.result(30)
with contextlib.closing(BatchSender(Routes.of(cluster))) as sender:
    refused = sender.send("t", 0, SmallBatch([bytes(5 << 20)], [None], [None], [0]).to_batch()).exception(30)
os.kill(shown()["supervisor"]["roles"]["group_commit"]["pid"], signal.SIGKILL)
until(lambda: shown()["metrics"]["role_restarts_total"])
with cluster.producer() as producer:
    producer.send("t", b"21").result(30)
until(lambda: shown()["metrics"]["topic_messages"]["t"] == 22)
print(json.dumps({
    "port": metrics,
    "address": context.address_info["gcs_address"],
    "session": context.address_info["session_dir"],
    "status": shown()["metrics"],
    "lag": lag,
    "refused": repr(refused),
}), flush=True)
sys.stdin.readline()
workers.close()
stop(sys.argv[2])
ray.shutdown()
"""


def series(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Prometheus's text format: name -> labels of ours -> value."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(ray_raymq_\w+)\{(.*)\} (\S+)", line)
        if match is None:
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        ours = ("cluster", "shard", "topic", "group", "outcome", "decision", "le")
        key = frozenset((name, labels[name]) for name in ours if name in labels)
        found.setdefault(match[1], {})[key] = float(match[3])
    return found


@pytest.mark.timeout(120)
def test_the_agent_of_a_running_ray_tells_every_metric_and_its_grafana_takes_the_dashboard(
    tmp_path: Path,
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY")}
    environment |= {
        "RAYMQ_HOME": str(tmp_path / "home"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    errors = tmp_path / "errors"
    # Short: Ray puts sockets below it.
    with errors.open("wb") as log, tempfile.TemporaryDirectory(prefix="rm-", dir="/tmp") as place:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, place, str(tmp_path / "data")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        try:
            assert program.stdout is not None
            # Ray may say something of the killed process before.
            line = next((line for line in program.stdout if line.startswith("{")), "")
            assert line, errors.read_text(encoding="utf-8")
            facts = json.loads(line)
            check_status(facts["status"])
            assert facts["lag"] > 0
            assert facts["refused"].startswith("Rejected(")
            await_series(facts["port"], facts["status"])
            check_install(facts, environment)
        finally:
            program.communicate("\n", timeout=60)
    assert program.returncode == 0, errors.read_text(encoding="utf-8")


def await_series(port: int, status: dict[str, Any]) -> None:
    """Scrape until the agent has heard of what happened last. Raises: what was wrong in the last scrape."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                check_series(series(answer.read().decode()), status)
            return
        except (OSError, KeyError, AssertionError):
            # The agent may not listen yet, and Ray reports to it only every 10 s.
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(0.3)


def check_status(metrics: dict[str, Any]) -> None:
    assert metrics["append_messages_total"] == 22
    assert metrics["consumer_lag_messages"] == {"t": {"g": 17, "w": 21}, "%RETRY%w": {"w": 0}}
    assert metrics["topic_messages"] == {"t": 22}
    assert metrics["duplicates_total"] >= 1
    assert metrics["rejected_total"] == 1


def check_series(
    found: dict[str, dict[frozenset[tuple[str, str]], float]], status: dict[str, Any]
) -> None:
    shard = {("cluster", "watched"), ("shard", "0")}
    # Nothing of so young a log is scrubbed or repaired, and only a busy machine is slow. A counter without a count is
    # not exported.
    known = {f"ray_{name}" for metric in METRICS for name, _ in metric.series()}
    without_count = {
        f"ray_raymq_{what}_total"
        for what in (
            "scrub_bytes",
            "repaired_units",
            "slow_puts",
            "slow_lock_waits",
            "slow_syncs",
            "uncopied_messages",
        )
    }
    assert set(found) | without_count == known

    def value(name: str, *tags: tuple[str, str]) -> float:
        return found[name][frozenset({*shard, *tags})]

    assert value("ray_raymq_append_messages_total") == 22
    assert value("ray_raymq_topic_messages", ("topic", "t")) == 22
    assert value("ray_raymq_consumer_lag_messages", ("topic", "t"), ("group", "g")) == 17
    assert value("ray_raymq_leased_messages", ("group", "w")) == 1
    assert value("ray_raymq_undelivered_messages", ("group", "w")) == 0
    assert value("ray_raymq_transactions_total", ("decision", "committed")) == 1
    assert value("ray_raymq_lease_outcomes_total", ("group", "w"), ("outcome", "acked")) == 1
    for what in ("duplicates", "rejected", "unknown", "role_restarts"):
        assert value(f"ray_raymq_{what}_total") == status[f"{what}_total"] > 0
    assert value("ray_raymq_replication_lag_bytes") == 0
    assert value("ray_raymq_writable") == 1
    batches = value("ray_raymq_append_batches_total")
    for name in ("ray_raymq_append_seconds", "ray_raymq_flush_seconds"):
        count = value(f"{name}_count")
        assert value(f"{name}_bucket", ("le", "+Inf")) == count > 0
        assert value(f"{name}_sum") > 0
    # Only kept promises have a latency.
    kept = batches - value("ray_raymq_unknown_total")
    assert value("ray_raymq_append_seconds_count") == kept
    assert value("ray_raymq_log_confirmed_bytes") == value("ray_raymq_log_appended_bytes")


def check_install(facts: dict[str, Any], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raymq", "grafana", "install", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    place = Path(json.loads(done.stdout)["file"])
    assert place.parent == Path(facts["session"]) / "metrics" / "grafana" / "dashboards"
    assert place.read_bytes() == grafana.dashboard()
