"""What a segment begins with: the snapshot of the state, from which recovery goes on (design D6)."""

from __future__ import annotations

from . import properties, record
from .mapped_file import MappedFile
from .record_walk import layout
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
        places, _ = layout(view, walk.positions - file.start, walk.sizes)
        body_start, body_end, topic_start, topic_end, start, end = (int(at[0]) for at in places)
        tag = properties.decode(bytes(view[start:end])).get(properties.TAGS)
        if view[topic_start:topic_end] != INTERNAL_TOPIC.encode() or tag != SNAPSHOT:
            return None, at
        at = walk.end
        if parts.add(bytes(view[body_start:body_end])) is not None:
            return at, at
