"""Consumers that share a topic as members of a group, against shards in memory with real Flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.client.consume import consumer as consumer_module
from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.heartbeats import Heartbeats
from raymq.client.messages.received import received_messages
from raymq.store.base.errors import Fenced, Rejected
from raymq.store.records.requests import PutRequest
from raymq.store.state.shard_state import TopicInfo
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeCluster
from tests.support.waiting import until

Make = Callable[..., Consumer]
QUEUES = 4
#: heartbeats come every 0.2 s
SESSION_S = 1.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(2)
    cluster.create_topic("t", queues=QUEUES)
    yield cluster
    cluster.close()


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Make]:
    made: list[Consumer] = []

    def consumer(**options: Any) -> Consumer:
        wanted = {"group": "g", "start": "earliest", "session_timeout_s": SESSION_S, **options}
        made.append(Consumer(cluster, "t", **wanted))
        return made[-1]

    yield consumer
    for each in made:
        each.close()


def put(cluster: FakeCluster, queue: int, *bodies: bytes) -> None:
    put_one(
        cluster.backends[queue % 2],
        PutRequest("t", queue, batch(list(bodies)), None, 0, 0, "quorum"),
    )


def queues_of(consumer: Consumer) -> list[int]:
    return sorted(queue_id for _, queue_id in consumer.assignment())


def share(*consumers: Consumer) -> None:
    """Poll until all queues have one owner, and no member has two more than another."""
    found: list[Any] = []

    def is_shared() -> bool:
        owned = [queues_of(each) for each in consumers]
        counts = [len(each) for each in owned]
        return sum(counts) == QUEUES and max(counts) - min(counts) <= 1

    until(is_shared, lambda: found.extend(each.poll(10, 0.05) for each in consumers))
    assert not any(found), "messages came while the queues moved"


def pause() -> None:
    """Let the threads of consumers work."""
    threading.Event().wait(0.02)


def stop_heartbeats(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process hang, as far as its group sees it."""
    member = consumer._member
    assert member is not None
    membership = member.membership
    monkeypatch.setattr(membership, "due_ms", None)
    monkeypatch.setattr(membership, "take_answer", lambda *answer: None)


def test_a_member_that_is_alone_reads_every_queue(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"a")
    put(cluster, 3, b"b")
    consumer = make()
    assert queues_of(consumer) == [0, 1, 2, 3]
    found = consumer.poll(10, 5) + consumer.poll(10, 5)
    assert sorted(message.body for message in found) == [b"a", b"b"]


def test_each_message_comes_to_one_member(cluster: FakeCluster, make: Make) -> None:
    consumers = [make(), make(), make()]
    share(*consumers)
    for queue_id in range(QUEUES):
        put(cluster, queue_id, b"%d" % queue_id)
    found: list[bytes] = []
    until(
        lambda: len(found) >= QUEUES,
        lambda: found.extend(m.body for each in consumers for m in each.poll(10, 0.1)),
    )
    assert sorted(found) == [b"0", b"1", b"2", b"3"]


def test_a_member_commits_before_it_gives_a_queue_up(cluster: FakeCluster, make: Make) -> None:
    for queue_id in range(QUEUES):
        put(cluster, queue_id, b"x", b"y")
    events: list[tuple[str, list[int]]] = []

    def on_revoked(queues: list[tuple[str, int]]) -> None:
        events.append(("revoked", [queue_id for _, queue_id in queues]))
        first.commit()

    first = make(on_revoked=on_revoked)
    read = 0
    while read < 2 * QUEUES:
        read += len(first.poll(10, 5))
    second = make(on_assigned=lambda queues: events.append(("assigned", [q for _, q in queues])))
    share(first, second)
    assert events[0] == ("revoked", queues_of(second))
    assert {kind for kind, _ in events[1:]} == {"assigned"}
    assert sorted(queue_id for _, queues in events[1:] for queue_id in queues) == queues_of(second)
    assert second.positions() == dict.fromkeys(queues_of(second), 2)


def test_a_member_that_closes_leaves_its_queues_at_once(make: Make) -> None:
    first, second = make(session_timeout_s=60), make()
    first.close()
    share(second)
    assert queues_of(second) == [0, 1, 2, 3]


def test_a_silent_member_reads_no_more_and_its_commit_is_fenced(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, 0, b"a", b"b")
    silent = make()
    assert [message.offset for message in silent.poll(1, 5)] == [0]
    stop_heartbeats(silent, monkeypatch)
    other = make()
    until(lambda: queues_of(other) == [0, 1, 2, 3], pause)

    assert silent.assignment() == {}
    assert silent.poll(10, 0.2) == []
    with pytest.raises(Fenced, match=r"the queues \[0, 1, 2, 3\] of t belong to another member"):
        silent.commit()
    assert other.committed() == {}
    assert [message.offset for message in other.poll(10, 5)] == [0, 1]


