"""Gathers the messages of many clients into batches: at most two of a queue are under way, the rest wait for them.

So a message that comes alone is sent at once, and under load the answer to one batch sends the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, Protocol

from raymq.client.produce.queue_sequence import BatchReceipt
from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, RayMQError, Rejected, Unavailable
from raymq.store.records.producer_stamp import STAMP_BYTES
from raymq.store.records.properties import TAG_EXTRA_BYTES
from raymq.store.records.record import SmallBatch

from .arrivals import Arrivals

#: batches of one queue without an answer
UNDER_WAY_MAX = 2
#: bytes of bodies in one batch. A larger message is a batch of its own
BATCH_BYTES = 1 << 20
#: bytes of messages that wait in all lanes together. Beyond, sends are refused for now
WAITING_BYTES_MAX = 64 << 20


class MessageRow(NamedTuple):
    """One message as it is put."""

    body: bytes
    tag: str | None
    #: encoded, without the tag
    properties: bytes | None
    born_time_ms: int
    flag: int
    sys_flag: int
    #: host field of the record
    born_host: bytes


class StoredRow(NamedTuple):
    """Where a message is."""

    shard: int
    queue_offset: int
    #: -1: not known
    physical_offset: int


class PutShards(Protocol):
    """The puts of `Shards`."""

    def put(
        self,
        topic: str,
        queue_id: int,
        batch: SmallBatch,
        on_done: Callable[[BatchReceipt | RayMQError], None],
    ) -> None:
        """See `Shards.put`."""


class _Waiting(NamedTuple):
    """Messages of one request, which stay together."""

    rows: list[MessageRow]
    stored: asyncio.Future[list[StoredRow]]
    size: int


class _Lane:
    """One queue."""

    def __init__(self) -> None:
        self.waiting: deque[_Waiting] = deque()
        self.under_way = 0


class SendLanes:
    """The lanes of all queues. Callers: one event loop."""

    def __init__(
        self, shards: PutShards, arrivals: Arrivals, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Args: `arrivals`: wakes the pulls of a queue after each stored batch."""
        self._shards = shards
        self._arrivals = arrivals
        self._loop = loop
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._waiting_bytes = 0
        #: queues that have got messages since the last turn of the loop
        self._changed: dict[tuple[str, int], _Lane] = {}

    def put(
        self, topic: str, queue_id: int, rows: list[MessageRow]
    ) -> asyncio.Future[list[StoredRow]]:
        """Put messages of one request, whole or not at all. Raises: Unavailable when too many bytes wait."""
        size = sum(len(row.body) for row in rows)
        if self._waiting_bytes and self._waiting_bytes + size > WAITING_BYTES_MAX:
            raise Unavailable("too many messages wait for their shard; send again a little later")
        lane = self._lanes.setdefault((topic, queue_id), _Lane())
        stored: asyncio.Future[list[StoredRow]] = self._loop.create_future()
        lane.waiting.append(_Waiting(rows, stored, size))
        self._waiting_bytes += size
        if not self._changed:
            # Requests that came together are one batch.
            self._loop.call_soon(self._send_changed)
        self._changed[topic, queue_id] = lane
        return stored

    def _send_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for key, lane in changed.items():
            self._send(key, lane)

    def _send(self, key: tuple[str, int], lane: _Lane) -> None:
        while lane.waiting and lane.under_way < UNDER_WAY_MAX:
            taken: list[_Waiting] = []
            size = 0
            while lane.waiting and (not taken or size + lane.waiting[0].size <= BATCH_BYTES):
                taken.append(lane.waiting.popleft())
                size += taken[-1].size
            self._waiting_bytes -= size
            self._put(key, lane, taken)
        if not lane.waiting and not lane.under_way:
            self._lanes.pop(key, None)

    def _put(self, key: tuple[str, int], lane: _Lane, taken: list[_Waiting]) -> None:
        topic, queue_id = key
        rows = [row for each in taken for row in each.rows]
        columns = [list(column) for column in zip(*rows, strict=True)]

        def done(outcome: BatchReceipt | RayMQError) -> None:
            lane.under_way -= 1
            self._finish(key, lane, taken, rows, outcome)
            self._send(key, lane)

        lane.under_way += 1
        try:
            self._shards.put(topic, queue_id, SmallBatch(*columns), done)
        except Exception as error:
            lane.under_way -= 1
            fault = error if isinstance(error, RayMQError) else Rejected(repr(error))
            self._finish(key, lane, taken, rows, fault)

    def _finish(
        self,
        key: tuple[str, int],
        lane: _Lane,
        taken: list[_Waiting],
        rows: list[MessageRow],
        outcome: BatchReceipt | RayMQError,
    ) -> None:
        """Answer the requests of a batch. If one of several was malformed, nothing was stored: each goes alone."""
        if isinstance(outcome, (Rejected, Corrupt)) and len(taken) > 1:
            for each in taken:
                self._put(key, lane, [each])
            return
        if isinstance(outcome, RayMQError):
            for each in taken:
                if not each.stored.done():
                    each.stored.set_exception(outcome)
            return

        self._arrivals.note(*key)
        places = _places(key[0], rows, outcome)
        at = 0
        for each in taken:
            if not each.stored.done():
                each.stored.set_result(places[at : at + len(each.rows)])
            at += len(each.rows)


def _places(topic: str, rows: list[MessageRow], receipt: BatchReceipt) -> list[StoredRow]:
    """The places of the rows of a batch."""
    starts = [0, *accumulate(_record_bytes(topic, row) for row in rows)]
    first = receipt.physical_offset
    # Otherwise the end of a file of the log lies between them, or some were stored by an earlier try.
    is_whole = first >= 0 and first + starts[-1] == receipt.end_offset
    return [
        StoredRow(
            receipt.shard,
            receipt.offset(number),
            first + starts[number] if is_whole else -1,
        )
        for number in range(len(rows))
    ]


def _record_bytes(topic: str, row: MessageRow) -> int:
    """The bytes of a record. The store adds a stamp and the tag to the properties."""
    properties = STAMP_BYTES + len(row.properties or b"")
    if row.tag is not None:
        properties += TAG_EXTRA_BYTES + len(row.tag.encode())
    wide = len(row.born_host) - 8
    return fmt.HEADER_BYTES + wide + len(row.body) + 1 + len(topic) + 2 + properties
