"""One shard of a cluster that takes connections and says nothing, as a stopped process does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from raymq.client import client_thread
from raymq.client import handle as handle_module
from raymq.client.client_thread import ClientThread
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.range_reader import RangeReader
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport import connection as connection_module
from raymq.client.transport import routes as routes_module
from raymq.client.transport import topic_routes
from raymq.client.transport.routes import Routes
from raymq.cluster import cluster as cluster_module
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from tests.support.batches import batch, put_one
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture
def silent() -> Iterator[str]:
    """The endpoint of a server that accepts and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def handle(silent: str) -> Iterator[Cluster]:
    """A cluster of two shards, of which shard 0 is silent."""
    fakes = FakeCluster(shards=2)
    fakes.create_topic("t", queues=2)
    endpoints = {0: silent, 1: fakes.endpoints[1]}
    handle = Cluster(name="c", cluster_id=CLUSTER_ID, shards=2, token=TOKEN, endpoints=endpoints)
    yield handle
    handle.close()
    fakes.close()


def test_status_shows_a_silent_shard_as_unreachable_and_the_others_as_they_are(
    handle: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", 0.2)
    facts = handle.status()
    assert [shard["state"] for shard in facts["shards"]] == ["UNREACHABLE", "RUNNING"]
    assert facts["state"] == "DEGRADED"


def test_status_asks_all_shards_at_the_same_time(
    handle: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Barrier(handle.shards)

    def say_nothing(routes: Routes, shard: int, *rest: object) -> None:
        # Asked one by one, the first shard would wait here alone.
        asked.wait(30)
        raise DeliveryUnknown(f"shard {shard} said nothing", status="UNKNOWN_ERROR")

    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", 60.0)
    monkeypatch.setattr(Routes, "call_once", say_nothing)
    facts = handle.status()
    assert [shard["error"] for shard in facts["shards"]] == [
        "shard 0 said nothing",
        "shard 1 said nothing",
    ]


def test_topics_come_from_the_shard_that_answers_first(handle: Cluster) -> None:
    assert list(handle.topics()) == ["t"]


def test_a_producer_finds_a_topic_beside_a_silent_shard(handle: Cluster) -> None:
    routes = Routes.of(handle)
    assert routes.topics.find("t").queues == 2


def test_endpoints_are_looked_up_beside_a_silent_shard(handle: Cluster) -> None:
    handle.endpoints[7] = "elsewhere"
    Routes.of(handle).refresh()
    assert handle.refresh()[1] == handle.endpoints[1]


def test_a_send_whose_topic_cannot_be_looked_up_says_that_nothing_was_sent(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_routes, "CALL_TIMEOUT_S", 0.1)
    routes = Routes({0: silent}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict)
    with closing(BatchSender(routes, max_block_ms=0)) as sender:
        for call in (lambda: sender.topic("t"), lambda: sender.send("t", 0, batch([b"x"]))):
            with pytest.raises(
                Unavailable, match="'t' could not be looked up; nothing was sent"
            ) as error:
                call()
            assert isinstance(error.value.__cause__, DeliveryUnknown)


def test_a_refusal_is_raised_when_no_other_shard_answers(
    handle: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_routes, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(handle_module, "CALL_TIMEOUT_S", 0.3)
    with pytest.raises(Rejected, match="token"):
        Routes(handle.endpoints, "wrong", cluster_id=CLUSTER_ID).topics.find("t")


def test_an_operation_on_a_silent_shard_ends_as_unknown(handle: Cluster) -> None:
    with pytest.raises(DeliveryUnknown):
        handle.call(0, "describe", {}, timeout_s=0.2)


def test_a_thread_that_still_asks_leaves_no_connection_open_after_the_handle_was_closed(
    handle: Cluster,
) -> None:
    handle.close()
    assert Routes.of(handle).call_once(1, "describe", {}, 30.0)["shard"] == 1
    assert handle._connections == {}


# --- reads of a shard that falls silent, of which only one replica can lead --------------------------


@pytest.fixture
def proxy(cluster: FakeCluster) -> Iterator[TcpProxy]:
    """What stands between the readers and the shard."""
    proxy = TcpProxy(cluster.servers[0].port)
    yield proxy
    proxy.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "SILENT_MS", 50)
    monkeypatch.setattr(connection_module, "FOLLOWED_WAIT_MS", 50)
    monkeypatch.setattr(connection_module, "CHECK_S", 0.02)


@pytest.fixture
def beyond(proxy: TcpProxy) -> Cluster:
    """The handle of a cluster whose shard is reached through the proxy."""
    endpoints = {0: f"127.0.0.1:{proxy.port}"}
    return Cluster(name="c", cluster_id=CLUSTER_ID, shards=1, token=TOKEN, endpoints=endpoints)


def put(backend: FakeBackend, *bodies: bytes) -> None:
    put_one(backend, PutRequest("t", 0, batch(list(bodies)), None, 0, 0, "quorum"))


def poll_often(consumer: Consumer) -> None:
    """For less than the 20 s after which a new connection to a silent server fails by itself."""
    for _ in range(1500):
        consumer.poll(timeout=0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_consumer_of_a_silent_shard_says_so_and_goes_on_when_it_answers_again(
    beyond: Cluster,
    backend: FakeBackend,
    proxy: TcpProxy,
    monkeypatch: pytest.MonkeyPatch,
    replicas: int,
) -> None:
    monkeypatch.setattr(routes_module, "LEADER_TIMEOUT_S", 0.1)
    beyond.replicas = replicas
    put(backend, b"0")
    with Consumer(beyond, "t", start="earliest", unavailable_timeout_ms=0) as consumer:
        assert [each.body for each in consumer.poll(timeout=30)] == [b"0"]
        proxy.freeze()
        with pytest.raises(Unavailable, match="unreachable"):
            poll_often(consumer)
        proxy.cut()
        proxy.thaw()
        put(backend, b"1")

        found: list[bytes | None] = []
        while not found:
            try:
                found = [each.body for each in consumer.poll(timeout=0.1)]
            except Unavailable:
                continue
        assert found == [b"1"]


@pytest.mark.usefixtures("impatient")
def test_a_range_of_a_silent_shard_is_unavailable_when_its_time_is_up(
    beyond: Cluster, backend: FakeBackend, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_module, "LEADER_TIMEOUT_S", 0.1)
    put(backend, b"0", b"1")
    limits = {"max_bytes": 1, "max_records": 1}
    with closing(RangeReader(Routes.of(beyond), "t", 0, 0)) as reader:
        assert reader.fetch(0, 2, **limits, timeout_s=30)[1] == 1
        proxy.freeze()
        with pytest.raises(Unavailable):
            reader.fetch(1, 2, **limits, timeout_s=0)
        proxy.cut()
        proxy.thaw()


@pytest.mark.usefixtures("impatient")
def test_a_shard_that_only_takes_long_for_a_fetch_is_not_left(
    beyond: Cluster, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, b"0")
    asked: list[RayMQError | None] = []
    twice = threading.Event()
    ask = Routes._ask_whether_it_answers

    def note(self: Routes, shard: int, route: object, leave: Callable[[], None]) -> None:
        if len(asked) < 2:
            ask(self, shard, route, leave)  # type: ignore[arg-type]
            answer = self.begin(shard, route.endpoint, "leader", {}, 30.0)  # type: ignore[attr-defined]
            asked.append(answer.exception(30))  # type: ignore[arg-type]
        else:
            twice.set()

    fetch = backend.fetch

    def slow(request: FetchRequest) -> list[FetchSlice]:
        assert twice.wait(30)
        return fetch(request)

    monkeypatch.setattr(Routes, "_ask_whether_it_answers", note)
    monkeypatch.setattr(backend, "fetch", slow)
    fetches: list[object] = []
    stream = Routes.of(beyond).fetch_stream(0)
    fetches += stream.fetch(FetchRequest("t", {0: 0}, 1, 1, 0))
    stream.close()
    assert len(fetches) == 1
    # The shard refused the question, which is an answer.
    assert not any(isinstance(each, Unavailable | DeliveryUnknown) for each in asked)


def test_a_close_does_not_wait_long_for_a_thread_that_connects(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_thread, "JOIN_S", 0.01)
    connecting, may_end = threading.Event(), threading.Event()

    def connect(*_: object) -> None:
        connecting.set()
        assert may_end.wait(60)
        raise Unavailable("no shard")

    monkeypatch.setattr(Routes, "connect_leader", connect)
    before = set(threading.enumerate())
    sender = BatchSender(cluster.routes())
    sent = sender.send("t", 0, batch([b"x"]))
    assert connecting.wait(30)
    consumer = Consumer(cluster, "t", start="earliest")  # type: ignore[arg-type]
    sender.close()
    consumer.close()
    assert sent.done()
    names = {"raymq-sender-0", "raymq-reader-0"}
    threads = [each for each in set(threading.enumerate()) - before if each.name in names]
    assert len(threads) == 2
    may_end.set()
    for each in threads:
        each.join(30)
        assert not each.is_alive()


def test_with_ray_a_close_waits_for_its_threads_however_long_they_take() -> None:
    waits: list[float | None] = []

    class Thread(ClientThread):
        def join(self, timeout: float | None = None) -> None:
            waits.append(timeout)

    for transport in ("flight", "ray"):
        client_thread.join_at_close(Thread(lambda: None, "raymq-test"), transport)
    assert waits == [client_thread.JOIN_S, None]
