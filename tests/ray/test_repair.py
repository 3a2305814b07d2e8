"""Real processes: a message that rotted on the leader is read with the follower's bytes, and the file is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.replicated_shard import ASIDE, ReplicatedShard, pause, started_shard
from tests.support.waiting import until

#: more than one file of the log
BODIES = [b"pay %03d EUR " % number * 3000 for number in range(50)]
ROTTEN = 10


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(2, "repair") as world:
        yield world


@pytest.mark.thorough
def test_a_message_that_rotted_on_the_leader_is_read_and_repaired(shard: ReplicatedShard) -> None:
    with shard.cluster.producer() as producer:
        for body in BODIES:
            producer.send(ASIDE, body)
    first = f"commitlog/{0:020d}"
    path, twin = (shard.paths.replica(0, replica) / first for replica in (0, 1))
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(BODIES[ROTTEN]) + 5)
        file.write(b"rot")
    assert path.read_bytes() != twin.read_bytes()

    with shard.cluster.consumer(ASIDE, start="earliest") as consumer:
        found: list[bytes] = []
        until(
            lambda: len(found) >= len(BODIES),
            lambda: found.extend(message.body for message in consumer.poll(100, 5)),
        )
    assert found == BODIES
    until(lambda: path.read_bytes() == twin.read_bytes(), pause)
    until(lambda: shard.says(0, lambda facts: "repair" not in facts["failures"]), pause)
    status = shard.status(0)
    assert (status["repair"]["units"], status["repair"]["files"]) == (1, 1)
    assert status["metrics"]["repaired_units_total"] == 1
