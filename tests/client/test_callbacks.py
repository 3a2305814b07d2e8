"""What a done callback raises or waits for ends no thread of a producer, and leaves no send without an outcome."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from raymq.client.client_thread import ClientThread
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.message_batcher import MessageBatcher
from raymq.client.produce.producer import Producer
from raymq.client.transport import connection as connection_module
from raymq.client.transport.ask import in_thread
from raymq.client.transport.connection import FetchWatch
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable
from tests.support.batches import batch
from tests.support.fake_backend import FakeBackend, FakeCluster

Make = Callable[..., Producer]

ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit()]


def raising(error: BaseException) -> Callable[[Any], None]:
    def callback(_: object) -> None:
        raise error

    return callback


def called_on_its_own_thread(
    producer: Producer, backend: FakeBackend, callback: Callable[[Any], None]
) -> None:
    """Have the sender's thread call `callback`, while no caller is blocked."""
    backend.hold_answers()
    ran = threading.Event()

    def call(future: Any) -> None:
        assert isinstance(threading.current_thread(), ClientThread)
        try:
            callback(future)
        finally:
            ran.set()

    producer.send("t", b"first", queue_id=0).add_done_callback(call)
    backend.release()
    assert ran.wait(30)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
def test_what_ends_a_program_in_a_callback_ends_no_thread_of_the_producer(
    make: Make, backend: FakeBackend, end: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make()
    with caplog.at_level(logging.ERROR, "raymq.producer"):
        called_on_its_own_thread(producer, backend, raising(end))
        # With a short timeout the producer's own thread reads.
        assert producer.send("t", b"second", queue_id=0).result(4).offset == 1
    assert type(end).__name__ in caplog.text
    producer.close(30)
    assert backend.bodies("t") == [b"first", b"second"]


def test_the_other_callbacks_of_a_batch_run_after_one_that_exits(
    make: Make, backend: FakeBackend
) -> None:
    producer = make()
    backend.hold_answers()
    called = threading.Event()
    future = producer.send("t", b"x", queue_id=0)
    future.add_done_callback(raising(SystemExit()))
    future.add_done_callback(lambda _: called.set())
    backend.release()
    assert called.wait(30)


def test_an_interrupt_in_a_callback_on_the_callers_thread_comes_after_all_outcomes(
    make_sender: Callable[..., BatchSender], backend: FakeBackend
) -> None:
    sender = make_sender()
    backend.hold_answers()
    futures = [sender.send("t", queue, batch([b"x"])) for queue in range(3)]
    backend.wait_for(lambda: len(backend.puts) == 3)
    futures[0].add_done_callback(raising(KeyboardInterrupt()))
    futures[1].add_done_callback(raising(SystemExit()))
    # This thread fails the batches, and so runs the callbacks.
    with pytest.raises(KeyboardInterrupt):
        sender.close()
    assert all(future.done() for future in futures)
    backend.release()


def test_a_callback_of_a_future_that_is_done_raises_to_its_caller(make: Make) -> None:
    future = make().send("t", b"x", queue_id=0)
    future.result(30)
    with pytest.raises(SystemExit):
        future.add_done_callback(raising(SystemExit()))


@pytest.mark.parametrize("call", ["flush", "result", "exception", "result of send_batch"])
def test_a_callback_that_would_wait_for_its_own_thread_is_refused(
    make: Make, backend: FakeBackend, call: str
) -> None:
    producer = make()
    refused: list[BaseException] = []

    def wait(_: object) -> None:
        backend.hold_answers()
        later = producer.send("t", b"later", queue_id=0)
        columns = producer.send_batch("t", batch([b"columns"]).select(["body"]), queue_id=0)[0]
        try:
            if call == "flush":
                producer.flush()
            elif call == "result":
                later.result()
            else:
                getattr(columns, call.partition(" ")[0])()
        except Rejected as error:
            refused.append(error)
        backend.release()

    called_on_its_own_thread(producer, backend, wait)
    (error,) = refused
    assert isinstance(error, Rejected)
    assert error.field == "callback"
    producer.flush(30)
    assert backend.bodies("t") == [b"first", b"later", b"columns"]


def test_a_callback_may_look_at_its_own_receipt(make: Make, backend: FakeBackend) -> None:
    producer = make()
    seen: list[int] = []
    called_on_its_own_thread(producer, backend, lambda future: seen.append(future.result().offset))
    assert seen == [0]


def test_a_callback_may_wait_for_another_producer(make: Make, backend: FakeBackend) -> None:
    producer, other = make(), make()
    seen: list[int] = []
    called_on_its_own_thread(
        producer, backend, lambda _: seen.append(other.send("t", b"x", queue_id=1).result().offset)
    )
    assert seen == [0]


def test_a_close_in_a_callback_waits_for_nothing(make: Make, backend: FakeBackend) -> None:
    producer = make()
    later: list[Any] = []

    def close(_: object) -> None:
        backend.hold_answers()
        later.append(producer.send("t", b"later", queue_id=0))
        producer._batcher.close()

    called_on_its_own_thread(producer, backend, close)
    with pytest.raises(RayMQError, match="closed"):
        later[0].result(30)
    backend.release()


def test_an_interrupt_while_a_batch_is_closed_leaves_no_message_without_an_outcome(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    producer.send("t", b"x", queue_id=0).result(30)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    sends: list[Any] = []
    append = MessageBatcher._append

    def note(self: MessageBatcher, *rest: Any) -> Any:
        found = append(self, *rest)
        sends.append(found[0].future)
        return found

    monkeypatch.setattr(MessageBatcher, "_append", note)
    monkeypatch.setattr(producer._batcher.batch_sender, "enqueue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        producer.send("t", b"y", queue_id=0)
    with pytest.raises(DeliveryUnknown, match="KeyboardInterrupt"):
        sends[0].result(30)


def test_a_fault_in_a_producers_threads_does_not_end_them(
    make: Make, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make(linger_ms=1)
    producer.send("t", b"0", queue_id=0).result(4)
    sender = producer._batcher.batch_sender
    shard_sender = sender._shard_senders[0]
    faults = {"linger": 1, "sender": 1}

    def once(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*rest: Any) -> Any:
            if faults[name]:
                faults[name] -= 1
                raise SystemExit
            return call(*rest)

        return faulty

    linger = producer._batcher._linger
    monkeypatch.setattr(linger, "_close_due", once("linger", linger._close_due))
    monkeypatch.setattr(
        shard_sender, "_wait_for_batches", once("sender", shard_sender._wait_for_batches)
    )
    backend.hold_answers()
    sends = [producer.send("t", b"%d" % n, queue_id=0) for n in (1, 2)]
    shard_sender._receiving.abort()  # type: ignore[union-attr]
    backend.release()
    assert [send.result(4).offset for send in sends] == [1, 2]
    assert faults == {"linger": 0, "sender": 0}


def test_the_thread_that_looks_for_silent_shards_outlives_a_fault(
    make: Make, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    producer.send("t", b"0", queue_id=0).result(30)
    sender = producer._batcher.batch_sender
    twice = threading.Barrier(2)

    def look() -> None:
        twice.wait(30)
        raise SystemExit

    monkeypatch.setattr(sender._routes.topics, "look_for_queues", look)
    for _ in range(2):
        twice.wait(30)


def test_a_call_in_a_thread_of_its_own_always_has_an_answer() -> None:
    def call() -> int:
        raise SystemExit(7)

    answer: Future[int] = in_thread(call, "raymq-ask-0")
    assert isinstance(answer.exception(30), SystemExit)


def test_a_call_for_which_no_thread_can_be_started_may_succeed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(ClientThread, "start", start)
    assert isinstance(in_thread(lambda: 1, "raymq-ask-0").exception(0), Unavailable)


def test_the_watch_over_fetches_outlives_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CHECK_S", 0.001)
    twice = threading.Barrier(2)

    class Stream:
        def check(self, _: int) -> None:
            twice.wait(30)
            raise SystemExit

    watch, stream = FetchWatch(), Stream()
    watch.add(stream)  # type: ignore[arg-type]
    for _ in range(2):
        twice.wait(30)
    twice.abort()
    watch.remove(stream)  # type: ignore[arg-type]
