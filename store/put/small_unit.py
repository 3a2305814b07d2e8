"""Gathers small batches into one append unit, so that all of them take one write, one chain unit and one mark."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

from raymq.store.records import record
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.state.producer_table import UNKNOWN_OFFSET

EncodedRows = record.EncodedBatch | record.EncodedSmallBatch


class CheckedPut(NamedTuple):
    """A batch that may be appended, as `PutPath.check` returns it."""

    request: PutRequest
    encoded: EncodedRows
    #: queue offsets of the first and the last row, as far as they are duplicates
    originals: tuple[int, int] = (UNKNOWN_OFFSET, UNKNOWN_OFFSET)
    #: see `AppendedRows.wait_store_ok`
    wait_store_ok: bool = True


class StagedBatch(NamedTuple):
    """A batch at its place in a unit."""

    #: its index among the puts of the call
    number: int
    checked: CheckedPut
    #: leading rows that are stored already
    stored_rows: int
    #: offsets of the other rows
    appended: AppendedRows


class SmallUnit:
    """The batches of one append unit, before it is written. Callers: `PutPath`, with the put lock."""

    def __init__(self, start: int, *, bytes_max: int, store_time_ms: int) -> None:
        """Args: `start`: the end of the log."""
        #: physical end of the last record, and the highest that it may be
        self.end = start
        self._end_max = start + bytes_max
        #: store time of all records
        self.store_time_ms = store_time_ms
        self.staged: list[StagedBatch] = []
        #: the records of each batch
        self.parts: list[bytes] = []
        #: next offset of each queue in this unit
        self.next_offsets: dict[tuple[str, int], int] = {}
        #: (producer, topic, queue) of its batches
        self._sequences: set[tuple[int, str, int]] = set()
        #: producer -> the epoch of its batches
        self._epochs: dict[int, int] = {}
        #: it has the first batch of a sequence
        self._begins_sequence = False

    def has_room(self, encoded: EncodedRows) -> TypeGuard[record.EncodedSmallBatch]:
        """Whether the records of a batch fit into the rest of the unit."""
        return (
            isinstance(encoded, record.EncodedSmallBatch)
            and self.end + encoded.size <= self._end_max
        )

    def takes(self, checked: CheckedPut) -> bool:
        """Whether a batch may be added.

        A batch may not follow another batch of its sequence, or of its producer in another epoch. The state admits
        batches, and it has not applied the earlier one yet. The first batch of a sequence is alone, because it may
        make the state forget others.
        """
        if not self.staged:
            return True
        request, encoded = checked.request, checked.encoded
        if not self.has_room(encoded):
            return False
        if request.producer_id is None:
            return not self._begins_sequence
        sequence = (request.producer_id, request.topic, request.queue_id)
        return (
            not self._begins_sequence
            and request.first_sequence > 0
            and not request.may_skip
            and self._epochs.get(request.producer_id, request.epoch) == request.epoch
            and sequence not in self._sequences
        )

    def add(
        self, number: int, checked: CheckedPut, stored_rows: int, offset: int, data: bytes
    ) -> AppendedRows:
        """Add the rows from `stored_rows` on, which begin at queue offset `offset`. Returns: the put's answer."""
        request, count = checked.request, checked.encoded.count
        end = self.end + len(data)
        new = count - stored_rows
        appended = AppendedRows(
            first_offset=offset,
            count=new,
            duplicates=0,
            store_time_ms=self.store_time_ms,
            physical_offset=self.end,
            end_offset=end,
        )
        self.staged.append(StagedBatch(number, checked, stored_rows, appended))
        self.parts.append(data)

        self.end = end
        self.next_offsets[request.topic, request.queue_id] = offset + new
        if request.producer_id is not None:
            self._sequences.add((request.producer_id, request.topic, request.queue_id))
            self._epochs[request.producer_id] = request.epoch
            self._begins_sequence = not request.first_sequence or request.may_skip
        return appended._replace(count=count, duplicates=stored_rows, last_offset=offset + new - 1)
