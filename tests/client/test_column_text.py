"""Columns of a schema as text, for the command line."""

from __future__ import annotations

import pyarrow as pa
import pytest

from raymq.client.messages.column_text import column_of, column_text
from raymq.client.messages.topic_schema import DEPTH_MAX, SPARK_TYPES, to_json
from raymq.store.base.errors import Rejected


@pytest.mark.parametrize(
    ("text", "field"),
    [
        *((f"c:{name}", pa.field("c", kind)) for name, kind in SPARK_TYPES.items()),
        ("id:bigint not null", pa.field("id", pa.int64(), nullable=False)),
        ("a b:decimal(9,2)", pa.field("a b", pa.decimal128(9, 2))),
        ("c:array<date>", pa.field("c", pa.list_(pa.field("element", pa.date32())))),
        ("c:map<string,array<int>>", pa.field("c", pa.map_(pa.string(), pa.list_(pa.int32())))),
        (
            "c:struct<a:decimal(3,1),b:struct<x:int,y:map<string,date>>> not null",
            pa.field(
                "c",
                pa.struct(
                    [
                        ("a", pa.decimal128(3, 1)),
                        (
                            "b",
                            pa.struct(
                                [("x", pa.int32()), ("y", pa.map_(pa.string(), pa.date32()))]
                            ),
                        ),
                    ]
                ),
                nullable=False,
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_column_becomes_text_and_text_a_column(text: str, field: pa.Field) -> None:
    # Arrow calls the elements of a list as it likes.
    assert to_json(pa.schema([column_of(text)])) == to_json(pa.schema([field]))
    assert column_text(field) == text


def test_case_and_blanks_do_not_matter() -> None:
    assert column_text(column_of(" id : BIGINT  Not  NULL ")) == "id:bigint not null"
    spaced = "c: Struct < a : Array<INT> , b : decimal( 9, 2 ) >"
    assert column_text(column_of(spaced)) == "c:struct<a:array<int>,b:decimal(9,2)>"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("id", "column"),
        (":bigint", "column"),
        ("", "column"),
        ("id:", "id"),
        ("id:int64", "id"),
        ("id:bigint null", "id"),
        ("d:decimal(39,2)", "d"),
        ("d:decimal(3,4)", "d"),
        ("d:decimal", "d"),
        ("m:map<int,string>", "m"),
        ("m:map<string>", "m"),
        ("l:array<int", "l"),
        ("l:array<int,int>", "l"),
        ("s:struct<>", "column"),
        ("s:struct<a:int,b>", "column"),
        ("s:struct<a:text>", "a"),
    ],
)
def test_another_text_is_refused_saying_what_there_is(text: str, field: str) -> None:
    with pytest.raises(Rejected, match="give") as caught:
        column_of(text)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["array<", "map<string,", "struct<a:"])
def test_a_type_is_nested_as_deep_as_a_schema_allows_and_no_deeper(kind: str) -> None:
    def nested(times: int) -> str:
        return "c:" + kind * times + "int" + ">" * times

    assert to_json(pa.schema([column_of(nested(DEPTH_MAX - 1))]))
    for times in (DEPTH_MAX, 5_000):
        with pytest.raises(Rejected, match=f"nested more than {DEPTH_MAX} times") as caught:
            column_of(nested(times))
        assert caught.value.limit == DEPTH_MAX
