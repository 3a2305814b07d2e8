"""Snapshots of the state in the log: segments begin with one, recovery goes on from the newest (design D6)."""

from __future__ import annotations

from . import record, rows
from .mapped_file import MappedFile
from .state import INTERNAL_TOPIC, SNAPSHOT, SnapshotParts


def read_head(file: MappedFile, start: int | None = None) -> tuple[int | None, int]:
    """Where the snapshot that a segment begins with is complete, and where its SNAPSHOT records end.

    Args: `start`, another physical offset of the segment where a snapshot may begin.
    None: it was broken off, or there is none.
    """
    view, at = file.read_view(), file.start if start is None else start
    parts = SnapshotParts()
    while True:
        walk = record.walk(view[at - file.start :], at, limit=1)
        if not len(walk.positions):
            return None, at
        batch = record.decode(view, walk.positions - file.start, walk.sizes)
        tag = rows.tag_column(batch.column("properties"))[0].as_py()
        if batch.column("topic")[0].as_py() != INTERNAL_TOPIC or tag != SNAPSHOT.encode():
            return None, at
        at = walk.end
        if parts.add(batch.column("body")[0].as_py()) is not None:
            return at, at
