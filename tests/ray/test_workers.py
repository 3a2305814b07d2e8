"""Workers of a group on three replicas, while one of them and the leader are killed in the middle of their work.

Each worker is a process. Its history says which messages it got, at which attempt, and which settlements were answered.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from tests.support.worker_processes import WorkerProcess, check_history

pytestmark = pytest.mark.faults

NAME, GROUP = "leases", "mailers"
LEASE_S, WORK_S = 3.0, 0.005
WORKERS = 3
#: in each queue
MESSAGES = 400


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
    made = [
        WorkerProcess(
            *(url, TOPIC, GROUP, place / f"worker{number}"), lease_s=LEASE_S, work_s=WORK_S
        )
        for number in range(WORKERS)
    ]
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

    until(lambda: all(each.count("acked") >= 20 for each in workers), pause)
    workers[0].end()
    leader = wait_for_leader(shard)
    kill_leader(shard)
    wait_for_leader(shard, but=leader)
    until(lambda: committed(shard) == dict.fromkeys(range(QUEUES), MESSAGES), pause)

    wanted = {(queue, offset) for queue in range(QUEUES) for offset in range(MESSAGES)}
    again = check_history(workers, wanted, killed=1)
    # Also a message that was only ahead of the program that was killed has had an attempt.
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
