"""One shard of a cluster that takes connections and says nothing, as a stopped process does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from raymq.cluster import cluster as cluster_module
from raymq.cluster.cluster import Cluster
from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.transport import routes as routes_module
from raymq.cluster.transport.routes import Routes
from raymq.store.base.errors import DeliveryUnknown, Rejected, Unavailable
from tests.support.batches import batch
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeCluster


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
    assert routes.topic("t").queues == 2


def test_endpoints_are_looked_up_beside_a_silent_shard(handle: Cluster) -> None:
    handle.endpoints[7] = "elsewhere"
    Routes.of(handle).refresh()
    assert handle.refresh()[1] == handle.endpoints[1]


def test_a_send_whose_topic_cannot_be_looked_up_says_that_nothing_was_sent(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_module, "CALL_TIMEOUT_S", 0.1)
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
    monkeypatch.setattr(routes_module, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(cluster_module, "_CALL_TIMEOUT_S", 0.3)
    with pytest.raises(Rejected, match="token"):
        Routes(handle.endpoints, "wrong", cluster_id=CLUSTER_ID).topic("t")


def test_an_operation_on_a_silent_shard_ends_as_unknown(handle: Cluster) -> None:
    with pytest.raises(DeliveryUnknown):
        handle.call(0, "describe", {}, timeout_s=0.2)


def test_a_thread_that_still_asks_leaves_no_connection_open_after_the_handle_was_closed(
    handle: Cluster,
) -> None:
    handle.close()
    assert Routes.of(handle).call_once(1, "describe", {}, 30.0)["shard"] == 1
    assert handle._connections == {}