def test_a_member_that_was_removed_joins_again(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = make()
    with monkeypatch.context() as hanging:
        stop_heartbeats(removed, hanging)
        other = make()
        share(other)
    member = removed._member
    assert member is not None
    member.membership.due_ms = 0
    member.membership._heartbeats.wake()
    share(removed, other)
    assert len(queues_of(removed)) == 2


def test_a_newer_process_of_an_instance_takes_the_place_of_the_older_one(make: Make) -> None:
    older = make(instance_id="i")
    newer = make(instance_id="i")
    with pytest.raises(Fenced, match="instance_id 'i'"):
        until(lambda: False, lambda: older.poll(1, 0.1))
    share(newer)
    with pytest.raises(Fenced):
        older.poll(1, 0.1)


def test_a_place_is_kept_for_the_next_process_of_an_instance(make: Make) -> None:
    first, other = make(instance_id="i", session_timeout_s=10), make()
    share(first, other)
    kept = queues_of(first)
    first.close(keep_place=True)
    other.poll(1, 0.5)
    assert len(queues_of(other)) == 2
    assert queues_of(make(instance_id="i")) == kept


def test_a_seek_backwards_is_committed(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"a", b"b", b"c")
    consumer = make()
    assert len(consumer.poll(10, 5)) == 3
    consumer.commit()
    assert consumer.committed()[0] == 3
    consumer.seek(0, 1)
    consumer.commit()
    assert consumer.committed()[0] == 1


def test_queues_that_a_topic_gets_later_are_given_to_members(
    cluster: FakeCluster, make: Make
) -> None:
    consumer = make()
    for backend in cluster.backends:
        backend.state.topics["t"] = TopicInfo("t", 6, (0, 1), former_queues=(QUEUES,))
    put(cluster, 5, b"new")
    found: list[Any] = []
    until(lambda: bool(found), lambda: found.extend(consumer.poll(10, 0.1)))
    assert (found[0].queue_id, found[0].body) == (5, b"new")
    assert queues_of(consumer) == [0, 1, 2, 3, 4, 5]


def test_iteration_returns_nothing_of_a_queue_that_another_member_may_have(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, 0, b"a", b"b", b"c")
    consumer = make()
    message = consumer.next_message(5)
    assert message is not None
    stop_heartbeats(consumer, monkeypatch)
    until(lambda: consumer.assignment() == {}, pause)
    assert consumer.next_message(0.1) is None
    assert consumer.position(0) == 1


def test_members_of_a_process_share_the_thread_of_their_heartbeats(make: Make) -> None:
    before = {each.name for each in threading.enumerate()}
    consumers = [make(group=f"g{number}") for number in range(6)]
    names = [each.name for each in threading.enumerate() if each.name not in before]
    assert sum(name.startswith("raymq-heartbeats") for name in names) <= 2
    for each in consumers:
        each.close()
    assert not Heartbeats._made


def test_an_asynchronous_member_commits_in_its_callback(cluster: FakeCluster, make: Make) -> None:
    for queue_id in range(QUEUES):
        put(cluster, queue_id, b"x")
    events: list[str] = []

    async def read() -> None:
        async def on_revoked(queues: list[tuple[str, int]]) -> None:
            events.append(f"revoked {len(queues)}")
            await consumer.commit()

        consumer = AsyncConsumer(
            cluster,  # type: ignore[arg-type]
            "t",
            group="g",
            start="earliest",
            session_timeout_s=SESSION_S,
            on_revoked=on_revoked,
            on_assigned=lambda queues: events.append(f"assigned {len(queues)}"),
        )
        async with consumer:
            read = 0
            while read < QUEUES:
                read += len(await consumer.poll(10, 5))
            other = await asyncio.to_thread(make)
            while len(queues_of(other)) < 2:
                await consumer.poll(10, 0.05)
                await asyncio.to_thread(other.poll, 10, 0.05)
            assert other.positions() == dict.fromkeys(queues_of(other), 1)

    asyncio.run(read())
    assert events[:2] == ["assigned 4", "revoked 2"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"session_timeout_s": 0.5}, "session_timeout_s"),
        ({"session_timeout_s": 3600}, "session_timeout_s"),
        ({"revoke_timeout_s": -1}, "revoke_timeout_s"),
        ({"queues": [0], "instance_id": "i"}, "instance_id"),
        ({"group": None, "on_revoked": print}, "on_revoked"),
        ({"instance_id": "i" * 256}, "instance_id"),
        ({"start": None}, "start"),
    ],
)
def test_a_wrong_option_of_a_member_is_refused_by_name(make: Make, options, field) -> None:
    with pytest.raises(Rejected) as refused:
        make(**options)
    assert refused.value.field == field


def test_a_place_is_kept_for_an_instance_only(make: Make) -> None:
    with pytest.raises(Rejected, match="instance_id"):
        make().close(keep_place=True)


