"""Messages by key, time, place and id, of two real shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raymq
from raymq.actors.leader.operations import queries as shard_queries
from raymq.client.consume import queries
from raymq.client.messages.received import ReceivedMessage
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch, put_one
from tests.support.damaged_store import FIRST_LOG, flip
from tests.support.served_shard import PATIENT, ServedCluster, ServedShard
from tests.support.waiting import until

QUEUES, MESSAGES = 4, 24
FEW, MANY = "order-7", "common"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with ServedCluster(tmp_path_factory.mktemp("queries")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(served: ServedCluster) -> Cluster:
    return served.cluster


@pytest.fixture(scope="module")
def sent(cluster: Cluster) -> list[ReceivedMessage]:
    """The messages of topic t, in the order of their store times. Each third one has the key FEW, all have MANY."""
    cluster.create_topic("t", queues=QUEUES)
    cluster.create_topic("other", queues=QUEUES)
    with cluster.producer() as producer:
        for number in range(MESSAGES):
            words = (MANY, FEW) if number % 3 == 0 else (MANY,)
            body = b"%d" % number
            producer.send("t", body, queue_id=number % QUEUES, index_keys=words).result(30)
            producer.send("other", body, index_keys=(MANY,)).result(30)
    found: list[ReceivedMessage] = []
    with cluster.consumer("t", start="earliest") as consumer:
        while len(found) < MESSAGES:
            found += consumer.poll(timeout=20)
    return sorted(found, key=lambda each: int(each.body))


def places(found: list[ReceivedMessage]) -> list[tuple[int, int]]:
    return [(each.queue_id, each.offset) for each in found]


# --- by key and time ------------------------------------------------------------------------------


def test_messages_with_a_key_come_from_all_shards_in_the_order_of_their_store_times(
    cluster: Cluster, sent: list[ReceivedMessage]
) -> None:
    found = cluster.query("t", key=FEW)
    assert found == [each for each in sent if FEW in each.index_keys]
    assert {each.shard for each in found} == {0, 1}
    assert all(a.store_time_ms <= b.store_time_ms for a, b in zip(found, found[1:], strict=False))
    assert cluster.query("t", key="no-such-key") == []


@pytest.mark.parametrize("answer_bytes", [0, 500, shard_queries.ANSWER_BYTES])
def test_of_more_than_are_wanted_the_newest_come(
    cluster: Cluster,
    sent: list[ReceivedMessage],
    answer_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_queries, "ANSWER_BYTES", answer_bytes)
    assert cluster.query("t", key=MANY, max_records=5) == sent[-5:]
    assert cluster.query("t", key=MANY, max_records=np.int64(64)) == sent


def test_times_limit_a_query_by_key_and_both_ends_count(
    cluster: Cluster, sent: list[ReceivedMessage]
) -> None:
    first, last = sent[6].store_time_ms, sent[12].store_time_ms
    within = [each for each in sent if first <= each.store_time_ms <= last]
    assert cluster.query("t", key=MANY, between=(first, last)) == within
    few = [each for each in within if FEW in each.index_keys]
    assert cluster.query("t", key=FEW, between=(raymq.at_ms(first), raymq.at_ms(last))) == few
    assert cluster.query("t", key=MANY, between=(None, first - 1)) == [
        each for each in sent if each.store_time_ms < first
    ]


def test_without_a_key_all_messages_of_a_time_are_found(
    cluster: Cluster, sent: list[ReceivedMessage]
) -> None:
    first, last = sent[3].store_time_ms, sent[20].store_time_ms
    within = [each for each in sent if first <= each.store_time_ms <= last]
    assert cluster.query("t", between=(first, last)) == within
    assert cluster.query("t", between=(first, None), max_records=4) == sent[-4:]
    assert (
        cluster.query("t", between=(None, last), max_records=3)
        == [each for each in sent if each.store_time_ms <= last][-3:]
    )
    assert cluster.query("t", between=(None, None)) == sent
    assert cluster.query("t", between=(last + 3_600_000, None)) == []


def test_a_unique_key_is_another_thing_than_an_index_key(
    served: ServedCluster, sent: list[ReceivedMessage]
) -> None:
    properties = b"UNIQ_KEY\x01AC110001\x02KEYS\x01word\x02"
    puts = batch([b"of RocketMQ"], properties=properties)
    put_one(served.shards[1].host, PutRequest("other", 1, puts, None, 0, 0, "quorum")).wait(30)
    (found,) = served.cluster.query("other", unique_key="AC110001")
    assert (found.body, found.shard, found.queue_id) == (b"of RocketMQ", 1, 1)
    assert served.cluster.query("other", key="word") == [found]
    assert served.cluster.query("other", key="AC110001") == []
    assert served.cluster.query("other", unique_key="word") == []


def test_of_a_compacted_topic_only_messages_that_are_left_are_found(
    served: ServedCluster, sent: list[ReceivedMessage]
) -> None:
    cluster = served.cluster
    cluster.create_topic("compacted", queues=1, compacted=True)
    with cluster.producer() as producer:
        for number in range(20):
            word = "a" if number % 2 else "b"
            producer.send("compacted", b"%d" % number, index_keys=(word,)).result(30)

    store = served.shards[0].host.store

    def all_dispatched() -> bool:
        queue = store.consume_queues.find("compacted", 0)
        return queue is not None and queue.max_offset == 20

    # A confirmed message is dispatched a moment later, and only dispatched ones are compacted.
    until(all_dispatched, lambda: threading.Event().wait(0.01))
    compaction = store.compaction
    while compaction.compact("compacted", 0, roll=True) is not None:
        pass
    assert [each.body for each in cluster.query("compacted", key="a")] == [b"19"]
    left = cluster.query("compacted", between=(None, None), max_records=2)
    assert [each.body for each in left] == [b"18", b"19"]
    assert cluster.message("compacted", 0, 18).body == b"18"
    with pytest.raises(OffsetOutOfRange):
        cluster.message("compacted", 0, 3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "key"),
        ({"key": "a", "unique_key": "b"}, "unique_key"),
        ({"key": ""}, "key"),
        ({"key": "two words"}, "key"),
        ({"key": b"a"}, "key"),
        ({"unique_key": "\ud800"}, "unique_key"),
        ({"key": "a", "max_records": 0}, "max_records"),
        ({"key": "a", "max_records": 65}, "max_records"),
        ({"between": (None, None), "max_records": queries.RECORDS_MAX + 1}, "max_records"),
        ({"key": "a", "between": 1}, "between"),
        ({"key": "a", "between": (5, 6)}, "between"),
        ({"between": (1_700_000_000_001, 1_700_000_000_000)}, "between"),
    ],
)
def test_a_query_that_cannot_be_answered_is_refused_with_its_field(
    cluster: Cluster, sent: list[ReceivedMessage], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(Rejected) as refused:
        cluster.query("t", **options)
    assert refused.value.field == field
    assert refused.value.limit


def test_a_cluster_without_an_index_says_so(tmp_path: Path) -> None:
    with ServedShard(tmp_path, replace(PATIENT, message_index=False)) as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=1)
        with shard.cluster.producer() as producer:
            producer.send("t", b"x", index_keys=("a",)).result(30)
        with pytest.raises(Rejected, match="message_index=False"):
            shard.cluster.query("t", key="a")
        assert [each.body for each in shard.cluster.query("t", between=(None, None))] == [b"x"]


# --- single messages ------------------------------------------------------------------------------


def test_each_message_is_found_at_its_place_and_by_its_id(
    cluster: Cluster, sent: list[ReceivedMessage]
) -> None:
    assert len({each.message_id for each in sent}) == MESSAGES
    for each in sent:
        assert cluster.message("t", each.queue_id, each.offset) == each
    for each in sent[:4]:
        assert cluster.message_by_id(each.message_id) == each
    assert cluster.message_by_id(sent[1].message_id.lower()) == sent[1]
    # A shard that serves elsewhere by now has the messages of its earlier addresses, too.
    cluster.endpoints.update({0: cluster.endpoints[1], 1: cluster.endpoints[0]})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster, "call", right_call(cluster))
            assert cluster.message_by_id(sent[1].message_id).body == sent[1].body
    finally:
        cluster.refresh()


def test_a_handle_that_is_older_than_a_shard_finds_its_messages(
    served: ServedCluster, sent: list[ReceivedMessage]
) -> None:
    other = next(each for each in sent if each.shard == 1)
    old = Cluster(
        name="served",
        cluster_id=served.cluster.cluster_id,
        shards=1,
        token=served.cluster.token,
        endpoints={0: served.cluster.endpoints[0]},
        resolver=served.cluster.resolver,
    )
    with old:
        assert old.message_by_id(other.message_id) == other
        assert old.shards == 2


def right_call(cluster: Cluster) -> Any:
    """Calls of the shards where they are, and not where the handle believes."""
    call = Cluster.call

    def at_home(shard: int, *arguments: Any, **more: Any) -> Any:
        cluster.refresh()
        return call(cluster, shard, *arguments, **more)

    return at_home


@pytest.mark.parametrize("offset", [MESSAGES // QUEUES, 10**9])
def test_an_offset_without_a_message_is_out_of_range_at_once(
    cluster: Cluster, sent: list[ReceivedMessage], offset: int
) -> None:
    with pytest.raises(OffsetOutOfRange) as missing:
        cluster.message("t", 0, offset)
    assert (missing.value.min, missing.value.max) == (0, MESSAGES // QUEUES)


def test_a_place_that_cannot_be_is_refused(cluster: Cluster, sent: list[ReceivedMessage]) -> None:
    for place, field in ((("none", 0, 0), "topic"), (("t", 4, 0), "queue_id")):
        with pytest.raises(Rejected) as refused:
            cluster.message(*place)
        assert refused.value.field == field
    with pytest.raises(Rejected) as refused:
        cluster.message("t", 0, -1)
    assert refused.value.field == "offset"


def test_an_id_of_no_message_is_refused(cluster: Cluster, sent: list[ReceivedMessage]) -> None:
    inside = f"{int(sent[0].message_id, 16) + 1:032X}"
    beyond = sent[0].message_id[:16] + "00000000FFFFFFFF"
    elsewhere = "0A000001" + sent[0].message_id[8:]
    # Users have no message of those that the shard writes for itself.
    own = sent[0].message_id[:16] + "0" * 16
    for wrong in (inside, beyond, elsewhere, own):
        with pytest.raises(Rejected, match="no message with id"):
            cluster.message_by_id(wrong)
    for malformed in ("", "xyz", sent[0].message_id[:-1], sent[0].message_id + "00"):
        with pytest.raises(Rejected, match="not a message id"):
            cluster.message_by_id(malformed)


def test_an_id_of_two_messages_names_both(tmp_path: Path) -> None:
    with ServedCluster(tmp_path) as served:
        one, two = served.shards
        served.cluster.create_topic("t", queues=2)
        # The second shard listens at the port that the first one had before.
        port = int(one.endpoints[0].rpartition(":")[2])
        two.host.set_store_host("127.0.0.1", port)
        with served.cluster.producer() as producer:
            for queue in (0, 1):
                producer.send("t", b"%d" % queue, queue_id=queue).result(30)
        first, second = served.cluster.message("t", 0, 0), served.cluster.message("t", 1, 0)
        assert first.message_id == second.message_id
        with pytest.raises(Rejected, match=r"message\('t', 0, 0\), cluster.message\('t', 1, 0\)"):
            served.cluster.message_by_id(first.message_id)


def test_a_damaged_message_is_reported_with_its_file_and_never_returned(tmp_path: Path) -> None:
    with ServedShard(tmp_path) as shard:
        shard.start_flusher()
        cluster = shard.cluster
        cluster.create_topic("t", queues=1)
        with cluster.producer() as producer:
            for number in range(3):
                body = b"%d" % number * 500
                producer.send("t", body, index_keys=(f"k{number}", "all")).result(30)
        (message,) = cluster.query("t", key="k1")
        flip(tmp_path / FIRST_LOG, int(message.message_id[-16:], 16) + 200)
        asked = [
            lambda: cluster.query("t", key="k1"),
            lambda: cluster.query("t", key="all"),
            lambda: cluster.query("t", between=(None, None)),
            lambda: cluster.message("t", 0, 1),
            lambda: cluster.message_by_id(message.message_id),
        ]
        for ask in asked:
            with pytest.raises(Corrupt) as damaged:
                ask()
            assert damaged.value.fields["offset"] == int(message.message_id[-16:], 16)
        assert [each.body[:1] for each in cluster.query("t", key="k2")] == [b"2"]
        assert cluster.message("t", 0, 0).body == b"0" * 500
        assert [str(each.fields["offset"]) for each in shard.host.store.damage] == [
            str(int(message.message_id[-16:], 16))
        ]
