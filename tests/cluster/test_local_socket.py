"""The short way to a queue's coordinator: a Unix socket in the place of actor calls. No Ray."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.queue.local_socket import LocalClient, LocalServer, NotLocal
from raymq.store.base.errors import Unavailable
from tests.support.waiting import until


class Coordinator:
    """Answers as the test says."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.asked = threading.Event()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def take(self, request: int, count: int, wait_s: float) -> Any:
        """Wait for the test, if the call may wait."""
        self.asked.set()
        return await self.answer if wait_s else (request, count)

    async def size(self) -> int:
        """Fails."""
        raise Unavailable("away", shard=3)

    async def forget(self, request: int) -> None:
        """Remembers the connections that closed."""
        self.forgotten.append(request)

    def methods(self) -> dict[str, Any]:
        """The calls that are allowed."""
        return {"take": self.take, "size": self.size, "forget": self.forget}


class House:
    """A coordinator and its client on an event loop of their own thread."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.run(self._open(path))

    async def _open(self, path: Path) -> None:
        self.coordinator = Coordinator()
        self.server = LocalServer(path, self.coordinator.methods())
        await self.server.open()

    def run(self, main: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(main, self.loop).result(10)

    async def _close(self) -> None:
        self.server.close()
        self.coordinator.answer.cancel()
        # The sockets are closed by calls of the loop's next turns.
        for _ in range(5):
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close the client and end the loop."""
        self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client") / "d"


@pytest.fixture
def client(path: Path) -> Iterator[LocalClient]:
    client = LocalClient(path)
    yield client
    client.close()


def test_calls_are_answered_and_errors_raised_on_one_connection(
    path: Path, client: LocalClient
) -> None:
    house = House(path)
    for number in range(3):
        assert client.call("take", number, 2, 0.0) == [number, 2]
        with pytest.raises(Unavailable, match="away") as caught:
            client.call("size")
        assert caught.value.fields == {"shard": 3}
    house.close()


def test_without_a_coordinator_the_call_fails_and_a_successor_is_found(
    path: Path, client: LocalClient
) -> None:
    with pytest.raises(NotLocal):
        client.call("size")
    first = House(path)
    assert client.call("take", 1, 1, 0.0) == [1, 1]
    first.close()
    assert not path.exists()
    second = House(path)
    with pytest.raises(NotLocal):
        client.call("take", 2, 1, 0.0)
    assert client.call("take", 2, 1, 0.0) == [2, 1]
    second.close()


def test_closing_does_not_remove_the_socket_of_a_successor(path: Path, client: LocalClient) -> None:
    first, second = House(path), House(path)
    first.close()
    assert client.call("take", 1, 1, 0.0) == [1, 1]
    second.close()


def test_a_caller_that_leaves_while_it_waits_is_forgotten(path: Path) -> None:
    house = House(path)
    client = LocalClient(path)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            client.call("take", 7, 1, 1.0)
        except BaseException as error:
            failed.append(error)

    connection = client._connection()
    client._free.append(connection)
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert house.coordinator.asked.wait(10)
    connection.shutdown(2)
    waiting.join(10)
    assert isinstance(failed[0], NotLocal)
    until(lambda: house.coordinator.forgotten == [7], lambda: house.run(asyncio.sleep(0)))
    house.close()


def test_a_call_and_an_answer_may_come_in_pieces(path: Path, client: LocalClient) -> None:
    house = House(path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        caller.sendall(b'["take", 5')
        until(
            lambda: any(connection._line for connection in house.server._connections),
            lambda: house.run(asyncio.sleep(0)),
        )

        caller.sendall(b", 2, 0.0]\n")
        assert caller.recv(100) == b"[[5, 2]]\n"
    house.close()

    ours, coordinator = socket.socketpair()
    client._free.append(ours)
    with coordinator, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.call, "size")
        assert coordinator.recv(100) == b'["size"]\n'
        coordinator.sendall(b"[1")
        coordinator.sendall(b"2]\n")
        assert asked.result(10) == 12


def test_half_an_answer_counts_as_no_answer(client: LocalClient) -> None:
    ours, coordinator = socket.socketpair()
    client._free.append(ours)
    with coordinator:
        coordinator.sendall(b"[1")
        coordinator.shutdown(socket.SHUT_WR)
        failed: list[BaseException] = []

        def call() -> None:
            try:
                client.call("size")
            except BaseException as error:
                failed.append(error)

        # A daemon: it must not keep the tests from ending should the call never return.
        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        calling.join(10)
        assert isinstance(failed[0], NotLocal)


def test_an_unknown_method_ends_the_connection(path: Path, client: LocalClient) -> None:
    house = House(path)
    with pytest.raises(NotLocal):
        client.call("close")
    house.close()
