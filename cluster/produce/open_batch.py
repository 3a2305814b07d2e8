"""The messages of one queue that share a batch, while more are added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.store.errors import Rejected
from raymq.store.promise import Acks
from raymq.store.record import BATCH_BYTES_MAX, PUT_SCHEMA, Row
from raymq.store.records.binary_columns import binary_array

from .send_future import BatchFuture

if TYPE_CHECKING:
    from .message_batcher import MessageBatcher


@dataclass(eq=False, slots=True)
class OpenBatch:
    """A batch that takes messages. It is closed when it is full, lingered long enough, or waited for."""

    #: topic and queue
    where: tuple[str, int]
    acks: Acks
    #: when its first message came, seconds of the monotonic clock
    begun: float
    #: when its linger time is over, on the same clock; 0: a flush was requested
    due: float
    batcher: MessageBatcher
    bodies: list[bytes] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    properties: list[bytes | None] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    #: bytes of the byte limit
    size: int = 0
    #: no message is added any more
    closed: bool = False
    future: BatchFuture = field(default_factory=BatchFuture)

    def __post_init__(self) -> None:
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
        # Its futures need the batcher no more, nor what it keeps alive.
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
