"""A real Ray with its metrics agent and its dashboard: what Prometheus would read, and where Grafana looks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.metrics import METRICS
from raymq.cluster import grafana
from tests.support.waiting import until

#: one process is a driver of its own Ray, runs a cluster in it and answers questions line by line
PROGRAM = """
import json, sys
import ray
import raymq
from raymq.cluster.ray_host import free_ports
from raymq.cluster.start import stop

dashboard, metrics = free_ports(2)
context = ray.init(
    num_cpus=1, include_dashboard=True, dashboard_port=dashboard, _temp_dir=sys.argv[1],
    _metrics_export_port=metrics, configure_logging=False, logging_level="ERROR",
)
cluster = raymq.start(sys.argv[2], name="watched", ephemeral=True, segment_size_bytes=1 << 24)
cluster.create_topic("t", queues=1)
with cluster.producer() as producer:
    for number in range(20):
        producer.send("t", b"%d" % number).result(30)
with cluster.consumer("t", group="g", start="earliest") as consumer:
    first = consumer.poll(5, 10.0)
    consumer.commit({0: 5})
print(json.dumps({
    "port": metrics,
    "address": context.address_info["gcs_address"],
    "session": context.address_info["session_dir"],
    "status": cluster.status()["shards"][0]["metrics"],
}), flush=True)
sys.stdin.readline()
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
        ours = ("cluster", "shard", "topic", "group", "le")
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
            line = program.stdout.readline()
            assert line, errors.read_text(encoding="utf-8")
            facts = json.loads(line)
            check_status(facts["status"])
            check_series(scrape(facts["port"]))
            check_install(facts, environment)
        finally:
            program.communicate("\n", timeout=60)
    assert program.returncode == 0, errors.read_text(encoding="utf-8")


def scrape(port: int) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """What the agent tells, as soon as it has heard of the group's lag."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}

    def look() -> None:
        threading.Event().wait(0.3)
        # The agent may not listen yet.
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer,
        ):
            found.update(series(answer.read().decode()))

    until(lambda: "ray_raymq_consumer_lag_messages" in found, look)
    return found


def check_status(metrics: dict[str, Any]) -> None:
    assert metrics["append_messages_total"] == 20
    assert metrics["consumer_lag_messages"] == {"t": {"g": 15}}


def check_series(found: dict[str, dict[frozenset[tuple[str, str]], float]]) -> None:
    shard = {("cluster", "watched"), ("shard", "0")}
    told = {
        f"ray_{name}"
        for metric in METRICS
        for name, _ in metric.series()
        # One shard kept once has no replication lag; what has not happened is not counted.
        if metric.name
        not in (
            "raymq_replication_lag_bytes",
            "raymq_duplicates_total",
            "raymq_rejected_total",
            "raymq_unknown_total",
            "raymq_role_restarts_total",
        )
    }
    assert set(found) == told

    def value(name: str, *tags: tuple[str, str]) -> float:
        return found[name][frozenset({*shard, *tags})]

    assert value("ray_raymq_append_messages_total") == 20
    assert value("ray_raymq_consumer_lag_messages", ("topic", "t"), ("group", "g")) == 15
    assert value("ray_raymq_writable") == 1
    batches = value("ray_raymq_append_batches_total")
    for name in ("ray_raymq_append_seconds", "ray_raymq_flush_seconds"):
        count = value(f"{name}_count")
        assert value(f"{name}_bucket", ("le", "+Inf")) == count > 0
        assert value(f"{name}_sum") > 0
    assert value("ray_raymq_append_seconds_count") == batches
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
