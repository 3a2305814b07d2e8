"""The filter that a subscription names."""

from __future__ import annotations

from functools import lru_cache

from raymq.store.base.errors import Rejected

from .message_filter import MessageFilter, TagFilter
from .sql_filter import SqlFilter


@lru_cache(maxsize=100)
def expression_filter(kind: str, expression: str) -> MessageFilter:
    """The filter of a subscription: `kind` is TAG or SQL92.

    Raises: Rejected for another kind, and for a malformed expression.
    Source: ExpressionType, FilterFactory.
    """
    try:
        expression.encode()
    except UnicodeEncodeError as error:
        raise Rejected(
            f"the filter has half of a surrogate pair at character {error.start + 1}; replace it",
            field="filter",
            limit="Unicode text",
            position=error.start + 1,
        ) from None
    if kind == "TAG":
        return TagFilter(expression)
    if kind == "SQL92":
        return SqlFilter(expression)
    fault = f"filter {kind!r} is not known; use TAG or SQL92"
    raise Rejected(fault, field="filter", limit="TAG|SQL92")
