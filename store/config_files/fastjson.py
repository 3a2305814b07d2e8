"""JSON as RocketMQ's configuration files have it: fastjson's dialect, read leniently, written as fastjson writes it.

fastjson writes integer keys without quotes, `{0:12,1:3}`, which is not JSON. It reads names without quotes, single
quotes and commas too many. Integer keys stay integers here, so a table is written as it was read.
Source: fastjson 1.2.83 with its default features, as ConfigManager of RocketMQ 5.3.3 uses it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

#: RocketMQ writes no file nested deeper
DEPTH_MAX = 64

_GAP = re.compile(r"[\s,]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NAME = re.compile(r"[^\s,:{}\[\]'\"]+")
_STRING = {'"': re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)}
_STRING["'"] = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_WORDS = {"true": True, "false": False, "null": None}


class NotJson(ValueError):
    """A text that is not a value: why, and at which character."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(f"{reason} at character {at}")
        self.at = at


def loads(text: str) -> object:
    """The value in a text. Raises: NotJson."""
    reader = _Reader(text.removeprefix("\ufeff"))
    value = reader.value(0)
    reader.end()
    return value


class _Reader:
    """One walk through a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _fail(self, expected: str) -> NoReturn:
        raise NotJson(f"expected {expected}", self._at)

    def _peek(self) -> str:
        """The next character that is not a separator; empty at the end. Commas separate as blanks do."""
        found = _GAP.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._text[self._at : self._at + 1]

    def end(self) -> None:
        """Check that the text ends here."""
        if self._peek():
            self._fail("the end")

    def value(self, depth: int) -> Any:
        """Read any value."""
        first = self._peek()
        if depth > DEPTH_MAX:
            self._fail(f"at most {DEPTH_MAX} levels")

        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._array(depth)
        if first in _STRING:
            return self._string(first)

        number = _NUMBER.match(self._text, self._at)
        if number:
            self._at = number.end()
            is_decimal = re.search(r"[.eE]", number[0])
            return float(number[0]) if is_decimal else int(number[0])

        word = _NAME.match(self._text, self._at)
        if word is None or word[0] not in _WORDS:
            self._fail("a value")
        self._at = word.end()
        return _WORDS[word[0]]

    def _object(self, depth: int) -> dict[str | int, object]:
        self._at += 1
        found: dict[str | int, Any] = {}
        while (first := self._peek()) != "}":
            name = self._name(first)
            if self._peek() != ":":
                self._fail("':'")
            self._at += 1
            found[name] = self.value(depth + 1)
        self._at += 1
        return found

    def _name(self, first: str) -> str | int:
        if first in _STRING:
            return self._string(first)
        word = _NAME.match(self._text, self._at)
        if word is None:
            self._fail("a name or '}'")
        self._at = word.end()
        number = re.fullmatch(r"-?\d{1,19}", word[0], re.ASCII)
        return int(word[0]) if number else word[0]

    def _array(self, depth: int) -> list[object]:
        self._at += 1
        found = []
        while self._peek() != "]":
            found.append(self.value(depth + 1))
        self._at += 1
        return found

    def _string(self, quote: str) -> str:
        found = _STRING[quote].match(self._text, self._at)
        if found is None:
            self._fail("the end of a text")
        self._at = found.end()
        text = _ESCAPE.sub(_unescape, found[1])
        # Java escapes a character of two UTF-16 units as two.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "ux" and len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code)


def dumps(value: object) -> str:
    """A value as fastjson's pretty format: tabs, integer keys without quotes, names in order.

    Lists, and tables of integer keys, take one line.
    """
    return _write(value, 0)


def _write(value: object, depth: int) -> str:
    if isinstance(value, dict):
        return _write_object(value, depth)
    if isinstance(value, list):
        return "[" + ",".join(_write(each, depth) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _write_object(value: dict[object, object], depth: int) -> str:
    if not value:
        return "{}"
    tabs = "\t" * (depth + 1)
    rows = []
    for name in sorted(value, key=lambda name: (isinstance(name, str), name)):
        text = _write(value[name], depth + 1)
        if isinstance(name, int):
            rows.append(f"{name}:{text}")
        else:
            rows.append(f"\n{tabs}{json.dumps(name, ensure_ascii=False)}:{text}")
    return "{" + ",".join(rows) + "\n" + "\t" * depth + "}"
