"""Hooks see every message on its way, and what they raise fails nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.messages.message import Message, Receipt
from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.producer import Producer
from raymq.store.base.errors import RayMQError, Rejected
from tests.support.served_shard import ServedShard


class Noting:
    """Notes every call, with its thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def note(self, method: str, *what: Any) -> None:
        self.calls.append((method, *what))
        self.threads.add(threading.get_ident())

    def before_send(self, message: Message) -> None:
        self.note("before_send", message.body)

    def after_send(
        self, message: Message, receipt: Receipt | None, error: RayMQError | None
    ) -> None:
        self.note("after_send", message.body, receipt and receipt.offset, error and type(error))

    def before_consume(self, messages: Sequence[Message]) -> None:
        self.note("before_consume", [message.body for message in messages])

    def after_consume(self, messages: Sequence[Message], error: BaseException | None) -> None:
        self.note("after_consume", [message.body for message in messages], error and type(error))


class Marking:
    """Gives each message a property."""

    def before_send(self, message: Message) -> Message:
        properties = {**message.properties, "mark": f"{len(message.properties)}"}
        return dataclasses.replace(message, properties=properties)


class Failing:
    """Raises in every call."""

    def _raise(self, *arguments: object) -> None:
        raise LookupError("a hook")

    before_send = after_send = before_consume = after_consume = _raise


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("hooks") / "shard") as served:
        served.start_flusher()
        yield served


@pytest.fixture
def topic(shard: ServedShard, request: pytest.FixtureRequest) -> str:
    name = request.node.name.split("[")[0]
    shard.cluster.create_topic(name, queues=1)
    return name


def read(shard: ServedShard, topic: str, **options: Any) -> list[Any]:
    with shard.cluster.consumer(topic, start="earliest", **options) as consumer:
        return consumer.poll(100, 10)


# --- sends ----------------------------------------------------------------------------------------


def test_hooks_see_a_send_and_its_receipt_in_their_order(shard: ServedShard, topic: str) -> None:
    hook, mark = Noting(), Marking()
    with shard.cluster.producer(hooks=[mark, hook, mark]) as producer:
        assert producer.send(topic, b"a", properties={"p": "q"}).result(10).offset == 0
        producer.send_many([Message(topic=topic, body=b"b"), Message(topic=topic, body=b"c")])
    assert hook.calls[:2] == [("before_send", b"a"), ("after_send", b"a", 0, None)]
    assert sorted(hook.calls[2:4]) == [("before_send", b"b"), ("before_send", b"c")]
    assert sorted(hook.calls[4:]) == [("after_send", b"b", 1, None), ("after_send", b"c", 2, None)]
    # Each hook gets what the one before it returned.
    assert [each.properties for each in read(shard, topic)] == [
        {"p": "q", "mark": "2"},
        {"mark": "1"},
        {"mark": "1"},
    ]


def test_all_fields_pass_the_hooks(shard: ServedShard, topic: str) -> None:
    shard.cluster.create_topic("null-" + topic, queues=1, allow_null_values=True)
    fields = {"key": b"k", "tag": "t", "index_keys": ("i", "j"), "flag": 3, "sys_flag": 0x101}
    with (
        shard.cluster.producer(codec="json") as plain,
        shard.cluster.producer(codec="json", hooks=[Noting()]) as hooked,
    ):
        for producer in (plain, hooked):
            producer.send(topic, {"v": 1}, properties={"p": "q"}, queue_id=0, **fields).result(10)
    one, two = read(shard, topic)
    for name in ("body", "value", "properties", *fields):
        assert getattr(one, name) == getattr(two, name), name

    with shard.cluster.producer(hooks=[Noting()]) as producer:
        producer.send("null-" + topic, None).result(10)
        (null,) = read(shard, "null-" + topic)
        # A message that was read is sent again as it was.
        producer.send(null).result(10)
    assert [each.is_null for each in read(shard, "null-" + topic)] == [True, True]


def test_hooks_see_why_a_message_is_not_sent(shard: ServedShard, topic: str) -> None:
    hook = Noting()
    with shard.cluster.producer(hooks=[hook]) as producer:
        for call in (
            lambda: producer.send("no such topic", b"a"),
            lambda: producer.send(topic, b"b", queue_id=7),
            lambda: producer.send(topic, b"c", tag=""),
            lambda: producer.send_many(
                [Message(topic=topic, body=b"d"), Message(topic=topic, body=b"e", tag="")]
            ),
        ):
            with pytest.raises(Rejected):
                call()
    assert [call[1:] for call in hook.calls if call[0] == "after_send"] == [
        (body, None, Rejected) for body in (b"a", b"b", b"c", b"e", b"d")
    ]


def test_a_failure_that_only_a_hook_has_seen_is_raised_by_close(
    shard: ServedShard, topic: str
) -> None:
    hook = Noting()
    producer = shard.cluster.producer(hooks=[hook], max_message_bytes=8 << 20, batch_bytes=16 << 20)
    producer.send(topic, b"x" * (5 << 20))
    with pytest.raises(Rejected):
        producer.close()
    assert hook.calls[-1][3] is Rejected


