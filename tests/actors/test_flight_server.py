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
