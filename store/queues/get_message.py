"""Reading a queue as RocketMQ's brokers do: statuses, limits of one answer, filters.

Source: DefaultMessageStore#getMessage, RocketMQ 5.3.3. RayMQ's own consumers use `QueueReader.fetch`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s, leading
from raymq.store.base.errors import OffsetOutOfRange
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.record_reads import Records
from raymq.store.records import record
from raymq.store.state.shard_state import ShardState

from .consume_queue import BLANK_SIZE, QueueUnits
from .consume_queues import ConsumeQueues
from .message_filter import MessageFilter, matching
from .reader import missing_message

#: bounds of `max_bytes`
BYTES_MIN, BYTES_MAX = 100, 128 << 20


class GetMessageStatus(Enum):
    """The result of a read."""

    FOUND = "FOUND"
    #: none of the examined messages is wanted
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    #: examined messages are gone from the log
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    #: a consume queue file is missing; the reader continues with the next one
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    #: the offset is that of the next message
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class GetMessageResult(NamedTuple):
    """An answer. The queue holds [min_offset, max_offset)."""

    status: GetMessageStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    #: records byte for byte, a binary column. Neighbours are not copied
    records: pa.ChunkedArray
    #: queue offset of each record
    queue_offsets: Int64s
    #: the reader lags by more bytes than this host's memory has
    suggest_pulling_from_slave: bool


class _Picked(NamedTuple):
    """The wanted units of a slice."""

    #: rows of the units that are wanted and fit
    rows: Int64s
    #: units of the slice that were examined
    examined: int
    #: the answer suggests to read from a slave
    far_behind: bool
    status: GetMessageStatus


class GetMessage:
    """Answers reads as RocketMQ's brokers do. Callers: any thread."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, state: ShardState) -> None:
        self._log = log
        self._queues = queues
        self._state = state
        self._config = log.config
        ratio = log.config.access_message_in_memory_max_ratio
        self._memory_bytes = log.files.memory_bytes() * ratio // 100

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_nums: int,
        *,
        max_bytes: int = BYTES_MAX,
        wanted: MessageFilter | None = None,
    ) -> GetMessageResult:
        """Messages of a queue from `offset` on, at most `max_nums`, below the confirmed end.

        An offset is never an error: the status says why nothing is read, and `next_begin_offset` where to continue.
        Raises: Corrupt for a missing, damaged or unreadable record.
        """
        queue = self._queues.find(topic, queue_id)
        low, high = self._queues.range(topic, queue_id)
        refused = self.refuse(topic, queue_id, offset, low, high)
        if refused is not None or queue is None:
            return refused or nothing(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, low, high)

        size_limit = min(max(max_bytes, BYTES_MIN), BYTES_MAX)
        span = max(self._config.max_filter_message_size // fmt.QUEUE_UNIT_BYTES, max_nums)
        file_units = self._config.consume_queue_file_size_bytes // fmt.QUEUE_UNIT_BYTES

        begin = following = offset
        try:
            for _ in range(self._config.travel_cq_file_num_when_get_message):
                begin, left = following, file_units - following % file_units
                units = queue.read(begin, min(span, left))
                if not len(units):
                    return nothing(GetMessageStatus.OFFSET_FOUND_NULL, begin + left, low, high)
                units = units[: leading(units["size"] != BLANK_SIZE)]
                if not len(units):
                    raise missing_message(topic, queue_id, begin)
                picked = self._pick(units, max_nums, size_limit, wanted)
                following = begin + picked.examined
                if len(picked.rows) or following >= high:
                    break
            records = self._records(units[picked.rows])
        except OffsetOutOfRange:
            # Records were deleted after the log's start was read: now the log begins later.
            return self.get(topic, queue_id, offset, max_nums, max_bytes=max_bytes, wanted=wanted)

        return GetMessageResult(
            picked.status, following, low, high, records, begin + picked.rows, picked.far_behind
        )

    def refuse(
        self, topic: str, queue_id: int, offset: int, low: int, high: int
    ) -> GetMessageResult | None:
        """The answer for an offset at which there is nothing to read; None if there is something."""
        if not high:
            info = self._state.topics.get(topic)
            known = info is not None and 0 <= queue_id < info.queues
            if known or self._queues.find(topic, queue_id) is not None:
                return nothing(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
            return nothing(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, low, high)

        if offset < low:
            return nothing(GetMessageStatus.OFFSET_TOO_SMALL, low, low, high)

        # After a start, dispatch may not have reached its former end: the reader waits there.
        coming = offset <= self._state.next_offsets.get((topic, queue_id), 0)
        if offset == high or (offset > high and coming):
            return nothing(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
        if offset > high:
            return nothing(GetMessageStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
        return None

    def _pick(
        self, units: QueueUnits, max_nums: int, max_bytes: int, wanted: MessageFilter | None
    ) -> _Picked:
        """Apply filter and limits as if the units were examined one after the other."""
        config = self._config
        positions = units["position"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        alive: Bools = positions >= self._log.start
        good = alive
        if wanted is not None:
            most = max(
                config.max_transfer_count_on_message_in_memory,
                config.max_transfer_count_on_message_in_disk,
            )
            good = matching(
                wanted,
                units["tags_code"],
                alive,
                lambda rows: self._properties(units[rows]),
                min(most, max(max_nums, 1)),
            )

        good_sizes = np.where(good, sizes, 0)
        messages_before: Int64s = np.cumsum(good) - good
        bytes_before = np.cumsum(good_sizes) - good_sizes

        in_memory = self._log.end - positions <= self._memory_bytes
        most_bytes, most_count = self._limits(in_memory)
        fits_count = messages_before < np.minimum(most_count, max_nums)
        fits_bytes = bytes_before + sizes <= np.minimum(most_bytes, max_bytes)
        # The first wanted message is always returned, however large it is.
        seen = leading((messages_before == 0) | (fits_count & fits_bytes))

        rows = np.flatnonzero(good[:seen])
        status = GetMessageStatus.FOUND
        if not len(rows):
            gone = ~alive
            by_units = None if wanted is None else wanted.units(units["tags_code"])
            if by_units is not None:
                gone = gone & by_units
            status = _status_without_messages(alive[:seen], gone[:seen])
        return _Picked(rows, seen, bool(not in_memory[seen - 1]), status)

    def _limits(self, in_memory: Bools) -> tuple[Int64s, Int64s]:
        """The most bytes and the most messages of an answer that reaches each unit."""
        config = self._config
        most_bytes = np.where(
            in_memory,
            config.max_transfer_bytes_on_message_in_memory,
            config.max_transfer_bytes_on_message_in_disk,
        )
        most_count = np.where(
            in_memory,
            config.max_transfer_count_on_message_in_memory,
            config.max_transfer_count_on_message_in_disk,
        )
        return most_bytes, most_count

    def _properties(self, units: QueueUnits) -> pa.Array:
        """The properties strings of units' records."""
        positions = units["position"].astype(np.int64)
        return self._log.reads.properties(positions, units["size"].astype(np.int64))

    def _records(self, units: QueueUnits) -> pa.ChunkedArray:
        return pa.chunked_array([record.select(*self._read(units))], pa.binary())

    def _read(self, units: QueueUnits) -> Records:
        """Read the records of units. Raises: Corrupt for a damaged or unreadable record."""
        positions = units["position"].astype(np.int64)
        return self._log.reads.records(positions, units["size"].astype(np.int64))


def _status_without_messages(alive: Bools, gone: Bools) -> GetMessageStatus:
    """The status if no unit is wanted. It says whether a deleted message follows the last one that is there."""
    living = np.flatnonzero(alive)
    last_living = int(living[-1]) if len(living) else 0
    if gone[last_living:].any():
        return GetMessageStatus.MESSAGE_WAS_REMOVING
    return GetMessageStatus.NO_MATCHED_MESSAGE


def nothing(status: GetMessageStatus, next_offset: int, low: int, high: int) -> GetMessageResult:
    """An answer without messages."""
    records = pa.chunked_array([], pa.binary())
    offsets = np.empty(0, dtype=np.int64)
    return GetMessageResult(status, next_offset, low, high, records, offsets, False)
