"""RocketMQ's own Java client while servers, leaders and flushers are killed: no promise of an answer is broken.

Every message that was answered with SEND_OK is in the topic once, also for RayMQ's readers, and its consumer has had
it. One whose answer is not known is there once at most: the client does not repeat it, and the server never does.
"""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tier
from tests.support.java_kills import door_pid, kill
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Program
from tests.support.ports import free_port
from tests.support.replicated_shard import (
    ReplicatedShard,
    pause,
    started_shard,
    wait_for_leader,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.thorough]

PRODUCERS = 4
#: acknowledged messages from one fault to the next
BETWEEN = 200
ROUNDS = tier.rounds("RAYMQ_REMOTING_KILLS", thorough=2, quick=1)


class JavaLoad:
    """The process of LoadScenario, and what it has said."""

    def __init__(self, program: Program, home: Path, token: str, port: int, topic: str) -> None:
        self._process = subprocess.Popen(
            [
                program.java,
                *JAVA_OPTIONS,
                f"-Duser.home={home}",
                f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                f"-Draymq.secret={token}",
                *("-cp", program.class_path, "LoadScenario"),
                *(f"127.0.0.1:{port}", topic, "readers", str(PRODUCERS)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.acked: list[str] = []
        self.unknown: list[str] = []
        self.end: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, word = line.strip().partition(" ")
            if kind == "ack":
                self.acked.append(word)
            elif kind == "unknown":
                self.unknown.append(word.split()[0])
            else:
                self.end = line.strip()

    def wait_for_more(self) -> None:
        """Messages are acknowledged that were sent from now on."""
        wanted = len(self.acked) + BETWEEN
        until(lambda: len(self.acked) >= wanted or self._process.poll() is not None, pause)
        assert self._process.poll() is None

    def stop(self) -> str | None:
        """End the producers, and wait for the consumer. Returns: what the process says."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()
        self._process.wait(120)
        self._thread.join()
        return self.end

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def shard(port: int) -> Iterator[ReplicatedShard]:
    with started_shard(3, "remoting", options=("--rocketmq", str(port))) as shard:
        yield shard


@pytest.fixture
def load(program: Program, tmp_path: Path, shard: ReplicatedShard, port: int) -> Iterator[JavaLoad]:
    load = JavaLoad(program, tmp_path, shard.cluster.token, port, "load")
    try:
        yield load
    finally:
        load.close()


def test_no_answer_to_the_java_client_is_broken_by_kills(
    shard: ReplicatedShard, load: JavaLoad
) -> None:
    load.wait_for_more()
    for _ in range(ROUNDS):
        leader = wait_for_leader(shard)
        kill(door_pid(shard, leader))
        load.wait_for_more()

        leader = wait_for_leader(shard)
        kill(shard.lease(leader, "commit_log")["pid"])
        load.wait_for_more()

        leader = wait_for_leader(shard)
        kill(shard.lease(leader, "group_commit")["pid"])
        load.wait_for_more()

        leader = wait_for_leader(shard)
        shard.cluster.move_leader(0, (leader + 1) % 3)
        load.wait_for_more()

    assert load.stop() == "all"
    print(f"{len(load.acked)} acknowledged, {len(load.unknown)} unknown")
    stored = Counter(each.body.decode() for each in shard.read("load"))
    assert set(load.acked) <= stored.keys()
    assert stored.keys() <= {*load.acked, *load.unknown}
    assert max(stored.values()) == 1
