"""Half messages of producers, at a real shard: sent, ended by any producer, and asked about."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.client.messages.keys import BASE64_KEY
from raymq.client.messages.message import Message
from raymq.client.messages.received import ReceivedMessage
from raymq.client.produce import half_checks
from raymq.client.produce.half_message import CheckedHalf, HalfMessage
from raymq.client.produce.producer import Producer
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import DeliveryUnknown, Rejected
from raymq.store.services import half_messages
from raymq.store.services.transaction import TransactionService
from tests.support.served_shard import ServedShard
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

GROUP = "billing"


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("halves") / "shard") as made:
        made.start_flusher()
        made.cluster.create_topic("t", queues=1)
        made.cluster.create_topic("keyed", queues=4)
        yield made


@pytest.fixture
def cluster(shard: ServedShard) -> Cluster:
    return shard.cluster


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half messages are asked about at once, and again soon."""
    monkeypatch.setattr(TransactionService, "immunity_ms", lambda self, properties: 0)
    monkeypatch.setattr(half_messages, "CHECK_PAUSE_MS", 100)
    monkeypatch.setattr(half_checks, "ASK_S", 0.1)


def end(cluster: Cluster, topic: str = "t") -> int:
    return sum(int(each["max_offset"]) for each in cluster.describe_topic(topic)["queues"])


def read(cluster: Cluster, offset: int, count: int = 1) -> list[ReceivedMessage]:
    with cluster.consumer("t", start={0: offset}) as consumer:
        found: list[ReceivedMessage] = []
        until(lambda: len(found) >= count, lambda: found.extend(consumer.poll(timeout=5)))
        return found


def send_half(producer: Producer, body: bytes = b"half", **fields: Any) -> HalfMessage:
    return producer.send_half("t", body, **{"group": GROUP, **fields}).result(30)


def pause() -> None:
    threading.Event().wait(0.02)


