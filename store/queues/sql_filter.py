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
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import Rejected
from raymq.store.records.binary_columns import null_where
from raymq.store.records.property_columns import property_column

from .sql_syntax import (
    Between,
    Expression,
    In,
    IsNull,
    Joined,
    Literal,
    Not,
    Operand,
    Property,
    Span,
    SqlComparison,
    TextPart,
    parse,
    refused,
)

#: digits of any integer that fits 64 bits
_DIGITS_MAX = 18
_INTEGER = rf"^[+-]?[0-9]{{1,{_DIGITS_MAX}}}$"
_DECIMAL = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"

#: name of a property -> column of its values; null if it is missing
Columns = dict[str, pa.Array]
#: the value of an expression for each message: true, false or null for unknown
Condition = Callable[[Columns, int], pa.Array]

_COMPARE: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], bool]]] = {
    "=": (pc.equal, operator.eq),
    "<>": (pc.not_equal, operator.ne),
    "<": (pc.less, operator.lt),
    "<=": (pc.less_equal, operator.le),
    ">": (pc.greater, operator.gt),
    ">=": (pc.greater_equal, operator.ge),
}
_TEXT_PARTS: dict[str, tuple[Callable[..., Any], Callable[[str, str], bool]]] = {
    "CONTAINS": (pc.match_substring, operator.contains),
    "STARTSWITH": (pc.starts_with, str.startswith),
    "ENDSWITH": (pc.ends_with, str.endswith),
}
_JOINED = {"AND": pc.and_kleene, "OR": pc.or_kleene}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


class SqlFilter:
    """Messages for which an expression is true: `a > 5 AND (b = 'x' OR c IS NULL)`."""

    needs_records = True

    def __init__(self, expression: str) -> None:
        """Raises: Rejected for a wrong expression, naming the wrong part and its position."""
        self.expression = expression
        self._names: set[str] = set()
        self._condition = self._compile(parse(expression))

    def units(self, tags_codes: Int64s) -> Bools | None:
        """Every unit may match: the expression needs properties."""
        return None

    def records(self, properties: pa.Array) -> Bools:
        """Whether the expression is true for each message."""
        columns = {name: property_column(properties, name) for name in self._names}
        found = self._condition(columns, len(properties)).fill_null(False)
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)

    # --- compiling --------------------------------------------------------------------------------

    def _compile(self, part: Expression) -> Condition:
        if isinstance(part, Joined):
            return _join(_JOINED[part.word], [self._compile(each) for each in part.parts])
        if isinstance(part, Not):
            inner = self._compile(part.part)
            return lambda columns, count: pc.invert(inner(columns, count))

        if isinstance(part, SqlComparison):
            return self._compare(part.sign, part.left, part.right, part.span)
        if isinstance(part, Between):
            return self._between(part)
        if isinstance(part, In):
            return self._in(part)
        if isinstance(part, IsNull):
            name = self._name(part.operand)
            return lambda columns, count: columns[name].is_null()
        if isinstance(part, TextPart):
            return self._text_part(part)

        if isinstance(part, Property):
            # Values are texts, and no text is a truth value by itself.
            name = self._name(part)
            return lambda columns, count: _where(columns[name], pa.scalar(False))
        if isinstance(part.value, bool) or part.value is None:
            return _constant(part.value)
        raise self._wrong(part.span, "is not a condition")

    def _wrong(self, span: Span, why: str) -> Rejected:
        return refused(self.expression, span, why)

    def _name(self, operand: Operand) -> str:
        if not isinstance(operand, Property):
            raise self._wrong(operand.span, "is not the name of a property")
        self._names.add(operand.name)
        return operand.name

    def _in(self, part: In) -> Condition:
        name = self._name(part.operand)
        texts = []
        for each in part.values:
            if not isinstance(each, Literal) or not isinstance(each.value, str):
                raise self._wrong(each.span, "is not a text; IN takes a list of texts")
            texts.append(each.value.encode())
        known = pa.array(texts, pa.binary())
        return lambda columns, count: _where(columns[name], pc.is_in(columns[name], known))

    def _text_part(self, part: TextPart) -> Condition:
        """CONTAINS, STARTSWITH, ENDSWITH. An empty text is part of none. Source: ComparisonExpression.

        For two texts the answer is known now. For a value that is not a text, the condition and its NOT are unknown.
        """
        on_columns, on_texts = _TEXT_PARTS[part.word]
        text = part.right.value if isinstance(part.right, Literal) else None
        if not isinstance(text, str):
            raise self._wrong(part.right.span, f"is not a text, which {part.word} needs")

        if isinstance(part.left, Literal):
            known = part.left.value
            if isinstance(known, str) and text:
                return _constant(on_texts(known, text) != part.negated)
            return _constant(False)
        name = self._name(part.left)
        if not text:
            # The same with a NOT.
            return _constant(None)
        if part.negated:
            return lambda columns, count: pc.invert(on_columns(columns[name], text))
        return lambda columns, count: on_columns(columns[name], text)

    def _between(self, part: Between) -> Condition:
        low, high = part.low, part.high
        if (
            isinstance(low, Literal)
            and isinstance(high, Literal)
            and isinstance(low.value, (int, float))
            and isinstance(high.value, (int, float))
            and low.value > high.value
        ):
            raise self._wrong(part.span, "has its larger bound first")
        at_least = self._compare(">=", part.value, low, part.span)
        at_most = self._compare("<=", part.value, high, part.span)
        return _join(pc.and_kleene, [at_least, at_most])

    def _compare(self, sign: str, left: Operand, right: Operand, span: Span) -> Condition:
        """The condition `left sign right`. Raises: Rejected for types that RocketMQ does not compare."""
        for each in (left, right):
            if isinstance(each, Literal) and each.value is None:
                raise self._wrong(each.span, "is not compared; write IS NULL or IS NOT NULL")
        if not isinstance(left, Property) and isinstance(right, Property):
            left, right = right, left
            sign = _TURNED.get(sign, sign)

        if isinstance(left, Literal):
            return self._compare_constants(sign, left, right, span)
        name = self._name(left)
        if isinstance(right, Property):
            return _compare_properties(sign, name, self._name(right))
        value = right.value
        if isinstance(value, (str, bool)) and sign in _TURNED:
            raise self._wrong(right.span, "is compared by size, and is not a number")
        return _compare_with(sign, name, value)

    def _compare_constants(self, sign: str, left: Literal, right: Operand, span: Span) -> Condition:
        """The condition between two values of the expression itself."""
        values = left.value, right.value if isinstance(right, Literal) else None
        kinds = {type(value) for value in values}
        is_same_type = len(kinds) == 1 or not kinds - {int, float}
        if not is_same_type or (sign in _TURNED and isinstance(left.value, (str, bool))):
            raise self._wrong(span, "compares values that cannot be compared")

        _, on_values = _COMPARE[sign]
        return _constant(on_values(*values))


