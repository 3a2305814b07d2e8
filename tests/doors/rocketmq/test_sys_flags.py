"""Bodies that clients have compressed, and what a hostile one could do."""

from __future__ import annotations

import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.doors.rocketmq import sys_flags
from raymq.doors.rocketmq.malformed import Malformed
from raymq.doors.rocketmq.sys_flags import codec, inflate
from raymq.store.base import format as fmt

#: name -> (bits of sysFlag, compressor)
CODECS = {
    "old zlib": (0x001, zlib.compress),
    "zlib": (0x301, zlib.compress),
    "lz4": (0x101, lambda data: pa.Codec("lz4").compress(data, asbytes=True)),
    "zstd": (0x201, lambda data: pa.Codec("zstd").compress(data, asbytes=True)),
}
HELLO = b"hello hello hello"
every_codec = pytest.mark.parametrize("name", CODECS)


@every_codec
@given(data=st.binary(max_size=300), repeats=st.integers(1, 500))
def test_a_compressed_body_is_inflated(name, data, repeats):
    bits, compress = CODECS[name]
    body = data * repeats
    packed = compress(body)
    assert inflate(packed, bits, len(body)) == body
    assert inflate(memoryview(packed), bits | 0x32, len(body) + 1) == body


@every_codec
def test_a_body_beyond_the_limit_is_malformed(name):
    bits, compress = CODECS[name]
    with pytest.raises(Malformed, match="limit of 999 bytes"):
        inflate(compress(bytes(1000)), bits, 999)
    assert inflate(compress(bytes(1000)), bits, 1000) == bytes(1000)
    with pytest.raises(Malformed, match="limit of 0 bytes"):
        inflate(compress(b"x"), bits, 0)


@every_codec
def test_a_bomb_is_not_unpacked(name):
    bits, compress = CODECS[name]
    bomb = compress(bytes(16 << 20))
    before = pa.total_allocated_bytes()
    with pytest.raises(Malformed, match="limit of 4096 bytes"):
        inflate(bomb, bits, 4096)
    assert pa.total_allocated_bytes() - before < 1 << 20


@every_codec
def test_a_cut_body_is_malformed(name):
    bits, compress = CODECS[name]
    packed = compress(HELLO)
    for length in range(len(packed)):
        with pytest.raises(Malformed):
            inflate(packed[:length], bits, 100)


@every_codec
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_body_or_malformed(name, data):
    try:
        inflate(data, CODECS[name][0], 1000)
    except Malformed:
        pass


@every_codec
@given(at=st.integers(0, 200), flip=st.integers(1, 255))
def test_a_flipped_byte_raises_no_other_error(name, at, flip):
    bits, compress = CODECS[name]
    packed = bytearray(compress(HELLO * 3))
    packed[at % len(packed)] ^= flip
    try:
        inflate(packed, bits, 1000)
    except Malformed:
        pass


def test_without_isal_the_standard_library_inflates(monkeypatch):
    monkeypatch.setattr(sys_flags, "_zlib", zlib)
    packed = zlib.compress(HELLO)
    assert inflate(packed, 1, 17) == HELLO
    for damaged, limit in ((packed, 16), (packed[:-1], 17), (b"xx", 17)):
        with pytest.raises(Malformed):
            inflate(damaged, 1, limit)


def test_a_body_that_is_not_compressed_stays_as_it_is():
    body = b"plain"
    assert inflate(body, 0x300, 0) is body


@pytest.mark.parametrize("number", range(4, 8))
def test_a_codec_that_rocketmq_does_not_have_is_malformed(number):
    with pytest.raises(Malformed, match=f"not {number}"):
        codec(1 | number << 8)
    assert codec(number << 8) is None


def test_the_bits_are_those_of_records():
    assert fmt.SYS_COMPRESSION_TYPES == 3 << sys_flags.COMPRESSION_TYPE_SHIFT
    assert sys_flags.COMPRESSION_TYPES & fmt.SYS_COMPRESSION_TYPES == fmt.SYS_COMPRESSION_TYPES
    used = (
        *(sys_flags.COMPRESSED, sys_flags.MULTI_TAGS, sys_flags.TRANSACTION_MASK),
        *(sys_flags.BORN_HOST_V6, sys_flags.STORE_HOST_V6),
        *(sys_flags.NEED_UNWRAP, sys_flags.INNER_BATCH, sys_flags.COMPRESSION_TYPES),
    )
    assert sum(used) == 0x7FF
