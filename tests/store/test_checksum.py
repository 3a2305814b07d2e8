from __future__ import annotations

import importlib.util
import sys

import crcmod.predefined
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.base import checksum
from raymq.store.base.errors import Bug

CRC32C = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
CRC32 = crcmod.predefined.mkPredefinedCrcFun("crc-32")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc32c_is_crcmods_and_goes_on_from_a_value(head, tail):
    assert checksum.crc32c(head) == CRC32C(head)
    assert checksum.crc32c(tail, checksum.crc32c(head)) == CRC32C(head + tail)


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 5])
def test_every_kind_of_buffer_has_the_same_crc32c(data):
    array = np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, dtype=np.uint8)
    for kind in (bytearray(data), memoryview(data), pa.py_buffer(data), array, array.copy()):
        assert checksum.crc32c(kind) == CRC32C(data)


def test_the_published_check_values_hold():
    assert checksum.crc32c(b"123456789") == 0xE3069283
    assert checksum.body_crc(b"123456789") == 0x4BF43926
    assert checksum.body_crc(b"Hello RocketMQ") == 0x69C865ED
    assert checksum.body_crc(b"Hello RocketMQ2") == 0x4407E8AD
    assert checksum.body_crc(b"") == 0


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=20), st.integers(0, 5))
def test_body_crcs_are_crcmods_without_the_sign_bit_on_slices_too(bodies, skip):
    column = pa.array(bodies, pa.binary()).slice(skip)
    assert checksum.body_crcs(column).tolist() == [CRC32(b) & 0x7FFFFFFF for b in bodies[skip:]]


@pytest.mark.parametrize("size", [checksum.SLICED_BODY_BYTES - 1, checksum.SLICED_BODY_BYTES, 5000])
def test_large_bodies_have_the_same_crcs_as_small_ones(size):
    bodies = [bytes([n]) * (size + n % 2) for n in range(9)]
    column = pa.array(bodies, pa.binary()).slice(2, 6)
    assert checksum.body_crcs(column).tolist() == [CRC32(b) & 0x7FFFFFFF for b in bodies[2:8]]


@pytest.mark.parametrize("size", [1, 100, 2000])
def test_bodies_of_one_size_have_the_same_crcs_as_others(size):
    bodies = [bytes([n]) * size for n in range(9)]
    column = pa.array(bodies, pa.binary()).slice(2, 6)
    assert checksum.body_crcs(column).tolist() == [CRC32(b) & 0x7FFFFFFF for b in bodies[2:8]]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.integers(0, 3),
            st.integers(1, 3) | st.integers(0, 2).map(checksum.ROWS_MIN.__add__),
        ),
        max_size=6,
    )
)
def test_stretches_have_their_crcs_however_long_and_far_apart_they_are(runs):
    """A run: length and gap of so many stretches."""
    lengths = [length for length, _, count in runs for _ in range(count)]
    gaps = [gap for _, gap, count in runs for _ in range(count)]
    data = np.random.default_rng(1).bytes(sum(lengths) + sum(gaps))
    ends = np.cumsum(np.add(gaps, lengths), dtype=np.int64)
    starts = ends - np.array(lengths, dtype=np.int64)
    assert checksum.range_crcs(memoryview(data), starts, ends).tolist() == [
        CRC32(data[a:b]) & 0x7FFFFFFF for a, b in zip(starts, ends, strict=True)
    ]


def test_null_bodies_are_our_bug():
    with pytest.raises(Bug):
        checksum.body_crcs(pa.array([b"a", None], pa.binary()))


def test_without_google_crc32c_crcmod_takes_over_and_it_is_announced(monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    spec = importlib.util.spec_from_file_location(
        "raymq.store.base.checksum_fallback", checksum.__file__
    )
    module = importlib.util.module_from_spec(spec)
    with pytest.warns(RuntimeWarning, match="crcmod"):
        spec.loader.exec_module(module)
    assert module.crc32c(memoryview(b"123456789")) == 0xE3069283
    assert module.crc32c(b"6789", module.crc32c(b"12345")) == 0xE3069283
