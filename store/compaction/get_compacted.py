"""getMessage of a compaction topic: the messages that are left, with gaps in their offsets.

Source: CompactionStore#getMessage, CompactionLog#getMessage, RocketMQ 5.3.3, which takes no filter there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raymq.store.queues.get_message import (
    BYTES_MAX,
    BYTES_MIN,
    RECORDS_AT_ONCE,
    GetMessage,
    GetMessageResult,
    GetMessageStatus,
    nothing,
)
from raymq.store.queues.message_filter import MessageFilter
from raymq.store.records import record

from .compaction_store import CompactionStore


def get_compacted(
    store: CompactionStore,
    get_message: GetMessage,
    topic: str,
    queue_id: int,
    offset: int,
    max_nums: int,
    *,
    max_bytes: int,
    wanted: MessageFilter | None,
) -> GetMessageResult:
    """`GetMessage.get` of a compacted queue, which holds messages from the first one that is left on."""
    low, high = store.queue_range(topic, queue_id)
    refused = get_message.refuse(topic, queue_id, offset, low, high)
    if refused is not None:
        return refused

    max_bytes = min(max(max_bytes, BYTES_MIN), BYTES_MAX)
    count = max_nums if wanted is None else max(max_nums, RECORDS_AT_ONCE)
    found = store.read(topic, queue_id, offset, max_bytes=max_bytes, max_records=count)
    if found is None:
        # All records copied after it were superseded by the last messages of their keys. Later ones may not be copied
        # yet.
        following = max(offset, min(store.next_offset(topic, queue_id), high))
        return nothing(GetMessageStatus.NO_MATCHED_MESSAGE, following, low, high)

    is_wanted = np.ones(len(found.units), dtype=np.bool_)
    if wanted is not None:
        matching = wanted.units(found.units["tags_code"].astype(np.int64))
        is_wanted = is_wanted if matching is None else matching
        if wanted.needs_records:
            sizes = found.units["size"].astype(np.int64)
            data = memoryview(b"".join(found.records.to_pylist()))
            batch = record.decode(data, np.cumsum(sizes) - sizes, sizes, columns=("properties",))
            is_wanted = is_wanted & wanted.records(batch.column(0))

    rows = np.flatnonzero(is_wanted)
    offsets = found.units["offset"].astype(np.int64)
    # Among these records more may be wanted than were asked for.
    following = int(offsets[rows[max_nums]]) if len(rows) > max_nums else found.next_offset
    rows = rows[:max_nums]

    status = GetMessageStatus.FOUND if len(rows) else GetMessageStatus.NO_MATCHED_MESSAGE
    records = pa.chunked_array([found.records.take(pa.array(rows))], pa.binary())
    return GetMessageResult(status, following, low, high, records, offsets[rows], False)
