"""The body of a batch: golden bytes, round trips, damage."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.doors.rocketmq.malformed import Malformed
from raymq.doors.rocketmq.message_batch import MessageColumns, decode_batch, encode_batch

#: two messages: flag 5, body "ab", properties KEYS=k; flag 0, body "c", no properties
GOLDEN = bytes.fromhex(
    "0000001f 00000000 00000000 00000005 00000002 6162 0007 4b455953 01 6b 02"
    "00000017 00000000 00000000 00000000 00000001 63 0000"
)
COLUMNS = MessageColumns([5, 0], [b"ab", b"c"], [b"KEYS\1k\2", b""])

rows = st.lists(
    st.tuples(st.integers(-(1 << 31), (1 << 31) - 1), st.binary(max_size=9), st.binary(max_size=9)),
    min_size=1,
    max_size=5,
)


def test_a_batch_has_the_bytes_that_java_writes():
    assert encode_batch(*COLUMNS) == GOLDEN
    assert decode_batch(GOLDEN) == COLUMNS


def test_magic_and_crc_are_not_read():
    data = bytearray(GOLDEN)
    data[4:12] = b"\xff" * 8
    assert decode_batch(memoryview(data)) == COLUMNS


@given(rows)
def test_a_batch_read_back_is_its_columns(rows):
    columns = tuple(map(list, zip(*rows, strict=True)))
    assert decode_batch(encode_batch(*columns)) == columns


@pytest.mark.parametrize("length", [*range(31), *range(32, len(GOLDEN))])
def test_a_cut_batch_is_malformed(length):
    with pytest.raises(Malformed):
        decode_batch(GOLDEN[:length])


@pytest.mark.parametrize(
    ("at", "value"), [(0, 30), (0, 32), (0, -1), (16, -1), (16, 3), (16, 1 << 30)]
)
def test_lengths_that_contradict_each_other_are_malformed(at, value):
    with pytest.raises(Malformed, match="message 0"):
        decode_batch(GOLDEN[:at] + struct.pack(">i", value) + GOLDEN[at + 4 :])


def test_a_negative_length_of_properties_is_malformed():
    with pytest.raises(Malformed, match="-1 property bytes"):
        decode_batch(GOLDEN[:22] + b"\xff\xff" + GOLDEN[24:])


def test_the_number_of_messages_is_bounded():
    assert decode_batch(GOLDEN, max_messages=2) == COLUMNS
    with pytest.raises(Malformed, match="up to 1 messages"):
        decode_batch(GOLDEN, max_messages=1)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_batch_or_malformed(data):
    try:
        decode_batch(data)
    except Malformed:
        pass


@given(st.integers(0, len(GOLDEN) - 1), st.integers(1, 255))
def test_a_flipped_byte_raises_no_other_error(at, flip):
    data = bytearray(GOLDEN)
    data[at] ^= flip
    try:
        decode_batch(data)
    except Malformed:
        pass


@pytest.mark.parametrize(
    "columns", [([0], [b""], [b"x" * 32768]), ([0, 1], [b""], [b""]), ([], [b""], [b""])]
)
def test_what_a_batch_cannot_hold_is_refused(columns):
    with pytest.raises(ValueError, match="32767|argument"):
        encode_batch(*columns)
