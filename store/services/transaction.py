"""Transactions: half messages that become visible when they are committed.

Source: TransactionalMessageBridge, TransactionalMessageServiceImpl, EndTransactionProcessor, RocketMQ 5.3.3. RocketMQ
may deliver a committed message twice. Here a commit's message, its op record and its progress are one append. So a
repeated commit, even after a crash, delivers nothing more. A check counts in the shard's progress instead of writing
the half message again.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.format import (
    HALF_TOPIC,
    SYS_ANY_HOST_V6,
    SYS_COMMITTED,
    SYS_TRANSACTION_MASK,
)
from raymq.store.put.inner_message import EncodedInner, InnerMessage, ServiceProgress
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.key_check import check_key
from raymq.store.records.properties import PRODUCER_GROUP, REAL_QUEUE, REAL_TOPIC
from raymq.store.records.requests import AppendedRows
from raymq.store.state.producer_table import UNKNOWN_OFFSET
from raymq.store.state.topics import check_target

from .resolutions import Resolution, Resolutions
from .stored_message import StoredMessage, read, read_one

logger = logging.getLogger(__name__)

OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
DISCARD_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
#: the group by whose offsets RocketMQ finds the end of the resolved half messages and op records
GROUP = "CID_RMQ_SYS_TRANS"
SERVICE = "transaction"

_OP_TAG = "d"
_OP_SEPARATOR = ","
_CHECKS = "checks:"
#: bytes reserved for the op record of a committed message
OP_RESERVE_BYTES = 1024
#: digits of a time at most. A client may send any number of them
IMMUNITY_DIGITS_MAX = 9
#: op records read at a time
_OPS_READ = 512

AskProducer = Callable[[StoredMessage], Resolution]


class Half(NamedTuple):
    """A stored half message: its names for commit, rollback and check."""

    offset: int
    transaction_id: str
    appended: AppendedRows


class CheckRound(NamedTuple):
    """The result of one round of checks."""

    asked: int
    committed: int
    rolled_back: int
    discarded: int


@dataclass(eq=False)
class TransactionService:
    """Prepare, commit, roll back, check. Callers: any thread."""

    _store: ServiceHost
    _: KW_ONLY
    #: age from which on a half message is checked (transactionTimeOut)
    timeout_ms: int = 6_000
    #: checks after which a half message is discarded (transactionCheckMax)
    check_max: int = 15
    #: age after which a half message is discarded (fileReservedTime)
    reserved_ms: int = 72 * 3600 * 1000
    #: the longest time of a round of checks
    round_ms: int = 60_000
    #: held by check and put together: two commits of one half message deliver one message
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    # --- calls of producers -----------------------------------------------------------------------

    def prepare(self, message: InnerMessage, *, group: str | None = None) -> Half:
        """Put a message as a half message of its topic and queue. Consumers see it after `commit`.

        Delays are ignored: the transaction wins. Durable: nothing yet, see `MessageStore.put_inner`.
        Args: `group`: the producer group; None: that of the message's PGROUP, if it has one.
        Raises: Rejected for a missing topic or queue, or missing KEYS that the topic needs. Otherwise as put_inner.
        """
        topics = self._store.state.topics
        check_target(message.topic, message.queue_id, topics)
        if topics[message.topic].compacted:
            check_key(message.topic, message.properties)

        properties = dict(message.properties)
        transaction_id = properties.setdefault("UNIQ_KEY", uuid.uuid4().hex.upper())
        properties.update(
            {
                "TRAN_MSG": "true",
                "__transactionId__": transaction_id,
                REAL_TOPIC: message.topic,
                REAL_QUEUE: str(message.queue_id),
            }
        )
        if group is not None:
            properties[PRODUCER_GROUP] = group

        half = replace(
            message,
            topic=HALF_TOPIC,
            queue_id=0,
            properties=properties,
            sys_flag=message.sys_flag & ~SYS_TRANSACTION_MASK,
            prepared_transaction_offset=0,
            properties_text=None,
        )

        self._check_size(half)
        (appended,) = self._store.put_inner([half])
        return Half(appended.first_offset, transaction_id, appended)

    def _check_size(self, half: InnerMessage) -> None:
        """Check that a prepared message can also be committed, together with its op record."""
        config = self._store.config
        size = EncodedInner(half, store_host=self._store.log.store_host).size
        limit = config.record_bytes_max - OP_RESERVE_BYTES
        if size > limit:
            fault = f"the half message makes a record of {size} bytes, the limit is {limit}"
            raise Rejected(fault, field="record", limit=limit)

    def commit(self, offset: int, *, group: str | None = None) -> AppendedRows:
        """Deliver a half message, once. Returns: its offsets, which are unknown for a repeated commit.

        Args: `group`: if given, the PGROUP that the message was prepared with.
        Raises: Rejected if it was rolled back or discarded, or is not a half message. Unavailable if it is not
        confirmed yet.
        """
        with self._lock:
            half = self._open_half(offset, group, Resolution.COMMIT)
            if half is None:
                return self._repeated_answer()
            return self._commit(half)

    def rollback(self, offset: int, *, group: str | None = None) -> AppendedRows:
        """Drop a half message. Raises: as `commit`."""
        with self._lock:
            half = self._open_half(offset, group, Resolution.ROLLBACK)
            if half is None:
                return self._repeated_answer()
            return self._append_resolution(half, Resolution.ROLLBACK, [])

    def _open_half(
        self, offset: int, group: str | None, wanted: Resolution
    ) -> StoredMessage | None:
        """The half message, if it is open; None if it was resolved as `wanted` before."""
        found = self.outcome(offset)
        if found is wanted:
            return None
        if found is not Resolution.OPEN:
            outcome = "long ago" if found is None else f"as {found.name}"
            raise Rejected(
                f"half message {offset} was resolved {outcome}; it cannot become {wanted.name} now",
                field="transaction",
                limit="an open half message",
                found="unknown" if found is None else found.name.lower(),
            )

        return self._readable_half(offset, group)

    def _readable_half(self, offset: int, group: str | None) -> StoredMessage:
        half = read_one(self._store, HALF_TOPIC, 0, offset)
        if half is None:
            if offset < self._store.state.next_offsets.get((HALF_TOPIC, 0), 0):
                fault = f"half message {offset} is not confirmed yet, or its file was deleted; try again"
                raise Unavailable(fault, field="transaction")
            fault = f"half message {offset} does not exist"
            raise Rejected(fault, field="transaction", limit="a half message")

        have = half.properties.get(PRODUCER_GROUP)
        if group is not None and have != group:
            fault = f"half message {offset} was prepared by producer group {have!r}, not {group!r}"
            raise Rejected(fault, field="group", limit=have)
        return half

    def _commit(self, half: StoredMessage) -> AppendedRows:
        """Put the message of a half message into its real queue, together with the outcome."""
        message = half.moved(
            half.properties[REAL_TOPIC],
            int(half.properties[REAL_QUEUE]),
            half.properties,
            sys_flag=(half.sys_flag & ~(SYS_TRANSACTION_MASK | SYS_ANY_HOST_V6)) | SYS_COMMITTED,
            prepared_transaction_offset=half.physical_offset,
        )
        return self._append_resolution(half, Resolution.COMMIT, [message])

    def _append_resolution(
        self, half: StoredMessage, resolution: Resolution, messages: list[InnerMessage]
    ) -> AppendedRows:
        """Put the outcome of a half message, its op record, and the progress of both, as one bundle."""
        offset = half.queue_offset
        values = self._resolutions().resolve({offset: resolution})
        if f"{_CHECKS}{offset}" in self._progress_table():
            values[f"{_CHECKS}{offset}"] = None
        op = InnerMessage(
            OP_TOPIC,
            0,
            f"{offset}{_OP_SEPARATOR}".encode(),
            {"TAGS": _OP_TAG},
            born_time_ms=self._store.clock.now_ms(),
        )
        return self._put_with_progress(values, [*messages, op])[0]

    def _put_with_progress(
        self, values: Mapping[str, object], messages: Sequence[InnerMessage] = ()
    ) -> list[AppendedRows]:
        """Put a change of the progress together with messages."""
        return self._store.put_inner(messages, progress=ServiceProgress(SERVICE, values))

    def _repeated_answer(self) -> AppendedRows:
        """The answer to a repeated call: as durable as the log is now."""
        return AppendedRows(
            first_offset=UNKNOWN_OFFSET,
            count=1,
            duplicates=1,
            store_time_ms=self._store.state.store_time_ms,
            physical_offset=-1,
            end_offset=self._store.log.end,
            last_offset=UNKNOWN_OFFSET,
        )

    # --- what is open -----------------------------------------------------------------------------

    def outcome(self, offset: int) -> Resolution | None:
        """The outcome of the half message at an offset; None: resolved too long ago to know."""
        return self._resolutions().of(offset)

    def open_ones(self, end: int) -> Iterator[int]:
        """Offsets of open half messages below `end`, ascending."""
        return self._resolutions().open_ones(end)

    def checks(self, offset: int) -> int:
        """How often a half message was checked."""
        return int(self._progress_table().get(f"{_CHECKS}{offset}", 0))

    def check_open(self, offset: int, group: str | None) -> Resolution:
        """The outcome of a half message, which may be OPEN. Raises: as `commit`, for one that does not exist."""
        found = self.outcome(offset)
        if found is Resolution.OPEN:
            self._readable_half(offset, group)
        return Resolution.DISCARD if found is None else found

    # --- checks -----------------------------------------------------------------------------------

    def check(self, ask: AskProducer) -> CheckRound:
        """Ask about every open half message that is old enough. After too many checks it is discarded.

        Args: `ask`: called without the service's lock. Its answer counts unless the half message was resolved
        meanwhile. RocketMQ runs a round every 30 s (transactionCheckInterval).
        """
        self.take_over()
        clock = self._store.clock
        began_ms = clock.now_ms()
        began_store_ms = self._store_now_ms(began_ms)
        deadline_ms = clock.monotonic_ms() + self.round_ms
        counts = dict.fromkeys(Resolution, 0)
        asked = 0
        end = self._store.queue_range(HALF_TOPIC, 0)[1]

        for offset in list(self._resolutions().open_ones(end)):
            try:
                half = read_one(self._store, HALF_TOPIC, 0, offset)
            except Corrupt:
                # The damage is noted for status. It must not block the other half messages.
                continue
            if half is None:
                continue

            age_ms = _age_ms(half, began_ms, began_store_ms)
            if half.store_time_ms > began_store_ms or clock.monotonic_ms() > deadline_ms:
                break
            if age_ms < self.immunity_ms(half.properties):
                continue
            checks = self.checks(offset)
            if checks >= self.check_max or age_ms > self.reserved_ms:
                counts[Resolution.DISCARD] += self._resolve_once(half, Resolution.DISCARD)
                continue

            asked += 1
            answer = ask(half)
            if answer is Resolution.OPEN:
                self.note_checks({offset: checks + 1})
            else:
                counts[answer] += self._resolve_once(half, answer)

        self.note_offsets()
        outcomes = (Resolution.COMMIT, Resolution.ROLLBACK, Resolution.DISCARD)
        return CheckRound(asked, *(counts[outcome] for outcome in outcomes))

    def note_checks(self, checks: Mapping[int, int]) -> None:
        """Store how often half messages were checked. Those that are not open any more do not count."""
        with self._lock:
            values = {
                f"{_CHECKS}{offset}": count
                for offset, count in checks.items()
                if self.outcome(offset) is Resolution.OPEN
            }
            if values:
                self._put_with_progress(values)

    def discard(self, half: StoredMessage) -> bool:
        """Give a half message up: it goes into DISCARD_TOPIC. Returns: whether it was open."""
        return self._resolve_once(half, Resolution.DISCARD)

    def _resolve_once(self, half: StoredMessage, resolution: Resolution) -> bool:
        """Resolve a half message unless another call did. Returns: whether this call did it."""
        with self._lock:
            if self.outcome(half.queue_offset) is not Resolution.OPEN:
                return False

            if resolution is Resolution.COMMIT:
                try:
                    self._commit(half)
                except (Rejected, KeyError, ValueError) as error:
                    # Another engine's half message may name no queue. It must not block the others.
                    offset = half.queue_offset
                    logger.warning("half message %d cannot be committed: %s", offset, error)
                    return False
                return True

            discarded = resolution is Resolution.DISCARD
            moved = [half.moved(DISCARD_TOPIC, 0, half.properties)] if discarded else []
            self._append_resolution(half, resolution, moved)
            return True

    def immunity_ms(self, properties: Mapping[str, str]) -> int:
        """The age from which on a half message with such properties is checked."""
        wanted = properties.get("CHECK_IMMUNITY_TIME_IN_SECONDS", "")
        is_time = wanted.isdecimal() and len(wanted) <= IMMUNITY_DIGITS_MAX
        return int(wanted) * 1000 if is_time else self.timeout_ms

    def due_in_ms(self, half: StoredMessage) -> int:
        """How long it takes until a half message is old enough to be checked; 0: it is."""
        now_ms = self._store.clock.now_ms()
        age_ms = _age_ms(half, now_ms, self._store_now_ms(now_ms))
        return max(0, self.immunity_ms(half.properties) - age_ms)

    def stored_ago_ms(self, store_time_ms: int) -> int:
        """How long ago a store time was."""
        return self._store_now_ms(self._store.clock.now_ms()) - store_time_ms

    def _store_now_ms(self, now_ms: int) -> int:
        """The clock of store times. After the wall clock was set back, they stay ahead of it."""
        return now_ms + self._store.store_times.ahead_ms(self._store.state.store_time_ms)

    # --- RocketMQ's progress ----------------------------------------------------------------------

    def take_over(self) -> None:
        """Import the op records that another engine wrote into this store. RayMQ's own say nothing new."""
        with self._lock:
            # RocketMQ moves this offset over half messages that are resolved, or that it wrote again to check them.
            found = self._deleted_ones(self._noted(HALF_TOPIC))
            resolutions = self._resolutions()

            first, end = self._store.queue_range(OP_TOPIC, 0)
            at = max(first, self._noted(OP_TOPIC))
            while at < end:
                try:
                    ops, at = read(self._store, OP_TOPIC, 0, at, max_records=_OPS_READ)
                except Corrupt:
                    ops, at = [], at + 1
                for op in ops:
                    for text in op.body.decode("ascii", "replace").split(_OP_SEPARATOR):
                        if text.isdigit() and resolutions.of(int(text)) is Resolution.OPEN:
                            found[int(text)] = Resolution.DISCARD

            if found:
                self._put_with_progress(resolutions.resolve(found))

        self.note_offsets()

    def discard_deleted(self) -> None:
        """Resolve the half messages that were deleted with their commit log file: no commit can follow."""
        with self._lock:
            found = self._deleted_ones(0)
            if found:
                self._put_with_progress(self._resolutions().resolve(found))

    def _deleted_ones(self, done: int) -> dict[int, Resolution]:
        """The open half messages below the queue's first one, and below `done`."""
        done = max(done, self._store.queue_range(HALF_TOPIC, 0)[0])
        return dict.fromkeys(self._resolutions().open_ones(done), Resolution.DISCARD)

    def note_offsets(self) -> None:
        """Note RayMQ's progress, so that RocketMQ continues there if it opens this store."""
        _, op_end = self._store.queue_range(OP_TOPIC, 0)
        for topic, offset in ((HALF_TOPIC, self._resolutions().min_open), (OP_TOPIC, op_end)):
            if offset > self._noted(topic):
                self._store.commit_offsets(GROUP, topic, {0: offset})

    def _noted(self, topic: str) -> int:
        """The offset up to which RocketMQ, or the last call of `note_offsets`, is done with a topic."""
        return self._store.state.offsets.get((GROUP, topic), {}).get(0, 0)

    def _progress_table(self) -> dict[str, Any]:
        return self._store.state.progress.get(SERVICE, {})

    def _resolutions(self) -> Resolutions:
        return Resolutions(self._progress_table())


def _age_ms(half: StoredMessage, now_ms: int, store_now_ms: int) -> int:
    """The age of a half message. The producer's clock, or the shard's at that time, may have been ahead of this one."""
    return max(now_ms - half.born_time_ms, store_now_ms - half.store_time_ms)
