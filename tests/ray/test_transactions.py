"""Programs that read, work and send as one, on three replicas, while they and the leader are killed.

Each message has one result, whatever was killed in the middle: the results are compared with the messages.
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

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

NAME = "transactions"
#: messages of one transaction at most
BATCH = 7
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = 3
#: that are put together, in each queue
MESSAGES = 100
POINTS = ("transactions.begin", "transactions.appended", "transactions.confirmed")


class Program:
    """A process that commits results with their progress (`tests.support.transaction_worker`)."""

    def __init__(self, *words: str, place: Path) -> None:
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transaction_worker", *words, str(place)], cwd=ROOT
        )

    def committed(self) -> int:
        """For how many messages it has had the word that its result is committed."""
        written = self.place.read_text() if self.place.exists() else ""
        # One that was killed may leave a part of a line.
        lines = written[: written.rfind("\n") + 1].splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("committed"))

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


def put(shard: ReplicatedShard) -> None:
    """Put further messages for the programs."""
    with shard.cluster.producer(acks="quorum") as producer:
        for number in range(MESSAGES):
            for queue in range(QUEUES):
                producer.send(TOPIC, b"%d" % number, queue_id=queue)


def ends(shard: ReplicatedShard) -> dict[int, int]:
    """queue -> how many messages were put."""
    queues = shard.cluster.describe_topic(TOPIC)["queues"]
    return {int(each["queue_id"]): int(each["max_offset"]) for each in queues}


def results(shard: ReplicatedShard, out: str) -> Counter[tuple[int, int]]:
    """How many results each message has."""
    found: Counter[tuple[int, int]] = Counter()
    count = sum(int(each["max_offset"]) for each in shard.cluster.describe_topic(out)["queues"])
    with shard.cluster.consumer(out, start="earliest") as consumer:
        while found.total() < count:
            for message in consumer.poll(timeout=10):
                queue, offset = map(int, message.body.split())
                found[queue, offset] += 1
    return found


def is_done(shard: ReplicatedShard, group: str) -> bool:
    found = shard.cluster.call(0, "offsets", {"group": group, "topic": TOPIC})
    return found == {str(queue): end for queue, end in ends(shard).items()}


def kill_at(shard: ReplicatedShard, failpoints: ArmedFailpoints, point: str) -> None:
    """Let a leader die at a point, and one lead again, perhaps the same replica."""
    failpoints.arm(point)
    # Something has to come there.
    put(shard)
    until(lambda: not failpoints.is_armed(point), pause)
    wait_for_leader(shard)


@pytest.mark.parametrize("kind", ["workers", "members"])
def test_each_message_has_one_result_while_programs_and_leaders_are_killed(
    shard: ReplicatedShard, failpoints: ArmedFailpoints, tmp_path: Path, kind: str
) -> None:
    out, group = f"out-{kind}", f"g-{kind}"
    shard.cluster.create_topic(out, queues=2)
    words = [kind, str(shard.paths.data_dir), TOPIC, out, group]
    programs = [Program(*words, place=tmp_path / f"{each}") for each in range(PROGRAMS)]
    try:
        put(shard)
        until(lambda: sum(each.committed() for each in programs) >= MESSAGES, pause)
        programs[0].end()
        for point in POINTS:
            kill_at(shard, failpoints, point)
        programs.append(Program(*words, place=tmp_path / "late"))
        put(shard)
        kill_leader(shard)
        until(lambda: is_done(shard, group), pause)
    finally:
        for each in programs:
            each.end()

    found = results(shard, out)
    wanted = {(queue, at) for queue, end in ends(shard).items() for at in range(end)}
    assert found.keys() == wanted, "a message has no result"
    assert set(found.values()) == {1}, "a message has two results"
    # The last words of the program that was killed may be missing.
    known = sum(each.committed() for each in programs)
    assert found.total() - BATCH <= known <= found.total()


def test_a_leader_that_dies_before_its_answer_answers_by_its_successor(
    shard: ReplicatedShard, failpoints: ArmedFailpoints
) -> None:
    shard.cluster.create_topic("points", queues=1)
    with shard.cluster.producer() as producer:
        for number, point in enumerate(POINTS):
            failpoints.arm(point)
            with producer.transaction() as txn:
                txn.send("points", b"%d" % number)
            assert not failpoints.is_armed(point)
            assert [receipt.offset for receipt in txn.commit()] == [number]