def test_a_consumer_with_queues_cannot_commit_what_a_member_has(make: Make) -> None:
    make()
    with pytest.raises(Rejected):
        make(queues=[0]).commit({0: 0})


def test_what_poll_has_taken_is_returned_before_its_queue_is_given_up(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, 1, b"a", b"b")
    consumer = make()
    until(lambda: consumer._assigned.state.ahead[1] > 0, pause)
    revoked: list[int] = []
    member = consumer._member
    assert member is not None
    member.on_revoked = lambda queues: revoked.append(member.positions().get(("t", 1), -1))

    def revoke_meanwhile(*arguments: Any) -> Any:
        membership = member.membership
        with membership._changed:
            membership._revoke([("t", 1)])
        return received_messages(*arguments)

    monkeypatch.setattr(consumer_module, "received_messages", revoke_meanwhile)
    assert [message.body for message in consumer.poll(100, 5)] == [b"a", b"b"]
    assert revoked == []
    monkeypatch.setattr(consumer_module, "received_messages", received_messages)
    consumer.poll(1, 0)
    assert revoked == [2]


def test_an_older_process_that_was_removed_does_not_replace_the_newer_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = make(instance_id="i")
    with monkeypatch.context() as hanging:
        stop_heartbeats(older, hanging)
        newer = make(instance_id="i")
        until(lambda: queues_of(newer) == [0, 1, 2, 3], pause)
    member = older._member
    assert member is not None
    member.membership.due_ms = 0
    member.membership._heartbeats.wake()
    with pytest.raises(Fenced, match="instance_id 'i'"):
        until(lambda: False, lambda: older.poll(1, 0.1))
    until(lambda: queues_of(newer) == [0, 1, 2, 3], pause)


def test_an_instance_that_gives_a_queue_up_too_slowly_joins_again(make: Make) -> None:
    revoked: list[Any] = []

    def give_up_slowly(queues: Any) -> None:
        revoked.append(queues)
        until(lambda: len(memberships) > 1, note_membership)

    slow = make(instance_id="i", revoke_timeout_s=0.1, on_revoked=give_up_slowly)
    memberships: set[str] = set()

    def note_membership() -> None:
        assert slow._member is not None
        memberships.add(slow._member.membership._member.member_id)
        pause()

    note_membership()
    other = make()
    share(slow, other)
    assert revoked
    assert len(memberships) == 2


def test_a_consumer_with_queues_may_commit_after_the_member_has_closed(
    cluster: FakeCluster, make: Make
) -> None:
    put(cluster, 0, b"a")
    make().close()
    other = make(queues=[0])
    assert len(other.poll(10, 5)) == 1
    other.commit()
    assert other.committed() == {0: 1}


def test_a_callback_of_an_asynchronous_member_may_use_the_consumer(cluster: FakeCluster) -> None:
    put(cluster, 0, b"a", b"b")

    async def read() -> list[bytes]:
        async def on_assigned(queues: list[tuple[str, int]]) -> None:
            await consumer.seek(0, 1)

        consumer = AsyncConsumer(
            cluster,  # type: ignore[arg-type]
            "t",
            group="g",
            start="earliest",
            on_assigned=on_assigned,
        )
        async with consumer:
            return [message.body for message in await consumer.poll(10, 5)]

    assert asyncio.run(read()) == [b"b"]


def test_a_cancelled_poll_of_an_asynchronous_member_leaves_one_step_running(
    cluster: FakeCluster,
) -> None:
    put(cluster, 0, b"a")
    running: list[int] = []
    most: list[int] = []

    async def read() -> None:
        async def on_assigned(queues: list[tuple[str, int]]) -> None:
            running.append(1)
            most.append(len(running))
            await asyncio.sleep(0.2)
            running.pop()

        consumer = AsyncConsumer(
            cluster,  # type: ignore[arg-type]
            "t",
            group="g",
            start="earliest",
            on_assigned=on_assigned,
        )
        async with consumer:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consumer.poll(10, 5), 0.05)
            assert [message.body for message in await consumer.poll(10, 5)] == [b"a"]

    asyncio.run(read())
    assert most == [1]


def test_a_queue_that_not_every_shard_shows_yet_is_read_later(
    cluster: FakeCluster, make: Make
) -> None:
    consumer = make()
    more = TopicInfo("t", 6, (0, 1), former_queues=(QUEUES,))
    coordinator = consumer._member.membership._coordinator  # type: ignore[union-attr]
    cluster.backends[coordinator].state.topics["t"] = more
    until(lambda: consumer.poll(1, 0.05) == [] and len(queues_of(consumer)) >= QUEUES, pause)
    for backend in cluster.backends:
        backend.state.topics["t"] = more
    until(lambda: queues_of(consumer) == [0, 1, 2, 3, 4, 5], lambda: consumer.poll(1, 0.05))
