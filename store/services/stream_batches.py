"""Batches of a stream share their producers: a shard remembers a few for each query, and not some for each batch.

A staged write alone has a producer for its decision, and one for its rows in each queue. A shard remembers a million of
them for a week, and a query with a batch a second would fill that in days. So 256 batches that follow each other have
one producer each:

- of their decisions. The sequence of a decision is the batch's place among the 256;
- of their rows in a queue. The sequence of a row is that place, and the row's place in the batch.

Sequences between two batches, and those of a batch that its program passed over, never come.

A batch is decided after every row of the last one before it, among its 256, is published. So a queue that has rows of a
later batch has all of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raymq.store.records.producer_stamp import SEQUENCE_MAX

from .producer_ids import hashed

#: bits of a sequence: the batch among those of its producer, and the row of the batch
_BATCH_BITS = 8
_ROW_BITS = SEQUENCE_MAX.bit_length() - _BATCH_BITS
#: a batch with more rows for one queue is a write with producers of its own
ROWS_MAX = 1 << _ROW_BITS
#: batches of one producer
BATCHES = 1 << _BATCH_BITS


class StreamBatch(NamedTuple):
    """A batch of a query."""

    #: the query's id, or the name of its sink
    query: str
    number: int

    @classmethod
    def of(cls, decision: Mapping[str, Any]) -> StreamBatch | None:
        """The batch that a decision is about; None for a write with producers of its own."""
        found = decision.get("batch")
        return None if found is None else cls(str(found[0]), int(found[1]))

    @property
    def decisions_producer_id(self) -> int:
        """The producer id of the decision."""
        return hashed(f"{self._group}/decisions")

    @property
    def rows_producer_id(self) -> int:
        """The producer id of the published rows."""
        return hashed(f"{self._group}/rows-of-batches")

    @property
    def place(self) -> int:
        """The batch's place among those of its producers: the sequence of its decision."""
        return self.number % BATCHES

    @property
    def first_sequence(self) -> int:
        """The sequence of the first row in each queue."""
        return self.place << _ROW_BITS

    def at(self, place: int) -> StreamBatch:
        """Another batch of the same producers."""
        return self._replace(number=self.number - self.place + place)

    @property
    def _group(self) -> str:
        return f"{self.query}/{self.number // BATCHES}"


def has_room(decision: Mapping[str, Any]) -> bool:
    """Whether the sequences of a batch are enough for the rows that a decision names for each queue."""
    parts = decision.get("parts", ())
    return all(sum(each[3] for each in ranges) <= ROWS_MAX for *_, ranges in parts)
