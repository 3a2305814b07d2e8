"""The syntax of SQL92 filters: an expression as a tree whose parts know where they are in the text.

Source: SelectorParser.jj, RocketMQ 5.3.3. NOT differs: it stands before a whole comparison, as in SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from raymq.store.base.errors import Rejected

#: brackets and NOTs inside each other. Each level is eight calls, and the caller may have many already
DEPTH_MAX = 50
#: characters of an expression that an error repeats
_SHOWN_CHARS = 160
_LONG_MAX = (1 << 63) - 1
_DOUBLE_MAX = 1.7976931348623157e308
_DIGITS_MAX = 1000

_TOKEN = re.compile(
    r"""
    (?P<space> (?: [ \t\n\r\f] | --[^\r\n]* | /\*.*?\*/ )+ )
    | (?P<number> (?: [0-9]+\.[0-9]* | \.[0-9]+ | [0-9]+ ) (?: [eE][+-]?[0-9]+ )? )
    | (?P<text> '(?:[^']|'')*' )
    | (?P<word> [A-Za-z_$][A-Za-z0-9_$]* )
    | (?P<sign> <> | != | <= | >= | [=<>(),-] )
    """,
    re.VERBOSE | re.DOTALL,
)
TEXT_WORDS = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_NEGATABLE = frozenset(("BETWEEN", "IN", *TEXT_WORDS))
_CONSTANTS = {"TRUE": True, "FALSE": False, "NULL": None}
_WORDS = _NEGATABLE | _CONSTANTS.keys() | {"AND", "OR", "NOT", "IS"}
#: what follows a value that is tested
_TESTS = _NEGATABLE | {"IS", "=", "<>", "!=", "<", "<=", ">", ">="}


class Span(NamedTuple):
    """The part [start, end) of an expression."""

    start: int
    end: int


class Property(NamedTuple):
    """A property by its name."""

    name: str
    span: Span


class Literal(NamedTuple):
    """A value in the expression itself; None for NULL."""

    value: str | int | float | bool | None
    span: Span


Operand: TypeAlias = "Property | Literal"


class SqlComparison(NamedTuple):
    """`left sign right`."""

    sign: str
    left: Operand
    right: Operand
    span: Span


class Between(NamedTuple):
    """`value BETWEEN low AND high`."""

    value: Operand
    low: Operand
    high: Operand
    span: Span


class In(NamedTuple):
    """`operand IN (values)`."""

    operand: Operand
    values: tuple[Operand, ...]
    span: Span


class IsNull(NamedTuple):
    """`operand IS NULL`."""

    operand: Operand
    span: Span


class TextPart(NamedTuple):
    """`left CONTAINS right`, or another of TEXT_WORDS, perhaps with a NOT before the word."""

    word: str
    negated: bool
    left: Operand
    right: Operand
    span: Span


class Not(NamedTuple):
    """`NOT part`."""

    part: Expression
    span: Span


class Joined(NamedTuple):
    """Parts with AND, or with OR, between them."""

    word: str
    parts: tuple[Expression, ...]
    span: Span


Expression: TypeAlias = "Operand | SqlComparison | Between | In | IsNull | TextPart | Not | Joined"


class _Token(NamedTuple):
    #: number, text, sign, end, name, or a word of _WORDS
    kind: str
    text: str
    span: Span


def refused(expression: str, span: Span, why: str) -> Rejected:
    """The error of a fault in an expression, with its position: characters count from 1."""
    position = span.start + 1
    part = expression[span.start : span.end]
    named = repr(part) if part else "the end"
    return Rejected(
        f"{_shown(expression, span.start)} is not a valid filter: {named} at character {position} {why}. A filter has "
        "properties, numbers, 'texts', TRUE, FALSE, =, <>, <, <=, >, >=, BETWEEN, IN, CONTAINS, STARTSWITH, ENDSWITH, "
        "IS NULL, AND, OR, NOT and brackets",
        field="filter",
        limit="SQL92 conditions over properties",
        position=position,
    )


def _shown(expression: str, at: int) -> str:
    """The expression, or what is around a position of a long one."""
    if len(expression) <= _SHOWN_CHARS:
        return repr(expression)
    begin = max(0, at - _SHOWN_CHARS // 2)
    end = begin + _SHOWN_CHARS
    before, after = "..." if begin else "", "..." if end < len(expression) else ""
    return f"{before}{expression[begin:end]!r}{after}"


def parse(expression: str) -> Expression:
    """The tree of an expression. Raises: Rejected with the position of the fault."""
    return _Parser(expression).parse()


class _Parser:
    """Reads an expression from left to right, one method for each level of precedence."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = _tokens(expression)
        self._at = 0
        self._depth = 0

    def parse(self) -> Expression:
        found = self._or()
        if self._kind != "end":
            raise self._wrong("is not expected here; AND, OR or the end may follow")
        return found

    # --- tokens -----------------------------------------------------------------------------------

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    @property
    def _kind(self) -> str:
        return self._token.kind

    def _next(self) -> _Token:
        token = self._token
        self._at += 1
        return token

    def _takes(self, kind: str) -> bool:
        """Whether the next token is this one, which is passed then."""
        if self._kind != kind:
            return False
        self._at += 1
        return True

    def _need(self, kind: str) -> None:
        if not self._takes(kind):
            raise self._wrong(f"stands where {kind} is needed")

    def _span(self, start: int) -> Span:
        """From a position to the end of the last token that was taken."""
        return Span(start, self._tokens[self._at - 1].span.end)

    def _wrong(self, why: str) -> Rejected:
        return refused(self._expression, self._token.span, why)

    # --- levels -----------------------------------------------------------------------------------

    def _or(self) -> Expression:
        return self._joined("OR", self._and)

    def _and(self) -> Expression:
        return self._joined("AND", self._not)

    def _joined(self, word: str, part: Callable[[], Expression]) -> Expression:
        start = self._token.span.start
        parts = [part()]
        while self._takes(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Joined(word, tuple(parts), self._span(start))

    def _not(self) -> Expression:
        if self._kind != "NOT":
            return self._test()
        start = self._deeper().span.start
        part = self._not()
        self._depth -= 1
        return Not(part, self._span(start))

    def _deeper(self) -> _Token:
        """Take a token that another level follows."""
        if self._depth >= DEPTH_MAX:
            raise self._wrong(f"is nested too deeply: {DEPTH_MAX} levels are allowed")
        self._depth += 1
        return self._next()

    def _test(self) -> Expression:
        """A value or brackets, and what it is tested by."""
        start = self._token.span.start
        found = self._primary()
        while True:
            negated = self._kind == "NOT" and self._tokens[self._at + 1].kind in _NEGATABLE
            tested = self._tokens[self._at + negated]
            if tested.kind not in _TESTS:
                return found
            left = self._as_operand(found)
            self._at += negated + 1
            made = self._tested(tested, left, start, negated)
            found = Not(made, made.span) if negated and not isinstance(made, TextPart) else made

    def _tested(
        self, tested: _Token, left: Operand, start: int, negated: bool
    ) -> SqlComparison | Between | In | IsNull | TextPart | Not:
        if tested.kind == "IS":
            is_not = self._takes("NOT")
            self._need("NULL")
            found = IsNull(left, self._span(start))
            return Not(found, found.span) if is_not else found
        if tested.kind == "BETWEEN":
            low = self._operand()
            self._need("AND")
            return Between(left, low, self._operand(), self._span(start))
        if tested.kind == "IN":
            self._need("(")
            values = [self._operand()]
            while self._takes(","):
                values.append(self._operand())
            self._need(")")
            return In(left, tuple(values), self._span(start))

        right = self._operand()
        if tested.kind in TEXT_WORDS:
            return TextPart(tested.kind, negated, left, right, self._span(start))
        sign = "<>" if tested.text == "!=" else tested.text
        return SqlComparison(sign, left, right, self._span(start))

    def _operand(self) -> Operand:
        return self._as_operand(self._primary())

    def _as_operand(self, found: Expression) -> Operand:
        if isinstance(found, (Property, Literal)):
            return found
        why = "is not a property, number, text, TRUE or FALSE"
        raise refused(self._expression, found.span, why)

    def _primary(self) -> Expression:
        kind, span = self._kind, self._token.span
        if kind == "(":
            self._deeper()
            found = self._or()
            self._need(")")
            self._depth -= 1
            return found
        if kind == "-":
            self._next()
            if self._kind != "number":
                raise self._wrong("follows a minus, which only numbers have")
            value = self._number(self._next())
            return Literal(-value, self._span(span.start))

        if kind == "name":
            return Property(self._next().text, span)
        if kind == "number":
            return Literal(self._number(self._next()), span)
        if kind == "text":
            return Literal(self._next().text[1:-1].replace("''", "'"), span)
        if kind in _CONSTANTS:
            self._next()
            return Literal(_CONSTANTS[kind], span)
        raise self._wrong("stands where a property or a value is needed")

    def _number(self, token: _Token) -> int | float:
        text = token.text
        # Python itself refuses whole numbers of some thousand digits.
        is_whole = text.isdigit() and len(text) <= _DIGITS_MAX
        value = int(text) if is_whole else float(text)
        if value > (_LONG_MAX if text.isdigit() else _DOUBLE_MAX):
            raise refused(self._expression, token.span, "is too large")
        return value


def _tokens(expression: str) -> list[_Token]:
    """The tokens, and an end. Raises: Rejected for characters that begin none."""
    found: list[_Token] = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            begins_text = expression[at] == "'"
            why = "begins a text without an end" if begins_text else "has no meaning in a filter"
            raise refused(expression, Span(at, at + 1), why)

        kind, text = str(match.lastgroup), match.group()
        span = Span(at, match.end())
        at = match.end()

        if kind == "word":
            kind = text.upper() if text.upper() in _WORDS else "name"
        elif kind == "sign":
            kind = text
        if kind != "space":
            found.append(_Token(kind, text, span))
    # Two, because a NOT is looked at together with the token after it.
    end = _Token("end", "", Span(len(expression), len(expression)))
    return [*found, end, end]
