"""The format of a compacted queue: units of 46 bytes, and the directories of its files.

A unit, big-endian: position in the compaction log 8, size 4, tags code 8, store time 8, queue offset 8, messages 2 (1),
compacted offset 4 (-1), reserved 4. The last unit of a file is followed by one of position -1 and size 0.
Source: BatchConsumeQueue, SparseConsumeQueue#putEndPositionInfo, CompactionLog, RocketMQ 5.3.3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raymq.store.base.arrays import Bools, Structs
from raymq.store.base.errors import require

COMPACTED_UNIT_DTYPE = np.dtype(
    [
        ("position", ">i8"),
        ("size", ">i4"),
        ("tags_code", ">i8"),
        ("store_time_ms", ">i8"),
        ("offset", ">i8"),
        ("count", ">i2"),
        ("compacted", ">i4"),
        ("reserved", ">i4"),
    ]
)
COMPACTED_UNIT_BYTES = COMPACTED_UNIT_DTYPE.itemsize
require(COMPACTED_UNIT_BYTES == 46, "a compacted unit has 46 bytes", found=COMPACTED_UNIT_BYTES)

DIRECTORY = "compaction"
LOG, QUEUES, POSITIONS = "compactionLog", "compactionCq", "position-checkpoint"
#: new files are here until they take the place of the old ones (CompactionLog.COMPACTING_SUB_FOLDER)
COMPACTING = "compacting"

#: a log file is at least as large as this many files of units
_LEAST_RATIO = 5


def file_sizes(log_bytes: int, queue_bytes: int) -> tuple[int, int]:
    """File sizes as RocketMQ rounds the configured ones: whole units, and a log file of a whole number of unit files.

    With its defaults, 100 and 10 MiB: 104,857,460 and 10,485,746. Source: CompactionLog#getCompactionLogSize.
    """
    queue = queue_bytes // COMPACTED_UNIT_BYTES * COMPACTED_UNIT_BYTES
    count, rest = divmod(log_bytes, queue)
    if count < _LEAST_RATIO:
        return queue * _LEAST_RATIO, queue
    return queue * (count if 0 < rest < queue // 2 else count + 1), queue


def directories(root: Path, topic: str, queue_id: int) -> tuple[Path, Path]:
    """The directories of a compacted queue's records and of its units. Files of both have the same names."""
    log, queue = (root / DIRECTORY / kind / topic / str(queue_id) for kind in (LOG, QUEUES))
    return log, queue


def is_record_unit(units: Structs) -> Bools:
    """A mask of the units of records. End units, and zeros after the last unit, are none."""
    mask: Bools = (units["position"] >= 0) & (units["size"] > 0) & (units["count"] > 0)
    return mask


def end_unit() -> bytes:
    """The unit that follows the last one of a file that is not full."""
    unit: Any = np.zeros(1, dtype=COMPACTED_UNIT_DTYPE)
    unit["position"], unit["compacted"] = -1, -1
    return bytes(unit.tobytes())
