"""The decision about the position where a recovery scan stopped, as a total table.

The scan walks records from a trusted position to the first position where no valid record starts. This table decides
whether that is the end of the log, a torn tail, or damage. It uses only observed facts, so that a test can enumerate
every combination and prove that exactly one row answers it.

RocketMQ's CommitLog#recoverNormally/recoverAbnormally truncate at every bad record, acknowledged or not. This table
differs on purpose.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from raymq.store.base.format import SECTOR_BYTES
from raymq.store.records.record_walk import Walk, layout


class Decision(Enum):
    """The action of recovery at the stop position."""

    #: the log ends here and the rest of the file is already zero
    KEEP = "keep"
    #: the log ends here: zero the rest of the file, drop later files, sync
    TRUNCATE = "truncate"
    #: bytes that must exist are missing: report, change nothing
    CORRUPT = "corrupt"


class Facts(NamedTuple):
    """The observations of the scan at the stop position."""

    #: the directory has RayMQ's `raymq/meta`; False: RocketMQ wrote it, and there are no marks
    own: bool
    #: the machine has not rebooted since the last writer, so its page cache is intact
    same_boot: bool
    #: the stop position is below the end that was known to be synced
    below_synced: bool
    #: the stop position is below the published appended end. In a store that RocketMQ wrote: below the last record of
    #: its consume queues; always True after a crash, when those queues prove nothing
    below_appended: bool
    #: non-zero bytes follow the stop position, in its file or in a later one
    dirty: bool
    #: a valid record starts somewhere after the stop position
    later_valid: bool


class RecoveryRow(NamedTuple):
    """One row of the table."""

    name: str
    #: the value of each of `Facts`; None matches either
    wanted: tuple[bool | None, ...]
    decision: Decision
    #: the physical event that can have caused it
    cause: str

    def matches(self, facts: Facts) -> bool:
        """Whether this row answers these facts."""
        return all(want in (None, have) for want, have in zip(self.wanted, facts, strict=True))


ENDS_IN_ZEROS = RecoveryRow(
    "K",
    (False, None, None, None, False, False),
    Decision.KEEP,
    "Written by RocketMQ, ends in zeros.",
)

# fmt: off
ROWS: tuple[RecoveryRow, ...] = (
    # name, (own, boot, synced, appended, dirty, later)
    RecoveryRow("A", (True, None, True, None, None, None), Decision.CORRUPT,
        "Synced bytes are gone: the disk lost or changed what it had confirmed."),
    RecoveryRow("B", (True, True, False, True, None, None), Decision.CORRUPT,
        "No reboot, so the page cache kept every completed write; the bytes were changed afterwards."),
    RecoveryRow("C", (True, True, False, False, None, True), Decision.CORRUPT,
        "No reboot and one writer appends in order: nothing valid can follow a torn append."),
    RecoveryRow("D", (True, True, False, False, True, False), Decision.TRUNCATE,
        "The writer died inside its last pwrite; that append was never published or acknowledged."),
    RecoveryRow("E", (True, True, False, False, False, False), Decision.KEEP,
        "The writer ended between appends."),
    RecoveryRow("F", (True, False, False, None, True, False), Decision.TRUNCATE,
        "Power loss: parts of an append that no sync confirmed reached the disk, in this file or in a later one."),
    RecoveryRow("G", (True, False, False, None, False, False), Decision.KEEP,
        "Power loss with no trace of unsynced bytes after the end."),
    RecoveryRow("H", (True, False, False, None, None, True), Decision.TRUNCATE,
        "Power loss: unsynced blocks reached the disk in any order, so whole records may follow a hole. No sync "
        "confirmed the hole, so nothing after it was acknowledged as synced."),
    RecoveryRow("I", (False, None, None, True, None, True), Decision.CORRUPT,
        "Written by RocketMQ, damaged in the middle, or with leftovers of its own cut that its queues may know. "
        "RocketMQ would cut everything after it. An acknowledged record may look like a leftover, so RayMQ does not."),
    RecoveryRow("L", (False, None, None, False, None, True), Decision.TRUNCATE,
        "Written by RocketMQ and stopped in order: no consume queue knows a record after the end, so these are "
        "leftovers of its own un-zeroed cut."),
    RecoveryRow("J", (False, None, None, None, True, False), Decision.TRUNCATE,
        "Written by RocketMQ, torn tail of a crash (or its own un-zeroed truncation leftovers)."),
    ENDS_IN_ZEROS,
)


# fmt: on


#: outside of the table: the content of unreadable bytes cannot be known
UNREADABLE = RecoveryRow(
    "U", (None,) * 6, Decision.CORRUPT, "The disk cannot read what it had confirmed."
)


def decide(facts: Facts) -> RecoveryRow:
    """The one row that answers these facts.

    Source: `ROWS`; tests/store/test_recovery_table.py enumerates every combination.
    """
    return next(row for row in ROWS if row.matches(facts))


def written_until(view: memoryview, base: int, walk: Walk, proven_end: int) -> int:
    """The number of records of a walk that recovery keeps: those before the first that was not written to its end.

    Args: `proven_end`: chain units prove all bytes below it. Of later bytes only the body has a CRC. The walk notices
    lost bytes of a header, but not of a topic or of properties. Bytes that were never written are zeros, because
    files are made of zeros and every cut restores them. So a topic or properties lost bytes if they are zero up to
    the record's end. The same holds if the record's whole part of a sector is zero. No topic has a zero byte, and no
    properties that RayMQ writes end with one or have a sector of them (`record_check.check_put`).
    """
    first = int(np.searchsorted(walk.positions, proven_end))
    starts, sizes = walk.positions[first:] - base, walk.sizes[first:]
    if not len(starts):
        return len(walk.positions)

    parts, _ = layout(view, starts, sizes)
    data = np.frombuffer(view, dtype=np.uint8)
    has_properties = parts.properties_end > parts.properties_start
    lost = (data[parts.topic_end - 1] == 0) | (
        has_properties & (data[parts.properties_end - 1] == 0)
    )

    low = int(starts[0]) // SECTOR_BYTES + 1
    high = int(starts[-1] + sizes[-1]) // SECTOR_BYTES
    if low < high:
        sectors = data[low * SECTOR_BYTES : high * SECTOR_BYTES].reshape(-1, SECTOR_BYTES)
        empty = (np.flatnonzero(~sectors.any(axis=1)) + low) * SECTOR_BYTES
        # A sector that begins and ends in one record. A record's last sector was checked above.
        owner = np.searchsorted(starts, empty, side="right") - 1
        inside = empty + SECTOR_BYTES > parts.topic_start[owner]
        lost[owner[inside]] = True

    return first + int(lost.argmax()) if lost.any() else len(walk.positions)
