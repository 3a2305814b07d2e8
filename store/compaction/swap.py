"""Replaces all old files of a queue by the compacted ones, even if the process dies in between.

First the new files are complete and synced in the sub-directory `compacting`, which loaders pass over. Then
`raymq/compaction-swap` is written. From then on a start finishes the swap. Every step may be repeated. RocketMQ renames
file by file and notes nothing: a crash in between leaves a mixture of old and new files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raymq.store.base.errors import RayMQError
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files

from .units import COMPACTING, DIRECTORY, POSITIONS, directories

_RECORD = "compaction-swap"


@dataclass(frozen=True)
class Swap:
    """The files to replace and their replacements: names, the same in both directories."""

    topic: str
    queue_id: int
    old: list[str]
    new: list[str]
    #: queue offset of the last compacted message
    last_offset: int


def commit(root: Path, swap: Swap, *, files: Files) -> None:
    """Replace the old files by the new ones, as a decision that a start carries out. Durable: at return."""
    fail_point("compaction.built")
    files.write_file_atomic(root / "raymq" / _RECORD, json.dumps(asdict(swap)).encode())
    fail_point("compaction.committed")


def finish(root: Path, swap: Swap, *, files: Files) -> None:
    """Move the new files, remove the old ones, note how far the queue is compacted. Durable: at return."""
    for directory in directories(root, swap.topic, swap.queue_id):
        for name in swap.new:
            if files.exists(directory / COMPACTING / name):
                files.rename(directory / COMPACTING / name, directory / name)
        for name in swap.old:
            if name not in swap.new:
                files.unlink(directory / name)
        fail_point("compaction.moved")
        files.sync_dir(directory)
        files.remove_tree(directory / COMPACTING)

    offsets = read_compacted_offsets(root, files=files)
    offsets[f"{swap.topic}_{swap.queue_id}"] = swap.last_offset
    write_compacted_offsets(root, offsets, files=files)

    files.unlink(root / "raymq" / _RECORD)
    files.sync_dir(root / "raymq")


def finish_interrupted(root: Path, *, files: Files) -> None:
    """Finish a swap that an earlier process committed and did not finish."""
    path = root / "raymq" / _RECORD
    if files.exists(path):
        finish(root, Swap(**json.loads(files.read_file(path))), files=files)


def drop_unfinished(root: Path, topic: str, queue_id: int, *, files: Files) -> None:
    """Remove new files that were never committed."""
    for directory in directories(root, topic, queue_id):
        files.remove_tree(directory / COMPACTING)


def read_compacted_offsets(root: Path, *, files: Files) -> dict[str, int]:
    """`<topic>_<queue id>` -> the last queue offset that was compacted. Source: CompactionPositionMgr."""
    try:
        value: Any = json.loads(files.read_file(root / DIRECTORY / POSITIONS))
        return {str(name): int(offset) for name, offset in value["queueOffsetMap"].items()}
    except (OSError, ValueError, KeyError, AttributeError, RayMQError):
        # It only saves work: without it everything is compacted once more.
        return {}


def write_compacted_offsets(root: Path, offsets: dict[str, int], *, files: Files) -> None:
    """Write RocketMQ's file of compacted offsets. The replacement is atomic."""
    value = {"empty": not offsets, "queueOffsetMap": offsets}
    text = json.dumps(value, indent="\t", separators=(",", ":"), sort_keys=True)
    files.make_dirs(root / DIRECTORY)
    files.write_file_atomic(root / DIRECTORY / POSITIONS, text.encode())
