"""A client that its program drops without closing it warns, and lets go of its threads."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from raymq.cluster.cluster import Cluster
from raymq.cluster.consume.async_consumer import AsyncConsumer
from raymq.cluster.consume.consumer import Consumer
from raymq.cluster.produce.async_producer import AsyncProducer
from raymq.cluster.produce.producer import Producer
from tests.support.fake_backend import FakeCluster
from tests.support.waiting import until


def use_producer(cluster: Any, close: bool) -> None:
    producer = Producer(cluster)
    for queue in range(2):
        producer.send("t", b"x", queue_id=queue)
    producer.flush(30)
    assert producer.send("t", b"y", queue_id=0).result(30).offset == 1
    if close:
        producer.close()


def use_consumer(cluster: Any, close: bool) -> None:
    consumer = Consumer(cluster, "t", start="earliest")
    consumer.poll(timeout=0)
    if close:
        consumer.close()


def use_async_producer(cluster: Any, close: bool) -> None:
    async def main() -> None:
        producer = AsyncProducer(cluster)
        await producer.send("t", b"x")
        if close:
            await producer.close()

    asyncio.run(main())


def use_async_consumer(cluster: Any, close: bool) -> None:
    async def main() -> None:
        consumer = AsyncConsumer(cluster, "t", start="earliest")
        await consumer.poll(timeout=0)
        if close:
            await consumer.close()

    asyncio.run(main())


def use_cluster(fake: FakeCluster, close: bool) -> None:
    cluster = Cluster(
        name="fake",
        cluster_id=fake.cluster_id,
        shards=1,
        token=fake.token,
        endpoints=dict(fake.endpoints),
    )
    assert cluster.describe_topic("t")["topic"] == "t"
    # A copy has no connections.
    pickle.loads(pickle.dumps(cluster))
    if close:
        cluster.close()


USES: dict[str, Callable[[Any, bool], None]] = {
    "Cluster 'fake'": use_cluster,
    "Producer": use_producer,
    "Consumer": use_consumer,
    "AsyncProducer": use_async_producer,
    "AsyncConsumer": use_async_consumer,
}


def warned(use: Callable[[Any, bool], None], cluster: FakeCluster, *, close: bool) -> list[str]:
    """The warning, once the threads of the client are gone."""
    before = set(threading.enumerate())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        use(cluster, close)

        def look() -> None:
            gc.collect()
            threading.Event().wait(0.002)

        def gone() -> bool:
            left = set(threading.enumerate()) - before
            return not any(thread.name.startswith(CLIENT_THREADS) for thread in left)

        until(gone, look)
        gc.collect()
    return [str(each.message) for each in found if each.category is ResourceWarning]


CLIENT_THREADS = ("raymq-linger", "raymq-sender", "raymq-reader")


@pytest.mark.parametrize("name", USES)
def test_a_client_that_is_dropped_warns_with_its_name_and_what_to_do(
    cluster: FakeCluster, name: str
) -> None:
    (warning,) = warned(USES[name], cluster, close=False)
    assert warning.startswith(f"unclosed {name}: ")
    assert "close()" in warning


@pytest.mark.parametrize("name", USES)
def test_a_client_that_was_closed_does_not_warn(cluster: FakeCluster, name: str) -> None:
    assert warned(USES[name], cluster, close=True) == []


def test_what_lingers_in_a_producer_that_is_dropped_is_sent(cluster: FakeCluster) -> None:
    def use(cluster: Any, close: bool) -> None:
        Producer(cluster, linger_ms=20).send("t", b"x", queue_id=0)

    assert len(warned(use, cluster, close=False)) == 1
    assert cluster.backends[0].bodies("t", 0) == [b"x"]


def test_a_dropped_producer_is_collected_when_its_batches_are_answered(
    cluster: FakeCluster,
) -> None:
    backend = cluster.backends[0]

    def use(cluster: Any, close: bool) -> None:
        backend.hold()
        producer = Producer(cluster, linger_ms=0)
        kept = weakref.ref(producer._batcher)
        producer.send("t", b"x", queue_id=0)
        backend.wait_for(lambda: len(backend.puts) == 1)
        del producer
        gc.collect()
        batcher = kept()
        assert batcher is not None
        assert not batcher.closed
        backend.release()

    assert len(warned(use, cluster, close=False)) == 1


def test_a_client_that_holds_nothing_does_not_warn(cluster: FakeCluster) -> None:
    def use(cluster: Any, close: bool) -> None:
        Producer(cluster)
        AsyncConsumer(cluster, "t")
        with pytest.raises(Exception, match="fetch_bytes"):
            Consumer(cluster, "t", fetch_bytes=0)

    assert warned(use, cluster, close=False) == []
