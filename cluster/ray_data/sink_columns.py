"""The columns that a dataset may have which is written to a topic."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from raymq.client.messages.delivery_times import is_time
from raymq.client.messages.topic_values import TopicValues
from raymq.store.base.errors import Rejected


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or _is_text(kind))


def _is_list(kind: pa.DataType, is_item: Callable[[pa.DataType], bool]) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    # All lists may be empty.
    return bool(is_list and (is_item(kind.value_type) or pa.types.is_null(kind.value_type)))


def _is_pairs(kind: pa.DataType) -> bool:
    """Whether the values are maps, or lists of structs of `key` and `value`."""
    if pa.types.is_map(kind):
        return _is_text(kind.key_type) and _is_bytes_or_null(kind.item_type)
    return _is_list(kind, _is_pair)


def _is_pair(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {"key", "value"}:
        return False
    return _is_text(kind.field("key").type) and _is_bytes_or_null(kind.field("value").type)


def _is_bytes_or_null(kind: pa.DataType) -> bool:
    return _is_bytes(kind) or bool(pa.types.is_null(kind))


#: column -> whether it may have a type, and those types in words
COLUMNS: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "value": (_is_bytes, "binary or string"),
    "key": (_is_bytes, "binary or string"),
    "tag": (_is_text, "string"),
    "partition": (lambda kind: kind in (pa.int32(), pa.int64()), "int32 or int64"),
    "headers": (_is_pairs, "list of struct(key string, value binary), or a map"),
    "properties": (_is_pairs, "map of string to string, or a list of struct(key, value)"),
    "index_keys": (lambda kind: _is_list(kind, _is_text), "list of string"),
    "deliver_at": (is_time, "timestamp with a time zone"),
}


def check_columns(given: pa.Schema, values: TopicValues) -> None:
    """Check the columns of a dataset. Raises: Rejected naming one that is missing, unknown or of another type."""
    schema = values.schema
    values.check_names(given.names, [name for name in COLUMNS if name != "value"])
    for field in given:
        if schema is not None and field.name in schema.names:
            continue
        if field.name not in COLUMNS:
            raise Rejected(
                f"unknown column {field.name!r}; a topic takes {', '.join(COLUMNS)}",
                field=field.name,
                limit=", ".join(COLUMNS),
            )
        is_accepted, words = COLUMNS[field.name]
        if not is_accepted(field.type) and not pa.types.is_null(field.type):
            raise Rejected(
                f"column {field.name} has type {field.type}, expected {words}; cast it",
                field=field.name,
                limit=words,
            )

    if schema is None and "value" not in given.names:
        raise Rejected(
            f"the dataset has columns {given.names}; `value` (binary or string) is needed",
            field="value",
            limit=", ".join(COLUMNS),
        )
