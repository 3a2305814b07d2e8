"""Queues come to a consumer and go, and no message is lost or given twice."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.client.consume import assigned_queues
from raymq.client.consume.assigned_queues import AssignedQueues
from raymq.client.consume.shard_reader import FetchedRecords, ReadState, ShardReader
from raymq.client.messages.received import received_messages
from raymq.store.base.clock import Clock
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeCluster
from tests.support.waiting import until

QUEUES, SHARDS, MESSAGES = 4, 2, 30
Make = Callable[[], AssignedQueues]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    made = FakeCluster(SHARDS)
    made.create_topic("t", queues=QUEUES)
    for queue in range(QUEUES):
        put(made, queue, range(MESSAGES))
    yield made
    made.close()


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Make]:
    """Consumers that read two messages of a queue at a time."""
    made: list[AssignedQueues] = []

    def assigned() -> AssignedQueues:
        state = ReadState("t", 1 << 20, 2, 30_000)
        made.append(
            AssignedQueues(
                cluster.routes(), state, Clock(), read_from="leader", unavailable_timeout_ms=30_000
            )
        )
        return made[-1]

    yield assigned
    for each in made:
        each.end()
        each.join()


def pause() -> None:
    threading.Event().wait(0.001)


def put(cluster: FakeCluster, queue: int, numbers: range) -> None:
    rows = batch([b"%d:%d" % (queue, number) for number in numbers])
    put_one(cluster.backends[shard_of(queue)], PutRequest("t", queue, rows, None, 0, 0, "quorum"))


def shard_of(queue: int) -> int:
    return queue % SHARDS


def take(assigned: AssignedQueues, count: int) -> list[bytes]:
    """At most `count` messages, of one queue."""
    taken: list[FetchedRecords] = []
    found = assigned.take(taken, count, 10.0)
    return (
        []
        if found is None
        else [message.body for message in received_messages(found.shard, found.records)]
    )


def test_queues_are_read_from_where_they_were_added(make: Make) -> None:
    assigned = make()
    assigned.add({0: 28, 1: 29}, shard_of)
    got: set[bytes] = set()
    until(lambda: len(got) == 3, lambda: got.update(take(assigned, 1)))
    assert got == {b"0:28", b"0:29", b"1:29"}
    assert assigned.positions == {0: 30, 1: 30}
    assert assigned.shards == [0, 1]


def test_each_position_has_a_shard_while_queues_are_added(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that commits asks for the shards without the lock."""
    assigned, seen = make(), []

    def look(*arguments: Any, **options: Any) -> ShardReader:
        seen.append({queue: assigned.shard_of(queue) for queue in assigned.positions})
        return ShardReader(*arguments, **options)

    monkeypatch.setattr(assigned_queues, "ShardReader", look)
    assigned.add({0: 0, 1: 0, 2: 0, 3: 0}, shard_of)
    assert seen == [{0: 0, 1: 1, 2: 0, 3: 1}] * SHARDS


def test_a_revoked_queue_gives_nothing_more_and_says_how_far_it_was_taken(make: Make) -> None:
    assigned = make()
    assigned.add({0: 0, 2: 0}, shard_of)
    # Both queues were read ahead.
    state = assigned.state
    until(lambda: {each.queue_id for each in state.unread} == {0, 2}, pause)
    first = take(assigned, 1)
    queue = int(first[0].split(b":")[0])
    assert assigned.revoke([queue]) == {queue: 1}
    other = 2 - queue
    got: list[bytes] = []
    until(lambda: len(got) == MESSAGES, lambda: got.extend(take(assigned, 5)))
    assert got == [b"%d:%d" % (other, number) for number in range(MESSAGES)]
    assert assigned.positions == {other: MESSAGES}
    with pytest.raises(Rejected, match=rf"reads the queues \[{other}\], not {queue}"):
        assigned.seek(queue, 0, is_chosen=True)


def test_messages_that_iteration_did_not_return_go_with_their_queue(make: Make) -> None:
    assigned = make()
    assigned.add({0: 0}, shard_of)
    message = assigned.next_message(500, 10.0)
    assert message is not None
    assert assigned.revoke([0]) == {0: 1}
    assert assigned.next_message(500, 0.0) is None
    assigned.add({0: 1}, shard_of)
    message = assigned.next_message(500, 10.0)
    assert message is not None
    assert message.body == b"0:1"


def test_the_failure_of_a_revoked_queue_is_forgotten(make: Make) -> None:
    assigned = make()
    assigned.add({0: 99, 1: 0}, shard_of)
    until(lambda: 0 in assigned.state.queue_errors, pause)
    with pytest.raises(OffsetOutOfRange):
        take(assigned, 9)
    assert assigned.revoke([0]) == {0: 99}
    while assigned.positions[1] < MESSAGES:
        take(assigned, 9)


def test_either_all_named_queues_are_revoked_or_none(make: Make) -> None:
    assigned = make()
    assigned.add({0: 0, 1: 0}, shard_of)
    with pytest.raises(Rejected, match="not 3"):
        assigned.revoke([0, 3])
    assert set(assigned.positions) == {0, 1}
    assert assigned.revoke([0, 1]) == {0: 0, 1: 0}


@pytest.mark.parametrize("seed", range(20))
def test_queues_that_move_between_two_consumers_lose_and_double_nothing(
    make: Make, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    two = [make(), make()]
    two[0].add(dict.fromkeys(range(QUEUES), 0), shard_of)
    got: dict[int, list[bytes]] = {queue: [] for queue in range(QUEUES)}

    def step() -> None:
        if rng.random() < 0.3:
            giver, taker = rng.sample(two, 2)
            held = sorted(giver.positions)
            moved = rng.sample(held, rng.randint(0, len(held)))
            taker.add(giver.revoke(moved), shard_of)
        each = rng.choice(two)
        if rng.random() < 0.3:
            message = each.next_message(rng.randint(1, 5), 0.01)
            bodies = [] if message is None else [message.body]
        else:
            taken: list[FetchedRecords] = []
            found = each.take(taken, rng.randint(1, 5), 0.01)
            bodies = (
                []
                if found is None
                else [message.body for message in received_messages(found.shard, found.records)]
            )
        for body in bodies:
            got[int(body.split(b":")[0])].append(body)

    until(lambda: sum(map(len, got.values())) >= QUEUES * MESSAGES, step)
    for queue, bodies in got.items():
        assert bodies == [b"%d:%d" % (queue, number) for number in range(MESSAGES)]
