"""Waiting for other processes without sleeping blindly."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 90.0


def until(condition: Callable[[], bool], step: Callable[[], object]) -> None:
    """Repeat `step` (which waits for something itself) until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {DEADLINE_S} s")
        step()
