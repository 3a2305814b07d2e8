"""The producer and the consumer for asyncio, against shards in memory with real Flight."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.messages.message import Message, Receipt
from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.producer import Producer
from raymq.store.base.errors import Bug, DeliveryUnknown, Rejected, StorageFull, Unavailable
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeBackend, FakeCluster

#: longer than any test: only what ends the linger time sends
FOREVER_MS = 3_600_000


@pytest.fixture
def producer(cluster: FakeCluster) -> Callable[..., AsyncProducer]:
    return lambda **options: AsyncProducer(cluster, **options)  # type: ignore[arg-type]


@pytest.fixture
def consumer(cluster: FakeCluster) -> Callable[..., AsyncConsumer]:
    return lambda **options: AsyncConsumer(cluster, "t", **options)  # type: ignore[arg-type]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 20))


def put(backend: FakeBackend, *bodies: bytes, queue: int = 0) -> None:
    put_one(backend, PutRequest("t", queue, batch(list(bodies)), None, 0, 0, "quorum"))


async def arrival_of_a_put(backend: FakeBackend) -> None:
    """Wait until a message has left the producer, however long its topic's look-up takes."""
    while not backend.puts:
        await asyncio.sleep(0.001)


async def until_it_waits() -> None:
    """Let a task that was just made run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def receipt_of(send: Awaitable[Receipt]) -> Receipt:
    return await send


# --- producer -------------------------------------------------------------------------------------


def test_an_awaited_send_gives_its_receipt(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        async with producer(linger_ms=FOREVER_MS) as sender:
            first = await sender.send("t", b"x", queue_id=2)
            second = await sender.send(Message(topic="t", body=b"y"), queue_id=2)
            assert (first.queue_id, first.offset) == (2, 0)
            assert second.offset >= 0

    run(main())
    assert b"x" in backend.bodies("t", 2)


def test_many_tasks_that_await_their_sends_share_batches(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        async with producer(linger_ms=FOREVER_MS) as sender:
            backend.hold_answers()
            first = sender.send("t", b"first", queue_id=0)
            await asyncio.to_thread(backend.wait_for, lambda: len(backend.puts) == 1)
            sends = [receipt_of(sender.send("t", b"%d" % n, queue_id=0)) for n in range(200)]
            backend.release()
            await first
            receipts = await asyncio.gather(*sends)
            assert [receipt.offset for receipt in receipts] == list(range(1, 201))
            facts = sender.statistics()
            assert (facts["messages"], facts["batches"]) == (201, 2)
            assert facts["batch_messages_mean"] == 100.5

    run(main())
    assert [each.batch.num_rows for each in backend.puts] == [1, 200]


@pytest.mark.parametrize("linger_ms", [0, 1])
def test_a_send_that_is_not_awaited_is_sent_all_the_same(
    producer: Callable[..., AsyncProducer], backend: FakeBackend, linger_ms: int
) -> None:
    async def main() -> None:
        async with producer(linger_ms=linger_ms) as sender:
            for number in range(50):
                sender.send("t", b"%d" % number, queue_id=0)

    run(main())
    assert backend.bodies("t", 0) == [b"%d" % n for n in range(50)]


def test_a_full_buffer_defers_and_keeps_the_order(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        async with producer(linger_ms=FOREVER_MS, buffer_bytes=2_000) as sender:
            sends = [sender.send("t", b"%04d" % n * 100, queue_id=0) for n in range(40)]
            assert sender.statistics()["deferred_messages"] > 30
            receipts = await asyncio.gather(*map(receipt_of, sends))
            assert [receipt.offset for receipt in receipts] == list(range(40))

    run(main())
    assert backend.bodies("t", 0) == [b"%04d" % n * 100 for n in range(40)]


def test_a_buffer_that_stays_full_raises_and_the_loop_goes_on(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0, buffer_bytes=500, max_block_ms=50)
        backend.hold_answers()
        first = asyncio.ensure_future(receipt_of(sender.send("t", b"x" * 500)))
        with pytest.raises(Unavailable, match="buffer_bytes"):
            await sender.send("t", b"y" * 500)
        backend.release()
        await first
        await sender.close()

    run(main())


def test_a_cancelled_wait_takes_nothing_back(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0)
        await sender.send("t", b"0", queue_id=0)
        backend.hold_answers()
        sends = [sender.send("t", b"%d" % n, queue_id=0) for n in (1, 2)]
        tasks = [asyncio.ensure_future(receipt_of(send)) for send in sends]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.to_thread(backend.wait_for, lambda: len(backend.bodies("t", 0)) == 3)
        backend.release()
        assert (await tasks[1]).offset == 2
        assert tasks[0].cancelled()
        # It can be asked again.
        assert (await sends[0]).offset == 1
        await sender.close()

    run(main())


def test_tasks_may_await_one_send_at_once_and_again(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0)
        await sender.send("t", b"0", queue_id=0)
        backend.hold_answers()
        sends = [sender.send("t", b"1", queue_id=0), sender.send_many([message(b"2")], queue_id=0)]
        with pytest.raises(TimeoutError):
            await wait_for_result(sends[0], 0.01)
        tasks = [asyncio.create_task(send) for send in sends for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        backend.release()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        again: list[Any] = await asyncio.gather(*sends)
        assert [answers[1], answers[2], answers[3]] == [again[0], again[1], again[1]]
        assert [await sends[0], *await sends[1]] == [again[0], *again[1]]

        backend.refusals += [Rejected("no", field="body")]
        failed = sender.send("t", b"3", queue_id=0)
        for _ in range(2):
            (error,) = await asyncio.gather(failed, return_exceptions=True)
            assert isinstance(error, Rejected)
        await asyncio.gather(sender.close(), return_exceptions=True)

    async def wait_for_result(send: Any, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(send, timeout_s)
        except asyncio.TimeoutError as error:
            # In Python 3.10 it is not the builtin one.
            raise TimeoutError from error

    def message(body: bytes) -> Message:
        return Message(topic="t", body=body)

    run(main())


def test_a_failure_reaches_the_awaiting_task_or_else_the_flush(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0)
        with pytest.raises(Rejected, match="does not exist"):
            await sender.send("nothing", b"x")

        await sender.flush(10)
        sender.send("nothing", b"x")
        with pytest.raises(Rejected, match="does not exist"):
            await sender.flush(10)

        sender.send("t", b"x" * 100, queue_id=0)
        backend.max_message_bytes = 10
        sender.send("t", b"y" * 100, queue_id=0)
        with pytest.raises(Rejected):
            await sender.flush(10)

        await sender.close()
        with pytest.raises(Rejected, match="closed"):
            sender.send("t", b"x")

    run(main())


def test_a_flush_ends_in_time(producer: Callable[..., AsyncProducer], backend: FakeBackend) -> None:
    async def main() -> None:
        sender = producer(linger_ms=FOREVER_MS)
        backend.hold_answers()
        sender.send("t", b"x")
        await arrival_of_a_put(backend)
        with pytest.raises(TimeoutError, match="still under way"):
            await sender.flush(0.05)
        backend.release()
        await sender.close()

    run(main())


def test_columns_come_after_earlier_sends(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        async with producer(linger_ms=FOREVER_MS) as sender:
            sender.send("t", b"a", queue_id=0)
            rows = pa.record_batch({"body": [b"b", b"c"]})
            (receipt,) = await sender.send_batch("t", rows, queue_id=0)
            assert (receipt.first_offset, receipt.count) == (1, 2)

    run(main())
    assert backend.bodies("t", 0) == [b"a", b"b", b"c"]


def test_sending_starts_no_thread_per_call(producer: Callable[..., AsyncProducer]) -> None:
    async def main() -> None:
        async with producer() as sender:
            await sender.send("t", b"x")
            before = threading.active_count()
            for _ in range(20):
                await asyncio.gather(*(receipt_of(sender.send("t", b"x")) for _ in range(20)))
            assert threading.active_count() <= before

    run(main())


def test_acks_are_chosen_with_each_send_and_the_order_stays(
    cluster: FakeCluster, backend: FakeBackend
) -> None:
    with Producer(cluster, linger_ms=FOREVER_MS) as sender:  # type: ignore[arg-type]
        backend.hold_answers()
        sender.send("t", b"under way", queue_id=0)
        for number, acks in enumerate(["quorum", "quorum", "leader", "leader", "quorum"]):
            sender.send("t", b"%d" % number, queue_id=0, acks=acks)  # type: ignore[arg-type]
        with pytest.raises(Rejected, match="acks"):
            sender.send("t", b"x", acks="all")  # type: ignore[arg-type]
        backend.release()
    assert [(each.acks, each.batch.num_rows) for each in backend.puts[1:]] == [
        ("quorum", 2),
        ("leader", 2),
        ("quorum", 1),
    ]
    assert backend.bodies("t", 0)[1:] == [b"%d" % n for n in range(5)]


def test_statistics_count_batches_failures_and_what_is_under_way(
    cluster: FakeCluster, backend: FakeBackend
) -> None:
    with Producer(cluster, linger_ms=FOREVER_MS) as sender:  # type: ignore[arg-type]
        backend.hold_answers()
        for _ in range(3):
            sender.send("t", b"abc", queue_id=0)
        assert sender.statistics()["open_batches"] == 1
        assert sender.statistics()["under_way_batches"] == 1
        assert sender.statistics()["buffered_bytes"] > 9
        backend.release()

        sender.flush(10)
        facts = sender.statistics()
        assert (facts["messages"], facts["batches"], facts["failed_messages"]) == (3, 2, 0)
        assert 2 * facts["batch_bytes_mean"] == facts["bytes"] > 9
        assert facts["ack_ms_mean"] > 0
        assert facts["queue_ms_mean"] >= 0
        assert (facts["open_batches"], facts["under_way_batches"]) == (0, 0)
        assert facts["buffered_bytes"] == 0

        backend.refusals.append(Rejected("no", field="body"))
        with pytest.raises(Rejected):
            sender.send("t", b"abc", queue_id=0).result(10)
        assert sender.statistics()["failed_messages"] == 1


def test_a_cancelled_flush_leaves_the_failure_to_the_next_one(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0)
        await sender.send("t", b"0", queue_id=0)

        backend.hold_answers()
        sender.send("t", b"1", queue_id=0)
        sender.send("nothing", b"x")
        while sender.statistics()["deferred_messages"]:
            await asyncio.sleep(0.001)

        flushing = asyncio.ensure_future(sender.flush(10))
        await asyncio.sleep(0.01)
        flushing.cancel()
        await asyncio.wait({flushing})
        assert flushing.cancelled()

        backend.release()
        with pytest.raises(Rejected, match="does not exist"):
            await sender.close()

    run(main())


def test_a_message_that_a_hasty_close_calls_unsent_is_not_stored(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0, buffer_bytes=500)
        backend.hold_answers()
        sends = [sender.send("t", b"%d" % n * 400, queue_id=0) for n in range(5)]
        await arrival_of_a_put(backend)
        with pytest.raises(DeliveryUnknown):
            await sender.close(0.1)
        ended = await asyncio.gather(*map(receipt_of, sends), return_exceptions=True)
        assert [type(each) for each in ended] == [DeliveryUnknown] + 4 * [Rejected]
        backend.release()

    run(main())
    assert backend.bodies("t", 0) == [b"0" * 400]


@pytest.mark.parametrize("turns", [0, 1])
def test_messages_whose_helper_task_was_cancelled_are_sent_by_the_flush(
    producer: Callable[..., AsyncProducer], backend: FakeBackend, turns: int
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0)
        send = sender.send("t", b"x", queue_id=0)
        for _ in range(turns):
            await asyncio.sleep(0)
        helper = sender._drainer
        assert helper is not None
        helper.cancel()
        await sender.flush(10)
        assert (await send).offset == 0
        await sender.close()

    run(main())


def test_a_helper_task_that_is_cancelled_when_room_appears_ends(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0, buffer_bytes=500, max_block_ms=2_000)
        backend.hold_answers()
        first = sender.send("t", b"x" * 500)
        await arrival_of_a_put(backend)
        sender.send("t", b"y" * 500)
        helper = sender._drainer
        assert helper is not None
        await until_it_waits()
        sender._released.set()
        helper.cancel()
        await asyncio.wait({helper})
        assert helper.cancelled()
        backend.release()
        await first
        await sender.close()

    run(main())


def test_an_unforeseen_error_reaches_the_awaiting_task(
    producer: Callable[..., AsyncProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        sender = producer()

        def fail(topic: str) -> None:
            raise KeyError(topic)

        monkeypatch.setattr(sender._batcher.batch_sender, "topic", fail)
        for _ in range(2):
            with pytest.raises(Bug, match="KeyError"):
                await sender.send("t", b"x")
        await sender.close()

    run(main())


# --- consumer -------------------------------------------------------------------------------------


def test_poll_waits_for_a_message_and_no_longer(
    consumer: Callable[..., AsyncConsumer], backend: FakeBackend
) -> None:
    async def main() -> None:
        async with consumer(start="latest") as reader:
            assert await reader.poll(10, 0) == []
            waiting = asyncio.ensure_future(reader.poll(10, 15))
            await asyncio.to_thread(put, backend, b"late", queue=3)
            (found,) = await waiting
            assert (found.queue_id, found.body) == (3, b"late")

    run(main())


def test_a_cancelled_poll_has_taken_nothing(
    consumer: Callable[..., AsyncConsumer], backend: FakeBackend
) -> None:
    async def main() -> None:
        async with consumer(start="earliest", group="g") as reader:
            for number in range(20):
                waiting = asyncio.ensure_future(reader.poll(10, 15))
                await asyncio.sleep(0)
                put(backend, b"%d" % number)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                if not waiting.cancelled():
                    assert [m.body for m in waiting.result()] == [b"%d" % number]
                else:
                    assert reader.position(0) == number
                    assert [m.body for m in await reader.poll(10, 15)] == [b"%d" % number]
            await reader.commit()
            assert (await reader.committed())[0] == 20

    run(main())


@pytest.mark.parametrize(
    "read",
    [
        lambda reader: reader.poll(10, 2),
        lambda reader: reader.poll_batch(10, 2),
        lambda reader: anext(reader),
    ],
    ids=["poll", "poll_batch", "async for"],
)
def test_a_read_that_is_cancelled_when_messages_arrive_ends_without_them(
    consumer: Callable[..., AsyncConsumer],
    backend: FakeBackend,
    read: Callable[[AsyncConsumer], Coroutine[Any, Any, Any]],
) -> None:
    async def main() -> None:
        async with consumer(start="earliest") as reader:
            waiting = asyncio.create_task(read(reader))
            await until_it_waits()
            put(backend, b"x")
            reader._changed.set()
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()
            assert reader.position(0) == 0
            assert [m.body for m in await reader.poll(10, 15)] == [b"x"]

    run(main())


def test_async_for_hands_out_one_by_one_and_positions_follow(
    consumer: Callable[..., AsyncConsumer], backend: FakeBackend
) -> None:
    put(backend, *(b"%d" % n for n in range(10)))

    async def main() -> None:
        async with consumer(start="earliest", group="g", queues=[0]) as reader:
            async for message in reader:
                if message.offset == 3:
                    break
            await reader.commit()
            assert await reader.committed() == {0: 4}

            # Messages that the loop had taken and not handed out are still there, at once.
            assert [m.offset for m in await reader.poll(2, 10)] == [4, 5]
            assert (await reader.poll_batch(100, 10)).column("offset").to_pylist() == [6, 7, 8, 9]

            await reader.seek(0, 1)
            async for message in reader:
                assert message.offset == 1
                break
            await reader.seek(0, "latest")
            assert reader.positions() == {0: 10}

    run(main())


def test_a_group_goes_on_where_it_committed(
    consumer: Callable[..., AsyncConsumer], backend: FakeBackend
) -> None:
    put(backend, b"a", b"b", b"c")

    async def main() -> None:
        async with consumer(group="g", start="earliest", queues=[0]) as reader:
            await reader.commit({0: 2})
        async with consumer(group="g", queues=[0]) as reader:
            assert [m.body for m in await reader.poll(10, 10)] == [b"c"]

    run(main())


def test_a_message_is_sent_back_for_the_group(
    consumer: Callable[..., AsyncConsumer], backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, b"a")
    asked: list[dict[str, Any]] = []

    def call(op: str, args: dict[str, Any], known: Any = backend.call) -> dict[str, Any]:
        if op == "send_back":
            asked.append(args)
            return {"topic": "%RETRY%g"}
        return {"created": True} if op == "create_topic" else known(op, args)

    monkeypatch.setattr(backend, "call", call)

    async def main() -> None:
        async with consumer(group="g", start="earliest") as reader:
            (message,) = await reader.poll(1, 10)
            assert await reader.send_back(message, delay_level=3) == "%RETRY%g"
        async with consumer(start="earliest") as reader:
            with pytest.raises(Rejected, match="group"):
                await reader.send_back(message)

    run(main())
    where = {"topic": "t", "queue_id": 0, "offset": 0}
    assert asked == [{"group": "g", **where, "delay_level": 3}]


def test_what_a_consumer_refuses(consumer: Callable[..., AsyncConsumer]) -> None:
    async def main() -> None:
        reader = consumer()
        with pytest.raises(Rejected, match="not open yet"):
            reader.positions()
        with pytest.raises(Rejected, match="start"):
            await reader.poll()
        # The next call tries again.
        with pytest.raises(Rejected, match="start"):
            await reader.open()
        await reader.close()
        with pytest.raises(Rejected, match="closed"):
            await reader.poll()
        with pytest.raises(Rejected, match="pickle"):
            pickle.dumps(reader)

    run(main())


def test_a_cancelled_close_closes_all_the_same(consumer: Callable[..., AsyncConsumer]) -> None:
    async def main() -> None:
        reader = consumer(start="earliest")
        await reader.open()
        closing = asyncio.ensure_future(reader.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        await reader.close()
        with pytest.raises(Rejected, match="closed"):
            await reader.poll()

    run(main())
    assert not [each for each in threading.enumerate() if each.name.startswith("raymq-read")]


def test_a_shard_that_stays_unreachable_raises_unavailable(
    cluster: FakeCluster, consumer: Callable[..., AsyncConsumer]
) -> None:
    async def main() -> None:
        async with consumer(start="earliest", unavailable_timeout_ms=50) as reader:
            await asyncio.to_thread(cluster.down)
            with pytest.raises(Unavailable):
                await reader.poll(10, 15)

    run(main())


def test_a_full_disk_reaches_the_awaiting_task(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    async def main() -> None:
        sender = producer(linger_ms=0, delivery_timeout_ms=200)
        backend.refusals += [StorageFull("full")] * 1000
        with pytest.raises((StorageFull, Unavailable)):
            await sender.send("t", b"x")
        backend.refusals.clear()
        await sender.close()

    run(main())


def in_another_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives in a loop of its own, after the first one has ended."""
    return run(main)


