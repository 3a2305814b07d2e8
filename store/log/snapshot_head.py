"""Snapshots of the state in the log: segments begin with one, recovery goes on from the newest (design D6)."""

from __future__ import annotations

from raymq.store.records import properties
from raymq.store.records.record_walk import layout
from raymq.store.state import INTERNAL_TOPIC, SNAPSHOT, SnapshotParts, reading_internal

from .log_reads import walk_with
from .mapped_file import MappedFile

#: bytes read at a time; a larger record is read whole
HEAD_BYTES = 64 << 10


def read_head(file: MappedFile, start: int | None = None) -> tuple[int | None, int]:
    """Where the snapshot that a segment begins with is complete, and where its SNAPSHOT records end.

    Args: `start`, another physical offset of the segment where a snapshot may begin.
    None: it was broken off, or there is none.
    """
    at = file.start if start is None else start

    def read(low: int, high: int) -> bytes:
        return file.read(low - file.start, high - file.start)

    parts = SnapshotParts()
    while True:
        view, base, walk = walk_with(read, at, file.start + file.size, limit=1, nbytes=HEAD_BYTES)
        if not len(walk.positions):
            return None, at
        places, _ = layout(view, walk.positions - base, walk.sizes)
        body_start, body_end, topic_start, topic_end, low, high = (
            int(place[0]) for place in places
        )
        tag = properties.decode(bytes(view[low:high])).get(properties.TAGS)
        if view[topic_start:topic_end] != INTERNAL_TOPIC.encode() or tag != SNAPSHOT:
            return None, at
        with reading_internal(SNAPSHOT, at):
            complete = parts.add(bytes(view[body_start:body_end])) is not None
        at = walk.end
        if complete:
            return at, at
