"""One connection of a client: its frames in, its answers out, within bounds."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from raymq.store.base.clock import Clock
from raymq.store.base.errors import require

from . import command as commands
from .codes import Language
from .command import HEAD_BYTES, FrameHead, Malformed, RemotingCommand

logger = logging.getLogger("raymq.rocketmq")

#: bytes of answers that one connection may hold before no further pull of it is answered
UNSENT_BYTES_MAX = 8 << 20
#: a connection that takes no byte of its answers for so long is closed
STUCK_S = 60.0
#: a large frame that is not whole after so long ends its connection, if others wait for the memory that it has
FRAME_S = 20.0
#: fetches of one connection that are under way at the same time. Each may bring as many bytes as an answer holds
FETCHES_MAX = 16
#: frames up to this size are received without asking for memory
SMALL_FRAME_BYTES = 64 << 10
#: frames above this size are written at once, and not copied once more
LARGE_FRAME_BYTES = 64 << 10


class FrameReceiver(Protocol):
    """What takes the frames of connections: `RemotingServer`."""

    memory: FrameMemory

    def opened(self, connection: ClientConnection) -> None:
        """A connection is open."""

    def received(self, connection: ClientConnection, command: RemotingCommand) -> None:
        """A whole frame has come. Must not raise."""

    def held_more(self, size: int) -> None:
        """The answers that a connection holds have become more, by so many bytes; or fewer."""

    def misbehaved(self, connection: ClientConnection, error: Malformed) -> None:
        """A connection is closed: it has sent what the protocol does not allow."""

    def closed(self, connection: ClientConnection) -> None:
        """A connection has ended."""


class FrameMemory:
    """The bytes of large frames that are being received, of all connections together. In turn, first come first served.

    Callers: the event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def take(self, size: int, on_granted: Callable[[], None]) -> bool:
        """Take bytes. Returns: whether they were free. Otherwise `on_granted` is called when they are."""
        if not self._waiting and self._fits(size):
            self._free_bytes -= size
            return True
        self._waiting.append((size, on_granted))
        return False

    def release(self, size: int) -> None:
        """Give bytes back."""
        self._free_bytes += size
        while self._waiting and self._fits(self._waiting[0][0]):
            wanted, on_granted = self._waiting.popleft()
            self._free_bytes -= wanted
            on_granted()

    @property
    def is_wanted(self) -> bool:
        """Whether a frame waits for memory."""
        return bool(self._waiting)

    def _fits(self, size: int) -> bool:
        return size <= self._free_bytes or self._free_bytes == self._limit_bytes


