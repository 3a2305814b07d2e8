"""The SQL92 filter: three-valued logic over texts, and a clear refusal of everything else."""

from __future__ import annotations

import builtins
import sys

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.store.base.errors import Rejected
from raymq.store.queues.sql_filter import SqlFilter
from raymq.store.records import properties

#: one message each
ROWS: list[dict[str, str]] = [
    {},
    {"a": "5", "b": "x"},
    {"a": "7", "b": "y"},
    {"a": "-3", "b": "it's"},
    {"a": "7.5", "b": "5"},
    {"a": "text", "b": "x"},
    {"a": "+5", "c": "TRUE"},
    {"b": "x", "c": "no"},
    {"a": "1e1", "c": "true"},
]
COLUMN = pa.array([properties.encode({"other": "a", **row}) for row in ROWS], pa.binary())


#: what RocketMQ 5.3.3 answers whatever a message is; tests/interop/test_sql_filter.py asks it
TEXTS_BESIDE = [
    ("'xyz' CONTAINS 'y'", True),
    ("'x' CONTAINS 'y'", False),
    ("'x' NOT CONTAINS 'y'", True),
    ("NOT ('x' CONTAINS 'y')", True),
    ("'x' CONTAINS ''", False),
    ("'x' NOT CONTAINS ''", False),
    ("NOT ('x' CONTAINS '')", True),
    ("'' CONTAINS ''", False),
    ("'xy' STARTSWITH 'x'", True),
    ("'xy' NOT STARTSWITH 'x'", False),
    ("'xy' NOT STARTSWITH 'y'", True),
    ("('xy') ENDSWITH 'y'", True),
    ("'xy' NOT ENDSWITH 'y'", False),
    ("5 CONTAINS '5'", False),
    ("5 NOT CONTAINS '5'", False),
    ("-5 NOT STARTSWITH '5'", False),
    ("TRUE NOT CONTAINS 'T'", False),
    ("NULL CONTAINS 'x'", False),
    ("NULL NOT CONTAINS 'x'", False),
]


def wanted(expression: str) -> list[int]:
    return SqlFilter(expression).records(COLUMN).nonzero()[0].tolist()


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("a = 5", [1, 6]),
        ("5 = a", [1, 6]),
        ("a <> 5", [2, 3]),
        ("a > 5", [2]),
        ("5 < a", [2]),
        ("a >= 5", [1, 2, 6]),
        ("a < 5", [3]),
        ("a <= -3", [3]),
        ("a > 4.5", [1, 2, 4, 6, 8]),
        ("a = 7.5", [4]),
        ("a = 1.0e1", [8]),
        ("a > .5 AND a < 6.", [1, 6]),
        ("a BETWEEN 5 AND 7", [1, 2, 6]),
        ("a NOT BETWEEN 5 AND 6", [2, 3]),
        ("b = 'x'", [1, 5, 7]),
        ("'x' = b", [1, 5, 7]),
        ("b <> 'x'", [2, 3, 4]),
        ("b = 'it''s'", [3]),
        ("b = '5'", [4]),
        ("a = b", []),
        ("a <> b", [1, 2, 3, 4, 5]),
        ("a > b", [4]),
        ("b IN ('x', 'y')", [1, 2, 5, 7]),
        ("b NOT IN ('x', 'y')", [3, 4]),
        ("b CONTAINS 't'", [3]),
        ("b NOT CONTAINS 't'", [1, 2, 4, 5, 7]),
        ("a STARTSWITH '5'", [1]),
        ("a NOT STARTSWITH '5'", [2, 3, 4, 5, 6, 8]),
        ("NOT (a NOT STARTSWITH '5')", [1]),
        ("a NOT ENDSWITH '5'", [2, 3, 5, 8]),
        ("(a) STARTSWITH '5'", [1]),
        ("b EndsWith 's' OR a ENDSWITH '.5'", [3, 4]),
        ("NOT (b STARTSWITH 'i')", [1, 2, 4, 5, 7]),
        ("b CONTAINS '' OR b NOT CONTAINS ''", []),
        ("a IS NULL", [0, 7]),
        ("a IS NOT NULL", [1, 2, 3, 4, 5, 6, 8]),
        ("c = TRUE", [6, 8]),
        ("c = FALSE", [7]),
        ("c <> TRUE", [7]),
        ("c", []),
        ("NOT c", [6, 7, 8]),
        ("TRUE", list(range(9))),
        ("FALSE", []),
        ("NULL", []),
        ("NOT NULL", []),
        ("1 = 1.0 AND 'a' <> 'b' AND 2 > 1", list(range(9))),
        ("a = 5 AND b = 'x'", [1]),
        ("a = 5 OR b = 'x'", [1, 5, 6, 7]),
        ("NOT (a = 5 OR b = 'x')", [2, 3]),
        ("a > 0 OR a IS NULL", [0, 1, 2, 6, 7]),
        ("not a = 5 and (b = 'y' or b is null)", [2]),
        ("missing = 1", []),
        ("missing IS NULL", list(range(9))),
        ("a /* why */ = 5 -- so", [1, 6]),
    ],
)
def test_an_expression_wants(expression, rows):
    assert wanted(expression) == rows


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("", ""),
        ("a = ", ""),
        ("a = 1 b", ""),
        ("a = 1; DROP TABLE t", ""),
        ("5", "5 is not a condition"),
        ("'x'", "'x' is not a condition"),
        ("upper(a) = 'X'", "UPPER(a)"),
        ("a LIKE 'x%'", "LIKE"),
        ("a RLIKE 'x'", ""),
        ("a CONTAINS 5", "compared with a text only"),
        ("'x' CONTAINS a", "compared with a text only"),
        ("(a = 5) CONTAINS 'x'", "is not a property"),
        ("a + 1 = 2", "a + 1"),
        ("-a = 2", "-a"),
        ("a IN (SELECT 1)", "SELECT"),
        ("a IN (1, 2)", "is not a list of texts"),
        ("a IN ()", ""),
        ("EXISTS (SELECT 1)", "EXISTS"),
        ("CASE WHEN a = 1 THEN TRUE END", "CASE"),
        ("a IS TRUE", "IS TRUE"),
        ("a = NULL", "IS NULL"),
        ("a > 'x'", "not a number"),
        ("a < TRUE", "not a number"),
        ("a BETWEEN 'a' AND 'b'", "not a number"),
        ("a BETWEEN 5 AND 3", "larger bound first"),
        ("'a' = 1", "cannot be compared"),
        ("TRUE > FALSE", "cannot be compared"),
        ("t.a = 1", "t.a is not the name"),
        ('"a" = 1', "is not the name"),
        ("a = (b = 1)", "b = 1"),
        ("a = 99999999999999999999", "too large"),
        ("1 IS NULL", "is not the name"),
        ("a::int = 1", "CAST"),
    ],
)
def test_an_invalid_filter_is_refused_by_its_name(expression, named):
    with pytest.raises(Rejected) as caught:
        SqlFilter(expression)
    assert caught.value.field == "filter"
    assert named in caught.value.message


