"""The idempotent sender against a shard that fails: nothing lost, nothing twice, nothing out of order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from raymq.client.produce import send_window
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import (
    DeliveryUnknown,
    Fenced,
    Rejected,
    StorageFull,
    Unavailable,
)
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch
from tests.support.clock import ManualClock
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

MakeSender = Callable[..., BatchSender]


@pytest.fixture
def proxy(cluster: FakeCluster) -> Iterator[TcpProxy]:
    proxy = TcpProxy(cluster.servers[0].port)
    yield proxy
    proxy.close()


def through(proxy: TcpProxy) -> Routes:
    return Routes({0: f"127.0.0.1:{proxy.port}"}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict)


def numbered(start: int, count: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(start, start + count)]


def test_receipts_have_the_offsets_of_each_queue(make_sender: MakeSender) -> None:
    sender = make_sender()
    first = sender.send("t", 0, batch(numbered(0, 3))).result(10)
    second = sender.send("t", 0, batch(numbered(3, 2))).result(10)
    other = sender.send("t", 1, batch(numbered(0, 1))).result(10)
    assert (first.first_offset, first.count, first.shard) == (0, 3, 0)
    assert [second.offset(row) for row in range(2)] == [3, 4]
    assert (other.queue_id, other.first_offset) == (1, 0)


def test_sequences_count_rows_of_each_queue(make_sender: MakeSender, backend: FakeBackend) -> None:
    sender = make_sender(producer_id=5, epoch=2)
    for queue, rows in ((0, 3), (1, 2), (0, 1)):
        sender.send("t", queue, batch(numbered(0, rows)))
    sender.flush(10)
    assert [(p.queue_id, p.first_sequence) for p in backend.puts] == [(0, 0), (1, 0), (0, 3)]
    assert {(p.producer_id, p.epoch) for p in backend.puts} == {(5, 2)}


@pytest.mark.parametrize("where", ["the same port", "another port"])
def test_a_server_that_dies_with_batches_in_flight_loses_and_repeats_nothing(
    make_sender: MakeSender, cluster: FakeCluster, backend: FakeBackend, proxy: TcpProxy, where: str
) -> None:
    sender = make_sender(routes=through(proxy))
    backend.hold_answers()
    futures = [sender.send("t", n % 2, batch(numbered(n * 10, 10))) for n in range(20)]
    backend.wait_for(lambda: len(backend.puts) >= 7)

    proxy.cut(refuse=True)
    backend.release()
    futures += [sender.send("t", n % 2, batch(numbered(n * 10, 10))) for n in range(20, 30)]
    if where == "another port":
        cluster.down()
        proxy.mend(cluster.up())
    proxy.mend()

    receipts = [future.result(20) for future in futures]
    for queue in (0, 1):
        mine = [r for r in receipts if r.queue_id == queue]
        assert [r.first_offset for r in mine] == list(range(0, 150, 10))
        expected = [b for n in range(queue, 30, 2) for b in numbered(n * 10, 10)]
        assert backend.bodies("t", queue) == expected

    first_of = {}
    for put in backend.puts:
        assert isinstance(put.batch, SmallBatch)
        body = put.batch.bodies[0]
        assert first_of.setdefault(body, put.first_sequence) == put.first_sequence


def test_a_restarted_server_is_found_where_the_resolver_says(
    make_sender: MakeSender, cluster: FakeCluster, backend: FakeBackend
) -> None:
    sender = make_sender()
    sender.send("t", 0, batch(numbered(0, 1))).result(10)
    cluster.down()
    waiting = sender.send("t", 0, batch(numbered(1, 1)))
    cluster.up()
    assert waiting.result(20).first_offset == 1


def test_without_a_resolver_the_other_shards_say_where_a_shard_is() -> None:
    cluster = FakeCluster(2)
    cluster.create_topic("t", queues=2)
    routes = Routes(cluster.endpoints, TOKEN, cluster_id=CLUSTER_ID)
    with closing(BatchSender(routes)) as sender:
        sender.send("t", 1, batch(numbered(0, 1))).result(10)
        cluster.down(1)
        cluster.up(1)
        assert sender.send("t", 1, batch(numbered(1, 1))).result(20).first_offset == 1
    cluster.close()


@pytest.mark.parametrize(
    "refusal", [Unavailable("busy"), StorageFull("full"), DeliveryUnknown("lost", status="X")]
)
def test_a_passing_refusal_keeps_order_and_sequences(
    make_sender: MakeSender, backend: FakeBackend, refusal: Exception
) -> None:
    sender = make_sender()
    backend.refusals = [None, refusal]  # type: ignore[list-item]
    futures = [sender.send("t", 0, batch(numbered(n, 1))) for n in range(5)]
    assert [future.result(20).first_offset for future in futures] == [0, 1, 2, 3, 4]
    assert backend.bodies("t") == numbered(0, 5)


def test_an_unknown_outcome_is_asked_again_with_the_same_sequence(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    backend.unknown = 1
    futures = [sender.send("t", 0, batch(numbered(n, 1))) for n in range(3)]
    receipts = [future.result(20) for future in futures]
    assert [r.first_offset for r in receipts] == [0, 1, 2]
    assert receipts[0].duplicates == 1
    assert backend.bodies("t") == numbered(0, 3)


def test_a_rejected_batch_fails_alone_and_later_ones_close_up(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    backend.refusals = [None, Rejected("no", field="body", row=0)]
    futures = [sender.send("t", 0, batch(numbered(n * 2, 2))) for n in range(5)]
    with pytest.raises(Rejected) as rejected:
        futures[1].result(10)
    assert rejected.value.row == 0
    assert [futures[n].result(10).first_offset for n in (0, 2, 3, 4)] == [0, 2, 4, 6]
    assert sender.send("t", 0, batch(numbered(9, 1))).result(10).first_offset == 8
    assert backend.bodies("t") == [*numbered(0, 2), *numbered(4, 6), b"9"]


def test_a_bad_batch_is_refused_before_it_is_sent(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    with pytest.raises(Rejected) as null:
        sender.send("t", 0, batch([b"x", None]))
    assert (null.value.field, null.value.row) == ("body", 1)
    with pytest.raises(Rejected):
        sender.send("t", 0, batch([]))
    with pytest.raises(Rejected) as queue:
        sender.send("t", 4, batch([b"x"]))
    assert queue.value.limit == 3
    with pytest.raises(Rejected, match="create it first"):
        sender.send("nowhere", 0, batch([b"x"]))
    assert not backend.puts


def test_what_certainly_was_not_stored_fails_as_unavailable(
    make_sender: MakeSender, cluster: FakeCluster
) -> None:
    sender = make_sender(delivery_timeout_ms=1_000)
    sender.topic("t")
    cluster.down()
    with pytest.raises(Unavailable, match="nothing of the batch was stored"):
        sender.send("t", 0, batch([b"x"])).result(20)
    cluster.up()
    assert sender.send("t", 0, batch([b"y"])).result(20).first_offset == 0


def test_what_may_be_stored_fails_as_unknown_and_the_next_send_works(
    make_sender: MakeSender, backend: FakeBackend, proxy: TcpProxy
) -> None:
    sender = make_sender(routes=through(proxy), delivery_timeout_ms=1_000)
    backend.hold_answers()
    lost = sender.send("t", 0, batch([b"x"]))
    backend.wait_for(lambda: len(backend.puts) == 1)
    proxy.cut(refuse=True)
    with pytest.raises(DeliveryUnknown, match="may or may not"):
        lost.result(20)
    backend.release()
    proxy.mend()
    assert sender.send("t", 0, batch([b"y"])).result(20).first_offset == 1


def test_with_a_given_producer_id_an_unknown_outcome_ends_its_queue(
    make_sender: MakeSender, backend: FakeBackend, proxy: TcpProxy
) -> None:
    sender = make_sender(routes=through(proxy), delivery_timeout_ms=1_000, producer_id=1)

    backend.hold_answers()
    lost = sender.send("t", 0, batch([b"x"]))
    backend.wait_for(lambda: len(backend.puts) == 1)
    proxy.cut(refuse=True)
    with pytest.raises(DeliveryUnknown):
        lost.result(20)
    with pytest.raises(DeliveryUnknown, match="same producer id"):
        sender.send("t", 0, batch([b"y"]))

    backend.release()
    # The same id from the beginning: what was stored is recognised.
    proxy.mend()
    again = make_sender(producer_id=1)
    receipt = again.send("t", 0, batch([b"x"])).result(20)
    assert (receipt.first_offset, receipt.duplicates) == (0, 1)


def test_an_old_epoch_is_fenced_and_stays_fenced(make_sender: MakeSender) -> None:
    make_sender(producer_id=9, epoch=3).send("t", 0, batch([b"x"])).result(10)
    old = make_sender(producer_id=9, epoch=2)
    with pytest.raises(Fenced):
        old.send("t", 0, batch([b"x"])).result(10)
    with pytest.raises(Fenced):
        old.send("t", 0, batch([b"x"]))


def test_a_gap_that_the_server_sees_is_raised_once(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    sender.send("t", 0, batch([b"x"])).result(10)
    backend.state.producers.clear()
    with pytest.raises(Unavailable, match="unknown"):
        sender.send("t", 0, batch([b"y"])).result(10)
    assert sender.send("t", 0, batch([b"y"])).result(10).first_offset == 1


def test_a_wrong_token_fails_at_once(make_sender: MakeSender, cluster: FakeCluster) -> None:
    routes = cluster.routes()
    routes.topics.find("t")
    routes.token = "wrong"
    with pytest.raises(Rejected) as refused:
        make_sender(routes=routes).send("t", 0, batch([b"x"])).result(10)
    assert refused.value.field == "token"


def test_a_silent_server_is_left_and_asked_again(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender(request_timeout_ms=100)
    backend.hold_answers()
    future = sender.send("t", 0, batch([b"x"]))
    backend.wait_for(lambda: len(backend.puts) == 1)
    held = backend.take_held()
    receipt = future.result(20)
    for answer in held:
        answer()
    assert (receipt.first_offset, receipt.duplicates) == (0, 1)


def test_a_full_buffer_blocks_and_then_raises(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender(buffer_bytes=1000, max_block_ms=50)
    backend.hold_answers()
    sender.send("t", 0, batch([b"x" * 900]))
    with pytest.raises(Unavailable, match="buffer_bytes") as full:
        sender.send("t", 0, batch([b"y" * 900]))
    assert full.value.limit == 1000
    backend.release()
    sender.flush(10)
    assert sender.send("t", 0, batch([b"y" * 900])).result(10).first_offset == 1


def test_flush_waits_and_raises_when_the_time_is_up(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    backend.hold_answers()
    future = sender.send("t", 0, batch([b"x"]))
    with pytest.raises(TimeoutError, match="still under way"):
        sender.flush(0.05)
    backend.release()
    sender.flush(10)
    assert future.done()


def test_closing_fails_what_is_open_truthfully(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    sender = make_sender()
    backend.hold_answers()
    future = sender.send("t", 0, batch([b"x"]))
    backend.wait_for(lambda: len(backend.puts) == 1)

    backend.release()
    backend.hold_answers()
    future.result(10)
    late = sender.send("t", 0, batch([b"y"]))
    backend.wait_for(lambda: len(backend.puts) == 2)

    sender.close()
    backend.release()
    with pytest.raises(DeliveryUnknown, match="closed"):
        late.result(10)
    with pytest.raises(Rejected, match="closed"):
        sender.send("t", 0, batch([b"z"]))


def test_a_refusal_after_a_break_does_not_call_a_batch_unstored_that_may_be_stored(
    make_sender: MakeSender, cluster: FakeCluster, backend: FakeBackend, proxy: TcpProxy
) -> None:
    routes = through(proxy)
    sender = make_sender(routes=routes)
    sender.send("t", 0, batch(numbered(0, 1))).result(10)

    backend.hold_answers()
    sent = sender.send("t", 0, batch(numbered(1, 1)))
    backend.wait_for(lambda: len(backend.puts) == 2)
    routes.token = "wrong"
    proxy.cut(refuse=True)
    pause = threading.Event()
    until(lambda: sender._shard_senders[0]._stream is None, lambda: pause.wait(0.01))
    proxy.mend()

    waiting = sender.send("t", 0, batch(numbered(2, 1)))
    backend.release()

    with pytest.raises(DeliveryUnknown):
        sent.result(10)
    with pytest.raises(Rejected) as refused:
        waiting.result(10)
    assert refused.value.field == "token"

    # Then the sender continues as a new producer: rows of the old one cannot be repeated by it.
    routes.token = TOKEN
    assert sender.send("t", 0, batch(numbered(3, 1))).result(10).first_offset == 2
    assert backend.bodies("t") == [b"0", b"1", b"3"]


def test_batches_of_a_refused_stream_leave_no_gap(
    make_sender: MakeSender, cluster: FakeCluster, backend: FakeBackend
) -> None:
    routes = cluster.routes()
    sender = make_sender(routes=routes, producer_id=7)
    sender.topic("t")
    routes.token = "wrong"
    for number in range(2):
        with pytest.raises(Rejected):
            sender.send("t", 0, batch(numbered(number, 1))).result(10)
    routes.token = TOKEN
    assert sender.send("t", 0, batch(numbered(2, 1))).result(10).first_offset == 0
    assert [put.first_sequence for put in backend.puts] == [0]


def test_a_sender_stays_within_its_share_of_the_shards_memory(
    make_sender: MakeSender, cluster: FakeCluster, backend: FakeBackend
) -> None:
    memory = cluster.servers[0]._memory
    with contextlib.ExitStack() as others:
        connection = others.enter_context(closing(cluster.routes().connect(0)))
        for _ in range(31):
            stream = others.enter_context(closing(connection.put_stream()))
            stream.opened()

        sender = make_sender()
        sender.send("t", 0, batch([b"first"])).result(10)
        assert memory.stream_limit_bytes == 2 << 20
        backend.hold_answers()
        futures = [sender.send("t", 0, batch([b"x" * (1 << 20)])) for _ in range(10)]
        backend.wait_for(lambda: len(backend.puts) == 2)
        shard = sender.shard_sender_of("t", 0)
        assert shard is not None
        assert shard.stalled

        backend.release()
        assert [future.result(10).first_offset for future in futures] == list(range(1, 11))


def test_a_batch_that_finds_a_full_disk_fails_in_time_while_other_batches_succeed(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = backend.put

    def no_room_in_queue_1(
        requests: Sequence[PutRequest], *rest: object, **options: object
    ) -> object:
        """The batches of several queues may come together."""
        return [
            StorageFull("full") if request.queue_id == 1 else put([request], *rest, **options)[0]  # type: ignore[arg-type]
            for request in requests
        ]

    monkeypatch.setattr(backend, "put", no_room_in_queue_1)
    clock = ManualClock()
    sender = make_sender(clock=clock)
    large = sender.send("t", 1, batch([b"large"]))
    for number in range(2):
        assert not large.done()
        # The answer to the large batch comes before that to the small one.
        assert sender.send("t", 0, batch(numbered(number, 1))).result(20).first_offset == number
        clock.advance(send_window.STORAGE_FULL_MS // 2)
    assert isinstance(large.exception(20), StorageFull)


def test_each_batch_has_its_own_time_to_wait_for_a_full_disk(
    make_sender: MakeSender, backend: FakeBackend
) -> None:
    clock = ManualClock()
    sender = make_sender(clock=clock)
    backend.refusals = [StorageFull("full"), Rejected("no")]
    assert isinstance(sender.send("t", 0, batch([b"x"])).exception(20), Rejected)
    clock.advance(3_600_000)
    backend.refusals = [StorageFull("full")]
    assert sender.send("t", 0, batch([b"y"])).result(20).first_offset == 0


def test_with_a_given_producer_id_nothing_is_stored_after_a_full_disk(
    make_sender: MakeSender, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_window, "STORAGE_FULL_MS", 0)
    sender = make_sender(producer_id=1)

    backend.hold_answers()
    futures = [sender.send("t", 0, batch(numbered(0, 2)))]
    backend.wait_for(lambda: len(backend.puts) == 1)
    backend.refusals = [StorageFull("full"), Unavailable("busy")]
    futures += [sender.send("t", 0, batch(numbered(n, 2))) for n in (2, 4)]
    backend.wait_for(lambda: len(backend.puts) == 3)
    backend.release()

    assert futures[0].result(20).first_offset == 0
    for future in futures[1:]:
        with pytest.raises(StorageFull):
            future.result(20)
    with pytest.raises(StorageFull):
        sender.send("t", 0, batch(numbered(6, 2)))

    # A sender that starts again with the same id and rows stores each once: none has taken the number of another.
    again = make_sender(producer_id=1)
    for start in (0, 2, 4):
        again.send("t", 0, batch(numbered(start, 2)))
    again.flush(20)
    assert backend.bodies("t") == numbered(0, 6)
