"""Workers of a group on three replicas, while one of them and the leader are killed in the middle of their work.

Each worker is a process. Its history says which messages it got, at which attempt, and which settlements were answered.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import armed_failpoints
from tests.support.armed_failpoints import ArmedFailpoints
from tests.support.lean_ray import LEAN_WITH_CLIENT
from tests.support.replicated_shard import (
    QUEUES,
    TOPIC,
    ReplicatedShard,
    kill_leader,
    pause,
    started_shard,
    wait_for_leader,
)
from tests.support.skewed_clock import SkewedClock
from tests.support.waiting import until

pytestmark = pytest.mark.faults

NAME, GROUP = "leases", "mailers"
ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 3.0
WORKERS = 3
#: in each queue
MESSAGES = 400

#: queue and offset
Place = tuple[int, int]


class WorkerProcess:
    """A process that works (`tests.support.lease_worker`)."""

    def __init__(self, url: str, place: Path) -> None:
        self.place = place
        words = [url, TOPIC, GROUP, str(place), str(LEASE_S)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lease_worker", *words], cwd=ROOT
        )

    def history(self) -> list[tuple[str, Place, int]]:
        """What it did, with the place and the attempt of each message."""
        written = self.place.read_text() if self.place.exists() else ""
        # One that was killed may leave a part of a line.
        lines = written[: written.rfind("\n") + 1].splitlines()
        words = [line.split() for line in lines]
        return [
            (kind, (int(numbers[0]), int(numbers[1])), int(numbers[2]))
            for kind, *numbers in words
            if kind in ("got", "acked", "fenced")
        ]

    def acked(self) -> int:
        """How many messages it has settled."""
        return sum(kind == "acked" for kind, _, _ in self.history())

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> ArmedFailpoints:
    return ArmedFailpoints(tmp_path_factory.mktemp("points") / "armed")


@pytest.fixture(scope="module")
def shard(
    failpoints: ArmedFailpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReplicatedShard]:
    hook = SkewedClock(tmp_path_factory.mktemp("hook") / "clocks", armed_failpoints.__name__)
    variables = {**hook.variables(), **failpoints.variables(), **LEAN_WITH_CLIENT}
    with started_shard(3, NAME, variables) as world:
        yield world


@pytest.fixture(scope="module")
def workers(shard: ReplicatedShard, tmp_path_factory) -> Iterator[list[WorkerProcess]]:
    place = tmp_path_factory.mktemp("workers")
    url = str(shard.paths.data_dir)
    made = [WorkerProcess(url, place / f"worker{number}") for number in range(WORKERS)]
    yield made
    for each in made:
        each.end()


def committed(shard: ReplicatedShard) -> dict[int, int]:
    found = shard.cluster.call(0, "offsets", {"group": GROUP, "topic": TOPIC})
    return {int(queue): offset for queue, offset in found.items()}


def test_each_message_is_acknowledged_once_while_a_worker_and_the_leader_are_killed(
    shard: ReplicatedShard, workers: list[WorkerProcess]
) -> None:
    with shard.cluster.producer(acks="quorum") as producer:
        for number in range(MESSAGES):
            for queue in range(QUEUES):
                producer.send(TOPIC, b"%d" % number, queue_id=queue)

    until(lambda: all(each.acked() >= 20 for each in workers), pause)
    workers[0].end()
    leader = wait_for_leader(shard)
    kill_leader(shard)
    wait_for_leader(shard, but=leader)
    until(lambda: committed(shard) == dict.fromkeys(range(QUEUES), MESSAGES), pause)

    entries = [entry for each in workers for entry in each.history()]
    got: dict[Place, list[int]] = {}
    for kind, place, attempt in entries:
        if kind == "got":
            got.setdefault(place, []).append(attempt)
    acked = Counter(place for kind, place, _ in entries if kind == "acked")

    wanted = {(queue, offset) for queue in range(QUEUES) for offset in range(MESSAGES)}
    assert got.keys() == wanted, "a message was passed over"
    assert set(acked.values()) == {1}, "a settlement was said to be done twice"
    # The last word of the worker that was killed may be missing, and the answer of its call.
    assert len(wanted - acked.keys()) <= 2
    for place, attempts in got.items():
        assert len(set(attempts)) == len(attempts), f"two workers had one attempt of {place}"
    for kind, place, attempt in entries:
        if kind == "acked":
            assert attempt == max(got[place]), f"{place} came again after it was acknowledged"
    # Also a message that was only ahead of the program that was killed has had an attempt.
    again = sum(max(attempts) > 1 for attempts in got.values())
    print(f"{len(wanted)} messages, {again} of them came again")


def test_a_leader_that_dies_before_its_answer_answers_the_repeated_request_by_its_successor(
    shard: ReplicatedShard, failpoints: ArmedFailpoints
) -> None:
    with shard.cluster.producer(acks="quorum") as producer:
        producer.send(TOPIC, b"the last one", queue_id=0).result(60)
    with shard.cluster.workers(TOPIC, group="points", prefetch=0, order="queue") as workers:
        failpoints.arm("groups.lease_appended")
        message = workers.get(120)
        assert not failpoints.is_armed("groups.lease_appended")
        assert message is not None
        assert message.attempts == 1
        failpoints.arm("groups.settle_appended")
        # It is not refused, although the first call has settled it.
        message.ack()
        assert not failpoints.is_armed("groups.settle_appended")
        again = workers.get(120)
        assert again is not None
        assert (again.queue_id, again.offset) != (message.queue_id, message.offset)
        assert again.attempts == 1
        again.ack()
