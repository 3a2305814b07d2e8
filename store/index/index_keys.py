"""The keys under which records are found, and their hashes: whole columns at once (design D3).

A record has the key of its property UNIQ_KEY and the words of KEYS, which stand between single blanks. What is
hashed is `topic#key`, with Java's String.hashCode over UTF-16 units.
Source: IndexService#buildIndex, IndexFile#indexKeyHashMethod, RocketMQ 5.3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store import format as fmt
from raymq.store.records.keys import KEY_NAMES, KEY_SEPARATOR, UNIQ_KEY_NAME, Keyed
from raymq.store.records.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

#: between topic and key in what is hashed
TOPIC_SEPARATOR = "#"

_BLANK, _NAME_END, _VALUE_END = ord(KEY_SEPARATOR), NAME_VALUE_SEPARATOR[0], PROPERTY_SEPARATOR[0]
_INTEGER_MIN = -(1 << 31)
_NONE = np.empty(0, dtype=np.int64)

#: bytes of properties hashed in one go: the tables of powers have an item for each
CHUNK_BYTES = 1 << 17


def _powers(base: int) -> UInt32s:
    table = np.ones(CHUNK_BYTES + fmt.PROPERTIES_MAX_BYTES, dtype=np.uint32)
    table[1:] = base
    return np.multiply.accumulate(table, dtype=np.uint32)


#: 31 ** i and 31 ** -i modulo 2 ** 32
_POWER = _powers(31)
_INVERSE = _powers(pow(31, -1, 1 << 32))


class Hashes(NamedTuple):
    """One item a key, in the order in which they are indexed."""

    #: which record has the key; ascending
    rows: Int64s
    #: hash of topic#key, as it stands in the index
    values: Int32s


def key_hash(topic: str, key: str) -> int:
    """The hash of one key: never negative."""
    value = fmt.java_hash(topic + TOPIC_SEPARATOR + key)
    return 0 if value == _INTEGER_MIN else abs(value)


def key_hashes(topic: str, keys: Sequence[str]) -> Int64s:
    """`key_hash` of many keys, none of which is empty."""
    texts = [
        UNIQ_KEY_NAME + key.encode("utf-8", "surrogatepass") + PROPERTY_SEPARATOR for key in keys
    ]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return hash_keys(topic_hash(topic), Keyed(b"".join(texts), ends)).values.astype(np.int64)


def topic_hash(topic: str) -> int:
    """What the hashes of a topic's keys begin with, modulo 2 ** 32."""
    return fmt.java_hash(topic + TOPIC_SEPARATOR) & 0xFFFFFFFF


def hash_keys(topic_hashes: UInt32s | int, keyed: Keyed) -> Hashes:
    """Find and hash the keys of records.

    Args: `topic_hash` of each record's topic, or of the one topic of all of them.
    """
    count = len(keyed.offsets) - 1
    rows, values = [], []
    start = 0
    data = np.frombuffer(keyed.data, dtype=np.uint8)
    while start < count:
        low = keyed.offsets[start]
        stop = int(np.searchsorted(keyed.offsets, low + CHUNK_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), count)
        bounds = keyed.offsets[start : stop + 1]
        topics = topic_hashes if isinstance(topic_hashes, int) else topic_hashes[start:stop]
        part = _hash_chunk(topics, data[low : bounds[-1]], bounds - low)
        rows.append(part.rows + start)
        values.append(part.values)
        start = stop
    if not rows:
        return Hashes(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))
    return Hashes(np.concatenate(rows), np.concatenate(values))


def _hash_chunk(topic_hashes: UInt32s | int, data: Bytes, offsets: Int64s) -> Hashes:
    rows, starts, ends = _words(data, offsets)
    lengths = ends - starts
    # Every byte times a power that falls with its place: the differences of their running sums are the words' hashes.
    sums = np.zeros(len(data) + 1, dtype=np.uint32)
    np.cumsum(data.astype(np.uint32) * _INVERSE[: len(data)], dtype=np.uint32, out=sums[1:])
    hashes = (sums[ends] - sums[starts]) * _POWER[ends - 1]
    high = data >= 0x80
    if high.any():
        before = np.concatenate(([0], np.cumsum(high)))
        wide = np.flatnonzero(before[ends] > before[starts])
        if len(wide):
            hashes[wide], lengths[wide] = _hash_wide(data, starts[wide], ends[wide])
    seeds = topic_hashes if isinstance(topic_hashes, int) else topic_hashes[rows]
    signed = (np.uint32(seeds) * _POWER[lengths] + hashes).view(np.int32)
    return Hashes(rows, np.where(signed == _INTEGER_MIN, 0, np.abs(signed)).astype(np.int32))


def _words(data: Bytes, offsets: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Row, start and end of every key, in the order in which they are indexed."""
    text = data.tobytes()
    keys, unique = (
        _values(data, offsets, name) if name in text else (_NONE, _NONE, _NONE)
        for name in KEY_NAMES
    )
    rows, starts, ends = keys
    blanks = np.flatnonzero(data == _BLANK)
    if len(blanks) and len(rows):
        # A word begins with the value and behind each of its blanks, and ends at the next blank or with the value.
        inside = np.searchsorted(starts, blanks, side="right") - 1
        inside_value = (inside >= 0) & (blanks < ends[inside])
        blanks, inside = blanks[inside_value], inside[inside_value]
        order = np.argsort(np.concatenate((starts, blanks + 1)), kind="stable")
        starts = np.concatenate((starts, blanks + 1))[order]
        rows = np.concatenate((rows, rows[inside]))[order]
        ends = np.sort(np.concatenate((ends, blanks)))
        words = ends > starts
        rows, starts, ends = rows[words], starts[words], ends[words]
    if not len(unique[0]):
        return rows, starts, ends
    order = np.argsort(np.concatenate((unique[0], rows)), kind="stable")
    first, second, third = (
        np.concatenate(pair)[order] for pair in zip(unique, (rows, starts, ends), strict=True)
    )
    return first, second, third


def _values(data: Bytes, offsets: Int64s, name: bytes) -> tuple[Int64s, Int64s, Int64s]:
    """Row, start and end of one property's values, ascending; the last one counts where a record has several."""
    found = np.flatnonzero(data == _NAME_END) + 1
    found = found[found >= len(name)]
    for back in range(2, len(name) + 1):
        found = found[data[found - back] == name[-back]]
    if not len(found):
        return found, found, found
    begins = found - len(name)
    rows = np.searchsorted(offsets, begins, side="right") - 1
    first = (begins == offsets[rows]) | (data[begins - 1] == _VALUE_END)
    found, rows = found[first], rows[first]
    stops = np.append(np.flatnonzero(data == _VALUE_END), len(data))
    ends = np.minimum(stops[np.searchsorted(stops, found)], offsets[rows + 1])
    filled = ends > found
    found, rows, ends = found[filled], rows[filled], ends[filled]
    if len(rows) > 1:
        last = np.append(rows[1:] != rows[:-1], True)
        found, rows, ends = found[last], rows[last], ends[last]
    return rows, found, ends


def _hash_wide(data: Bytes, starts: Int64s, ends: Int64s) -> tuple[UInt32s, Int64s]:
    """Hash and number of UTF-16 units of words that are not ASCII."""
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    texts = [data[a:b].tobytes().decode("utf-8", "replace") for a, b in pairs]
    hashes = np.array([fmt.java_hash(text) & 0xFFFFFFFF for text in texts], dtype=np.uint32)
    lengths = [len(text.encode("utf-16-be", "surrogatepass")) // 2 for text in texts]
    return hashes, np.array(lengths, dtype=np.int64)
