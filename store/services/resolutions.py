"""The outcomes of half messages: two bits per offset, in blocks, kept in the shard's progress.

`Resolutions` only reads a progress table (`ShardState.progress`). `resolve` returns the changes to store, and the
table changes once these are in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

#: offsets of one block: a value of 128 hex digits
BLOCK = 256
#: blocks that are kept below the first open half message, so that a repeated call gets the answer of the first one
KEPT_BLOCKS = 4
_MIN = "min"
#: the lower bit of each pair of a block
_LOWER_BITS = int("01" * BLOCK, 2)


class Resolution(Enum):
    """The outcome of a half message."""

    OPEN = 0
    COMMIT = 1
    ROLLBACK = 2
    #: checked too often, too old, or resolved by RocketMQ, which does not note the outcome
    DISCARD = 3


class Resolutions:
    """The outcomes in a table, which is never changed here."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    @property
    def min_open(self) -> int:
        """Every half message below this offset is resolved."""
        return int(self._table.get(_MIN, 0))

    def of(self, offset: int) -> Resolution | None:
        """The outcome of the half message at an offset; None: resolved too long ago to know."""
        block, pair = divmod(offset, BLOCK)
        value = self._table.get(str(block))
        if value is None:
            return None if offset < self.min_open else Resolution.OPEN
        return Resolution((int(value, 16) >> (2 * pair)) & 3)

    def open_ones(self, end: int) -> Iterator[int]:
        """Offsets of open half messages below `end`, ascending."""
        offset = self.min_open
        while offset < end:
            if offset % BLOCK == 0 and self._is_whole(offset // BLOCK, {}):
                offset += BLOCK
                continue
            if self.of(offset) is Resolution.OPEN:
                yield offset
            offset += 1

    def resolve(self, found: Mapping[int, Resolution]) -> dict[str, object]:
        """The changes to store for the half messages `found`: new values of blocks, and None for dropped blocks."""
        blocks: dict[int, int] = {}
        for offset, resolution in found.items():
            block, pair = divmod(offset, BLOCK)
            if block not in blocks:
                blocks[block] = int(self._table.get(str(block), "0"), 16)
            blocks[block] |= resolution.value << (2 * pair)

        low = self.min_open
        while self._resolved(low, blocks):
            # Whole blocks at once: one half message may have been open while millions were resolved.
            whole = low % BLOCK == 0 and self._is_whole(low // BLOCK, blocks)
            low += BLOCK if whole else 1

        values: dict[str, Any] = {
            str(block): f"{value:0{BLOCK // 2}x}" for block, value in blocks.items()
        }
        if low != self.min_open:
            values[_MIN] = low

        if low // BLOCK != self.min_open // BLOCK:
            gone = low // BLOCK - KEPT_BLOCKS
            for key in {*self._table, *values}:
                if key.isdigit() and int(key) < gone:
                    values[key] = None

        return values

    def _is_whole(self, block: int, blocks: Mapping[int, int]) -> bool:
        """Whether all half messages of a block are resolved. Args: `blocks`: new values."""
        value = blocks[block] if block in blocks else int(self._table.get(str(block), "0"), 16)
        return (value | value >> 1) & _LOWER_BITS == _LOWER_BITS

    def _resolved(self, offset: int, blocks: Mapping[int, int]) -> bool:
        block, pair = divmod(offset, BLOCK)
        if block in blocks:
            return bool((blocks[block] >> (2 * pair)) & 3)
        return self.of(offset) not in (Resolution.OPEN, None)
