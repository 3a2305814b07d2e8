"""What a reader wants of a topic, as its options `tags` and `sql` say it."""

from __future__ import annotations

from raymq.actors.api.call_arguments import EXPRESSION_CHARS_MAX
from raymq.client.arguments import check_text
from raymq.store.base.errors import Rejected
from raymq.store.records.requests import MessageSelector


def selector_of(tags: str | None, sql: str | None) -> MessageSelector | None:
    """The filter for the shards; None: all messages.

    Raises: Rejected for both, for a wrong expression with the position of its fault, and for a long one.
    """
    if tags is not None and sql is not None:
        message = (
            "tags and sql are both given; a tag is the property TAGS in sql: TAGS IN ('a', 'b')"
        )
        raise Rejected(message, field="tags", limit="tags or sql")
    if tags is not None:
        return _checked("tags", MessageSelector("TAG", tags))
    if sql is not None:
        return _checked("sql", MessageSelector("SQL92", sql))
    return None


def _checked(option: str, selector: MessageSelector) -> MessageSelector:
    # Here, because commands that read nothing would import Arrow otherwise.
    from raymq.store.queues.expression_filter import expression_filter

    expression = selector.expression
    check_text(option, expression)
    if not expression.strip():
        example = "a || b" if option == "tags" else "price > 5"
        message = f"{option} is empty; give an expression, such as {example!r}, or leave it out"
        raise Rejected(message, field=option, limit="an expression")
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise Rejected(
            f"{option} has {len(expression)} characters; {EXPRESSION_CHARS_MAX} are allowed",
            field=option,
            limit=EXPRESSION_CHARS_MAX,
            found=len(expression),
        )

    try:
        expression_filter(*selector)
    except Rejected as error:
        raise Rejected(f"{option}: {error.message}", **{**error.fields, "field": option}) from None
    return selector
