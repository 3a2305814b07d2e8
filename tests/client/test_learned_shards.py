"""A client that is older than a shard finds it when it looks up a topic that is there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client import replica_status
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.cluster.cluster import Cluster
from tests.support.batches import batch
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeCluster


@pytest.fixture
def shards() -> Iterator[FakeCluster]:
    """Two shards, and a topic on both."""
    cluster = FakeCluster(2)
    cluster.create_topic("t", queues=2)
    yield cluster
    cluster.close()


def early(shards: FakeCluster, resolver: Callable[[], dict[int, str]] | None = None) -> Cluster:
    """A handle from before shard 1 was added."""
    return Cluster(
        name="fake",
        cluster_id=CLUSTER_ID,
        shards=1,
        token=TOKEN,
        endpoints={0: shards.endpoints[0]},
        resolver=resolver,
    )


def test_a_producer_sends_to_a_shard_that_its_handle_does_not_know(shards: FakeCluster) -> None:
    for resolver in (None, lambda: dict(shards.endpoints), lambda: {0: shards.endpoints[0]}):
        with early(shards, resolver) as handle:
            routes = Routes.of(pickle.loads(pickle.dumps(handle)) if resolver is None else handle)
            with closing(BatchSender(routes)) as sender:
                receipt = sender.send("t", 1, batch([b"to the new shard"])).result(20)
            assert receipt.count == 1
            assert routes.endpoints == shards.endpoints


def test_a_shard_that_was_away_meanwhile_does_not_hide_the_new_one() -> None:
    with closing(FakeCluster(3)) as shards:
        old = {each: shards.endpoints[each] for each in (0, 1)}
        for stale, other in ((0, 1), (1, 0)):
            everywhere = {str(each): there for each, there in shards.endpoints.items()}
            shards.backends[other].routes = everywhere
            shards.backends[stale].routes = {str(each): there for each, there in old.items()}
            routes = Routes(dict(old), TOKEN, cluster_id=CLUSTER_ID)
            routes.learn_shards([0, 1, 2])
            assert routes.endpoints == shards.endpoints


def test_through_ray_the_new_shard_is_found_by_the_names_of_its_actors() -> None:
    handle: Any = SimpleNamespace(
        name="c",
        shards=1,
        replicas=3,
        token=TOKEN,
        cluster_id=CLUSTER_ID,
        endpoints={},
        replica_endpoints={},
        resolver=None,
        ca=None,
        transport="ray",
    )
    routes = Routes.of(handle)
    routes.learn_shards([1])
    assert routes.endpoints[1] == "raymq:c:shard-1:replica-0:commit_log"
    assert routes.replicas_of(1)[2] == "raymq:c:shard-1:replica-2:commit_log"


def test_a_handle_counts_the_new_shard_when_it_meets_it(shards: FakeCluster) -> None:
    with early(shards) as handle:
        assert handle.topics()["t"]["shards"] == [0, 1]
        assert handle.shards == 2
        assert handle.endpoints == shards.endpoints
    with early(shards) as handle:
        queues = handle.describe_topic("t")["queues"]
        assert [queue["shard"] for queue in queues] == [0, 1]


def test_status_and_refresh_ask_how_many_there_are(
    shards: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in shards.backends:
        facts = {**backend.identity(), "shards": 2}
        monkeypatch.setattr(backend, "identity", lambda facts=facts: facts)
        call = backend.call
        described = lambda op, args, call=call, facts=facts: (  # noqa: E731
            facts if op == "describe" else call(op, args)
        )
        monkeypatch.setattr(backend, "call", described)
    with early(shards) as handle:
        handle.placement = (("a",),)
        status = handle.status()
        assert [facts["shard"] for facts in status["shards"]] == [0, 1]
        assert [facts["nodes"] for facts in status["shards"]] == [["a"], []]
        assert replica_status._node(handle, 1, 0) is None
    with early(shards) as handle:
        assert handle.refresh() == shards.endpoints
        assert handle.shards == 2