def test_a_consumer_in_another_event_loop_is_refused_and_can_be_closed_there(
    consumer: Callable[..., AsyncConsumer], backend: FakeBackend
) -> None:
    put(backend, b"x")
    reading = consumer(start="earliest")
    assert [each.body for each in run(reading.poll(timeout=10))] == [b"x"]

    async def use() -> None:
        for call in (lambda: reading.poll(timeout=0.01), reading.open, lambda: anext(reading)):
            with pytest.raises(Rejected, match="another event loop") as refused:
                await call()
            assert refused.value.field == "loop"
        await reading.close()
        await reading.close()

    in_another_loop(use())
    assert reading._consumer is not None
    assert reading._consumer._assigned.state.closed
    with pytest.raises(Rejected, match="closed"):
        in_another_loop(reading.poll())


def test_a_consumer_whose_loop_ended_while_it_opened_can_be_closed(
    consumer: Callable[..., AsyncConsumer],
) -> None:
    reading = consumer(start="earliest")

    async def begin() -> None:
        asyncio.ensure_future(reading.open())  # noqa: RUF006
        await asyncio.sleep(0)

    run(begin())
    in_another_loop(reading.close())
    with pytest.raises(Rejected, match="closed"):
        in_another_loop(reading.open())


def test_a_producer_in_another_event_loop_is_refused_and_can_be_closed_there(
    producer: Callable[..., AsyncProducer], backend: FakeBackend
) -> None:
    sending = producer(linger_ms=FOREVER_MS)
    lost: list[Awaitable[Receipt]] = []

    async def send() -> None:
        await sending.send("t", b"0", queue_id=0)
        sending.send("t", b"1", queue_id=0)
        # Its topic is not looked up yet.
        lost.append(sending.send("unknown", b"2"))

    async def close() -> None:
        with pytest.raises(Rejected, match="another event loop"):
            sending.send("t", b"3")
        with pytest.raises(Rejected, match="closed"):
            await sending.close(20)

    run(send())
    in_another_loop(close())
    assert backend.bodies("t") == [b"0", b"1"]
    with pytest.raises(Rejected, match="closed"):
        in_another_loop(receipt_of(lost[0]))


def test_a_producer_is_not_closed_in_another_loop_while_its_own_runs(
    producer: Callable[..., AsyncProducer],
) -> None:
    sending = producer()

    async def main() -> None:
        await sending.send("t", b"0", queue_id=0)
        with pytest.raises(Rejected, match="each in its own"):
            await asyncio.to_thread(asyncio.run, sending.close())
        await sending.send("t", b"1", queue_id=0)
        await sending.close()

    run(main())
