"""The properties of many records as columns: one pass over their bytes finds all pairs, without an object for each."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Int64s

from .binary_columns import joined_values, ranges, value_bytes, value_offsets
from .properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR

#: with more names than these in one column, Arrow finds the others
_NAMES_MAX = 64


def property_column(properties: pa.Array, name: str) -> pa.Array:
    """The value of one property of each row, as `PropertyColumns.value`: for few columns in half the time or less."""
    offsets = value_offsets(properties)
    rows, row_ends = offsets[:-1], offsets[1:]
    needle = name.encode() + NAME_VALUE_SEPARATOR
    places = pc.find_substring(properties, needle).fill_null(-1).to_numpy(zero_copy_only=False)
    is_named = places >= 0
    if joined_values(properties).count(needle) > np.count_nonzero(is_named):
        # Of several in a row the last one counts, and a longer name may end like this one.
        return PropertyColumns(properties).value(name)
    if not is_named.any():
        return pa.nulls(len(properties), pa.binary())

    data = value_bytes(properties)
    separator = PROPERTY_SEPARATOR[0]
    is_named &= (places == 0) | (data[rows + places - 1] == separator)
    starts = np.where(is_named, rows + places + len(needle), rows)
    low, high = int(offsets[0]), int(offsets[-1])
    separators = np.append(np.flatnonzero(data[low:high] == separator) + low, high)
    ends = np.minimum(separators[np.searchsorted(separators, starts)], row_ends)
    ends = np.where(is_named, ends, rows)

    edges = np.stack([starts, ends], axis=1).ravel().astype(np.int32)
    buffers = [None, pa.py_buffer(edges), properties.buffers()[2]]
    # Every second piece is between two values.
    pieces = pa.Array.from_buffers(pa.binary(), len(edges) - 1, buffers)
    return pieces.take(pa.array(np.arange(0, len(edges), 2), mask=ends <= starts))


class PropertyColumns:
    """The pairs of a binary column of properties strings, as `properties.decode` finds them in each.

    An incomplete pair is dropped, and of two pairs of one name in a row the last one wins. A null row has no pair.
    """

    def __init__(self, properties: pa.Array) -> None:
        self._count = len(properties)
        offsets = value_offsets(properties).astype(np.int64)
        edges = offsets - offsets[0]
        self._data = np.ascontiguousarray(value_bytes(properties)[offsets[0] : offsets[-1]])

        starts, ends = _pairs(self._data, edges)
        # Empty rows begin where the next row does. The pair belongs to the last of them.
        rows = np.searchsorted(edges, starts, side="right") - 1
        ones = np.append(np.flatnonzero(self._data == 1), len(self._data))
        separators = ones[np.searchsorted(ones, starts)]
        is_whole = (separators > starts) & (separators < ends - 1)
        if properties.null_count:
            is_whole &= properties.is_valid().to_numpy(zero_copy_only=False)[rows]

        self._rows = rows[is_whole]
        self._starts, self._separators, self._ends = (
            each[is_whole] for each in (starts, separators, ends)
        )
        #: the different names, and the place of each pair's name among them
        self._names: list[str] = []
        self._codes = self._classify()
        self._drop_repeated()

    def value(self, name: str) -> pa.Array:
        """The property of each row, as a binary column; null for a row without it."""
        if name not in self._names:
            return pa.nulls(self._count, pa.binary())
        pairs = np.flatnonzero(self._codes == self._names.index(name))
        values = self._values(pairs)
        if len(pairs) == self._count:
            return values
        place_of_row = np.full(self._count, -1, dtype=np.int64)
        place_of_row[self._rows[pairs]] = np.arange(len(pairs))
        return values.take(pa.array(place_of_row, mask=place_of_row < 0))

    def pairs_without(self, excluded: Collection[str]) -> tuple[Int64s, pa.Array, pa.Array]:
        """Row, name and value of all other pairs, in their order. Names are text, values binary."""
        is_wanted = np.array([name not in excluded for name in self._names], dtype=np.bool_)
        pairs = np.flatnonzero(is_wanted[self._codes])
        names = pa.array(self._names, pa.string()).take(pa.array(self._codes[pairs]))
        return self._rows[pairs], names, self._values(pairs)

    def _classify(self) -> Int64s:
        """Find the different names: each one found is compared with all pairs that have none yet."""
        codes = np.full(len(self._starts), -1, dtype=np.int64)
        lengths = self._separators - self._starts
        for _ in range(_NAMES_MAX):
            left = np.flatnonzero(codes < 0)
            if not len(left):
                return codes
            first = left[0]
            name = self._data[self._starts[first] : self._separators[first]]
            alike = left[lengths[left] == len(name)]
            places = self._starts[alike][:, None] + np.arange(len(name))
            codes[alike[(self._data[places] == name).all(axis=1)]] = self._code_of(name.tobytes())

        left = np.flatnonzero(codes < 0)
        names = ranges(self._data, self._starts[left], self._separators[left])
        coded = names.dictionary_encode()
        others = np.array([self._code_of(name) for name in coded.dictionary.to_pylist()])
        if len(left):
            codes[left] = others[coded.indices.to_numpy()]
        return codes

    def _code_of(self, name: bytes) -> int:
        """The place of a name in `_names`, to which a new one is added. Bytes that are not UTF-8 are replaced."""
        text = str(name, "utf-8", "replace")
        if text not in self._names:
            self._names.append(text)
        return self._names.index(text)

    def _drop_repeated(self) -> None:
        """Keep the last pair of each name in a row."""
        keys = self._rows * max(1, len(self._names)) + self._codes
        if len(self._names) <= 1:
            # The pairs of one name are in the order of their rows.
            is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
        else:
            order = np.argsort(keys, kind="stable")
            is_last = np.ones(len(keys), dtype=np.bool_)
            is_last[order[:-1]] = keys[order[1:]] != keys[order[:-1]]
        if not is_last.all():
            self._rows, self._codes = self._rows[is_last], self._codes[is_last]
            self._separators, self._ends = self._separators[is_last], self._ends[is_last]

    def _values(self, pairs: Int64s) -> pa.BinaryArray:
        """The values of pairs."""
        return ranges(self._data, self._separators[pairs] + 1, self._ends[pairs])


def _pairs(data: npt.NDArray[np.uint8], edges: Int64s) -> tuple[Int64s, Int64s]:
    """Start and end of each pair. One ends at its separator, or where its row ends."""
    begins = np.zeros(len(data) + 1, dtype=np.bool_)
    begins[edges] = True
    begins[1:] |= data == 2
    starts = np.flatnonzero(begins[:-1])
    ends = np.append(starts[1:], len(data))[: len(starts)]
    return starts, ends - (data[ends - 1] == 2)
