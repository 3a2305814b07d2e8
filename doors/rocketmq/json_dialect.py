"""The JSON of bodies, which has two dialects.

Java's fastjson writes the keys of a map as they are: numbers without quotes, `{0:"ip:port"}`, and whole objects. The
standard dialect has quoted, sorted keys, and is pure ASCII. RocketMQ writes it for routes that newer clients ask for.

Source: RemotingSerializable, ClientRequestProcessor#getRouteInfoByTopic, fastjson 1.2.83.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import orjson

from .malformed import Malformed

#: objects and arrays inside each other
DEPTH_MAX = 64
#: the largest body that is read: the heartbeat of a client with thousands of groups
BODY_BYTES_MAX = 4 << 20

#: the numbers that JavaScript holds exactly: the standard dialect writes others as text
_SAFE_INT_MAX = (1 << 53) - 1
_ESCAPES = {chr(code): f"\\u{code:04X}" for code in range(32)}
_ESCAPES.update({"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"})
_ESCAPES.update({'"': '\\"', "\\": "\\\\", "/": "\\/"})
#: what each dialect escapes
_ESCAPED = re.compile('[\x00-\x1f"\\\\\x7f-\x9f\u2028\u2029]')
_ESCAPED_STANDARD = re.compile('[^ -~]|["\\\\/]')

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile("true|false|null")
_WORDS = {"true": True, "false": False, "null": None}


class JsonKey(tuple[tuple[str, Any], ...]):
    """An object that is the key of a map: its items, by name. An object in it is a JsonKey, an array a tuple."""

    __slots__ = ()

    @classmethod
    def of(cls, items: Mapping[str, Any]) -> JsonKey:
        """The key of these items, whatever their order."""
        return cls((name, _frozen(items[name])) for name in sorted(items))

    def as_dict(self) -> dict[str, Any]:
        """The items, without those of no value."""
        return dict(self)


def _frozen(value: object) -> object:
    if isinstance(value, Mapping):
        return JsonKey.of(value)
    if isinstance(value, list | tuple) and not isinstance(value, JsonKey):
        return tuple(map(_frozen, value))
    return value


def object_key(key: object) -> JsonKey:
    """The key of a map that has objects as keys: the standard dialect has each as text. Raises: Malformed."""
    if isinstance(key, JsonKey):
        return key
    found = read_json(key.encode("utf-8", "replace")) if isinstance(key, str) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise Malformed("the key of the map is an object")
    return JsonKey.of(found)


# --- writing --------------------------------------------------------------------------------------


def write_json(value: object, *, standard: bool) -> bytes:
    """A body. Keys of a map are all texts, all numbers or all JsonKeys, and are sorted.

    What has no value (None) in a map is left out, as fastjson does; NaN and infinity become null.
    Args: `standard`: the standard dialect, else fastjson's.
    Raises: TypeError for what JSON does not have.
    """
    parts: list[str] = []
    _write(value, parts, standard)
    # Java writes half of a surrogate pair as a question mark, too.
    return "".join(parts).encode("utf-8", "replace")


def _write(value: object, parts: list[str], standard: bool) -> None:
    if isinstance(value, str):
        parts.append(_quoted(value, standard))
    elif value is None or value is True or value is False:
        parts.append("null" if value is None else "true" if value else "false")
    elif isinstance(value, int):
        is_text = standard and abs(value) > _SAFE_INT_MAX
        parts.append(f'"{value:d}"' if is_text else f"{value:d}")
    elif isinstance(value, float):
        parts.append(repr(value) if math.isfinite(value) else "null")

    elif isinstance(value, Mapping):
        _write_items(value, parts, standard)
    elif isinstance(value, JsonKey):
        _write_items(value.as_dict(), parts, standard)
    elif isinstance(value, list | tuple):
        between = "["
        for each in value:
            parts.append(between)
            _write(each, parts, standard)
            between = ","
        parts.append("]" if value else "[]")
    else:
        raise TypeError(f"JSON has no {type(value).__name__}")


def _write_items(items: Mapping[Any, Any], parts: list[str], standard: bool) -> None:
    between = "{"
    for key in sorted(items):
        value = items[key]
        if value is None:
            continue
        parts.append(between)
        if isinstance(key, str):
            parts.append(_quoted(key, standard))
        else:
            own: list[str] = []
            _write(key, own, standard)
            text = "".join(own)
            parts.append(_quoted(text, standard) if standard else text)
        parts.append(":")
        _write(value, parts, standard)
        between = ","
    parts.append("}" if between == "," else "{}")


def _quoted(text: str, standard: bool) -> str:
    pattern = _ESCAPED_STANDARD if standard else _ESCAPED
    return f'"{pattern.sub(_escape, text)}"'


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    known = _ESCAPES.get(character)
    if known is not None:
        return known
    code = ord(character)
    if code < 1 << 16:
        return f"\\u{code:04X}"
    code -= 1 << 16
    return f"\\u{0xD800 | code >> 10:04X}\\u{0xDC00 | code & 0x3FF:04X}"


# --- reading --------------------------------------------------------------------------------------


def read_json(data: bytes | memoryview, *, max_bytes: int = BODY_BYTES_MAX) -> Any:
    """The value of a body in either dialect.

    A key is text, also one that has no quotes, so that `{0:1}` and `{"0":1}` are the same. An object is a JsonKey;
    the standard dialect has it as text (`object_key`).
    Raises: Malformed for damage, more than `max_bytes`, and more than DEPTH_MAX objects and arrays in each other.
    """
    if len(data) > max_bytes:
        raise Malformed(f"a body in JSON has up to {max_bytes} bytes, not {len(data)}")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        # Not the standard dialect, or not JSON at all.
        return _Reader(_text(data)).read()
    _check_depth(found)
    return found


def _text(data: bytes | memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise Malformed("a body in JSON is UTF-8") from None


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise _too_deep()


def _inner(value: object) -> Iterator[object]:
    if type(value) is dict:
        yield from value.values()
    elif type(value) is list:
        yield from value


def _too_deep() -> Malformed:
    return Malformed(f"a body in JSON has up to {DEPTH_MAX} objects and arrays in each other")


class _Reader:
    """Reads one text. Methods take the place where something begins, and give the place after it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self) -> Any:
        """The value of the text. Raises: Malformed."""
        value, at = self._value(self._skip(0), DEPTH_MAX)
        if at != len(self._text):
            raise self._fault(at)
        return value

    def _skip(self, at: int) -> int:
        """The place after white space."""
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

    def _fault(self, at: int) -> Malformed:
        return Malformed(f"a body in JSON is damaged at character {at}")

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins here, and the place after it and white space."""
        value: Any
        first = self._text[at : at + 1]
        if first == "{":
            value, at = self._object(at + 1, depth - 1)
        elif first == "[":
            value, at = self._array(at + 1, depth - 1)
        elif first == '"':
            value, at = self._string(at)
        else:
            value, at = self._scalar(at)
        return value, self._skip(at)

    def _string(self, at: int) -> tuple[str, int]:
        found = _STRING.match(self._text, at)
        if found is None:
            raise self._fault(at)
        return self._plain(found)

    def _plain(self, found: re.Match[str]) -> tuple[Any, int]:
        """The value of a text or number."""
        try:
            return orjson.loads(found[0]), found.end()
        except orjson.JSONDecodeError:
            # An escape that does not exist, half of a surrogate pair, an infinite number.
            raise self._fault(found.start()) from None

    def _scalar(self, at: int) -> tuple[Any, int]:
        if word := _WORD.match(self._text, at):
            return _WORDS[word[0]], word.end()
        if number := _NUMBER.match(self._text, at):
            return self._plain(number)
        raise self._fault(at)

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []

        def one(at: int) -> int:
            value, at = self._value(at, depth)
            values.append(value)
            return at

        return values, self._each(at, depth, "]", one)

    def _object(self, at: int, depth: int) -> tuple[dict[Any, Any], int]:
        items: dict[Any, Any] = {}

        def one(at: int) -> int:
            key, at = self._key(at, depth)
            if self._text[at : at + 1] != ":":
                raise self._fault(at)
            items[key], at = self._value(self._skip(at + 1), depth)
            return at

        return items, self._each(at, depth, "}", one)

    def _each(self, at: int, depth: int, end: str, one: Callable[[int], int]) -> int:
        """Read all between the opening bracket before `at` and its `end`. Returns: the place after that."""
        if depth < 0:
            raise _too_deep()
        at = self._skip(at)
        if self._text[at : at + 1] == end:
            return at + 1
        while True:
            at = one(at)
            after = self._text[at : at + 1]
            if after == end:
                return at + 1
            if after != ",":
                raise self._fault(at)
            at = self._skip(at + 1)

    def _key(self, at: int, depth: int) -> tuple[str | JsonKey, int]:
        begin = at
        key, at = self._value(at, depth)
        if isinstance(key, str):
            return key, at
        if isinstance(key, dict):
            if not all(isinstance(name, str) for name in key):
                raise self._fault(begin)
            return JsonKey.of(cast("dict[str, Any]", key)), at
        if isinstance(key, list):
            raise self._fault(begin)
        # A number or word is its own text.
        return self._text[begin:at].rstrip(" \t\n\r"), at
