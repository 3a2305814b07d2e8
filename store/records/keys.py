"""The keys of records: the property UNIQ_KEY, and the words of KEYS, which are separated by single blanks.

The index finds a record by each of its keys. A compacted topic has one key per record: the whole value of KEYS.
Source: IndexService#buildIndex, CompactionLog#shouldRetainMsg, RocketMQ 5.3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Int64s

from .binary_columns import joined_values, null_where, one_value, value_offsets
from .properties import NAME_VALUE_SEPARATOR, decode

KEYS, UNIQ_KEY = "KEYS", "UNIQ_KEY"
KEY_SEPARATOR = " "
UNIQ_KEY_NAME = UNIQ_KEY.encode() + NAME_VALUE_SEPARATOR
#: the first bytes of the properties that hold keys
KEY_NAMES = (KEYS.encode() + NAME_VALUE_SEPARATOR, UNIQ_KEY_NAME)

_WHOLE_KEYS = r"(?s)^(?:.*\x02)?KEYS\x01(?P<v>[^\x02]+)"
_ONLY_BLANKS = r"^\s*$"


class Keyed(NamedTuple):
    """The properties of consecutive records, some of which have keys."""

    #: the properties strings, one after the other
    data: bytes
    #: start of each properties string, and the end of the last
    offsets: Int64s

    def rows(self, start: int, stop: int) -> Keyed:
        """The properties of rows [start, stop)."""
        offsets = self.offsets[start : stop + 1]
        low = int(offsets[0])
        return Keyed(self.data[low : int(offsets[-1])], offsets - low)


class KeyedUnit(NamedTuple):
    """Consecutive records of one topic that may have keys."""

    topic: str
    positions: Int64s
    store_time_ms: int
    keyed: Keyed


def keyed_column(properties: pa.Array) -> Keyed | None:
    """The encoded properties of a batch; None if no row has a key, which costs almost nothing."""
    if properties.null_count == len(properties) or not len(properties):
        return None
    same = one_value(properties)
    if same is not None and not has_keys(same):
        return None
    # The bytes are copied: a slice would keep the bodies in memory until it is indexed.
    data = joined_values(properties)
    if not has_keys(data):
        return None
    offsets = value_offsets(properties)
    return Keyed(data, np.subtract(offsets, offsets[0], dtype=np.int64))


def has_keys(data: bytes) -> bool:
    """Whether properties may have a key."""
    return any(name in data for name in KEY_NAMES)


def keyed_rows(properties: Sequence[bytes | None]) -> Keyed | None:
    """`keyed_column` of a few rows."""
    values = [each or b"" for each in properties]
    data = b"".join(values)
    if not has_keys(data):
        return None
    return Keyed(data, np.array([*accumulate(map(len, values), initial=0)], dtype=np.int64))


def keys_of(properties: bytes) -> list[str]:
    """The keys of one record, in the order in which they are indexed."""
    values = decode(properties)
    found = [values[UNIQ_KEY]] if UNIQ_KEY in values else []
    return found + [word for word in values.get(KEYS, "").split(KEY_SEPARATOR) if word]


def key_column(properties: pa.Array) -> pa.Array:
    """The whole value of KEYS of each properties string; null without one, or with only blanks.

    Source: CompactionLog#shouldRetainMsg takes KEYS as one key, however many words it has.
    """
    found = pc.struct_field(pc.extract_regex(properties, _WHOLE_KEYS), 0)
    blank = pc.match_substring_regex(found, _ONLY_BLANKS)
    return null_where(pc.fill_null(blank, True), found)