def _compare_properties(sign: str, left: str, right: str) -> Condition:
    """The condition between two properties: of their texts, or by size of their numbers."""
    on_columns, _ = _COMPARE[sign]
    if sign not in _TURNED:
        return lambda columns, count: on_columns(columns[left], columns[right])
    return lambda columns, count: on_columns(_decimals(columns[left]), _decimals(columns[right]))


def _compare_with(sign: str, name: str, value: str | bool | int | float | None) -> Condition:
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


# --- columns --------------------------------------------------------------------------------------


def _constant(value: bool | None) -> Condition:
    return lambda columns, count: pa.repeat(pa.scalar(value, pa.bool_()), count)


def _join(how: Callable[[Any, Any], pa.Array], parts: list[Condition]) -> Condition:
    def joined(columns: Columns, count: int) -> pa.Array:
        # A loop: a long expression would be a deep recursion.
        found = parts[0](columns, count)
        for part in parts[1:]:
            found = how(found, part(columns, count))
        return found

    return joined


def _where(values: pa.Array, then: object) -> pa.Array:
    """`then` for each value that is there, otherwise unknown."""
    return pc.if_else(values.is_valid(), then, pa.nulls(len(values), pa.bool_()))


def _texts(values: pa.Array, pattern: str) -> pa.Array:
    """The values that match, as text without a leading plus."""
    matching = pc.match_substring_regex(values, pattern)
    kept = null_where(pc.invert(matching), values).cast(pa.string())
    return pc.replace_substring_regex(kept, r"^\+", "")


def _integers(values: pa.Array) -> pa.Array:
    lengths = pc.binary_length(values)
    digits = pc.max(lengths).as_py()
    if digits is not None and digits <= _DIGITS_MAX:
        numbers = pa.Array.from_buffers(
            pa.string(), len(values), values.buffers(), offset=values.offset
        )
        if pc.all(pc.ascii_is_decimal(numbers)).as_py():
            # Digits only, as most numbers are: they are read at once.
            return numbers.cast(pa.int64())
    return _texts(values, _INTEGER).cast(pa.int64())


def _decimals(values: pa.Array) -> pa.Array:
    return _texts(values, _DECIMAL).cast(pa.float64())


def _truths(values: pa.Array) -> pa.Array:
    """Java's Boolean.valueOf: any text but "true" is false."""
    return pc.match_substring_regex(values, r"(?i)^true$")
