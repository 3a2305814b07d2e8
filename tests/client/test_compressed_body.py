"""Bodies that clients have compressed, and what a hostile one could do."""

from __future__ import annotations

import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.client.messages import compressed_body
from raymq.client.messages.compressed_body import (
    CannotInflate,
    codec,
    inflate,
    inflate_column,
    inflate_or_keep,
)
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
    with pytest.raises(CannotInflate, match="limit of 999 bytes"):
        inflate(compress(bytes(1000)), bits, 999)
    assert inflate(compress(bytes(1000)), bits, 1000) == bytes(1000)
    with pytest.raises(CannotInflate, match="limit of 0 bytes"):
        inflate(compress(b"x"), bits, 0)


@every_codec
def test_a_bomb_is_not_unpacked(name):
    bits, compress = CODECS[name]
    bomb = compress(bytes(16 << 20))
    before = pa.total_allocated_bytes()
    with pytest.raises(CannotInflate, match="limit of 4096 bytes"):
        inflate(bomb, bits, 4096)
    assert pa.total_allocated_bytes() - before < 1 << 20


@every_codec
def test_a_cut_body_is_malformed(name):
    bits, compress = CODECS[name]
    packed = compress(HELLO)
    for length in range(len(packed)):
        with pytest.raises(CannotInflate):
            inflate(packed[:length], bits, 100)


@every_codec
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_body_or_malformed(name, data):
    try:
        inflate(data, CODECS[name][0], 1000)
    except CannotInflate:
        pass


@every_codec
@given(at=st.integers(0, 200), flip=st.integers(1, 255))
def test_a_flipped_byte_raises_no_other_error(name, at, flip):
    bits, compress = CODECS[name]
    packed = bytearray(compress(HELLO * 3))
    packed[at % len(packed)] ^= flip
    try:
        inflate(packed, bits, 1000)
    except CannotInflate:
        pass


def test_without_isal_the_standard_library_inflates(monkeypatch):
    monkeypatch.setattr(compressed_body, "_zlib", zlib)
    packed = zlib.compress(HELLO)
    assert inflate(packed, 1, 17) == HELLO
    for damaged, limit in ((packed, 16), (packed[:-1], 17), (b"xx", 17)):
        with pytest.raises(CannotInflate):
            inflate(damaged, 1, limit)


def test_a_body_that_is_not_compressed_stays_as_it_is():
    body = b"plain"
    assert inflate(body, 0x300, 0) is body


@pytest.mark.parametrize("number", range(4, 8))
def test_a_codec_that_rocketmq_does_not_have_is_malformed(number):
    with pytest.raises(CannotInflate, match=f"not {number}"):
        codec(1 | number << 8)
    assert codec(number << 8) is None


def test_the_bits_of_the_codec_are_those_of_records():
    shift = compressed_body.COMPRESSION_TYPE_SHIFT
    assert 3 << shift == fmt.SYS_COMPRESSION_TYPES
    types = compressed_body.COMPRESSION_TYPES
    assert types & fmt.SYS_COMPRESSION_TYPES == fmt.SYS_COMPRESSION_TYPES


def test_a_column_is_inflated_and_its_bits_say_so():
    bodies = [HELLO, *(compress(HELLO) for _, compress in CODECS.values()), b"damaged"]
    bits = [0x32, *(bits | 0x2 for bits, _ in CODECS.values()), 0x1]
    found, flags = inflate_column(pa.array(bodies, pa.binary()), pa.array(bits, pa.int32()))
    assert found.to_pylist() == [HELLO] * 5 + [b"damaged"]
    # Those of hosts are not the sender's. A body that cannot be inflated keeps its flag.
    assert flags.to_pylist() == [0x2] * 5 + [0x1]


def test_a_column_without_compressed_bodies_is_not_copied():
    bodies = pa.array([b"a", b"b"], pa.binary())
    found, flags = inflate_column(bodies, pa.array([0x2, 0x30], pa.int32()))
    assert found is bodies
    assert flags.to_pylist() == [0x2, 0]


def test_the_bodies_of_one_read_have_a_limit_together(monkeypatch):
    monkeypatch.setattr(compressed_body, "READ_BYTES_MAX", 2 * len(HELLO))
    packed = zlib.compress(HELLO)
    found, flags = inflate_column(
        pa.array([packed] * 3, pa.binary()), pa.array([1] * 3, pa.int32())
    )
    assert found.to_pylist() == [HELLO, HELLO, packed]
    assert flags.to_pylist() == [0, 0, 1]


@every_codec
def test_one_message_is_inflated_or_kept(name):
    bits, compress = CODECS[name]
    assert inflate_or_keep(compress(HELLO), bits | 0x2) == (HELLO, 0x2)
    assert inflate_or_keep(b"", bits) == (b"", bits)
