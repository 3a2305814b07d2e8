"""The same scenarios of RocketMQ's own client in front of its own broker and of RayMQ's server: the same lines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.store.records.producer_stamp import STAMP_NAME
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Program
from tests.support.rocketmq_servers import rocketmq_servers
from tests.support.served_shard import TOKEN, ServedShard

pytestmark = pytest.mark.thorough

TOPIC, COUNT = "judged", 20


def start(program: Program, home: Path, name_server: str) -> subprocess.Popen[str]:
    """The client, which runs all scenarios."""
    home.mkdir()
    words = [
        program.java,
        *JAVA_OPTIONS,
        f"-Duser.home={home}",
        # Of consumers that broadcast: where they keep their offsets.
        f"-Drocketmq.client.localOffsetStoreDir={home}",
        f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
        f"-Draymq.secret={TOKEN}",
        *("-cp", program.class_path, "ComparedScenarios"),
        *(name_server, TOPIC, str(COUNT)),
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines(client: subprocess.Popen[str]) -> dict[str, Any]:
    """The line of each scenario."""
    said, _ = client.communicate(timeout=200)
    assert client.returncode == 0, said[-3000:]
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {line.pop("scenario"): line for line in found}


@pytest.fixture(scope="module")
def judged(program: Program, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of RocketMQ's broker, and ours."""
    place = tmp_path_factory.mktemp("judged")
    with (
        rocketmq_servers(program, place, broker="raymq-0") as names,
        ServedShard(place / "ours") as shard,
    ):
        shard.start_flusher()
        for topic in (TOPIC, f"{TOPIC}-delays", f"{TOPIC}-back"):
            shard.cluster.create_topic(topic, queues=4)
        with RocketMQServer(shard.cluster) as server:
            clients = [
                start(program, place / "a", names),
                start(program, place / "b", f"127.0.0.1:{server.listen(0)}"),
            ]
            try:
                return [lines(each) for each in clients]
            finally:
                for each in clients:
                    each.kill()
                    each.wait()


#: properties that a broker of RocketMQ adds to each message: where it is, and what no reader of ours asks for
THEIRS = {"CLUSTER", "WAIT"}
#: and ours: who sent it, and its number
OURS = {STAMP_NAME}

SCENARIOS = ("send", "push", "tags", "sql", "pull", "wrong sql", "broadcast", "delays", "send back")


def differences(theirs: Any, ours: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs between two lines, by its path: theirs and ours."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = {}
        for name in sorted({*theirs, *ours}):
            found |= differences(theirs.get(name), ours.get(name), f"{path}/{name}")
        return found
    if isinstance(theirs, list) and isinstance(ours, list):
        left, right = {*theirs} - {*ours}, {*ours} - {*theirs}
        if path.endswith("/properties"):
            left, right = left - THEIRS, right - OURS
        return {path: (left, right)} if left or right else {}
    return {} if theirs == ours else {path: (theirs, ours)}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_our_server_answers_as_a_broker_of_rocketmq(
    judged: list[dict[str, Any]], scenario: str
) -> None:
    theirs, ours = (each[scenario] for each in judged)
    assert differences(theirs, ours) == {}
