"""When a message leaves: at once, or together with those that came while earlier ones were under way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.linger import SWEEP_MIN, LingerQueue
from raymq.client.produce.open_batch import OpenBatch
from raymq.client.produce.producer import Producer
from raymq.client.produce.queue_sequence import BatchReceipt
from raymq.client.produce.send_future import BatchFuture
from raymq.client.transport.chained_future import wake_callers
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown
from raymq.store.records.record import SMALL_ROWS_MAX, SmallBatch
from tests.support.fake_backend import FakeBackend, FakeCluster, open_batch
from tests.support.waiting import until

Make = Callable[..., Producer]

#: longer than any test: only what ends the linger time sends
FOREVER_MS = 3_600_000


def rows(backend: FakeBackend) -> list[int]:
    """Of each put so far."""
    return [put.batch.num_rows for put in backend.puts]


def test_a_message_leaves_at_once_when_nothing_is_under_way(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    for _ in range(3):
        # No caller waits for a receipt.
        future = producer.send("t", b"x", queue_id=0)
        until(future.done, lambda: threading.Event().wait(0.001))
    assert rows(backend) == [1, 1, 1]


def test_messages_of_all_queues_leave_together_with_the_answer(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    backend.hold_answers()
    first = producer.send("t", b"under way", queue_id=0)
    backend.wait_for(lambda: len(backend.puts) == 1)
    futures = [producer.send("t", b"%d" % n, queue_id=n % 4) for n in range(12)]
    assert rows(backend) == [1]

    messages = []
    put = backend.put

    def spy(requests: Any, *args: Any, **options: Any) -> Any:
        messages.append(len(requests))
        return put(requests, *args, **options)

    backend.put = spy  # type: ignore[method-assign]
    backend.release()
    assert [future.result(10).queue_id for future in futures] == [n % 4 for n in range(12)]
    assert first.done()
    assert rows(backend) == [1, 3, 3, 3, 3]
    assert messages == [4], "the batches of four queues travel in one message"
    for queue in range(4):
        mine = [b"%d" % n for n in range(queue, 12, 4)]
        assert backend.bodies("t", queue)[-3:] == mine


def test_a_caller_that_waits_does_not_send_the_messages_of_others_one_by_one(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    backend.hold_answers()
    producer.send("t", b"under way", queue_id=0)
    offsets: list[int] = []

    def send(number: int) -> None:
        offsets.append(producer.send("t", b"%d" % number, queue_id=0).result(30).offset)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    until(
        lambda: len(open_batch(producer, "t", 0).bodies) == 20,
        lambda: threading.Event().wait(0.001),
    )
    backend.release()
    for thread in threads:
        thread.join(30)
    assert sorted(offsets) == list(range(1, 21))
    assert rows(backend) == [1, 20]


def test_all_callers_of_a_batch_are_woken_although_some_have_given_up(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    backend.hold_answers()
    producer.send("t", b"under way", queue_id=0)
    futures = [producer.send("t", b"x", queue_id=0) for _ in range(12)]
    offsets: list[int] = []

    def wait(number: int) -> None:
        if number % 3 == 0:
            with pytest.raises(TimeoutError):
                futures[number].result(0.001)
        else:
            offsets.append(futures[number].result().offset)

    threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads[::3]:
        thread.join(30)
    batch = futures[0]._batch
    until(lambda: len(batch._blocked) == 8, lambda: threading.Event().wait(0.001))
    backend.release()
    for thread in threads:
        thread.join(30)
    assert sorted(offsets) == [row + 1 for row in range(12) if row % 3]


def test_callers_of_batches_that_are_answered_together_are_woken_one_by_the_other() -> None:
    batches = [BatchFuture(1) for _ in range(5)]
    # Two callers wait for the second batch, and none for the fourth one.
    waited_for = [0, 1, 1, 2, 4]
    threads = [
        threading.Thread(target=batches[number].result, args=(30,), daemon=True)
        for number in waited_for
    ]
    for thread in threads:
        thread.start()
    until(
        lambda: sum(len(batch._blocked) for batch in batches) == len(threads),
        lambda: threading.Event().wait(0.001),
    )

    for batch in batches:
        batch.finish(BatchReceipt("t", 0, 0, 0, 1, 0, 0, 0))
    with patch.object(BatchFuture, "wake_next") as wake_next:
        wake_callers(batches)
    # This thread wakes one caller only.
    assert wake_next.call_count == 1

    wake_callers(batches)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [batch.woken_after for batch in batches] == [None] * 5


def test_tasks_that_wait_share_a_batch_while_another_one_is_under_way(
    cluster: FakeCluster, backend: FakeBackend
) -> None:
    async def main() -> None:
        async with AsyncProducer(cluster, linger_ms=FOREVER_MS) as producer:  # type: ignore[arg-type]
            backend.hold_answers()
            under_way = asyncio.ensure_future(producer.send("t", b"under way", queue_id=0))
            await asyncio.to_thread(backend.wait_for, lambda: len(backend.puts) == 1)
            tasks = [
                asyncio.ensure_future(producer.send("t", b"%d" % n, queue_id=0)) for n in range(20)
            ]
            await asyncio.sleep(0)
            backend.release()
            receipts = await asyncio.gather(under_way, *tasks)
            assert [receipt.offset for receipt in receipts] == list(range(21))

    asyncio.run(main())
    assert rows(backend) == [1, 20]


def test_the_linger_time_ends_also_while_something_is_under_way(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=1)
    backend.hold_answers()
    producer.send("t", b"under way", queue_id=0)
    producer.send("t", b"second", queue_id=0)
    backend.wait_for(lambda: len(backend.puts) == 2)
    backend.release()


def test_without_a_linger_time_messages_are_gathered_until_the_answer(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=0)
    backend.hold_answers()
    futures = [producer.send("t", b"%d" % n, queue_id=0) for n in range(20)]
    backend.wait_for(lambda: len(backend.puts) == 1)
    backend.release()
    assert [future.result(10).offset for future in futures] == list(range(20))
    assert rows(backend) == [1, 19]


def test_without_a_linger_time_a_message_leaves_when_the_one_before_it_is_given_up(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=0, delivery_timeout_ms=300)
    backend.hold_answers()
    first = producer.send("t", b"never answered", queue_id=0)
    second = producer.send("t", b"second", queue_id=1)
    with pytest.raises(DeliveryUnknown):
        first.result(30)
    backend.wait_for(lambda: 1 in {put.queue_id for put in backend.puts})
    backend.release()
    with contextlib.suppress(DeliveryUnknown):
        second.result(30)


def test_closed_batches_do_not_pile_up_after_an_open_one() -> None:
    def batch() -> OpenBatch:
        due_s = Clock().monotonic() + FOREVER_MS
        return OpenBatch(("t", 0), "quorum", 0.0, due_s, None, None, 0)

    queue = LingerQueue(threading.Condition(), Clock(), linger_s=0, delivery_timeout_s=FOREVER_MS)
    first = batch()
    with queue._changed:
        queue.add(first)
        for _ in range(5 * SWEEP_MIN):
            later = batch()
            queue.add(later)
            later.closed = True
            assert len(queue.by_due_time) <= SWEEP_MIN
        assert queue.by_due_time[0] is first
        queue.end()


def test_a_message_waits_only_for_what_was_under_way_before_it(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS, batch_bytes=1000)
    backend.hold_answers()
    producer.send("t", b"under way", queue_id=0)
    small = producer.send("t", b"small", queue_id=1)
    # A full batch leaves at once, and has no answer when the small message leaves.
    producer.send("t", bytes(1000), queue_id=0)
    backend.wait_for(lambda: len(backend.puts) == 2)
    backend.release_first()
    backend.wait_for(lambda: len(backend.puts) == 3)
    assert backend.puts[2].queue_id == 1
    assert not small.done()
    backend.release()
    assert small.result(10).offset == 0


@pytest.mark.parametrize("count", [SMALL_ROWS_MAX, SMALL_ROWS_MAX + 1])
def test_few_rows_travel_as_they_are_and_many_as_columns(
    make: Make, backend: FakeBackend, count: int
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    backend.hold_answers()
    producer.send("t", b"under way", queue_id=0)
    futures = [
        producer.send("t", b"%d" % n, queue_id=0, tag=f"tag{n % 3}", properties={"n": str(n)})
        for n in range(count)
    ]
    backend.release()
    assert [future.result(10).offset for future in futures] == list(range(1, count + 1))
    assert isinstance(backend.puts[1].batch, SmallBatch) == (count <= SMALL_ROWS_MAX)
    assert backend.bodies("t", 0)[1:] == [b"%d" % n for n in range(count)]
