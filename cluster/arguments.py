"""Checks numbers, texts and names of callers before anything is sent. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from raymq.store.errors import Rejected

_ANY = float("inf")
OFFSET_MAX = 2**63 - 1


def check_number(
    name: str, value: Any, least: float, most: float = _ANY, *, whole: bool = True
) -> None:
    """Raises: Rejected unless `value` is a number (and not a bool) from `least` to `most`."""
    kind: Any = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
        limit = f"{least:g} or more" if most == _ANY else f"{least:g} to {most:g}"
        raise Rejected(
            f"{name} is {value!r}; use a {'whole ' if whole else ''}number, {limit}",
            field=name,
            limit=limit,
        )


def check_text(name: str, value: Any) -> None:
    """Raises: Rejected unless `value` is text."""
    if not isinstance(value, str):
        raise Rejected(
            f"{name} is {value!r}, a {type(value).__name__}; give text", field=name, limit="str"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises: Rejected unless `value` is one of the choices."""
    if value not in choices:
        raise Rejected(
            f"{name} is {value!r}; use {' or '.join(map(repr, choices))}",
            field=name,
            limit=", ".join(choices),
        )


def check_offsets(offsets: Mapping[int, int]) -> None:
    """Check queue_id -> offset. Raises: Rejected for a value that is not an offset."""
    for queue_id, offset in offsets.items():
        check_number(f"the offset of queue {queue_id}", offset, 0, OFFSET_MAX)
