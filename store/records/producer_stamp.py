"""The producer stamp of a record: the producer's id, its epoch, and the sequence of the row.

It is always the first property of a record, and only that position counts. It has 24 bytes, `_P 0x01 c*20 0x02`. The
20 base64url characters hold 120 bits: producer id 64 | epoch 20 | sequence 36. The first 12 characters (producer id
and the epoch's high 8 bits) are the same for a whole batch. The last 8 hold the epoch's low 12 bits and the sequence.
"""

from __future__ import annotations

from binascii import b2a_base64
from functools import lru_cache
from itertools import pairwise
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

#: the values of two characters
_PAIRS = 1 << 12
#: 12 bits -> two characters, read as a little-endian short; and the inverse
_TO_PAIR = np.stack([np.repeat(_ALPHABET, 64), np.tile(_ALPHABET, 64)], axis=1).view("<u2").ravel()
_FROM_PAIR = np.full(1 << 16, _INVALID, dtype=np.uint16)
_FROM_PAIR[_TO_PAIR] = np.arange(_PAIRS, dtype=np.uint16)


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
    return stamped_rows(b"", Stamp(producer_id, epoch, first_sequence), count)


def stamped_rows(head: bytes, stamp: Stamp, count: int) -> npt.NDArray[np.uint8]:
    """`count` times `head`, each time followed by the stamp of the next row: uint8[count, len(head) + 24].

    Raises: Rejected.
    """
    check(stamp, count)
    producer_id, epoch, first = stamp
    stop = first + count

    # From one multiple of 4096 to the next, the stamps differ in their last two characters alone.
    data = bytearray()
    next_multiples = range(first - first % _PAIRS + _PAIRS, stop, _PAIRS)
    for begin, end in pairwise([first, *next_multiples, stop]):
        data += (head + stamp_list(Stamp(producer_id, epoch, begin), 1)[0]) * (end - begin)

    width = len(head) + STAMP_BYTES
    rows = np.frombuffer(data, dtype=_row_dtype(width))
    rows["last_pair"] = _TO_PAIR.take(np.arange(first, stop) % _PAIRS)
    return rows.view(np.uint8).reshape(count, width)


@lru_cache(maxsize=256)
def _row_dtype(width: int) -> np.dtype[np.generic]:
    """A row of so many bytes that ends with a stamp."""
    at = width - len(SUFFIX) - 2
    return np.dtype(
        {"names": ["last_pair"], "formats": ["<u2"], "offsets": [at], "itemsize": width}
    )


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
