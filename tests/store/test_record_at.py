"""Whether a whole record is at a place: the searches for one, some and many agree, whatever the lengths are."""

from __future__ import annotations

import struct
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from raymq.store.base import format as fmt
from raymq.store.records.one_record import record_at, records_at_each
from raymq.store.records.record_walk import records_at

#: physical offset of the file, and position of the record in it
BASE, AT = 7 * 4096, 33
TIME_MS = 1_700_000_000_000


class Lengths(NamedTuple):
    """The sizes of its parts in a record."""

    body: int
    topic: int
    properties: int


def written(
    magic: int, flags: int, lengths: Lengths, *, more: int = 0, moved: int = 0
) -> tuple[bytearray, int, int]:
    """A file with one record of these lengths. Returns: the bytes, the record's end, and the start of its topic.

    Args: `more`, added to its size; `moved`, added to its offset.
    """
    born_v6, store_v6 = flags & fmt.SYS_BORN_HOST_V6, flags & fmt.SYS_STORE_HOST_V6
    dtype = fmt.header_dtype(bool(born_v6), bool(store_v6))
    width = 2 if magic == fmt.MAGIC_V2 else 1
    topic_at = AT + dtype.itemsize + lengths.body + width
    topic_end = topic_at + lengths.topic
    end = topic_end + 2 + lengths.properties
    header = np.zeros(1, dtype)
    header["size"], header["magic"], header["sys_flag"] = end - AT + more, magic, flags
    header["physical_offset"], header["store_time_ms"] = BASE + AT + moved, TIME_MS
    header["body_length"] = lengths.body
    data = bytearray(AT + 1000)
    data[AT : AT + dtype.itemsize] = header.tobytes()
    # With a body of fewer than no bytes the topic's length stands inside the header.
    data[topic_at - width : topic_at] = struct.pack(">h", lengths.topic)[-width:]
    struct.pack_into(">h", data, topic_end, lengths.properties)
    return data, end, topic_at


def seen(data: bytes | bytearray) -> tuple[int, int, int, int] | None:
    """The record at AT, as all searches find it."""
    one = record_at(memoryview(data), AT, BASE)
    # The record comes first and last, so that a wrong length leads into other bytes and out of them.
    alone = bytes(data[AT:])
    if len(alone) >= fmt.HEADER_BYTES:
        each = records_at_each(alone * 2, len(alone), [BASE + AT, BASE + AT])
        moved = (
            None if one is None else (one[0] - AT, one[1], *(at - AT for at in one[2:6]), one[6])
        )
        first, last = each
        assert first == moved
        at = len(alone)
        assert last == (
            None
            if moved is None
            else (moved[0] + at, moved[1], *(x + at for x in moved[2:6]), moved[6])
        )
    many = records_at(memoryview(data), np.array([AT]), np.array([BASE + AT]))
    assert many.is_record.tolist() == [one is not None]
    if one is None:
        return None
    assert (many.sizes.tolist(), many.times_ms.tolist()) == ([one[0] - AT], [one[1]])
    body = (many.body_starts[0] + AT, many.body_ends[0] + AT, many.body_crcs[0])
    assert body == one[4:]
    return one[:4]


@pytest.mark.parametrize("magic", [fmt.MAGIC_V1, fmt.MAGIC_V2])
@pytest.mark.parametrize("flags", [0, fmt.SYS_BORN_HOST_V6, fmt.SYS_STORE_HOST_V6, 0x30])
def test_a_record_is_whole_when_its_parts_add_up(magic, flags):
    topic_max = fmt.TOPIC_V1_MAX_CHARS if magic == fmt.MAGIC_V1 else 1 << 15
    for lengths in map(Lengths._make, product((-6, 0, 9), (-1, 0, 1, 127, 200), (-3, 0, 20))):
        data, end, topic_at = written(magic, flags, lengths)
        whole = lengths.body >= 0 and 0 < lengths.topic <= topic_max and lengths.properties >= 0
        found = (end, TIME_MS, topic_at, topic_at + lengths.topic)
        assert seen(data) == (found if whole else None)
        # A file may end with it, but not within it.
        assert (seen(data[:end]) is not None) == whole
        assert all(seen(data[:stop]) is None for stop in (AT, AT + 60, AT + 91, end - 1))
        for wrong in ({"more": 1}, {"more": -1}, {"moved": 1}):
            assert seen(written(magic, flags, lengths, **wrong)[0]) is None


@pytest.mark.parametrize("magic", [0, fmt.MAGIC_BLANK, fmt.MAGIC_V1 + 1])
def test_bytes_with_another_magic_are_not_a_record(magic):
    assert seen(written(magic, 0, Lengths(1, 1, 0))[0]) is None


def test_lengths_that_lead_out_of_the_file_are_none():
    for at, length in ((0, 1 << 30), (84, 1 << 30), (84, -(1 << 31)), (84, -AT - 90)):
        data = written(fmt.MAGIC_V2, 0, Lengths(1, 1, 0))[0]
        struct.pack_into(">i", data, AT + at, length)
        assert seen(data) is None
