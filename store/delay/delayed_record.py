"""Delayed messages: read from the log, and turned into the messages that are delivered.

Source: ScheduleMessageService#messageTimeUp, TimerMessageStore#convertMessage, RocketMQ 5.3.3.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.base.format import HALF_TOPIC
from raymq.store.log.commit_log import CommitLog
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import record
from raymq.store.records.producer_stamp import without_stamp
from raymq.store.records.properties import PROPERTY_SEPARATOR
from raymq.store.state.shard_state import INTERNAL_TOPIC

#: most waiting records read at a time
SLICE_ROWS = 4096
#: bytes that a bundle needs beside its messages: the record of the progress
BUNDLE_RESERVE_BYTES = 1024
#: most messages of a bundle: no other put can append while a bundle is appended
BUNDLE_MESSAGES_MAX = 512
#: most bytes that a record grows by on its delivery: its topic, longer addresses, the timer's properties
ROW_RESERVE_BYTES = 512

# Greedy, because the last of several properties of one name counts.
_REAL_TOPIC = re.compile(rb"(?:.*\x02)?REAL_TOPIC\x01([^\x02]+)", re.DOTALL)
_REAL_QUEUE = re.compile(rb"(?:.*\x02)?REAL_QID\x01(\d{1,9})(?:\x02|\Z)", re.DOTALL)


class DelayRun(NamedTuple):
    """Result of one delivery call."""

    messages: int
    #: when to call again, ms: not after now if there is more to do; None: nothing waits
    next_due_ms: int | None


class WaitingMessage(NamedTuple):
    """One record of a waiting message."""

    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    #: without a producer's stamp: a delivered message is not a row of its producer's sequence
    properties: bytes
    flag: int
    sys_flag: int
    born_time_ms: int
    born_host: str
    reconsume_times: int

    def moved(self, topic: str, queue_id: int, properties: bytes) -> InnerMessage:
        """The message for another queue, with the same body, flags, birth and text."""
        return InnerMessage(
            topic,
            queue_id,
            self.body,
            flag=self.flag,
            sys_flag=self.sys_flag & ~fmt.SYS_ANY_HOST_V6,
            born_time_ms=self.born_time_ms,
            born_host=fmt.host_of(self.born_host),
            reconsume_times=self.reconsume_times,
            properties_text=properties,
        )

    def delivered(self, extra: bytes = b"") -> InnerMessage | None:
        """The message for its real queue; None when it names no queue that may receive it.

        The properties' text is unchanged, DELAY and TIMER_* too, and `extra` follows if there is room.
        """
        topic = _REAL_TOPIC.match(self.properties)
        queue = _REAL_QUEUE.match(self.properties)
        if topic is None or queue is None:
            return None
        name = topic[1].decode("utf-8", "replace")
        if not _may_receive(name):
            return None
        return self.moved(name, int(queue[1]), self.with_text(extra))

    def with_text(self, extra: bytes) -> bytes:
        """The properties' text with `extra` after it, if that fits."""
        text = self.properties
        if not extra or len(text) + 1 + len(extra) > fmt.PROPERTIES_MAX_BYTES:
            return text
        return (
            text
            + (b"" if not text or text.endswith(PROPERTY_SEPARATOR) else PROPERTY_SEPARATOR)
            + extra
        )


@lru_cache(maxsize=1024)
def _may_receive(topic: str) -> bool:
    try:
        fmt.check_topic_name(topic)
    except Rejected:
        return False
    return topic not in (INTERNAL_TOPIC, HALF_TOPIC)


def undamaged_batch(
    log: CommitLog, positions: Int64s, sizes: Int64s, *, check_crc: bool = True
) -> tuple[pa.RecordBatch, Int64s]:
    """The decoded records at ascending physical positions, and their rows. Damaged records are left out and noted.

    A damaged record must not block all others. Args: `positions`: none below `log.start`.
    """
    found, rows = log.reads.undamaged_records(positions, sizes, check_crc=check_crc)
    return record.decode(*found), rows


def waiting_rows(
    log: CommitLog, positions: Int64s, sizes: Int64s
) -> tuple[list[WaitingMessage], Int64s]:
    """The records as objects: each is about to be delivered. Like `undamaged_batch`."""
    batch, rows = undamaged_batch(log, positions, sizes)
    columns = [batch.column(name).to_pylist() for name in _COLUMNS]
    columns[_PROPERTIES] = [without_stamp(text) for text in columns[_PROPERTIES]]
    return list(map(WaitingMessage._make, zip(*columns, strict=True))), rows


_COLUMNS = WaitingMessage._fields
_PROPERTIES = _COLUMNS.index("properties")


def by_queue(messages: list[InnerMessage]) -> list[InnerMessage]:
    """A bundle's messages by queue, in their order within each: consecutive rows of a queue are accounted for
    together."""
    return sorted(messages, key=lambda message: (message.topic, message.queue_id))


def fitting(sizes: Int64s, bundle_bytes_max: int) -> int:
    """How many of the first records, of these sizes, are delivered in one bundle; at least one."""
    limit = bundle_bytes_max - BUNDLE_RESERVE_BYTES
    ends = np.cumsum(sizes[:BUNDLE_MESSAGES_MAX] + ROW_RESERVE_BYTES)
    return max(1, int(np.searchsorted(ends, limit, side="right")))
