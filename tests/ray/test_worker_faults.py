"""Workers on three replicas that stand still, die with their messages, or have messages that kill them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.lean_ray import LEAN_WITH_CLIENT
from tests.support.replicated_shard import QUEUES, ReplicatedShard, pause, started_shard
from tests.support.tier import rounds
from tests.support.waiting import DEADLINE_S, until
from tests.support.worker_processes import ROOT, Place, WorkerProcess, check_history

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

#: how often a worker stands still for longer than its lease, or is killed
STOPS = rounds("RAYMQ_WORKER_STOPS", thorough=4, quick=4)
#: messages that workers have when all of them die
LEASED = rounds("RAYMQ_WORKER_LEASED", thorough=50_000, quick=50_000)
LEASE_S, WORK_S = 2.0, 0.05
WORKERS = 3
#: of tests.support.poison_worker
MAX_ATTEMPTS = 3


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, "workers", LEAN_WITH_CLIENT) as world:
        yield world


def put(shard: ReplicatedShard, topic: str, bodies: list[bytes]) -> set[Place]:
    """Put messages into the queues of a topic in turn. Returns: where they are."""
    places = []
    with shard.cluster.producer(acks="quorum") as producer:
        for number, body in enumerate(bodies):
            places.append(producer.send(topic, body, queue_id=number % QUEUES))
        return {(each.queue_id, each.offset) for each in (one.result(DEADLINE_S) for one in places)}


def lag(shard: ReplicatedShard, group: str) -> int:
    """Messages that the group has not settled."""
    return int(shard.cluster.describe_group(group)["lag"])


@pytest.mark.timeout(1_800)
def test_a_worker_that_stood_still_settles_nothing_that_others_have(
    shard: ReplicatedShard, tmp_path: Path
) -> None:
    shard.cluster.create_topic("zombies", queues=QUEUES)
    words = (str(shard.paths.data_dir), "zombies", "zombies")
    workers: list[WorkerProcess] = []
    wanted: set[Place] = set()
    killed = stopped = 0

    def start() -> None:
        place = tmp_path / f"worker{len(workers)}"
        workers.append(WorkerProcess(*words, place, lease_s=LEASE_S, work_s=WORK_S))

    try:
        for _ in range(WORKERS):
            start()
        # A worker that stops between two messages loses none: it goes on until one has.
        while stopped < STOPS or not any(each.count("fenced") for each in workers):
            wanted |= put(shard, "zombies", [b"x"] * 200)
            victim = next(each for each in reversed(workers) if each.process.poll() is None)
            until(lambda: victim.held() is not None, pause)  # noqa: B023
            with victim.stop() as target:
                until(target.stands_still, pause)
                # All others go on, and do what it has.
                until(lambda: lag(shard, "zombies") == 0, pause)
            stopped += 1
            if stopped % 2 == 0:
                victim.end()
                killed += 1
                start()
        until(lambda: lag(shard, "zombies") == 0, pause)
    finally:
        for each in workers:
            each.end()

    check_history(workers, wanted, killed=len(workers))


class PoisonedPrograms:
    """So many programs that neither hang nor are dead (`tests.support.poison_worker`)."""

    def __init__(self, words: list[str], place: Path) -> None:
        self._words = words
        self._place = place
        self._all: list[tuple[subprocess.Popen[bytes], Path]] = []

    def keep(self, count: int) -> None:
        """Start what is missing."""
        for _ in range(count - sum(self._works(*each) for each in self._all)):
            place = self._place / str(len(self._all))
            words = [sys.executable, "-m", "tests.support.poison_worker", *self._words, str(place)]
            self._all.append((subprocess.Popen(words, cwd=ROOT), place))

    def _works(self, process: subprocess.Popen[bytes], place: Path) -> bool:
        return process.poll() is None and not place.exists()

    def end(self) -> None:
        """Kill all."""
        for process, _ in self._all:
            process.kill()
            process.wait()


def test_poison_is_a_dead_letter_once_and_all_others_are_done(
    shard: ReplicatedShard, tmp_path: Path
) -> None:
    shard.cluster.create_topic("poison", queues=QUEUES)
    bodies = [b"%d" % number for number in range(60)]
    bodies[10:10] = [b"raise", b"die", b"hang"]
    put(shard, "poison", bodies)
    programs = PoisonedPrograms([str(shard.paths.data_dir), "poison", "poisoned"], tmp_path)

    def step() -> None:
        programs.keep(2)
        pause()

    try:
        programs.keep(2)
        until(lambda: "poisoned" in shard.cluster.groups(), step)
        until(lambda: lag(shard, "poisoned") == 0, step)
    finally:
        programs.end()

    letters = shard.cluster.dead_letters("poisoned")
    assert sorted(each.message.body for each in letters) == [b"die", b"hang", b"raise"]
    assert {each.attempts for each in letters} == {MAX_ATTEMPTS}


def test_many_messages_of_dead_workers_come_again_while_puts_go_on(
    shard: ReplicatedShard, tmp_path: Path
) -> None:
    shard.cluster.create_topic("many", queues=QUEUES)
    shard.cluster.create_topic("beside", queues=1)
    with shard.cluster.producer(acks="quorum") as producer:
        for queue in range(QUEUES):
            rows = pa.table({"body": pa.array([b"x" * 100] * (LEASED // QUEUES), pa.binary())})
            for future in producer.send_batch("many", rows, queue_id=queue):
                future.result(DEADLINE_S)
    count = QUEUES * (LEASED // QUEUES)

    words = [str(shard.paths.data_dir), "many", "crowd", str(count), str(LEASE_S)]
    program = [sys.executable, "-m", "tests.support.hoarding_worker", *words]
    # The end of the block waits for its end.
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as hoarder:
        try:
            assert hoarder.stdout is not None
            assert hoarder.stdout.readline() == f"{count}\n"
            facts = shard.cluster.describe_group("crowd")
            assert sum(queue["leased"] for queue in facts["queues"]) == count
        finally:
            hoarder.kill()

    options = {"lease_s": LEASE_S, "max_in_flight": 1_000_000, "backoff": (0,), "prefetch": 0}
    settled, began_s = 0, time.monotonic()
    with (
        shard.cluster.producer(acks="quorum") as producer,
        shard.cluster.workers("many", group="crowd", **options) as workers,
    ):
        while settled < count:
            # The leader is not held up by what comes back.
            producer.send("beside", b"x").result(DEADLINE_S)
            batch = workers.get_batch(5_000, 1.0)
            if len(batch):
                assert set(batch.attempts.tolist()) == {2}
                batch.ack()
                settled += len(batch)
            assert time.monotonic() < began_s + 10 * DEADLINE_S
        assert not len(workers.get_batch(5_000, 0))
    assert lag(shard, "crowd") == 0
    print(
        f"{count:,} messages of dead workers: back and done {time.monotonic() - began_s:.1f} s later"
    )
