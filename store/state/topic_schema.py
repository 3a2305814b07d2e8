"""The schema of a topic as its attribute holds it, and which change of it is allowed.

The attribute is JSON: a list of columns {"name", "type", "nullable"}. What a type means only clients know
(client/messages/topic_schema.py): the store keeps it, and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from raymq.store.base.errors import Rejected

#: topic attribute with the schema
SCHEMA = "raymq.schema"
#: topic attribute that allows null values, and its only value
NULL_VALUES, ALLOWED = "raymq.null.values", "true"
#: the schema is part of each snapshot of a shard
SCHEMA_MAX_BYTES = 64 * 1024

_FORM = '[{"name": "id", "type": "int64", "nullable": true}, ...]'


def check_schema(text: str) -> list[dict[str, object]]:
    """The columns of a schema's text. Raises: Rejected for another text."""
    size = len(text.encode())
    if size > SCHEMA_MAX_BYTES:
        message = f"the schema has {size} bytes as JSON, the limit is {SCHEMA_MAX_BYTES}: leave columns out"
        raise Rejected(message, field="schema", limit=SCHEMA_MAX_BYTES)
    try:
        columns = json.loads(text)
        good = isinstance(columns, list) and columns and all(map(_is_column, columns))
    except ValueError:
        good = False
    if not good:
        raise Rejected("the schema is not a list of columns", field="schema", limit=_FORM)
    names = [each["name"] for each in columns]
    if len(set(names)) < len(names):
        raise Rejected(f"the schema names a column twice: {names}", field="schema", limit=_FORM)
    found: list[dict[str, Any]] = columns
    return found


def _is_column(column: object) -> bool:
    return (
        isinstance(column, dict)
        and set(column) == {"name", "type", "nullable"}
        and type(column["name"]) is str
        and type(column["type"]) in (str, dict)
        and type(column["nullable"]) is bool
    )


def extends(new: Sequence[Mapping[str, object]], old: Sequence[Mapping[str, object]]) -> bool:
    """Whether a schema is another one, or that one and more nullable columns after its own."""
    more = new[len(old) :]
    return new[: len(old)] == old and all(column["nullable"] for column in more)
