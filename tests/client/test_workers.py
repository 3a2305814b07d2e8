"""Workers of a group over two served shards: each message goes to one of them, which settles it."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from raymq.client.transport.flight_client import FlightFetchStream
from raymq.client.workers.leased import LeasedMessage
from raymq.client.workers.workers import Workers
from raymq.store.base.errors import Fenced, Rejected
from raymq.store.state.topics import dlq_topic
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

Make = Callable[..., Workers]
QUEUES = 4
WAIT_S = 20.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedCluster]:
    with ServedCluster(tmp_path) as served:
        served.cluster.create_topic("t", queues=QUEUES)
        yield served


@pytest.fixture
def make(served: ServedCluster) -> Iterator[Make]:
    made: list[Workers] = []

    def workers(topics: Any = "t", **options: Any) -> Workers:
        made.append(served.cluster.workers(topics, **{"group": "g", **options}))
        return made[-1]

    yield workers
    for each in made:
        each.close()


def put(served: ServedCluster, count: int, **options: Any) -> None:
    """Messages with the numbers from 0 on as bodies, in all queues in turn."""
    with served.cluster.producer() as producer:
        for number in range(count):
            producer.send("t", b"%d" % number, **{"queue_id": number % QUEUES, **options})


def take(workers: Workers) -> LeasedMessage:
    """The next message."""
    message = workers.get(WAIT_S)
    assert message is not None, "no message came"
    return message


def committed(served: ServedCluster) -> dict[int, int]:
    found: dict[int, int] = {}
    for shard in range(2):
        answer = served.cluster.call(shard, "offsets", {"group": "g", "topic": "t"})
        found.update({int(queue_id): offset for queue_id, offset in answer.items()})
    return found


def test_each_message_goes_to_one_worker(served: ServedCluster, make: Make) -> None:
    put(served, 200)
    found: list[bytes] = []

    def work(workers: Workers) -> None:
        while (message := workers.get(2.0)) is not None:
            assert message.attempts == 1
            found.append(message.body)
            message.ack()

    shared = make()
    threads = [threading.Thread(target=work, args=(each,)) for each in (shared, shared, make())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(found) == Counter(b"%d" % number for number in range(200))
    assert committed(served) == dict.fromkeys(range(QUEUES), 50)


def test_a_message_that_failed_comes_again_and_dies_after_its_last_attempt(
    served: ServedCluster, make: Make
) -> None:
    put(served, 1)
    workers = make(max_attempts=3, backoff=(0, 0.1))
    for attempt in (1, 2, 3):
        message = take(workers)
        assert (message.body, message.attempts) == (b"0", attempt)
        message.nack()
    assert workers.get(0.5) is None
    assert bodies_of(served, dlq_topic("g")) == [b"0"]


def test_a_rejected_message_is_a_dead_letter_at_once(served: ServedCluster, make: Make) -> None:
    put(served, 1)
    workers = make()
    take(workers).reject()
    assert bodies_of(served, dlq_topic("g")) == [b"0"]
    assert committed(served)[0] == 1


def bodies_of(served: ServedCluster, topic: str) -> list[bytes]:
    found: list[bytes] = []
    with served.cluster.consumer(topic, start="earliest") as consumer:
        until(lambda: bool(found), lambda: found.extend(m.body for m in consumer.poll(timeout=0.1)))
    return found


def test_a_block_acknowledges_at_its_end_and_gives_back_at_an_exception(
    served: ServedCluster, make: Make
) -> None:
    put(served, 1)
    workers = make(backoff=(0,))
    with pytest.raises(ZeroDivisionError), take(workers) as message:
        print(1 // 0)
    with take(workers) as message:
        assert message.attempts == 2
        assert 50 < message.expires_in() <= 54
    with pytest.raises(Rejected, match="is settled already"):
        message.ack()
    with message:
        # What was settled stays settled.
        assert message.attempts == 2
    assert committed(served)[0] == 1


def test_iteration_ends_when_the_workers_are_closed(served: ServedCluster, make: Make) -> None:
    put(served, 3)
    workers = make()
    for index, message in enumerate(workers):
        message.ack()
        if index == 2:
            workers.close()
    with pytest.raises(Rejected, match="the workers are closed"):
        workers.get(0)


def test_batches_have_columns_and_masks(served: ServedCluster, make: Make) -> None:
    put(served, 100, queue_id=0)
    workers = make(backoff=(0,))
    batch = workers.get_batch(40, WAIT_S)
    assert len(batch) == 40
    assert batch.columns.column("offset").to_pylist() == list(range(40))
    assert batch.attempts.tolist() == [1] * 40
    assert batch.expires_in() > 30
    is_even = [offset % 2 == 0 for offset in range(40)]
    batch.ack(is_even)
    batch.nack([offset == 1 for offset in range(40)], delay_s=0)
    with pytest.raises(Rejected, match="2 of the messages are settled already"):
        batch.ack([offset <= 1 for offset in range(40)])
    with pytest.raises(Rejected, match="give one boolean for each of the 40 messages"):
        batch.ack([True])
    batch.ack()
    assert committed(served)[0] == 1

    seen: Counter[int] = Counter()
    while len(batch := workers.get_batch(40, 1.0)):
        offsets = batch.columns.column("offset").to_pylist()
        seen.update(dict(zip(offsets, batch.attempts.tolist(), strict=True)))
        batch.ack()
    assert seen == Counter({1: 2, **dict.fromkeys(range(40, 100), 1)})
    assert batch.columns.num_rows == 0
    assert committed(served)[0] == 100


def test_long_work_keeps_its_lease(served: ServedCluster, make: Make) -> None:
    put(served, 1)
    workers, other = make(lease_s=1), make(lease_s=1)
    message = take(workers)
    assert other.get(2.5) is None
    assert message.expires_in() > 0
    message.ack()
    assert committed(served)[0] == 1


def test_without_renewal_another_worker_gets_the_message_and_the_first_is_fenced(
    served: ServedCluster, make: Make
) -> None:
    put(served, 1)
    options = {"lease_s": 1, "backoff": (0,), "auto_extend": False, "prefetch": 0}
    workers, other = make(**options), make(**options)
    message = take(workers)
    again = take(other)
    assert again.attempts == 2
    assert message.expires_in() == 0
    with pytest.raises(Fenced, match="message 0 of queue 0 of t is over") as fence:
        message.ack()
    assert fence.value.offsets == [("t", 0, 0)]
    with pytest.raises(Fenced):
        message.extend(10)
    again.extend(10)
    assert again.expires_in() > 8
    again.ack()


def test_a_lease_ends_after_its_longest_time(served: ServedCluster, make: Make) -> None:
    put(served, 1)
    options = {"lease_s": 1, "max_lease_s": 2, "backoff": (0,), "prefetch": 0}
    workers = make(**options)
    message = take(workers)
    again = take(make(**options))
    assert again.attempts == 2
    with pytest.raises(Fenced):
        message.ack()
    again.ack()


def test_closing_gives_back_what_the_program_did_not_get(served: ServedCluster, make: Make) -> None:
    put(served, 20, queue_id=0)
    workers = make(prefetch=10)
    take(workers).ack()
    until(lambda: workers._state.ready_count > 0, lambda: time.sleep(0.01))
    workers.close()
    other = make(prefetch=10)
    got = [take(other) for _ in range(19)]
    assert {message.attempts for message in got} == {1}
    for message in got:
        message.ack()
    assert committed(served)[0] == 20


def test_without_prefetch_only_what_is_asked_for_is_leased(
    served: ServedCluster, make: Make
) -> None:
    put(served, 5, queue_id=0)
    workers, other = make(prefetch=0), make(prefetch=0)
    message = take(workers)
    assert [take(other).offset for _ in range(4)] == [1, 2, 3, 4]
    message.ack()


def test_a_settlement_that_is_interrupted_goes_on_in_the_thread(
    served: ServedCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(served, 8)
    workers = make(prefetch=0)
    settle, interrupted = FlightFetchStream.settle, []

    def interrupt(stream: FlightFetchStream, arguments: Any) -> Any:
        found = settle(stream, arguments)
        if not interrupted and threading.current_thread() is threading.main_thread():
            interrupted.append(arguments["settle"])
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(FlightFetchStream, "settle", interrupt)
    for _ in range(8):
        message = take(workers)
        # The first one of a shard may be sent by the thread, which begins then.
        with contextlib.suppress(KeyboardInterrupt):
            message.ack()
    assert len(interrupted) == 1
    until(lambda: served.cluster.describe_group("g")["lag"] == 0, lambda: time.sleep(0.01))


def test_pipelined_settlements_are_futures(served: ServedCluster, make: Make) -> None:
    put(served, 50, queue_id=0)
    workers = make()
    workers.settle_mode = "pipelined"
    futures = [take(workers).ack() for _ in range(50)]
    for each in futures:
        assert isinstance(each, Future)
        assert each.result(WAIT_S) is None
    assert committed(served)[0] == 50
    with pytest.raises(Rejected, match="settle_mode"):
        workers.settle_mode = "later"  # type: ignore[assignment]


def test_messages_of_a_key_come_one_after_the_other(served: ServedCluster, make: Make) -> None:
    with served.cluster.producer() as producer:
        for number in range(6):
            producer.send("t", b"%d" % number, queue_id=0, key=b"ab"[number % 2 : number % 2 + 1])
    workers = make(order="key", prefetch=0)
    first, second = take(workers), take(make(order="key", prefetch=0))
    assert sorted([first.offset, second.offset]) == [0, 1]
    assert workers.get(0.5) is None
    first.ack()
    assert take(workers).offset == first.offset + 2


def test_a_filter_of_tags(served: ServedCluster, make: Make) -> None:
    put(served, 3, queue_id=0, tag="x")
    put(served, 2, queue_id=0, tag="y")
    put(served, 1, queue_id=0, tag="x")
    workers = make(tags="y")
    assert sorted(take(workers).offset for _ in range(2)) == [3, 4]
    with pytest.raises(Rejected, match="the filter TAG 'y'"):
        make(tags="z").get(WAIT_S)


def test_several_topics(served: ServedCluster, make: Make) -> None:
    served.cluster.create_topic("u", queues=1)
    put(served, 1)
    with served.cluster.producer() as producer:
        producer.send("u", b"other").result(timeout=WAIT_S)
    workers = make(["t", "u"])
    found = [take(workers), take(workers)]
    assert sorted(message.topic for message in found) == ["t", "u"]


def test_workers_go_on_after_the_leader_has_started_again(
    served: ServedCluster, make: Make
) -> None:
    put(served, 8)
    workers = make(prefetch=3)
    held = [take(workers) for _ in range(4)]
    for shard in served.shards:
        shard.down()
    failed: list[BaseException] = []

    def ack() -> None:
        try:
            for message in held:
                message.ack()
        except BaseException as error:
            failed.append(error)

    settling = threading.Thread(target=ack)
    settling.start()
    for shard in served.shards:
        shard.up()
    settling.join(WAIT_S)
    assert not failed
    rest = [take(workers) for _ in range(4)]
    assert {message.attempts for message in rest} == {1}
    for message in rest:
        message.ack()
    assert committed(served) == dict.fromkeys(range(QUEUES), 2)


def test_a_copy_of_a_message_has_no_lease(served: ServedCluster, make: Make) -> None:
    put(served, 1)
    message = take(make())
    copy = pickle.loads(pickle.dumps(message))
    assert (copy.body, copy.offset) == (b"0", 0)
    with pytest.raises(Rejected, match="a copy of a leased message"):
        copy.ack()
    message.ack()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lease_s", 0.5),
        ("lease_s", 4_000),
        ("max_lease_s", 1),
        ("prefetch", -1),
        ("max_in_flight", 0),
        ("max_attempts", 0),
        ("backoff", ()),
        ("backoff", (-1,)),
        ("backoff", 5),
        ("order", "time"),
        ("start", "now"),
        ("tags", ""),
        ("group", "no group!"),
    ],
)
def test_a_wrong_option_is_refused(make: Make, option: str, value: object) -> None:
    with pytest.raises(Rejected, match=option):
        make(**{option: value})


def test_unknown_topics_and_patterns_are_refused(make: Make) -> None:
    import raymq

    with pytest.raises(Rejected, match="topic 'nothing' does not exist"):
        make("nothing")
    with pytest.raises(Rejected, match="workers have no pattern"):
        make(raymq.matching("t*"))


def test_no_thread_is_left(served: ServedCluster, make: Make) -> None:
    put(served, 2)
    before = set(threading.enumerate())
    workers = make()
    take(workers).ack()
    workers.close()
    workers.close()
    left = [each for each in set(threading.enumerate()) - before if each.name.startswith("raymq-")]
    until(lambda: not any(each.is_alive() for each in left), lambda: time.sleep(0.01))


def test_asynchronous_workers(served: ServedCluster) -> None:
    put(served, 10)

    async def work() -> list[bytes]:
        found: list[bytes] = []
        async with served.cluster.async_workers("t", group="g", backoff=(0,)) as workers:

            async def take_some() -> None:
                while (message := await workers.get(2.0)) is not None:
                    async with message:
                        if message.attempts == 1:
                            raise ZeroDivisionError
                        found.append(message.body)

            async def ignoring() -> None:
                while True:
                    try:
                        await take_some()
                        return
                    except ZeroDivisionError:
                        continue

            await asyncio.gather(ignoring(), ignoring())
            batch = await workers.get_batch(5, 0)
            assert len(batch) == 0
        return found

    found = asyncio.run(work())
    assert sorted(found) == sorted(b"%d" % number for number in range(10))
    assert sum(committed(served).values()) == 10


def test_a_batch_of_asynchronous_workers(served: ServedCluster) -> None:
    put(served, 10, queue_id=0)

    async def work() -> None:
        async with served.cluster.async_workers("t", group="g") as workers:
            batch = await workers.get_batch(10, WAIT_S)
            await batch.ack([True] * len(batch))
            message = await workers.get(0.5) if len(batch) == 10 else None
            assert message is None

    asyncio.run(work())
    assert committed(served)[0] == 10


def test_an_operator_sees_what_workers_have(served: ServedCluster, make: Make) -> None:
    put(served, 5, queue_id=0)
    workers = make(prefetch=0, backoff=(60,))
    take(workers)
    take(workers).nack()
    assert served.cluster.groups()["g"]["kind"] == "workers"
    facts = served.cluster.describe_group("g")
    assert facts["kind"] == "workers"
    shown = [each for each in facts["queues"] if (each["topic"], each["queue_id"]) == ("t", 0)]
    (queue,) = shown
    assert (queue["leased"], queue["waiting"], queue["next"], queue["committed"]) == (1, 1, 2, 0)
