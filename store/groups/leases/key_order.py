"""Which messages may go out when those of one key have an order.

A message is leased only with all earlier messages of its key that are not settled, in one lease. Keys are slots of a
hash, so that two keys may share one: then they only wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from raymq.store.base.checksum import crc32

from .offsets import OffsetColumn
from .queue_columns import OPEN, QueueColumns

#: slots of keys
SLOTS = 1 << 16

Mask = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.uint16]


def slots_of(keys: Sequence[bytes]) -> Slots:
    """The slot of each key. Messages without a key share that of the empty one."""
    return np.fromiter((crc32(key) % SLOTS for key in keys), dtype=np.uint16, count=len(keys))


def before_the_first(slots: Slots, stops: Mask) -> Mask:
    """Which rows come before the first stop of their slot. Rows are in the order of offsets."""
    first = np.full(SLOTS, len(slots), dtype=np.int64)
    where = np.flatnonzero(stops)
    np.minimum.at(first, slots[where], where)
    return np.asarray(np.arange(len(slots)) < first[slots])


def may_lease(
    columns: QueueColumns, fresh: OffsetColumn, slots: Slots, now_ms: int, kept: OffsetColumn
) -> OffsetColumn:
    """The offsets that may be leased together, ascending.

    Args: `fresh`: offsets that were never leased, and `slots` those of their keys. `kept`: offsets that must not be
    leased.
    """
    left = columns.unsettled()
    places = columns.at(left)
    is_permitted = columns.permitted(left, now_ms)
    if len(kept):
        is_permitted &= np.isin(left, kept, assume_unique=True, invert=True)
    all_slots = np.concatenate((columns.slot[places], slots))
    stops = np.concatenate((~is_permitted, np.zeros(len(fresh), dtype=np.bool_)))
    may = before_the_first(all_slots, stops)

    # A later message of the key that a worker still has: it may be at work on it.
    is_out = np.zeros(SLOTS, dtype=np.bool_)
    is_out[columns.slot[places[~is_permitted & (columns.status[places] == OPEN)]]] = True
    may &= ~is_out[all_slots]
    return np.concatenate((left, fresh))[may]


def may_settle(columns: QueueColumns, offsets: OffsetColumn) -> Mask:
    """Which of these offsets have no earlier message of their key that stays unsettled."""
    if not len(offsets):
        return np.zeros(0, dtype=np.bool_)
    left = columns.unsettled(int(offsets[-1]) + 1)
    stops = np.isin(left, offsets, assume_unique=True, invert=True)
    may = before_the_first(columns.slot[columns.at(left)], stops)
    return np.isin(offsets, left[may], assume_unique=True)


def later_ones(columns: QueueColumns, held: OffsetColumn, returned: OffsetColumn) -> OffsetColumn:
    """Those of the held offsets whose key has an earlier one among the returned ones."""
    first = np.full(SLOTS, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, columns.slot[columns.at(returned)], returned)
    return held[held > first[columns.slot[columns.at(held)]]]
