"""The hashes of the keys by which records are found: whole columns at once.

The hash of a key is that of the text `topic#key`, by Java's String.hashCode over UTF-16 units.
Source: IndexService#buildIndex, IndexFile#indexKeyHashMethod, RocketMQ 5.3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bytes, Int32s, Int64s, UInt32s
from raymq.store.records.keys import KEY_NAMES, KEY_SEPARATOR, UNIQ_KEY_NAME, Keyed
from raymq.store.records.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR

#: between topic and key in the text that is hashed
TOPIC_SEPARATOR = "#"

_BLANK = ord(KEY_SEPARATOR)
_NAME_END, _VALUE_END = NAME_VALUE_SEPARATOR[0], PROPERTY_SEPARATOR[0]
_INTEGER_MIN, _INTEGER_MAX = -(1 << 31), (1 << 31) - 1
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
    """One item per key, in the order in which they are indexed."""

    #: the record that has the key; ascending
    rows: Int64s
    #: hash of topic#key, as the index has it
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
    """The hash of `topic#`, from which the hashes of the topic's keys continue, modulo 2 ** 32."""
    return fmt.java_hash(topic + TOPIC_SEPARATOR) & 0xFFFFFFFF


def hash_keys(topic_hashes: UInt32s | int, keyed: Keyed) -> Hashes:
    """Find and hash the keys of records.

    Args: `topic_hashes`: `topic_hash` of each record's topic, or of the one topic of all records.
    """
    count = len(keyed.offsets) - 1
    rows, values = [_NONE], [np.empty(0, dtype=np.int32)]
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

    return Hashes(np.concatenate(rows), np.concatenate(values))


class _Spans(NamedTuple):
    """Ranges [start, end) of the properties of some records, ascending by row."""

    #: the record of the range
    rows: Int64s
    starts: Int64s
    ends: Int64s

    def select(self, kept: Any) -> _Spans:
        """Some of the ranges, by a mask or by row numbers."""
        return _Spans(self.rows[kept], self.starts[kept], self.ends[kept])


def _hash_chunk(topic_hashes: UInt32s | int, data: Bytes, offsets: Int64s) -> Hashes:
    """`hash_keys` of so few records that their properties fit the tables of powers."""
    text = data.tobytes()
    keys = _key_spans(text, data, offsets)
    hashes, lengths = _span_hashes(data, keys, ascii_only=text.isascii())
    seeds = topic_hashes if isinstance(topic_hashes, int) else topic_hashes[keys.rows]
    # hash(topic# + key) = hash(topic#) * 31 ** length(key) + hash(key)
    signed = (np.uint32(seeds) * _POWER.take(lengths) + hashes).view(np.int32)
    # The absolute value of the least integer is itself. RocketMQ takes 0.
    return Hashes(keys.rows, np.abs(signed) & np.int32(_INTEGER_MAX))


# --- the ranges of keys ---------------------------------------------------------------------------


def _key_spans(text: bytes, data: Bytes, offsets: Int64s) -> _Spans:
    """Every key: of each record first its UNIQ_KEY, then the words of KEYS. Args: `text`: the bytes of `data`."""
    words = _only_property(text, data, offsets, KEY_NAMES[0])
    unique = _NO_SPANS
    if words is None:
        words, unique = (
            _property_values(data, offsets, name) if name in text else _NO_SPANS
            for name in KEY_NAMES
        )
    if KEY_SEPARATOR.encode() in text:
        words = _split_at_blanks(data, words)
    return _interleaved(unique, words) if len(unique.rows) else words


def _only_property(text: bytes, data: Bytes, offsets: Int64s, name: bytes) -> _Spans | None:
    """The values of one property if each record has it, not empty, and no other property. None otherwise.

    Messages that have index keys, and neither a key nor properties of their own, are stored so. `_property_values`,
    which finds the same, takes several times as long.
    """
    count = len(offsets) - 1
    starts, ends = offsets[:-1] + len(name), offsets[1:] - 1
    if (starts >= ends).any():
        return None

    # With as many separators and names as records, each record has one of each.
    if text.count(name) != count:
        return None
    if any(np.count_nonzero(data == each) != count for each in (_NAME_END, _VALUE_END)):
        return None
    if (data[starts - 1] != _NAME_END).any() or (data[ends] != _VALUE_END).any():
        return None
    return _Spans(np.arange(count), starts, ends)


