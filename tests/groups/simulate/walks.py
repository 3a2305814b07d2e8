"""Random runs of the world."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .world import Broken, World


def run_seeds(
    seeds: Iterable[int], bounds: Any, *, steps: int, make: Callable[[Any], Any] = World
) -> Counter[str]:
    """Run each seed. Returns: how often each kind of event happened.

    Args: `make`: makes the world of a run: of groups, or of leases.

    Raises: Broken with the seed and the events before it.
    """
    figures: Counter[str] = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        world = make(_some_faults(bounds, chance))
        trace: list[Any] = []
        try:
            _run(world, chance, steps, trace, figures)
            world.heal(chance.choice)
        except AssertionError as broken:
            raise Broken(f"seed {seed}", *broken.args, [*map(str, trace)]) from broken
        figures["runs"] += 1
    return figures


def _some_faults(bounds: Any, chance: random.Random) -> Any:
    """Each run has other kinds and numbers of faults."""
    faults = tuple(
        (kind, 0 if chance.random() < 0.35 else chance.randint(1, 2 * most + 1) if most else 0)
        for kind, most in bounds.faults
    )
    return replace(bounds, faults=faults)


def _run(
    world: Any, chance: random.Random, steps: int, trace: list[Any], figures: Counter[str]
) -> None:
    for _ in range(steps):
        events = world.events()
        if not events:
            return
        (event,) = chance.choices(events, [each.weight for each in events])
        trace.append(event)
        event.run(world)
        world.check()
        figures["steps"] += 1
        figures[event.kind] += 1
