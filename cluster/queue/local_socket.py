"""The short way to a queue's keeper: a Unix socket, for processes on its host. An actor call costs five times as much.

One JSON array a line: [method, argument...] to the keeper, [result] or [null, error] back, in turn. All that is
asked this way may be asked again by an actor call, with the same request number; so whatever is wrong with the socket,
the answer to it is to ask by actor call. No socket waits for long: Ray lends the CPUs of a task that waits for an actor
to others, perhaps to the one that puts the item, and of a task that waits for a socket it knows nothing.
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
from typing import TYPE_CHECKING, Any, cast

from raymq.cluster.paths import run_dir
from raymq.store.errors import RayMQError, from_wire, to_wire
from raymq.store.files import Files

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

log = logging.getLogger("raymq")

#: what may be asked
METHODS = ("take", "reserve", "release", "forget", "size")
#: a getter or putter waits here at most so long
WAIT_S = 0.02
_ANSWER_BYTES = 1 << 16

#: answers a call of one of METHODS
Handler = Callable[..., Awaitable[Any]]


class NotLocal(Exception):
    """No keeper answers on this host: use an actor call."""


def door_path(cluster: Cluster, name: str) -> Path:
    """Where the keeper of a queue listens; the same for a successor. Raises: Rejected for a directory of others."""
    digest = hashlib.sha256(f"{cluster.cluster_id}:{name}".encode()).hexdigest()
    return run_dir(Files()) / f"queue-{digest[:24]}"


def door_of(cluster: Cluster, name: str) -> LocalClient:
    """The way to the keeper of a queue, should it be on this host."""
    try:
        return LocalClient(door_path(cluster, name))
    except (OSError, RayMQError):
        # Without a directory for it there is none.
        return LocalClient(Path())


class LocalClient:
    """A process's connections to a keeper. Threads: any; also behind a fork."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._process = os.getpid()
        #: nobody waits for an answer of these
        self._free: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._free)

    def call(self, method: str, *arguments: Any) -> Any:
        """Ask the keeper. Raises: NotLocal; what the keeper raised."""
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
            # Ctrl-C: the answer would be taken for that of the next call.
            connection.close()
            raise
        self._free.append(connection)
        result, *wrong = json.loads(line)
        if wrong:
            raise from_wire(wrong[0])
        return result

    def _connection(self) -> socket.socket:
        if os.getpid() != self._process:
            # They are the parent's.
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
        """Close what nobody uses; the next call connects again."""
        _close_all(self._free)


def _close_all(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


class LocalServer:
    """Lets a keeper's callers in. One event loop."""

    def __init__(self, path: Path, handlers: dict[str, Handler]) -> None:
        self._path = path
        self._handlers = handlers
        self._server: asyncio.AbstractServer | None = None
        #: of the file while it is ours
        self._inode = 0
        self._visits: weakref.WeakSet[_Connection] = weakref.WeakSet()

    async def open(self) -> None:
        """Listen, in the place of whoever did. Raises: OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connect, str(self._path))
        self._inode = os.stat(self._path).st_ino

    def _connect(self) -> _Connection:
        visit = _Connection(self._handlers)
        self._visits.add(visit)
        return visit

    def close(self) -> None:
        """Stop listening and leave those who ask."""
        if self._server is not None:
            # It may be a successor's by now, or gone with the socket.
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            self._server.close()
        for visit in list(self._visits):
            visit.close()


class _Connection(asyncio.Protocol):
    """One connection: a call, its answer, the next call."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers
        self._line = b""
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None
        #: of a `take` that is under way
        self._request: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Source: asyncio."""
        # Not always an asyncio.Transport: Ray's loop is uvloop's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Source: asyncio."""
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
            # An actor call tells it better.
            log.warning("queue: %r", error)
            self.close()
            return
        self._request = None
        if self._transport is not None:
            self._transport.write(json.dumps(answer).encode() + b"\n")

    def connection_lost(self, error: Exception | None) -> None:
        """Source: asyncio. Whoever asked is gone, or asks by actor call: no item for nobody."""
        self._transport = None
        if self._request is not None:
            asyncio.ensure_future(self._handlers["forget"](self._request))

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()
