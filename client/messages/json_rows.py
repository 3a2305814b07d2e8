"""Rows of a schema as JSON, one object each, and back: by columns, without a Python object for each row.

The form is that of Spark's `to_json` and `from_json`: a null field is left out, binary is base64, a time has
microseconds and, unless it is local, ends in Z. Python reads what Arrow's reader does not take: maps, and floats that
are "NaN" or "Infinity". Both readers follow one rule: a body has one meaning, whatever is read together with it. A
value that its column cannot hold is refused. Only floats are rounded, and times cut after their microseconds.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.records.binary_columns import null_where

#: what a JSON text must not have as it is
_TO_ESCAPE = r'["\\\x00-\x1f]'
_CONTROLS = r"[\x00-\x1f]"
#: Arrow's reader costs some 200 us, and Python 10 to 20 us a row
_ARROW_ROWS_MIN = 16
_NULL = "null"

#: texts that are decimals, dates and times: at least those of Arrow's reader. What Python takes differs between its
#: versions
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)"
    r"(?:[ T](\d\d)(?::(\d\d)(?::(\d\d)(?:\.(\d+))?)?)?(?:Z|([+-])(\d\d)(?::?(\d\d))?)?)?",
    re.ASCII,
)
#: JSON has it, Python's integers have not
_MINUS_ZERO = Decimal("-0")

#: the first and the last day, and microsecond, of the years 1 to 9999, since 1970
_DAYS = (-719_162, 2_932_896)
_MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)


class NotOfSchema(ValueError):
    """A body is not a row of the schema."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


# --- encode ---------------------------------------------------------------------------------------


def encode_rows(columns: list[pa.Array], schema: pa.Schema) -> pa.Array:
    """Rows as binary JSON. Args: `columns`: of the types of the schema."""
    fields = [
        _field(field.name, _encoded(column)) for field, column in zip(schema, columns, strict=True)
    ]
    return _object(fields).cast(pa.binary())


def _object(fields: list[pa.Array]) -> pa.Array:
    """Fields as objects. A null field is left out."""
    # Arrow's `null_handling="skip"` drops a row of nulls altogether. So each field brings its comma.
    texts = pc.binary_join_element_wise(
        "{", *fields, "}", "", null_handling="replace", null_replacement=""
    )
    return pc.replace_substring(texts, "{,", "{", max_replacements=1)


