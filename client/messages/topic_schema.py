"""The schema of a topic: its types, and its form as JSON in the topic's attributes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from raymq.store.base.errors import Rejected, require
from raymq.store.state.topic_schema import check_schema

from .fields import taken_names

#: names that reads and writes give to the other parts of a message
TAKEN = taken_names() | {"timestamptype", "timestamp_type", "headers"}
#: a nested type may be so deep
DEPTH_MAX = 16

_TIME_UTC = pa.timestamp("us", tz="UTC")
#: name in JSON -> type, and the same type's name in Spark
_PLAIN: Mapping[str, tuple[pa.DataType, str]] = {
    "bool": (pa.bool_(), "boolean"),
    "int8": (pa.int8(), "tinyint"),
    "int16": (pa.int16(), "smallint"),
    "int32": (pa.int32(), "int"),
    "int64": (pa.int64(), "bigint"),
    "float32": (pa.float32(), "float"),
    "float64": (pa.float64(), "double"),
    "string": (pa.string(), "string"),
    "binary": (pa.binary(), "binary"),
    "date": (pa.date32(), "date"),
    "timestamp": (_TIME_UTC, "timestamp"),
    "local timestamp": (pa.timestamp("us"), "timestamp_ntz"),
}
#: a type's name in Spark -> the type, of those that have no types in them
SPARK_TYPES = {spark: kind for kind, spark in _PLAIN.values()}
_NAMES = {kind: name for name, (kind, _) in _PLAIN.items()}
#: what a column may be, for texts of errors
_ALLOWED = (
    "bool, int8 to int64, float32, float64, string, binary, date32, timestamp('us', tz='UTC'), timestamp('us'), "
    "decimal128, and struct, list_ and map_(string, ...) of these"
)


def to_json(schema: pa.Schema) -> str:
    """A schema as the attribute of a topic. Raises: Rejected naming a column that it cannot have, and what to do."""
    if not isinstance(schema, pa.Schema):
        message = f"schema is {type(schema).__name__}; give pa.schema([(name, type), ...])"
        raise Rejected(message, field="schema", limit="pa.Schema")
    if not len(schema):
        raise Rejected("the schema has no column", field="schema", limit="1 or more")
    return json.dumps([_column(field, schema) for field in schema], separators=(",", ":"))


def more_columns(columns: Sequence[Mapping[str, object]], field: pa.Field) -> str:
    """The attribute of a topic with one more column, or as it is, if it has that column.

    Args: `columns`: as an answer of `Cluster.topics` has them.
    Raises: Rejected as `to_json`, and for a column that is not nullable.
    """
    if not isinstance(field, pa.Field):
        message = f"the column is {type(field).__name__}; give pa.field(name, type)"
        raise Rejected(message, field="column", limit="pa.Field")
    if not field.nullable:
        message = f"column {field.name} is not nullable, and rows that are stored already lack it; make it nullable"
        raise Rejected(message, field=field.name, limit="nullable")

    present = json.dumps(columns, separators=(",", ":"))
    if json.loads(to_json(pa.schema([field])))[0] in columns:
        # An earlier call may not have reached all shards.
        return present
    return to_json(from_json(present).append(field))


@cache
def from_json(text: str) -> pa.Schema:
    """The schema of a topic's attribute. Raises: Rejected for a text of a later version."""
    try:
        columns = check_schema(text)
        fields = [pa.field(each["name"], _type(each["type"]), each["nullable"]) for each in columns]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        message = f"the schema of the topic has a type that this version does not know: {error}; update RayMQ"
        raise Rejected(message, field="schema", limit=_ALLOWED) from None
    return pa.schema(fields)


def _column(field: pa.Field, schema: pa.Schema) -> dict[str, object]:
    name = field.name
    same = [each.name for each in schema if each.name.lower() == name.lower()]
    if not name or len(same) > 1:
        message = f"column {name!r} has an empty name, or another one differs in case alone: {same}; rename it"
        raise Rejected(message, field=name or "schema", limit="names that differ", found=same)
    if name.lower() in TAKEN:
        message = f"column {name!r} of the schema has the name of a message's own column; rename it"
        raise Rejected(message, field=name, limit="none of " + ", ".join(sorted(TAKEN)))
    return {"name": name, "type": _type_json(name, field.type, 1), "nullable": field.nullable}


