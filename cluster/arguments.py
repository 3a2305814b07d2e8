"""Checks of a caller's arguments, made before a request is sent. Does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from raymq.store.errors import Rejected

_NO_LIMIT = float("inf")
OFFSET_MAX = 2**63 - 1


def check_number(
    name: str, value: Any, minimum: float, maximum: float = _NO_LIMIT, *, whole: bool = True
) -> None:
    """Raises: Rejected unless `value` is a number (and not a bool) from `minimum` to `maximum`."""
    kind: Any = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool) or not minimum <= value <= maximum:
        limit = f"{minimum:g} or more" if maximum == _NO_LIMIT else f"{minimum:g} to {maximum:g}"
        message = f"{name} is {value!r}; use a {'whole ' if whole else ''}number, {limit}"
        raise Rejected(message, field=name, limit=limit)


def check_text(name: str, value: Any) -> None:
    """Raises: Rejected unless `value` is text."""
    if not isinstance(value, str):
        message = f"{name} is {value!r}, a {type(value).__name__}; give text"
        raise Rejected(message, field=name, limit="str")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises: Rejected unless `value` is one of the choices."""
    if value not in choices:
        message = f"{name} is {value!r}; use {' or '.join(map(repr, choices))}"
        raise Rejected(message, field=name, limit=", ".join(choices))


def check_offsets(offsets: Mapping[int, int]) -> None:
    """Raises: Rejected unless every value of this mapping from queue id to offset is an offset."""
    for queue_id, offset in offsets.items():
        check_number(f"the offset of queue {queue_id}", offset, 0, OFFSET_MAX)
