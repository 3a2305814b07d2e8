"""Appends records of the store itself: state records, snapshots and the messages of its services.

A call appends all of its records as one unit, or raises and appends none.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymq.store.base.clock import StoreTimeClock
from raymq.store.base.format import QUEUE_UNIT, SCHEDULE_TOPIC, with_tags_code
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.reput_service import ReputService, UndispatchedUnit
from raymq.store.records.keys import keyed_rows
from raymq.store.records.properties import TAGS
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.rows import tags_code_of
from raymq.store.state import shard_state
from raymq.store.state.shard_state import ShardState

from .inner_message import EncodedInner, InnerMessage
from .put_errors import check_record_size
from .put_lock import PutLock
from .small_unit import CheckedPut, EncodedRows


class ServiceRecords:
    """Appends records at the end of the log. Callers: with the put lock."""

    def __init__(
        self,
        log: CommitLog,
        state: ShardState,
        *,
        put_lock: PutLock,
        store_times: StoreTimeClock,
        reput: ReputService,
    ) -> None:
        self._log = log
        self._config = log.config
        self._clock = log.clock
        self._store_times = store_times
        self._state = state
        self._reput = reput
        self._lock = put_lock

    def next_store_time_ms(self) -> int:
        """The store time of the next records."""
        return self._store_times.now_ms(self._state.store_time_ms, self._lock.begin_ms)

    def encode_state_record(self, kind: str, body: bytes) -> EncodedInner:
        """One record of the internal topic, ready to be appended."""
        now_ms = self._clock.now_ms()
        message = InnerMessage(
            shard_state.INTERNAL_TOPIC,
            shard_state.INTERNAL_QUEUE,
            body,
            {TAGS: kind},
            born_time_ms=now_ms,
        )
        encoded = EncodedInner(message, store_host=self._log.store_host)
        check_record_size(self._config, 0, encoded.size)
        return encoded

    def append(self, records: list[EncodedInner], store_time_ms: int) -> list[AppendedRows]:
        """Append records as one unit. The current file has room for them."""
        appended = self._append(records, store_time_ms)
        self._note(records, appended)
        return appended

    def append_with_rows(
        self, records: list[EncodedInner], puts: Sequence[CheckedPut], store_time_ms: int
    ) -> list[AppendedRows]:
        """`append`, with the rows of puts after the first record. Returns: one `AppendedRows` per record.

        Rows get the next offsets of their queues, without a look at sequences: what comes with them has to say whether
        they are a repetition.
        """
        appended = self._append([*records[:1], *puts, *records[1:]], store_time_ms)
        first, rows, rest = appended[:1], appended[1 : len(puts) + 1], appended[len(puts) + 1 :]
        # In the order of the log.
        self._note(records[:1], first)
        for put, placed in zip(puts, rows, strict=True):
            # What follows in the unit is dispatched by itself.
            own = placed._replace(end_offset=placed.physical_offset + size_of(put))
            self.note_rows(put.encoded, put.request, 0, put.encoded.count, own)
        self._note(records[1:], rest)
        return first + rest

    def _append(
        self, pieces: Sequence[EncodedInner | CheckedPut], store_time_ms: int
    ) -> list[AppendedRows]:
        """Append records, and rows, as one unit. The caller accounts for them."""
        log, next_offsets = self._log, self._state.next_offsets
        at = log.end
        end = at + sum(map(size_of, pieces))
        appended: list[AppendedRows] = []
        parts: list[bytes | bytearray] = []
        offsets: dict[tuple[str, int], int] = {}

        for each in pieces:
            key = _key_of(each)
            offset = offsets.get(key, next_offsets.get(key, 0))
            count = 1
            if isinstance(each, CheckedPut):
                count = each.encoded.count
                parts.append(
                    each.encoded.records(
                        *(0, count),
                        queue_offset=offset,
                        physical_offset=at,
                        store_time_ms=store_time_ms,
                    )
                )
                offsets[key] = offset + count
            else:
                parts.append(
                    each.record(
                        queue_offset=offset, physical_offset=at, store_time_ms=store_time_ms
                    )
                )
                if each.queued:
                    offsets[key] = offset + 1
            last = offset + count - 1
            appended.append(AppendedRows(offset, count, 0, store_time_ms, at, end, last))
            at += size_of(each)

        log.append(b"".join(parts), log.epoch)
        return appended

    def note_rows(
        self, encoded: EncodedRows, request: PutRequest, row: int, stop: int, appended: AppendedRows
    ) -> None:
        """Account for rows [row, stop) of a put, which are in the log now."""
        offset, start, end = appended.first_offset, appended.physical_offset, appended.end_offset
        store_time_ms = appended.store_time_ms
        units = encoded.queue_units(row, stop, start)
        if request.topic == SCHEDULE_TOPIC:
            # Their guard has seen that all rows are of the queue's level.
            due_ms = store_time_ms + self._config.delay_levels_ms[request.queue_id]
            units = with_tags_code(units, due_ms)
        self._reput.remember(
            UndispatchedUnit(
                start=start,
                end=end,
                topic=request.topic,
                queue_id=request.queue_id,
                first_offset=offset,
                queue_units=units,
                store_time_ms=store_time_ms,
                keyed=None if encoded.keyed is None else encoded.keyed.rows(row, stop),
            )
        )

        self._state.apply_rows(
            request.topic,
            request.queue_id,
            offset,
            stop - row,
            end,
            store_time_ms,
            producer_id=request.producer_id,
            epoch=request.epoch,
            first_sequence=request.first_sequence + row,
        )

    def _note(self, stored: list[EncodedInner], appended: list[AppendedRows]) -> None:
        """Account for messages that are in the log now: neighbours of one queue together."""
        keys = [(each.topic, each.queue_id, each.queued) for each in stored]
        first = 0
        for row in range(1, len(keys) + 1):
            if row < len(keys) and keys[row] == keys[first]:
                continue
            if stored[first].queued:
                self._note_run(stored[first:row], appended[first:row])
            first = row

    def _note_run(self, stored: list[EncodedInner], appended: list[AppendedRows]) -> None:
        first, last = appended[0], appended[-1]
        topic, queue_id = stored[0].topic, stored[0].queue_id
        levels = self._config.delay_levels_ms
        codes = [
            tags_code_of(topic, each.properties, first.store_time_ms, levels) for each in stored
        ]

        positions = [each.physical_offset for each in appended]
        sizes = [each.size for each in stored]
        self._reput.remember(
            UndispatchedUnit(
                start=first.physical_offset,
                end=last.physical_offset + stored[-1].size,
                topic=topic,
                queue_id=queue_id,
                first_offset=first.first_offset,
                queue_units=b"".join(map(QUEUE_UNIT.pack, positions, sizes, codes)),
                store_time_ms=first.store_time_ms,
                keyed=keyed_rows([each.properties for each in stored]),
            )
        )

        self._state.apply_rows(
            topic, queue_id, first.first_offset, len(stored), first.end_offset, first.store_time_ms
        )


def size_of(piece: EncodedInner | CheckedPut) -> int:
    """Bytes of the records of a piece of an append unit."""
    return piece.encoded.bytes_from(0) if isinstance(piece, CheckedPut) else piece.size


def _key_of(piece: EncodedInner | CheckedPut) -> tuple[str, int]:
    target = piece.request if isinstance(piece, CheckedPut) else piece
    return target.topic, target.queue_id
