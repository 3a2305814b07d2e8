"""Checks of a caller's arguments before a request is sent, and of options that are passed on. Does not import Ray."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from raymq.store.base.errors import Rejected

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NO_LIMIT = float("inf")
OFFSET_MAX = 2**63 - 1


def check_number(
    name: str, value: object, minimum: float, maximum: float = _NO_LIMIT, *, whole: bool = True
) -> None:
    """Raises: Rejected unless `value` is a number (and not a bool) from `minimum` to `maximum`."""
    if type(value) is int and minimum <= value <= maximum:
        return
    kind: Any = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool) or not minimum <= value <= maximum:
        limit = f"{minimum:g} or more" if maximum == _NO_LIMIT else f"{minimum:g} to {maximum:g}"
        message = f"{name} is {value!r}; use a {'whole ' if whole else ''}number, {limit}"
        raise Rejected(message, field=name, limit=limit)


def wait_s(timeout: float | None) -> float | None:
    """A timeout as waits of `threading` take it: None, no limit, also for more seconds than they can count.

    Raises: Rejected for NaN and for what is no number.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, Real) or timeout != timeout:
        message = f"timeout is {timeout!r}; give seconds, or None to wait without limit"
        raise Rejected(message, field="timeout", limit="seconds or None")
    return None if timeout >= threading.TIMEOUT_MAX else float(timeout)


def plain_int(value: Any) -> Any:
    """An int in the place of another integer, such as numpy's: calls of shards take no others. Else the value."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_integer else value


def check_text(name: str, value: object) -> None:
    """Raises: Rejected unless `value` is text."""
    if not isinstance(value, str):
        message = f"{name} is {value!r}, a {type(value).__name__}; give text"
        raise Rejected(message, field=name, limit="str")
    check_unicode(name, value)


def check_unicode(name: str, value: str) -> None:
    """Raises: Rejected for text with half of a surrogate pair, which UTF-8 cannot hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        message = f"{name} is {value!r}, with half of a surrogate pair; replace that character"
        raise Rejected(message, field=name, limit="Unicode text") from None


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises: Rejected unless `value` is one of the choices."""
    if value not in choices:
        message = f"{name} is {value!r}; use {' or '.join(map(repr, choices))}"
        raise Rejected(message, field=name, limit=", ".join(choices))


def check_offset(queue_id: int, offset: object) -> None:
    """Raises: Rejected unless this is an offset."""
    # Without its name most of the time: a commit may have a thousand queues.
    if type(offset) is not int or not 0 <= offset <= OFFSET_MAX:
        check_number(f"the offset of queue {queue_id}", offset, 0, OFFSET_MAX)


def check_offsets(offsets: Mapping[int, int]) -> None:
    """Raises: Rejected unless every value of this mapping from queue id to offset is an offset."""
    for queue_id, offset in offsets.items():
        check_offset(queue_id, offset)


def clean_token(field: str, token: str | None) -> str:
    """A token that a user gave, without space around it: files and Kubernetes' secrets end in a newline.

    Returns: "" for None. Raises: Rejected for characters that no token has. The error does not show the token.
    """
    text = (token or "").strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise Rejected(
            f"{field} has a character that no token has; give the content of the file `token` in the data directory",
            field=field,
            limit="visible ASCII characters",
        )
    return text


def takes_options_of(described: Callable[..., object]) -> Callable[[_Function], _Function]:
    """Decorate a function that passes `**options` on: its signature then shows the keywords of `described`."""

    def decorate(function: _Function) -> _Function:
        shown = inspect.signature(function)
        own = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
        passed = [
            each
            for name, each in inspect.signature(described).parameters.items()
            if each.kind is each.KEYWORD_ONLY and name not in shown.parameters
        ]
        # The function's own keywords come last.
        parameters = sorted(own + passed, key=lambda each: (each.kind, each in own))
        function.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate
