"""The producer stamp of a record: the producer's id, its epoch, and the sequence of the row.

It is always the first property of a record, and only that position counts. It has 24 bytes, `_P 0x01 c*20 0x02`. The
20 base64url characters hold 120 bits: producer id 64 | epoch 20 | sequence 36. The first 12 characters (producer id
and the epoch's high 8 bits) are the same for a whole batch. The last 8 hold the epoch's low 12 bits and the sequence.
"""

from __future__ import annotations

import base64
from binascii import b2a_base64
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base.arrays import Bools, Int32s, Int64s
from raymq.store.base.errors import Rejected

from .properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR

STAMP_NAME = "_P"
PREFIX = STAMP_NAME.encode() + NAME_VALUE_SEPARATOR
SUFFIX = PROPERTY_SEPARATOR
STAMP_BYTES = 24
PRODUCER_MAX = (1 << 64) - 1
EPOCH_MAX = (1 << 20) - 1
SEQUENCE_MAX = (1 << 36) - 1

_ALPHABET = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8
)
_INVALID = 0xFFFF
_URLSAFE = bytes.maketrans(b"+/", b"-_")

#: 12 bits -> two characters; the inverse table is indexed by the characters, read as a little-endian short
_PAIRS = np.empty((4096, 2), dtype=np.uint8)
_PAIRS[:, 0] = np.repeat(_ALPHABET, 64)
_PAIRS[:, 1] = np.tile(_ALPHABET, 64)
#: right shifts that bring the four pairs of a 48-bit tail down
_TAIL_SHIFTS = np.array([36, 24, 12, 0], dtype=np.uint64)
_TO_PAIR = _PAIRS.view("<u2").ravel()
_FROM_PAIR = np.full(1 << 16, _INVALID, dtype=np.uint16)
_FROM_PAIR[_TO_PAIR] = np.arange(4096, dtype=np.uint16)


class Stamp(NamedTuple):
    """The stamps of a batch: row i has sequence `first_sequence + i`."""

    producer_id: int
    epoch: int
    first_sequence: int


class Stamps(NamedTuple):
    """The stamps of rows. A row without one has the numbers 0."""

    valid: Bools
    producer_ids: npt.NDArray[np.uint64]
    epochs: Int32s
    sequences: Int64s


def check(stamp: Stamp, count: int) -> None:
    """Check the numbers of a batch of `count` rows. Raises: Rejected if a number does not fit its bits."""
    for field, value, limit in (
        ("producer_id", stamp.producer_id, PRODUCER_MAX),
        ("epoch", stamp.epoch, EPOCH_MAX),
        ("first_sequence", stamp.first_sequence, SEQUENCE_MAX + 1 - count),
    ):
        if not 0 <= value <= limit:
            raise Rejected(
                f"{field} is {value}; it must be 0 to {limit}"
                + ("; begin a new epoch" if field == "first_sequence" and value > limit else ""),
                field=field,
                limit=limit,
            )


def stamp_column(
    producer_id: int, epoch: int, first_sequence: int, count: int
) -> npt.NDArray[np.uint8]:
    """The stamps of `count` consecutive rows, uint8[count, 24]. Raises: Rejected."""
    check(Stamp(producer_id, epoch, first_sequence), count)
    sequences = np.arange(first_sequence, first_sequence + count, dtype=np.uint64)
    tails = np.uint64((epoch & 0xFFF) << 36) | sequences
    groups_of_12_bits = (tails[:, None] >> _TAIL_SHIFTS) & np.uint64(0xFFF)

    stamps = np.empty((count, STAMP_BYTES), dtype=np.uint8)
    stamps[:, :15] = _constant_part(producer_id, epoch >> 12)
    stamps[:, 15:23] = _TO_PAIR[groups_of_12_bits.astype(np.intp)].view(np.uint8)
    stamps[:, 23] = SUFFIX[0]
    return stamps


def stamp_list(stamp: Stamp, count: int) -> list[bytes]:
    """The stamps of `count` consecutive rows, one by one. Raises: Rejected."""
    producer_id, epoch, first = stamp
    # `check` names the fault. A number that does not fit its bits is not 0 after the shift.
    if producer_id >> 64 or epoch >> 20 or first >> 36 or (first + count - 1) >> 36:
        check(stamp, count)
    bits = producer_id << 56 | epoch << 36 | first
    rows = b"".join([(bits + row).to_bytes(15, "big") for row in range(count)])
    text = b2a_base64(rows, newline=False).translate(_URLSAFE)
    # 15 bytes are 20 characters, without padding.
    width = len(text) // count
    return [PREFIX + text[at : at + width] + SUFFIX for at in range(0, len(text), width)]


def without_stamp(properties: bytes) -> bytes:
    """A properties string without the stamp that it may begin with."""
    if properties.startswith(PREFIX) and properties[STAMP_BYTES - 1 : STAMP_BYTES] == SUFFIX:
        return properties[STAMP_BYTES:]
    return properties


@lru_cache(maxsize=1024)
def _constant_part(producer_id: int, epoch_high: int) -> npt.NDArray[np.uint8]:
    """The 15 bytes that are the same in every stamp of a batch."""
    bits = ((producer_id << 8) | epoch_high).to_bytes(9, "big")
    return np.frombuffer(PREFIX + base64.urlsafe_b64encode(bits), dtype=np.uint8)


def read_column(stamps: npt.NDArray[np.uint8]) -> Stamps:
    """Read the first 24 property bytes of rows, uint8[n, 24]."""
    values = _FROM_PAIR[np.ascontiguousarray(stamps[:, 3:23]).view("<u2")]
    valid = (values != _INVALID).all(axis=1)
    valid &= (stamps[:, :3] == np.frombuffer(PREFIX, dtype=np.uint8)).all(axis=1)
    valid &= stamps[:, 23] == SUFFIX[0]
    bits = np.where(valid[:, None], values, 0).astype(np.uint64)
    head = _join(bits[:, 1:6])
    producer_ids = (bits[:, 0] << np.uint64(52)) | (head >> np.uint64(8))
    tail = _join(bits[:, 6:])
    epoch = ((head & np.uint64(0xFF)) << np.uint64(12)) | (tail >> np.uint64(36))
    sequence = tail & np.uint64(SEQUENCE_MAX)
    return Stamps(valid, producer_ids, epoch.astype(np.int32), sequence.astype(np.int64))


def _join(columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = columns[:, 0]
    for index in range(1, columns.shape[1]):
        value = (value << np.uint64(12)) | columns[:, index]
    return value
