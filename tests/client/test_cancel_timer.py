"""Cancelling messages that wait for their time, at a real shard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.client.messages.message import Receipt
from raymq.client.messages.received import ReceivedMessage
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.base.format import TIMER_TOPIC
from tests.support.served_shard import ServedShard

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("cancel") / "shard") as made:
        made.start_flusher()
        made.cluster.create_topic("t", queues=1)
        yield made


@pytest.fixture
def cluster(shard: ServedShard) -> Cluster:
    return shard.cluster


def in_ms(delay_ms: int) -> int:
    return Clock().now_ms() + delay_ms


def poll(cluster: Cluster, offset: int) -> list[ReceivedMessage]:
    with cluster.consumer("t", start={0: offset}) as consumer:
        found: list[ReceivedMessage] = []
        while not found:
            found += consumer.poll(timeout=20)
        return found


def end(cluster: Cluster) -> int:
    (queue,) = cluster.describe_topic("t")["queues"]
    return int(queue["max_offset"])


def test_a_cancelled_message_never_comes_and_the_call_may_be_repeated(cluster: Cluster) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        far = producer.send("t", b"far", deliver_at_ms=in_ms(HOUR_MS)).result(30)
        assert producer.cancel(far) is True
        assert producer.cancel(far) is True

        at_ms = in_ms(1_500)
        soon = producer.send("t", b"cancelled", deliver_at_ms=at_ms).result(30)
        producer.send("t", b"comes", deliver_at_ms=at_ms).result(30)
        assert producer.cancel(soon) is True
        (message,) = poll(cluster, first)
        assert message.body == b"comes"
        # The first answer may have been lost.
        assert producer.cancel(soon) is True
    assert "UNIQ_KEY" not in message.properties


def test_a_message_that_was_delivered_cannot_be_cancelled(cluster: Cluster) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        receipt = producer.send("t", b"x", deliver_at_ms=in_ms(200)).result(30)
        (message,) = poll(cluster, first)
        assert message.body == b"x"
        if receipt.topic == TIMER_TOPIC:
            assert producer.cancel(receipt) is False
        over = producer.send("t", b"at once", deliver_at_ms=10**12).result(30)
        assert producer.cancel(over) is False


def test_a_producer_for_asyncio_and_any_other_producer_cancel_it_as_well(
    cluster: Cluster, shard: ServedShard
) -> None:
    async def run() -> Receipt:
        async with cluster.async_producer() as producer:
            receipt = await producer.send("t", b"x", deliver_at_ms=in_ms(HOUR_MS))
            assert await producer.cancel(receipt)
        return receipt

    receipt = asyncio.run(run())
    with cluster.producer() as producer:
        assert producer.cancel(receipt)


def test_a_cancellation_outlives_a_restart_of_the_shard(
    cluster: Cluster, shard: ServedShard
) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        at_ms = in_ms(2_500)
        receipt = producer.send("t", b"cancelled", deliver_at_ms=at_ms).result(30)
        producer.send("t", b"comes", deliver_at_ms=at_ms).result(30)
        assert producer.cancel(receipt)
    shard.down()
    shard.up()
    assert [each.body for each in poll(cluster, first)] == [b"comes"]


def test_a_timer_has_a_unique_key_by_which_it_is_found(cluster: Cluster) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        producer.send("t", b"x", deliver_at_ms=in_ms(1_000)).result(30)
    (message,) = poll(cluster, first)
    assert message.body == b"x"
    text: bytes = vars(message)["_properties"]
    unique = text.partition(b"UNIQ_KEY\x01")[2][:32].decode()
    assert cluster.query("t", unique_key=unique) == [message]


@pytest.mark.parametrize(
    ("receipt", "said"),
    [
        (Receipt("SCHEDULE_TOPIC_XXXX", 0, 0, 0, 0, False), "delay level"),
        (Receipt(TIMER_TOPIC, 0, 0, -1, 0, True), "no offset"),
        (Receipt(TIMER_TOPIC, 0, 0, 10**6, 0, False), "no timer is at offset"),
        ("receipt", "give the Receipt"),
        (None, "give the Receipt"),
    ],
)
def test_what_names_no_timer_is_refused(cluster: Cluster, receipt: Any, said: str) -> None:
    with cluster.producer() as producer, pytest.raises(Rejected, match=said):
        producer.cancel(receipt)
