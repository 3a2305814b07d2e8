"""A Unix socket to a queue's coordinator, for processes on its host, because an actor call costs five times as much.

Each line is one JSON array: [method, argument...] to the coordinator, [result] or [null, error] back. A connection
carries one call at a time. After any fault of the socket the client uses an actor call, because every call may be
repeated with the same request number.

No call waits long for the socket, because Ray does not see such a wait. While a task waits for an actor, Ray lends the
CPUs of that task to other tasks, perhaps to the one that puts the item.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from raymq.cluster.cluster import Cluster
from raymq.cluster.record.paths import run_dir
from raymq.store.base.errors import RayMQError, from_wire, to_wire
from raymq.store.base.files import Files

logger = logging.getLogger("raymq")

#: methods that callers may use
METHODS = ("take", "reserve", "release", "forget", "size")
#: longest wait of a get or put through the socket, in seconds
WAIT_S = 0.02
_ANSWER_BYTES = 1 << 16

#: answers a call of one of METHODS
Handler = Callable[..., Awaitable[Any]]


class NotLocal(Exception):
    """No coordinator answers on this host, so that an actor call is needed."""


def socket_path(cluster: Cluster, name: str) -> Path:
    """The socket of a queue's coordinator and of its successors. Raises: Rejected for a foreign directory."""
    digest = hashlib.sha256(f"{cluster.cluster_id}:{name}".encode()).hexdigest()
    return run_dir(Files()) / f"queue-{digest[:24]}"


def local_client(cluster: Cluster, name: str) -> LocalClient:
    """A client of the coordinator of a queue, whether or not it runs on this host."""
    try:
        return LocalClient(socket_path(cluster, name))
    except (OSError, RayMQError):
        # No directory for sockets: every call raises NotLocal.
        return LocalClient(Path())


class LocalClient:
    """A process's connections to a coordinator. Threads: any; usable after a fork."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._process = os.getpid()
        #: open connections without a call
        self._free: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._free)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the coordinator. Raises: NotLocal; the coordinator's error."""
        connection = self._connection()

        try:
            connection.sendall(json.dumps([method, *arguments]).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                chunk = connection.recv(_ANSWER_BYTES)
                if not chunk:
                    raise EOFError
                line += chunk
        except (OSError, EOFError) as error:
            connection.close()
            raise NotLocal from error
        except BaseException:
            # After Ctrl-C the next call would take this call's answer for its own.
            connection.close()
            raise

        self._free.append(connection)
        result, *wrong = json.loads(line)
        if wrong:
            raise from_wire(wrong[0])
        return result

    def _connection(self) -> socket.socket:
        if os.getpid() != self._process:
            # After a fork the connections belong to the parent.
            self.close()
            self._process = os.getpid()

        try:
            return self._free.pop()
        except IndexError:
            pass

        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise NotLocal from error
        return connection

    def close(self) -> None:
        """Close unused connections. The next call connects again."""
        _close_all(self._free)


def _close_all(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


class LocalServer:
    """Accepts the calls of processes on the coordinator's host. One event loop."""

    def __init__(self, path: Path, handlers: dict[str, Handler]) -> None:
        self._path = path
        self._handlers = handlers
        self._server: asyncio.AbstractServer | None = None
        #: inode of the socket file while this server owns it
        self._inode = 0
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()

    async def open(self) -> None:
        """Listen, instead of an earlier server on this path. Raises: OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connect, str(self._path))
        self._inode = os.stat(self._path).st_ino

    def _connect(self) -> _Connection:
        connection = _Connection(self._handlers)
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            # The file may be deleted, or belong to a successor.
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            self._server.close()
        for connection in list(self._connections):
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection, which takes the next call after it has answered the one before."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers
        self._line = b""
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None
        #: request number of the `take` under way
        self._request: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. Source: asyncio.Protocol."""
        # Not always an asyncio.Transport: Ray uses uvloop.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer a call when its line is complete. Source: asyncio.Protocol."""
        self._line += data
        if self._line.endswith(b"\n"):
            line, self._line = self._line, b""
            self._answering = asyncio.ensure_future(self._answer(line))

    async def _answer(self, line: bytes) -> None:
        try:
            method, *arguments = json.loads(line)
            self._request = arguments[0] if method == "take" else None
            answer = [await self._handlers[method](*arguments)]
        except RayMQError as error:
            answer = [None, to_wire(error)]
        except Exception as error:
            # The caller repeats the call as an actor call, which reports any exception.
            logger.warning("queue: %r", error)
            self.close()
            return
        self._request = None
        if self._transport is not None:
            self._transport.write(json.dumps(answer).encode() + b"\n")

    def connection_lost(self, error: Exception | None) -> None:
        """Withdraw the request under way. Source: asyncio.Protocol.

        The caller has ended or uses an actor call, so that its request here must not take an item.
        """
        self._transport = None
        if self._request is not None:
            asyncio.ensure_future(self._handlers["forget"](self._request))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()
