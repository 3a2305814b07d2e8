"""How much a run of the tests proves: `python3 run.py test` some, everything else all.

A quick run leaves out what has the mark `thorough`, and repeats less often what is repeated at random.
"""

from __future__ import annotations

import os

import pytest

#: in the environment of a quick run (tests/lanes.py)
VARIABLE = "RAYMQ_QUICK"
IS_QUICK = VARIABLE in os.environ


def thorough(is_slow: bool) -> list[pytest.MarkDecorator]:
    """The marks of one of several cases. Args: `is_slow`: a quick run leaves it out."""
    return [pytest.mark.thorough] if is_slow else []


def rounds(name: str, *, thorough: int, quick: int) -> int:
    """How often something is repeated. Args: `name`: of the variable of the environment that says it."""
    return int(os.environ.get(name, quick if IS_QUICK else thorough))


def share(name: str, *, quick: float) -> float:
    """A factor of repetitions, 1 if nothing else is said. Args: `name`: as in `rounds`."""
    return float(os.environ.get(name, quick if IS_QUICK else 1))