def test_a_hook_that_raises_fails_no_send_and_is_logged_once_per_kind(
    shard: ServedShard, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Noting()

    class Wrong:
        def before_send(self, message: Message) -> str:
            return "not a message"

    with (
        caplog.at_level(logging.ERROR, "raymq.hooks"),
        shard.cluster.producer(hooks=[Failing(), Wrong(), hook]) as producer,
    ):
        for number in range(5):
            assert producer.send(topic, b"%d" % number).result(10).offset == number
        producer.flush()
        assert producer.hook_failures == 15
    assert len(hook.calls) == 10
    assert sorted(record.getMessage().split(";")[0] for record in caplog.records) == [
        "hook Failing.after_send raised LookupError",
        "hook Failing.before_send raised LookupError",
        "hook Wrong.before_send raised TypeError",
    ]


# --- reads ----------------------------------------------------------------------------------------


@pytest.fixture
def filled(shard: ServedShard, topic: str) -> str:
    with shard.cluster.producer() as producer:
        producer.send_batch(topic, pa.table({"body": [b"a", b"b", b"c"]}))
    return topic


def test_hooks_see_what_poll_returns_and_when_the_program_is_done(
    shard: ServedShard, filled: str
) -> None:
    hook = Noting()
    with shard.cluster.consumer(filled, group="g", start=0, hooks=[hook]) as consumer:
        assert len(consumer.poll(2, 10)) == 2
        assert hook.calls == [("before_consume", [b"a", b"b"])]
        assert len(consumer.poll(2, 10)) == 1
        assert hook.calls[1:] == [
            ("after_consume", [b"a", b"b"], None),
            ("before_consume", [b"c"]),
        ]
        consumer.commit()
        assert hook.calls[3:] == [("after_consume", [b"c"], None)]
        assert consumer.poll(2, 0) == []
    assert len(hook.calls) == 4
    assert hook.threads == {threading.get_ident()}


def test_iteration_is_one_message_at_a_time_and_an_exception_is_named(
    shard: ServedShard, filled: str
) -> None:
    hook = Noting()

    def work() -> None:
        with shard.cluster.consumer(filled, start=0, hooks=[hook]) as consumer:
            for number, message in enumerate(consumer):
                assert message.offset == number
                assert 1 // (1 - number)

    with pytest.raises(ZeroDivisionError):
        work()
    assert hook.calls == [
        ("before_consume", [b"a"]),
        ("after_consume", [b"a"], None),
        ("before_consume", [b"b"]),
        ("after_consume", [b"b"], ZeroDivisionError),
    ]


def test_a_hook_that_raises_keeps_no_message_from_the_program(
    shard: ServedShard, filled: str
) -> None:
    with shard.cluster.consumer(filled, start=0, hooks=[Failing()]) as consumer:
        assert len(consumer.poll(9, 10)) == 3
        assert consumer.poll(9, 0) == []
        assert consumer.hook_failures == 2


def test_an_interrupt_in_a_hook_loses_no_message(shard: ServedShard, filled: str) -> None:
    class Interrupting:
        def __init__(self) -> None:
            self.left = 2

        def before_consume(self, messages: Sequence[Message]) -> None:
            self.left -= 1
            if self.left >= 0:
                raise KeyboardInterrupt

    with shard.cluster.consumer(filled, start=0, hooks=[Interrupting()]) as consumer:
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(2, 10)
        with pytest.raises(KeyboardInterrupt):
            next(iter(consumer))
        assert consumer.position(0) == 0
        assert [next(iter(consumer)).body, *(m.body for m in consumer.poll(9, 10))] == [
            b"a",
            b"b",
            b"c",
        ]


# --- asyncio --------------------------------------------------------------------------------------


def test_all_calls_are_in_the_event_loop(shard: ServedShard, topic: str) -> None:
    hook = Noting()

    async def work() -> None:
        # A small buffer defers messages.
        options: dict[str, Any] = {"hooks": [hook], "buffer_bytes": 600}
        async with shard.cluster.async_producer(**options) as producer:
            sends = [producer.send(topic, b"%d" % number) for number in range(9)]
            assert len(await asyncio.gather(*sends)) == 9
            many = [Message(topic=topic, body=b"m"), Message(topic=topic, body=b"m")]
            assert [each.offset for each in await producer.send_many(many)] == [9, 10]
            with pytest.raises(Rejected):
                await producer.send("no such topic", b"x")
            with pytest.raises(Rejected):
                await producer.send(topic, b"y", queue_id=9)
            assert producer.hook_failures == 0
        made = shard.cluster.async_consumer(topic, start=0, group="g", hooks=[hook])
        async with made as consumer:
            found = 0
            while found < 11:
                found += len(await consumer.poll(9, 5))
            await consumer.commit()
            assert consumer.hook_failures == 0

    asyncio.run(work())
    assert hook.threads == {threading.get_ident()}
    names = [call[0] for call in hook.calls]
    assert names.count("before_send") == names.count("after_send") == 13
    assert names.count("before_consume") == names.count("after_consume") >= 1
    assert names[-1] == "after_consume"
    failed = [call[1:] for call in hook.calls if call[0] == "after_send" and call[3] is not None]
    assert failed == [(b"x", None, Rejected), (b"y", None, Rejected)]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [[object()], [Noting], "hook", 5, [None]])
@pytest.mark.parametrize("kind", [Producer, AsyncProducer, Consumer, AsyncConsumer])
def test_what_is_not_a_hook_is_refused(shard: ServedShard, kind: Any, hooks: Any) -> None:
    more = {"topic": "t"} if "Consumer" in kind.__name__ else {}
    with pytest.raises(Rejected) as caught:
        kind(shard.cluster, **more, hooks=hooks)
    assert caught.value.field == "hooks"
