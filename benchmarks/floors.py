"""Floors: limits that a figure must reach. `--check` makes a missed one an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple


class Floor(NamedTuple):
    """A bound on a figure or ratio. Made by `at_least` and `at_most`."""

    bound: float
    #: whether more is better
    least: bool

    def held(self, value: float) -> bool:
        """Whether a value is on the right side of the bound, or on it."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.bound:,g}"


#: floors for a figure that should be large, and for one that should be small
at_least, at_most = partial(Floor, least=True), partial(Floor, least=False)


class Line(NamedTuple):
    """One line of a benchmark's table."""

    what: str
    figure: str
    #: the figure compared with its limit or peer
    ratio: str = ""
    floor: Floor | None = None
    #: the figures that `floor` judges
    value: float = 0.0
    #: in the place of a floor
    remark: str = ""

    @property
    def missed(self) -> bool:
        """Whether the line has a floor that its value does not reach."""
        return self.floor is not None and not self.floor.held(self.value)

    @property
    def verdict(self) -> str:
        """The last cell: the floor and whether it holds, or the remark."""
        if self.floor is None:
            return self.remark
        return f"{self.floor}  {'MISSED' if self.missed else 'holds'}"


def report(lines: Sequence[Line], *, check: bool, title: str = "") -> int:
    """Print the table. Returns: the exit code, which is 1 only with `check` and a missed floor.

    Args: `title`: a line before the table (default: none).
    """
    if title:
        print(title)
    rows = [(line.what, line.figure, line.ratio, line.verdict) for line in lines]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    missed = [line for line in lines if line.missed]
    for line in missed:
        print(f"missed: {line.what}: {line.value:.3g}, floor {line.floor}")
    return 1 if check and missed else 0
