"""The SQL92 property filter: an expression over a message's properties, evaluated for whole columns.

Values are texts. In comparisons with a number they are read as numbers, with TRUE or FALSE as truth values. A
comparison is unknown if its property is missing, or is compared with a number and is not one. A message for which the
whole expression is unknown does not match.
Source: SelectorParser, ComparisonExpression, LogicExpression, RocketMQ 5.3.3. RocketMQ differs in four points. A text
that is not a number fails the whole expression, even next to OR. `NOT a = 1` is read as `(NOT a) = 1`. Integers are cut
to 32 bits next to small ones. For a missing property CONTAINS, STARTSWITH and ENDSWITH are false, so `NOT (a CONTAINS
'x')` is true.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import Rejected
from raymq.store.records.binary_columns import null_where

_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_INTEGER = r"^[+-]?[0-9]{1,18}$"
_DECIMAL = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
_LONG_MAX = (1 << 63) - 1


class Property(NamedTuple):
    """A property by its name."""

    name: str


#: name of a property -> column of its values; null if it is missing
Columns = dict[str, pa.Array]
#: the value of an expression for each message: true, false or null for unknown
Condition = Callable[[Columns, int], pa.Array]
Value = str | int | float | bool
Operand = Property | Value

_COMPARE: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], bool]]] = {
    "=": (pc.equal, operator.eq),
    "<>": (pc.not_equal, operator.ne),
    "<": (pc.less, operator.lt),
    "<=": (pc.less_equal, operator.le),
    ">": (pc.greater, operator.gt),
    ">=": (pc.greater_equal, operator.ge),
}
#: the parser's nodes of comparisons, and of the operators that it reads as GLOB, ILIKE and RLIKE (`_dialect`)
_SIGNS = {"eq": "=", "neq": "<>", "lt": "<", "lte": "<=", "gt": ">", "gte": ">="}
_TEXT_PARTS: dict[str, tuple[Callable[..., Any], Callable[[str, str], bool]]] = {
    "glob": (pc.match_substring, operator.contains),
    "ilike": (pc.starts_with, str.startswith),
    "regexplike": (pc.ends_with, str.endswith),
}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


class SqlFilter:
    """Messages for which an expression is true: `a > 5 AND (b = 'x' OR c IS NULL)`."""

    needs_records = True

    def __init__(self, expression: str) -> None:
        """Raises: Rejected for a wrong expression, naming the wrong part, or if the parser is not installed."""
        self.expression = expression
        self._names: set[str] = set()
        try:
            self._condition = self._compile(_parse(expression))
            self.records(pa.array([], pa.binary()))
        except RecursionError as error:
            raise _refused(expression, "it is nested too deeply") from error

    def units(self, tags_codes: Int64s) -> Bools | None:
        """Every unit may match: the expression needs properties."""
        return None

    def records(self, properties: pa.Array) -> Bools:
        """Whether the expression is true for each message."""
        columns = {name: _values(properties, name) for name in self._names}
        found = self._condition(columns, len(properties)).fill_null(False)
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)

    # --- compiling --------------------------------------------------------------------------------

    def _compile(self, node: Any) -> Condition:
        self._check_parts(node)
        if node.key == "paren":
            return self._compile(node.this)

        tested = node.this if node.key == "not" else node
        if tested.key in _TEXT_PARTS:
            self._check_parts(tested)
            # Since sqlglot 30.10 `a NOT ILIKE b` is one node with a mark. Before, it was a NOT around an ILIKE.
            negated = (tested is not node) != bool(tested.args.get("negate"))
            return self._part(tested, negated)

        if node.key == "and":
            return _join(pc.and_kleene, self._compile(node.this), self._compile(node.expression))
        if node.key == "or":
            return _join(pc.or_kleene, self._compile(node.this), self._compile(node.expression))
        if node.key == "not":
            inner = self._compile(node.this)
            return lambda columns, count: pc.invert(inner(columns, count))

        if node.key == "boolean":
            return _constant(bool(node.this))
        if node.key == "null":
            return _constant(None)
        if node.key == "is":
            return self._is_null(node)
        if node.key == "in":
            return self._in(node)
        if node.key == "between":
            return self._between(node)

        if node.key in _SIGNS:
            left, right = self._operand(node.this), self._operand(node.expression)
            return self._compare(_SIGNS[node.key], left, right, node)
        if node.key == "column":
            # Values are texts, and no text is a truth value by itself.
            name = self._property(node).name
            return lambda columns, count: _where(columns[name], pa.scalar(False))

        raise self._wrong(node, "is not a condition")

    def _check_parts(self, node: Any) -> None:
        """Refuse parts of the parser's tree that this class does not read: they would silently change the meaning."""
        # `_property` checks the part before a column's name.
        read = {"this", "expression", "expressions", "low", "high", "table", "is_string"}
        if node.key == "ilike":
            read |= {"negate"}
        unread = [name for name, part in node.args.items() if part and name not in read]
        if unread:
            raise self._wrong(node, f"has a part that no filter may have: {', '.join(unread)}")

    def _wrong(self, node: Any, why: str) -> Rejected:
        return _refused(self.expression, f"{node.sql()} {why}")

    def _property(self, node: Any) -> Property:
        named = node.this
        if (
            node.key != "column"
            or len(node.parts) > 1
            or named.args.get("quoted")
            or not _NAME.fullmatch(str(named.this))
        ):
            raise self._wrong(node, "is not the name of a property")
        self._names.add(str(named.this))
        return Property(str(named.this))

    def _operand(self, node: Any) -> Operand:
        self._check_parts(node)
        if node.key == "paren":
            return self._operand(node.this)
        if node.key == "column":
            return self._property(node)
        if node.key == "boolean":
            return bool(node.this)
        if node.key == "literal":
            return str(node.this) if node.is_string else self._number(str(node.this), node)

        if node.key == "neg":
            value = self._operand(node.this)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value

        if node.key == "null":
            raise self._wrong(node, "is not compared; write IS NULL or IS NOT NULL")
        raise self._wrong(node, "is not a property, number, text, TRUE or FALSE")

    def _number(self, text: str, node: object) -> int | float:
        try:
            value = int(text) if text.isdigit() else float(text)
        except ValueError as error:
            raise self._wrong(node, "is not a number") from error
        if abs(value) > (_LONG_MAX if isinstance(value, int) else 1.7976931348623157e308):
            raise self._wrong(node, "is too large")
        return value

    def _is_null(self, node: Any) -> Condition:
        if node.expression.key != "null":
            raise self._wrong(node, "may be compared with NULL only")
        name = self._property(node.this).name
        return lambda columns, count: columns[name].is_null()

    def _in(self, node: Any) -> Condition:
        name = self._property(node.this).name
        values = [self._operand(each) for each in node.expressions]
        texts = [value.encode() for value in values if isinstance(value, str)]
        if not texts or len(texts) < len(values) or set(node.args) - {"this", "expressions"}:
            raise self._wrong(node, "is not a list of texts")
        known = pa.array(texts, pa.binary())
        return lambda columns, count: _where(columns[name], pc.is_in(columns[name], known))

    def _part(self, node: Any, negated: bool) -> Condition:
        """CONTAINS, STARTSWITH, ENDSWITH. An empty text is part of none. Source: ComparisonExpression.

        For two texts the answer is known now. For a value that is not a text, the condition and its NOT are unknown.
        """
        on_columns, on_texts = _TEXT_PARTS[node.key]
        left = None if node.this.key == "null" else self._operand(node.this)
        text = self._operand(node.expression)

        if not isinstance(text, str):
            raise self._wrong(node, "may be compared with a text only")
        if isinstance(left, str) and text:
            return _constant(on_texts(left, text) != negated)
        if not isinstance(left, Property):
            return _constant(False)
        if not text:
            # The same with a NOT.
            return _constant(None)

        name = left.name
        if negated:
            return lambda columns, count: pc.invert(on_columns(columns[name], text))
        return lambda columns, count: on_columns(columns[name], text)

    def _between(self, node: Any) -> Condition:
        value = self._operand(node.args["this"])
        low, high = self._operand(node.args["low"]), self._operand(node.args["high"])
        numbers = (int, float)
        if isinstance(low, numbers) and isinstance(high, numbers) and low > high:
            raise self._wrong(node, "has its larger bound first")
        if node.args.get("symmetric") is not None:
            raise self._wrong(node, "is not a BETWEEN of RocketMQ")
        at_least = self._compare(">=", value, low, node)
        at_most = self._compare("<=", value, high, node)
        return _join(pc.and_kleene, at_least, at_most)

    def _compare(self, sign: str, left: Operand, right: Operand, node: object) -> Condition:
        """The condition `left sign right`. Raises: Rejected for types that RocketMQ does not compare."""
        if not isinstance(left, Property) and isinstance(right, Property):
            left, right = right, left
            sign = _TURNED.get(sign, sign)

        if not isinstance(left, Property):
            return self._compare_constants(sign, left, right, node)
        if isinstance(right, Property):
            return _compare_properties(sign, left.name, right.name)
        if isinstance(right, (str, bool)) and sign in _TURNED:
            raise self._wrong(node, "compares by size a value that is not a number")
        return _compare_with(sign, left.name, right)

    def _compare_constants(
        self, sign: str, left: Operand, right: Operand, node: object
    ) -> Condition:
        """The condition between two values of the expression itself."""
        is_same_type = type(left) is type(right) or not {type(left), type(right)} - {int, float}
        if not is_same_type or (sign in _TURNED and isinstance(left, (str, bool))):
            raise self._wrong(node, "compares values that cannot be compared")

        _, on_values = _COMPARE[sign]
        return _constant(on_values(left, right))


