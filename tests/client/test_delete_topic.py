"""Topics that are deleted, and others of the same names: on real shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import raymq
from raymq.client.topics.delete_topic import delete_topic
from raymq.client.transport import topic_routes
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import OffsetOutOfRange, Rejected, TopicDeleted, Unavailable
from raymq.store.state.features import feature_level
from tests.support.roles import leader_of
from tests.support.served_shard import CLUSTER_ID, TOKEN, ServedCluster
from tests.support.waiting import until

SHARDS = 2


@pytest.fixture
def served(tmp_path: Any) -> Iterator[ServedCluster]:
    with ServedCluster(tmp_path, SHARDS) as made:
        yield made


@pytest.fixture
def cluster(served: ServedCluster) -> Cluster:
    return served.cluster


def send(cluster: Cluster, topic: str, queue_id: int, *bodies: bytes) -> None:
    with cluster.producer() as producer:
        for body in bodies:
            producer.send(topic, body, queue_id=queue_id, index_keys=("k",)).result(30)


def read(cluster: Cluster, topic: str, count: int, **options: Any) -> list[bytes]:
    found: list[bytes] = []
    with cluster.consumer(topic, **{"start": "earliest", **options}) as consumer:
        until(
            lambda: len(found) >= count,
            lambda: found.extend(message.body for message in consumer.poll(10, 0.2)),
        )
        assert consumer.poll(10, 0) == []
    return found


def make_again(cluster: Cluster, queues: int = 2) -> None:
    """A topic with two messages in each queue, which is deleted and made again."""
    cluster.create_topic("t", queues=2)
    for queue_id in range(2):
        send(cluster, "t", queue_id, b"old", b"old")
    with cluster.consumer("t", group="g", queues=[0, 1], start="earliest") as consumer:
        consumer.commit({0: 2, 1: 1})
    cluster.delete_topic("t")
    cluster.create_topic("t", queues=queues)


def test_a_deleted_topic_is_gone(cluster: Cluster) -> None:
    cluster.create_topic("t", queues=2)
    send(cluster, "t", 0, b"a")
    assert cluster.delete_topic("t") is True
    assert cluster.topics() == {}
    with pytest.raises(Rejected, match="does not exist"):
        cluster.consumer("t", start="earliest")
    with pytest.raises(Rejected, match="does not exist"):
        cluster.describe_topic("t")
    with pytest.raises(Rejected, match="does not exist"), cluster.producer() as producer:
        producer.send("t", b"b", queue_id=0).result(30)
    with pytest.raises(Rejected, match="'t' does not exist"):
        cluster.delete_topic("t")


def test_a_misspelt_name_changes_nothing_that_older_versions_read(served: ServedCluster) -> None:
    with pytest.raises(Rejected, match="does not exist"):
        served.cluster.delete_topic("never")
    for shard in served.shards:
        assert feature_level(leader_of(shard.host).store.state.progress) == 0


def test_a_topic_of_the_same_name_is_another_one(cluster: Cluster) -> None:
    make_again(cluster, queues=3)
    facts = cluster.describe_topic("t")
    ranges = [(q["min_offset"], q["max_offset"]) for q in facts["queues"]]
    # No offset is used twice.
    assert ranges == [(2, 2), (2, 2), (0, 0)]
    assert facts["messages"] == 0
    for queue_id in range(3):
        send(cluster, "t", queue_id, b"new")
    assert read(cluster, "t", 3) == [b"new"] * 3
    # The group begins anew.
    assert read(cluster, "t", 3, group="g") == [b"new"] * 3
    assert [message.body for message in cluster.query("t", key="k")] == [b"new"] * 3
    with pytest.raises(OffsetOutOfRange):
        cluster.message("t", 0, 1)
    assert cluster.message("t", 0, 2).body == b"new"
    assert cluster.offsets_for_times("t", 1_500_000_000_000) == {0: 2, 1: 2, 2: 0}


def test_it_stays_so_after_a_restart(served: ServedCluster) -> None:
    make_again(served.cluster)
    send(served.cluster, "t", 0, b"new")
    for shard in served.shards:
        shard.down()
        shard.up()
    served.cluster.refresh()
    assert read(served.cluster, "t", 1) == [b"new"]
    assert served.cluster.topics()["t"]["generation"] == 1
    served.cluster.delete_topic("t")
    served.cluster.create_topic("t", queues=2)
    send(served.cluster, "t", 1, b"newer")
    assert read(served.cluster, "t", 1) == [b"newer"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_consumer_of_a_deleted_topic_hears_of_it(cluster: Cluster, is_made_again: bool) -> None:
    cluster.create_topic("t", queues=2)
    send(cluster, "t", 0, b"a", b"b")
    with cluster.consumer("t", start="earliest") as consumer:
        until(lambda: consumer.position(0) == 2, lambda: consumer.poll(10, 0.2))
        cluster.delete_topic("t")
        if is_made_again:
            cluster.create_topic("t", queues=2)
            send(cluster, "t", 0, b"c")
        with pytest.raises(TopicDeleted, match="topic t was deleted"):
            until(lambda: False, lambda: consumer.poll(10, 0.2))
    if is_made_again:
        # The next one reads the new topic, at the first try.
        assert read(cluster, "t", 1) == [b"c"]


def test_members_give_up_the_queues_of_a_deleted_topic_and_read_the_others(
    cluster: Cluster,
) -> None:
    for name in ("logs-a", "logs-b"):
        cluster.create_topic(name, queues=1)
    with cluster.consumer(
        raymq.matching("logs-*"), group="g", start="earliest", session_timeout_s=1
    ) as consumer:
        assert set(consumer.assignment()) == {("logs-a", 0), ("logs-b", 0)}
        cluster.delete_topic("logs-a")
        found: list[bytes] = []

        def poll() -> None:
            found.extend(message.body for message in consumer.poll(10, 0.2))

        until(lambda: set(consumer.assignment()) == {("logs-b", 0)}, poll)
        send(cluster, "logs-b", 0, b"b")
        until(lambda: found == [b"b"], poll)
        # Another topic of that name is read from its beginning.
        cluster.create_topic("logs-a", queues=1)
        send(cluster, "logs-a", 0, b"a")
        until(lambda: found == [b"b", b"a"], poll)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_pattern_goes_on_with_a_topic_that_was_made_again_at_once(
    served: ServedCluster, group: str | None
) -> None:
    cluster = served.cluster
    cluster.create_topic("logs-a", queues=2)
    send(cluster, "logs-a", 0, b"old")
    endpoints = {shard: there for each in served.shards for shard, there in each.endpoints.items()}
    other = Cluster(
        name="other", cluster_id=CLUSTER_ID, shards=SHARDS, token=TOKEN, endpoints=endpoints
    )
    found: list[bytes] = []
    with cluster.consumer(raymq.matching("logs-*"), group=group, start="earliest") as consumer:

        def poll() -> None:
            found.extend(message.body for message in consumer.poll(10, 0.2))

        until(lambda: found == [b"old"], poll)
        # By another process, before the group's coordinator looks.
        other.delete_topic("logs-a")
        other.create_topic("logs-a", queues=2)
        send(other, "logs-a", 0, b"new")
        until(lambda: found == [b"old", b"new"], poll)
        assert consumer.positions()["logs-a", 0] == 2
    other.close()


@pytest.mark.parametrize("group", [None, "g"])
def test_iteration_goes_on_with_a_topic_of_a_pattern_that_was_made_again(
    cluster: Cluster, group: str | None
) -> None:
    cluster.create_topic("logs-a", queues=1)
    send(cluster, "logs-a", 0, b"old")
    found: list[bytes] = []
    with cluster.consumer(raymq.matching("logs-*"), group=group, start="earliest") as consumer:

        def take() -> None:
            message = consumer.next_message(0.2)
            if message is not None:
                found.append(message.body)

        until(lambda: found == [b"old"], take)
        cluster.delete_topic("logs-a")
        cluster.create_topic("logs-a", queues=1)
        send(cluster, "logs-a", 0, b"new")
        until(lambda: found == [b"old", b"new"], take)


def test_a_shard_that_missed_the_deletion_does_not_take_the_old_topic_for_the_new_one(
    served: ServedCluster,
) -> None:
    cluster = served.cluster
    cluster.create_topic("t", queues=2)
    for queue_id in range(2):
        send(cluster, "t", queue_id, b"old")
    # The call ended after the first shard.
    cluster.call(0, "delete_topic", {"name": "t"})
    cluster.create_topic("t", queues=2)
    for queue_id in range(2):
        send(cluster, "t", queue_id, b"new")
    assert read(cluster, "t", 2) == [b"new"] * 2


def test_a_deletion_that_ended_early_is_completed_by_the_same_call(served: ServedCluster) -> None:
    cluster = served.cluster
    cluster.create_topic("t", queues=2)
    served.shards[1].down()
    with pytest.raises(Unavailable):
        cluster.call(1, "delete_topic", {"name": "t", "generation": 1}, timeout_s=1)
    cluster.call(0, "delete_topic", {"name": "t"})
    served.shards[1].up()
    cluster.refresh()
    assert cluster.delete_topic("t") is True
    assert cluster.call(1, "topics", {}) == {}


def test_compacted_topics_can_be_deleted(cluster: Cluster) -> None:
    cluster.create_topic("c", queues=1, compacted=True)
    send(cluster, "c", 0, b"old")
    assert read(cluster, "c", 1) == [b"old"]
    cluster.delete_topic("c")
    cluster.create_topic("c", queues=1, compacted=True)
    assert cluster.describe_topic("c")["messages"] == 0
    send(cluster, "c", 0, b"new")
    assert read(cluster, "c", 1) == [b"new"]
    with pytest.raises(OffsetOutOfRange):
        read(cluster, "c", 1, start=0)


@pytest.mark.parametrize("name", ["rmq_sys_raymq", "SCHEDULE_TOPIC_XXXX", "a.b", "", 7])
def test_what_is_no_topic_of_users_is_not_deleted(cluster: Cluster, name: Any) -> None:
    with pytest.raises(Rejected) as raised:
        cluster.delete_topic(name)
    assert raised.value.fields["field"] == "topic"


def test_a_topic_that_is_not_on_all_shards_yet_is_waited_for(served: ServedCluster) -> None:
    cluster = served.cluster
    cluster.create_topic("logs-a", queues=2)
    options: Any = {"start": "earliest", "session_timeout_s": 1}
    with cluster.consumer(raymq.matching("logs-*"), group="g", **options) as member:
        # Its creation ended after the first shard.
        wanted = {"name": "logs-b", "queues": 2, "shards": [0, 1]}
        cluster.call(0, "create_topic", wanted)
        found: list[bytes] = []

        def poll() -> None:
            found.extend(message.body for message in member.poll(10, 0.1))

        until(lambda: ("logs-b", 0) in member.assignment(), poll)
        assert ("logs-b", 1) not in member.assignment()
        cluster.create_topic("logs-b", queues=2)
        for queue_id in range(2):
            send(cluster, "logs-b", queue_id, b"%d" % queue_id)
        until(lambda: sorted(found) == [b"0", b"1"], poll)


def test_a_pattern_without_any_topic_waits_for_the_first_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_routes, "TOPICS_AGE_S", 0.0)
    found: list[bytes] = []
    with cluster.consumer(raymq.matching("logs-*")) as consumer:
        assert consumer.poll(10, 0) == []
        cluster.create_topic("logs-a", queues=1)
        send(cluster, "logs-a", 0, b"a")
        until(
            lambda: found == [b"a"],
            lambda: found.extend(message.body for message in consumer.poll(10, 0.1)),
        )


def test_a_name_that_had_a_topic_before_is_read_from_its_first_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_routes, "TOPICS_AGE_S", 0.0)
    cluster.create_topic("logs-a", queues=1)
    send(cluster, "logs-a", 0, b"old", b"old")
    cluster.delete_topic("logs-a")
    found: list[bytes] = []
    with cluster.consumer(raymq.matching("logs-*")) as consumer:
        cluster.create_topic("logs-a", queues=1)
        send(cluster, "logs-a", 0, b"new")
        until(
            lambda: found == [b"new"],
            lambda: found.extend(message.body for message in consumer.poll(10, 0.1)),
        )


def test_a_commit_leaves_out_what_was_deleted(cluster: Cluster) -> None:
    for name in ("logs-a", "logs-b"):
        cluster.create_topic(name, queues=1)
        send(cluster, name, 0, b"x")
    options: Any = {"start": "earliest", "session_timeout_s": 1}
    with cluster.consumer(raymq.matching("logs-*"), group="g", **options) as member:
        found: list[bytes] = []
        until(
            lambda: len(found) == 2,
            lambda: found.extend(message.body for message in member.poll(10, 0.1)),
        )
        cluster.delete_topic("logs-a")
        member.commit()
        assert member.committed() == {("logs-b", 0): 1}


def test_a_commit_leaves_out_what_was_deleted_and_made_again(cluster: Cluster) -> None:
    for name in ("logs-a", "logs-b"):
        cluster.create_topic(name, queues=1)
        send(cluster, name, 0, b"x", b"y", b"z")
    options: Any = {"start": "earliest", "session_timeout_s": 1}
    with cluster.consumer(raymq.matching("logs-*"), group="g", **options) as member:
        # Some of both, so that the offset lies below the first one of the new topic.
        until(lambda: len(member.positions()) == 2, lambda: member.poll(1, 0.1))
        cluster.delete_topic("logs-a")
        cluster.create_topic("logs-a", queues=1)
        member.commit({("logs-a", 0): 1, ("logs-b", 0): 1})
        assert member.committed().get(("logs-b", 0)) == 1
        assert member.committed().get(("logs-a", 0), 3) == 3


def test_a_commit_leaves_out_queues_that_the_topic_of_the_name_has_no_more(
    cluster: Cluster,
) -> None:
    for name, queues in (("logs-a", 4), ("logs-b", 1)):
        cluster.create_topic(name, queues=queues)
        for queue_id in range(queues):
            send(cluster, name, queue_id, b"x", b"y")
    options: Any = {"start": "earliest", "session_timeout_s": 1}
    with cluster.consumer(raymq.matching("logs-*"), group="g", **options) as member:
        until(lambda: len(member.positions()) == 5, lambda: member.poll(1, 0.1))
        cluster.delete_topic("logs-a")
        cluster.create_topic("logs-a", queues=2)
        member.commit({("logs-a", 0): 1, ("logs-a", 3): 1, ("logs-b", 0): 1})
        assert member.committed().get(("logs-b", 0)) == 1


def test_an_offset_that_the_topic_does_not_hold_is_refused_also_by_a_pattern(
    cluster: Cluster,
) -> None:
    cluster.create_topic("logs-a", queues=1)
    send(cluster, "logs-a", 0, b"x")
    options: Any = {"start": "earliest", "session_timeout_s": 1}
    with cluster.consumer(raymq.matching("logs-*"), group="g", **options) as member:
        until(lambda: len(member.positions()) == 1, lambda: member.poll(1, 0.1))
        with pytest.raises(OffsetOutOfRange):
            member.commit({("logs-a", 0): 9})


def test_a_creation_that_meets_a_deletion_begins_again(served: ServedCluster) -> None:
    cluster = served.cluster
    cluster.create_topic("t", queues=2)
    real, calls = cluster.call, []

    def call(shard: int, op: str, arguments: Any, **options: Any) -> Any:
        if op == "create_topic":
            calls.append(shard)
            if len(calls) == 2:
                # Another program, between the two shards.
                delete_topic(cluster, "t")
        return real(shard, op, arguments, **options)

    cluster.call = call  # type: ignore[method-assign]
    cluster.create_topic("t", queues=2)
    assert calls == [0, 1, 0, 1]
    assert [cluster.call(shard, "topics", {})["t"]["generation"] for shard in range(2)] == [1, 1]
