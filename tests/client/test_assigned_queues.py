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
from raymq.store.state.topics import QueueKey
from tests.support import tier
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeCluster
from tests.support.waiting import until

SHARDS, MESSAGES = 2, 30
#: queues of two topics, on both shards
QUEUES = [("t", 0), ("t", 1), ("u", 0), ("u", 1)]
A, B, C, D = QUEUES
Make = Callable[[], AssignedQueues]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    made = FakeCluster(SHARDS)
    made.create_topic("t", queues=2)
    made.create_topic("u", queues=2)
    for key in QUEUES:
        put(made, key, range(MESSAGES))
    yield made
    made.close()


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Make]:
    """Consumers that read two messages of a queue at a time."""
    made: list[AssignedQueues] = []

    def assigned() -> AssignedQueues:
        state = ReadState(1 << 20, 2, 30_000)
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


def body(key: QueueKey, number: int) -> bytes:
    return f"{key[0]}{key[1]}:{number}".encode()


def key_of(found: bytes) -> QueueKey:
    name = found.decode().partition(":")[0]
    return name[0], int(name[1:])


def put(cluster: FakeCluster, key: QueueKey, numbers: range) -> None:
    rows = batch([body(key, number) for number in numbers])
    put_one(cluster.backends[shard_of(key)], PutRequest(*key, rows, None, 0, 0, "quorum"))


def shard_of(key: QueueKey) -> int:
    return key[1] % SHARDS


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
    assigned.add({A: 28, D: 29}, shard_of)
    got: set[bytes] = set()
    until(lambda: len(got) == 3, lambda: got.update(take(assigned, 1)))
    assert got == {body(A, 28), body(A, 29), body(D, 29)}
    assert assigned.positions == {A: 30, D: 30}
    assert assigned.shards == [0, 1]