def _compare_properties(sign: str, left: str, right: str) -> Condition:
    """The condition between two properties: of their texts, or by size of their numbers."""
    on_columns, _ = _COMPARE[sign]
    if sign not in _TURNED:
        return lambda columns, count: on_columns(columns[left], columns[right])
    return lambda columns, count: on_columns(_decimals(columns[left]), _decimals(columns[right]))


def _compare_with(sign: str, name: str, value: str | bool | int | float) -> Condition:
    """The condition between a property and a value, whose type says how the property is read."""
    on_columns, _ = _COMPARE[sign]
    read: Callable[[pa.Array], pa.Array]
    if isinstance(value, str):
        read, scalar = _as_stored, pa.scalar(value.encode(), pa.binary())
    elif isinstance(value, bool):
        read, scalar = _truths, pa.scalar(value)
    elif isinstance(value, int):
        read, scalar = _integers, pa.scalar(value, pa.int64())
    else:
        read, scalar = _decimals, pa.scalar(value, pa.float64())
    return lambda columns, count: on_columns(read(columns[name]), scalar)


def _as_stored(column: pa.Array) -> pa.Array:
    """The property as it is stored."""
    return column


def _parse(expression: str) -> Any:
    try:
        import sqlglot
        from sqlglot import exp
        from sqlglot.errors import SqlglotError
    except ImportError as error:
        raise Rejected(
            "SQL filters need the parser sqlglot; install it with `pip install raymq[sql]`",
            field="filter",
            limit="raymq[sql]",
        ) from error

    try:
        with _quiet():
            return sqlglot.parse_one(expression, into=exp.Condition, dialect=_dialect())
    except SqlglotError as error:
        raise _refused(expression, str(error).splitlines()[0]) from error


