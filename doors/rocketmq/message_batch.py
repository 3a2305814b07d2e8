"""The body of SEND_BATCH_MESSAGE: messages of one topic and queue, one after the other.

A message is its size, magic, CRC and flag, the length of the body (4 bytes each) and the body, the length of the
properties (2 bytes) and the properties. Clients leave magic and CRC 0, and no broker reads them.

Source: MessageDecoder#encodeMessage, #decodeMessage.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from .malformed import Malformed

#: one frame of 16 MiB could hold 700,000 empty messages
MESSAGES_MAX = 65_536

#: size, magic, CRC, flag, length of the body
_HEAD = struct.Struct(">iiiii")
#: length of the properties
_SHORT = struct.Struct(">h")
_FIXED_BYTES = _HEAD.size + _SHORT.size
_PROPERTIES_MAX = (1 << 15) - 1


class MessageColumns(NamedTuple):
    """The messages of a batch, by column."""

    flags: list[int]
    bodies: list[bytes]
    #: properties strings, as `property_text.split` reads them
    properties: list[bytes]


def decode_batch(body: bytes | memoryview, *, max_messages: int = MESSAGES_MAX) -> MessageColumns:
    """The messages of a batch.

    Raises: Malformed for an empty batch, more than `max_messages`, and lengths that contradict each other.
    """
    data = bytes(body)
    flags: list[int] = []
    bodies: list[bytes] = []
    properties: list[bytes] = []

    at, end = 0, len(data)
    while at < end:
        if len(flags) == max_messages:
            raise Malformed(f"a batch has up to {max_messages} messages")
        if end - at < _FIXED_BYTES:
            raise Malformed(f"{end - at} bytes after message {len(flags)} of a batch")
        size, _, _, flag, body_bytes = _HEAD.unpack_from(data, at)
        body_at = at + _HEAD.size
        short_at = body_at + body_bytes
        if not 0 <= body_bytes <= end - body_at - _SHORT.size:
            raise Malformed(f"message {len(flags)} of a batch has a body of {body_bytes} bytes")

        (property_bytes,) = _SHORT.unpack_from(data, short_at)
        next_at = short_at + _SHORT.size + property_bytes
        if property_bytes < 0 or next_at > end:
            raise Malformed(f"message {len(flags)} of a batch has {property_bytes} property bytes")
        if size != next_at - at:
            raise Malformed(
                f"message {len(flags)} of a batch has {next_at - at} bytes and says {size}"
            )

        flags.append(flag)
        bodies.append(data[body_at:short_at])
        properties.append(data[next_at - property_bytes : next_at])
        at = next_at

    if not flags:
        raise Malformed("a batch has a message")
    return MessageColumns(flags, bodies, properties)


def encode_batch(
    flags: Sequence[int], bodies: Sequence[bytes], properties: Sequence[bytes]
) -> bytes:
    """The body of these messages. Raises: ValueError for what a length cannot hold, and columns of several lengths."""
    parts: list[bytes] = []
    for flag, body, text in zip(flags, bodies, properties, strict=True):
        if len(text) > _PROPERTIES_MAX:
            raise ValueError(f"properties have up to {_PROPERTIES_MAX} bytes, not {len(text)}")
        size = _FIXED_BYTES + len(body) + len(text)
        parts += (_HEAD.pack(size, 0, 0, flag, len(body)), body, _SHORT.pack(len(text)), text)
    return b"".join(parts)
