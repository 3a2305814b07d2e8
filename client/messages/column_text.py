"""A column of a schema as text, such as `id:bigint not null`: for the command line, with the types' names in Spark."""

from __future__ import annotations

import re

import pyarrow as pa

from raymq.store.base.errors import Rejected

from .topic_schema import DEPTH_MAX, SPARK_TYPES, spark_type

_FORM = "NAME:TYPE or 'NAME:TYPE not null'"
_ALLOWED = f"{', '.join(SPARK_TYPES)}, decimal(P,S), array<T>, map<string,T>, struct<NAME:T,...>"
_NOT_NULL = re.compile(r"(?i)\s+not\s+null\s*$")
_DECIMAL = re.compile(r"(?i)decimal\(\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\)")
_NESTED = re.compile(r"(?is)(array|map|struct)\s*<(.*)>")


def column_of(text: str) -> pa.Field:
    """The column that a text names. Raises: Rejected for another text or type, saying which there are."""
    declared, nullable = _NOT_NULL.sub("", text), _NOT_NULL.search(text) is None
    name, kind = _named(text, declared, 1)
    return pa.field(name, kind, nullable=nullable)


def column_text(field: pa.Field) -> str:
    """The inverse of `column_of`."""
    return f"{field.name}:{spark_type(field.type)}" + ("" if field.nullable else " not null")


def _named(place: str, text: str, depth: int) -> tuple[str, pa.DataType]:
    """A name with its type. Args: `place`: the whole text, for an error. `depth`: of the type in its column."""
    name, colon, kind = text.partition(":")
    if not name.strip() or not colon:
        message = f"{place!r} is not a column; give {_FORM}, such as id:bigint"
        raise Rejected(message, field="column", limit=_FORM, found=text)
    return name.strip(), _type(name.strip(), kind.strip(), depth)


def _type(place: str, text: str, depth: int) -> pa.DataType:
    if depth > DEPTH_MAX:
        message = f"column {place} is nested more than {DEPTH_MAX} times; give a flatter type"
        raise Rejected(message, field=place, limit=DEPTH_MAX)
    kind = SPARK_TYPES.get(text.lower())
    if kind is not None:
        return kind

    decimal = _DECIMAL.fullmatch(text)
    if decimal and 1 <= int(decimal[1]) <= 38 and int(decimal[2]) <= int(decimal[1]):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))

    nested = _NESTED.fullmatch(text)
    outer, parts = (nested[1].lower(), _parts(nested[2])) if nested else ("", [])
    if outer == "array" and len(parts) == 1:
        return pa.list_(pa.field("element", _type(place, parts[0], depth + 1)))
    if outer == "map" and len(parts) == 2 and parts[0].lower() == "string":
        return pa.map_(pa.string(), _type(place, parts[1], depth + 1))
    if outer == "struct":
        return pa.struct([_named(f"{place}:{text}", each, depth + 1) for each in parts])

    message = f"column {place} has the type {text!r}; give one of {_ALLOWED}"
    raise Rejected(message, field=place, limit=_ALLOWED, found=text)


def _parts(text: str) -> list[str]:
    """What the commas outside of brackets divide."""
    depth, begin, found = 0, 0, []
    for at, letter in enumerate(text):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    return [*found, text[begin:].strip()]
