"""getMessage of a compaction topic: the messages that are left, with gaps in their offsets.

Source: CompactionStore#getMessage, CompactionLog#getMessage, RocketMQ 5.3.3, which takes no filter there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from raymq.store.queues.get_message import (
    BYTES_MAX,
    BYTES_MIN,
    GetMessage,
    GetMessageResult,
    GetMessageStatus,
    nothing,
)
from raymq.store.queues.message_filter import RECORDS_AT_ONCE, MessageFilter

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

    if wanted is not None:
        # Among these records more may be wanted than were asked for.
        found = found.only(wanted, max_nums)
    offsets = found.units["offset"].astype(np.int64)

    status = GetMessageStatus.FOUND if len(offsets) else GetMessageStatus.NO_MATCHED_MESSAGE
    records = pa.chunked_array([found.records], pa.binary())
    return GetMessageResult(status, found.next_offset, low, high, records, offsets, False)
