"""`Cluster.add_queues`: where added queues go, what an interruption leaves, and the clients that run meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.consume.consumer import Consumer
from raymq.client.produce.producer import Producer
from raymq.client.topics.add_queues import TAKEN_PREFIX, add_queues, spread_over
from raymq.client.transport import topic_routes
from raymq.store.base.errors import RayMQError, Rejected, TopicWithOtherQueues, Unavailable
from raymq.store.state.shard_state import TopicInfo
from raymq.store.state.topics import check_more_queues
from tests.support.fake_backend import FakeCluster
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

# --- where they go --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "present", "count", "queues", "spread"),
    [
        (1, [0], 4, 8, [0]),
        (2, [0, 1], 4, 8, [0, 1]),
        # Four queues on two shards, and a third shard that came later.
        (3, [0, 1], 4, 6, [0, 1, 0, 1, 2, 2]),
        (3, [0, 1], 4, 9, [0, 1, 0, 1, 2, 2, 0, 1, 2]),
        (3, [2], 1, 4, [2, 0, 1]),
        (2, [0, 1], 3, 3, [0, 1]),
    ],
)
def test_added_queues_go_to_the_shards_with_the_fewest(
    shards: int, present: list[int], count: int, queues: int, spread: list[int]
) -> None:
    assert spread_over(shards, present, count, queues) == spread


# --- two steps ------------------------------------------------------------------------------------


class Shards:
    """Two shards that know topics. Calls fail after a number of steps."""

    def __init__(self, *topics: TopicInfo) -> None:
        self.shards = 2
        self.known = [{topic.name: topic for topic in topics} for _ in range(2)]
        self.left = 100
        self.used = 0

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "topics":
            return {name: topic.shown() for name, topic in self.known[shard].items()}
        assert op == "add_queues"
        self.left -= 1
        if self.left < 0:
            raise Unavailable("the operator's machine is gone")
        found = check_more_queues(
            args["name"],
            args["queues"],
            tuple(args["shards"]),
            self.known[shard],
            are_hidden=args["are_hidden"],
        )
        if found is not None:
            self.known[shard][found.name] = found
        return {"added": found is not None, "shards": self.shards}

    def learn_shards(self, count: int) -> None:
        self.shards = max(self.shards, count)

    def describe_topic(self, name: str) -> dict[str, Any]:
        return {"queues": [{"queue_id": 0, "max_offset": self.used}]}


def grow(shards: Any, queues: int, *, break_key_order: bool = False) -> bool:
    return add_queues(shards, "t", queues, break_key_order=break_key_order)


@pytest.mark.parametrize("steps", range(5))
def test_no_client_hears_of_a_queue_that_a_shard_does_not_know_wherever_the_call_ends(
    steps: int,
) -> None:
    shards = Shards(TopicInfo("t", 4, (0, 1)))
    shards.left = steps
    if steps < 4:
        with pytest.raises(Unavailable):
            grow(shards, 8)
    shown = max(known["t"].shown()["queues"] for known in shards.known)
    assert all(shown <= known["t"].queues for known in shards.known)

    shards.left = 100
    assert grow(shards, 8)
    assert [known["t"].shown()["queues"] for known in shards.known] == [8, 8]
    assert shards.known[0] == shards.known[1]
    assert not grow(shards, 8)


def test_a_topic_that_has_had_messages_gets_queues_only_if_the_order_of_keys_may_break() -> None:
    shards = Shards(TopicInfo("t", 4, (0, 1)))
    shards.used = 1
    with pytest.raises(Rejected, match="--break-key-order") as caught:
        grow(shards, 8)
    assert caught.value.field == "break_key_order"
    assert grow(shards, 8, break_key_order=True)
    # Nothing moves any more.
    assert not grow(shards, 8)


@pytest.mark.parametrize(
    ("topics", "words"),
    [
        ([], "does not exist: raymq topic create t --queues 8"),
        ([TopicInfo("t", 1, (0,)), TopicInfo(TAKEN_PREFIX + "t", 1, (0,))], "belongs to a raymq"),
    ],
)
def test_a_topic_that_is_not_there_or_belongs_to_a_queue_is_refused(
    topics: list[TopicInfo], words: str
) -> None:
    with pytest.raises(Rejected, match=words):
        grow(Shards(*topics), 8)


# --- clients --------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Clients look for added queues all the time."""
    monkeypatch.setattr(topic_routes, "TOPICS_AGE_S", 0.0)
    cluster = FakeCluster(2)
    cluster.create_topic("t", queues=2)
    yield cluster
    cluster.close()


def add(cluster: FakeCluster, queues: int = 4) -> None:
    for backend in cluster.backends:
        known = backend.state.topics["t"]
        backend.state.topics["t"] = replace(known, queues=queues, former_queues=(2,))


def send(producer: Producer, queue_id: int, body: bytes) -> None:
    producer.send("t", body, queue_id=queue_id).result(30)


def read(consumer: Consumer, count: int) -> set[tuple[int, bytes]]:
    found: set[tuple[int, bytes]] = set()
    until(
        lambda: len(found) >= count,
        lambda: found.update((each.queue_id, each.body) for each in consumer.poll(100, 1)),
    )
    return found