@cache
def _dialect() -> Any:
    """CONTAINS, STARTSWITH and ENDSWITH are binary operators in RocketMQ, which the parser does not know."""
    from sqlglot import Dialect, Tokenizer, TokenType

    words = {"CONTAINS": TokenType.GLOB, "STARTSWITH": TokenType.ILIKE, "ENDSWITH": TokenType.RLIKE}
    taken = set(words.values())
    kept = {word: kind for word, kind in Tokenizer.KEYWORDS.items() if kind not in taken}
    tokens = type("Tokenizer", (Tokenizer,), {"KEYWORDS": {**kept, **words}})
    return type("Filter", (Dialect,), {"Tokenizer": tokens})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the parser's log about unknown syntax: the caller gets an error."""
    import logging

    logger = logging.getLogger("sqlglot")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _refused(expression: str, why: str) -> Rejected:
    return Rejected(
        f"{expression!r} is not a valid filter: {why}. A filter has properties, numbers, 'texts', TRUE, FALSE, =, <>, "
        "<, <=, >, >=, BETWEEN, IN, CONTAINS, STARTSWITH, ENDSWITH, IS NULL, AND, OR, NOT and brackets",
        field="filter",
        limit="SQL92 conditions over properties",
    )


# --- columns --------------------------------------------------------------------------------------


def _values(properties: pa.Array, name: str) -> pa.Array:
    """A property's value in each properties string; null without one."""
    pattern = rf"(?:^|\x02){re.escape(name)}\x01(?P<v>[^\x02]+)"
    return pc.struct_field(pc.extract_regex(properties, pattern), 0)


def _constant(value: bool | None) -> Condition:
    return lambda columns, count: pa.repeat(pa.scalar(value, pa.bool_()), count)


def _join(
    how: Callable[[object, object], pa.Array], left: Condition, right: Condition
) -> Condition:
    return lambda columns, count: how(left(columns, count), right(columns, count))


def _where(values: pa.Array, then: object) -> pa.Array:
    """`then` for each value that is there, otherwise unknown."""
    return pc.if_else(values.is_valid(), then, pa.nulls(len(values), pa.bool_()))


def _texts(values: pa.Array, pattern: str) -> pa.Array:
    """The values that match, as text without a leading plus."""
    matching = pc.match_substring_regex(values, pattern)
    kept = null_where(pc.invert(matching), values).cast(pa.string())
    return pc.replace_substring_regex(kept, r"^\+", "")


def _integers(values: pa.Array) -> pa.Array:
    return _texts(values, _INTEGER).cast(pa.int64())


def _decimals(values: pa.Array) -> pa.Array:
    return _texts(values, _DECIMAL).cast(pa.float64())


def _truths(values: pa.Array) -> pa.Array:
    """Java's Boolean.valueOf: any text but "true" is false."""
    return pc.match_substring_regex(values, r"(?i)^true$")
