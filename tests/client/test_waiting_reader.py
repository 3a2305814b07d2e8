"""A caller that waits for one batch at a time reads its ack itself, and nothing else changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raymq.client.produce import read_turn
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.read_turn import ReadTurn
from raymq.client.transport.flight_client import FlightPutStream
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import DeliveryUnknown, Rejected
from tests.support.batches import batch
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

MakeSender = Callable[..., BatchSender]


def turn_of(sender: BatchSender) -> ReadTurn:
    return sender._shard_senders[0]._turn


def send_until_a_caller_reads(sender: BatchSender) -> int:
    """Send one row at a time until a caller has read an ack. Returns: rows sent."""
    sent = [0]

    def step() -> None:
        assert sender.send("t", 0, batch([b"%d" % sent[0]])).result(30).first_offset == sent[0]
        sent[0] += 1

    step()
    until(lambda: turn_of(sender).caller_reads > 0, step)
    return sent[0]


def hold_a_reading_caller(sender: BatchSender, backend: FakeBackend, sent: int) -> Waiter:
    """A caller that reads, for an ack that the shard holds."""
    while True:
        backend.hold_answers()
        waiter = Waiter(sender, b"%d" % sent)
        backend.wait_for(lambda stored=sent: len(backend.puts) > stored)
        passed = waiter.passed
        until(lambda passed=passed: turn_of(sender).caller_reading or passed.is_set(), lambda: None)
        if turn_of(sender).caller_reading:
            return waiter
        # The receiver thread was reading: once more.
        backend.release()
        waiter.join()
        sent += 1


class Waiter(threading.Thread):
    """Sends one row and waits for its receipt."""

    def __init__(self, sender: BatchSender, body: bytes) -> None:
        super().__init__(daemon=True)
        #: this thread has stopped reading, or another one reads
        self.passed = threading.Event()
        self.outcome: Any = None
        self._sender, self._body = sender, body
        self.start()

    def run(self) -> None:
        try:
            future = self._sender.send("t", 0, batch([self._body]))
            self._sender._shard_senders[0].read_while_waiting(future, 30)
            self.passed.set()
            self.outcome = future.result(30)
        except Exception as error:
            self.outcome = error


def test_a_waiting_caller_reads_and_everything_is_stored_once_in_order(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sent = send_until_a_caller_reads(make_sender())
    assert backend.bodies("t") == [b"%d" % number for number in range(sent)]


def test_an_ack_that_no_caller_waits_for_is_read_all_the_same(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    send_until_a_caller_reads(sender)
    called = threading.Event()
    sender.send("t", 0, batch([b"last"])).add_done_callback(lambda _: called.set())
    assert called.wait(10)


def test_a_short_timeout_is_kept(make_sender: MakeSender, backend: FakeBackend) -> None:
    sender = make_sender()
    send_until_a_caller_reads(sender)
    backend.hold_answers()
    future = sender.send("t", 0, batch([b"held"]))
    with pytest.raises(TimeoutError):
        future.result(0.05)
    backend.release()
    assert future.result(10).count == 1


def test_a_refusal_reaches_the_caller_that_reads_it(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    send_until_a_caller_reads(sender)
    backend.refusals.append(Rejected("no", field="body", limit=1))
    with pytest.raises(Rejected):
        sender.send("t", 0, batch([b"bad"])).result(30)
    assert sender.send("t", 0, batch([b"good"])).result(30).count == 1
    assert b"bad" not in backend.bodies("t")


def test_a_break_while_a_caller_reads_loses_and_doubles_nothing(
    cluster: FakeCluster, make_sender: MakeSender, backend: FakeBackend
) -> None:
    proxy = TcpProxy(cluster.servers[0].port)
    routes = Routes({0: f"127.0.0.1:{proxy.port}"}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict)
    try:
        sender = make_sender(routes=routes)
        waiter = hold_a_reading_caller(sender, backend, send_until_a_caller_reads(sender))
        proxy.cut()
        backend.release()
        waiter.join(30)
        stored = backend.bodies("t")
        assert waiter.outcome.last_offset == len(stored) - 1
        assert stored == [b"%d" % number for number in range(len(stored))]
    finally:
        proxy.close()


def test_close_while_a_caller_reads_ends_at_once(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    waiter = hold_a_reading_caller(sender, backend, send_until_a_caller_reads(sender))
    sender.close()
    waiter.join(10)
    assert isinstance(waiter.outcome, DeliveryUnknown)


def test_a_stream_has_one_reader_also_while_it_is_closed(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = FlightPutStream.receive
    count_lock = threading.Lock()
    reading: list[object] = []
    most: list[int] = []

    def receive_and_linger(stream: FlightPutStream) -> list[dict[str, Any]]:
        with count_lock:
            reading.append(stream)
            most.append(len(reading))
        try:
            return receive(stream)
        except BaseException:
            # Longer than the receiving thread waits between two looks.
            threading.Event().wait(10 * read_turn.PARK_TICK_S)
            raise
        finally:
            with count_lock:
                reading.remove(stream)

    monkeypatch.setattr(FlightPutStream, "receive", receive_and_linger)
    sender = make_sender()
    waiter = hold_a_reading_caller(sender, backend, send_until_a_caller_reads(sender))
    sender.close()
    waiter.join(10)
    assert isinstance(waiter.outcome, DeliveryUnknown)
    assert max(most) == 1


def test_a_long_read_is_broken_off_and_the_batch_sent_again(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_turn, "CALLER_READ_MS_MAX", 0)
    sender = make_sender()
    waiter = hold_a_reading_caller(sender, backend, send_until_a_caller_reads(sender))
    # The sender's watch looks once a second by itself.
    until(lambda: not turn_of(sender).caller_reading, sender._shard_senders[0].check)
    backend.release()
    waiter.join(30)
    stored = backend.bodies("t")
    assert stored == [b"%d" % number for number in range(len(stored))]
    assert waiter.outcome.last_offset == len(stored) - 1


def test_an_interrupt_of_a_reading_caller_loses_no_ack(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender()
    sent = send_until_a_caller_reads(sender)
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

    send_until_a_caller_reads(sender)
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
