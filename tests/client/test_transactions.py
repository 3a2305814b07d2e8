"""Transactions of producers at real shards: messages, offsets and acks count together, or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.client.consume.consumer import Consumer
from raymq.client.messages.message import Message, Receipt
from raymq.client.produce import transaction_rows
from raymq.client.workers.leased import LeasedMessage
from raymq.client.workers.workers import Workers
from raymq.cluster.cluster import Cluster
from raymq.errors import CommitUnknown, DeliveryUnknown, Fenced, RayMQError, Rejected, Unavailable
from raymq.store.base.failpoints import failpoint
from raymq.store.base.format import TIMER_TOPIC
from tests.support.served_shard import ServedCluster, ServedShard
from tests.support.waiting import until

WAIT_S = 20.0


class Program:
    """A producer on one served shard with topics in and out, and what it has put there."""

    def __init__(self, shard: ServedShard, number: int) -> None:
        self.shard, self.cluster = shard, shard.cluster
        self.into, self.out = f"in-{number}", f"out-{number}"
        for topic in (self.into, self.out):
            self.cluster.create_topic(topic, queues=2)
        self.producer = self.cluster.producer()
        self._open: list[Any] = [self.producer]

    def put(self, count: int) -> None:
        with self.cluster.producer() as producer:
            for number in range(count):
                producer.send(self.into, b"%d" % number, queue_id=number % 2)

    def consumer(self, **options: Any) -> Consumer:
        self._open.append(
            self.cluster.consumer(self.into, **{"group": "g", "start": "earliest", **options})
        )
        return self._open[-1]  # type: ignore[no-any-return]

    def workers(self, **options: Any) -> Workers:
        self._open.append(self.cluster.workers(self.into, **{"group": "w", **options}))
        return self._open[-1]  # type: ignore[no-any-return]

    def take(self, workers: Workers) -> LeasedMessage:
        message = workers.get(WAIT_S)
        assert message is not None, "no message came"
        return message

    def sent(self) -> list[bytes]:
        """The bodies of all messages of `out`."""
        count, found = sum(self.ends()), list[bytes]()
        with self.cluster.consumer(self.out, start="earliest", queues=[0, 1]) as consumer:
            until(
                lambda: len(found) >= count, lambda: found.extend(m.body for m in consumer.poll())
            )
        return sorted(found)

    def ends(self) -> list[int]:
        return [int(each["max_offset"]) for each in self.cluster.describe_topic(self.out)["queues"]]

    def close(self) -> None:
        for each in reversed(self._open):
            each.close()


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("transactions") / "shard") as made:
        made.start_flusher()
        yield made


numbers = iter(range(1_000))


@pytest.fixture
def program(shard: ServedShard) -> Iterator[Program]:
    made = Program(shard, next(numbers))
    yield made
    made.close()


def read(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    until(lambda: len(found) >= count, lambda: found.extend(m.body for m in consumer.poll()))
    return found


# --- what counts together -------------------------------------------------------------------------


def test_messages_and_offsets_count_together(program: Program) -> None:
    program.put(4)
    consumer = program.consumer()
    read(consumer, 4)
    with program.producer.transaction() as txn:
        places = [txn.send(program.out, b"a", queue_id=0), txn.send(program.out, b"b", key=b"k")]
        txn.commit_offsets(consumer)
        assert program.ends() == [0, 0]
        assert consumer.committed() == {}
    assert places == [0, 1]
    assert consumer.committed() == {0: 2, 1: 2}
    assert program.sent() == [b"a", b"b"]
    receipts = txn.commit()
    assert [each.offset for each in receipts] == [0, 0] or receipts[0].queue_id == 0
    assert all(isinstance(each, Receipt) and not each.duplicate for each in receipts)


def test_messages_and_acks_count_together(program: Program) -> None:
    program.put(3)
    workers = program.workers(lease_s=5)
    first, second = program.take(workers), program.take(workers)
    with program.producer.transaction() as txn:
        txn.send(program.out, first.body)
        txn.ack(first)
        with pytest.raises(Rejected, match="settled already"):
            first.ack()
    assert len(program.sent()) == 1
    with pytest.raises(Rejected, match="settled already"):
        first.ack()
    second.ack()
    assert program.take(workers).body not in (first.body, second.body)


def test_acks_of_a_batch_take_a_mask(program: Program) -> None:
    program.put(4)
    workers = program.workers()
    batch = workers.get_batch(2, WAIT_S)
    assert len(batch) == 2
    with program.producer.transaction() as txn:
        txn.ack(batch, [True, False])
    with program.producer.transaction() as txn:
        txn.ack(batch)
        txn.ack(batch)
    rest = workers.get_batch(10, WAIT_S)
    assert set(rest.columns["body"].to_pylist()).isdisjoint(batch.columns["body"].to_pylist())


def test_given_offsets_are_committed(program: Program) -> None:
    program.put(4)
    consumer = program.consumer()
    read(consumer, 4)
    with program.producer.transaction() as txn:
        txn.commit_offsets(consumer)
        txn.commit_offsets(consumer, {0: 1})
    assert consumer.committed() == {0: 1, 1: 2}


def test_a_seek_lets_a_transaction_lower_an_offset(program: Program) -> None:
    program.put(4)
    consumer = program.consumer()
    read(consumer, 4)
    consumer.commit()
    consumer.seek(0, 1)
    for lowered in (1, 1):
        with program.producer.transaction() as txn:
            txn.commit_offsets(consumer, {0: lowered})
        assert consumer.committed() == {0: lowered, 1: 2}
    with program.producer.transaction() as txn:
        # No seek counts any more.
        txn.commit_offsets(consumer, {0: 0})
    assert consumer.committed() == {0: 1, 1: 2}


def test_all_fields_of_messages_arrive(program: Program) -> None:
    fields: dict[str, Any] = {"tag": "t", "properties": {"a": "b"}, "flag": 7, "sys_flag": 2}
    with program.producer.transaction() as txn:
        txn.send(program.out, b"all", key=b"k", born_host="192.0.2.1:5000", **fields)
        txn.send(Message(topic=program.out, body=b"plain"))
    with program.cluster.consumer(program.out, start="earliest", queues=[0, 1]) as consumer:
        found = {message.body: message for message in consumer.poll(timeout=WAIT_S)}
        until(lambda: len(found) == 2, lambda: found.update({m.body: m for m in consumer.poll()}))
    message = found[b"all"]
    assert (message.key, message.tag, message.flag) == (b"k", "t", 7)
    assert message.properties["a"] == "b"
    assert message.born_host == "192.0.2.1:5000"


def test_delayed_messages_may_be_among_them(program: Program) -> None:
    due_ms = program.shard.host.store.clock.now_ms() + 3_600_000
    with program.producer.transaction() as txn:
        txn.send(program.out, b"later", deliver_at_ms=due_ms)
        txn.send(program.out, b"level", delay_level=18)
        txn.send(program.out, b"now")
    timer, level, now = txn.commit()
    assert (timer.topic, now.topic, now.offset) == (TIMER_TOPIC, program.out, 0)
    assert level.topic == "SCHEDULE_TOPIC_XXXX"
    assert program.sent() == [b"now"]
    assert program.producer.cancel(timer)


def test_many_messages_of_several_queues_and_topics(program: Program) -> None:
    with program.producer.transaction() as txn:
        for number in range(400):
            topic = program.out if number % 2 else program.into
            assert txn.send(topic, b"%d" % number, key=b"%d" % (number % 7)) == number
    receipts = txn.commit()
    assert len(receipts) == 400
    assert sum(program.ends()) == 200
    places = {(each.topic, each.queue_id, each.offset) for each in receipts}
    assert len(places) == 400
    with program.cluster.consumer(program.out, start="earliest", queues=[0, 1]) as consumer:
        found: dict[tuple[int, int], bytes] = {}
        until(
            lambda: len(found) == 200,
            lambda: found.update({(m.queue_id, m.offset): m.body for m in consumer.poll()}),
        )
    for number in range(1, 400, 2):
        receipt = receipts[number]
        assert found[receipt.queue_id, receipt.offset] == b"%d" % number


# --- aborts ---------------------------------------------------------------------------------------


def test_an_exception_in_the_block_aborts(program: Program) -> None:
    program.put(2)
    consumer, workers = program.consumer(), program.workers()
    read(consumer, 2)
    message = program.take(workers)
    txn = program.producer.transaction()

    def fail() -> None:
        with txn:
            txn.send(program.out, b"a")
            txn.commit_offsets(consumer)
            txn.ack(message)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert program.ends() == [0, 0]
    assert consumer.committed() == {}
    message.ack()
    with pytest.raises(Rejected, match="aborted"):
        txn.commit()
    with pytest.raises(Rejected, match="aborted"):
        txn.send(program.out, b"b")


def test_an_aborted_transaction_may_be_aborted_again(program: Program) -> None:
    with program.producer.transaction() as txn:
        txn.send(program.out, b"a")
        txn.abort()
        txn.abort()
    assert program.ends() == [0, 0]


def test_a_committed_transaction_stays_so(program: Program) -> None:
    with program.producer.transaction() as txn:
        txn.send(program.out, b"a")
        first = txn.commit()
        assert txn.commit() == first
    with pytest.raises(Rejected, match="committed"):
        txn.abort()
    with pytest.raises(Rejected, match="committed"):
        txn.send(program.out, b"b")
    assert sum(program.ends()) == 1


def test_an_empty_transaction_asks_no_shard(program: Program) -> None:
    with program.producer.transaction() as txn:
        pass
    assert txn.commit() == []


# --- refusals -------------------------------------------------------------------------------------


def test_a_lost_lease_refuses_all_of_it_and_names_the_message(program: Program) -> None:
    program.put(2)
    workers = program.workers()
    lost, held = program.take(workers), program.take(workers)
    program.cluster.call(0, "release_leases", {"group": "w", "topic": program.into})
    taken = program.take(program.workers(prefetch=0))
    assert taken.body == lost.body
    txn = program.producer.transaction()
    txn.send(program.out, b"a")
    txn.ack(lost)
    with pytest.raises(Fenced) as caught, txn:
        pass
    assert caught.value.offsets == [(program.into, lost.queue_id, lost.offset)]
    assert program.ends() == [0, 0]
    assert held.topic == program.into


def test_a_lost_queue_refuses_all_of_it(program: Program) -> None:
    program.put(4)
    consumer = program.consumer()
    read(consumer, 4)
    txn = program.producer.transaction()
    txn.send(program.out, b"a")
    txn.commit_offsets(consumer)
    taken = program.cluster.call(0, "find_coordinator", {"group": "g"})
    assert taken == {"shard": 0}
    queues = {program.into: [0]}
    number = program.cluster.call(
        0, "take_group_number", {"group": "g", "queues": queues, "force": True}
    )["number"]
    reset = {"group": "g", "topic": program.into, "offsets": {"0": 0}, "number": number}
    program.cluster.call(0, "reset_offsets", reset)
    with pytest.raises(Fenced) as caught:
        txn.commit()
    assert caught.value.queues == [(program.into, 0)]
    assert program.ends() == [0, 0]
    assert consumer.committed() == {0: 0}


def test_a_consumer_of_fixed_queues_is_refused(program: Program) -> None:
    with pytest.raises(Rejected, match="no member"), program.producer.transaction() as txn:
        txn.commit_offsets(program.consumer(queues=[0]))


def test_a_message_without_wait_is_refused(program: Program) -> None:
    with pytest.raises(Rejected, match="wait_store_ok"), program.producer.transaction() as txn:
        txn.send(Message(topic=program.out, body=b"a", wait_store_ok=False))


def test_a_transaction_that_is_too_large_is_refused_at_its_send(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    txn = program.producer.transaction()
    txn.send(program.out, b"x" * (3 << 20))
    with pytest.raises(Rejected, match="commit more often"):
        txn.send(program.out, b"x" * (2 << 20))
    monkeypatch.setattr(transaction_rows, "ROWS_MAX", 1)
    with pytest.raises(Rejected, match="commit more often"):
        txn.send(program.out, b"x")
    txn.abort()
    # The shard of these tests has small files.
    with pytest.raises(Rejected, match="appended together"), program.producer.transaction() as txn:
        txn.send(program.out, b"x" * 100_000)
    with program.producer.transaction() as txn:
        txn.send(program.out, b"after")
    assert program.sent() == [b"after"]


def test_bad_options_and_a_closed_producer_are_refused(program: Program) -> None:
    with pytest.raises(Rejected, match="timeout_s"):
        program.producer.transaction(timeout_s=0)
    producer = program.cluster.producer()
    producer.close()
    with pytest.raises(Rejected, match="closed"):
        producer.transaction()


# --- answers that are lost ------------------------------------------------------------------------


def test_a_commit_whose_answer_is_lost_is_done_once(program: Program) -> None:
    lost: list[int] = []

    def lose() -> None:
        if len(lost) < 2:
            lost.append(1)
            raise DeliveryUnknown("lost", status="UNKNOWN_ERROR", append=None)

    with failpoint("transactions.confirmed", lose), program.producer.transaction() as txn:
        txn.send(program.out, b"a", queue_id=0)
    assert len(lost) == 2
    assert program.ends() == [1, 0]
    assert [each.offset for each in txn.commit()] == [0]


def test_a_commit_without_an_answer_is_unknown_and_may_be_asked_for_again(program: Program) -> None:
    program.put(1)
    workers = program.workers()
    message = program.take(workers)

    def lose() -> None:
        raise DeliveryUnknown("lost", status="UNKNOWN_ERROR", append=None)

    txn = program.producer.transaction(timeout_s=0.3)
    txn.send(program.out, b"a", queue_id=0)
    txn.ack(message)
    with failpoint("transactions.confirmed", lose), pytest.raises(CommitUnknown), txn:
        pass
    with pytest.raises(Rejected, match="settled already"):
        message.ack()
    with pytest.raises(Rejected, match="being committed"):
        txn.send(program.out, b"b")
    assert [each.offset for each in txn.commit()] == [0]
    assert program.ends() == [1, 0]


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_unknown_commit_may_be_aborted_unless_it_counts(
    program: Program, is_stored: bool
) -> None:
    def lose() -> None:
        raise DeliveryUnknown("lost", status="UNKNOWN_ERROR", append=None)

    txn = program.producer.transaction(timeout_s=0.3)
    txn.send(program.out, b"a", queue_id=0)
    point = "transactions.confirmed" if is_stored else "transactions.begin"
    with failpoint(point, lose), pytest.raises(CommitUnknown):
        txn.commit()
    if is_stored:
        with pytest.raises(Rejected, match="committed"):
            txn.abort()
        assert len(txn.commit()) == 1
    else:
        txn.abort()
        with pytest.raises(Rejected, match="aborted"):
            txn.commit()
    assert program.ends() == [int(is_stored), 0]
    # The next one has another name.
    with program.producer.transaction() as following:
        following.send(program.out, b"b", queue_id=1)
    assert program.ends() == [int(is_stored), 1]


def test_a_refusal_after_a_lost_try_is_made_final(program: Program) -> None:
    failures: list[RayMQError] = [
        DeliveryUnknown("lost", status="UNKNOWN_ERROR", append=None),
        Rejected("no", field="x", limit="y"),
    ]

    def fail() -> None:
        if failures:
            raise failures.pop(0)

    txn = program.producer.transaction()
    txn.send(program.out, b"a")
    with failpoint("transactions.begin", fail), pytest.raises(Rejected, match="no"):
        txn.commit()
    name, arguments = txn._name, txn._arguments
    assert name is not None
    late = program.cluster.call(
        0,
        "commit_transaction",
        {"session": name.session, "number": name.number, **arguments},
    )
    assert late["decision"] == "aborted"
    assert program.ends() == [0, 0]


def test_a_shard_that_is_away_commits_nothing(program: Program) -> None:
    txn = program.producer.transaction(timeout_s=0.2)
    txn.send(program.out, b"a")

    def refuse() -> None:
        raise Unavailable("not now", field="x")

    # A refusal of the running shard, which it may send after it has begun.
    with failpoint("transactions.begin", refuse), pytest.raises(CommitUnknown):
        txn.commit()
    txn.abort()
    assert program.ends() == [0, 0]


# --- placement ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ServedCluster(tmp_path_factory.mktemp("two")) as made:
        for topic in ("a", "b"):
            made.cluster.create_topic(topic, queues=4)
        for shard, topic in enumerate(("first", "second")):
            for each in range(2):
                made.cluster.call(
                    each, "create_topic", {"name": topic, "queues": 1, "shards": [shard]}
                )
        yield made.cluster


def test_free_messages_follow_the_others(two: Cluster) -> None:
    with two.producer() as producer:
        for queue in range(4):
            with producer.transaction() as txn:
                txn.send("a", b"free")
                txn.send("b", b"fixed", queue_id=queue)
                txn.send("a", b"free too")
            assert {receipt.shard for receipt in txn.commit()} == {queue % 2}


def test_free_messages_alone_share_a_shard(two: Cluster) -> None:
    with two.producer() as producer, producer.transaction() as txn:
        txn.send("a", b"x")
        txn.send("b", b"y")
        txn.send("second", b"z")
    assert {receipt.shard for receipt in txn.commit()} == {1}


def test_free_messages_follow_what_was_read(two: Cluster) -> None:
    with two.producer() as producer:
        producer.send("second", b"job").result(WAIT_S)
        with two.workers("second", group="w") as workers:
            message = workers.get(WAIT_S)
            assert message is not None
            with producer.transaction() as txn:
                txn.send("a", message.body)
                txn.ack(message)
        assert {receipt.shard for receipt in txn.commit()} == {1}


def test_a_key_is_at_one_place_in_equal_topics(two: Cluster) -> None:
    with two.producer() as producer:
        for number in range(10):
            with producer.transaction() as txn:
                txn.send("a", b"x", key=b"%d" % number)
                txn.send("b", b"y", key=b"%d" % number)


@pytest.mark.parametrize("queue_id", [None, 0])
def test_parts_on_two_shards_are_refused_with_their_names(
    two: Cluster, queue_id: int | None
) -> None:
    with two.producer() as producer:
        ends = two.describe_topic("first")["queues"][0]["max_offset"]
        txn = producer.transaction()
        txn.send("first", b"x", queue_id=queue_id)
        txn.send("second", b"y")
        with pytest.raises(Rejected) as caught:
            txn.commit()
        assert caught.value.found == [0, 1]
        assert "messages for second" in caught.value.message
        with pytest.raises(Rejected, match="aborted"):
            txn.commit()
        assert two.describe_topic("first")["queues"][0]["max_offset"] == ends


# --- threads, hooks, transports -------------------------------------------------------------------


def test_threads_share_a_producer(program: Program) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for turn in range(5):
                with program.producer.transaction() as txn:
                    txn.send(program.out, b"%d-%d" % (number, turn), queue_id=0)
                    txn.send(program.out, b"%d-%d" % (number, turn), queue_id=1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert program.ends() == [20, 20]


class Seen:
    """A hook that notes outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[bytes, bool]] = []

    def before_send(self, message: Message) -> Message:
        return message

    def after_send(
        self, message: Message, receipt: Receipt | None, error: RayMQError | None
    ) -> None:
        self.outcomes.append((bytes(message.body), receipt is not None))


