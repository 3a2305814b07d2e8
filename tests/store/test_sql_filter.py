"""The SQL92 filter: three-valued logic over texts, and a clear refusal of everything else."""

from __future__ import annotations

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
        ("a\n=\t5", [1, 6]),
        ("a != 5", [2, 3]),
        ("(a) IS NULL", [0, 7]),
        ("a between 5 and 7 and b in ('y')", [2]),
    ],
)
def test_an_expression_wants(expression, rows):
    assert wanted(expression) == rows


@pytest.mark.parametrize(
    ("expression", "position", "fault"),
    [
        ("", 1, "the end at character 1 stands where a property or a value is needed"),
        ("a = ", 5, "the end at character 5 stands where"),
        ("a = 1 b", 7, "'b' at character 7 is not expected here"),
        ("a = 1; DROP TABLE t", 6, "';' at character 6 has no meaning"),
        ("a = 5x", 6, "'x' at character 6 is not expected here"),
        ("a = 'x", 5, "begins a text without an end"),
        ("a = 1 AND", 10, "the end at character 10"),
        ("(a = 1", 7, "the end at character 7 stands where ) is needed"),
        ("a = 1)", 6, "')' at character 6 is not expected here"),
        ("5", 1, "is not a condition"),
        ("a = 1 OR 'x'", 10, "is not a condition"),
        ("upper(a) = 'X'", 6, "'(' at character 6 is not expected here"),
        ("a LIKE 'x%'", 3, "'LIKE' at character 3"),
        ("a NOT LIKE 'x%'", 3, "'NOT' at character 3"),
        ("a CONTAINS 5", 12, "is not a text, which CONTAINS needs"),
        ("'x' CONTAINS a", 14, "is not a text"),
        ("(a = 5) CONTAINS 'x'", 2, "'a = 5' at character 2 is not a property"),
        ("a + 1 = 2", 3, "'+' at character 3 has no meaning"),
        ("-a = 2", 2, "follows a minus"),
        ("a IN (SELECT 1)", 14, "'1' at character 14 stands where ) is needed"),
        ("a IN ('x', 2)", 12, "is not a text; IN takes a list of texts"),
        ("a IN ()", 7, "stands where a property or a value is needed"),
        ("a IN 'x'", 6, "stands where ( is needed"),
        ("5 IN ('x')", 1, "is not the name of a property"),
        ("a IS TRUE", 6, "'TRUE' at character 6 stands where NULL is needed"),
        ("a = NULL", 5, "IS NULL"),
        ("NULL > 1", 1, "IS NULL"),
        ("a > 'x'", 5, "is not a number"),
        ("a < TRUE", 5, "is not a number"),
        ("a BETWEEN 'a' AND 'b'", 11, "is not a number"),
        ("b = 'x' AND a BETWEEN 5 AND 3", 13, "larger bound first"),
        ("a BETWEEN 5 OR 6", 13, "stands where AND is needed"),
        ("'a' = 1", 1, "cannot be compared"),
        ("TRUE > FALSE", 1, "cannot be compared"),
        ("t.a = 1", 2, "'.' at character 2 has no meaning"),
        ('"a" = 1', 1, "has no meaning"),
        ("a = (b = 1)", 6, "'b = 1' at character 6 is not a property"),
        ("a = 99999999999999999999", 5, "is too large"),
        ("a = " + "9" * 5000, 5, "is too large"),
        ("a = 1e999", 5, "is too large"),
        ("1 IS NULL", 1, "is not the name of a property"),
        ("a::int = 1", 2, "':' at character 2"),
        ("/* never ended", 1, "has no meaning"),
    ],
)
def test_a_wrong_expression_is_refused_with_the_position_of_the_fault(expression, position, fault):
    with pytest.raises(Rejected) as caught:
        SqlFilter(expression)
    assert (caught.value.field, caught.value.position) == ("filter", position)
    assert fault in caught.value.message


def test_an_error_shows_what_is_around_the_fault_of_a_long_expression():
    with pytest.raises(Rejected) as caught:
        SqlFilter("a = 5 OR " * 300 + "! OR " + "a = 5 OR " * 100)
    assert caught.value.position == 2701
    assert "'!' at character 2701" in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(("expression", "true"), TEXTS_BESIDE)
def test_a_text_on_the_left_of_contains_is_evaluated_as_rocketmq_does(expression, true):
    assert wanted(expression) == (list(range(9)) if true else [])


def test_a_filter_of_endless_depth_is_refused():
    for expression, position in (
        ("(" * 5000 + "a = 1" + ")" * 5000, 51),
        ("NOT " * 5000 + "a = 1", 201),
    ):
        with pytest.raises(Rejected, match="nested too deeply") as caught:
            SqlFilter(expression)
        assert caught.value.position == position
    assert wanted(" OR ".join(["a = 5"] * 2000)) == [1, 6]
    assert wanted("(" * 49 + "a = 5" + ")" * 49) == [1, 6]


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


# --- any text -------------------------------------------------------------------------------------

words = st.sampled_from(
    ["a", "b", "AND", "OR", "not", "IN", "BETWEEN", "IS", "NULL", "TRUE", "CONTAINS", "STARTSWITH"]
    + ["5", "-", "7.5", "1e5", "9" * 400, "'x'", "''", "'", "(", ")", ",", "=", "<>", "<=", "!"]
    + ["--", "/*", "*/", "\n", "\x00", "\u0130", "\ud800", "$_", "."]
)


@given(st.one_of(st.text(max_size=40), st.lists(words, max_size=14).map(" ".join)))
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_filter_or_is_refused_with_a_position(text):
    found, refusal = None, None
    try:
        found = SqlFilter(text).records(COLUMN)
    except Rejected as error:
        refusal = error
    if refusal is None:
        assert len(found) == len(ROWS)
    else:
        assert 1 <= refusal.position <= len(text) + 1
        assert str(refusal.position) in refusal.message
