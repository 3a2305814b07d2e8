"""Gathers the messages of many clients into batches: one turn of a shard is under way, the rest wait.

A turn is a batch of each queue that has messages, and all of them travel together. So a message that comes alone is
sent at once, and under load the answer to one turn sends the next one. With two turns under way each is half as large,
and the same machine stores fewer messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

from raymq.client.produce.queue_sequence import BatchReceipt
from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, RayMQError, Rejected, Unavailable
from raymq.store.records.producer_stamp import STAMP_BYTES
from raymq.store.records.properties import TAG_EXTRA_BYTES
from raymq.store.records.record import SmallBatch

from .arrivals import Arrivals

#: what a message takes in memory besides its body and properties, about
ROW_BYTES = 200
#: bytes of messages in one batch. A larger message is a batch of its own
BATCH_BYTES = 1 << 20
#: bytes of messages that wait in all lanes together. Beyond, sends are refused for now
WAITING_BYTES_MAX = 64 << 20


class StoredSend(NamedTuple):
    """Where the messages of a request are."""

    shard: int
    #: of the first
    queue_offset: int
    #: of each; -1: not known
    physical_offsets: list[int]


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

    #: with all columns
    rows: SmallBatch
    stored: asyncio.Future[StoredSend]
    size: int


class _ShardLanes:
    """The queues of one shard."""

    def __init__(self) -> None:
        #: (topic, queue) -> what waits, in the order in which the first of each came
        self.waiting: dict[tuple[str, int], deque[_Waiting]] = {}
        #: a turn has no answer yet
        self.is_under_way = False


class _Turn:
    """Batches that travel together."""

    def __init__(self, lanes: _ShardLanes) -> None:
        self.lanes = lanes
        #: that have no answer
        self.batches = 0


class SendLanes:
    """The lanes of all queues. Callers: one event loop."""

    def __init__(
        self, shards: PutShards, arrivals: Arrivals, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Args: `arrivals`: wakes the pulls of a queue after each stored batch."""
        self._shards = shards
        self._arrivals = arrivals
        self._loop = loop
        self._lanes: dict[int, _ShardLanes] = {}
        self._waiting_bytes = 0
        #: those that have got messages since the last turn of the loop
        self._changed: set[_ShardLanes] = set()

    def put(
        self, shard: int, topic: str, queue_id: int, rows: SmallBatch
    ) -> asyncio.Future[StoredSend]:
        """Put messages of one request, whole or not at all. Raises: Unavailable when too many bytes wait.

        Args: `rows`: with all columns.
        """
        size = sum(map(len, rows.bodies)) + ROW_BYTES * rows.num_rows
        size += sum(map(len, filter(None, rows.properties)))
        if self._waiting_bytes and self._waiting_bytes + size > WAITING_BYTES_MAX:
            raise Unavailable("too many messages wait for their shard; send again a little later")
        lanes = self._lanes.get(shard)
        if lanes is None:
            lanes = self._lanes[shard] = _ShardLanes()
        stored: asyncio.Future[StoredSend] = self._loop.create_future()
        lanes.waiting.setdefault((topic, queue_id), deque()).append(_Waiting(rows, stored, size))
        self._waiting_bytes += size
        if not self._changed:
            # Requests that came together are one batch.
            self._loop.call_soon(self._send_changed)
        self._changed.add(lanes)
        return stored

    def _send_changed(self) -> None:
        changed, self._changed = self._changed, set()
        for lanes in changed:
            self._send(lanes)

    def _send(self, lanes: _ShardLanes) -> None:
        while lanes.waiting and not lanes.is_under_way:
            turn = _Turn(lanes)
            lanes.is_under_way = True
            # Held until all are sent: a batch that fails at once would end the turn.
            turn.batches += 1
            for key, waiting in list(lanes.waiting.items()):
                self._put(key, turn, self._take(waiting))
                if not waiting:
                    del lanes.waiting[key]
            self._end_batch(turn)

    def _take(self, waiting: deque[_Waiting]) -> list[_Waiting]:
        """The requests of the next batch of a queue."""
        taken = [waiting.popleft()]
        size = taken[0].size
        while waiting and size + waiting[0].size <= BATCH_BYTES:
            taken.append(waiting.popleft())
            size += taken[-1].size
        self._waiting_bytes -= size
        return taken

    def _end_batch(self, turn: _Turn) -> None:
        turn.batches -= 1
        if not turn.batches:
            turn.lanes.is_under_way = False
            if turn.lanes.waiting:
                self._send(turn.lanes)

    def _put(self, key: tuple[str, int], turn: _Turn, taken: list[_Waiting]) -> None:
        topic, queue_id = key
        rows = _joined([each.rows for each in taken])

        def done(outcome: BatchReceipt | RayMQError) -> None:
            self._finish(key, turn, taken, rows, outcome)
            self._end_batch(turn)

        turn.batches += 1
        try:
            self._shards.put(topic, queue_id, rows, done)
        except Exception as error:
            fault = error if isinstance(error, RayMQError) else Rejected(repr(error))
            self._finish(key, turn, taken, rows, fault)
            self._end_batch(turn)

    def _finish(
        self,
        key: tuple[str, int],
        turn: _Turn,
        taken: list[_Waiting],
        rows: SmallBatch,
        outcome: BatchReceipt | RayMQError,
    ) -> None:
        """Answer the requests of a batch. If one of several was malformed, nothing was stored: each goes alone."""
        if isinstance(outcome, (Rejected, Corrupt)) and len(taken) > 1:
            for each in taken:
                self._put(key, turn, [each])
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
            end = at + each.rows.num_rows
            if not each.stored.done():
                first = outcome.offset(at)
                each.stored.set_result(StoredSend(outcome.shard, first, places[at:end]))
            at = end


def _joined(batches: list[SmallBatch]) -> SmallBatch:
    """The rows of all, in their order."""
    if len(batches) == 1:
        return batches[0]
    columns = [list(chain.from_iterable(column)) for column in zip(*batches, strict=True)]
    return SmallBatch(*columns)


def _places(topic: str, rows: SmallBatch, receipt: BatchReceipt) -> list[int]:
    """The physical offset of each row of a batch; -1: not known."""
    offsets = list(accumulate(_record_bytes(topic, rows), initial=receipt.physical_offset))
    # Otherwise the end of a file of the log lies between them, or some were stored by an earlier try.
    if receipt.physical_offset >= 0 and offsets.pop() == receipt.end_offset:
        return offsets
    return [-1] * rows.num_rows


def _record_bytes(topic: str, rows: SmallBatch) -> list[int]:
    """The bytes of each record. The store adds a stamp and the tag to the properties."""
    fixed = fmt.HEADER_BYTES - 8 + 1 + len(topic) + 2 + STAMP_BYTES
    columns = zip(rows.bodies, rows.tags, rows.properties, rows.born_hosts or (), strict=True)
    return [
        fixed
        + len(host or b"")
        + len(body)
        + len(properties or b"")
        + (TAG_EXTRA_BYTES + len(tag.encode()) if tag else 0)
        for body, tag, properties, host in columns
    ]
