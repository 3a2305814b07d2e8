"""Where a unit of the chain may end: it cuts no record, and no bundle of messages.

A follower acknowledges whole units. So a unit that is made again has whole records and bundles too: otherwise a
follower whose leader is gone could have half of one below the confirmed end.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from raymq.store.base.arrays import Int64s
from raymq.store.records import properties, record
from raymq.store.records.one_record import is_whole, record_at
from raymq.store.state.shard_state import (
    INTERNAL_TOPIC,
    NO_BUNDLE,
    PROGRESS,
    BundleRange,
    bundle_range,
    reading_state_record,
)

#: bytes between two record starts that are remembered
STEP_BYTES = 64 << 10

_TAGS = properties.encode({properties.TAGS: PROGRESS})
#: topic and properties of a PROGRESS record, as bytes of the log
_TOPIC_AND_TAGS = INTERNAL_TOPIC.encode() + struct.pack(">h", len(_TAGS)) + _TAGS


class RecordStarts:
    """Some of the places at which records begin, in order. A walk to a place in between is short."""

    def __init__(self) -> None:
        self._starts: list[int] = []

    def note(self, positions: Int64s) -> None:
        """Remember one in about STEP_BYTES of these records, which follow the ones before."""
        if len(positions):
            wanted = np.arange(positions[0], positions[-1] + 1, STEP_BYTES)
            self._starts += positions[np.searchsorted(positions, wanted)].tolist()

    def at_or_below(self, offset: int, lowest: int) -> int:
        """The last start that is known at or below `offset`; `lowest` if that is below it."""
        index = bisect_right(self._starts, offset)
        return max(self._starts[index - 1], lowest) if index else lowest


class WholeRange(NamedTuple):
    """The whole records and bundles at the beginning of some log bytes, as physical offsets."""

    #: the end of the last one
    end: int
    #: the end of the record or bundle that follows, if the bytes have its beginning; `end` otherwise
    next_end: int


def whole_range(data: bytes, base: int, starts: RecordStarts | None = None) -> WholeRange:
    """The whole records and bundles that `data` begins with.

    Args: `base`: its physical offset, at which one begins. `starts`: places at which other records begin.
    """
    starts = starts or RecordStarts()
    walk = _walk(data, base, starts.at_or_below(base + len(data), base))
    end = next_end = walk.end
    if walk.reason is record.WalkStop.SHORT:
        next_end += int.from_bytes(data[end - base :][:4], "big")
    bundle = _last_bundle(data[: end - base], base, starts)
    return WholeRange(*bundle) if bundle.is_cut_at(end) else WholeRange(end, next_end)


def unit_bytes(
    read: Callable[[int, int], bytes],
    start: int,
    stop: int,
    bytes_max: int,
    starts: RecordStarts | None = None,
) -> memoryview:
    """The bytes of a unit that is made again: from `start` to `stop`, or as many as `bytes_max`.

    A record or bundle of more bytes has a unit of its own. Args: `read`: from (start, stop) to log bytes. `starts`: as
    in `whole_range`.
    """
    upto = min(stop, start + bytes_max)
    while True:
        data = read(start, upto)
        if upto == stop:
            return memoryview(data)
        whole = whole_range(data, start, starts)
        if whole.end > start:
            return memoryview(data)[: whole.end - start]
        if whole.next_end <= upto:
            # No record begins here: a blank fills the rest of the file.
            return memoryview(data)
        upto = min(stop, whole.next_end)


def _walk(data: bytes, base: int, at: int) -> record.Walk:
    """The records of `data` from physical offset `at` on, where one begins."""
    view = memoryview(data)[at - base :]
    return record.walk(view, at, check_crc=False, check_position=False)


def _last_bundle(data: bytes, base: int, starts: RecordStarts) -> BundleRange:
    """The bundle that the last PROGRESS record of whole records begins. A damaged record begins none."""
    upto = len(data)
    while (found := data.rfind(_TOPIC_AND_TAGS, 0, upto)) >= 0:
        walk = _walk(data, base, starts.at_or_below(base + found, base))
        row = int(np.searchsorted(walk.positions, base + found, side="right")) - 1
        if row < 0:
            return NO_BUNDLE
        at, size = int(walk.positions[row]) - base, int(walk.sizes[row])
        parts = record_at(data, at, None)
        # A body may have the same bytes.
        if (
            parts is not None
            and parts[2] == found
            and is_whole(data, at, size, None, check_crc=True)
        ):
            with reading_state_record(PROGRESS, base + at):
                return bundle_range(base + at, data[parts[4] : parts[5]])
        upto = at
    return NO_BUNDLE
