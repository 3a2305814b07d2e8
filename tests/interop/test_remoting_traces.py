"""Hooks of RocketMQ's Java client see its sends and its consumption, and its traces are messages like any other."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Program
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

TRACES, TOPIC, COUNT = "RMQ_SYS_TRACE_TOPIC", "traced", 12
#: the fields of a trace: its kind, and the group and the region of a send; whether the consumption succeeded
FIELD, REGION, GROUP = "\1", 2, 3


def run(program: Program, home: Path, server: RocketMQServer, secret: str) -> dict[str, Any]:
    """The line of the scenario."""
    done = subprocess.run(
        [
            program.java,
            *JAVA_OPTIONS,
            f"-Duser.home={home}",
            f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
            f"-Draymq.secret={secret}",
            *("-cp", program.class_path, "TracedScenario"),
            *(f"127.0.0.1:{server.listen(0)}", TOPIC, str(COUNT)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_hooks_and_traces_of_the_java_client(program: Program, tmp_path: Path) -> None:
    with ServedShard(tmp_path / "store") as shard:
        shard.start_flusher()
        for topic in (TRACES, TOPIC):
            shard.cluster.create_topic(topic, queues=2)
        with RocketMQServer(shard.cluster) as server:
            found = run(program, tmp_path, server, shard.cluster.token)
        stored = shard.cluster.describe_topic(TRACES)["messages"]
        bodies: list[str] = []
        with shard.cluster.consumer(TRACES, start="earliest") as consumer:
            until(
                lambda: len(bodies) == stored,
                lambda: bodies.extend(each.body.decode() for each in consumer.poll(100, 1)),
            )

    assert found == {
        "all": True,
        "before": COUNT,
        "after": COUNT,
        "sends": "SEND_OK raymq-0 DefaultRegion true",
        "consumed": COUNT,
        "results": "CONSUME_SUCCESS true",
    }
    traces = [each.split(FIELD) for body in bodies for each in body.split("\2") if each]
    assert Counter(each[0] for each in traces) == {
        "Pub": COUNT,
        "SubBefore": COUNT,
        "SubAfter": COUNT,
    }
    sent = [each for each in traces if each[0] == "Pub"]
    assert {(each[REGION], each[GROUP]) for each in sent} == {("DefaultRegion", "traced-producers")}
    assert {key for each in sent for key in each if key.startswith("key-")} == {
        f"key-{number}" for number in range(COUNT)
    }
