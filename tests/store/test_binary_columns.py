"""Columns of bytes seen as their values."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pytest

from raymq.store.base.errors import Rejected
from raymq.store.records import binary_columns
from raymq.store.records.binary_columns import binary_array, null_where, one_value
from raymq.store.records.keys import keyed_column
from raymq.store.records.record import PUT_SCHEMA, batch_bytes, check_put
from raymq.store.records.small_batch import SMALL_BYTES_MAX


@pytest.mark.parametrize(
    ("values", "one"),
    [
        ([b"same"] * 3, b"same"),
        ([b"alone"], b"alone"),
        ([b"ab", b"ab", b"ac"], None),
        ([b"a", b"aaa", b"aa"], None),
        ([b"aa", b"aa", b"aaa"], None),
        ([b"aa", None, b"aa"], None),
        ([b"", b""], None),
        ([], None),
    ],
)
def test_a_column_has_one_value_when_all_rows_have_it(values, one):
    assert one_value(pa.array(values, pa.binary())) == one
    inside = pa.array([b"before", *values, b"behind"], pa.binary())
    assert one_value(inside.slice(1, len(values))) == one


@pytest.mark.parametrize("value", [b"TAGS\x01x\x02", b"a\x01b", b"k\x01v\x02TAGS\x01x\x02"])
def test_bad_properties_of_all_rows_are_refused_as_those_of_one(value):
    rows = 5
    columns = [
        pa.array([b"body"] * rows, pa.binary()),
        pa.nulls(rows, pa.string()),
        pa.array([value] * rows, pa.binary()),
        pa.array([1] * rows),
    ]
    with pytest.raises(Rejected) as caught:
        check_put("t", pa.record_batch(columns, schema=PUT_SCHEMA), max_message_bytes=100)
    assert caught.value.field == "properties"
    assert caught.value.row == 0


def put_batch_of(values: list[bytes | None]) -> pa.RecordBatch:
    """Messages with these properties; the bodies are too large for the quick way of a few small rows."""
    rows = len(values)
    bodies = pa.array([b"x" * SMALL_BYTES_MAX] * rows, pa.binary())
    columns = [
        bodies,
        pa.nulls(rows, pa.string()),
        pa.array(values, pa.binary()),
        pa.array([1] * rows),
    ]
    return pa.record_batch(columns, schema=PUT_SCHEMA)


@pytest.mark.parametrize("is_checked", [False, True])
def test_part_of_a_batch_counts_without_the_rest(is_checked: bool) -> None:
    batch = put_batch_of([None, b"a\x01b\x02", None, None, b""])
    for part in (batch, batch.slice(1, 2), batch.slice(4)):
        size = batch_bytes(part, is_checked=is_checked)
        assert abs(size - part.nbytes) <= part.nbytes / 8


@pytest.mark.parametrize("before", [[], [b""], [None], [b"", None, b"a\x01b\x02", b""]])
@pytest.mark.parametrize("after", [[], [b""], [b"a\x01b"]])
def test_the_first_row_whose_properties_do_not_end_is_refused(
    before: list[bytes | None], after: list[bytes | None]
) -> None:
    batch = put_batch_of([*before, b"a\x01bad", *after])
    for each in (batch, pa.concat_batches([put_batch_of([b"a\x01b\x02"]), batch]).slice(1)):
        with pytest.raises(Rejected, match="do not end with") as caught:
            check_put("t", each, max_message_bytes=SMALL_BYTES_MAX)
        assert caught.value.row == len(before)


@pytest.mark.parametrize(
    "values", [[b""], [b"", None], [None, b"", b"a\x01b\x02"], [b"a\x01b\x02", b"", None]]
)
def test_empty_properties_need_no_separator(values: list[bytes | None]) -> None:
    check_put("t", put_batch_of(values), max_message_bytes=SMALL_BYTES_MAX)


def test_rows_of_one_value_have_keys_where_it_has_some():
    none, some = b"a\x01b\x02", b"KEYS\x01k\x02"
    assert keyed_column(pa.array([none] * 3, pa.binary())) is None
    keyed = keyed_column(pa.array([some] * 3, pa.binary()))
    assert keyed is not None
    assert keyed.data == some * 3


@pytest.mark.parametrize("values", [[], [b""], [b"a"], [b"", b"abc", b"", b"de"], [b"x" * 70_000]])
def test_a_column_of_bytes_is_what_arrow_makes_of_them(values: list[bytes]) -> None:
    made = binary_array(values)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.binary()))
    assert made.null_count == 0


@pytest.mark.parametrize(
    "value",
    ["text", None, 5, [1], memoryview(array("i", [1, 2]))],
    ids=["text", "none", "number", "list", "integers"],
)
def test_a_column_of_bytes_takes_nothing_else(value: Any) -> None:
    with pytest.raises(TypeError):
        binary_array([b"a", value])


def test_a_column_of_bytes_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary_columns, "_OFFSET_MAX", 5)
    assert len(binary_array([b"abc", b"de"])) == 2
    with pytest.raises(pa.ArrowInvalid, match="6 bytes of values"):
        binary_array([b"abc", b"def"])


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()], ids=["binary", "string"])
def test_rows_of_a_mask_become_null_in_a_slice_too(kind: pa.DataType) -> None:
    values = pa.array(["skipped", "a", None, "", "long", "b"], kind).slice(1)
    mask = pa.array([False, False, True, False, None])
    found = null_where(mask, values)
    found.validate(full=True)
    assert found.equals(pa.array(["a", None, None, "long", None], kind))
