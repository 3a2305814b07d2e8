"""RocketMQ's own SQL92 filters want the same messages as ours."""

from __future__ import annotations

from raymq.store.queues.sql_filter import SqlFilter
from tests.store.test_sql_filter import COLUMN, ROWS, TEXTS_BESIDE
from tests.support.oracle import RocketMQ

#: those that it reads as we do: nothing beside OR is no number, no NOT stands before a name, no two are missing
ALIKE = [
    "a > 4.5",
    "b = 'x'",
    "b <> 'x'",
    "b = 'it''s'",
    "b IN ('x', 'y')",
    "b NOT IN ('x', 'y')",
    "b CONTAINS 't'",
    "b NOT CONTAINS 't'",
    "a STARTSWITH '5'",
    "a NOT STARTSWITH '5'",
    "a ENDSWITH '5'",
    "a NOT ENDSWITH '5'",
    "(a) STARTSWITH '5'",
    "b CONTAINS ''",
    "b NOT CONTAINS ''",
    "a IS NULL",
    "a IS NOT NULL",
    "a IS NULL OR b = 'x'",
    "TRUE",
    "FALSE",
]


def test_filters_want_the_same_messages(rocketmq: RocketMQ) -> None:
    expressions = [*ALIKE, *(expression for expression, _ in TEXTS_BESIDE)]
    theirs = rocketmq.wanted(expressions, ROWS)
    ours = {
        expression: SqlFilter(expression).records(COLUMN).nonzero()[0].tolist()
        for expression in expressions
    }
    assert ours == theirs
