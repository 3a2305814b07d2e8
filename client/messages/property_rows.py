"""Encodes the properties of many rows from columns of pairs, without an object for each pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import Rejected
from raymq.store.records.binary_columns import null_where, value_bytes, value_offsets
from raymq.store.records.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR, encode

from .message import SYSTEM_PROPERTIES

_LISTS = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))


def encode_rows(columns: Mapping[str, pa.Array]) -> pa.Array:
    """The encoded properties of each row; null for a row without any.

    Args: `columns`: name -> maps of names and values, or lists of structs `key` and `value`, text or binary. If two
    columns have a pair of one name, the later value counts, in the place of the first. They come one after the other.
    The pairs of a map have no order of their own, and come by name. So the same row gives the same bytes.
    Raises: Rejected, with field and row: a name of the system, a name or value that is null, empty, not UTF-8 or has
    a separator, and two pairs of one name in a column. RocketMQ's properties are a map of texts.
    """
    found = [_Pairs.of(field, column) for field, column in columns.items()]
    odd = _odd_rows(found)
    encoded = found[0].encoded()
    for each in found[1:]:
        encoded = joined_properties(encoded, each.encoded())
    if not odd.any():
        return encoded
    exact = [_encoded_row(found, row) for row in np.flatnonzero(odd).tolist()]
    return pc.replace_with_mask(encoded, pa.array(odd), pa.array(exact, pa.binary()))


def joined_properties(left: pa.Array, right: pa.Array) -> pa.Array:
    """Join two columns of encoded properties row by row; null if both are null."""
    joined = pc.binary_join_element_wise(
        left, right, b"", null_handling="replace", null_replacement=b""
    )
    return null_where(pc.and_(left.is_null(), right.is_null()), joined)


class _Pairs(NamedTuple):
    """The pairs of a column, in the order of their rows."""

    field: str
    #: row -> its first pair, and one item more: the pairs of a row end where those of the next one begin
    edges: Int64s
    #: a null is an empty one
    names: pa.BinaryArray
    values: pa.BinaryArray

    @classmethod
    def of(cls, field: str, column: pa.Array) -> _Pairs:
        lists = column.cast(_LISTS)
        counts = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        edges = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        pairs = pc.list_flatten(lists)
        names, values = (pc.struct_field(pairs, number).fill_null(b"") for number in (0, 1))
        found = cls(field, edges, names, values)
        return found.by_name() if pa.types.is_map(column.type) else found

    def by_name(self) -> _Pairs:
        """The same pairs, those of each row in the order of their names."""
        if np.diff(self.edges).max(initial=0) < 2:
            return self

        coded = self.names.dictionary_encode()
        ranks = np.empty(len(coded.dictionary), dtype=np.int64)
        ranks[pc.array_sort_indices(coded.dictionary).to_numpy()] = np.arange(len(ranks))
        places = self.rows() * len(ranks) + ranks[coded.indices.to_numpy()]
        if (places[1:] >= places[:-1]).all():
            return self

        # A name may occur twice: the later value stays the later one.
        order = pa.array(np.argsort(places, kind="stable"))
        return self._replace(names=self.names.take(order), values=self.values.take(order))

    def rows(self) -> Int64s:
        """The row of each pair."""
        return np.repeat(np.arange(len(self.edges) - 1), np.diff(self.edges))

    def of_row(self, row: int) -> Iterator[tuple[bytes, bytes]]:
        """The names and values of a row."""
        low, high = self.edges[row : row + 2].tolist()
        names, values = (each.slice(low, high - low) for each in (self.names, self.values))
        return zip(names.to_pylist(), values.to_pylist(), strict=True)

    def encoded(self) -> pa.BinaryArray:
        """The pairs of each row as a properties string; null for a row without pairs."""
        texts = pc.binary_join_element_wise(
            self.names, NAME_VALUE_SEPARATOR, self.values, PROPERTY_SEPARATOR, b""
        )
        # The texts of a row follow each other already: they become one value.
        offsets = value_offsets(texts)[self.edges]
        is_valid = pa.array(np.diff(self.edges) > 0)
        buffers = [is_valid.buffers()[1], pa.py_buffer(offsets), pa.py_buffer(value_bytes(texts))]
        return pa.Array.from_buffers(pa.binary(), len(is_valid), buffers)


def _odd_rows(columns: list[_Pairs]) -> Bools:
    """The rows with a pair that is refused, or that has the name of another: they are rare, and encoded one by one."""
    is_odd = np.zeros(len(columns[0].edges) - 1, dtype=np.bool_)
    rows = np.concatenate([each.rows() for each in columns])
    values = np.concatenate([_odd_texts(each.values) for each in columns])
    is_odd[rows[values]] = True

    names = pa.concat_arrays([each.names for each in columns]).dictionary_encode()
    different = names.dictionary
    system = pa.array([each.encode() for each in sorted(SYSTEM_PROPERTIES)], pa.binary())
    is_system = pc.is_in(different, value_set=system).to_numpy(zero_copy_only=False)
    codes = names.indices.to_numpy().astype(np.int64)
    is_odd[rows[(is_system | _odd_texts(different))[codes]]] = True

    places = np.sort(rows * max(1, len(different)) + codes)
    is_odd[places[1:][places[1:] == places[:-1]] // max(1, len(different))] = True
    return is_odd


def _odd_texts(texts: pa.BinaryArray) -> Bools:
    """A mask of the texts that are empty, not UTF-8, or have a separator."""
    offsets = value_offsets(texts)
    is_odd: Bools = offsets[1:] == offsets[:-1]
    data = value_bytes(texts)[offsets[0] : offsets[-1]]
    if len(data) and data.min() <= PROPERTY_SEPARATOR[0]:
        separators = (data == NAME_VALUE_SEPARATOR[0]) | (data == PROPERTY_SEPARATOR[0])
        places = np.flatnonzero(separators) + offsets[0]
        is_odd[np.searchsorted(offsets, places, side="right") - 1] = True
    try:
        texts.cast(pa.string())
    except pa.ArrowInvalid:
        is_odd |= np.array([_decoded(each) is None for each in texts.to_pylist()])
    return is_odd


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _encoded_row(columns: list[_Pairs], row: int) -> bytes:
    """The properties of a row, with every check. Raises: Rejected."""
    found: dict[str, tuple[str, str]] = {}
    for pairs in columns:
        own: set[str] = set()
        for raw_name, raw_value in pairs.of_row(row):
            name, value = _decoded(raw_name), _decoded(raw_value)
            if name is None or value is None:
                shown = raw_name.decode(errors="replace")
                message = f"row {row}: {shown} in {pairs.field} is not UTF-8; encode it, for example as base64"
                raise Rejected(message, field=pairs.field, limit="UTF-8", row=row)

            if name in SYSTEM_PROPERTIES:
                message = f"row {row}: property {name} belongs to the system; choose another name"
                limit = "not a system property"
                raise Rejected(message, field=pairs.field, limit=limit, row=row)

            if name in own:
                message = (
                    f"row {row}: two pairs of {pairs.field} have the key {name!r}, and a message has one property of "
                    f"a name; join their values, or number the keys ({name}, {name}.2)"
                )
                raise Rejected(message, field=pairs.field, limit="one of a key", row=row)

            own.add(name)
            found[name] = (value, pairs.field)
    return b"".join(
        _encoded_pair(name, value, field, row) for name, (value, field) in found.items()
    )


def _encoded_pair(name: str, value: str, field: str, row: int) -> bytes:
    if name and not value:
        # A null is an empty one here.
        message = (
            f"row {row}: property {name!r} has an empty value, or null, which a property cannot hold; leave it out of "
            f"{field}, or give it a text"
        )
        raise Rejected(message, field=field, limit="non-empty", row=row)
    try:
        return encode({name: value})
    except Rejected as error:
        raise Rejected(f"row {row}: {error}", field=field, limit=error.limit, row=row) from None
