"""Compacted queues: each pair of files agrees, record by record, and queue offsets ascend.

After a crash a start cuts them to the synced end and copies the rest again. So they are checked only after an orderly
stop.
Source: CompactionLog, SparseConsumeQueue, RocketMQ 5.3.3.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raymq.store.base.arrays import leading
from raymq.store.base.rules import COMPACTION_PAIR_RULE
from raymq.store.compaction import units as compacted
from raymq.store.compaction.units import COMPACTED_UNIT_BYTES, DIRECTORY, LOG
from raymq.store.log.segments.segment_paths import offset_names
from raymq.store.queues.consume_queue import queue_directories
from raymq.store.records import record

from .read_only import ReadOnlyStore

COMPACTED_UNIT_RULE = "a unit of a compacted queue points at its record"
ASCENDS_RULE = "offsets of a compacted queue ascend"
OWN_RULE = "a compacted queue holds its own records"


def check_compaction(store: ReadOnlyStore) -> None:
    """Add every fault of `compaction/`."""
    base = store.root / DIRECTORY
    if store.crashed:
        return
    for topic, queue_id, _ in queue_directories(base / LOG, store.files):
        _check_queue(store, topic, queue_id)


def _check_queue(store: ReadOnlyStore, topic: str, queue_id: int) -> None:
    """Check the pairs of files of one compacted queue."""
    logs, queues = compacted.directories(store.root, topic, queue_id)
    log_names = set(offset_names(logs, files=store.files))
    queue_names = set(offset_names(queues, files=store.files))
    for name in sorted(log_names ^ queue_names):
        directory = logs if name in log_names else queues
        store.faults.add(directory / name, 0, COMPACTION_PAIR_RULE, "the other file is missing")
    last = -1
    for name in sorted(log_names & queue_names):
        last = _check_pair(store, logs / name, queues / name, (topic, queue_id), last)


def _check_pair(
    store: ReadOnlyStore, log: Path, queue: Path, key: tuple[str, int], last: int
) -> int:
    """Check a pair of files. Returns: the last queue offset; `last` if the file has none."""
    start = int(log.name)
    data, units_data = store.files.read_file(log), store.files.read_file(queue)
    room = len(units_data) // COMPACTED_UNIT_BYTES
    units = np.frombuffer(units_data, dtype=compacted.COMPACTED_UNIT_DTYPE, count=room)
    units = units[: leading(compacted.is_record_unit(units))]

    walk = record.walk(data, start)
    count = min(len(units), len(walk.positions))
    wrong = units["position"][:count] != walk.positions[:count]
    wrong |= units["size"][:count] != walk.sizes[:count]
    bad = leading(~wrong)

    if bad < max(len(units), len(walk.positions)):
        detail = (
            f"unit {bad} of {len(units)}; the log has {len(walk.positions)} whole records, then "
            f"{walk.reason.value} at {walk.end}"
        )
        store.faults.add(queue, bad * COMPACTED_UNIT_BYTES, COMPACTED_UNIT_RULE, detail)

    if not bad:
        return last

    batch = record.decode(data, walk.positions[:bad] - start, walk.sizes[:bad])
    offsets = batch.column("queue_offset").to_numpy()
    topics = np.array(batch.column("topic").to_pylist())
    mine = (topics == key[0]) & (batch.column("queue_id").to_numpy() == key[1])
    mine &= offsets == units["offset"][:bad]

    for row in np.flatnonzero(~mine).tolist():
        unit_offset = int(units["offset"][row])
        detail = f"{topics[row]}, offset {int(offsets[row])}; its unit says {unit_offset}"
        store.faults.add(log, int(walk.positions[row]), OWN_RULE, detail)
    for row in np.flatnonzero(np.diff(np.concatenate([[last], offsets])) <= 0).tolist():
        detail = f"offset {int(offsets[row])} does not come after the one before"
        store.faults.add(queue, row * COMPACTED_UNIT_BYTES, ASCENDS_RULE, detail)

    return int(offsets[-1])
