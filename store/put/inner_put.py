"""Puts of the store's own services: messages that it moves, with their progress, and records of the shard's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from raymq.store.base.errors import Rejected, require
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import (
    EPOCH,
    PRODUCER,
    PROGRESS,
    ShardState,
    epoch_body,
    fenced_error,
    producer_body,
)

from .inner_message import (
    EncodedInner,
    InnerMessage,
    ProgressRecord,
    ServiceProgress,
)
from .put_lock import PutLock
from .service_records import ServiceRecords, size_of
from .small_unit import CheckedPut
from .snapshot_writer import SnapshotWriter
from .stats import StoreStats


class RecordGroup(NamedTuple):
    """Records of the internal topic, and messages that belong to them: the log gets them together, or not at all."""

    #: kind and body of each
    records: Sequence[tuple[str, bytes]]
    #: they come before the records. Encoded ones are not used again
    messages: Sequence[InnerMessage | EncodedInner] = ()
    #: rows, which come before both. None of them is recognised as a repetition
    puts: Sequence[CheckedPut] = ()
    #: what the log notes of the group, for its store time, in as many bytes for each time; None: nothing
    note: Callable[[int], Mapping[str, object]] | None = None


class InnerPut:
    """Appends inner messages and state records. Callers: any thread; the put lock orders them."""

    def __init__(
        self,
        log: CommitLog,
        state: ShardState,
        *,
        put_lock: PutLock,
        stats: StoreStats,
        records: ServiceRecords,
        snapshots: SnapshotWriter,
        check_open: Callable[[], None],
        check_leads: Callable[[], None],
    ) -> None:
        """Args: `check_open`: raises Unavailable or StorageFull while the store takes no puts. `check_leads`: raises
        Unavailable unless this replica leads.
        """
        self._log = log
        self._config = log.config
        self._clock = log.clock
        self._state = state
        self._lock = put_lock
        self._stats = stats
        self._records = records
        self._snapshots = snapshots
        self._check_open = check_open
        self._check_leads = check_leads
        #: the epoch whose EPOCH record could not be appended yet
        self._unfinished_epoch: int | None = None
        #: the physical offset below which readers see topics and offsets. A leader sets its own rule.
        self.visible_end: Callable[[], int] = lambda: self._log.confirmed

    def put_state_record(self, kind: str, body: bytes) -> AppendedRows:
        """Append one record of the internal topic and apply it to the state. Raises: as `PutPath.append`."""
        with self._lock:
            self._check_leads()
            return self._append_state_record(kind, body)

    def put_decided(self, decide: Callable[[], Sequence[tuple[str, bytes]]]) -> AppendedRows | None:
        """Append records of the internal topic that a decision on the state needs, and apply them.

        Args: `decide`: returns kind and body of each. It is called with the put lock held, so that nothing changes
        between the decision and its records. A crash may leave the first records only.
        Returns: the last one; None: the decision needs no record. Raises: as `PutPath.append`, and what `decide`
        raises.
        """
        with self._lock:
            self._check_leads()
            appended = None
            for kind, body in decide():
                appended = self._append_state_record(kind, body)
            return appended

    def put_groups(
        self, service: str, decide: Callable[[], Iterable[RecordGroup]]
    ) -> AppendedRows | None:
        """Append groups of records that a decision on the state needs, and apply them.

        Args: `service`: whose decision it is. `decide`: as of `put_decided`; a crash may leave the first groups only. A
        generator goes on after each group when that is appended and applied.
        Returns, Raises: as `put_decided`; also Rejected for a group of more than `config.record_bytes_max`, which is
        not stored.
        """
        with self._lock:
            self._check_leads()
            appended = None
            for group in decide():
                appended = self._append_group(service, group)
            return appended

    def _append_group(self, service: str, group: RecordGroup) -> AppendedRows:
        if len(group.records) == 1 and not group.messages and not group.puts and group.note is None:
            return self._append_state_record(*group.records[0])

        if group.records or group.messages or group.puts:
            # A note alone is refused by no full disk.
            self._check_open()
        host, now_ms = self._log.store_host, self._clock.now_ms()
        encoded = [
            each if isinstance(each, EncodedInner) else EncodedInner(each, store_host=host)
            for each in group.messages
        ]
        records = [self._records.encode_state_record(*each) for each in group.records]
        note = group.note or _no_note

        def head_at(store_time_ms: int) -> ProgressRecord:
            progress = ServiceProgress(service, note(store_time_ms))
            return ProgressRecord(progress, now_ms=now_ms, store_host=host)

        size = head_at(self._records.next_store_time_ms()).size
        total = size + sum(map(size_of, group.puts)) + sum(map(size_of, (*encoded, *records)))
        limit = self._config.bundle_bytes_max if group.puts else self._config.record_bytes_max
        self._check_group_size(len(encoded) + _rows_of(group.puts), total, limit)

        appended = self._append_unit(head_at, encoded, total, records, group.puts)
        for (kind, body), each in zip(group.records, appended[len(encoded) :], strict=True):
            self._state.apply_appended(kind, body, each.end_offset, self.visible_end())
        return AppendedRows.up_to(self._log.end)

    def init_producer(self, producer_id: int) -> tuple[int, AppendedRows]:
        """The next epoch of a producer id, and its record.

        The lock is held throughout: the limit may drop entries that puts extend, and no two calls may get the same
        epoch.
        Raises: Rejected if the shard already remembers as many producers as it may; as `PutPath.append`. Nothing was
        stored.
        """
        with self._lock:
            self._check_leads()
            epoch = self._state.next_epoch(producer_id)
            return epoch, self._append_state_record(PRODUCER, producer_body(producer_id, epoch))

    def fence_producer(self, producer_id: int, epoch: int) -> AppendedRows | None:
        """Refuse puts of a producer with an epoch below this one, from now on.

        Returns: the record of the epoch; None: nothing had to be stored.
        Raises: Fenced if the producer has a higher epoch; as `init_producer`. Nothing was stored.
        """
        with self._lock:
            self._check_leads()
            # -1: the shard does not know it.
            known = self._state.next_epoch(producer_id) - 1
            if known > epoch:
                raise fenced_error(producer_id, epoch, known)
            if known == epoch or epoch == 0:
                return None
            return self._append_state_record(PRODUCER, producer_body(producer_id, epoch))

    def begin_epoch(self, epoch: int) -> AppendedRows:
        """Append the EPOCH record of a leader's epoch. It and all later records are of that epoch.

        If the file has no room for it, or does not begin with a whole snapshot, a blank and a snapshot come first. They
        are of that epoch, too: at the same place the leader before may have appended other bytes.
        Raises: Rejected if the log has that epoch already; as `PutPath.append`. The record was not stored then, and the
        call may be repeated.
        """
        with self._lock:
            log, state = self._log, self._state
            if epoch <= log.last_epoch and epoch != self._unfinished_epoch:
                raise Rejected(
                    f"the log has records of epoch {log.last_epoch}; a leader's epoch is higher, not {epoch}",
                    field="epoch",
                    limit=log.last_epoch,
                )

            body = epoch_body(epoch)
            encoded = self._records.encode_state_record(EPOCH, body)
            self._unfinished_epoch = epoch
            before, state.log_epoch, log.epoch = state.log_epoch, epoch, epoch
            try:
                self._snapshots.make_room(encoded.size, with_due=False)
                (appended,) = self._records.append([encoded], self._records.next_store_time_ms())
            except BaseException:
                log.epoch = log.last_epoch
                state.log_epoch = max(before, log.epoch)
                raise
            self._unfinished_epoch = None
            return appended

    def _append_state_record(self, kind: str, body: bytes) -> AppendedRows:
        encoded = self._records.encode_state_record(kind, body)
        self._snapshots.make_room(encoded.size)
        (appended,) = self._records.append([encoded], self._records.next_store_time_ms())
        self._state.apply_appended(kind, body, appended.end_offset, self.visible_end())
        return appended

    def begin_next_file(self) -> AppendedRows:
        """End the file that is written. Returns: the end. Raises: as `PutPath.append`; nothing was stored."""
        with self._lock:
            self._check_open()
            self._check_leads()
            self._snapshots.begin_next_file()
            return AppendedRows.up_to(self._log.end)

    def put(
        self, messages: Sequence[InnerMessage], *, progress: ServiceProgress | None = None
    ) -> list[AppendedRows]:
        """Append messages of the store's own services, in order. Returns: one `AppendedRows` per message.

        With `progress`, the messages and the progress are stored together or not at all, across crashes too. Several
        messages need a progress. They should stay below `config.bundle_bytes_max`, because other puts wait for them.

        Durable: nothing; the flush service syncs.
        Raises: Rejected when the messages are too large (`config.record_bytes_max`); as `PutPath.append`. Nothing was
        stored.
        """
        require(progress is not None or len(messages) == 1, "a bundle has a progress")
        return self._append(messages, progress, self._config.record_bytes_max)

    def put_progress(self, progress: ServiceProgress) -> AppendedRows:
        """Append a progress alone. Like other state records it is not refused by a full disk.

        Raises: as `put`. Nothing was stored.
        """
        head = ProgressRecord(
            progress, now_ms=self._clock.now_ms(), store_host=self._log.store_host
        )
        with self._lock:
            self._check_leads()
            self._append_unit(lambda _: head, [], head.size)
            return AppendedRows.up_to(self._log.end)

    def put_unit(
        self, messages: Sequence[InnerMessage], *, record_bytes_max: int
    ) -> list[AppendedRows]:
        """Append messages that follow each other in one file. Returns: one `AppendedRows` per message.

        A crash may leave the first ones only. Durable, Raises: as `put`; also Rejected for a record of more
        than `record_bytes_max` bytes.
        """
        config = self._config
        limit = config.record_bytes_max if len(messages) == 1 else config.bundle_bytes_max
        return self._append(messages, None, limit, record_bytes_max)

    def _append(
        self,
        messages: Sequence[InnerMessage],
        progress: ServiceProgress | None,
        limit: int,
        record_bytes_max: int | None = None,
    ) -> list[AppendedRows]:
        """Append messages of the store's services as one unit. Returns: one `AppendedRows` per message.

        Args: `limit`: most bytes of all records. Raises: Rejected beyond a limit; as `PutPath.append`. Nothing was
        stored then.
        """
        self._check_open()
        host = self._log.store_host
        encoded = [EncodedInner(message, store_host=host) for message in messages]
        head = None
        if progress is not None:
            head = ProgressRecord(progress, now_ms=self._clock.now_ms(), store_host=host)

        largest = max((each.size for each in encoded), default=0)
        if record_bytes_max is not None and largest > record_bytes_max:
            raise Rejected(
                f"a record has {largest} bytes, the limit is {record_bytes_max}: less body or fewer properties",
                field="record",
                limit=record_bytes_max,
            )

        total = sum(each.size for each in encoded) + (0 if head is None else head.size)
        self._check_group_size(len(messages), total, limit)
        with self._lock:
            self._check_leads()
            return self._append_unit(None if head is None else lambda _: head, encoded, total)

    @staticmethod
    def _check_group_size(messages: int, total: int, limit: int) -> None:
        """Raises: Rejected for records that are too large together."""
        if total > limit:
            raise Rejected(
                f"{messages} messages make {total} bytes of records; those appended together may have {limit}",
                field="record",
                limit=limit,
            )

    def _append_unit(
        self,
        head_at: Callable[[int], ProgressRecord] | None,
        encoded: list[EncodedInner],
        total: int,
        state_records: Sequence[EncodedInner] = (),
        puts: Sequence[CheckedPut] = (),
    ) -> list[AppendedRows]:
        """Append records of `total` bytes, after the progress that they belong to. Needs the put lock.

        Args: `head_at`: the record of that progress for a store time, which does not change its size. `state_records`:
        come after the messages. The caller applies them. `puts`: come before the messages.
        Returns: one `AppendedRows` for each of `encoded` and `state_records`.
        """
        self._snapshots.make_room(total)
        store_time_ms = self._records.next_store_time_ms()
        records = [*encoded, *state_records]
        body = b""
        if head_at is not None:
            first, body = head_at(store_time_ms).ending_at(self._log.end + total)
            records.insert(0, first)

        if puts:
            appended = self._records.append_with_rows(records, puts, store_time_ms)
        else:
            appended = self._records.append(records, store_time_ms)
        if head_at is not None:
            self._state.apply_state_record(PROGRESS, body)
            del appended[0]

        held_ms = self._clock.monotonic_ms() - self._lock.begin_ms
        for put in puts:
            self._stats.note_put(put.request.topic, put.encoded.count, size_of(put), held_ms)
        for each in encoded:
            self._stats.note_put(each.topic, 1, each.size, held_ms)
        return appended


def _no_note(store_time_ms: int) -> dict[str, object]:
    return {}


def _rows_of(puts: Sequence[CheckedPut]) -> int:
    return sum(put.encoded.count for put in puts)
