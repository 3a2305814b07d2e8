"""The errors of calls in trouble, through a real client, a real Flight server and a real shard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.actors.leader import put_acks
from raymq.client.produce import async_producer, send_window
from raymq.client.produce import producer as producer_module
from raymq.client.produce.producer import Producer
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, StorageFull, Unavailable
from raymq.store.base.running_flags import DISK_FULL
from tests.support.confirming import confirm_only
from tests.support.served_shard import HASTY, ServedShard
from tests.support.waiting import until


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[ServedShard]:
    """A shard with topic t of two queues."""
    with ServedShard(tmp_path / "store") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=2)
        yield shard


@pytest.fixture
def unsynced(tmp_path: Path) -> Iterator[ServedShard]:
    """A shard without GroupCommit: every put is stored, and none is answered before its flush is late."""
    with ServedShard(tmp_path / "store", HASTY) as shard:
        assert shard.host.store.topics.create("t", 2, [0]) is not None
        confirm_only(shard.host.store)
        yield shard


@pytest.fixture
def mirror_without_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServedShard]:
    """A mirror without a follower and without Replication. CommitLog answers waiting puts after 50 ms."""
    monkeypatch.setattr(put_acks, "REPLICATION_SILENCE_MS", 50)
    with ServedShard(tmp_path / "store", HASTY, mirror=True) as shard:
        assert shard.host.store.topics.create("t", 2, [0]) is not None
        sync_all(shard)
        yield shard


class LeapingClock(Clock):
    """Monotonic time that a test sets ahead."""

    ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_ms / 1000


def pause() -> None:
    threading.Event().wait(0.002)


def stored(shard: ServedShard, queue: int) -> int:
    """Messages in the log of a queue, readable or not."""
    return shard.host.store.state.next_offsets.get(("t", queue), 0)


def sync_all(shard: ServedShard) -> None:
    """Start GroupCommit, and wait until it has synced what is in the log."""
    shard.start_flusher()
    log = shard.host.store.log
    until(lambda: log.synced == log.end, pause)


def comes_up_late(shard: ServedShard) -> list[bool]:
    """The leader restarts: it is back when a client has looked for it in vain. Returns: whether it is."""
    shard.down()
    asked: list[bool] = []

    def resolve() -> dict[int, str]:
        asked.append(True)
        if len(asked) == 2:
            shard.up()
        return dict(shard.endpoints)

    shard.cluster.resolver = resolve
    return asked


# --- sends that are not answered ------------------------------------------------------------------


def test_without_its_follower_a_quorum_send_fails_with_the_last_status_of_the_shard(
    mirror_without_follower: ServedShard, caplog: pytest.LogCaptureFixture
) -> None:
    with mirror_without_follower.cluster.producer(acks="leader") as producer:
        assert producer.send("t", b"alone", queue_id=0).result(30).offset == 0
    clock = LeapingClock()
    with Producer(mirror_without_follower.cluster, clock=clock) as producer:
        sent = producer.send("t", b"x", queue_id=1)
        # However long the first answer takes.
        until(lambda: any("FLUSH_SLAVE_TIMEOUT" in each for each in caplog.messages), pause)
        clock.ahead_ms = 600_000
        with pytest.raises(DeliveryUnknown) as unknown:
            sent.result(60)
    assert unknown.value.status == "FLUSH_SLAVE_TIMEOUT"
    assert unknown.value.append["first_offset"] == 0
    assert (unknown.value.topic, unknown.value.queue_id, unknown.value.shard) == ("t", 1, 0)
    (said,) = [record for record in caplog.messages if "FLUSH_SLAVE_TIMEOUT" in record]
    assert "is sent again" in said


def test_a_full_disk_reaches_the_sender_in_seconds(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_window, "STORAGE_FULL_MS", 200)
    with shard.cluster.producer() as producer:
        producer.send("t", b"fits", queue_id=0).result(30)
        shard.host.store.flags.set(DISK_FULL)
        full = [producer.send("t", b"%d" % n, queue_id=n % 2) for n in range(4)]
        for sent in full:
            with pytest.raises(StorageFull) as refused:
                sent.result(60)
            assert refused.value.field == "disk"
        shard.host.store.flags.clear(DISK_FULL)
        assert producer.send("t", b"fits again", queue_id=0).result(30).offset == 1


def test_a_wait_that_is_over_says_nothing_of_the_message(unsynced: ServedShard) -> None:
    with unsynced.cluster.producer() as producer:
        sent = producer.send("t", b"x", queue_id=0)
        with pytest.raises(TimeoutError, match="ask again") as late:
            sent.result(0.05)
        assert not isinstance(late.value, RayMQError)
        with pytest.raises(TimeoutError, match="flush again"):
            producer.flush(0.05)
        unsynced.start_flusher()
        assert sent.result(30).offset == 0
    assert stored(unsynced, 0) == 1


def test_a_message_that_was_given_up_is_sent_again_and_stored_once(unsynced: ServedShard) -> None:
    cluster = unsynced.cluster
    with cluster.producer(delivery_timeout_ms=1_500, linger_ms=1000) as producer:
        lost = [producer.send("t", b"%d" % n, queue_id=1) for n in range(3)]
        for sent in lost:
            with pytest.raises(DeliveryUnknown) as unknown:
                sent.result(30)
        assert unknown.value.status == "FLUSH_DISK_TIMEOUT"

        sync_all(unsynced)
        again = [producer.resend(sent) for sent in lost]
        receipts = [sent.result(30) for sent in again]
        assert [receipt.offset for receipt in receipts] == [0, 1, 2]
        assert all(receipt.duplicate for receipt in receipts)

        # One that was sent again is not sent a third time. One with a receipt is not sent again.
        assert producer.resend(lost[2]).result(30) == receipts[2]
        with pytest.raises(Rejected, match="DeliveryUnknown"):
            producer.resend(again[0])
        assert producer.send("t", b"3", queue_id=1).result(30).offset == 3
    assert stored(unsynced, 1) == 4


def test_another_producer_sends_again_what_a_closed_one_left(unsynced: ServedShard) -> None:
    cluster = unsynced.cluster
    first = cluster.producer()
    sent = first.send("t", b"x", queue_id=0)
    with pytest.raises(DeliveryUnknown, match="closed"):
        first.close(0.3)
    with pytest.raises(DeliveryUnknown, match="closed"):
        sent.result(0)
    unsynced.start_flusher()
    with cluster.producer() as second:
        assert second.resend(sent).result(30).offset == 0
    assert stored(unsynced, 0) == 1


def test_columns_and_awaited_messages_are_sent_again_as_well(unsynced: ServedShard) -> None:
    async def main() -> None:
        async with unsynced.cluster.async_producer(delivery_timeout_ms=600) as hasty:
            sent = hasty.send("t", b"x", queue_id=0)
            with pytest.raises(DeliveryUnknown):
                await sent
        sync_all(unsynced)
        async with unsynced.cluster.async_producer() as patient:
            assert (await patient.resend(sent)).offset == 0

    columns: Any = {"body": [b"a", b"b"]}
    with unsynced.cluster.producer(delivery_timeout_ms=600) as hasty:
        (batch,) = hasty.send_batch("t", pa.record_batch(columns), queue_id=1)
        with pytest.raises(DeliveryUnknown):
            batch.result(30)
    asyncio.run(main())
    with unsynced.cluster.producer() as patient:
        assert patient.resend_batch(batch).result(30).last_offset == 1
    assert (stored(unsynced, 0), stored(unsynced, 1)) == (1, 2)


def test_a_block_that_failed_does_not_wait_for_receipts(
    unsynced: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "FAILED_EXIT_S", 0.05)
    producer = unsynced.cluster.producer(delivery_timeout_ms=3_600_000)

    def block() -> Any:
        with producer:
            sent.append(producer.send("t", b"x", queue_id=0))
            raise ZeroDivisionError

    sent: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        block()
    with pytest.raises(DeliveryUnknown, match="closed"):
        sent[0].result(0)


def test_an_async_block_that_failed_does_not_wait_for_receipts(
    unsynced: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_producer, "FAILED_EXIT_S", 0.05)

    async def main() -> None:
        async with unsynced.cluster.async_producer(delivery_timeout_ms=3_600_000) as producer:
            producer.send("t", b"x", queue_id=0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


# --- other calls ----------------------------------------------------------------------------------


def test_the_first_send_of_a_producer_waits_for_a_leader_that_restarts(shard: ServedShard) -> None:
    asked = comes_up_late(shard)
    with shard.cluster.producer() as producer:
        assert producer.send("t", b"x", queue_id=0).result(30).offset == 0
    assert len(asked) >= 2


def test_the_first_send_of_an_async_producer_waits_for_a_leader_that_restarts(
    shard: ServedShard,
) -> None:
    async def main() -> None:
        async with shard.cluster.async_producer() as producer:
            assert (await producer.send("t", b"x", queue_id=0)).offset == 0

    comes_up_late(shard)
    asyncio.run(main())


def test_a_look_up_of_a_topic_ends_in_time_and_with_its_producer(shard: ServedShard) -> None:
    async def main() -> None:
        producer = shard.cluster.async_producer()
        sent = producer.send("t", b"x")
        with pytest.raises(Rejected, match="closed"):
            await producer.close(0.05)
        with pytest.raises(Rejected, match="closed"):
            await sent

    shard.down()
    with shard.cluster.producer(max_block_ms=50) as producer, pytest.raises(Unavailable):
        producer.send("t", b"x")
    asyncio.run(main())


def test_a_send_of_an_async_producer_becomes_a_task(shard: ServedShard) -> None:
    async def main() -> None:
        async with shard.cluster.async_producer() as producer:
            # The first one waits for its topic to be looked up, the second one does not.
            for offset in range(2):
                task = asyncio.create_task(producer.send("t", b"x", queue_id=0))
                assert (await task).offset == offset
            # No message is stored before its wait is cancelled.
            with shard.host.store.put_lock:
                cancelled = asyncio.create_task(producer.send("t", b"x", queue_id=0))
                await asyncio.sleep(0)
                cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            sends = [producer.send("t", b"x", queue_id=0) for _ in range(3)]
            assert [each.offset for each in await asyncio.gather(*sends)] == [3, 4, 5]

    asyncio.run(main(), debug=True)


def calls_of_closed_clients(shard: ServedShard) -> Iterator[Callable[[], object]]:
    producer = shard.cluster.producer()
    producer.send("t", b"x", queue_id=0).result(30)
    consumer = shard.cluster.consumer("t", group="g", start="earliest")
    (message,) = consumer.poll(timeout=30)

    producer.close()
    consumer.close()
    yield lambda: producer.send("t", b"x")
    yield lambda: producer.send_batch("t", pa.record_batch({"body": [b"x"]}))
    yield lambda: consumer.poll(timeout=0)
    yield lambda: consumer.poll_batch(timeout=0)
    yield lambda: next(iter(consumer))
    yield lambda: consumer.seek(0, 0)
    yield lambda: consumer.seek(0, "earliest")
    yield consumer.commit
    yield consumer.committed
    yield lambda: consumer.send_back(message)


def test_no_call_of_a_closed_client_is_worth_a_retry(shard: ServedShard) -> None:
    for call in calls_of_closed_clients(shard):
        with pytest.raises(Rejected, match="closed") as closed:
            call()
        assert not closed.value.retriable


def test_a_topic_is_durable_when_it_is_created_also_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer that it waits for does not come.
    monkeypatch.setattr("raymq.client.topics.new_topic.CREATE_TIMEOUT_S", 1.0)
    with ServedShard(tmp_path / "store", HASTY) as shard:
        for _ in range(2):
            with pytest.raises(DeliveryUnknown) as unknown:
                shard.cluster.create_topic("t")
            assert unknown.value.status == "FLUSH_DISK_TIMEOUT"
        sync_all(shard)
        assert shard.cluster.create_topic("t") is False


def test_a_topic_that_is_durable_waits_for_no_later_put(shard: ServedShard) -> None:
    shard.stop_flusher()
    with shard.cluster.producer() as producer:
        sent = producer.send("t", b"x", queue_id=0)
        until(lambda: stored(shard, 0) == 1, pause)
        assert shard.cluster.create_topic("t", queues=2) is False
        assert not sent.done()
        shard.start_flusher()
        sent.result(30)


def test_a_fence_is_not_answered_before_it_is_confirmed_also_the_second_time(
    unsynced: ServedShard,
) -> None:
    # Another replica may lead, and have rows of earlier attempts that this one lacks.
    fence = {"producer_id": 7, "epoch": 3, "topic": "t"}
    for _ in range(2):
        with pytest.raises(DeliveryUnknown):
            unsynced.host.call("fence_producer", fence)
    sync_all(unsynced)
    assert unsynced.host.call("fence_producer", fence) == {"sequences": {}}


# --- messages that the shard refuses --------------------------------------------------------------


def send_some_without_key(send: Callable[..., Any], wrong: set[int]) -> list[Any]:
    """Ten messages to a compacted topic, which needs keys. Some have none."""
    return [
        send("keyed", b"%d" % n, queue_id=0, index_keys=() if n in wrong else (f"k{n}",))
        for n in range(10)
    ]


@pytest.mark.parametrize("wrong", [{3}, {0, 4, 5, 9}, set(range(10))])
def test_each_message_without_a_key_is_refused_and_the_others_are_stored_in_order(
    shard: ServedShard, wrong: set[int]
) -> None:
    shard.cluster.create_topic("keyed", queues=2, compacted=True)
    # They gather in one batch, because the first one waits for its answer.
    producer = shard.cluster.producer()
    sent = send_some_without_key(producer.send, wrong)
    for n in sorted(set(range(10)) - wrong):
        assert sent[n].result(30).offset == sum(each not in wrong for each in range(n))
    with pytest.raises(Rejected, match="has no KEYS"):
        producer.close()
    counted = producer.statistics()
    assert (counted["messages"], counted["failed_messages"]) == (10, len(wrong))

    for n in wrong:
        with pytest.raises(Rejected, match="has no KEYS"):
            sent[n].result(0)
    with shard.cluster.consumer("keyed", start="earliest", queues=[0]) as consumer:
        found = consumer.poll(timeout=10 if len(wrong) < 10 else 0.1)
    assert [int(each.body) for each in found] == sorted(set(range(10)) - wrong)


def test_a_failure_of_a_refused_message_that_its_caller_saw_is_not_raised_again(
    shard: ServedShard,
) -> None:
    shard.cluster.create_topic("keyed", queues=2, compacted=True)
    with shard.cluster.producer() as producer:
        sent = send_some_without_key(producer.send, {4})
        with pytest.raises(Rejected):
            sent[4].result(30)
        with pytest.raises(Rejected, match="send it, once it is right"):
            producer.resend(sent[4])


def test_awaited_messages_are_refused_one_by_one(shard: ServedShard) -> None:
    shard.cluster.create_topic("keyed", queues=2, compacted=True)

    async def run() -> list[Any]:
        async with shard.cluster.async_producer() as producer:
            sent = send_some_without_key(producer.send, {4})
            return await asyncio.gather(*sent, return_exceptions=True)

    found = asyncio.run(run())
    assert isinstance(found.pop(4), Rejected)
    assert [each.offset for each in found] == list(range(9))
