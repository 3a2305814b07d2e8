"""A shard's Flight server: what it makes of a request before and after the shard answers."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from raymq.actors.server.flight import flight_server
from raymq.actors.server.flight.flight_server import serve
from raymq.client.transport.flight_client import ShardConnection
from tests.support.fake_backend import TOKEN, FakeBackend


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.7:5", ("192.0.2.7", 5)),
        ("ipv6:%5B2001:db8::1%5D:50000", ("2001:db8::1", 50000)),
        ("ipv6:[fe80::1%25eth0]:7", ("fe80::1", 7)),
        # An IPv4 client of a server that listens on [::].
        ("ipv6:%5B::ffff:192.0.2.7%5D:5", ("192.0.2.7", 5)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_the_born_host_is_the_address_that_the_connection_shows(
    peer: str, host: tuple[str, int] | None
) -> None:
    assert flight_server.born_host_of(peer) == host


def test_no_call_is_served_before_the_port_is_known() -> None:
    backend, answers = FakeBackend(), []
    bound = threading.Event()

    def ask(port: int) -> None:
        client = ShardConnection(f"127.0.0.1:{port}", TOKEN)
        answers.append((client.call("describe")["shard"], bound.is_set()))
        client.close()

    def on_bound(port: int) -> None:
        asking.append(threading.Thread(target=ask, args=(port,)))
        asking[0].start()
        # Far longer than the call takes when nothing holds it.
        asking[0].join(0.2)
        bound.set()

    asking: list[threading.Thread] = []
    with closing(serve(backend, host="127.0.0.1", port=0, token=TOKEN, on_bound=on_bound)):
        asking[0].join(30)
    assert answers == [(0, True)]


def test_a_close_waits_for_no_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_server, "CLOSE_TIMEOUT_S", 200.0)
    server = serve(FakeBackend(), host="127.0.0.1", port=0, token=TOKEN)
    with closing(ShardConnection(f"127.0.0.1:{server.port}", TOKEN)) as connection:
        connection.call("describe", {})
        closer = threading.Thread(target=server.close)
        closer.start()
        closer.join(60)
        assert not closer.is_alive()


def test_a_close_waits_for_an_operation_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_server, "CLOSE_TIMEOUT_S", 200.0)
    backend, began, may_end = FakeBackend(), threading.Event(), threading.Event()
    answered: list[object] = []

    def call(op: str, args: object) -> dict[str, object]:
        began.set()
        may_end.wait(60)
        return {"done": True}

    monkeypatch.setattr(backend, "call", call)
    server = serve(backend, host="127.0.0.1", port=0, token=TOKEN)
    with closing(ShardConnection(f"127.0.0.1:{server.port}", TOKEN)) as connection:
        caller = threading.Thread(target=lambda: answered.append(connection.call("slow", {})))
        caller.start()
        assert began.wait(60)
        closer = threading.Thread(target=server.close)
        closer.start()
        closer.join(0.5)
        assert closer.is_alive()
        may_end.set()
        closer.join(60)
        caller.join(60)
    assert not closer.is_alive()
    assert answered == [{"done": True}]