@pytest.mark.parametrize(("expression", "true"), TEXTS_BESIDE)
def test_a_text_on_the_left_of_contains_is_evaluated_as_rocketmq_does(expression, true):
    assert wanted(expression) == (list(range(9)) if true else [])


@pytest.mark.parametrize("expression", ["a = 5", "a CONTAINS 'x'", "a STARTSWITH 'x'", "NOT c"])
def test_a_part_of_the_tree_that_no_code_here_reads_is_refused(monkeypatch, expression):
    """So it was with sqlglot 30.10: NOT became a mark on the node, and the filter gave the opposite."""
    import sqlglot

    parsed = sqlglot.parse_one

    def newer(*given, **options):
        node = parsed(*given, **options)
        node.args["unheard_of"] = True
        return node

    monkeypatch.setattr(sqlglot, "parse_one", newer)
    with pytest.raises(Rejected, match="unheard_of"):
        SqlFilter(expression)


def test_a_filter_of_endless_depth_is_refused():
    with pytest.raises(Rejected):
        SqlFilter("(" * 5000 + "a = 1" + ")" * 5000)
    assert wanted(" OR ".join(["a = 5"] * 200)) == [1, 6]


def test_names_that_only_contain_the_name_are_other_properties():
    column = pa.array([b"xa\x011\x02", b"a\x011\x02", b"b\x01a\x011\x02", b"a\x011"], pa.binary())
    assert SqlFilter("a = 1").records(column).tolist() == [False, True, False, True]


def test_bytes_that_are_not_utf8_are_only_not_a_number():
    column = pa.array([b"a\x01\xff5\x02", b"a\x015\x02"], pa.binary())
    assert SqlFilter("a = 5").records(column).tolist() == [False, True]
    assert SqlFilter("a <> 'x'").records(column).tolist() == [True, True]


def test_numbers_out_of_range_are_unknown():
    column = pa.array([b"a\x01" + b"9" * 30 + b"\x02", b"a\x011e999\x02"], pa.binary())
    assert SqlFilter("a > 1").records(column).tolist() == [False, False]
    assert SqlFilter("a > 1.5").records(column).tolist() == [True, True]


def test_without_the_parser_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **options):
        if name.startswith("sqlglot"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    for name in [name for name in sys.modules if name.startswith("sqlglot")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Rejected, match=r"raymq\[sql\]"):
        SqlFilter("a = 1")


# --- three-valued logic ---------------------------------------------------------------------------

atoms = st.sampled_from(
    ["a = 5", "a > 5", "b = 'x'", "a IS NULL", "b IN ('x', 'y')", "TRUE", "NULL"]
)
trees = st.recursive(
    atoms,
    lambda part: st.one_of(
        st.tuples(st.just("NOT"), part), st.tuples(st.sampled_from(["AND", "OR"]), part, part)
    ),
    max_leaves=8,
)


def text_of(tree) -> str:
    if isinstance(tree, str):
        return tree
    if tree[0] == "NOT":
        return f"NOT ({text_of(tree[1])})"
    return f"({text_of(tree[1])}) {tree[0]} ({text_of(tree[2])})"


def value_of(tree, row: dict[str, str]) -> bool | None:
    """Kleene's logic, spelled out."""
    if isinstance(tree, str):
        a, b = row.get("a"), row.get("b")
        number = int(a) if a is not None and a.lstrip("+-").isdigit() else None
        return {
            "a = 5": None if number is None else number == 5,
            "a > 5": None if number is None else number > 5,
            "b = 'x'": None if b is None else b == "x",
            "a IS NULL": a is None,
            "b IN ('x', 'y')": None if b is None else b in ("x", "y"),
            "TRUE": True,
            "NULL": None,
        }[tree]
    values = [value_of(part, row) for part in tree[1:]]
    if tree[0] == "NOT":
        return None if values[0] is None else not values[0]
    decisive = tree[0] == "OR"
    if decisive in values:
        return decisive
    return None if None in values else not decisive


@given(trees)
@settings(max_examples=150, deadline=None)
def test_unknown_spreads_as_in_three_valued_logic(tree):
    want = [number for number, row in enumerate(ROWS) if value_of(tree, row) is True]
    assert wanted(text_of(tree)) == want
