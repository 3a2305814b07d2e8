"""Dead letters go back on three replicas, while the leader is killed again and again in the middle."""

from __future__ import annotations

import threading
from collections import Counter
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

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

NAME, GROUP = "redrives", "mailers"
#: in each queue
MESSAGES = 300
#: by one redrive; the leader is killed so often meanwhile
RATE, KILLS = 100, 2


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


def put(shard: ReplicatedShard, count: int, prefix: bytes) -> set[bytes]:
    sent = set()
    with shard.cluster.producer(acks="quorum") as producer:
        for number in range(count):
            for queue in range(QUEUES):
                body = b"%s %d %d" % (prefix, queue, number)
                producer.send(TOPIC, body, queue_id=queue)
                sent.add(body)
    return sent


def bury(shard: ReplicatedShard, group: str, sent: set[bytes]) -> None:
    """Let messages be dead letters; the group acknowledges others."""
    left, count = set(sent), 0
    with shard.cluster.workers(TOPIC, group=group, dlq_rate=None, max_attempts=1) as workers:
        while left:
            batch = workers.get_batch(500, timeout=60)
            bodies = batch.columns["body"].to_pylist()
            assert bodies, f"{len(left)} messages did not come"
            batch.nack()
            left -= set(bodies)
            count += len(bodies)
        # One step copies 64, and the next request for messages the others.
        until(lambda: left_of(shard, group) == count, lambda: workers.get_batch(timeout=0.1))


def counted(shard: ReplicatedShard, sent: set[bytes]) -> Counter[bytes]:
    """How often each of these messages is in the topic."""
    ends = shard.cluster.describe_topic(TOPIC)["queues"]
    found = Counter[bytes]()
    with shard.cluster.consumer(TOPIC, start="earliest") as consumer:

        def poll() -> None:
            found.update(each.body for each in consumer.poll(1_000, timeout=0.5))

        until(
            lambda: all(consumer.position(each["queue_id"]) >= each["max_offset"] for each in ends),
            poll,
        )
    return Counter({body: count for body, count in found.items() if body in sent})


def test_dead_letters_go_back_once_while_leaders_are_killed(shard: ReplicatedShard) -> None:
    sent = put(shard, MESSAGES, b"kills")
    bury(shard, GROUP, sent)
    reports: list[dict[str, object]] = []
    threads = [
        threading.Thread(target=lambda: reports.append(shard.cluster.redrive(GROUP, rate=RATE)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for kill in range(1, KILLS + 1):
        goal = len(sent) * (KILLS + 1 - kill) // (KILLS + 1)
        until(lambda goal=goal: left_of(shard, GROUP) <= goal, pause)
        leader = wait_for_leader(shard)
        kill_leader(shard)
        wait_for_leader(shard, but=leader)
    for thread in threads:
        thread.join()
    assert sum(int(str(each["redriven"])) for each in reports) == len(sent), reports
    assert counted(shard, sent) == dict.fromkeys(sent, 2)
    assert shard.cluster.dead_letter_groups() == {}


def left_of(shard: ReplicatedShard, group: str) -> int:
    found = shard.cluster.dead_letter_groups(group)
    return int(found[group]["count"]) if found else 0


def test_a_leader_that_dies_before_its_answer_has_put_back_once(
    shard: ReplicatedShard, failpoints: ArmedFailpoints
) -> None:
    sent = put(shard, 1, b"points")
    bury(shard, "points", sent)
    failpoints.arm("groups.redrive_appended")
    report = shard.cluster.redrive("points")
    assert not failpoints.is_armed("groups.redrive_appended")
    # Also what was in the topic before.
    assert report["refused"] == []
    assert report["by_others"] == 0
    assert counted(shard, sent) == dict.fromkeys(sent, 2)