def test_each_position_has_a_shard_while_queues_are_added(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that commits asks for the shards without the lock."""
    assigned, seen = make(), []

    def look(*arguments: Any, **options: Any) -> ShardReader:
        seen.append({key: assigned.shard_of(key) for key in assigned.positions})
        return ShardReader(*arguments, **options)

    monkeypatch.setattr(assigned_queues, "ShardReader", look)
    assigned.add(dict.fromkeys(QUEUES, 0), shard_of)
    assert seen == [{A: 0, B: 1, C: 0, D: 1}] * SHARDS


def test_the_topics_of_a_shard_are_read_by_one_thread(make: Make, cluster: FakeCluster) -> None:
    assigned = make()
    assigned.add({A: 0, C: 0}, shard_of)
    got: list[bytes] = []
    until(lambda: len(got) == 2 * MESSAGES, lambda: got.extend(take(assigned, 5)))
    assert len(assigned._readers) == 1
    for key in (A, C):
        assert [each for each in got if key_of(each) == key] == [
            body(key, number) for number in range(MESSAGES)
        ]
    # A fetch that waits is answered for each of them.
    put(cluster, C, range(MESSAGES, MESSAGES + 1))
    assert take(assigned, 5) == [body(C, MESSAGES)]
    put(cluster, A, range(MESSAGES, MESSAGES + 1))
    assert take(assigned, 5) == [body(A, MESSAGES)]


def test_a_revoked_queue_gives_nothing_more_and_says_how_far_it_was_taken(make: Make) -> None:
    assigned = make()
    assigned.add({A: 0, C: 0}, shard_of)
    # Both queues were read ahead.
    state = assigned.state
    until(lambda: {each.key for each in state.unread} == {A, C}, pause)
    key = key_of(take(assigned, 1)[0])
    assert assigned.revoke([key]) == {key: 1}
    other = C if key == A else A
    got: list[bytes] = []
    until(lambda: len(got) == MESSAGES, lambda: got.extend(take(assigned, 5)))
    assert got == [body(other, number) for number in range(MESSAGES)]
    assert assigned.positions == {other: MESSAGES}
    text = rf"reads the queues \[0\] of {other[0]}, not queue 0 of {key[0]}"
    with pytest.raises(Rejected, match=text):
        assigned.seek(key, 0, is_chosen=True)


def test_messages_that_iteration_did_not_return_go_with_their_queue(make: Make) -> None:
    assigned = make()
    assigned.add({A: 0}, shard_of)
    message = assigned.next_message(500, 10.0)
    assert message is not None
    assert assigned.revoke([A]) == {A: 1}
    assert assigned.next_message(500, 0.0) is None
    assigned.add({A: 1}, shard_of)
    message = assigned.next_message(500, 10.0)
    assert message is not None
    assert message.body == body(A, 1)


def test_the_failure_of_a_revoked_queue_is_forgotten(make: Make) -> None:
    assigned = make()
    assigned.add({A: 99, B: 0}, shard_of)
    until(lambda: A in assigned.state.queue_errors, pause)
    with pytest.raises(OffsetOutOfRange):
        take(assigned, 9)
    assert assigned.revoke([A]) == {A: 99}
    while assigned.positions[B] < MESSAGES:
        take(assigned, 9)


def test_either_all_named_queues_are_revoked_or_none(make: Make) -> None:
    assigned = make()
    assigned.add({A: 0, B: 0}, shard_of)
    with pytest.raises(Rejected, match="not queue 1 of u"):
        assigned.revoke([A, D])
    assert set(assigned.positions) == {A, B}
    assert assigned.revoke([A, B]) == {A: 0, B: 0}


def test_a_paused_queue_gives_nothing_and_the_others_go_on(make: Make) -> None:
    assigned = make()
    assigned.add({A: 0, C: 0}, shard_of)
    until(lambda: {each.key for each in assigned.state.unread} == {A, C}, pause)
    # What iteration has taken and not returned is not lost.
    message = assigned.next_message(500, 10.0)
    assert message is not None
    key = message.topic, message.queue_id
    other = C if key == A else A
    assigned.pause([key])
    got: list[bytes] = []
    until(lambda: len(got) == MESSAGES, lambda: got.extend(take(assigned, 5)))
    assert got == [body(other, number) for number in range(MESSAGES)]
    assert assigned.take([], 5, 0.0) is None
    assert assigned.positions == {key: 1, other: MESSAGES}

    assigned.resume([key])
    got.clear()
    until(lambda: len(got) == MESSAGES - 1, lambda: got.extend(take(assigned, 5)))
    assert got == [body(key, number) for number in range(1, MESSAGES)]


def test_the_failure_of_a_paused_queue_waits_for_its_resumption(make: Make) -> None:
    assigned = make()
    assigned.add({A: 99, B: 0}, shard_of)
    until(lambda: A in assigned.state.queue_errors, pause)
    assigned.pause([A])
    while assigned.positions[B] < MESSAGES:
        take(assigned, 9)
    # It does not end the wait either.
    assert assigned.take([], 9, 0.01) is None
    assigned.resume([A])
    with pytest.raises(OffsetOutOfRange):
        take(assigned, 9)


def test_a_paused_queue_can_be_sought_and_revoked(make: Make) -> None:
    assigned = make()
    assigned.add({A: 0, B: 0}, shard_of)
    assigned.pause([A, B])
    assigned.seek(A, 28, is_chosen=True)
    assert assigned.revoke([B]) == {B: 0}
    assert assigned.state.paused == {A}
    assert assigned.take([], 9, 0.0) is None
    assigned.resume([A])
    assert take(assigned, 9) == [body(A, 28), body(A, 29)]
    # A queue that comes again is not paused.
    assigned.add({B: 29}, shard_of)
    assert take(assigned, 9) == [body(B, 29)]


@pytest.mark.parametrize("seed", range(tier.rounds("RAYMQ_MOVES", thorough=20, quick=6)))
def test_queues_that_move_between_two_consumers_lose_and_double_nothing(
    make: Make, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    two = [make(), make()]
    two[0].add(dict.fromkeys(QUEUES, 0), shard_of)
    got: dict[QueueKey, list[bytes]] = {key: [] for key in QUEUES}

    def step() -> None:
        if rng.random() < 0.3:
            giver, taker = rng.sample(two, 2)
            held = sorted(giver.positions)
            moved = rng.sample(held, rng.randint(0, len(held)))
            taker.add(giver.revoke(moved), shard_of)
        each = rng.choice(two)
        if rng.random() < 0.3:
            held = sorted(each.positions)
            change = rng.choice([each.pause, each.resume, each.resume])
            change(rng.sample(held, rng.randint(0, len(held))))
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
        for each_body in bodies:
            got[key_of(each_body)].append(each_body)

    until(lambda: sum(map(len, got.values())) >= len(QUEUES) * MESSAGES, step)
    for key, bodies in got.items():
        assert bodies == [body(key, number) for number in range(MESSAGES)]
