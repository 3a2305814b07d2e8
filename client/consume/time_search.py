"""Finds the first message of a queue that was stored at a time or later."""

from __future__ import annotations

from contextlib import closing

from raymq.client.transport.routes import Routes
from raymq.store.queues.raw_records import decode_records

from .queue_ranges import QueueRange
from .range_reader import RangeReader

#: how long the search waits for one message
SEARCH_TIMEOUT_S = 30.0


def offset_at(routes: Routes, held: QueueRange, time_ms: int) -> int | None:
    """The offset of the first message of `held` that was stored at a time or later; None if there is none.

    Store times never go back in a queue, so that it can be searched by halves: of a million messages 20 are read.
    Raises: as `RangeReader.fetch`.
    """
    low, high = held.first, held.last
    is_found = False
    with closing(RangeReader(routes, held.topic, held.queue_id, held.shard)) as reader:
        while low < high:
            middle = (low + high) // 2
            offset, stored_ms = _next_message(reader, middle, held.last)
            if offset >= high:
                # A gap of a compacted topic: no message is left between `middle` and `high`.
                high = middle
            elif stored_ms >= time_ms:
                is_found, high = True, middle
            else:
                low = offset + 1
    return low if is_found else None


def _next_message(reader: RangeReader, offset: int, end: int) -> tuple[int, int]:
    """Offset and store time of the first message at an offset or after it; `end` and 0 if none is left."""
    records, _ = reader.fetch(offset, end, max_bytes=1, max_records=1, timeout_s=SEARCH_TIMEOUT_S)
    if not len(records):
        return end, 0
    rows = decode_records(records.slice(0, 1), columns=("queue_offset", "store_time_ms"))
    return rows.column("queue_offset")[0].as_py(), rows.column("store_time_ms")[0].as_py()
