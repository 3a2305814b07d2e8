"""A shard's Flight server: what it makes of a request before and after the shard answers."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest

from raymq.cluster.transport import flight_server
from raymq.cluster.transport.flight_server import FETCH_STEP_MS, Server
from raymq.store.records.requests import FetchRequest, FetchSlice
from tests.support.clock import ManualClock
from tests.support.fake_backend import FakeBackend


class Behind(FakeBackend):
    """A shard whose dispatch lags: a read takes seconds, however short its wait, and finds nothing."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.manual = clock
        self.waits: list[int] = []

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        self.waits.append(request.wait_ms)
        self.manual.advance(5000)
        return []


def test_a_fetch_waits_no_longer_than_asked_and_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(flight_server, "Clock", lambda: clock)
    backend = Behind(clock)
    with closing(Server(backend, "127.0.0.1", 0, "token")) as server:
        request = FetchRequest("t", {0: 0}, 1 << 20, 10, 9000)
        assert server._read(SimpleNamespace(is_cancelled=lambda: False), request) == []
    assert backend.waits == [FETCH_STEP_MS, FETCH_STEP_MS]
