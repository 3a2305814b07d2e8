"""Properties encoded by columns are those that a dict of each row would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.client.messages.columns import put_batch
from raymq.client.messages.message import SYSTEM_PROPERTIES
from raymq.client.messages.property_rows import encode_rows
from raymq.store.base.errors import Rejected
from raymq.store.records.properties import decode, encode

#: what a row of a column has: pairs, or null
Pairs = Sequence[tuple[bytes | None, bytes | None]] | None
MAPS = pa.map_(pa.binary(), pa.binary())
HEADERS = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))


def as_maps(rows: Sequence[Pairs]) -> pa.Array:
    """A map has no null name."""
    pairs = [None if row is None else [(name or b"", value) for name, value in row] for row in rows]
    return pa.array(pairs, MAPS)


def as_headers(rows: Sequence[Pairs]) -> pa.Array:
    values = [
        None if row is None else [{"key": name, "value": value} for name, value in row]
        for row in rows
    ]
    return pa.array(values, HEADERS)


def expected(row: int, properties: Pairs, headers: Pairs) -> bytes | None:
    """What a dict makes of the pairs of a row. Raises: Rejected, UnicodeDecodeError."""
    found: dict[str, str] = {}
    by_name = sorted(properties or (), key=lambda pair: pair[0] or b"")
    for pairs in (by_name, headers or ()):
        own = [name or b"" for name, _ in pairs]
        if len(set(own)) < len(own):
            raise Rejected("two of one name")
        for name, value in pairs:
            text = (name or b"").decode()
            if text in SYSTEM_PROPERTIES:
                raise Rejected("system")
            found[text] = (value or b"").decode()
    return encode(found) if found else None


NAMES = st.sampled_from(
    [b"a", b"b", "ä".encode(), b"long-name"] * 4 + [b"", None, b"TAGS", b"\x01", b"\xff"]
)
VALUES = st.sampled_from(
    [b"1", b"22", "ö".encode(), b"\x00\x03"] * 6 + [b"", None, b"x\x02", b"\xc3"]
)
ROWS = st.lists(st.none() | st.lists(st.tuples(NAMES, VALUES), max_size=3), min_size=2, max_size=6)


@settings(max_examples=400)
@given(ROWS, ROWS, st.integers(0, 1))
def test_columns_give_what_a_dict_of_each_row_gives(
    properties: list[Pairs], headers: list[Pairs], skipped: int
) -> None:
    rows = min(len(properties), len(headers))
    # A slice begins in the middle of its buffers.
    columns = {
        "properties": as_maps(properties[:rows]).slice(skipped),
        "headers": as_headers(headers[:rows]).slice(skipped),
    }
    wanted: list[bytes | None] = []
    for row, pairs in enumerate(zip(properties[skipped:rows], headers[skipped:rows], strict=True)):
        try:
            wanted.append(expected(row, *pairs))
        except (Rejected, UnicodeDecodeError):
            with pytest.raises(Rejected, match=f"^row {row}: ") as refused:
                encode_rows(columns)
            assert refused.value.row == row
            assert refused.value.field in columns
            return
    assert encode_rows(columns).to_pylist() == wanted


def test_pairs_of_a_map_come_by_name_and_headers_in_their_order() -> None:
    rows: list[Pairs] = [
        [(b"b", b"2"), (b"a", b"1"), (b"ab", b"3")],
        None,
        [(b"b", b"1"), (b"a", b"4")],
        [(b"z", b"5")],
    ]
    assert encode_rows({"properties": as_maps(rows)}).to_pylist() == [
        b"a\x011\x02ab\x013\x02b\x012\x02",
        None,
        b"a\x014\x02b\x011\x02",
        b"z\x015\x02",
    ]
    assert encode_rows({"headers": as_headers(rows)}).to_pylist()[0] == (
        b"b\x012\x02a\x011\x02ab\x013\x02"
    )


def test_a_header_replaces_a_property_in_its_place() -> None:
    properties = as_maps([[(b"a", b"1"), (b"b", b"2")], [(b"a", b"3")]])
    headers = as_headers([[(b"a", b"9"), (b"c", b"4")], None])
    found = encode_rows({"properties": properties, "headers": headers}).to_pylist()
    assert found == [b"a\x019\x02b\x012\x02c\x014\x02", b"a\x013\x02"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (b"TAGS", b"x", "row 1: property TAGS belongs to the system"),
        (b"a", b"\xff", "row 1: a in headers is not UTF-8"),
        (b"a\xff", b"x", "is not UTF-8"),
        (b"a", None, "row 1: property 'a' has an empty value, or null"),
        (b"a", b"", "leave it out of headers, or give it a text"),
        (b"b", b"2", "row 1: two pairs of headers have the key 'b', .* join their values"),
        (b"b", b"1", "two pairs of headers have the key 'b'"),
        (None, b"x", "row 1: property '' has an empty name"),
        (b"a", b"x\x02", "row 1: property 'a' has the character"),
        (b"a\x01", b"x", "has the character"),
    ],
)
def test_a_pair_that_the_log_cannot_hold_is_refused_with_its_row(
    name: bytes | None, value: bytes | None, text: str
) -> None:
    headers = as_headers([[(b"a", b"1")], [(b"b", b"1"), (name, value)]])
    with pytest.raises(Rejected, match=text) as refused:
        encode_rows({"headers": headers})
    assert (refused.value.row, refused.value.field) == (1, "headers")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[("a", "1")], None], pa.map_(pa.large_string(), pa.string())),
        pa.array(
            [[{"value": b"1", "key": "a"}], None],
            pa.large_list(pa.struct([("value", pa.large_binary()), ("key", pa.large_string())])),
        ),
    ],
)
def test_pairs_may_be_maps_or_lists_of_large_texts(column: Any) -> None:
    assert encode_rows({"headers": column}).to_pylist() == [b"a\x011\x02", None]


@pytest.mark.parametrize("column", [pa.nulls(2), pa.array([[], []])])
def test_rows_without_pairs_have_no_properties(column: Any) -> None:
    assert encode_rows({"headers": column}).to_pylist() == [None, None]
    assert encode_rows({"headers": column.slice(0, 0)}).to_pylist() == []


def test_a_map_of_send_batch_is_encoded_the_same_way() -> None:
    kind = pa.map_(pa.string(), pa.string())
    rows = pa.table(
        {"body": ["x", "y"], "properties": pa.array([[("b", "1"), ("a", "2")], None], kind)}
    )
    batch, _ = put_batch(rows, now_ms=0)
    assert [each and decode(each) for each in batch.column("properties").to_pylist()] == [
        {"a": "2", "b": "1"},
        None,
    ]
    twice = pa.array([[("a", "1"), ("a", "2")]], kind)
    with pytest.raises(Rejected, match="row 0: two pairs of properties have the key 'a'"):
        put_batch(pa.table({"body": ["x"], "properties": twice}), now_ms=0)
    with pytest.raises(Rejected, match="row 0: property 'a' has an empty value"):
        put_batch(
            pa.table({"body": ["x"], "properties": pa.array([[("a", None)]], kind)}), now_ms=0
        )
