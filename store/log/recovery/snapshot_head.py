"""Snapshots of the state in the log. Each segment begins with one, and recovery begins at the newest.

A segment has none if the state was too large for it, or if unfinished snapshots left no room for a whole one.
State = the newest snapshot + the records after it. So no segment is deleted before a newer one begins with a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator

from raymq.store.base.arrays import Int64s
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.record_reads import walk_piece
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.records import properties
from raymq.store.records.record_walk import layout
from raymq.store.state.shard_state import (
    INTERNAL_TOPIC,
    SNAPSHOT,
    SnapshotParts,
    reading_state_record,
)

#: bytes read at a time. A larger record is read whole
HEAD_BYTES = 64 << 10


def read_head(file: MappedFile, start: int | None = None) -> tuple[int | None, int]:
    """Read the snapshot that a segment begins with.

    Args: `start`: another physical offset of the segment where a snapshot may begin.
    Returns: the end of the complete snapshot (None: it is unfinished, or there is none), and the end of the last
    SNAPSHOT record.
    """
    at = file.start if start is None else start

    def read(low: int, high: int) -> bytes:
        return file.read(low - file.start, high - file.start)

    parts = SnapshotParts()
    while True:
        view, base, walk = walk_piece(read, at, file.start + file.size, limit=1, nbytes=HEAD_BYTES)
        if not len(walk.positions):
            return None, at
        body = _snapshot_body(view, walk.positions - base, walk.sizes)
        if body is None:
            return None, at
        with reading_state_record(SNAPSHOT, at):
            complete = parts.add(body) is not None
        at = walk.end
        if complete:
            return at, at


def _snapshot_body(view: memoryview, starts: Int64s, sizes: Int64s) -> bytes | None:
    """The body of one record; None if it is not a SNAPSHOT record."""
    parts, _ = layout(view, starts, sizes)
    topic = view[parts.topic_start[0] : parts.topic_end[0]]
    text = bytes(view[parts.properties_start[0] : parts.properties_end[0]])
    tag = properties.decode(text).get(properties.TAGS)
    if topic != INTERNAL_TOPIC.encode() or tag != SNAPSHOT:
        return None
    return bytes(view[parts.body_start[0] : parts.body_end[0]])


def snapshot_starts(log: CommitLog, limit: int) -> Iterator[int]:
    """The starts of the snapshots that are complete at or below `limit`, newest first."""
    heads = [file.start for file in log.segments.files]
    for start in sorted({*heads, *log.marks.snapshots}, reverse=True):
        file = log.segments.find(start)
        if file is not None and start < limit:
            complete_at, _ = read_head(file, start)
            if complete_at is not None and complete_at <= limit:
                yield start
