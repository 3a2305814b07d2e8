"""The client's connection to a shard: shared by threads, and closed beside their calls."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from raymq.actors.server.flight.flight_server import serve
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.errors import Unavailable
from raymq.store.records.requests import FetchRequest
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend

#: a native crash must not end the test run with it
CLOSED_BESIDE_CALLS = """
import random
import threading
import pyarrow.flight as flight
from raymq.actors.protocol import flight_messages
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.errors import Unavailable

class Server(flight.FlightServerBase):
    def do_action(self, context, action):
        yield flight.Result(flight_messages.pack({"result": {}}))

server = Server("grpc://127.0.0.1:0")
new = lambda: ShardConnection(f"127.0.0.1:{server.port}", "token")
current = [new()]
rounds = 4000

def call():
    while rounds:
        try:
            current[0].call("describe")
        except Unavailable:
            # The connection was closed before the call began.
            pass

callers = [threading.Thread(target=call) for _ in range(3)]
for each in callers:
    each.start()
pause = threading.Event()
while rounds:
    pause.wait(random.random() / 3000)
    old, current[0] = current[0], new()
    old.close()
    rounds -= 1
for each in callers:
    each.join()
current[0].close()
server.shutdown()
print("closed beside calls")
"""


class Held(FakeBackend):
    """Answers `describe` when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "describe":
            self.entered.set()
            self.released.wait(30)
        return super().call(op, args)


@pytest.fixture
def held() -> Iterator[Held]:
    backend = Held()
    yield backend
    backend.released.set()


@pytest.fixture
def connection(held: Held) -> Iterator[ShardConnection]:
    """A connection to a server whose backend is `held`."""
    with closing(serve(held, host="127.0.0.1", port=0, token=TOKEN)) as server:
        connection = ShardConnection(f"127.0.0.1:{server.port}", TOKEN, CLUSTER_ID, 0)
        yield connection
        held.released.set()
        connection.close()


def test_closing_a_connection_beside_the_calls_of_other_threads_does_not_crash() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_BESIDE_CALLS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "closed beside calls"), done.stderr[-2000:]


class Watched:
    """A native client that shows whether it is closed."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        self.closed = True
        self._client.close()


def test_the_native_client_is_closed_after_the_last_call_has_its_answer(
    held: Held, connection: ShardConnection
) -> None:
    watched = connection._client = Watched(connection._client)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(connection.call, "describe")
        assert held.entered.wait(30)
        connection.close()
        assert not watched.closed
        held.released.set()
        assert answer.result(30)["shard"] == 0
    assert watched.closed


def test_a_closed_connection_refuses_calls_and_streams(connection: ShardConnection) -> None:
    connection.close()
    connection.close()
    with pytest.raises(Unavailable):
        connection.call("routes")
    with pytest.raises(Unavailable):
        connection.fetch_stream()


def test_a_stream_outlives_the_closing_of_its_connection(
    held: Held, connection: ShardConnection
) -> None:
    held.create("t", 1)
    stream = connection.fetch_stream()
    connection.close()
    found = stream.fetch(FetchRequest("t", {0: 0}, max_bytes=1024, max_records=1, wait_ms=0))
    stream.close()
    stream.close()
    assert found == []


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_of_the_environment_is_not_used(
    connection: ShardConnection, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    # It accepts no connection and answers nothing: a client that uses it gets no answer.
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        direct = ShardConnection(connection.endpoint, TOKEN, CLUSTER_ID, 0)
        assert direct.call("routes", timeout=30) == {}
        direct.close()
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()