class ClientConnection(asyncio.Protocol):
    """One connection. Callers: the event loop."""

    def __init__(
        self, receiver: FrameReceiver, shard: int | None, clock: Callable[[], float]
    ) -> None:
        """Args: `shard`: the one whose port the client dialled; None: the port for all. `clock`: monotonic, seconds."""
        self._receiver = receiver
        self.shard = shard
        self._clock = clock

        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head: FrameHead | None = None
        #: bytes of `FrameMemory` that the frame being received has
        self._held_bytes = 0
        #: since when it has them
        self._held_since_s = 0.0
        self._is_waiting = False
        #: the client does not take its answers, so no request of it is read
        self._is_full = False
        #: one of them is for each fetch
        self.fetches = asyncio.Semaphore(FETCHES_MAX)

        #: address of the client
        self.peer: tuple[str, int] = ("0.0.0.0", 0)
        #: of the newest request
        self.version = 0
        self.language: str | int = Language.OTHER.name
        self.heard_s = clock()
        self._moved_s = self.heard_s
        self._unsent_bytes = 0
        #: frames of this turn of the loop
        self._outgoing: list[bytes] = []
        self._opaques = itertools.count(1)
        #: opaque -> the answer to a request of this server
        self._asked: dict[int, asyncio.Future[RemotingCommand]] = {}
        self.is_closed = False

    def __repr__(self) -> str:
        return f"{self.peer[0]}:{self.peer[1]}"

    @property
    def _open_transport(self) -> asyncio.Transport:
        require(self._transport is not None, "the connection is open")
        return cast(asyncio.Transport, self._transport)

    # --- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        peer = transport.get_extra_info("peername")
        if peer:
            self.peer = str(peer[0]), int(peer[1])
        self._receiver.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_closed = True
        self._release()
        self._note_held(0)
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(ConnectionError(f"the client {self!r} has gone"))
        self._receiver.closed(self)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: its answers have filled the buffer. No request is read until it has taken most."""
        self._is_full = True
        self._open_transport.pause_reading()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._is_full = False
        # Frames that were received already come first.
        asyncio.get_running_loop().call_soon(self._read_on)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.heard_s = self._clock()
        self._buffer += data
        self._read_on()

    def _read_on(self) -> None:
        """Take the frames that are whole, and receive more if none of them has to wait."""
        try:
            self._take_frames()
        except Malformed as error:
            self._receiver.misbehaved(self, error)
            self.close()
        if not self._is_waiting and not self._is_full and not self.is_closed:
            self._open_transport.resume_reading()

    def _take_frames(self) -> None:
        while not self._is_waiting and not self._is_full and not self.is_closed:
            if self._head is None:
                if len(self._buffer) < HEAD_BYTES:
                    return
                self._head = FrameHead.parse(self._buffer)
                if not self._has_room(self._head):
                    return
            head = self._head
            end = _frame_bytes(head)
            if len(self._buffer) < end:
                return
            frame = bytes(memoryview(self._buffer)[HEAD_BYTES:end])
            del self._buffer[:end]
            self._head = None
            self._release()
            self._take(head, memoryview(frame))

    def _has_room(self, head: FrameHead) -> bool:
        size = _frame_bytes(head)
        if size <= SMALL_FRAME_BYTES:
            return True
        if self._receiver.memory.take(size, self._go_on):
            self._hold(size)
            return True
        self._is_waiting = True
        self._open_transport.pause_reading()
        return False

    def _go_on(self) -> None:
        """There is room for the frame."""
        self._is_waiting = False
        if self._head is not None:
            self._hold(_frame_bytes(self._head))
        if self.is_closed:
            self._release()
            return
        self._read_on()

    def _hold(self, size: int) -> None:
        self._held_bytes, self._held_since_s = size, self._clock()

    def holds_up(self, now_s: float) -> bool:
        """Whether a large frame is late, and others wait for its memory."""
        is_late = self._held_bytes > 0 and now_s - self._held_since_s > FRAME_S
        return is_late and self._receiver.memory.is_wanted

    def _release(self) -> None:
        held, self._held_bytes = self._held_bytes, 0
        if held:
            self._receiver.memory.release(held)

    def _take(self, head: FrameHead, frame: memoryview) -> None:
        """Take a whole frame. Args: `frame`: header and body."""
        header, body = frame[: head.header_bytes], frame[head.header_bytes :]
        received = commands.decode_header(header, head.header_type)._replace(body=body)
        if received.is_response:
            answered = self._asked.get(received.opaque)
            # An answer that nothing waits for any more is dropped.
            if answered is not None and not answered.done():
                answered.set_result(received)
            return
        self.version = received.version or self.version
        self.language = received.language
        self._receiver.received(self, received)

    # --- answers ----------------------------------------------------------------------------------

    def send(self, sent: RemotingCommand) -> None:
        """Write a frame. After the end of the connection nothing happens."""
        if self.is_closed or self._transport is None:
            return
        frame = commands.encode(sent)
        if not self._outgoing:
            # Answers of one turn of the loop are one call of the system, which costs as much as the rest of a send.
            asyncio.get_running_loop().call_soon(self._write)
        self._outgoing.append(frame)
        if len(frame) > LARGE_FRAME_BYTES:
            self._write()

    def _write(self) -> None:
        """Write the frames that wait."""
        frames, self._outgoing = self._outgoing, []
        if self.is_closed or self._transport is None or not frames:
            return
        self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        self._note_unsent()

    def push(self, code: int, fields: dict[str, str], body: bytes = b"") -> None:
        """Send a request that the client does not answer."""
        self.send(
            RemotingCommand(
                code, next(self._opaques), flag=commands.FLAG_ONE_WAY, fields=fields, body=body
            )
        )

    async def ask(
        self, code: int, fields: dict[str, str], body: bytes = b"", *, timeout_s: float
    ) -> RemotingCommand:
        """Send a request, and wait for the client's answer.

        Raises: TimeoutError when none comes within `timeout_s`; ConnectionError when the client has gone.
        """
        if self.is_closed:
            raise ConnectionError(f"the client {self!r} has gone")
        opaque = next(self._opaques)
        answered = self._asked[opaque] = asyncio.get_running_loop().create_future()
        try:
            self.send(RemotingCommand(code, opaque, fields=fields, body=body))
            return await asyncio.wait_for(answered, timeout_s)
        finally:
            del self._asked[opaque]

    def _note_unsent(self) -> None:
        unsent = self.unsent_bytes
        if not unsent:
            self._moved_s = self._clock()
        self._note_held(unsent)

    def _note_held(self, unsent: int) -> None:
        """Say how many bytes of answers the client has not taken."""
        more, self._unsent_bytes = unsent - self._unsent_bytes, unsent
        if more:
            self._receiver.held_more(more)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def heard_ms(self) -> int:
        """When the client was heard last, in ms since 1970."""
        return Clock().now_ms() - int((self._clock() - self.heard_s) * 1000)

    @property
    def is_slow(self) -> bool:
        """Whether it holds so many answers that no more should be made for it."""
        if self._transport is None or self.is_closed:
            return False
        return self.unsent_bytes > UNSENT_BYTES_MAX

    def is_stuck(self, now_s: float) -> bool:
        """Whether the client has taken no byte of its answers for `STUCK_S`. Called regularly."""
        if self._transport is None or self.is_closed:
            return False
        unsent = self.unsent_bytes
        if unsent < self._unsent_bytes or not unsent:
            self._moved_s = now_s
        self._note_held(unsent)
        return now_s - self._moved_s > STUCK_S

    def close(self) -> None:
        """End the connection, after what was written."""
        self._write()
        if self._transport is not None:
            self._transport.close()
        self.is_closed = True

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        self.is_closed = True


def _frame_bytes(head: FrameHead) -> int:
    return HEAD_BYTES + head.header_bytes + head.body_bytes
