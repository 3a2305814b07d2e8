"""A bare client of RocketMQ's remoting protocol: commands over a socket, without retries."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from types import TracebackType

from raymq.doors.rocketmq.command import (
    FLAG_ONE_WAY,
    HEAD_BYTES,
    FrameHead,
    HeaderType,
    RemotingCommand,
    answer,
    decode_header,
    encode,
)

#: a client of RocketMQ 4.9.3, which does not take a queue id from its pull
VERSION_4_9_3 = 399


class RemotingClient:
    """One connection. Not thread-safe."""

    def __init__(self, address: object, *, header_type: HeaderType = "json", version: int = 479):
        """Args: `address`: host:port, as text or something that is shown so."""
        host, _, port = str(address).rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self._header_type: HeaderType = header_type
        self._version = version
        self._opaque = 0
        self._received = b""
        #: opaque -> answers that no call has taken yet
        self._answers: dict[int, list[RemotingCommand]] = {}
        #: requests of the server
        self.pushed: list[RemotingCommand] = []

    def send(
        self, code: int, fields: Mapping[str, object], body: bytes = b"", *, one_way: bool = False
    ) -> int:
        """Send a request. Returns: its opaque."""
        self._opaque += 1
        texts = {name: str(value) for name, value in fields.items()}
        flag = FLAG_ONE_WAY if one_way else 0
        made = RemotingCommand(
            code,
            self._opaque,
            flag,
            texts,
            body,
            version=self._version,
            header_type=self._header_type,
        )
        self.socket.sendall(encode(made))
        return self._opaque

    def answer(self, opaque: int) -> RemotingCommand:
        """The answer to a request. What the server asks meanwhile goes to `pushed`. Raises: EOFError."""
        while not self._answers.get(opaque):
            found = self.next()
            if found.is_response:
                self._answers.setdefault(found.opaque, []).append(found)
            else:
                self.pushed.append(found)
        return self._answers[opaque].pop(0)

    def request(self, code: int) -> RemotingCommand:
        """The next request of the server with this code. The others go to `pushed`. Raises: EOFError."""
        while True:
            found = self.next()
            if found.is_response:
                self._answers.setdefault(found.opaque, []).append(found)
            elif found.code == code:
                return found
            else:
                self.pushed.append(found)

    def reply(
        self, request: RemotingCommand, code: int, body: bytes = b"", remark: str = ""
    ) -> None:
        """Answer a request of the server."""
        made = answer(request, code, {}, body, remark or None)
        self.socket.sendall(encode(made))

    def has_answer(self, opaque: int) -> bool:
        """Whether the answer to a request has come before that of a later one."""
        return bool(self._answers.get(opaque))

    def call(self, code: int, fields: Mapping[str, object], body: bytes = b"") -> RemotingCommand:
        """Send a request and wait for its answer. Raises: EOFError."""
        return self.answer(self.send(code, fields, body))

    def next(self) -> RemotingCommand:
        """The next frame. Raises: EOFError when the server has closed the connection."""
        head = FrameHead.parse(self._read(HEAD_BYTES))
        header = self._read(head.header_bytes)
        body = self._read(head.body_bytes)
        return decode_header(header, head.header_type)._replace(
            body=body, header_type=head.header_type
        )

    def _read(self, count: int) -> bytes:
        while len(self._received) < count:
            found = self.socket.recv(1 << 16)
            if not found:
                raise EOFError("the server has closed the connection")
            self._received += found
        data, self._received = self._received[:count], self._received[count:]
        return data

    def is_closed(self) -> bool:
        """Whether the server closes the connection, without any frame before."""
        try:
            self.next()
        except (EOFError, ConnectionError):
            return True
        return False

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def __enter__(self) -> RemotingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def records_of(body: bytes | memoryview) -> list[bytes]:
    """The records of the answer to a pull."""
    data, found = bytes(body), []
    while data:
        (size,) = struct.unpack_from(">i", data)
        found.append(data[:size])
        data = data[size:]
    return found
