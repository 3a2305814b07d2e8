"""Incarnations: each process of a replica has its own, and it names the generation of the replica.

An operator who replaces a replica for good gives its place to one of the next generation, with an empty directory.
"""

from __future__ import annotations

#: the upper bits of an incarnation are the generation, those below are random. An incarnation is a positive 64-bit
#: number in shared memory, so that a generation has 15 bits
GENERATION_SHIFT = 48


def make_incarnation(generation: int, chance: int) -> int:
    """The incarnation of a new process. Args: `chance`: a random number below 2 ** GENERATION_SHIFT."""
    return generation << GENERATION_SHIFT | chance


def generation_of(incarnation: int) -> int:
    """How often the replica had been replaced when the process was made."""
    return incarnation >> GENERATION_SHIFT
