"""Appends records of the store itself: state records, snapshots and the messages of its services.

A call appends all of its records as one unit, or raises and appends none.
"""

from __future__ import annotations

from raymq.store.base.clock import StoreTimeClock
from raymq.store.base.format import QUEUE_UNIT
from raymq.store.log.commit_log import CommitLog
from raymq.store.queues.reput_service import ReputService, UndispatchedUnit
from raymq.store.records.keys import keyed_rows
from raymq.store.records.properties import TAGS
from raymq.store.records.requests import AppendedRows
from raymq.store.records.rows import tags_code_of
from raymq.store.state import shard_state
from raymq.store.state.shard_state import ShardState

from .inner_message import EncodedInner, InnerMessage
from .put_errors import check_record_size
from .put_lock import PutLock


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
        log, next_offsets = self._log, self._state.next_offsets
        at = log.end
        end = at + sum(each.size for each in records)

        appended, parts = [], []
        offsets: dict[tuple[str, int], int] = {}
        for each in records:
            key = (each.topic, each.queue_id)
            offset = offsets.get(key, next_offsets.get(key, 0))
            parts.append(
                each.record(queue_offset=offset, physical_offset=at, store_time_ms=store_time_ms)
            )
            if each.queued:
                offsets[key] = offset + 1
            appended.append(
                AppendedRows(
                    first_offset=offset,
                    count=1,
                    duplicates=0,
                    store_time_ms=store_time_ms,
                    physical_offset=at,
                    end_offset=end,
                    last_offset=offset,
                )
            )
            at += each.size

        log.append(b"".join(parts), log.epoch)
        self._note(records, appended)
        return appended

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
