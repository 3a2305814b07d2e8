"""The messages of one queue that share a batch, while more are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from raymq.store.errors import Rejected
from raymq.store.promise import Acks
from raymq.store.record import BATCH_BYTES_MAX, PUT_SCHEMA, Row
from raymq.store.records.binary_columns import binary_array

from .batch_future import BatchFuture


class OpenBatch:
    """A batch that takes messages. It is closed when it is full, lingered long enough, or waited for."""

    __slots__ = (
        "acks",
        "begun",
        "bodies",
        "born",
        "closed",
        "due",
        "flush_now",
        "future",
        "properties",
        "request_flush",
        "size",
        "tags",
        "where",
    )

    def __init__(
        self,
        where: tuple[str, int],
        acks: Acks,
        begun: float,
        due: float,
        flush_now: Callable[[OpenBatch], None],
        request_flush: Callable[[OpenBatch], None],
    ) -> None:
        #: topic and queue
        self.where = where
        self.acks: Acks = acks
        #: when its first message came, seconds of the monotonic clock
        self.begun = begun
        #: when its linger time is over, on the same clock; 0: a flush was requested
        self.due = due
        #: closes and writes the batch on the calling thread
        self.flush_now = flush_now
        #: the same on the linger thread, for callers that must not block
        self.request_flush = request_flush
        self.bodies: list[bytes] = []
        self.tags: list[str | None] = []
        self.properties: list[bytes | None] = []
        self.born: list[int] = []
        #: bytes of the byte limit
        self.size = 0
        #: no message is added any more
        self.closed = False
        self.future = BatchFuture()
        self.future.open_batch = self

    def close(self, now: float) -> None:
        """Take no more messages; `encode` comes next."""
        future = self.future
        self.closed = True
        future.rows, future.size = len(self.bodies), self.size
        future.begun, future.closed = self.begun, now

    def encode(self) -> pa.RecordBatch | Row:
        """The messages as columns; they are dropped here. A single small message is a Row.

        Raises: Rejected for a value that its column cannot hold.
        """
        bodies, tags, properties, born = self.bodies, self.tags, self.properties, self.born
        self.bodies, self.tags, self.properties, self.born = [], [], [], []
        # Its futures need the callbacks no more, nor what they keep alive.
        self.future.open_batch = None
        if len(bodies) == 1 and self.size <= BATCH_BYTES_MAX:
            return Row(bodies[0], tags[0], properties[0], born[0])
        _, tag, encoded, time = PUT_SCHEMA.types
        try:
            columns = [
                binary_array(bodies),
                _column(tags, tag),
                _column(properties, encoded),
                _column(born, time),
            ]
        except (TypeError, ValueError) as error:
            # Only this batch fails: the thread that closes it may serve others.
            raise Rejected(
                f"a message cannot be sent as it is: {error}", field="batch", limit="bytes and text"
            ) from error
        return pa.RecordBatch.from_arrays(columns, schema=PUT_SCHEMA)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column that is often the same in all rows, which is faster to build."""
    first, rows = values[0], len(values)
    if first != values[-1] or values.count(first) != rows:
        return pa.array(values, kind)
    return pa.nulls(rows, kind) if first is None else pa.repeat(pa.scalar(first, kind), rows)
