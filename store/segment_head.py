"""What a segment begins with: the snapshot of the state, from which recovery goes on (design D6)."""

from __future__ import annotations

from . import record, rows
from .mapped_file import MappedFile
from .state import INTERNAL_TOPIC, SNAPSHOT, SnapshotParts


def read_head(file: MappedFile) -> tuple[int | None, int]:
    """Where the snapshot that a segment begins with is complete, and where its SNAPSHOT records end.

    None: it was broken off, or there is none.
    """
    view, at = file.read_view(), file.start
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
