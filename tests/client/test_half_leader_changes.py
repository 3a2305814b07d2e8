"""Half messages of a shard whose leader changes: three replicas in memory, over Flight, and an actor of Ray."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest

from raymq.actors.server.ray.ray_methods import RayMethods
from raymq.client.client_thread import ClientThread
from raymq.client.produce import half_checks, half_sender
from raymq.client.produce.half_message import CheckedHalf, HalfMessage
from raymq.client.produce.producer import Producer
from raymq.client.transport import routes as routes_module
from raymq.client.transport.ray_connection import RayShardConnection
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.moving_shard import MovingShard
from tests.support.ray_handle import Handle, HandleConnection
from tests.support.waiting import until

GROUP = "billing"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent replicas are noticed soon, and shards asked often."""
    monkeypatch.setattr(routes_module, "LEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(routes_module, "SILENT_MS", 100)
    monkeypatch.setattr(half_checks, "ASK_S", 0.05)


@pytest.fixture
def shard() -> Iterator[MovingShard]:
    shard = MovingShard()
    shard.create("t", queues=2)
    yield shard
    shard.close()


def pause() -> None:
    threading.Event().wait(0.02)


def test_a_half_message_is_committed_at_the_leader_that_comes_next(shard: MovingShard) -> None:
    first, second = shard.replicas[:2]
    with shard.cluster() as handle, handle.producer() as producer:
        half = producer.send_half("t", b"half", group=GROUP).result(30)
        first.step_down()
        shard.elect(1, 2, of=first.kept())
        assert half.commit() is True
        assert half.commit() is False
        with pytest.raises(Rejected, match="the other decision counts"):
            half.rollback()
    assert (second.halves.ended, first.halves.ended) == ({0: "commit"}, {})


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_send_to_a_leader_that_is_away_goes_to_the_next_one(shard: MovingShard, how: str) -> None:
    with shard.cluster() as handle, handle.producer() as producer:
        producer.send("t", b"looks the topic up").result(30)
        getattr(shard, how)(0)
        future = producer.send_half("t", b"half", group=GROUP)
        shard.elect(1, 2, of=shard.replicas[0].kept())
        half = future.result(30)
        assert half.rollback() is True
    assert shard.replicas[1].halves.ended == {0: "rollback"}


def test_a_half_message_that_got_lost_with_its_leader_is_stored_by_the_next_one(
    shard: MovingShard,
) -> None:
    first, second = shard.replicas[:2]
    before = first.kept()
    call = first.call

    def store_and_end(op: str, args: dict[str, Any]) -> dict[str, Any]:
        answer = call(op, args)
        if op == "prepare_half":
            first.step_down()
            shard.elect(1, 2, of=before)
            raise DeliveryUnknown("the epoch is over", status="SERVICE_NOT_AVAILABLE")
        return answer

    first.call = store_and_end  # type: ignore[method-assign]
    with shard.cluster() as handle, handle.producer() as producer:
        half = producer.send_half("t", b"half", group=GROUP).result(30)
        assert half.commit() is True
    (lost,), (stored,) = first.halves.prepared, second.halves.prepared
    assert lost == stored


def test_checks_follow_the_leader(shard: MovingShard) -> None:
    asked: list[CheckedHalf] = []

    def answer(half: CheckedHalf) -> str:
        asked.append(half)
        return "commit"

    first, second = shard.replicas[:2]
    with shard.cluster() as handle, handle.producer() as producer:
        producer.check(answer, group=GROUP)
        producer.send_half("t", b"one", group=GROUP).result(30)
        until(lambda: first.halves.ended == {0: "commit"}, pause)
        first.step_down()
        shard.elect(1, 2, of=first.kept())
        producer.send_half("t", b"two", group=GROUP).result(30)
        until(lambda: second.halves.ended == {0: "commit", 1: "commit"}, pause)
    assert [each.body for each in asked] == [b"one", b"two"]


def test_a_shard_that_nothing_reaches_has_stored_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    cluster.create_topic("t")
    with Producer(cluster, delivery_timeout_ms=300) as producer:  # type: ignore[arg-type]
        half = producer.send_half("t", b"half", group=GROUP).result(30)
        cluster.down()
        future = producer.send_half("t", b"half", group=GROUP)
        with pytest.raises(Unavailable, match="nothing listens there"):
            future.result(30)
        with pytest.raises(Unavailable, match="nothing listens there"):
            half.commit()
        cluster.up()
        assert half.commit() is True
    cluster.close()


def test_what_is_under_way_at_the_end_of_a_close_is_unknown() -> None:
    cluster = FakeCluster()
    cluster.create_topic("t")
    call, go_on = cluster.backends[0].call, threading.Event()

    def wait(op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "prepare_half":
            go_on.wait(20)
        return call(op, args)

    cluster.backends[0].call = wait  # type: ignore[method-assign]
    producer = Producer(cluster)  # type: ignore[arg-type]
    futures = [producer.send_half("t", b"half", group=GROUP) for _ in range(20)]
    assert producer.statistics()["buffered_bytes"] > 0
    with pytest.raises(TimeoutError):
        futures[0].result(0.01)
    with pytest.raises(DeliveryUnknown, match="was closed before"):
        producer.close(0.1)
    for future in futures[: half_sender.THREADS_MAX]:
        with pytest.raises(DeliveryUnknown, match="may or may not be stored"):
            future.result(1)
    for future in futures[half_sender.THREADS_MAX :]:
        with pytest.raises(Unavailable, match="nothing was stored"):
            future.result(1)
    assert producer.statistics()["buffered_bytes"] == 0
    go_on.set()
    cluster.close()


def test_a_failure_that_a_caller_has_seen_is_not_raised_by_close() -> None:
    cluster = FakeCluster()
    cluster.create_topic("t")

    def refuse(op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "prepare_half":
            raise Rejected("no", field="topic")
        return call(op, args)

    call = cluster.backends[0].call
    cluster.backends[0].call = refuse  # type: ignore[method-assign]
    with Producer(cluster) as seeing, pytest.raises(Rejected, match="no"):  # type: ignore[arg-type]
        seeing.send_half("t", b"half", group=GROUP).result(30)
    producer = Producer(cluster)  # type: ignore[arg-type]
    producer.send_half("t", b"half", group=GROUP)
    with pytest.raises(Rejected, match="no"):
        producer.close()
    cluster.close()


def checking_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "raymq-half-checks"]


def test_a_producer_that_nothing_refers_to_asks_no_more() -> None:
    cluster = FakeCluster()
    cluster.create_topic("t")
    producer = Producer(cluster)  # type: ignore[arg-type]
    producer.check(lambda half: None, group=GROUP)
    until(lambda: len(checking_threads()) == 1, pause)
    del producer
    gc.collect()
    until(lambda: not checking_threads(), pause)
    cluster.close()


def test_a_send_without_a_thread_has_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    cluster.create_topic("t")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Producer(cluster) as producer:  # type: ignore[arg-type]
        producer.send("t", b"looks the topic up").result(30)
        with monkeypatch.context() as patched:
            patched.setattr(ClientThread, "start", refuse)
            with pytest.raises(Unavailable, match="no thread could be started"):
                producer.send_half("t", b"half", group=GROUP)
        assert producer.statistics()["buffered_bytes"] == 0
        assert producer.send_half("t", b"half", group=GROUP).result(30).commit()
    assert [each["body"] for each in cluster.backends[0].halves.prepared] == ["aGFsZg=="]
    cluster.close()


def test_a_done_callback_may_end_the_half_message_and_waits_for_no_other_one() -> None:
    cluster = FakeCluster()
    cluster.create_topic("t")
    found: list[object] = []

    def end(done: Future[HalfMessage]) -> None:
        found.append(done.result().commit())
        with pytest.raises(Rejected, match="done callback"):
            producer.flush()
        found.append("flush is refused")
        raise ValueError("logged")

    with Producer(cluster) as producer:  # type: ignore[arg-type]
        future = producer.send_half("t", b"half", group=GROUP)
        future.add_done_callback(end)
        assert not future.cancel()
        until(lambda: len(found) == 2, pause)
    assert found == [True, "flush is refused"]
    cluster.close()


# --- the transport of Ray -------------------------------------------------------------------------


class HandleRoutes(Routes):
    """Routes whose connections go to a handle."""

    handle: Handle

    def _connect_to(self, shard: int, endpoint: str) -> RayShardConnection:
        return HandleConnection(self.handle)


def test_half_messages_go_through_actor_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    backend.create("t")
    handle = Handle(RayMethods(backend))

    def of(cluster: object, *, keeps_connections: bool = False) -> Routes:
        routes = HandleRoutes(
            {0: "shard-0"}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict, transport="ray"
        )
        routes.handle = handle
        return routes

    monkeypatch.setattr(Routes, "of", of)
    cluster = FakeCluster()
    cluster.transport = "ray"
    asked: list[CheckedHalf] = []
    with closing(handle), closing(cluster), Producer(cluster) as producer:  # type: ignore[arg-type]
        half = producer.send_half("t", b"one", group=GROUP).result(30)
        assert half.commit() is True
        producer.send_half("t", b"two", group=GROUP).result(30)
        producer.check(asked.append, group=GROUP)
        until(lambda: len(asked) == 1, pause)
        assert producer.end_half(asked[0].id, "rollback") is True
    assert backend.halves.ended == {0: "commit", 1: "rollback"}
    assert asked[0].body == b"two"