def test_hooks_hear_what_became_of_messages(program: Program) -> None:
    seen = Seen()
    with program.cluster.producer(hooks=[seen]) as producer:
        with producer.transaction() as txn:
            txn.send(program.out, b"kept")
        with producer.transaction() as txn:
            txn.send(program.out, b"dropped")
            txn.abort()
    assert seen.outcomes == [(b"kept", True), (b"dropped", False)]


# --- asyncio --------------------------------------------------------------------------------------


def test_a_transaction_of_an_event_loop(program: Program) -> None:
    program.put(2)

    async def run() -> None:
        cluster = program.cluster
        async with (
            cluster.async_producer() as producer,
            cluster.async_workers(program.into, group="w") as workers,
            cluster.async_consumer(program.into, group="g", start="earliest") as consumer,
        ):
            message = await workers.get(WAIT_S)
            assert message is not None
            while sum(consumer.positions().values()) < 2:
                await consumer.poll()
            async with producer.transaction() as txn:
                assert await txn.send(program.out, b"a", key=b"k") == 0
                assert await txn.send(program.out, b"b", key=b"k") == 1
                txn.ack(message)
                txn.commit_offsets(consumer)
            first, second = await txn.commit()
            assert second.offset == first.offset + 1
            assert await consumer.committed() == {0: 1, 1: 1}
            with pytest.raises(Rejected, match="settled already"):
                await message.ack()

            aborted = producer.transaction()
            await aborted.send(program.out, b"c")
            await aborted.abort()
            with pytest.raises(Rejected, match="aborted"):
                await aborted.commit()

    asyncio.run(run())
    assert program.sent() == [b"a", b"b"]


def test_a_cancelled_commit_goes_on(program: Program) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    async def run() -> int:
        async with program.cluster.async_producer() as producer:
            txn = producer.transaction()
            await txn.send(program.out, b"a")
            with failpoint("transactions.begin", wait):
                task = asyncio.create_task(txn.commit())
                await asyncio.to_thread(begun.wait, WAIT_S)
                task.cancel()
                goes_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
            return len(await txn.commit())

    assert asyncio.run(run()) == 1
    assert sum(program.ends()) == 1


def test_hooks_of_an_event_loop_are_called_there(program: Program) -> None:
    threads: list[int] = []

    class There(Seen):
        def before_send(self, message: Message) -> Message:
            threads.append(threading.get_ident())
            return message

        def after_send(
            self, message: Message, receipt: Receipt | None, error: RayMQError | None
        ) -> None:
            threads.append(threading.get_ident())

    async def run() -> None:
        async with (
            program.cluster.async_producer(hooks=[There()]) as producer,
            producer.transaction() as txn,
        ):
            await txn.send(program.out, b"a")

    asyncio.run(run())
    assert threads == [threading.get_ident()] * 2
