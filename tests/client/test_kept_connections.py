"""Connections for calls: one to each replica, kept open until a failure or the end of the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from raymq.client import forks
from raymq.client.transport.kept_connections import IDLE_MS_MAX, KeptConnections
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import (
    DeliveryUnknown,
    RayMQError,
    Rejected,
    Unavailable,
    UntrustedServer,
)
from tests.support.clock import ManualClock
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeCluster
from tests.support.tcp_proxy import TcpProxy


class FakeConnection:
    """Answers with its number, or fails."""

    def __init__(self, number: int, failures: list[RayMQError]) -> None:
        self.number = number
        self.closed = 0
        self.users = 0
        self.is_broken = False
        self._failures = failures

    def acquire(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1

    def call(self, op: str, args: Mapping[str, object], timeout: float) -> dict[str, Any]:
        return self.call_held(op, args, timeout)

    def call_held(self, op: str, args: Mapping[str, object], timeout: float) -> dict[str, Any]:
        if self._failures:
            failure = self._failures.pop()
            # Of the connection, not an answer.
            self.is_broken = failure.message == "broken"
            raise failure
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
        #: called after the first one was made
        self.on_first: Callable[[], object] = lambda: None

    def connect(self, shard: int, endpoint: str) -> Any:
        self.endpoints.append((shard, endpoint))
        made = FakeConnection(len(self.made), self.failures)
        self.made.append(made)
        if len(self.made) == 1:
            self.on_first()
        return made


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def kept(fakes: Fakes, clock: ManualClock) -> KeptConnections:
    return KeptConnections(fakes.connect, clock)


def call(kept: KeptConnections, endpoint: str = "a", shard: int = 0) -> object:
    return kept.call(shard, endpoint, "leader", {}, 1.0)["connection"]


def test_calls_of_one_replica_share_a_connection(kept: KeptConnections, fakes: Fakes) -> None:
    asked = [call(kept), call(kept), call(kept, "b"), call(kept, "a", 1), call(kept)]
    assert asked == [0, 0, 1, 2, 0]
    assert fakes.endpoints == [(0, "a"), (0, "b"), (1, "a")]
    assert [each.users for each in fakes.made] == [0, 0, 0]


@pytest.mark.parametrize(
    "failure",
    [
        Unavailable("broken"),
        DeliveryUnknown("broken", status=1),
        UntrustedServer("broken", field="certificate"),
    ],
)
def test_a_connection_that_fails_is_closed_and_the_next_call_opens_another(
    kept: KeptConnections, fakes: Fakes, failure: RayMQError
) -> None:
    call(kept)
    fakes.failures.append(failure)
    with pytest.raises(type(failure)):
        call(kept)
    assert fakes.made[0].closed == 1
    assert call(kept) == 1


@pytest.mark.parametrize("refusal", [Rejected("no", field="topic"), Unavailable("not the leader")])
def test_a_refusal_leaves_the_connection_open(
    kept: KeptConnections, fakes: Fakes, refusal: RayMQError
) -> None:
    fakes.failures.append(refusal)
    with pytest.raises(type(refusal)):
        call(kept)
    assert call(kept) == 0
    assert not fakes.made[0].closed


def test_of_two_threads_that_open_a_connection_both_are_answered_and_one_is_kept(
    kept: KeptConnections, fakes: Fakes
) -> None:
    # The other one, which is quicker.
    fakes.on_first = lambda: call(kept)
    assert call(kept) == 0
    assert [each.closed for each in fakes.made] == [0, 1]
    assert call(kept) == 0


def test_a_connection_that_was_idle_for_long_is_not_used_again(
    kept: KeptConnections, fakes: Fakes, clock: ManualClock
) -> None:
    call(kept)
    clock.advance(IDLE_MS_MAX)
    assert call(kept) == 0
    clock.advance(IDLE_MS_MAX + 1)
    assert call(kept) == 1
    assert fakes.made[0].closed == 1


def test_close_closes_all_and_later_calls_have_connections_of_their_own(
    kept: KeptConnections, fakes: Fakes
) -> None:
    call(kept)
    call(kept, "b")
    kept.close()
    assert [each.closed for each in fakes.made] == [1, 1]
    assert [call(kept), call(kept)] == [2, 3]
    assert [each.closed for each in fakes.made] == [1, 1, 1, 1]


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
        routes = Routes(
            {0: f"127.0.0.1:{proxy.port}"},
            TOKEN,
            cluster_id=CLUSTER_ID,
            resolver=dict,
            keeps_connections=True,
        )
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
