"""`raymq/compaction`: how far each compacted queue is synced. A start after a crash cuts what follows.

JSON: `{"crc32c":<of the text of "ends">,"ends":{"<topic>/<queue id>":[<start of the last file>,<bytes in it>]}}`.
Earlier versions wrote the ends alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.state.topics import QueueKey

from .sparse_log import SparseEnd

_NAME = "compaction"


def write_synced_ends(root: Path, ends: dict[QueueKey, SparseEnd], *, files: Files) -> None:
    """Replace the noted ends of all queues. Durable: at return. Raises: StorageFull, OSError."""
    named = {f"{topic}/{queue_id}": list(end) for (topic, queue_id), end in ends.items()}
    note = {"crc32c": _crc(named), "ends": named}
    files.write_file_atomic(root / "raymq" / _NAME, json.dumps(note).encode())


def read_synced_ends(root: Path, *, files: Files) -> dict[QueueKey, SparseEnd]:
    """The noted ends of all queues; none before the first note. Raises: Corrupt, OSError."""
    path = root / "raymq" / _NAME
    try:
        data = files.read_file(path)
    except FileNotFoundError:
        return {}
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{path} is damaged ({error}), so how far the compacted queues are synced is unknown. Restore the file, or "
            "move it away: the queues are then copied again from the commit log, and keep what the log has no more",
            path=str(path),
            rule="the note of synced ends fits its CRC",
        ) from error


def _parse(data: bytes) -> dict[QueueKey, SparseEnd]:
    note: Any = json.loads(data)
    named = note
    if "crc32c" in note:
        named = note["ends"]
        if _crc(named) != note["crc32c"]:
            raise ValueError("wrong CRC")

    ends = {}
    for name, (start, size) in named.items():
        topic, _, queue_id = name.rpartition("/")
        ends[topic, int(queue_id)] = SparseEnd(int(start), int(size))
    return ends


def _crc(named: dict[str, list[int]]) -> int:
    return crc32c(json.dumps(named).encode())
