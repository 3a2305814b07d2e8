from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.base.errors import Rejected
from raymq.store.records.producer_stamp import (
    EPOCH_MAX,
    PRODUCER_MAX,
    SEQUENCE_MAX,
    STAMP_BYTES,
    Stamp,
    read_column,
    stamp_column,
    stamp_list,
    stamped_rows,
)

PRODUCERS = st.integers(0, PRODUCER_MAX)
EPOCHS = st.integers(0, EPOCH_MAX)
SEQUENCES = st.integers(0, SEQUENCE_MAX - 50)


@given(PRODUCERS, EPOCHS, SEQUENCES, st.integers(0, 50))
def test_stamps_are_read_back(producer, epoch, sequence, count):
    valid, producers, epochs, sequences = read_column(
        stamp_column(producer, epoch, sequence, count)
    )
    assert valid.all()
    assert producers.tolist() == [producer] * count
    assert epochs.tolist() == [epoch] * count
    assert sequences.tolist() == list(range(sequence, sequence + count))


@given(PRODUCERS, EPOCHS, SEQUENCES)
def test_a_stamp_is_base64url_of_120_bits(producer, epoch, sequence):
    bits = (producer << 56) | (epoch << 36) | sequence
    expected = b"_P\x01" + base64.urlsafe_b64encode(bits.to_bytes(15, "big")) + b"\x02"
    assert stamp_column(producer, epoch, sequence, 1).tobytes() == expected


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, 5 << 12, (5 << 12) - 1, SEQUENCE_MAX - 9_000])
@pytest.mark.parametrize("count", [1, 2, 4095, 4096, 4097, 9_000])
def test_rows_have_the_stamps_of_their_sequences_after_the_head(first, count):
    stamp = Stamp(PRODUCER_MAX - 5, 77_777, first)
    expected = [b"head" + each for each in stamp_list(stamp, count)]
    rows = stamped_rows(b"head", stamp, count)
    assert rows.shape == (count, len(b"head") + STAMP_BYTES)
    assert rows.tobytes() == b"".join(expected)


def test_the_first_15_bytes_are_the_same_for_a_batch():
    stamps = stamp_column(77, 5, SEQUENCE_MAX - 9, 10)
    assert stamps.shape == (10, STAMP_BYTES)
    assert (stamps[:, :15] == stamps[0, :15]).all()


@given(st.binary(min_size=STAMP_BYTES, max_size=STAMP_BYTES))
def test_other_bytes_are_not_valid_and_read_as_zeros(data):
    row = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
    valid, producers, epochs, sequences = read_column(row)
    assert not valid[0]
    assert (producers[0], epochs[0], sequences[0]) == (0, 0, 0)


@pytest.mark.parametrize("position", range(STAMP_BYTES))
def test_one_wrong_byte_makes_a_stamp_invalid(position):
    stamps = stamp_column(1, 2, 3, 3)
    stamps[1, position] = ord("*")
    assert read_column(stamps)[0].tolist() == [True, False, True]


def test_no_rows_are_no_stamps():
    assert [len(part) for part in read_column(stamp_column(1, 2, 3, 0))] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("field", "producer", "epoch", "sequence"),
    [
        ("producer_id", -1, 0, 0),
        ("producer_id", PRODUCER_MAX + 1, 0, 0),
        ("epoch", 0, EPOCH_MAX + 1, 0),
        ("first_sequence", 0, 0, -1),
        ("first_sequence", 0, 0, SEQUENCE_MAX),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(field, producer, epoch, sequence):
    with pytest.raises(Rejected) as caught:
        stamp_column(producer, epoch, sequence, 2)
    assert caught.value.field == field
