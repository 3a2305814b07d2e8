"""All schedules of a world, breadth first, up to bounds."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from .world import Bounds, Broken, Event, World


class Found(NamedTuple):
    """How far a search came."""

    states: int
    depth: int
    #: no schedule was left out
    is_whole: bool


def search(bounds: Bounds, *, states: int, depth: int = 99, seconds: float = 1e9) -> Found:
    """Visit every state that some schedule reaches, once. Raises: Broken with the schedule."""
    began = time.monotonic()
    first = World(bounds)
    seen = {first.key()}
    todo: deque[tuple[World, int, tuple[object, ...]]] = deque([(first, 0, ())])
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
    found: list[Event] = []
    while path:
        path, event = path  # type: ignore[assignment]
        found.append(event)  # type: ignore[arg-type]
    return [*map(str, reversed(found))]