def _field(name: str, values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(f",{json.dumps(name, ensure_ascii=False)}:", values, "")


def has_times_outside(values: pa.Array) -> bool:
    """Whether a date or time in a column, or in a part of it, is outside of the years 1 to 9999, as JSON has them."""
    kind = values.type
    types = pa.types
    if types.is_timestamp(kind) or types.is_date32(kind):
        low, high = _DAYS if types.is_date32(kind) else _MICROSECONDS
        number = pa.int32() if types.is_date32(kind) else pa.int64()
        found = pc.min_max(values.view(number))
        return bool(values.null_count < len(values)) and not (
            low <= found["min"].as_py() and found["max"].as_py() <= high
        )
    if types.is_struct(kind):
        return any(has_times_outside(child) for child in values.flatten())
    if types.is_map(kind):
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return has_times_outside(values.items.slice(first, last - first))
    return types.is_list(kind) and has_times_outside(values.flatten())


def _encoded(values: pa.Array) -> pa.Array:
    """The JSON text of each value; null for a null."""
    kind = values.type
    types = pa.types
    if types.is_string(kind):
        return _quoted(_escaped(values))
    if types.is_binary(kind):
        texts = [None if v is None else base64.b64encode(v).decode() for v in values.to_pylist()]
        return _quoted(pa.array(texts, pa.string()))
    if types.is_floating(kind):
        return _floats(values)

    if types.is_timestamp(kind):
        return _times(values)
    if types.is_date32(kind):
        return _quoted(values.cast(pa.string()))

    if types.is_struct(kind):
        fields = [
            _field(field.name, _encoded(child))
            for field, child in zip(kind, values.flatten(), strict=True)
        ]
        return _where_valid(values, _object(fields))
    if types.is_map(kind):
        return _map(values)
    if types.is_list(kind):
        return _joined(values, _encoded(values.flatten()), "[", "]")
    # Booleans, integers and decimals are written as Arrow writes them.
    return values.cast(pa.string())


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _escaped(texts: pa.Array) -> pa.Array:
    if not pc.any(pc.match_substring_regex(texts, _TO_ESCAPE)).as_py():
        return texts
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
        texts = pc.replace_substring(texts, plain, escaped)
    has_controls = pc.match_substring_regex(texts, _CONTROLS).fill_null(False)
    if not pc.any(has_controls).as_py():
        return texts
    for number in range(32):
        escaped = json.dumps(chr(number))[1:-1]
        texts = pc.replace_substring(texts, chr(number), escaped)
    return texts


def _floats(values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())
    is_finite = pc.is_finite(values)
    if pc.all(is_finite.fill_null(True)).as_py():
        return texts
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    for arrows, javas in names.items():
        texts = pc.if_else(pc.equal(texts, arrows), javas, texts)
    return pc.if_else(is_finite, texts, _quoted(texts))


def _times(values: pa.Array) -> pa.Array:
    # Arrow takes five times as long for the text of a time with a zone.
    texts = pc.replace_substring(values.view(pa.timestamp("us")).cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise('"', texts, '"' if values.type.tz is None else 'Z"', "")


def _map(values: pa.Array) -> pa.Array:
    # Arrow has no functions on maps.
    key, item = values.type.key_field, values.type.item_field
    lists = values.cast(pa.list_(pa.struct([key, item])))
    keys, items = lists.flatten().flatten()
    texts = pc.binary_join_element_wise(
        _quoted(_escaped(keys)), _encoded(items).fill_null(_NULL), ":"
    )
    return _joined(lists, texts, "{", "}")


def _joined(values: pa.Array, items: pa.Array, opening: str, closing: str) -> pa.Array:
    """The texts of the items of each list or map as one text. Args: `items`: of all valid lists, in order."""
    counts = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), items.fill_null(_NULL))
    body = pc.binary_join(lists, ",")
    return _where_valid(values, pc.binary_join_element_wise(opening, body, closing, ""))


def _where_valid(values: pa.Array, texts: pa.Array) -> pa.Array:
    return null_where(values.is_null(), texts)


# --- decode ---------------------------------------------------------------------------------------


def decode_rows(bodies: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    """The columns of a schema of JSON rows. A null body is a row of nulls.

    Raises: NotOfSchema for the first body that is not a row of the schema.
    """
    if not len(schema):
        return []
    texts = bodies.fill_null(b"{}")
    if len(texts) >= _ARROW_ROWS_MIN and not any(map(_needs_python, schema.types)):
        found = _decoded_by_arrow(texts, schema)
        if found is not None:
            return found
    return _decoded_by_python(texts, schema)


def _needs_python(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_needs_python(kind.field(at).type) for at in range(kind.num_fields))


def _decoded_by_arrow(texts: pa.Array, schema: pa.Schema) -> list[pa.Array] | None:
    """None: Arrow's reader does not take them, or not one row of each."""
    rows = len(texts)
    if not rows:
        return [pa.array([], field.type) for field in schema]
    # So each body is at least one object, and as many rows as bodies means one row of each body.
    is_object = pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))
    is_line = pc.invert(pc.match_substring_regex(texts, r"[\r\n]"))
    if not pc.all(pc.and_(is_object, is_line)).as_py():
        return None

    try:
        texts.cast(pa.string())
    except pa.ArrowInvalid:
        # Arrow's reader does not notice text that is not UTF-8.
        return None
    lines = pc.binary_join(pa.ListArray.from_arrays([0, rows], texts), b"\n")[0].as_buffer()
    read = pa.schema([pa.field(field.name, _read_type(field.type)) for field in schema])
    # It imports pandas, where that is installed.
    from pyarrow import json as arrow_json

    try:
        table = arrow_json.read_json(
            pa.BufferReader(lines),
            read_options=arrow_json.ReadOptions(
                use_threads=False, block_size=max(lines.size + 1, 64)
            ),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=read, unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != rows:
            return None
        table = table.combine_chunks()
        columns = [_converted(_array(table.column(field.name)), field.type) for field in schema]
        # Python names the row, and tells a literal that is too large from an infinity.
        is_doubtful = any(has_times_outside(each) or _has_infinity(each) for each in columns)
        return None if is_doubtful else columns
    except (pa.ArrowException, ValueError):
        return None


def _has_infinity(values: pa.Array) -> bool:
    """Whether a float in a column, or in a part of it, is infinite."""
    types = pa.types
    if types.is_floating(values.type):
        return bool(pc.any(pc.is_inf(values)).as_py())
    if types.is_struct(values.type):
        return any(map(_has_infinity, values.flatten()))
    return types.is_list(values.type) and _has_infinity(values.flatten())


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _read_type(kind: pa.DataType) -> pa.DataType:
    """The type as which Arrow's reader reads a type: texts for what JSON has as texts and the reader has not."""
    if pa.types.is_binary(kind) or pa.types.is_date32(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _read_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _read_type(each.type)) for each in kind])
    if pa.types.is_decimal(kind):
        # Arrow's reader checks the digits of a literal, and not those of the value: it wraps around without a word.
        # Here 38 digits before and 38 after the point have room. The cast to the column's type checks the value.
        return pa.decimal256(pa.decimal128(38).precision, kind.scale)
    return kind


