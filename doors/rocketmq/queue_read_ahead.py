"""Reads ahead of the pulls of a queue, and keeps what they have not asked for yet.

A client that is behind pulls 32 messages at a time by default. A fetch costs the shard and this server more than those
messages, so one fetch brings the messages of several pulls. Nothing is read ahead before a pull was answered in full.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.client.messages.message import queue_offsets
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import RayMQError
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector

#: pulls of one fetch
AHEAD = 8
#: messages and bytes of one queue that are read ahead at most
AHEAD_MESSAGES_MAX, AHEAD_BYTES_MAX = 1_024, 256 << 10
#: bytes that are kept of all queues of a shard. Each may hold those of the other queues of its fetch in memory
KEPT_BYTES_MAX = 8 << 20
#: how long they are kept. With its leader the log may lose what was not synced, and have others at those offsets
KEPT_S = 1.0
#: queues of which is known that their readers are behind
BEHIND_MAX = 10_000


class _Key(NamedTuple):
    """Pulls of the same messages."""

    topic: str
    queue_id: int
    wanted: MessageSelector | None


class _Kept(NamedTuple):
    """A part of a queue, all wanted messages of which are here."""

    part: FetchSlice
    records: pa.Array
    #: queue offset of each record
    offsets: Int64s
    until_s: float


class QueueReadAhead:
    """The reads of one shard. Callers: one event loop."""

    def __init__(
        self,
        read: Callable[[FetchRequest], Awaitable[FetchSlice | None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Args: `read`: reads one queue. It raises RayMQError."""
        self._read = read
        self._loop = loop
        #: the oldest first
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        #: bytes of what is kept
        self.kept_bytes = 0
        self._sweeps = False
        #: where the next pull of a queue begins, if the newest was answered in full
        self._behind: OrderedDict[_Key, int] = OrderedDict()

    async def read(self, request: FetchRequest) -> FetchSlice | None:
        """Read one queue. Returns: None: nothing is there. Raises: RayMQError."""
        ((queue_id, offset),) = request.offsets.items()
        key = _Key(request.topic, queue_id, request.wanted)
        found = self._take(key, offset, request)
        if found is not None:
            return found

        is_behind = self._behind.pop(key, None) == offset
        try:
            part = await self._read(_enlarged(request) if is_behind else request)
        except RayMQError:
            # Perhaps another replica leads now.
            self._forget_all()
            raise
        if part is None or part.error is not None or part.records is None:
            return part
        if len(part.records) < request.max_records and not is_behind:
            return part
        self._keep(key, offset, part, part.records)
        return self._take(key, offset, request)

    def _take(self, key: _Key, offset: int, request: FetchRequest) -> FetchSlice | None:
        """The answer to a pull from what is kept; None: that has not all of it."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        part = kept.part
        if kept.until_s < self._loop.time() or not part.first_offset <= offset < part.next_offset:
            self._drop(key)
            return None

        first = int(np.searchsorted(kept.offsets, offset))
        last = min(first + request.max_records, len(kept.offsets))
        last = max(_within(kept.records, first, last, request.max_bytes), min(first + 1, last))
        is_whole = last == len(kept.offsets)
        next_offset = part.next_offset if is_whole else int(kept.offsets[last - 1]) + 1
        if last - first == request.max_records:
            self._note_behind(key, next_offset)
        if is_whole:
            self._drop(key)
        return part._replace(
            first_offset=offset,
            next_offset=next_offset,
            records=kept.records.slice(first, last - first),
        )

    def _keep(self, key: _Key, offset: int, part: FetchSlice, records: pa.Array) -> None:
        self._drop(key)
        until_s = self._loop.time() + KEPT_S
        self._kept[key] = _Kept(
            part._replace(first_offset=offset), records, queue_offsets(records), until_s
        )
        self.kept_bytes += records.nbytes
        if not self._sweeps:
            self._sweeps = True
            self._loop.call_later(KEPT_S, self._sweep)
        while self.kept_bytes > KEPT_BYTES_MAX and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _sweep(self) -> None:
        """Drop what was not asked for in time. Called again while something is kept."""
        now_s = self._loop.time()
        for key in [key for key, kept in self._kept.items() if kept.until_s <= now_s]:
            self._drop(key)
        self._sweeps = bool(self._kept)
        if self._sweeps:
            self._loop.call_later(KEPT_S, self._sweep)

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.kept_bytes -= kept.records.nbytes

    def _note_behind(self, key: _Key, next_offset: int) -> None:
        self._behind[key] = next_offset
        self._behind.move_to_end(key)
        while len(self._behind) > BEHIND_MAX:
            self._behind.popitem(last=False)

    def forget_topic(self, topic: str) -> None:
        """Drop what is kept of a topic: it has changed, or has gone."""
        for key in [key for key in self._kept if key.topic == topic]:
            self._drop(key)

    def _forget_all(self) -> None:
        self._kept.clear()
        self._behind.clear()
        self.kept_bytes = 0


def _enlarged(request: FetchRequest) -> FetchRequest:
    """The fetch of several pulls."""
    messages = min(AHEAD * request.max_records, AHEAD_MESSAGES_MAX)
    size = min(AHEAD * request.max_bytes, AHEAD_BYTES_MAX)
    return request._replace(
        max_records=max(messages, request.max_records), max_bytes=max(size, request.max_bytes)
    )


def _within(records: pa.Array, first: int, last: int, max_bytes: int) -> int:
    """The end of those rows from `first` on, up to `last`, that have so many bytes together."""
    starts = _starts(records)
    end = int(np.searchsorted(starts, int(starts[first]) + max_bytes, side="right")) - 1
    return min(end, last)


def _starts(records: pa.Array) -> Int64s:
    """Where each record begins, and the last one ends."""
    offsets = np.frombuffer(records.buffers()[1], dtype=np.int32)
    return offsets[records.offset : records.offset + len(records) + 1].astype(np.int64)
