"""Consumers of several topics, by name and by pattern, against shards in memory with real Flight."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import raymq
from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.wanted_topics import WantedTopics
from raymq.client.transport import topic_routes
from raymq.store.base.errors import Fenced, Rejected
from raymq.store.groups.members import matches
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeCluster
from tests.support.waiting import until

Make = Callable[..., Consumer]
SHARDS = 2
TOPICS = ["orders-eu", "orders-us"]
ALL = [(topic, queue_id) for topic in TOPICS for queue_id in range(2)]
SESSION_S = 1.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(SHARDS)
    for topic in (*TOPICS, "bills"):
        cluster.create_topic(topic, queues=2)
    yield cluster
    cluster.close()


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Make]:
    made: list[Consumer] = []

    def consumer(topics: Any, **options: Any) -> Consumer:
        made.append(Consumer(cluster, topics, **{"start": "earliest", **options}))
        return made[-1]

    yield consumer
    for each in made:
        each.close()


def put(cluster: FakeCluster, key: tuple[str, int], *bodies: bytes) -> None:
    request = PutRequest(*key, batch(list(bodies)), None, 0, 0, "quorum")
    put_one(cluster.backends[key[1] % SHARDS], request)


def put_everywhere(cluster: FakeCluster) -> set[bytes]:
    for topic, queue_id in ALL:
        put(cluster, (topic, queue_id), f"{topic}{queue_id}".encode())
    return {f"{topic}{queue_id}".encode() for topic, queue_id in ALL}


def read(consumer: Consumer, count: int) -> set[bytes]:
    found: list[bytes] = []
    until(lambda: len(found) >= count, lambda: found.extend(m.body for m in consumer.poll(10, 0.1)))
    assert len(found) == count
    return set(found)


@pytest.mark.parametrize("topics", [TOPICS, raymq.matching("orders-*")], ids=["names", "pattern"])
@pytest.mark.parametrize("group", [None, "g"])
def test_it_reads_every_queue_of_each_topic(
    cluster: FakeCluster, make: Make, topics: Any, group: str | None
) -> None:
    sent = put_everywhere(cluster)
    consumer = make(topics, group=group)
    assert read(consumer, len(ALL)) == sent
    assert consumer.positions() == dict.fromkeys(ALL, 1)
    assert set(consumer.assignment()) == set(ALL)
    # One thread and one stream for each shard, whatever the number of topics.
    assert len(consumer._assigned._readers) == SHARDS


def test_queues_are_named_with_their_topics(cluster: FakeCluster, make: Make) -> None:
    put_everywhere(cluster)
    consumer = make(TOPICS, group="g")
    read(consumer, len(ALL))
    consumer.commit({("orders-eu", 0): 1, ("orders-us", 1): 0})
    assert consumer.committed() == {("orders-eu", 0): 1, ("orders-us", 1): 0}
    consumer.commit()
    assert consumer.committed() == dict.fromkeys(ALL, 1)

    consumer.seek(("orders-us", 1), 0)
    assert consumer.position(("orders-us", 1)) == 0
    assert read(consumer, 1) == {b"orders-us1"}
    consumer.seek(("orders-us", 1), "earliest")
    assert read(consumer, 1) == {b"orders-us1"}
    with pytest.raises(Rejected, match=r"name a queue as \(topic, queue_id\), not 1"):
        consumer.seek(1, 0)
    with pytest.raises(Rejected, match="not queue 0 of bills"):
        consumer.position(("bills", 0))


def test_a_consumer_of_one_topic_takes_both_kinds_of_names(
    cluster: FakeCluster, make: Make
) -> None:
    put_everywhere(cluster)
    consumer = make("orders-eu")
    read(consumer, 2)
    consumer.seek(0, 0)
    consumer.seek(("orders-eu", 1), 0)
    assert consumer.positions() == {0: 0, 1: 0}


def test_members_share_the_queues_of_all_topics(cluster: FakeCluster, make: Make) -> None:
    sent = put_everywhere(cluster)
    members = [
        make(topics, group="g", session_timeout_s=SESSION_S)
        for topics in (TOPICS, raymq.matching("*-eu"), raymq.matching("orders-*"))
    ]

    def owned() -> list[tuple[str, int]]:
        return sorted(key for each in members for key in each.assignment())

    def is_shared() -> bool:
        return owned() == ALL and all(each.assignment() for each in members)

    found: list[bytes] = []

    def poll() -> None:
        found.extend(m.body for each in members for m in each.poll(10, 0.02))

    until(is_shared, poll)
    assert {topic for topic, _ in members[1].assignment()} == {"orders-eu"}
    until(lambda: len(set(found)) == len(ALL), poll)
    assert set(found) == sent


def test_a_topic_of_the_pattern_that_is_made_later_is_read(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_routes, "TOPICS_AGE_S", 0.0)
    member = make(raymq.matching("orders-*"), group="g", session_timeout_s=SESSION_S)
    reader = make(raymq.matching("orders-*"))
    cluster.create_topic("orders-jp", queues=1)
    cluster.create_topic("others", queues=1)
    put(cluster, ("orders-jp", 0), b"jp")
    # A reader looks after each fetch.
    put(cluster, ("orders-eu", 0), b"eu")
    assert read(reader, 2) == {b"jp", b"eu"}
    assert read(member, 2) == {b"jp", b"eu"}
    assert set(member.assignment()) == {*ALL, ("orders-jp", 0)}


def test_named_queues_of_several_topics(cluster: FakeCluster, make: Make) -> None:
    put_everywhere(cluster)
    consumer = make(TOPICS, queues=[("orders-eu", 1), ("orders-us", 0)], group="g")
    assert read(consumer, 2) == {b"orders-eu1", b"orders-us0"}
    consumer.commit()
    assert consumer.committed() == {("orders-eu", 1): 1, ("orders-us", 0): 1}
    with pytest.raises(Rejected, match="name a queue as"):
        make(TOPICS, queues=[0])


def test_start_names_queues_of_several_topics(cluster: FakeCluster, make: Make) -> None:
    put_everywhere(cluster)
    start = {**dict.fromkeys(ALL, 1), ("orders-us", 0): 0}
    consumer = make(TOPICS, start=start)
    assert read(consumer, 1) == {b"orders-us0"}
    del start["orders-us", 0]
    with pytest.raises(Rejected, match=r"lacks some of \[0, 1\] of orders-us"):
        make(TOPICS, start=start)


def test_a_batch_is_of_one_queue_of_one_topic(cluster: FakeCluster, make: Make) -> None:
    put_everywhere(cluster)
    consumer = make(TOPICS)
    found = [consumer.poll_batch(10, 10) for _ in ALL]
    assert sorted((b["topic"][0].as_py(), b["queue_id"][0].as_py()) for b in found) == ALL
    empty = consumer.poll_batch(10, 0)
    assert (empty.num_rows, empty.schema) == (0, found[0].schema)
    assert isinstance(empty, pa.RecordBatch)


def test_paused_queues_wait(cluster: FakeCluster, make: Make) -> None:
    put_everywhere(cluster)
    consumer = make(TOPICS, group="g")
    consumer.pause([("orders-eu", 0), ("orders-us", 1)])
    assert read(consumer, 2) == {b"orders-eu1", b"orders-us0"}
    assert consumer.paused() == [("orders-eu", 0), ("orders-us", 1)]
    consumer.resume([("orders-eu", 0)])
    assert read(consumer, 1) == {b"orders-eu0"}
    consumer.pause()
    assert consumer.paused() == ALL
    assert consumer.poll(10, 0) == []
    assert set(consumer.assignment()) == set(ALL)
    consumer.resume()
    assert read(consumer, 1) == {b"orders-us1"}
    with pytest.raises(Rejected, match="not queue 9 of bills"):
        consumer.pause([("bills", 9)])


def test_an_async_consumer_reads_several_topics(cluster: FakeCluster) -> None:
    sent = put_everywhere(cluster)

    async def run() -> None:
        options: Any = {"group": "g", "start": "earliest"}
        async with AsyncConsumer(cluster, raymq.matching("orders-*"), **options) as consumer:
            await consumer.pause([("orders-eu", 0)])
            assert consumer.paused() == [("orders-eu", 0)]
            found: set[bytes] = set()
            while len(found) < len(ALL) - 1:
                found |= {message.body for message in await consumer.poll(10, 5)}
            await consumer.resume()
            found |= {message.body for message in await consumer.poll(10, 5)}
            assert found == sent
            await consumer.seek(("orders-us", 0), 0)
            assert consumer.position(("orders-us", 0)) == 0
            await consumer.commit()
            assert await consumer.committed() == {**dict.fromkeys(ALL, 1), ("orders-us", 0): 0}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("topics", "text"),
    [
        ([], "has 0 topics"),
        (
            [f"t{number}" for number in range(1001)],
            "has 1001 topics; a consumer may read 1 to 1000",
        ),
        (["orders-eu", "no such"], "no such"),
        (["orders-eu", "missing"], "'missing' does not exist"),
        (7, "the topic is 7; give its name"),
        ([7], "the topic is 7, a int; give its name"),
    ],
)
@pytest.mark.parametrize("group", [None, "g"])
def test_wrong_topics_are_refused(make: Make, topics: Any, text: str, group: str | None) -> None:
    with pytest.raises(Rejected, match=text) as raised:
        make(topics, group=group)
    assert raised.value.fields["field"] == "topic"


@pytest.mark.parametrize("pattern", ["", "a.b", "a b", "x" * 256, 7, None])
def test_a_wrong_pattern_is_refused(pattern: Any) -> None:
    with pytest.raises(Rejected, match="the pattern") as raised:
        raymq.matching(pattern)
    assert raised.value.fields["field"] == "pattern"


@pytest.mark.parametrize(
    ("topic", "pattern", "expected"),
    [
        ("orders-eu", "orders-*", True),
        ("orders-", "orders-*", True),
        ("orders", "orders-*", False),
        ("my-orders-eu", "orders-*", False),
        ("my-orders-eu", "*orders*", True),
        ("orders", "orders", True),
        ("a|b", "a|*", True),
        ("%RETRY%g", "*", False),
        ("%RETRY%g", "%RETRY%*", True),
        ("rmq_sys_x", "*", False),
    ],
)
def test_what_a_pattern_matches(topic: str, pattern: str, expected: bool) -> None:
    assert matches(topic, pattern) is expected
    assert WantedTopics(raymq.matching(pattern)).has(topic) is expected


def test_a_hostile_pattern_costs_as_little_as_another() -> None:
    pattern = "*a" * 60 + "*b"
    began = time.process_time()
    assert not matches("a" * 127, pattern)
    assert matches("a" * 126 + "b", pattern)
    assert time.process_time() - began < 0.1


def test_random_patterns_match_what_fnmatch_says() -> None:
    random = Random(17)
    for _ in range(5_000):
        pattern = "".join(random.choices("ab*", k=random.randint(1, 8)))
        topic = "".join(random.choices("ab", k=random.randint(1, 8)))
        assert matches(topic, pattern) is fnmatchcase(topic, pattern), (topic, pattern)


# --- max_poll_interval_s --------------------------------------------------------------------------


def hold_up(consumer: Consumer, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so much time pass for a member since its last poll."""
    assert consumer._member is not None
    membership = consumer._member.membership
    polled_ms = membership._polled_ms
    assert polled_ms is not None
    monkeypatch.setattr(membership, "_polled_ms", polled_ms - int(seconds * 1000))


