"""The properties of many records at once are those that `decode` finds in each."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.records.properties import decode
from raymq.store.records.property_columns import PropertyColumns, property_column

PIECES = (
    b"\x01",
    b"\x02",
    b"\x01",
    b"\x02",
    b"a",
    b"b",
    b"TAGS",
    b"\xff",
    b"\xfe",
    b"\x00",
    "ä".encode(),
)
ROWS = st.lists(
    st.none() | st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join), max_size=8
)


def pairs_of(
    columns: PropertyColumns, excluded: tuple[str, ...], rows: int
) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{} for _ in range(rows)]
    row_of_pair, names, values = columns.pairs_without(excluded)
    for row, name, value in zip(
        row_of_pair.tolist(), names.to_pylist(), values.to_pylist(), strict=True
    ):
        assert name not in found[row]
        found[row][name] = str(value, "utf-8", "replace")
    return found


@given(ROWS)
def test_each_row_has_the_pairs_that_decode_finds(rows):
    # A slice, so that the offsets of the column do not begin at 0.
    column = pa.array([b"before\x01it\x02", *rows], pa.binary()).slice(1)
    found = pairs_of(PropertyColumns(column), ("b",), len(rows))
    expected = [decode(row or b"") for row in rows]
    assert found == [{name: row[name] for name in row if name != "b"} for row in expected]


@given(ROWS)
def test_a_property_of_each_row_is_a_column(rows):
    columns = PropertyColumns(pa.array(rows, pa.binary()))
    for name in ("a", "b", "TAGS", "missing"):
        found = [
            None if value is None else str(value, "utf-8", "replace")
            for value in columns.value(name).to_pylist()
        ]
        assert found == [decode(row or b"").get(name) for row in rows]


def test_hundreds_of_different_names_are_found_too():
    rows = [
        b"".join(b"name%d\x01%d\x02" % (number, row) for number in range(row, 3 * row))
        for row in range(100)
    ]
    found = pairs_of(PropertyColumns(pa.array(rows)), (), len(rows))
    assert found == [decode(row) for row in rows]


@given(ROWS)
def test_one_property_alone_is_the_same_column(rows):
    column = pa.array([b"a\x01it\x02", *rows], pa.binary()).slice(1)
    columns = PropertyColumns(column)
    for name in ("a", "b", "TAGS", "missing"):
        assert property_column(column, name).to_pylist() == columns.value(name).to_pylist()


def test_a_longer_name_with_the_same_end_is_another_property():
    rows = pa.array([b"price\x011\x02", b"xprice\x012\x02", b"n\x01price\x02price\x013"])
    assert property_column(rows, "price").to_pylist() == [b"1", None, b"3"]
