"""Who waits for one batch at a time reads its answer himself; nothing else changes by it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raymq.cluster.produce import shard_sender
from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.produce.shard_sender import ShardSender
from raymq.cluster.transport.flight_client import FlightPutStream
from raymq.cluster.transport.routes import Routes
from raymq.store.errors import DeliveryUnknown, Rejected
from tests.support.batches import batch
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

MakeSender = Callable[..., BatchSender]


def inside(sender: BatchSender) -> ShardSender:
    return sender._senders[0]


def send_until_helped(sender: BatchSender) -> int:
    """Send one row at a time until somebody who waited has read an answer. Returns: rows sent."""
    sent = [0]

    def step() -> None:
        assert sender.send("t", 0, batch([b"%d" % sent[0]])).result(30).first_offset == sent[0]
        sent[0] += 1

    step()
    until(lambda: inside(sender)._helped > 0, step)
    return sent[0]


def hold_and_help(sender: BatchSender, backend: FakeBackend, sent: int) -> Waiter:
    """Make somebody wait for an answer that is held, and read it himself."""
    while True:
        backend.hold()
        waiter = Waiter(sender, b"%d" % sent)
        backend.wait_for(lambda stored=sent: len(backend.puts) > stored)
        passed = waiter.passed
        until(lambda passed=passed: inside(sender)._helping or passed.is_set(), lambda: None)
        if inside(sender)._helping:
            return waiter
        # The receiving thread was at the stream: once more.
        backend.release()
        waiter.join()
        sent += 1


class Waiter(threading.Thread):
    """Sends one row and waits for its receipt."""

    def __init__(self, sender: BatchSender, body: bytes) -> None:
        super().__init__(daemon=True)
        #: the wait has come to where another thread reads
        self.passed = threading.Event()
        self.outcome: Any = None
        self._sender, self._body = sender, body
        self.start()

    def run(self) -> None:
        try:
            future = self._sender.send("t", 0, batch([self._body]))
            future.help(30)
            self.passed.set()
            self.outcome = future.result(30)
        except Exception as error:
            self.outcome = error


def test_who_waits_reads_and_everything_is_stored_once_in_order(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sent = send_until_helped(make_sender())
    assert backend.bodies("t") == [b"%d" % number for number in range(sent)]


def test_an_answer_that_nobody_waits_for_is_read_all_the_same(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    send_until_helped(sender)
    called = threading.Event()
    sender.send("t", 0, batch([b"last"])).add_done_callback(lambda _: called.set())
    assert called.wait(10)


def test_a_short_timeout_is_kept(make_sender: MakeSender, backend: FakeBackend) -> None:
    sender = make_sender()
    send_until_helped(sender)
    backend.hold()
    future = sender.send("t", 0, batch([b"held"]))
    with pytest.raises(TimeoutError):
        future.result(0.05)
    backend.release()
    assert future.result(10).count == 1


def test_a_refusal_reaches_who_reads_it(make_sender: MakeSender, backend: FakeBackend) -> None:
    sender = make_sender()
    send_until_helped(sender)
    backend.refusals.append(Rejected("no", field="body", limit=1))
    with pytest.raises(Rejected):
        sender.send("t", 0, batch([b"bad"])).result(30)
    assert sender.send("t", 0, batch([b"good"])).result(30).count == 1
    assert b"bad" not in backend.bodies("t")


def test_a_break_under_somebody_who_reads_loses_and_doubles_nothing(
    cluster: FakeCluster, make_sender: MakeSender, backend: FakeBackend
) -> None:
    proxy = TcpProxy(cluster.servers[0].port)
    routes = Routes({0: f"127.0.0.1:{proxy.port}"}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict)
    try:
        sender = make_sender(routes=routes)
        waiter = hold_and_help(sender, backend, send_until_helped(sender))
        proxy.cut()
        backend.release()
        waiter.join(30)
        stored = backend.bodies("t")
        assert waiter.outcome.last_offset == len(stored) - 1
        assert stored == [b"%d" % number for number in range(len(stored))]
    finally:
        proxy.close()


def test_close_under_somebody_who_reads_ends_at_once(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    waiter = hold_and_help(sender, backend, send_until_helped(sender))
    sender.close()
    waiter.join(10)
    assert isinstance(waiter.outcome, DeliveryUnknown)


def test_a_stream_has_one_reader_also_while_it_is_closed(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = FlightPutStream.receive
    counting = threading.Lock()
    reading: list[object] = []
    most: list[int] = []

    def receive_and_linger(stream: FlightPutStream) -> list[dict[str, Any]]:
        with counting:
            reading.append(stream)
            most.append(len(reading))
        try:
            return receive(stream)
        except BaseException:
            # Longer than the receiving thread waits between two looks.
            threading.Event().wait(10 * shard_sender.PARK_TICK_S)
            raise
        finally:
            with counting:
                reading.remove(stream)

    monkeypatch.setattr(FlightPutStream, "receive", receive_and_linger)
    sender = make_sender()
    waiter = hold_and_help(sender, backend, send_until_helped(sender))
    sender.close()
    waiter.join(10)
    assert isinstance(waiter.outcome, DeliveryUnknown)
    assert max(most) == 1


def test_a_long_read_is_broken_off_and_the_batch_sent_again(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_sender, "HELP_MS_MAX", 0)
    sender = make_sender()
    waiter = hold_and_help(sender, backend, send_until_helped(sender))
    # The sender's watch looks once a second by itself.
    until(lambda: not inside(sender)._helping, inside(sender).check)
    backend.release()
    waiter.join(30)
    stored = backend.bodies("t")
    assert stored == [b"%d" % number for number in range(len(stored))]
    assert waiter.outcome.last_offset == len(stored) - 1


def test_an_interrupt_under_somebody_who_reads_loses_no_answer(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender()
    sent = send_until_helped(sender)
    receive = FlightPutStream.receive
    interrupted: list[int] = []

    def receive_interrupted(stream: FlightPutStream) -> list[dict[str, Any]]:
        acks = receive(stream)
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(acks[0]["id"])
            raise KeyboardInterrupt
        return acks

    monkeypatch.setattr(FlightPutStream, "receive", receive_interrupted)
    futures = []

    def step() -> None:
        futures.append(sender.send("t", 0, batch([b"%d" % (sent + len(futures))])))
        with contextlib.suppress(KeyboardInterrupt):
            futures[-1].result(30)

    until(lambda: bool(interrupted), step)
    futures.append(sender.send("t", 0, batch([b"%d" % (sent + len(futures))])))
    assert [future.result(30).last_offset for future in futures] == [
        sent + number for number in range(len(futures))
    ]
    stored = backend.bodies("t")
    assert stored == [b"%d" % number for number in range(len(stored))]


def test_a_callback_may_close_the_sender(make_sender: MakeSender, backend: FakeBackend) -> None:
    sender = make_sender()
    closed = threading.Event()

    def close(_: object) -> None:
        sender.close()
        closed.set()

    send_until_helped(sender)
    future = sender.send("t", 0, batch([b"last"]))
    future.add_done_callback(close)
    assert future.result(30).count == 1
    assert closed.wait(10)


@pytest.mark.parametrize("numbers", [{"producer_id": -1}, {"producer_id": 1 << 64}, {"epoch": -1}])
def test_a_producer_that_no_record_can_carry_is_refused(
    make_sender: MakeSender, numbers: dict[str, int]
) -> None:
    with pytest.raises(Rejected):
        make_sender(**numbers)