def _converted(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The inverse of `_read_type`. Raises: ValueError."""
    if values.type == kind:
        return values

    if pa.types.is_binary(kind):
        return pa.array(
            [
                None if text is None else base64.b64decode(text, validate=True)
                for text in values.to_pylist()
            ],
            kind,
        )

    if pa.types.is_list(kind):
        items = _converted(values.flatten(), kind.value_type)
        counts = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), items, type=kind, mask=values.is_null())
    if pa.types.is_struct(kind):
        children = [
            _converted(child, each.type) for child, each in zip(values.flatten(), kind, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=values.is_null())
    return values.cast(kind)


def _decoded_by_python(texts: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    readers = [(field.name, reader_of(field.type)) for field in schema]
    found: list[list[Any]] = [[] for _ in schema]
    for row, text in enumerate(texts.to_pylist()):
        name = ""
        try:
            value = json.loads(text, parse_float=Decimal, parse_int=_parsed_integer)
            if not isinstance(value, dict):
                raise ValueError(f"it is JSON, but {type(value).__name__} and not an object")
            for column, (name, read) in zip(found, readers, strict=True):
                item = value.get(name)
                column.append(None if item is None else read(item))
        except (ValueError, ArithmeticError, RecursionError) as error:
            # A row before it may have a value that its type does not take.
            _all_made([values[:row] for values in found], schema)
            raise NotOfSchema(row, f"column {name}: {error}" if name else str(error)) from None
    return _all_made(found, schema)


def _all_made(columns: list[list[object]], schema: pa.Schema) -> list[pa.Array]:
    """The arrays of all columns. Raises: NotOfSchema for the first row with a value that its type does not take."""
    made: list[pa.Array] = []
    faults: list[NotOfSchema] = []
    for values, field in zip(columns, schema, strict=True):
        try:
            made.append(_made(values, field))
        except NotOfSchema as fault:
            faults.append(fault)
    if faults:
        raise min(faults, key=lambda fault: fault.row)
    return made


def _made(values: Sequence[object], field: pa.Field) -> pa.Array:
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        for row, value in enumerate(values):
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise NotOfSchema(row, f"column {field.name}: {error}") from None
        raise


def _parsed_integer(text: str) -> int | Decimal:
    return _MINUS_ZERO if text == "-0" else int(text)


Reader = Callable[[Any], Any]


def reader_of(kind: pa.DataType) -> Reader:
    """A function that makes of a JSON value what `pa.array` takes for a type; it raises ValueError."""
    types = pa.types

    if types.is_struct(kind):
        fields = [(each.name, reader_of(each.type)) for each in kind]
        return lambda value: {
            name: None if (item := _of(value, dict, kind).get(name)) is None else read(item)
            for name, read in fields
        }
    if types.is_list(kind):
        read_item = reader_of(kind.value_type)
        return lambda value: [
            None if item is None else read_item(item) for item in _of(value, list, kind)
        ]

    if types.is_map(kind):
        read_value = reader_of(kind.item_type)
        return lambda value: [
            (name, None if item is None else read_value(item))
            for name, item in _of(value, dict, kind).items()
        ]

    for is_kind, read in _READERS:
        if is_kind(kind):
            return lambda value: read(value, kind)
    return lambda value: _of(value, str, kind)


def _of(value: object, python: type, kind: pa.DataType) -> Any:
    if type(value) is not python:
        raise ValueError(f"{value!r} is not {kind}")
    return value


def _integer(value: object, kind: pa.DataType) -> int:
    found: int = 0 if value is _MINUS_ZERO else _of(value, int, kind)
    return found


def _float(value: Any, kind: pa.DataType) -> float:
    if isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity"):
        # The literals NaN and Infinity, which JSON does not have, arrive as floats, and no others.
        return float(value)
    if isinstance(value, str | bool | list | dict) or not math.isfinite(found := float(value)):
        raise ValueError(f"{value!r} is not {kind}")
    if pa.types.is_float32(kind):
        # Raises: OverflowError.
        struct.pack("<f", found)
    return found


def _decimal(value: Any, kind: pa.DataType) -> Decimal:
    if isinstance(value, bool | float | list | dict):
        raise ValueError(f"{value!r} is not {kind}")
    if isinstance(value, str) and not _DECIMAL.fullmatch(value):
        raise ValueError(f"{value!r} is not {kind}")
    found = Decimal(value)
    # pyarrow makes 0 of a value far below the scale. Not `normalize`, which rounds to 28 digits.
    sign, digits, exponent = found.as_tuple()
    number = "".join(map(str, digits)).rstrip("0")
    below = -(int(exponent) + len(digits) - len(number)) if number else 0
    if below > kind.scale or (number and len(number) - below + kind.scale > kind.precision):
        raise ValueError(f"{value!r} is not {kind}")
    return found if number else Decimal(0)


def _time(value: object, kind: pa.DataType) -> datetime:
    found = _TIME.fullmatch(_of(value, str, kind))
    if found is None:
        raise ValueError(f"{value!r} is not {kind}")
    *clock, fraction, sign, zone_hours, zone_minutes = found.groups()
    year, month, day, hour, minute, second = (int(each or 0) for each in clock)
    microsecond = int((fraction or "")[:6].ljust(6, "0"))
    at = datetime(year, month, day, hour, minute, second, microsecond)
    if sign is not None:
        hours, minutes = int(zone_hours), int(zone_minutes or 0)
        if hours > 23 or minutes > 59:
            raise ValueError(f"{value!r} is not {kind}")
        ahead = timedelta(hours=hours, minutes=minutes)
        at += ahead if sign == "-" else -ahead
    # As Arrow reads it: a zone is applied. A time without one is UTC where the column has times of UTC.
    return at if kind.tz is None else at.replace(tzinfo=timezone.utc)


def _day(value: Any, kind: pa.DataType) -> date:
    if not _DATE.fullmatch(_of(value, str, kind)):
        raise ValueError(f"{value!r} is not {kind}")
    return date.fromisoformat(value)


_READERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType], Any]], ...] = (
    (pa.types.is_boolean, lambda value, kind: _of(value, bool, kind)),
    (pa.types.is_integer, _integer),
    (pa.types.is_floating, _float),
    (pa.types.is_decimal, _decimal),
    (
        pa.types.is_binary,
        lambda value, kind: base64.b64decode(_of(value, str, kind), validate=True),
    ),
    (pa.types.is_date32, _day),
    (pa.types.is_timestamp, _time),
)