def test_producers_send_to_added_queues_and_consumers_read_them_from_their_first_message(
    cluster: FakeCluster,
) -> None:
    handle: Any = cluster
    with Producer(handle) as producer, closing(Consumer(handle, "t", start="latest")) as consumer:
        send(producer, 0, b"before")
        assert read(consumer, 1) == {(0, b"before")}
        add(cluster)
        sent: list[int] = []

        def send_when_known() -> None:
            try:
                send(producer, 3, b"added")
                sent.append(3)
            except Rejected:
                # It has not looked yet.
                send(producer, 0, b"more")

        until(lambda: bool(sent), send_when_known)
        send(producer, 2, b"added")
        found: set[tuple[int, bytes]] = set()
        until(
            lambda: {(2, b"added"), (3, b"added")} <= found,
            lambda: (send(producer, 1, b"more"), found.update(read(consumer, 1))),
        )
        assert set(consumer.positions()) == {0, 1, 2, 3}


def test_a_group_begins_added_queues_at_their_first_message_after_a_restart(
    cluster: FakeCluster,
) -> None:
    handle: Any = cluster
    with closing(Consumer(handle, "t", group="g", start="latest")) as consumer:
        consumer.commit()
    add(cluster)
    with Producer(handle) as producer:
        send(producer, 3, b"added")
    for start in (None, "latest"):
        with closing(Consumer(handle, "t", group="g", start=start)) as consumer:
            assert consumer.positions()[3] == 0
    # A group that never read the topic says where to start, as for any topic.
    with pytest.raises(Rejected, match="has no offset"):
        Consumer(handle, "t", group="new")
    with closing(Consumer(handle, "t", start="latest")) as consumer:
        assert consumer.positions()[3] == 1


def test_a_consumer_of_chosen_queues_keeps_them(cluster: FakeCluster) -> None:
    handle: Any = cluster
    with closing(Consumer(handle, "t", queues=[0], start="earliest")) as consumer:
        add(cluster)
        with Producer(handle) as producer:
            for _ in range(3):
                send(producer, 0, b"x")
                assert read(consumer, 1) == {(0, b"x")}
        assert set(consumer.positions()) == {0}


def test_a_follower_that_has_not_heard_of_added_queues_takes_none_away(
    cluster: FakeCluster,
) -> None:
    routes = cluster.routes()
    add(cluster)
    assert routes.topics.find("t").queues == 4
    routes.topics.note({"t": {"queues": 2, "shards": [0, 1]}})
    assert routes.topics.find("t").queues == 4


@pytest.mark.parametrize(
    ("error", "words"),
    [(RuntimeError("a bug"), ["could not be looked for"]), (Unavailable("no shard answers"), [])],
)
def test_a_look_for_queues_that_fails_harms_no_client_and_a_bug_is_logged(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    words: list[str],
) -> None:
    def fail(*_args: object) -> dict[str, Any]:
        raise error

    routes = cluster.routes()
    monkeypatch.setattr(routes, "first", fail)
    # Otherwise another thread looks.
    routes.transport = "ray"
    monkeypatch.setattr(topic_routes, "TOPICS_AGE_S", -1.0)
    routes.topics.look_for_queues(lambda: pytest.fail("nothing was learned"))
    assert [each for each in words if each not in caplog.text] == []
    assert bool(caplog.records) == bool(words)


def test_the_retry_topic_of_a_group_gets_a_queue_on_a_shard_that_was_added() -> None:
    class Grown(Shards):
        """Three shards, of which this handle knows two. The topic is older than the third."""

        def learn_shards(self, count: int) -> None:
            self.shards = count

        def topics(self) -> dict[str, Any]:
            return self.call(0, "topics", {})

        def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
            if op == "create_topic":
                raise TopicWithOtherQueues("it exists with 2 queues", queues=2)
            return super().call(shard, op, args)

    name = "%RETRY%g"
    cluster = Grown(TopicInfo(name, 2, (0, 1)))
    cluster.known.append(dict(cluster.known[0]))
    consumer: Any = SimpleNamespace(_cluster=cluster)
    Consumer._create_retry_topic(consumer, name, 2)
    assert [known[name].shard_of(2) for known in cluster.known] == [2, 2, 2]


def test_a_real_shard_adds_queues_and_serves_them(tmp_path: Any) -> None:
    with ServedShard(tmp_path) as shard:
        shard.start_flusher()
        cluster = shard.cluster
        cluster.create_topic("t", queues=2)
        assert cluster.add_queues("t", 5)
        assert cluster.topics() == {"t": {"queues": 5, "shards": [0], "former_queues": [2]}}
        with cluster.producer() as producer:
            assert producer.send("t", b"x", queue_id=4).result(30).offset == 0
        with pytest.raises(RayMQError, match="break-key-order"):
            cluster.add_queues("t", 6)
        assert [row["max_offset"] for row in cluster.describe_topic("t")["queues"]] == [
            0,
            0,
            0,
            0,
            1,
        ]

        shard.down()
        shard.up()
        assert cluster.topics() == {"t": {"queues": 5, "shards": [0], "former_queues": [2]}}
