"""Rows of a schema as JSON, by columns, and back."""

from __future__ import annotations

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.client.messages import topic_schema
from raymq.client.messages.json_rows import (
    NotOfSchema,
    _decoded_by_arrow,
    _decoded_by_python,
    decode_rows,
    encode_rows,
)
from raymq.client.messages.topic_schema import TAKEN, fits, spark_type
from raymq.store.base.errors import Rejected

INNER = pa.struct([("x", pa.int64()), ("day", pa.date32()), ("raw", pa.binary())])
SCHEMA = pa.schema(
    [
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("id", pa.int64()),
        ("share", pa.float32()),
        ("price", pa.float64()),
        ("note", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("amount", pa.decimal128(38, 18)),
        ("inner", INNER),
        ("lines", pa.list_(pa.field("element", INNER))),
    ]
)
#: what Arrow's reader of JSON does not take
MORE = SCHEMA.append(pa.field("tags", pa.map_(pa.string(), pa.struct([("n", pa.float64())]))))

FULL: dict[str, Any] = {
    "flag": True,
    "tiny": -128,
    "id": 2**63 - 1,
    "share": 1.5,
    "price": 0.1,
    "note": 'a "quote", a \\, a tab\t, \x01 and é😀',
    "raw": b"\x00\xff",
    "day": date(1, 1, 1),
    "at": datetime(9999, 12, 31, 23, 59, 59, 999999, timezone.utc),
    "local": datetime(1, 1, 1),
    "amount": Decimal("1E-18"),
    "inner": {"x": None, "day": date(2024, 2, 29), "raw": b""},
    "lines": [{"x": 1, "day": None, "raw": b"q"}, None, {"x": None, "day": None, "raw": None}],
}
EDGE: dict[str, Any] = {
    **FULL,
    "flag": False,
    "id": -(2**63),
    "price": 1e308,
    "note": "",
    "at": datetime(1, 1, 1, tzinfo=timezone.utc),
    "amount": Decimal("-99999999999999999999.999999999999999999"),
    "lines": [],
}
EMPTY: dict[str, Any] = dict.fromkeys(SCHEMA.names)
ROWS = [FULL, EMPTY, EDGE, FULL, EDGE]


def batch(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def encode(rows: pa.RecordBatch) -> pa.Array:
    return encode_rows(rows.columns, rows.schema)


@pytest.mark.parametrize("decode", [decode_rows, _decoded_by_arrow, _decoded_by_python])
@pytest.mark.parametrize(("first", "count"), [(0, 5), (1, 3), (4, 1), (0, 0)])
def test_every_type_comes_back_also_of_a_part_of_a_batch(
    decode: Any, first: int, count: int
) -> None:
    rows = batch(ROWS, SCHEMA).slice(first, count)
    found = decode(encode(rows), SCHEMA)
    for column in found:
        column.validate(full=True)
    back = pa.RecordBatch.from_arrays(found, schema=SCHEMA)
    assert back.to_pylist() == rows.to_pylist()


def test_maps_and_floats_that_are_no_numbers_come_back() -> None:
    odd = [[('k"', {"n": float("inf")}), ("empty", None)], None, []]
    rows = batch([{**FULL, "tags": each, "price": float("-inf")} for each in odd], MORE)
    for part in (rows, rows.slice(1)):
        back = pa.RecordBatch.from_arrays(decode_rows(encode(part), MORE), schema=MORE)
        assert back.to_pylist() == part.to_pylist()


def test_a_row_is_one_json_object_without_its_nulls() -> None:
    first, second = encode(batch([FULL, EMPTY], SCHEMA)).to_pylist()
    assert second == b"{}"
    value = json.loads(first)
    assert list(value) == SCHEMA.names
    assert (value["at"], value["local"], value["raw"], value["inner"]) == (
        "9999-12-31T23:59:59.999999Z",
        "0001-01-01T00:00:00.000000",
        "AP8=",
        {"day": "2024-02-29", "raw": ""},
    )
    assert value["note"] == FULL["note"]


def test_rows_of_other_programs_may_have_spaces_other_zones_and_unknown_fields() -> None:
    text = b'{ "id": 7,\n "new": {"a": [1]}, "at": "2024-01-01T02:00:00+02:00", "amount": "1.5" }'
    found = dict(zip(SCHEMA.names, decode_rows(pa.array([text, None]), SCHEMA), strict=True))
    assert found["id"].to_pylist() == [7, None]
    assert found["at"][0].as_py() == datetime(2024, 1, 1, tzinfo=timezone.utc)
    assert found["amount"][0].as_py() == Decimal("1.5")


@pytest.mark.parametrize("rows", [1, 20])
def test_a_body_has_one_meaning_whatever_the_size_of_its_batch(rows: int) -> None:
    schema = pa.schema([("at", pa.timestamp("us")), ("text", pa.string())])
    bodies = pa.array([b'{"at":"2020-01-01T00:00:00+02:00","text":"x"}'] * rows, pa.binary())
    assert decode_rows(bodies, schema)[0][0].as_py() == datetime(2019, 12, 31, 22)
    with pytest.raises(NotOfSchema, match="utf-8"):
        decode_rows(pa.array([b'{"text":"\xff"}'] * rows, pa.binary()), schema)


KINDS = [
    pa.bool_(),
    *(pa.int8(), pa.int32(), pa.int64()),
    *(pa.float32(), pa.float64()),
    *(pa.string(), pa.binary()),
    *(pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
    *(pa.decimal128(*each) for each in ((38, 18), (9, 2), (5, 0), (38, 38), (38, 0))),
]
NESTED = [
    *KINDS,
    *(pa.list_(pa.field("element", kind)) for kind in KINDS),
    *(pa.struct([("a", kind)]) for kind in KINDS),
]
DIGITS = st.text("0123456789", min_size=1, max_size=4) | st.integers(1, 45).map(lambda n: "7" * n)
NUMBERS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-"]),
    DIGITS.map(lambda text: text.lstrip("0") or "0"),
    st.just("") | DIGITS.map(".{}".format),
    st.just("")
    | st.integers(-45, 45).map("e{}".format)
    | st.sampled_from(["e309", "E+5", "e-400"]),
)
TIMES = st.builds(
    "{}-{}-{}{}{}".format,
    st.sampled_from(["0000", "0001", "1969", "2024", "9999", "10000", "24"]),
    st.sampled_from(["01", "12", "13", "1"]),
    st.sampled_from(["01", "31", "29"]),
    st.sampled_from(["", "T00", " 23:59", "T00:00:00", "T23:59:59.999999", "T24:00:00", "T1:2:3"])
    | st.integers(0, 10**9).map("T12:00:00.{}".format),
    st.sampled_from(["", "Z", "z", "+05:30", "-0530", "+05", "-23:59", "+24:00", "+05:30:15"]),
)
TEXTS = st.one_of(
    NUMBERS,
    TIMES,
    st.sampled_from(
        ["", "a", "NaN", "-Infinity", "YQ==", "YQ", "1_000", " 1", "+1", ".5", "5.", "\u0661"]
    ),
)
LITERALS = st.one_of(
    NUMBERS,
    TEXTS.map(json.dumps),
    st.sampled_from(["true", "false", "null", "-0", "-0.0", "NaN", "Infinity", "[]", "{}", "01"]),
)


def read(bodies: list[bytes], schema: pa.Schema) -> tuple[list[str], int | None]:
    """The values up to the first body that is not of the schema, as texts that tell -0.0 from 0.0; that body's row."""
    try:
        (column,) = decode_rows(pa.array(bodies, pa.binary()), schema)
    except NotOfSchema as error:
        return read(bodies[: error.row], schema)[0], error.row
    column.validate(full=True)
    return [repr(value) for value in column.to_pylist()], None


@settings(max_examples=600)
@given(st.sampled_from(NESTED), st.lists(LITERALS, min_size=1, max_size=3), st.integers(0, 40))
def test_a_value_is_read_alike_alone_and_with_others(
    kind: pa.DataType, literals: list[str], others: int
) -> None:
    schema = pa.schema([pa.field("x", kind)])
    shape = {pa.types.is_list: '{"x":[%s]}', pa.types.is_struct: '{"x":{"a":%s}}'}
    form = next((text for is_kind, text in shape.items() if is_kind(kind)), '{"x":%s}')
    bodies = [(form % literal).encode() for literal in literals]

    alone: list[str] = []
    bad = None
    for row, body in enumerate(bodies):
        values, fault = read([body], schema)
        if fault is not None:
            bad = row
            break
        alone += values
    assert read([*bodies, *[b"{}"] * others], schema) == (
        alone if bad is not None else alone + ["None"] * others,
        bad,
    )


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    ("kind", "literal"),
    [
        (pa.decimal128(38, 18), "1e30"),
        (pa.decimal128(9, 2), "12345678.50"),
        (pa.decimal128(5, 0), "1e-39"),
        (pa.decimal128(5, 0), "NaN"),
        (pa.float64(), "1e309"),
        (pa.float64(), "1.0e309"),
        (pa.float32(), "3.5e38"),
        (pa.timestamp("us"), '"0000-12-31T23:59:59"'),
        (pa.timestamp("us"), '"9999-12-31T23:59:59-05:00"'),
        (pa.date32(), '"0000-01-01"'),
    ],
    ids=str,
)
def test_a_value_that_its_column_cannot_hold_is_refused(
    kind: pa.DataType, literal: str, rows: int
) -> None:
    bodies = pa.array([b'{"x":%b}' % literal.encode()] * rows, pa.binary())
    with pytest.raises(NotOfSchema, match="column x") as caught:
        decode_rows(bodies, pa.schema([pa.field("x", kind)]))
    assert caught.value.row == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"tiny":300}', "column tiny"),
        (b'{"id":1.5}', "column id"),
        (b'{"id":1}{"id":2}', "Extra data"),
        (b'{"note":1}', "column note"),
        (b'{"at":"yesterday"}', "column at"),
        (b'{"raw":"x"}', "column raw"),
        (b'{"inner":{"x":"1"}}', "column inner"),
        (b'{"lines":{}}', "column lines"),
        (b'{"amount":1e40}', "column amount"),
        (b'{"flag":1}', "column flag"),
        (b'{"price":"dear"}', "column price"),
        (b"[1]", "not an object"),
        (b"plain text", "Expecting value"),
        (b"", "Expecting value"),
        (b'{"x":' + b"[" * 100_000, "recursion"),
        (b"\xff", "utf-8"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_body_that_is_no_row_is_named_with_its_place_and_column(text: bytes, reason: str) -> None:
    bodies = pa.array([b"{}", text, b"{}"], pa.binary())
    with pytest.raises(NotOfSchema, match=reason) as caught:
        decode_rows(bodies, SCHEMA)
    assert caught.value.row == 1


def test_a_schema_is_the_same_after_its_json() -> None:
    assert topic_schema.from_json(topic_schema.to_json(MORE)).equals(MORE)
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    assert topic_schema.from_json(topic_schema.to_json(strict)).equals(strict)


@pytest.mark.parametrize(
    ("field", "named", "advice"),
    [
        (pa.field("n", pa.uint8()), "n", "cast it to one of"),
        (pa.field("t", pa.timestamp("ns")), "t", "cast it to one of"),
        (pa.field("s", pa.struct([("u", pa.uint8())])), "s.u", "cast it to one of"),
        (pa.field("m", pa.map_(pa.int32(), pa.int32())), "m", "cast it to one of"),
        (pa.field("s", pa.struct([pa.field("u", pa.int8(), False)])), "s.u", "make it nullable"),
        (pa.field("Offset", pa.int64()), "Offset", "rename it"),
        (pa.field("ID", pa.int64()), "id", "rename it"),
        (pa.field("", pa.int64()), "schema", "rename it"),
    ],
    ids=str,
)
def test_a_column_that_a_schema_cannot_have_is_named_with_what_to_do(
    field: pa.Field, named: str, advice: str
) -> None:
    with pytest.raises(Rejected, match=advice) as caught:
        topic_schema.to_json(pa.schema([pa.field("id", pa.int64()), field]))
    assert caught.value.field == named


def test_no_column_of_a_read_or_write_can_be_one_of_a_schema() -> None:
    from raymq.client.messages.columns import MESSAGE_SCHEMA
    from raymq.cluster.ray_data.topic_source import SCHEMA as RAY_SCHEMA
    from raymq.spark.columns import COLUMNS
    from raymq.spark.sink_columns import COLUMNS as WRITTEN

    names = {*MESSAGE_SCHEMA.names, *RAY_SCHEMA.names, *COLUMNS, *WRITTEN}
    assert {name.lower() for name in names} <= TAKEN


@pytest.mark.parametrize(
    ("have", "want", "expected"),
    [
        (pa.int64(), pa.int8(), True),
        (pa.float32(), pa.float64(), True),
        (pa.float64(), pa.float32(), False),
        (pa.int64(), pa.float64(), False),
        (pa.large_string(), pa.string(), True),
        (pa.binary(), pa.string(), False),
        (pa.timestamp("ns", tz="Europe/Berlin"), pa.timestamp("us", tz="UTC"), True),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC"), False),
        (pa.null(), INNER, True),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), True),
        (pa.large_list(pa.int64()), pa.list_(pa.int32()), True),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())]), False),
    ],
    ids=str,
)
def test_a_type_fits_if_a_cast_changes_no_value(
    have: pa.DataType, want: pa.DataType, expected: bool
) -> None:
    assert fits(have, want) is expected


def test_sparks_name_of_a_type_quotes_the_names_in_it() -> None:
    kind = pa.struct([("a b", pa.list_(pa.int64())), ("d", pa.decimal128(9, 2))])
    assert spark_type(kind) == "struct<a b:array<bigint>,d:decimal(9,2)>"
    assert spark_type(kind, quoted=True) == "struct<`a b`:array<bigint>,`d`:decimal(9,2)>"
