"""A client that its program drops without closing it warns, and lets go of its threads."""

from __future__ import annotations

import asyncio
import gc
import pickle
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.producer import Producer
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Rejected
from tests.support.cluster_program import run_program
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
        backend.hold_answers()
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


# --- the end of a program ---------------------------------------------------------------------------


def run_to_its_end(fake: FakeCluster, program: str, *, flush_s: float = 30.0) -> tuple[int, str]:
    """Run a program that waits so long for receipts at its end. Returns: its exit code and stderr."""
    head = f"from raymq.client import unclosed; unclosed.EXIT_FLUSH_S = {flush_s}\n"
    return run_program(fake, head + textwrap.dedent(program))


@pytest.mark.parametrize("close", ["", "raise SystemExit(0)", "import raymq; del producer"])
def test_a_program_that_ends_without_close_stores_what_it_sent(
    cluster: FakeCluster, close: str
) -> None:
    program = f"""
        producer = cluster.producer(linger_ms=60_000)
        for number in range(1000):
            producer.send("t", b"%d" % number, queue_id=0)
        {close}
    """
    assert run_to_its_end(cluster, program) == (0, "")
    assert cluster.backends[0].bodies("t") == [b"%d" % number for number in range(1000)]


def test_a_program_that_ends_without_receipts_says_how_many_messages_it_may_have_lost(
    cluster: FakeCluster,
) -> None:
    backend = cluster.backends[0]
    backend.hold_answers()
    program = """
        producers = [cluster.producer(), cluster.producer()]
        for number in range(5):
            for producer in producers:
                producer.send("t", b"x", queue_id=0)
    """
    code, stderr = run_to_its_end(cluster, program, flush_s=0.2)
    backend.release()
    (line,) = stderr.splitlines()
    assert line.startswith("raymq: 10 messages of an unclosed Producer have no receipt")
    assert code == 0


def test_a_failure_that_no_caller_has_seen_is_counted_at_the_end_of_the_program(
    cluster: FakeCluster,
) -> None:
    cluster.backends[0].refusals = [Rejected("no"), Rejected("no"), Rejected("no")]
    program = """
        producer = cluster.producer()
        seen = producer.send("t", b"seen", queue_id=0)
        try:
            seen.result(30)
        except Exception:
            producer.send("t", b"unseen", queue_id=0)
    """
    code, stderr = run_to_its_end(cluster, program)
    assert (code, len(stderr.splitlines())) == (0, 1)
    assert stderr.startswith("raymq: 1 messages of an unclosed Producer")


def test_a_program_that_closed_its_producers_says_nothing_at_its_end(cluster: FakeCluster) -> None:
    program = """
        with cluster.producer() as producer:
            producer.send("t", b"x", queue_id=0)
    """
    assert run_to_its_end(cluster, program) == (0, "")


def test_messages_that_a_loop_left_unsent_are_counted(cluster: FakeCluster) -> None:
    program = """
        async def main():
            producer = cluster.async_producer()
            for _ in range(7):
                producer.send("t", b"x")

        asyncio.run(main())
    """
    code, stderr = run_to_its_end(cluster, program)
    assert (code, len(stderr.splitlines())) == (0, 1)
    assert stderr.startswith("raymq: 7 messages of an unclosed AsyncProducer")


def test_messages_that_a_loop_handed_over_are_stored(cluster: FakeCluster) -> None:
    program = """
        async def main():
            producer = cluster.async_producer(linger_ms=60_000)
            await producer.send("t", b"0", queue_id=0)
            for number in range(1, 100):
                producer.send("t", b"%d" % number, queue_id=0)

        asyncio.run(main())
    """
    assert run_to_its_end(cluster, program) == (0, "")
    assert cluster.backends[0].bodies("t") == [b"%d" % number for number in range(100)]


def test_a_forked_child_that_ends_does_not_count_its_parents_messages(
    cluster: FakeCluster,
) -> None:
    program = """
        producer = cluster.producer(linger_ms=60_000)
        producer.send("t", b"x", queue_id=0).result(30)
        producer.send("t", b"y", queue_id=0)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
    """
    code, stderr = run_to_its_end(cluster, program)
    assert code == 0
    assert "raymq:" not in stderr
    assert cluster.backends[0].bodies("t") == [b"x", b"y"]


@pytest.mark.parametrize("close", ["", "client.close()"])
@pytest.mark.parametrize(
    "make",
    [
        "client = cluster; client.describe_topic('t')",
        "client = cluster.consumer('t', start='earliest'); client.poll(timeout=0)",
        "client = cluster.producer(); client.send('t', b'x', queue_id=0).result(30)",
    ],
)
def test_a_client_that_outlives_the_names_of_its_module_ends_without_a_word(
    cluster: FakeCluster, make: str, close: str
) -> None:
    # Python clears modules before `sys`, and of `sys` first the names with an underscore: stderr still works then.
    # An object in a cycle may be collected so late, too.
    program = f"{make}\n{close}\nsys._kept = client\n"
    assert run_to_its_end(cluster, program) == (0, "")


def test_no_thread_reads_any_more_when_python_takes_its_modules_down(cluster: FakeCluster) -> None:
    # One that waits in gRPC then may end the process with a signal.
    program = """
        import atexit, threading

        def look():
            assert not any(thread.name.startswith("raymq-reader") for thread in threading.enumerate())

        # Exit functions run in reverse order.
        atexit.register(look)
        client = cluster.consumer("t", start="earliest")
        assert any(thread.name.startswith("raymq-reader") for thread in threading.enumerate())
        sys._kept = client
    """
    assert run_to_its_end(cluster, program) == (0, "")


def test_a_producer_that_is_dropped_while_no_thread_can_start_ends_without_a_word(
    cluster: FakeCluster,
) -> None:
    # So does Python from 3.12 on, once the program ends.
    program = """
        import gc
        from raymq.client.client_thread import ClientThread

        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        producer = cluster.producer()
        producer.send("t", b"x", queue_id=0).result(30)
        ClientThread.start = refuse
        del producer
        gc.collect()
    """
    assert run_to_its_end(cluster, program) == (0, "")