def _type_json(place: str, kind: pa.DataType, depth: int) -> object:
    """A type as JSON. Args: `place`: the path to it, such as `order.lines`."""
    if depth > DEPTH_MAX:
        message = f"column {place} is nested more than {DEPTH_MAX} times; flatten it"
        raise Rejected(message, field=place, limit=DEPTH_MAX)
    name = _NAMES.get(kind)
    if name is not None:
        return name
    if pa.types.is_decimal128(kind) and kind.scale >= 0:
        return {"decimal": [kind.precision, kind.scale]}
    if pa.types.is_struct(kind) and kind.num_fields:
        return {"struct": [_child(place, field, depth) for field in kind]}
    if pa.types.is_list(kind):
        return {"list": _child(place, kind.value_field, depth)["type"]}
    if pa.types.is_map(kind) and kind.key_type == pa.string():
        return {"map": _child(place, kind.item_field, depth)["type"]}
    message = f"column {place} has the type {kind}; cast it to one of {_ALLOWED}"
    raise Rejected(message, field=place, limit=_ALLOWED, found=str(kind))


def _child(place: str, field: pa.Field, depth: int) -> dict[str, object]:
    place = f"{place}.{field.name}"
    if not field.nullable:
        message = f"{place} is not nullable; only whole columns may be so, make it nullable"
        raise Rejected(message, field=place, limit="nullable")
    return {"name": field.name, "type": _type_json(place, field.type, depth + 1)}


def _type(found: Any) -> pa.DataType:
    """The inverse of `_type_json`. Raises: KeyError, TypeError, ValueError."""
    if isinstance(found, str):
        return _PLAIN[found][0]
    ((name, of),) = found.items()
    if name == "decimal":
        return pa.decimal128(*of)
    if name == "struct":
        return pa.struct([pa.field(each["name"], _type(each["type"])) for each in of])
    if name == "list":
        return pa.list_(pa.field("element", _type(of)))
    if name == "map":
        return pa.map_(pa.string(), _type(of))
    raise KeyError(name)


# --- types ----------------------------------------------------------------------------------------


def spark_type(kind: pa.DataType, *, quoted: bool = False) -> str:
    """The name of a schema's type in Spark, as `simpleString` writes it.

    Args: `quoted`: names of fields in backticks.
    """

    def inner(child: pa.DataType) -> str:
        return spark_type(child, quoted=quoted)

    name = _NAMES.get(kind)
    if name is not None:
        return _PLAIN[name][1]
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return f"array<{inner(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<string,{inner(kind.item_type)}>"
    require(pa.types.is_struct(kind), "a schema has these types alone", kind=str(kind))
    quote: Callable[[str], str] = quoted_name if quoted else str
    return f"struct<{','.join(f'{quote(each.name)}:{inner(each.type)}' for each in kind)}>"


def quoted_name(name: str) -> str:
    """A column's name in a schema string of Spark."""
    return "`" + name.replace("`", "``") + "`"


def fits(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether a cast from one type to the other changes no value, as far as the values are in range."""
    types = pa.types
    if have == want or types.is_null(have):
        return True
    if types.is_dictionary(have):
        return fits(have.value_type, want)

    if types.is_integer(want):
        return bool(types.is_integer(have))
    if types.is_floating(want):
        return bool(types.is_floating(have)) and have.bit_width <= want.bit_width
    if types.is_string(want):
        return bool(types.is_large_string(have) or types.is_string_view(have))
    if types.is_binary(want):
        return bool(
            types.is_large_binary(have)
            or types.is_binary_view(have)
            or types.is_fixed_size_binary(have)
        )

    if types.is_timestamp(want):
        return bool(types.is_timestamp(have)) and (have.tz is None) == (want.tz is None)
    if types.is_decimal(want):
        return bool(types.is_decimal(have))
    return _nested_fits(have, want)


def _nested_fits(have: pa.DataType, want: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(want):
        is_list = types.is_list(have) or types.is_large_list(have) or types.is_fixed_size_list(have)
        return bool(is_list) and fits(have.value_type, want.value_type)
    if types.is_map(want):
        return bool(types.is_map(have)) and (
            fits(have.key_type, want.key_type) and fits(have.item_type, want.item_type)
        )
    if not (types.is_struct(want) and types.is_struct(have)):
        return False
    names = [[each.name for each in kind] for kind in (have, want)]
    return names[0] == names[1] and all(
        fits(one.type, other.type) for one, other in zip(have, want, strict=True)
    )
