"""Takes connections and their frames, and lets the processors answer them.

Source: NettyRemotingServer, NettyRemotingAbstract.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from .answers import Refused, remark_of, response_code
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection, FrameMemory
from .limited_warnings import LimitedWarnings
from .malformed import Malformed
from .processors import ProcessorEntry, ProcessorTable

logger = logging.getLogger("raymq.rocketmq")

#: bytes of large frames that are being received
RECEIVE_MEMORY_BYTES = 64 << 20
#: bytes of answers that clients have not taken, of all connections together
ANSWER_MEMORY_BYTES = 512 << 20
#: while there may be more of them, they are counted this often
COUNT_S = 0.05
#: a connection without traffic for so long is closed. Source: NettyServerConfig, 120 s
IDLE_S = 120.0
#: how often connections are looked at
SWEEP_S = 5.0
#: a client that says nothing after it has connected
FIRST_BYTE_S = 10.0
#: the first byte of a TLS connection. That of a frame is 0: frames have 24 bits of length
TLS_FIRST_BYTE = 0x16
#: in the counts: any request code that is not supported
UNKNOWN_CODE = -1
#: where users read what is not supported
PAGE = "docs/guides/from-rocketmq.md"


class ServerCounts(NamedTuple):
    """What happened since the beginning."""

    #: by request code
    requests: Counter[int]
    #: requests that were not answered with SUCCESS, by response code
    refusals: Counter[int]


class RemotingServer:
    """The connections of all clients. Callers: one event loop."""

    def __init__(
        self,
        processors: ProcessorTable,
        *,
        check: Callable[[RemotingCommand], None],
        on_closed: Callable[[ClientConnection], None],
        tls: ssl.SSLContext | None = None,
        takes_plain: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: `check`: raises Refused for a request that is not signed as it must be. `on_closed`: a client has gone.

        `tls`: of connections that begin with TLS. `takes_plain`: the others are served, too.
        """
        self._processors = processors
        self._check = check
        self._on_closed = on_closed
        self._tls = tls
        self._takes_plain = takes_plain

        self.counts = ServerCounts(Counter(), Counter())
        self._clock = clock
        self._malformed = LimitedWarnings(clock)
        self._full = LimitedWarnings(clock)
        self._untaken = LimitedWarnings(clock)
        self.memory = FrameMemory(RECEIVE_MEMORY_BYTES)
        self.connections: set[ClientConnection] = set()
        #: bytes of answers that all connections hold, or held when they were looked at
        self._held_bytes = 0
        self._next_count_s = 0.0
        #: by the name of an executor
        self._under_way: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self._goes_away = False

    # --- life -------------------------------------------------------------------------------------

    def listen(self, host: str, port: int, shard: int | None) -> int:
        """Take connections to an address. Returns: its port. Raises: OSError when it is taken.

        Args: `shard`: the one that a client of this port means; None: any, as a request says.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
        listener.setblocking(False)
        self._sockets.append(listener)
        self._start(self._accept(listener, shard))
        if len(self._sockets) == 1:
            self._start(self._sweep())
        return int(listener.getsockname()[1])

    async def close(self, grace_s: float = 0.0) -> None:
        """Answer new requests with GO_AWAY for a while, then end all connections."""
        self._goes_away = True
        if grace_s and self.connections:
            await asyncio.sleep(grace_s)
        for listener in self._sockets:
            listener.close()
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- connections ------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket, shard: int | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Too many open files, for example: the next one may be taken.
                self._untaken.note(f"a connection could not be taken: {error}")
                await asyncio.sleep(0.1)
                continue
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._begin(accepted, shard))

    async def _begin(self, accepted: socket.socket, shard: int | None) -> None:
        """Look at the first byte of a connection, and serve it."""
        loop = asyncio.get_running_loop()
        try:
            first = await _first_byte(accepted)
            tls = self._tls if first == TLS_FIRST_BYTE else None
            is_taken = self._takes_plain if first != TLS_FIRST_BYTE else tls is not None
            if first is None or not is_taken:
                accepted.close()
                return
            await loop.connect_accepted_socket(
                lambda: ClientConnection(self, shard, self._clock), accepted, ssl=tls
            )
        except (OSError, ssl.SSLError) as error:
            logger.info("a connection failed at its beginning: %s", error)
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise

    async def _sweep(self) -> None:
        """End connections that are idle, take nothing, or let others wait for the end of a frame."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock()
            for warnings in (self._malformed, self._full, self._untaken):
                warnings.log_pending()
            for connection in list(self.connections):
                is_idle = now_s - connection.heard_s > IDLE_S
                if is_idle or connection.is_stuck(now_s) or connection.holds_up(now_s):
                    logger.info(
                        "the connection from %r is closed: it is idle, or holds up others",
                        connection,
                    )
                    connection.abort()

    def opened(self, connection: ClientConnection) -> None:
        """See `FrameReceiver`."""
        self.connections.add(connection)

    def held_more(self, size: int) -> None:
        """See `FrameReceiver`. Beyond the limit, the connections end that hold most: their clients ask again."""
        self._held_bytes += size
        now_s = self._clock()
        if self._held_bytes <= ANSWER_MEMORY_BYTES or now_s < self._next_count_s:
            return
        self._next_count_s = now_s + COUNT_S
        held = {each: each.unsent_bytes for each in self.connections}
        total = sum(held.values())
        for connection in sorted(held, key=lambda each: -held[each]):
            if total <= ANSWER_MEMORY_BYTES:
                break
            self._full.note(f"the connection from {connection!r} is closed: it takes no answers")
            connection.abort()
            total -= held[connection]

    def misbehaved(self, connection: ClientConnection, error: Malformed) -> None:
        """See `FrameReceiver`."""
        self._malformed.note(f"the connection from {connection!r} is closed: {error}")

    def closed(self, connection: ClientConnection) -> None:
        """See `FrameReceiver`."""
        self.connections.discard(connection)
        self._on_closed(connection)

    # --- requests ---------------------------------------------------------------------------------

    def received(self, connection: ClientConnection, command: RemotingCommand) -> None:
        """See `FrameReceiver`."""
        known = self._processors.find(command.code) is not None
        self.counts.requests[command.code if known else UNKNOWN_CODE] += 1
        try:
            self._check(command)
        except Refused as refused:
            self._refuse(connection, command, refused.code, refused.remark)
            connection.close()
            return
        if self._goes_away:
            self._refuse(connection, command, ResponseCode.GO_AWAY, "the server stops")
            return

        entry = self._processors.find(command.code)
        if entry is None:
            remark = f"request code {_name(command.code)} is not supported, see {PAGE}"
            self._refuse(connection, command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
            return
        name, limit = entry.executor
        if self._under_way[name] >= limit:
            remark = f"{limit} requests of this kind are under way already"
            self._refuse(connection, command, ResponseCode.SYSTEM_BUSY, remark)
            return
        self._under_way[name] += 1
        self._start(self._process(entry, connection, command))

    async def _process(
        self, entry: ProcessorEntry, connection: ClientConnection, command: RemotingCommand
    ) -> None:
        try:
            found = await entry.processor(connection, command)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            code = response_code(error)
            if code == ResponseCode.SYSTEM_ERROR and not isinstance(error, Refused):
                logger.warning(
                    "request %s from %r", _name(command.code), connection, exc_info=error
                )
            self._refuse(connection, command, code, remark_of(error))
        else:
            if not command.is_one_way:
                connection.send(found)
        finally:
            self._under_way[entry.executor.name] -= 1

    def _refuse(
        self,
        connection: ClientConnection,
        command: RemotingCommand,
        code: ResponseCode,
        remark: str,
    ) -> None:
        self.counts.refusals[code] += 1
        if not command.is_one_way:
            connection.send(answer(command, code, remark=remark))


async def _first_byte(accepted: socket.socket) -> int | None:
    """The first byte of a connection, which stays unread; None: it ended, or says nothing."""
    loop = asyncio.get_running_loop()
    accepted.setblocking(False)
    readable = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(accepted.fileno(), wake)
    timer = loop.call_later(FIRST_BYTE_S, wake)
    try:
        await readable
    finally:
        timer.cancel()
        loop.remove_reader(accepted.fileno())
    with contextlib.suppress(BlockingIOError):
        found = accepted.recv(1, socket.MSG_PEEK)
        return found[0] if found else None
    return None


def _name(code: int) -> str:
    try:
        return f"{code} ({RequestCode(code).name})"
    except ValueError:
        return str(code)
