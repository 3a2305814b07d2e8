"""The half messages of a store that leads: prepared once, ended once, and handed to their producers to be checked.

`TransactionService` keeps in the log what counts: the half messages, their outcomes and how often each was checked.
This module knows which of them are open, so that a call reads only those that it hands out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected, Unavailable, require
from raymq.store.base.format import HALF_TOPIC
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.keys import UNIQ_KEY
from raymq.store.records.properties import PRODUCER_GROUP, REAL_QUEUE, REAL_TOPIC
from raymq.store.state.topics import check_target

from .resolutions import Resolution
from .stored_message import StoredMessage, read, read_one
from .transaction import TransactionService

logger = logging.getLogger(__name__)

#: how long a half message that was handed out is handed to no other client (transactionCheckInterval)
CHECK_PAUSE_MS = 30_000
#: bytes of records in one answer, which has one record at least
ANSWER_BYTES = 1 << 20
#: half messages are kept for so long at least, however short the retention is
KEPT_MS_MIN = 3_600_000
_HOUR_MS = 3_600_000
#: half messages from the oldest one that is open on. The outcomes of all of them are kept, 0.5 MiB for a million
WINDOW = 1 << 22
#: open half messages of a shard. Each takes about half a KiB of memory
OPEN_MAX = 1 << 18
#: digits of a queue id in the properties of another engine's half message
QUEUE_DIGITS_MAX = 9
#: half messages that one sweep gives up, because other calls wait for it
SWEEP_MAX = 500
#: a half message whose record cannot be read yet is looked at again after this time
_UNREADABLE_PAUSE_MS = 1_000
#: half messages read at a time
_READ = 512


class HalfEnd(Enum):
    """What a producer says of a half message."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    #: the producer does not know yet: the half message stays open
    UNKNOWN = "unknown"


class PreparedHalf(NamedTuple):
    """A half message that is in the log."""

    offset: int
    physical_offset: int
    transaction_id: str
    #: where it will be delivered
    topic: str
    queue_id: int
    #: it counts when the log is confirmed up to here
    end_offset: int
    #: an earlier request has put it
    is_repeated: bool = False


class EndedHalf(NamedTuple):
    """What has become of a half message."""

    #: what counts now
    resolution: Resolution
    #: it counts when the log is confirmed up to here
    end_offset: int = 0
    #: an earlier request has decided so
    is_repeated: bool = False
    #: where this call has delivered the message; "" and -1: it has not
    topic: str = ""
    queue_id: int = -1


class HalfToCheck(NamedTuple):
    """A half message whose producer is asked what has become of it."""

    offset: int
    #: this one included
    checks: int
    #: as it lies in the log
    record: bytes


class HandedHalves(NamedTuple):
    """The answer to producers that ask for half messages."""

    halves: list[HalfToCheck]
    #: ms until the next one of these groups may be due; None: none is open
    next_ms: int | None
    #: the log has got records, which the answer rests on
    has_put: bool


class Swept(NamedTuple):
    """What a sweep has done."""

    #: there may be more to give up
    is_full: bool
    #: the log has got records
    has_put: bool


class _OpenHalf(NamedTuple):
    prepared: PreparedHalf
    group: str
    store_time_ms: int


