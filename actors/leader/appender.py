"""Puts of many threads, appended one group at a time.

A thread that finds another one appending leaves its put to that thread and goes on receiving (flat combining). No
thread therefore waits for a lock, and puts that arrive together are published once and wake the satellites once. A
thread of the shard appends large batches, so that the threads that brought them can receive and check the next ones.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.store.base.errors import Bug, NotServing, RayMQError
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import Acks
from raymq.store.put.small_unit import CheckedPut
from raymq.store.records.record import batch_bytes
from raymq.store.records.requests import AppendedRows
from raymq.store.records.small_batch import SmallBatch

logger = logging.getLogger("raymq.commit_log")

#: receiving a batch of this size takes so long that the shard's thread can append another one in that time
LARGE_BYTES = 128 << 10
#: puts, and bytes of large ones, that are appended before they are published
GROUP_PUTS_MAX = 64
GROUP_BYTES_MAX = 4 << 20
#: bytes of large batches that may be queued, of all streams together
QUEUED_BYTES_MAX = 64 << 20


@dataclass(eq=False)
class QueuedPut:
    """A checked put that is not appended yet."""

    ticket: PutTicket
    checked: CheckedPut
    #: bytes of a large batch; 0 for others, which are not counted
    size: int
    taken: bool = False


class AppendedPut(NamedTuple):
    """A put that is in the log."""

    ticket: PutTicket
    appended: AppendedRows
    acks: Acks


class Appender:
    """The queue of checked puts. Threads: any may `put`; `run` is one of its own."""

    def __init__(
        self,
        append: Callable[[list[CheckedPut]], list[AppendedRows | RayMQError]],
        report_appended: Callable[[list[AppendedPut]], list[PutTicket]],
    ) -> None:
        """Args: `append`: called by one thread at a time, with one put or several small ones. It returns the append
        or the refusal of each.

        `report_appended` gets the appended puts in order and returns the tickets that are finished. It must not raise.
        """
        self._append = append
        self._report_appended = report_appended
        #: in the order of their streams
        self._queued: deque[QueuedPut] = deque()
        self._append_lock = threading.Lock()
        self._wake = threading.Event()
        #: bytes of large batches in the queue
        self._bytes = 0
        self._space = threading.Condition()
        self._ended = False

    @property
    def waiting(self) -> int:
        """Puts in the queue."""
        return len(self._queued)

    @property
    def busy(self) -> bool:
        """Whether a put is in the queue or on its way from it to `report_appended`."""
        return bool(self._queued) or self._append_lock.locked()

    def put(self, puts: Sequence[tuple[PutTicket, CheckedPut]]) -> bool:
        """Take puts, in their order. Large ones wait for space first, so that a slow disk slows their producers down.

        Returns: whether there are any, and they are appended by now. Raises: nothing; errors go to the tickets.
        """
        if not puts:
            return False

        entries = [QueuedPut(ticket, put, _large_bytes(put)) for ticket, put in puts]
        size = sum(entry.size for entry in entries)
        if size:
            self._await_space(size)
        self._queued.extend(entries)
        if self._ended:
            self._refuse_queued()
        elif self._bytes:
            # They are queued after large ones, which the shard's thread appends.
            self._wake.set()
        else:
            self._append_inline(entries[-1])
        return entries[-1].taken

    def _await_space(self, size: int) -> None:
        """Wait until so many bytes of large batches may be queued, and count them."""

        def may_queue() -> bool:
            fits = not self._bytes or self._bytes + size <= QUEUED_BYTES_MAX
            return fits or self._ended

        with self._space:
            self._space.wait_for(may_queue)
            self._bytes += size

    def _append_inline(self, mine: QueuedPut) -> None:
        """Append queued puts in the caller's thread, until its own put is appended."""
        while not mine.taken and self._append_lock.acquire(blocking=False):
            self._append_group()
            if mine.taken and self._queued:
                # Other threads left these puts to this one. The shard's thread takes them, because they would delay
                # this answer.
                self._wake.set()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Append the puts that no caller's thread appends, until `stopping`."""
        while not stopping():
            self._wake.wait()
            self._wake.clear()
            while self._queued and self._append_lock.acquire(blocking=False):
                self._append_group()

    def wake(self) -> None:
        """End the wait of `run`."""
        self._wake.set()

    def _append_group(self) -> None:
        """Append the first queued puts and publish them together. Needs `_append_lock`, and releases it."""
        finished: list[PutTicket] = []
        puts: list[AppendedPut] = []
        size = 0
        try:
            while self._queued and len(puts) < GROUP_PUTS_MAX and size < GROUP_BYTES_MAX:
                entries = self._take()
                size += entries[0].size
                for entry, appended in zip(entries, self._append_entries(entries), strict=True):
                    if isinstance(appended, RayMQError):
                        entry.ticket.finish(appended)
                        finished.append(entry.ticket)
                    else:
                        puts.append(AppendedPut(entry.ticket, appended, entry.checked.request.acks))

            if puts:
                finished += self._report_appended(puts)
        finally:
            self._append_lock.release()
        notify_all_done(finished)

    def _take(self) -> list[QueuedPut]:
        """The first queued put, with the small ones after it if it is small. There is one."""
        entries = [self._queued.popleft()]
        if entries[0].size:
            with self._space:
                self._bytes -= entries[0].size
                self._space.notify_all()
        else:
            while self._queued and not self._queued[0].size and len(entries) < GROUP_PUTS_MAX:
                entries.append(self._queued.popleft())
        for entry in entries:
            entry.taken = True
        return entries

    def _append_entries(self, entries: list[QueuedPut]) -> list[AppendedRows | RayMQError]:
        """Append them together. Raises: nothing; later puts must still be appended, and all be answered."""
        try:
            return self._append([entry.checked for entry in entries])
        except Exception as error:
            logger.exception("put")
            return [Bug(f"put: {error!r}")] * len(entries)

    def end(self) -> None:
        """Refuse queued and later puts: the shard has stopped writing."""
        with self._space:
            self._ended = True
            self._space.notify_all()
        self._refuse_queued()

    def await_idle(self) -> None:
        """Wait until no thread appends any more. Callers: after `end`."""
        with self._append_lock:
            return

    def _refuse_queued(self) -> None:
        refused: list[PutTicket] = []
        while True:
            try:
                entry = self._queued.popleft()
            except IndexError:
                break

            entry.taken = True
            entry.ticket.finish(
                NotServing(
                    "the shard stopped writing before this put; nothing of it is stored",
                    field="shard",
                    status=PutStatus.SERVICE_NOT_AVAILABLE.value,
                )
            )
            refused.append(entry.ticket)

        notify_all_done(refused)


def _large_bytes(put: CheckedPut) -> int:
    """The bytes of a large batch; 0 for another one."""
    batch = put.request.batch
    if isinstance(batch, SmallBatch):
        return 0
    size = batch_bytes(batch, is_checked=True)
    return size if size >= LARGE_BYTES else 0