class Asked:
    """A callback that notes what it was asked, and answers by the body."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers
        self.halves: list[CheckedHalf] = []

    def __call__(self, half: CheckedHalf) -> object:
        self.halves.append(half)
        answer = self.answers.get(half.body.decode())
        return answer(half) if callable(answer) else answer


# --- one producer ---------------------------------------------------------------------------------


def test_a_half_message_is_seen_when_it_is_committed_with_all_of_its_fields(
    cluster: Cluster,
) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        half = send_half(
            producer,
            key=b"alice",
            tag="paid",
            index_keys=("a", "b"),
            properties={"colour": "red"},
            flag=-7,
            born_host="192.0.2.1:5000",
        )
        assert (half.topic, half.queue_id) == ("t", 0)
        assert end(cluster) == first
        assert half.commit() is True
        (message,) = read(cluster, first)
        assert half.commit() is False
    assert (message.body, message.key, message.tag) == (b"half", b"alice", "paid")
    assert (message.index_keys, message.properties) == (("a", "b"), {"colour": "red"})
    assert (message.flag, message.born_host) == (-7, "192.0.2.1:5000")
    assert end(cluster) == first + 1


def test_the_first_decision_counts_and_the_other_one_is_refused_by_its_name(
    cluster: Cluster,
) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        dropped, put = send_half(producer), send_half(producer)
        assert dropped.rollback() is True
        assert dropped.rollback() is False
        with pytest.raises(Rejected, match="resolved as ROLLBACK") as refused:
            dropped.commit()
        assert refused.value.found == "rollback"
        assert put.commit() is True
        with pytest.raises(Rejected, match="resolved as COMMIT") as refused:
            put.rollback()
        assert refused.value.found == "commit"
    assert [each.body for each in read(cluster, first)] == [b"half"]


def test_another_producer_ends_it_by_its_id_also_after_a_restart_of_the_shard(
    cluster: Cluster, shard: ServedShard
) -> None:
    first = end(cluster)
    with cluster.producer() as producer:
        half = send_half(producer)
    with pytest.raises(Rejected, match="the producer is closed"):
        half.commit()
    shard.down()
    shard.up()
    kept = pickle.loads(pickle.dumps(half.id))
    with cluster.producer() as producer:
        assert producer.end_half(kept, "commit") is True
        assert producer.end_half(kept, "commit") is False
    assert [each.body for each in read(cluster, first)] == [b"half"]
    with pytest.raises(Rejected, match="pickle its id"):
        pickle.dumps(half)


def test_many_half_messages_are_under_way_together_and_close_waits_for_them(
    cluster: Cluster,
) -> None:
    first = end(cluster, "keyed")
    with cluster.producer() as producer:
        sends = [
            producer.send_half("keyed", b"%d" % number, key=b"%d" % number, group=GROUP)
            for number in range(100)
        ]
        producer.flush(30)
        assert all(each.done() for each in sends)
        halves = [each.result(0) for each in sends]
        assert len({each.id for each in halves}) == 100
        assert {each.queue_id for each in halves} == {0, 1, 2, 3}
        for half in halves[::2]:
            half.commit()
        for half in halves[1::2]:
            half.rollback()
        last = producer.send_half("keyed", b"last", group=GROUP)
    assert last.result(0).topic == "keyed"
    until(lambda: end(cluster, "keyed") == first + 50, pause)


def test_half_messages_of_asyncio(cluster: Cluster) -> None:
    first = end(cluster)

    async def run() -> str:
        async with cluster.async_producer() as producer:
            halves = await asyncio.gather(
                *(producer.send_half("t", b"%d" % number, group=GROUP) for number in range(4))
            )
            assert await halves[0].commit() is True
            assert await halves[0].commit() is False
            assert await halves[1].rollback() is True
            assert await producer.end_half(halves[2].id, "commit") is True
            with pytest.raises(Rejected, match="is compacted"):
                await producer.send_half("compacted", b"x", group=GROUP)
            with pytest.raises(Rejected, match="pickle its id"):
                pickle.dumps(halves[3])
            return halves[3].id

    if "compacted" not in cluster.topics():
        cluster.create_topic("compacted", queues=1, compacted=True)
    left = asyncio.run(run())
    assert sorted(each.body for each in read(cluster, first, 2)) == [b"0", b"2"]
    with cluster.producer() as producer:
        producer.end_half(left, "rollback")


# --- what is refused ------------------------------------------------------------------------------


def test_a_topic_or_message_that_cannot_be_half_is_refused_with_its_field(
    cluster: Cluster,
) -> None:
    if "compacted" not in cluster.topics():
        cluster.create_topic("compacted", queues=1, compacted=True)
    refused: list[tuple[Callable[[Producer], Any], str]] = [
        (lambda p: p.send_half("compacted", b"x", index_keys=("k",), group=GROUP), "topic"),
        (lambda p: p.send_half("nope", b"x", group=GROUP), "topic"),
        (lambda p: p.send_half("t", b"x", group="a b"), "group"),
        (lambda p: p.send_half("t", b"x", group=7), "group"),  # type: ignore[arg-type]
        (lambda p: p.send_half("t", b"x", group=GROUP, queue_id=1), "queue_id"),
        (lambda p: p.send_half("t", None, group=GROUP), "value"),
        (lambda p: p.send_half("t", b"x" * (4 << 20 | 1), group=GROUP), "body"),
        (lambda p: p.send_half("t", b"x", group=GROUP, properties={"PGROUP": "x"}), "properties"),
        *(
            (
                lambda p, given=given: p.send_half(
                    Message(topic="t", body=b"x", **given), group=GROUP
                ),
                name,
            )
            for name, given in {
                "deliver_at_ms": {"deliver_at_ms": 2_000_000_000_000},
                "delay_level": {"delay_level": 3},
                "wait_store_ok": {"wait_store_ok": False},
            }.items()
        ),
    ]
    with cluster.producer() as producer:
        for call, field in refused:
            with pytest.raises(Rejected) as error:
                call(producer)
            assert error.value.field == field
        half = producer.send_half(Message(topic="t", body=b"x", key=b"k"), group=GROUP).result(30)
        assert half.rollback()


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "5e5e5e5e-0-0-0",
        "5e5e5e5e-0-x-0-billing",
        "5e5e5e5e-0--1-0-billing",
        "5e5e5e5e-0-0-0-a b",
        "00000000-0-0-0-billing",
        "5e5e5e5e-7-0-0-billing",
        f"5e5e5e5e-0-{'9' * 20}-0-billing",
        None,
        7,
    ],
)
def test_what_names_no_half_message_is_refused(cluster: Cluster, wrong: Any) -> None:
    with cluster.producer() as producer, pytest.raises(Rejected) as refused:
        producer.end_half(wrong, "commit")
    assert refused.value.field == "half_id"


def test_a_half_message_that_does_not_exist_a_wrong_group_and_a_wrong_word_are_refused(
    cluster: Cluster,
) -> None:
    with cluster.producer() as producer:
        half = send_half(producer)
        front, offset, place, _ = half.id.rsplit("-", 3)
        with pytest.raises(Rejected, match="does not exist"):
            producer.end_half(f"{front}-{10**6}-{place}-{GROUP}", "commit")
        with pytest.raises(Rejected, match="another one is meant"):
            producer.end_half(f"{front}-{offset}-{int(place) + 8}-{GROUP}", "commit")
        with pytest.raises(Rejected, match="prepared by producer group 'billing', not 'others'"):
            producer.end_half(f"{front}-{offset}-{place}-others", "commit")
        with pytest.raises(Rejected, match="use 'commit' or 'rollback'"):
            producer.end_half(half.id, "unknown")
        assert half.rollback()


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_the_producer_that_is_left_answers_for_the_one_that_is_gone(cluster: Cluster) -> None:
    first = end(cluster)
    asked = Asked(yes="commit", no="rollback")
    with cluster.producer() as gone:
        yes = send_half(gone, b"yes", key=b"k", tag="a", properties={"n": "1"}, index_keys=("i",))
        no = send_half(gone, b"no")
        # Half messages of other groups are not asked about.
        send_half(gone, b"yes", group="others")
    with cluster.producer() as left:
        left.check(asked, group=GROUP)
        assert [each.body for each in read(cluster, first)] == [b"yes"]
        until(lambda: len(asked.halves) >= 2, pause)
        until(lambda: _is_ended(left, no.id, "rollback"), pause)
    found = {each.id: each for each in asked.halves}
    assert set(found) == {yes.id, no.id}
    half = found[yes.id]
    assert (half.topic, half.queue_id, half.group) == ("t", 0, GROUP)
    assert (half.body, half.key, half.tag) == (b"yes", b"k", "a")
    assert (half.properties, half.index_keys) == ({"n": "1"}, ("i",))
    assert (half.checks, half.transaction_id) == (1, yes.transaction_id)
    assert half.value == b"yes"
    assert end(cluster) == first + 1


def _is_ended(producer: Producer, half_id: str, decision: str) -> bool:
    return not producer.end_half(half_id, decision)


@pytest.mark.usefixtures("hasty")
def test_a_callback_that_raises_or_says_something_else_is_asked_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first = end(cluster)
    says: list[object] = [ValueError("no database"), SystemExit(3), "maybe", None, "commit"]

    def answer(half: CheckedHalf) -> object:
        said = says[len(asked.halves) - 1]
        if isinstance(said, BaseException):
            raise said
        return said

    asked = Asked(half=answer)
    with cluster.producer() as producer, caplog.at_level(logging.ERROR, "raymq.producer"):
        producer.check(asked, group=GROUP)
        half = send_half(producer)
        assert [each.body for each in read(cluster, first)] == [b"half"]
    assert [each.checks for each in asked.halves] == [1, 2, 3, 4, 5]
    words = [record.getMessage() for record in caplog.records]
    assert [half.id in each for each in words] == [True] * 3
    assert "returned 'maybe'" in words[2]


@pytest.mark.usefixtures("hasty")
def test_a_half_message_that_makes_no_message_holds_up_no_other_one(
    cluster: Cluster, shard: ServedShard, caplog: pytest.LogCaptureFixture
) -> None:
    first = end(cluster)
    broken = {"topic": "t", "queue_id": 0, "group": "odd", "body": "", "born_time_ms": 1}
    shard.host.call("prepare_half", {**broken, "properties": {BASE64_KEY: "a"}})
    with cluster.producer() as producer, caplog.at_level(logging.ERROR, "raymq.producer"):
        send_half(producer, group="odd")
        producer.check(Asked(half="commit"), group="odd")
        assert [each.body for each in read(cluster, first)] == [b"half"]
    assert "half message" in caplog.records[0].getMessage()


@pytest.mark.usefixtures("hasty")
def test_a_check_comes_too_late_for_what_the_program_has_decided(cluster: Cluster) -> None:
    """The callback ends it itself, and says the opposite."""
    first = end(cluster)
    with cluster.producer() as producer:

        def answer(half: CheckedHalf) -> str:
            producer.end_half(half.id, "commit")
            return "rollback"

        asked = Asked(half=answer, last="commit")
        producer.check(asked, group=GROUP)
        send_half(producer)
        until(lambda: len(asked.halves) == 1, pause)
        send_half(producer, b"last")
        assert [each.body for each in read(cluster, first, 2)] == [b"half", b"last"]


@pytest.mark.usefixtures("hasty")
def test_close_ends_the_checks_after_the_one_that_runs(cluster: Cluster) -> None:
    first = end(cluster)
    entered, go_on = threading.Event(), threading.Event()

    def answer(half: CheckedHalf) -> str:
        entered.set()
        assert go_on.wait(20)
        return "commit"

    asked = Asked(one=answer, two=answer)
    producer = cluster.producer()
    producer.check(asked, group=GROUP)
    halves = [send_half(producer, b"one"), send_half(producer, b"two")]
    assert entered.wait(20)
    closing = threading.Thread(target=producer.close)
    closing.start()
    go_on.set()
    closing.join(20)
    assert len(asked.halves) == 1
    assert end(cluster) == first + 1
    with pytest.raises(Rejected, match="the producer is closed"):
        producer.check(asked, group=GROUP)
    with cluster.producer() as another:
        for half in halves:
            another.end_half(half.id, "commit")
    read(cluster, first, 2)


@pytest.mark.usefixtures("hasty")
def test_a_callback_may_close_its_producer(cluster: Cluster) -> None:
    producer = cluster.producer()
    closed = threading.Event()

    def answer(half: CheckedHalf) -> None:
        producer.close()
        closed.set()

    producer.check(Asked(half=answer), group=GROUP)
    half = send_half(producer)
    assert closed.wait(20)
    with cluster.producer() as another:
        assert another.end_half(half.id, "rollback")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_check_runs_in_the_event_loop(cluster: Cluster, is_coroutine: bool) -> None:
    first = end(cluster)
    threads: list[threading.Thread] = []

    def answer(half: CheckedHalf) -> str:
        threads.append(threading.current_thread())
        return "commit"

    async def answer_later(half: CheckedHalf) -> str:
        await asyncio.sleep(0.01)
        return answer(half)

    async def run() -> None:
        async with cluster.async_producer() as producer:
            producer.check(answer_later if is_coroutine else answer, group=GROUP)
            await producer.send_half("t", b"half", group=GROUP)
            async with cluster.async_consumer("t", start={0: first}) as consumer:
                found: list[ReceivedMessage] = []
                while not found:
                    found += await consumer.poll(timeout=5)
        assert [each.body for each in found] == [b"half"]

    asyncio.run(run())
    assert threads == [threading.current_thread()]


@pytest.mark.usefixtures("hasty")
def test_a_check_of_a_loop_that_has_ended_holds_up_no_close(cluster: Cluster) -> None:
    entered = threading.Event()

    async def never(half: CheckedHalf) -> None:
        entered.set()
        await asyncio.Event().wait()

    producer = cluster.async_producer()

    async def run() -> str:
        producer.check(never, group=GROUP)
        half = await producer.send_half("t", b"half", group=GROUP)
        await asyncio.to_thread(entered.wait, 20)
        return half.id

    half_id = asyncio.run(run())
    asyncio.run(producer.close())
    with cluster.producer() as another:
        assert another.end_half(half_id, "rollback")


def test_what_is_not_a_check_is_refused(cluster: Cluster) -> None:
    with cluster.producer() as producer:
        with pytest.raises(Rejected, match="callback is 7"):
            producer.check(7, group=GROUP)  # type: ignore[arg-type]
        with pytest.raises(Rejected, match="has the character ' '"):
            producer.check(lambda half: None, group="a b")


# --- lost answers ---------------------------------------------------------------------------------


def count_of_halves(shard: ServedShard) -> int:
    return int(shard.host.store.state.next_offsets.get(("RMQ_SYS_TRANS_HALF_TOPIC", 0), 0))


class LostAnswers:
    """A shard whose calls run, and whose answers get lost with their connections."""

    def __init__(self, shard: ServedShard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proxy = TcpProxy(int(shard.endpoints[0].rpartition(":")[2]))
        self.lost: dict[str, int] = {}
        self.handle = Cluster(
            name="proxied",
            cluster_id=shard.cluster.cluster_id,
            shards=1,
            token=shard.cluster.token,
            endpoints={0: f"127.0.0.1:{self.proxy.port}"},
            resolver=lambda: {0: f"127.0.0.1:{self.proxy.port}"},
        )
        call = shard.host.call

        def run(op: str, args: dict[str, Any]) -> dict[str, Any]:
            answer = call(op, args)
            if self.lost.get(op, 0) > 0:
                self.lost[op] -= 1
                self.proxy.cut()
            return answer

        monkeypatch.setattr(shard.host, "call", run)

    def close(self) -> None:
        self.handle.close()
        self.proxy.close()


@pytest.fixture
def lost(shard: ServedShard, monkeypatch: pytest.MonkeyPatch) -> Iterator[LostAnswers]:
    made = LostAnswers(shard, monkeypatch)
    yield made
    made.close()


def test_a_request_whose_answer_is_lost_is_repeated_and_stored_once(
    shard: ServedShard, lost: LostAnswers
) -> None:
    first, halves = end(shard.cluster), count_of_halves(shard)
    with lost.handle.producer() as producer:
        lost.lost = {"prepare_half": 3, "end_half": 3}
        half = send_half(producer)
        assert count_of_halves(shard) == halves + 1
        # An earlier try has committed it.
        assert half.commit() is False
    assert lost.lost == {"prepare_half": 0, "end_half": 0}
    assert [each.body for each in read(shard.cluster, first)] == [b"half"]
    assert end(shard.cluster) == first + 1


def test_a_half_message_without_any_answer_is_unknown_and_asked_about(
    shard: ServedShard, lost: LostAnswers
) -> None:
    halves = count_of_halves(shard)
    with lost.handle.producer(delivery_timeout_ms=500) as producer:
        lost.lost = {"prepare_half": 10**6, "end_half": 10**6}
        future = producer.send_half("t", b"half", group=GROUP)
        with pytest.raises(DeliveryUnknown, match="are asked about it") as unknown:
            future.result(30)
        assert (unknown.value.topic, unknown.value.shard) == ("t", 0)
        assert count_of_halves(shard) == halves + 1

        lost.lost = {"end_half": 10**6}
        half = send_half(producer)
        with pytest.raises(DeliveryUnknown, match="the same call again"):
            half.rollback()
        lost.lost = {}
        assert half.rollback() is False
