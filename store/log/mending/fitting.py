"""Whether bytes of another replica are those that this one has lost: the chain decides. Nothing is read here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from raymq.store.base.checksum import crc32c
from raymq.store.log.chain import ChainUnit


class SoundBytes(NamedTuple):
    """Log bytes of a replica, which that replica has compared with its own chain."""

    #: physical offset of the first byte
    start: int
    data: bytes
    #: the units of that replica's chain that overlap the bytes, in order
    units: list[ChainUnit]

    @property
    def end(self) -> int:
        """Physical offset after the last byte."""
        return self.start + len(self.data)


class ChainWindow(NamedTuple):
    """Neighbouring units of a chain: those that overlap a range, and one on each side."""

    #: None: the chain begins with `units`
    before: ChainUnit | None
    units: list[ChainUnit]
    #: None: the chain ends with `units`
    after: ChainUnit | None

    @property
    def is_linked(self) -> bool:
        """Whether each unit follows the one before. Then all but the last one are those that were written.

        The next unit holds the chain value, which depends on every field of a unit.
        """
        row = [self.before, *self.units, self.after]
        return bool(self.units) and are_linked([unit for unit in row if unit is not None])


def are_linked(units: Sequence[ChainUnit]) -> bool:
    """Whether each unit begins at the end of the one before, with its chain value."""
    return all(
        last.end == unit.start and last.value == unit.previous for last, unit in pairwise(units)
    )


def covers(units: Sequence[ChainUnit], start: int, stop: int) -> bool:
    """Whether linked units have every byte of [start, stop)."""
    return bool(units) and units[0].start <= start and stop <= units[-1].end


def misfit(unit: ChainUnit, found: SoundBytes) -> str | None:
    """Why the bytes of another replica may not replace those of a unit of this one; None: they may.

    The units of the other replica may have other edges, if one of the two chains was made again. The CRC and the epoch
    of this replica's own unit count in any case.
    """
    if (found.start, found.end) != (unit.start, unit.end):
        return f"bytes [{found.start}, {found.end}) arrived"
    if not covers(found.units, unit.start, unit.end) or not are_linked(found.units):
        return "its chain units do not cover these bytes"
    epochs = sorted({each.epoch for each in found.units})
    if epochs != [unit.epoch]:
        return f"it has bytes of epoch {', '.join(map(str, epochs))} there, not of {unit.epoch}"
    if crc32c(found.data) != unit.crc:
        return "its bytes differ from those that were stored here"
    return None
