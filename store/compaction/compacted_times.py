"""Offsets by time in compacted queues, whose messages may be older than the commit log."""

from __future__ import annotations

from raymq.store.base import format as fmt
from raymq.store.index.query import Boundary

from .compaction_store import CompactionStore


def compacted_offset_by_time(
    compaction: CompactionStore, topic: str, queue_id: int, time_ms: int, boundary: Boundary
) -> int:
    """The offset of a compacted queue that a store time is mapped to, as of `Query.offset_by_time`.

    Only messages that are left count. Raises: as `CompactionStore.read`.
    """
    low, end = compaction.queue_range(topic, queue_id)
    high = end
    #: without a message of its side
    following, last = end, low
    is_first = boundary is Boundary.LOWER

    while low < high:
        middle = (low + high) // 2
        found = compaction.read(topic, queue_id, middle, max_bytes=1, max_records=1)
        if found is None:
            high = middle
            continue
        record: bytes = found.records[0].as_py()
        offset = int.from_bytes(record[fmt.QUEUE_OFFSET_AT : fmt.QUEUE_OFFSET_AT + 8], "big")
        stored_ms = fmt.store_time_ms(record[: fmt.STORE_TIME_END_MAX])

        if offset >= high:
            # A gap: no message is left between `middle` and `high`.
            high = middle
        elif stored_ms >= time_ms if is_first else stored_ms > time_ms:
            following, high = offset, middle
        else:
            # The search ends after the last of these.
            last, low = offset, offset + 1

    return following if is_first else last
