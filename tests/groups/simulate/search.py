"""All schedules of a world, breadth first, up to bounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from .world import Broken, World


class Found(NamedTuple):
    """How far a search came."""

    states: int
    depth: int
    #: no schedule was left out
    is_whole: bool


def search(
    bounds: Any,
    *,
    states: int,
    depth: int = 99,
    seconds: float = 1e9,
    make: Callable[[Any], Any] = World,
) -> Found:
    """Visit every state that some schedule reaches, once. Raises: Broken with the schedule.

    Args: `make`: as of `run_seeds`.
    """
    began = time.monotonic()
    first = make(bounds)
    seen = {first.key()}
    todo: deque[tuple[Any, int, tuple[object, ...]]] = deque([(first, 0, ())])
    visited = deepest = 0
    is_whole = True
    while todo:
        world, steps, path = todo.popleft()
        visited, deepest = visited + 1, max(deepest, steps)
        if visited >= states or time.monotonic() - began >= seconds:
            return Found(visited, deepest, False)
        if steps >= depth:
            is_whole = False
            continue

        for event in world.events():
            after = world.copy()
            here = (path, event)
            try:
                event.run(after)
                after.check()
            except Broken as broken:
                raise Broken(*broken.args, _schedule(here)) from broken
            key = after.key()
            if key not in seen:
                seen.add(key)
                todo.append((after, steps + 1, here))
    return Found(visited, deepest, is_whole)


def _schedule(path: tuple[object, ...]) -> list[str]:
    found: list[object] = []
    while path:
        path, event = path  # type: ignore[assignment]
        found.append(event)
    return [*map(str, reversed(found))]
