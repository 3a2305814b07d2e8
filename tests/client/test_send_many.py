"""Many messages in one call: sent together, each with its own outcome, none sent if one cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable

import pytest

from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.messages.message import Message
from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.producer import Producer
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable
from raymq.store.base.format import PROPERTIES_MAX_BYTES
from tests.support.fake_backend import FakeBackend, FakeCluster

Make = Callable[..., Producer]
#: longer than any test: only what ends the linger time sends
FOREVER_MS = 3_600_000


def numbered(count: int, topic: str = "t") -> list[Message]:
    return [Message(topic=topic, body=b"%d" % number) for number in range(count)]


def test_messages_of_one_call_leave_in_one_batch_and_in_order(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    futures = producer.send_many(numbered(20), queue_id=1)
    assert [future.result(10).offset for future in futures] == [*range(20)]
    assert [put.batch.num_rows for put in backend.puts] == [20]
    assert backend.bodies("t", 1) == [b"%d" % number for number in range(20)]
    assert producer.send_many([]) == []


def test_messages_with_keys_go_to_the_queues_of_their_keys(
    make: Make, backend: FakeBackend
) -> None:
    producer = make()
    keyed = [Message(topic="t", body=b"x", key=b"k%d" % number) for number in range(8)]
    together = [future.result(10).queue_id for future in producer.send_many(keyed)]
    assert together == [producer.send(each).result(10).queue_id for each in keyed]
    assert len(set(together)) > 1


def test_a_message_that_cannot_be_stored_keeps_all_of_its_call_from_being_sent(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(max_message_bytes=10)
    for wrong, field in (
        (Message(topic="t", body=b"x" * 11), "body"),
        (Message(topic="t", body=b"x", tag="\x01"), "tag"),
        (Message(topic="nothing", body=b"x"), "topic"),
    ):
        with pytest.raises(Rejected) as refused:
            producer.send_many([*numbered(3), wrong])
        assert refused.value.field == field
    with pytest.raises(Rejected, match="queue"):
        producer.send_many(numbered(3), queue_id=99)
    producer.flush(10)
    assert backend.puts == []
    assert producer.statistics()["buffered_bytes"] == 0


def test_more_than_a_batch_is_sent_in_several(make: Make, backend: FakeBackend) -> None:
    producer = make(batch_bytes=1000, linger_ms=FOREVER_MS)
    many = [Message(topic="t", body=b"x" * 300) for _ in range(10)]
    assert [each.result(10).offset for each in producer.send_many(many, queue_id=0)] == [*range(10)]
    assert max(put.batch.num_rows for put in backend.puts) == 3


def test_messages_that_find_no_room_fail_by_themselves(make: Make, backend: FakeBackend) -> None:
    producer = make(batch_bytes=1000, buffer_bytes=1500, max_block_ms=50)
    backend.hold_answers()
    futures = producer.send_many([Message(topic="t", body=b"x" * 900)] * 3, queue_id=0)
    with pytest.raises(Unavailable, match="buffer_bytes"):
        futures[1].result(10)
    # Not one of a later call, either: that raises, because none of its messages is sent.
    with pytest.raises(Unavailable, match="buffer_bytes"):
        producer.send_many([Message(topic="t", body=b"x" * 900)], queue_id=0)
    backend.release()
    assert futures[0].result(10).offset == 0
    # No caller has seen the failure of the last one.
    with pytest.raises(Unavailable, match="buffer_bytes"):
        producer.flush(10)
    assert producer.statistics()["buffered_bytes"] == 0


def test_a_call_waits_once_for_room_and_sends_nothing_after_a_failure(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(batch_bytes=1000, buffer_bytes=1500, max_block_ms=50)
    waits: list[int] = []
    acquire = producer._batcher.limiter.acquire

    def counted(size: int) -> None:
        waits.append(size)
        acquire(size)

    producer._batcher.limiter.acquire = counted  # type: ignore[method-assign]
    backend.hold_answers()
    futures = producer.send_many([Message(topic="t", body=b"x" * 900)] * 9, queue_id=0)
    backend.release()
    ended = [future.done() and future._batch.exception() is not None for future in futures]
    assert futures[0].result(10).offset == 0
    assert ended[1:] == 8 * [True]
    assert len(waits) == 1
    with contextlib.suppress(Unavailable):
        producer.flush(10)
    assert backend.bodies("t", 0) == [b"x" * 900]


def test_a_delayed_message_with_too_many_properties_keeps_all_from_being_sent(
    make: Make, backend: FakeBackend
) -> None:
    producer = make()
    later = int(time.time() * 1000) + 60_000
    large = {"p": "x" * (PROPERTIES_MAX_BYTES - 80)}
    delayed = Message(topic="t", body=b"x", properties=large, deliver_at_ms=later)
    with pytest.raises(Rejected) as refused:
        producer.send_many([*numbered(2), delayed])
    assert refused.value.field == "properties"
    producer.flush(10)
    assert backend.puts == []
    assert producer.statistics()["buffered_bytes"] == 0


def test_acks_are_those_of_the_call_and_messages_with_other_acks_go_first(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    backend.hold_answers()
    producer.send("t", b"under way", queue_id=0)
    producer.send("t", b"quorum", queue_id=0)
    futures = producer.send_many(numbered(2), queue_id=0, acks="leader")
    backend.release()
    assert [future.result(10).offset for future in futures] == [2, 3]
    assert [put.acks for put in backend.puts] == ["quorum", "quorum", "leader"]


def test_a_closed_producer_sends_none(make: Make) -> None:
    producer = make()
    producer.send("t", b"x").result(10)
    producer.close()
    with pytest.raises(Rejected, match="closed"):
        producer.send_many(numbered(2))
    assert producer.statistics()["buffered_bytes"] == 0


def test_a_task_awaits_the_receipts_of_all(cluster: FakeCluster, backend: FakeBackend) -> None:
    async def main() -> None:
        async with AsyncProducer(cluster, linger_ms=FOREVER_MS) as producer:  # type: ignore[arg-type]
            # The first call looks the topic up, the second one finds it known.
            for first in (0, 5):
                receipts = await producer.send_many(numbered(5), queue_id=0)
                assert [each.offset for each in receipts] == [*range(first, first + 5)]
            assert await producer.send_many([]) == []

            await asyncio.create_task(producer.send_many(numbered(1), queue_id=0))
            with pytest.raises(Rejected, match="does not exist"):
                await producer.send_many([*numbered(1), *numbered(1, "nothing")], queue_id=0)
            with pytest.raises(Rejected, match="queue"):
                await producer.send_many(numbered(1), queue_id=99)
            assert producer.statistics()["buffered_bytes"] == 0

            # Nobody awaits these. They are sent.
            producer.send_many(numbered(2), queue_id=1)

    asyncio.run(main())
    assert backend.bodies("t", 1) == [b"0", b"1"]


def test_a_task_sends_more_than_a_batch_in_several_within_the_buffer(
    cluster: FakeCluster, backend: FakeBackend
) -> None:
    async def main() -> None:
        options = {"batch_bytes": 1000, "buffer_bytes": 5000, "linger_ms": FOREVER_MS}
        async with AsyncProducer(cluster, **options) as producer:  # type: ignore[arg-type]
            await producer.send_many(numbered(1), queue_id=0)
            backend.hold_answers()
            sent = producer.send_many([Message(topic="t", body=b"x" * 300)] * 30, queue_id=0)
            assert 3000 < producer.statistics()["buffered_bytes"] <= 5000
            assert producer.statistics()["deferred_messages"] > 10
            backend.release()
            assert [each.offset for each in await sent] == [*range(1, 31)]

    asyncio.run(main())
    assert max(put.batch.num_rows for put in backend.puts) <= 4


def test_an_await_of_many_raises_the_first_failure_after_all_have_an_outcome(
    cluster: FakeCluster, backend: FakeBackend
) -> None:
    async def main() -> None:
        async with AsyncProducer(cluster, delivery_timeout_ms=100) as producer:  # type: ignore[arg-type]
            await producer.send_many(numbered(1), queue_id=0)
            backend.unknown = 1000
            with pytest.raises(DeliveryUnknown):
                await producer.send_many(numbered(3), queue_id=0)
            backend.unknown = 0

    asyncio.run(main())


def test_batches_are_what_polls_return(
    cluster: FakeCluster, make: Make, backend: FakeBackend
) -> None:
    producer = make()
    for future in producer.send_many(numbered(7), queue_id=0):
        future.result(10)

    with Consumer(cluster, "t", start="earliest") as consumer:  # type: ignore[arg-type]
        batches = [*itertools.islice(consumer.batches(3), 3)]
        assert consumer.position(0) == 7
    assert [len(each) for each in batches] == [3, 3, 1]
    assert [each.body for each in itertools.chain(*batches)] == [b"%d" % n for n in range(7)]

    async def main() -> list[int]:
        sizes = []
        async with AsyncConsumer(cluster, "t", start="earliest") as reader:  # type: ignore[arg-type]
            async for messages in reader.batches(3):
                sizes.append(len(messages))
                if len(sizes) == 3:
                    break
        return sizes

    assert asyncio.run(main()) == [3, 3, 1]
