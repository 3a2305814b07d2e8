"""What the machine of a replica finds after it has lost its power: what was synced, and of the rest anything.

The processes of the replica stand still or have ended. The boot id that its store has noted is another one then, which
makes the next start believe no more than a disk keeps. What is lost depends on a seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, NamedTuple

from raymq.actors.shared.control_block import ControlBlock
from raymq.store.base.files import Files
from raymq.store.log.control_files.marks import read_marks
from raymq.store.log.control_files.meta import Meta

from .crash_states import SECTOR_BYTES

#: what becomes of the bytes that were not synced: zeros, as the file was made; some sectors are there and some are
#: not; bytes that were never written there
Tail = Literal["zeros", "sectors", "garbage"]
TAILS: tuple[Tail, ...] = ("zeros", "sectors", "garbage")


class Ends(NamedTuple):
    """Of a log, bytes."""

    synced: int
    appended: int

    @property
    def unsynced(self) -> int:
        """How many bytes a power loss may take."""
        return self.appended - self.synced


def read_ends(root: Path) -> Ends:
    """The ends of a replica's log, as its processes have published them."""
    files = Files()
    marks = read_marks(root / "raymq" / "marks", files=files)
    control = ControlBlock.open(str(root / "raymq" / "control"), files=files)
    try:
        flusher = control.roles["group_commit"]
        # CommitLog marks what it has seen; its flusher and Replication may be further.
        synced = max(marks.synced_end, flusher.base, flusher.position(flusher.grant.tag))
    finally:
        control.close()
    return Ends(synced, max(synced, marks.appended_end))


def lose_power(root: Path, chance: random.Random, tail: Tail) -> Ends:
    """Lose what a replica has not synced. With "zeros" its chain is lost as a whole. Returns: the ends before."""
    ends = read_ends(root)
    for path in sorted((root / "commitlog").iterdir()):
        with path.open("r+b") as file:
            content = file.read()
            start = min(max(ends.synced - int(path.name), 0), len(content))
            stop = min(max(ends.appended - int(path.name), 0), len(content))
            file.seek(start)
            file.write(_torn(content[start:stop], start, chance, tail))
    if tail == "zeros":
        # No sync before an acknowledgement covers it.
        for path in (root / "raymq" / "chain").iterdir():
            path.unlink()

    files = Files()
    meta = Meta.open(root / "raymq" / "meta", files=files)
    try:
        meta.update({"boot_id": "of the time before the power loss"})
    finally:
        meta.close()
    return ends


def _torn(content: bytes, start: int, chance: random.Random, tail: Tail) -> bytes:
    """What is there instead of bytes that begin at `start` of their file."""
    if tail == "zeros":
        return bytes(len(content))
    if tail == "garbage":
        return chance.randbytes(len(content))
    found = bytearray(content)
    first = start - start % SECTOR_BYTES
    for sector in range(first, start + len(content), SECTOR_BYTES):
        if chance.random() < 0.5:
            low, high = max(sector - start, 0), min(sector + SECTOR_BYTES - start, len(content))
            found[low:high] = bytes(high - low)
    return bytes(found)
