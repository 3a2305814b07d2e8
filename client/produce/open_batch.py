"""A batch of a producer that takes messages, and its encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from raymq.client.messages.record_head import NO_HEAD, Head
from raymq.store.base.errors import Rejected
from raymq.store.config.promise import Acks
from raymq.store.records.binary_columns import binary_array
from raymq.store.records.record import (
    MORE_SCHEMA,
    PUT_SCHEMA,
    SMALL_BYTES_MAX,
    SMALL_ROWS_MAX,
    SmallBatch,
)
from raymq.store.records.small_batch import put_schema

from .callbacks import Callbacks
from .send_future import BatchFuture
from .shard_sender import ShardSender


class Batcher(Protocol):
    """The batcher of an open batch: it closes and writes the batch."""

    @property
    def callbacks(self) -> Callbacks:
        """Those of its producer."""

    def close_batch(self, batch: OpenBatch) -> ShardSender | None:
        """Encode a batch and queue it at the sender of its shard. Returns: that sender, which must write now."""

    def write_for_caller(self, batch: OpenBatch) -> None:
        """See `Waker.write_for_caller`."""

    def request_write_for_caller(self, batch: OpenBatch) -> None:
        """See `Waker.request_write_for_caller`."""


@dataclass(eq=False, slots=True)
class OpenBatch:
    """A batch that takes messages. It is closed when it is full, lingered long enough, or waited for."""

    #: topic and queue
    queue_key: tuple[str, int]
    acks: Acks
    #: when its first message came, seconds of the monotonic clock
    begun_s: float
    #: when its linger time is over, on the same clock
    due_s: float
    batcher: Batcher
    #: sender of the queue's shard; None: nothing was sent to the shard before
    shard_sender: ShardSender | None
    #: the batch may be sent when the shard has answered all batches up to this number
    send_after_number: int
    bodies: list[bytes] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    properties: list[bytes | None] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    #: what few messages have in the header of their record, by the message's row
    heads: dict[int, Head] = field(default_factory=dict)
    #: bytes of the byte limit
    size: int = 0
    #: the linger thread closes it, however little it has lingered
    flush_requested: bool = False
    #: no message is added any more
    closed: bool = False
    future: BatchFuture = field(default_factory=BatchFuture)

    def __post_init__(self) -> None:
        self.future.open_batch = self

    @property
    def may_be_sent(self) -> bool:
        """Whether nothing is under way that it waits for."""
        return (
            self.shard_sender is None or self.shard_sender.answered_up_to >= self.send_after_number
        )

    @property
    def is_stalled(self) -> bool:
        """Whether it could not be written before others are answered."""
        return self.shard_sender is not None and self.shard_sender.stalled

    @property
    def callbacks(self) -> Callbacks:
        """Those of its producer."""
        return self.batcher.callbacks

    def write_for_caller(self) -> None:
        """Write it on the calling thread, which blocks on its receipt, unless it must wait for others."""
        self.batcher.write_for_caller(self)

    def request_write_for_caller(self) -> None:
        """Have the linger thread do the same, for a caller that must not block."""
        self.batcher.request_write_for_caller(self)

    def close(self, now_s: float) -> None:
        """Take no more messages; `encode` comes next."""
        future = self.future
        self.closed = True
        future.rows, future.size = len(self.bodies), self.size
        future.begun_s, future.closed_s = self.begun_s, now_s

    def encode(self) -> pa.RecordBatch | SmallBatch:
        """The messages as columns. The batch forgets its messages.

        Raises: Rejected for a value that its column cannot hold.
        """
        # The batch's futures must not keep the batcher alive any longer.
        self.future.open_batch = None
        columns = (self.bodies, self.tags, self.properties, self.born)
        more = _more(self.heads, len(self.bodies)) if self.heads else {}
        is_small = len(self.bodies) <= SMALL_ROWS_MAX and self.size <= SMALL_BYTES_MAX
        if is_small and set(map(type, self.bodies)) == {bytes}:
            rest = map(more.get, MORE_SCHEMA.names) if more else ()
            small = SmallBatch(*columns, *rest)
            self.bodies, self.tags, self.properties, self.born = [], [], [], []
            return small
        try:
            return _to_record_batch(*columns, more)
        finally:
            for values in columns:
                values.clear()


def batch_of(
    bodies: list[bytes],
    tags: Sequence[str | None],
    properties: Sequence[bytes | None],
    born: Sequence[int],
    heads: dict[int, Head],
) -> pa.RecordBatch:
    """Messages as columns: the fields of `OpenBatch`. Raises: Rejected for a value that its column cannot hold."""
    more = _more(heads, len(bodies)) if heads else {}
    return _to_record_batch(bodies, tags, properties, born, more)


def _to_record_batch(
    bodies: list[bytes],
    tags: Sequence[str | None],
    properties: Sequence[bytes | None],
    born: Sequence[int],
    more: dict[str, list[object]],
) -> pa.RecordBatch:
    _, tag, encoded, time = PUT_SCHEMA.types
    try:
        columns = [
            binary_array(bodies),
            _column(tags, tag),
            _column(properties, encoded),
            _column(born, time),
            *(_column(values, MORE_SCHEMA.field(name).type) for name, values in more.items()),
        ]
    except (TypeError, ValueError) as error:
        # Only this batch fails: the thread that closes it may serve others.
        raise Rejected(
            f"a message cannot be sent as it is: {error}", field="batch", limit="bytes and text"
        ) from error
    return pa.RecordBatch.from_arrays(columns, schema=put_schema(more))


def _more(heads: dict[int, Head], rows: int) -> dict[str, list[object]]:
    """The columns of MORE_SCHEMA in which a row has another value than the default."""
    found: dict[str, list[object]] = {}
    for at, (name, default) in enumerate(zip(MORE_SCHEMA.names, NO_HEAD, strict=True)):
        given = {row: head[at] for row, head in heads.items() if head[at] != default}
        if given:
            found[name] = [given.get(row, default) for row in range(rows)]
    return found


def _column(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """A column that is often the same in all rows, which is faster to build."""
    first, rows = values[0], len(values)
    if first != values[-1] or values.count(first) != rows:
        return pa.array(values, kind)
    return pa.nulls(rows, kind) if first is None else pa.repeat(pa.scalar(first, kind), rows)