def _property_values(data: Bytes, offsets: Int64s, name: bytes) -> _Spans:
    """The non-empty values of one property. Of several in one record only the last."""
    starts = _ends_of_name(data, name)
    if not len(starts):
        return _NO_SPANS

    name_starts = starts - len(name)
    rows = np.searchsorted(offsets, name_starts, side="right") - 1
    # A name is whole if it begins its record's properties, or if another value ends before it.
    whole = (name_starts == offsets[rows]) | (data[name_starts - 1] == _VALUE_END)
    starts, rows = starts[whole], rows[whole]

    value_ends = np.append(np.flatnonzero(data == _VALUE_END), len(data))
    next_value_ends = value_ends[np.searchsorted(value_ends, starts)]
    # The last value of a record may lack its separator.
    ends = np.minimum(next_value_ends, offsets[rows + 1])
    filled = _Spans(rows, starts, ends).select(ends > starts)

    is_last = np.ones(len(filled.rows), dtype=np.bool_)
    is_last[:-1] = filled.rows[1:] != filled.rows[:-1]
    return filled.select(is_last)


def _ends_of_name(data: Bytes, name: bytes) -> Int64s:
    """The positions after each occurrence of `name`, which ends with the separator of name and value."""
    ends = np.flatnonzero(data == _NAME_END) + 1
    ends = ends[ends >= len(name)]
    # From the last letter to the first: each comparison leaves fewer candidates.
    for back in range(2, len(name) + 1):
        ends = ends[data[ends - back] == name[-back]]
    return ends


def _split_at_blanks(data: Bytes, values: _Spans) -> _Spans:
    """The words of values. A word begins with its value or after a blank, and ends at a blank or with its value."""
    blanks = np.flatnonzero(data == _BLANK)
    if not len(blanks) or not len(values.rows):
        return values
    value_of = np.searchsorted(values.starts, blanks, side="right") - 1
    inside = (value_of >= 0) & (blanks < values.ends[value_of])
    blanks, value_of = blanks[inside], value_of[inside]
    starts = np.concatenate((values.starts, blanks + 1))
    order = np.argsort(starts, kind="stable")
    rows = np.concatenate((values.rows, values.rows[value_of]))[order]
    ends = np.sort(np.concatenate((values.ends, blanks)))
    words = _Spans(rows, starts[order], ends)
    return words.select(words.ends > words.starts)


def _interleaved(first: _Spans, second: _Spans) -> _Spans:
    """Merge both by row. In a row that both have, `first` comes first."""
    both = _Spans(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
    return both.select(np.argsort(both.rows, kind="stable"))


# --- the hashes of ranges -------------------------------------------------------------------------


def _span_hashes(data: Bytes, spans: _Spans, *, ascii_only: bool) -> tuple[UInt32s, Int64s]:
    """Java's hash of each range, modulo 2 ** 32, and its number of UTF-16 units.

    Args: `ascii_only`: `data` has only bytes below 0x80.
    """
    _, starts, ends = spans
    lengths = ends - starts
    # With running sums of byte[i] * 31 ** -i, the hash of a range is one difference times 31 ** (end - 1).
    sums = np.empty(len(data) + 1, dtype=np.uint32)
    sums[0] = 0
    np.cumsum(data * _INVERSE[: len(data)], dtype=np.uint32, out=sums[1:])
    hashes = (sums.take(ends) - sums.take(starts)) * _POWER.take(ends - 1)
    if not ascii_only:
        before = np.concatenate(([0], np.cumsum(data >= 0x80)))
        wide = np.flatnonzero(before[ends] > before[starts])
        if len(wide):
            hashes[wide], lengths[wide] = _hash_wide(data, starts[wide], ends[wide])
    return hashes, lengths


def _hash_wide(data: Bytes, starts: Int64s, ends: Int64s) -> tuple[UInt32s, Int64s]:
    """`_span_hashes` of ranges that are not ASCII, one by one."""
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    texts = [data[a:b].tobytes().decode("utf-8", "replace") for a, b in pairs]
    hashes = np.array([fmt.java_hash(text) & 0xFFFFFFFF for text in texts], dtype=np.uint32)
    lengths = [len(text.encode("utf-16-be", "surrogatepass")) // 2 for text in texts]
    return hashes, np.array(lengths, dtype=np.int64)


_NO_SPANS = _Spans(_NONE, _NONE, _NONE)
