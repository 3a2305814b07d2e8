"""Bodies that a client of RocketMQ has compressed, as its program gave them.

A shard stores such a body as it was sent, with the bits of sysFlag that say how. Readers of RayMQ get it inflated, as
RocketMQ's do, and without these bits. A body that cannot be inflated stays as it is stored.
Source: MessageDecoder#decode, MessageSysFlag, CompressionType, ZlibCompressor, Lz4Compressor, ZstdCompressor.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from raymq.store.base.format import SYS_COMPRESSED, SYS_OF_SENDER
from raymq.store.records.binary_columns import binary_array

_zlib: Any
try:
    from isal import isal_zlib
except ImportError:  # no wheel for this platform
    _zlib = zlib
else:
    # twice as fast
    _zlib = isal_zlib

BodyCodec: TypeAlias = Literal["zlib", "lz4", "zstd"]

#: the three bits of the codec. Of their eight values four have a meaning
COMPRESSION_TYPES = 0x700
COMPRESSION_TYPE_SHIFT = 8
#: older clients name no codec: 0
_CODECS: dict[int, BodyCodec] = {0: "zlib", 1: "lz4", 2: "zstd", 3: "zlib"}
#: most bodies are read at once
_CHUNK_BYTES = 64 << 10
#: bytes of an inflated body, and of all in one read: some KB can stand for GB
BODY_BYTES_MAX, READ_BYTES_MAX = 16 << 20, 512 << 20


class CannotInflate(ValueError):
    """A body that is not what its flag says, or larger than a limit. The text says why."""


def codec(sys_flag: int) -> BodyCodec | None:
    """How a body is compressed; None: not at all. Raises: CannotInflate for one that RocketMQ does not have."""
    if not sys_flag & SYS_COMPRESSED:
        return None
    number = (sys_flag & COMPRESSION_TYPES) >> COMPRESSION_TYPE_SHIFT
    found = _CODECS.get(number)
    if found is None:
        raise CannotInflate(
            f"the codec of a compressed body is one of {sorted(_CODECS)}, not {number}"
        )
    return found


def inflate(body: bytes | memoryview, sys_flag: int, limit_bytes: int) -> bytes | memoryview:
    """The body as the sender's program has given it. One that is not compressed is returned as it is.

    Args: `limit_bytes`: of the result. Some KB can stand for GB, so no more than this is unpacked.
    Raises: CannotInflate for a result beyond the limit, and for damage.
    """
    found = codec(sys_flag)
    if found is None:
        return body
    # Of no bytes Arrow makes no bytes, but no sender compresses to that.
    if not body:
        raise CannotInflate(f"a body compressed by {found} has no bytes")
    if found == "zlib":
        return _inflate_zlib(body, limit_bytes)
    return _inflate_stream(body, found, limit_bytes)


def inflate_or_keep(body: bytes, sys_flag: int) -> tuple[bytes, int]:
    """A body as its sender's program has given it, and the sysFlag that it has then."""
    try:
        inflated = inflate(body, sys_flag, BODY_BYTES_MAX)
    except CannotInflate:
        return body, sys_flag
    return bytes(inflated), sys_flag & ~(SYS_COMPRESSED | COMPRESSION_TYPES)


def inflate_column(bodies: pa.Array, sys_flags: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Bodies of one read, and their sysFlag as readers see it. Both stay as they are if none is compressed.

    Args: `bodies`: a binary column without nulls. `sys_flags`: int32.
    """
    bits = np.asarray(sys_flags) & SYS_OF_SENDER
    rows = np.flatnonzero(bits & SYS_COMPRESSED)
    if not len(rows):
        return bodies, pa.array(bits, pa.int32())

    values, left = bodies.to_pylist(), READ_BYTES_MAX
    for row in rows.tolist():
        found, flag = inflate_or_keep(values[row], int(bits[row]))
        if len(found) > left:
            # The rest stays compressed, with its bits.
            break
        left -= len(found)
        values[row], bits[row] = found, flag
    return binary_array(values), pa.array(bits, pa.int32())


def _inflate_zlib(body: bytes | memoryview, limit_bytes: int) -> bytes:
    stream = _zlib.decompressobj()
    try:
        data: bytes = stream.decompress(body, limit_bytes + 1)
    except _zlib.error as error:
        raise CannotInflate(f"a body compressed by zlib is damaged: {error}") from None

    if len(data) > limit_bytes:
        raise _too_large("zlib", limit_bytes)
    if not stream.eof:
        raise CannotInflate("a body compressed by zlib ends early")
    return data


def _inflate_stream(body: bytes | memoryview, name: BodyCodec, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = limit_bytes + 1
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
            while left and (part := stream.read(min(left, _CHUNK_BYTES))):
                parts.append(part)
                left -= len(part)
    except OSError as error:
        raise CannotInflate(f"a body compressed by {name} is damaged: {error}") from None

    if not left:
        raise _too_large(name, limit_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(name: str, limit_bytes: int) -> CannotInflate:
    return CannotInflate(
        f"a body compressed by {name} has more than the limit of {limit_bytes} bytes"
    )
