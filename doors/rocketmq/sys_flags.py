"""The bits of a message's sysFlag, and its body as it was before the sender compressed it.

Source: MessageSysFlag, CompressionType, ZlibCompressor, Lz4Compressor, ZstdCompressor.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from raymq.store.base import format as fmt

from .malformed import Malformed

_zlib: Any
try:
    from isal import isal_zlib
except ImportError:  # no wheel for this platform
    _zlib = zlib
else:
    # twice as fast
    _zlib = isal_zlib

BodyCodec: TypeAlias = Literal["zlib", "lz4", "zstd"]

COMPRESSED = fmt.SYS_COMPRESSED
MULTI_TAGS = fmt.SYS_MULTI_TAGS
#: the three bits of the codec. Of their eight values four have a meaning
COMPRESSION_TYPES = 0x700
COMPRESSION_TYPE_SHIFT = 8
#: the value of these bits is one of no transaction, PREPARED, COMMITTED and ROLLBACK
TRANSACTION_MASK = fmt.SYS_TRANSACTION_MASK
PREPARED, COMMITTED, ROLLBACK = fmt.SYS_PREPARED, fmt.SYS_COMMITTED, fmt.SYS_ROLLBACK
BORN_HOST_V6, STORE_HOST_V6 = fmt.SYS_BORN_HOST_V6, fmt.SYS_STORE_HOST_V6
#: readers unpack the body into messages; the broker stores it as one record
NEED_UNWRAP, INNER_BATCH = 0x40, 0x80

#: older clients name no codec: 0
_CODECS: dict[int, BodyCodec] = {0: "zlib", 1: "lz4", 2: "zstd", 3: "zlib"}
#: most bodies are read at once
_CHUNK_BYTES = 64 << 10


def codec(sys_flag: int) -> BodyCodec | None:
    """How a body is compressed; None: not at all. Raises: Malformed for a codec that RocketMQ does not have."""
    if not sys_flag & COMPRESSED:
        return None
    number = (sys_flag & COMPRESSION_TYPES) >> COMPRESSION_TYPE_SHIFT
    found = _CODECS.get(number)
    if found is None:
        raise Malformed(f"the codec of a compressed body is one of {sorted(_CODECS)}, not {number}")
    return found


def inflate(body: bytes | memoryview, sys_flag: int, limit_bytes: int) -> bytes | memoryview:
    """The body as the sender's program has given it. One that is not compressed is returned as it is.

    Args: `limit_bytes`: of the result. Some KB can stand for GB, so no more than this is unpacked.
    Raises: Malformed for a result beyond the limit, and for damage.
    """
    found = codec(sys_flag)
    if found is None:
        return body
    # Of no bytes Arrow makes no bytes, but no sender compresses to that.
    if not body:
        raise Malformed(f"a body compressed by {found} has no bytes")
    if found == "zlib":
        return _inflate_zlib(body, limit_bytes)
    return _inflate_stream(body, found, limit_bytes)


def _inflate_zlib(body: bytes | memoryview, limit_bytes: int) -> bytes:
    stream = _zlib.decompressobj()
    try:
        data: bytes = stream.decompress(body, limit_bytes + 1)
    except _zlib.error as error:
        raise Malformed(f"a body compressed by zlib is damaged: {error}") from None

    if len(data) > limit_bytes:
        raise _too_large("zlib", limit_bytes)
    if not stream.eof:
        raise Malformed("a body compressed by zlib ends early")
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
        raise Malformed(f"a body compressed by {name} is damaged: {error}") from None

    if not left:
        raise _too_large(name, limit_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(name: str, limit_bytes: int) -> Malformed:
    return Malformed(f"a body compressed by {name} has more than the limit of {limit_bytes} bytes")
