"""Bytes that clients of RocketMQ's remoting protocol must not send, and what a server pays for them."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from raymq.doors.rocketmq.command import HEADER_BYTES_MAX, RemotingCommand, encode

KIB = 1024
#: a length and a word with the type and the length of the header
_HEAD = struct.Struct(">iI")


def resident_bytes() -> int:
    """The memory of this process, in which the server runs."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    raise LookupError("no VmRSS in /proc/self/status")


def lying_frames() -> dict[str, bytes]:
    """By name: frames whose lengths, types or headers are wrong."""
    binary = encode(RemotingCommand(105, 1, fields={"topic": "t"}, header_type="binary"))
    header = binary[_HEAD.size :]
    return {
        "2 GiB": _HEAD.pack(0x7FFFFFFF, 10),
        "the least number": _HEAD.pack(-(1 << 31), 10),
        "minus one": _HEAD.pack(-1, 10),
        "nothing": _HEAD.pack(0, 0),
        "a header as long as can be said": _HEAD.pack(100, 0xFFFFFF),
        "a long header": _HEAD.pack(4 + HEADER_BYTES_MAX + 1, HEADER_BYTES_MAX + 1),
        "a header longer than its frame": _HEAD.pack(8, 5) + b"{}{}{",
        "an unknown type": _HEAD.pack(8, 7 << 24 | 4) + b"{}{}",
        "JSON that ends early": _HEAD.pack(12, 8) + b'{"code":',
        "deep JSON": _frame(b"[" * 50_000),
        "a code of 33 bits": _frame(b'{"code":4294967296,"opaque":1}'),
        "fields that are a list": _frame(b'{"code":1,"opaque":1,"extFields":[1]}'),
        "a field that is an object": _frame(b'{"code":1,"opaque":1,"extFields":{"a":{}}}'),
        "text that is not UTF-8": _frame(b'{"code":1,"opaque":1,"remark":"\xff\xfe"}'),
        "an empty binary header": _frame(b"", 1),
        "a binary header that ends early": _frame(header[:-3], 1),
        "binary fields of 2 GiB": _frame(header[:17] + b"\x7f\xff\xff\xff" + header[21:], 1),
        "a binary remark of minus one": _frame(header[:13] + b"\xff" * 4 + header[17:], 1),
    }


def _frame(header: bytes, kind: int = 0) -> bytes:
    return _HEAD.pack(4 + len(header), kind << 24 | len(header)) + header


def garbage(chance: random.Random) -> bytes:
    """Bytes at random, a real frame with some bytes changed, or a head that lies before random bytes."""
    kind = chance.randrange(3)
    if kind == 0:
        return chance.randbytes(chance.randint(8, 400))
    if kind == 1:
        code = chance.choice(
            (10, 11, 14, 15, 34, 36, 105, 310, 320, chance.randint(-(2**15), 2**15 - 1))
        )
        header_type = chance.choice(("json", "binary"))
        fields = {chance.choice("abcdefghij"): chance.randbytes(6).hex() for _ in range(4)}
        made = RemotingCommand(code, 1, 0, fields, chance.randbytes(50), header_type=header_type)
        data = bytearray(encode(made))
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(4, len(data))] = chance.randrange(256)
        return bytes(data)
    size = chance.randint(8, 400)
    word = chance.choice((0, 1)) << 24 | chance.randint(0, size)
    return _HEAD.pack(size, word) + chance.randbytes(size - 4)