class HalfMessages:
    """The half messages of a store. Callers: any thread. Nothing is called, and nothing awaited, with the lock held.

    What it returns is in the log, and counts when it is confirmed there: the caller waits for that.
    """

    def __init__(self, store: ServiceHost) -> None:
        self._store = store
        self._clock = store.clock
        self._service = TransactionService(store)
        self._lock = threading.Lock()
        #: by offset, ascending
        self._open: dict[int, _OpenHalf] = {}
        #: (producer group, transaction id) -> offset
        self._by_id: dict[tuple[str, str], int] = {}
        #: producer group -> heap of (monotonic ms at which it is due, offset). Ended ones stay until they are due
        self._due: dict[str, list[tuple[int, int]]] = {}
        self.is_loaded = False

    @property
    def open_count(self) -> int:
        """How many are open, as far as `load` has read them."""
        return len(self._open)

    @property
    def oldest_ms(self) -> int:
        """How long ago the oldest open one was stored; 0: none is open."""
        # A list at once: calls of producers change it meanwhile.
        oldest = next(iter(list(self._open.values())), None)
        if oldest is None:
            return 0
        return max(0, self._service.stored_ago_ms(oldest.store_time_ms))

    def load(self) -> None:
        """Find the half messages that are open. To be called before all others.

        Raises: Unavailable while the queue of half messages lacks some that are in the log.
        """
        with self._lock:
            if self.is_loaded:
                return
            end = self._store.queue_range(HALF_TOPIC, 0)[1]
            if end < self._store.state.next_offsets.get((HALF_TOPIC, 0), 0):
                fault = "the half messages are being loaded; ask again"
                raise Unavailable(fault, field="transaction")
            self._service.take_over()
            self._open, self._by_id, self._due = {}, {}, {}
            self._read_open(end)
            self.is_loaded = True

    def _read_open(self, end: int) -> None:
        next_offset = 0
        for offset in self._service.open_ones(end):
            if offset < next_offset:
                continue
            try:
                found, next_offset = read(self._store, HALF_TOPIC, 0, offset, max_records=_READ)
            except (Corrupt, OffsetOutOfRange):
                # The damage is noted for status. It must not block the other half messages.
                next_offset = offset + 1
                continue
            for half in found:
                if self._service.outcome(half.queue_offset) is Resolution.OPEN:
                    self._note_stored(half)

    def _note_stored(self, half: StoredMessage) -> None:
        queue = half.properties.get(REAL_QUEUE, "")
        prepared = PreparedHalf(
            half.queue_offset,
            half.physical_offset,
            half.properties.get(UNIQ_KEY, ""),
            half.properties.get(REAL_TOPIC, ""),
            int(queue) if queue.isdecimal() and len(queue) <= QUEUE_DIGITS_MAX else -1,
            # Confirmed: what is not is in no queue.
            end_offset=0,
        )
        due_ms = self._service.due_in_ms(half)
        if self._service.checks(half.queue_offset):
            # A leader before may have handed it out just now.
            due_ms = max(due_ms, CHECK_PAUSE_MS)
        group = half.properties.get(PRODUCER_GROUP, "")
        self._note(_OpenHalf(prepared, group, half.store_time_ms), due_ms)

    def _note(self, half: _OpenHalf, due_in_ms: int) -> None:
        offset = half.prepared.offset
        self._open[offset] = half
        self._by_id[half.group, half.prepared.transaction_id] = offset
        at_ms = self._clock.monotonic_ms() + due_in_ms
        heappush(self._due.setdefault(half.group, []), (at_ms, offset))

    def _forget(self, offset: int) -> None:
        half = self._open.pop(offset, None)
        if half is not None:
            key = half.group, half.prepared.transaction_id
            if self._by_id.get(key) == offset:
                del self._by_id[key]

    # --- calls of producers -----------------------------------------------------------------------

    def prepare(self, message: InnerMessage, group: str) -> PreparedHalf:
        """Put a half message of a producer group, once.

        A request with the UNIQ_KEY of an open half message of the group is that request again, whose answer was lost.
        Raises: as `TransactionService.prepare`; Unavailable while OPEN_MAX half messages are open.
        """
        require(self.is_loaded, "the half messages are loaded")
        wanted = message.properties.get(UNIQ_KEY)
        with self._lock:
            known = None if wanted is None else self._by_id.get((group, wanted))
            if known is not None:
                if self._service.outcome(known) is Resolution.OPEN:
                    return self._open[known].prepared._replace(is_repeated=True)
                self._forget(known)
            if len(self._open) >= OPEN_MAX:
                raise Unavailable(
                    f"{len(self._open)} half messages are open on this shard: commit or roll them back, or let their "
                    "producers be asked",
                    field="transaction",
                    limit=OPEN_MAX,
                    found=len(self._open),
                )

            # Before the put: what fails after it would have stored a half message that nothing knows.
            due_ms = self._service.immunity_ms(message.properties)
            half = self._service.prepare(message, group=group)
            prepared = PreparedHalf(
                half.offset,
                half.appended.physical_offset,
                half.transaction_id,
                message.topic,
                message.queue_id,
                half.appended.end_offset,
            )
            self._note(_OpenHalf(prepared, group, half.appended.store_time_ms), due_ms)
        return prepared

    def end(
        self, offset: int, group: str, decision: HalfEnd, *, physical_offset: int | None = None
    ) -> EndedHalf:
        """Commit or roll back a half message, once. A repeated call gets the answer of the first one.

        Args: `physical_offset`: if given, where its record must be.
        Raises: Rejected if the other decision counts, and for a half message of another group; TopicMissing if its
        topic was deleted; Unavailable if it is not confirmed yet. The half message is as it was.
        """
        require(self.is_loaded, "the half messages are loaded")
        self._check_place(offset, physical_offset)
        if decision is HalfEnd.UNKNOWN:
            return EndedHalf(self._service.check_open(offset, group))
        if decision is HalfEnd.ROLLBACK:
            appended = self._service.rollback(offset, group=group)
            ended = EndedHalf(Resolution.ROLLBACK, appended.end_offset, bool(appended.duplicates))
        else:
            ended = self._commit(offset, group)
        with self._lock:
            self._forget(offset)
        return ended

    def _commit(self, offset: int, group: str) -> EndedHalf:
        known = self._open.get(offset)
        if known is not None:
            topic, queue_id = known.prepared.topic, known.prepared.queue_id
            check_target(topic, queue_id, self._store.state.topics)
        appended = self._service.commit(offset, group=group)
        ended = EndedHalf(Resolution.COMMIT, appended.end_offset, bool(appended.duplicates))
        if known is None or ended.is_repeated:
            return ended
        return ended._replace(topic=topic, queue_id=queue_id)

    def _check_place(self, offset: int, physical_offset: int | None) -> None:
        known = self._open.get(offset)
        if physical_offset is None or known is None:
            return
        there = known.prepared.physical_offset
        if there != physical_offset:
            raise Rejected(
                f"half message {offset} is at {there} of the log, not at {physical_offset}: another one is meant",
                field="physical_offset",
                limit=there,
                found=physical_offset,
            )

    # --- checks -----------------------------------------------------------------------------------

    def hand_out(self, groups: Sequence[str], max_records: int) -> HandedHalves:
        """Hand the half messages of producer groups that are due to a client that asks their producers.

        Each is counted as checked, and for CHECK_PAUSE_MS handed to no other client. One that was checked too often is
        discarded instead.
        Raises: as `TransactionService.commit`.
        """
        require(self.is_loaded, "the half messages are loaded")
        found: list[HalfToCheck] = []
        left, discarded = ANSWER_BYTES, 0
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            for group in dict.fromkeys(groups):
                heap = self._due.get(group, [])
                while heap and heap[0][0] <= now_ms and left > 0:
                    if len(found) + discarded >= max_records:
                        break
                    _, offset = heappop(heap)
                    if self._service.outcome(offset) is not Resolution.OPEN:
                        self._forget(offset)
                        continue
                    if offset not in self._open:
                        continue

                    checks = self._service.checks(offset)
                    if checks >= self._service.check_max:
                        discarded += self._discard(offset)
                        continue
                    record = self._record(offset)
                    pause_ms = _UNREADABLE_PAUSE_MS if record is None else CHECK_PAUSE_MS
                    heappush(heap, (now_ms + pause_ms, offset))
                    if record is not None:
                        found.append(HalfToCheck(offset, checks + 1, record))
                        left -= len(record)
                if not heap:
                    self._due.pop(group, None)

            next_ms = self._next_ms(groups, now_ms)
            if found:
                self._service.note_checks({half.offset: half.checks for half in found})

        return HandedHalves(found, next_ms, bool(found or discarded))

    def _next_ms(self, groups: Sequence[str], now_ms: int) -> int | None:
        times = [self._due[group][0][0] for group in groups if group in self._due]
        return max(0, min(times) - now_ms) if times else None

    def _record(self, offset: int) -> bytes | None:
        """The record of a half message; None: it is not confirmed yet, or its file is damaged or deleted."""
        try:
            part = self._store.fetch_whole(
                HALF_TOPIC, 0, offset, max_bytes=ANSWER_BYTES, max_records=1
            )
        except (Corrupt, OffsetOutOfRange):
            return None
        if part.records is None or not len(part.records):
            return None
        return bytes(part.records[0].as_py())

    def _discard(self, offset: int) -> bool:
        """Move a half message into the topic of those that were given up. Returns: whether this call did it."""
        try:
            half = read_one(self._store, HALF_TOPIC, 0, offset)
        except Corrupt:
            half = None
        if half is None:
            return False
        self._forget(offset)
        logger.warning(
            "half message %d of producer group %r is given up after %d checks",
            *(offset, half.properties.get(PRODUCER_GROUP), self._service.checks(offset)),
        )
        return self._service.discard(half)

    # --- upkeep -----------------------------------------------------------------------------------

    def sweep(self) -> Swept:
        """Give up what is older than the retention, whether its producers ask or not.

        Otherwise its file would be deleted, and a half message that was never ended would leave nothing. Of many half
        messages the oldest ones are given up, which are WINDOW before the newest one.
        Raises: as `hand_out`.
        """
        end = self._store.log.end
        given_up = 0
        with self._lock:
            if not self.is_loaded:
                return Swept(is_full=False, has_put=False)
            self._service.discard_deleted()
            for offset in self._too_old():
                if given_up == SWEEP_MAX:
                    break
                given_up += 1
                self._discard(offset)

            self._service.note_offsets()
            self._drop_ended()
        return Swept(given_up == SWEEP_MAX, self._store.log.end != end)

    def _too_old(self) -> Iterator[int]:
        kept_ms = max(KEPT_MS_MIN, int(self._store.config.file_reserved_hours * _HOUR_MS))
        window_begin = self._store.state.next_offsets.get((HALF_TOPIC, 0), 0) - WINDOW
        for offset, half in list(self._open.items()):
            if self._service.outcome(offset) is not Resolution.OPEN:
                self._forget(offset)
                continue
            age_ms = self._service.stored_ago_ms(half.store_time_ms)
            if age_ms <= kept_ms and offset >= window_begin:
                return
            yield offset

    def _drop_ended(self) -> None:
        """Drop what is not open any more from the heaps: of groups that never ask it would stay."""
        for group, heap in list(self._due.items()):
            left = [entry for entry in heap if entry[1] in self._open]
            heapify(left)
            if left:
                self._due[group] = left
            else:
                del self._due[group]
