"""Connections for calls: one to each replica, kept open until a failure or the end of the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from raymq.client import forks
from raymq.client.transport.connection import Connection
from raymq.client.transport.kept_connections import KeptConnections
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeCluster
from tests.support.tcp_proxy import TcpProxy


class FakeConnection:
    """Answers with its number, or fails."""

    def __init__(self, number: int, failures: list[RayMQError]) -> None:
        self.number = number
        self.closed = 0
        self._failures = failures

    def call(self, op: str, args: Mapping[str, object], timeout: float) -> dict[str, Any]:
        if self._failures:
            raise self._failures.pop()
        return {"connection": self.number}

    def close(self) -> None:
        self.closed += 1


class Fakes:
    """Opens fake connections, and keeps them all."""

    def __init__(self) -> None:
        self.made: list[FakeConnection] = []
        #: where, one for each connection
        self.endpoints: list[tuple[int, str]] = []
        #: of the next calls
        self.failures: list[RayMQError] = []

    def connect(self, shard: int, endpoint: str) -> Connection:
        self.endpoints.append((shard, endpoint))
        self.made.append(FakeConnection(len(self.made), self.failures))
        found: Any = self.made[-1]
        return found  # type: ignore[no-any-return]


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def kept(fakes: Fakes) -> KeptConnections:
    return KeptConnections(fakes.connect)


def call(kept: KeptConnections, endpoint: str = "a", shard: int = 0) -> object:
    return kept.call(shard, endpoint, "leader", {}, 1.0)["connection"]


def test_calls_of_one_replica_share_a_connection(kept: KeptConnections, fakes: Fakes) -> None:
    assert [call(kept), call(kept), call(kept, "b"), call(kept, "a", 1), call(kept)] == [
        *(0, 0, 1, 2, 0)
    ]
    assert fakes.endpoints == [(0, "a"), (0, "b"), (1, "a")]


@pytest.mark.parametrize("failure", [Unavailable("away"), DeliveryUnknown("silent", status=1)])
def test_a_failure_of_the_connection_ends_it_and_the_next_call_opens_another(
    kept: KeptConnections, fakes: Fakes, failure: RayMQError
) -> None:
    call(kept)
    fakes.failures.append(failure)
    with pytest.raises(type(failure)):
        call(kept)
    assert fakes.made[0].closed == 1
    assert call(kept) == 1


def test_a_refusal_leaves_the_connection_open(kept: KeptConnections, fakes: Fakes) -> None:
    fakes.failures.append(Rejected("no", field="topic"))
    with pytest.raises(Rejected):
        call(kept)
    assert call(kept) == 0
    assert not fakes.made[0].closed


def test_a_connection_that_another_thread_opened_meanwhile_is_used(fakes: Fakes) -> None:
    def connect(shard: int, endpoint: str) -> Connection:
        made = fakes.connect(shard, endpoint)
        if len(fakes.made) == 1:
            thread = threading.Thread(target=call, args=(kept,))
            thread.start()
            thread.join(20)
        return made

    kept = KeptConnections(connect)
    assert call(kept) == 1
    assert [each.closed for each in fakes.made] == [1, 0]


def test_close_closes_all_and_a_later_call_opens_another(
    kept: KeptConnections, fakes: Fakes
) -> None:
    call(kept)
    call(kept, "b")
    kept.close()
    assert [each.closed for each in fakes.made] == [1, 1]
    assert call(kept) == 2


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(
    kept: KeptConnections, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(kept)
    monkeypatch.setattr(forks, "count", forks.count + 1)
    kept.close()
    assert call(kept) == 1
    assert not fakes.made[0].closed


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with closing(FakeCluster()) as cluster:
        yield cluster


def test_calls_over_routes_open_one_connection_which_a_later_server_breaks(
    cluster: FakeCluster,
) -> None:
    with closing(TcpProxy(int(cluster.endpoints[0].rpartition(":")[2]))) as proxy:
        routes = Routes({0: f"127.0.0.1:{proxy.port}"}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict)
        with closing(routes):
            for _ in range(5):
                routes.call_once(0, "describe", {}, 20.0)
                routes.first("describe", {}, 20.0)
            assert proxy.accepted == 1

            proxy.cut(refuse=True)
            with pytest.raises(Unavailable):
                routes.call_once(0, "describe", {}, 20.0)
            proxy.mend()
            assert routes.call_once(0, "describe", {}, 20.0)["shard"] == 0
            assert proxy.accepted == 2
