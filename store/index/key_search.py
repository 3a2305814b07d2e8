"""Finding the newest messages of one key: a walk from record to record, without arrays.

A query returns some dozens of records: to look at each with plain Python takes half the time of the numpy calls that
look at all of them. Several keys share those calls: `query_keys`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from raymq.store.errors import OffsetOutOfRange
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.one_record import record_at

from .index_keys import keys_of
from .index_service import IndexService


def newest(
    log: CommitLog,
    index: IndexService,
    topic: str,
    key: str,
    limit: int,
    span: tuple[int, int],
    *,
    exact: bool,
) -> dict[int, memoryview]:
    """The newest records of a key by physical offset, `limit` at most; they keep the files' maps alive.

    Args: `span`: the first and the last store time (ms); `exact`: as of `Query.by_key`.
    Entries of deleted files count for nothing, nor do those at which no record stands: RocketMQ leaves such behind
    when it cuts a log.
    """
    found: dict[int, memoryview] = {}
    begin_ms, end_ms = span
    low, high = log.start, log.confirmed
    base = stop = -1
    view = memoryview(b"")
    for places in index.find(topic, key, begin_ms, end_ms, limit):
        for place in places:
            if not low <= place < high:
                continue
            if not base <= place < stop:
                try:
                    view, base = log.view(place)
                except OffsetOutOfRange:
                    # Deleted meanwhile.
                    continue
                stop = base + len(view)
            at = place - base
            parts = record_at(view, at, base)
            if parts is None:
                continue
            end, time_ms, topic_at, topic_end = parts
            if not begin_ms <= time_ms <= end_ms:
                continue
            if exact and not (
                str(view[topic_at:topic_end], "utf-8", "replace") == topic
                and key in keys_of(bytes(view[topic_end + 2 : end]))
            ):
                continue
            # Twice a key in one message: twice the same offset.
            found[place] = view[at:end]
            if len(found) == limit:
                return found
    return found


def raw_column(records: Sequence[memoryview]) -> pa.BinaryArray:
    """Records as one column, which is a copy."""
    offsets = array("i", accumulate(map(len, records), initial=0))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(records))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(records), buffers)