def test_a_member_whose_program_does_not_poll_leaves_and_joins_again(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_everywhere(cluster)
    revoked: list[list[tuple[str, int]]] = []
    options: dict[str, Any] = {"group": "g", "session_timeout_s": SESSION_S}
    stuck = make(TOPICS, max_poll_interval_s=2, on_revoked=revoked.append, **options)
    read(stuck, len(ALL))
    hold_up(stuck, 2, monkeypatch)
    other = make(TOPICS, **options)
    until(lambda: len(other.assignment()) == len(ALL), lambda: other.poll(10, 0.05))
    assert stuck.assignment() == {}
    with pytest.raises(Fenced, match="orders-eu and .* of orders-us belong to another member"):
        stuck.commit()

    # Its next poll lets it take part again.
    until(
        lambda: len(stuck.assignment()) == len(other.assignment()) == 2,
        lambda: [each.poll(10, 0.02) for each in (stuck, other)],
    )
    assert revoked == [ALL]


def test_an_instance_joins_again_although_its_last_heartbeat_was_lost(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"group": "g", "session_timeout_s": SESSION_S, "instance_id": "i"}
    stuck = make(TOPICS, max_poll_interval_s=2, **options)
    until(lambda: len(stuck.assignment()) == len(ALL), lambda: stuck.poll(10, 0.02))
    assert stuck._member is not None
    membership = stuck._member.membership
    with membership._changed:
        hold_up(stuck, 3, monkeypatch)
        assert membership.next_beat().is_leaving
        membership.due_ms = None
    until(lambda: len(stuck.assignment()) == len(ALL), lambda: stuck.poll(10, 0.02))


def test_a_program_that_waits_in_poll_does_poll(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make(TOPICS, group="g", session_timeout_s=SESSION_S, max_poll_interval_s=2)
    hold_up(member, 1, monkeypatch)
    assert member._member is not None
    membership, seen = member._member.membership, threading.Event()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(member.poll(10, None)))
    thread.start()
    until(lambda: membership._polled_ms is None, lambda: seen.wait(0.01))
    beat = membership.next_beat()
    assert not beat.is_leaving
    put(cluster, ALL[0], b"x")
    thread.join()
    assert [message.body for message in found] == [b"x"]
    assert membership._polled_ms is not None


def test_max_poll_interval_s_is_for_members(make: Make) -> None:
    with pytest.raises(Rejected, match="max_poll_interval_s is for members of a group"):
        make(TOPICS, max_poll_interval_s=5)
    with pytest.raises(Rejected, match="max_poll_interval_s"):
        make(TOPICS, group="g", max_poll_interval_s=1)
