"""Stages the rows of one task attempt, under a producer id of its own. So the rows of a zombie belong to no write."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.client.messages.queue_split import PIECE_BYTES
from raymq.client.messages.row_numbers import renumbered
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.queue_sequence import BatchReceipt, new_producer_id
from raymq.client.produce.send_future import BatchFuture
from raymq.client.transport.routes import Routes
from raymq.store.base.checksum import body_crcs
from raymq.store.base.errors import Rejected, require
from raymq.store.base.format import STAGED_TOPIC, TIMER_TOPIC
from raymq.store.records.record import PUT_SCHEMA, batch_bytes
from raymq.store.records.staged_range import StagedRange, target_properties

from .write_commit import StagedPart, StagedRows

#: rows that an attempt collects before it sends them
BUFFER_BYTES = 16 << 20
#: rows of several queues in one batch: the log appends so many in one piece, without rows of others between them
BATCH_BYTES = 1 << 20


#: how the properties of a row with a delivery time end
_REAL_QUEUE = r"REAL_QID\x01[0-9]+\x02$"


class _Rows(NamedTuple):
    """Rows for one queue, in a batch."""

    topic: str
    queue_id: int
    rows: int


class _StagedBatch(NamedTuple):
    """A batch on its way, and whose rows it has, in their order."""

    shard: int
    rows: list[_Rows]
    receipt: BatchFuture


class _Buffer:
    """Rows for one queue that are not sent yet."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> int:
        """Keep a batch. Returns: its bytes."""
        self.batches.append(batch)
        return batch_bytes(batch)

    def joined(self) -> Iterator[pa.RecordBatch]:
        """The rows in few batches, of up to `PIECE_BYTES` or one that was added."""
        batches: list[pa.RecordBatch] = []
        size = 0
        for batch in self.batches:
            more = batch_bytes(batch)
            if batches and size + more > PIECE_BYTES:
                yield _as_one(batches)
                batches, size = [], 0
            batches.append(batch)
            size += more
        if batches:
            yield _as_one(batches)


class StagedWriter:
    """One attempt. Callers: one thread.

    Rows are collected per queue, so that a decision names few ranges, and a publication reads long ones. The rows of
    queues that have few go in one batch to the staged topic of their shard.

    Args: `routes`: of the cluster.
    """

    def __init__(self, routes: Routes) -> None:
        self._producer_id = new_producer_id()
        # A decision must not name rows that a failover takes back.
        self._sender = BatchSender(routes, producer_id=self._producer_id, acks="quorum")
        #: (shard, topic, queue id) -> its rows
        self._buffers: defaultdict[tuple[int, str, int], _Buffer] = defaultdict(_Buffer)
        self._buffered_bytes = 0
        self._sent: list[_StagedBatch] = []
        self._fingerprint = np.uint64(0)

    def write(self, topic: str, queue_id: int, batch: pa.RecordBatch) -> None:
        """Stage rows of PUT_SCHEMA for one queue.

        Args: `topic`, `queue_id`: for rows with a delivery time TIMER_TOPIC and the shard of their queue, as `by_queue`
        yields them.
        Raises: Rejected for rows that the topic cannot take, also at a later call or `finish`; Unavailable.
        """
        if not batch.num_rows:
            return
        if topic == TIMER_TOPIC:
            shard, queue_id = queue_id, 0
        else:
            shard = self._sender.topic(topic).shard_of(queue_id)
        self._buffered_bytes += self._buffers[shard, topic, queue_id].add(batch)
        if self._buffered_bytes >= BUFFER_BYTES:
            self._send_buffers()

    def _send_buffers(self) -> None:
        """Send what is collected: rows of one queue are neighbours, as far as a batch goes."""
        buffers, self._buffers, self._buffered_bytes = self._buffers, defaultdict(_Buffer), 0
        open_batch: tuple[list[_Rows], list[pa.RecordBatch]] = ([], [])
        open_shard, size = -1, 0
        for (shard, topic, queue_id), buffer in sorted(buffers.items()):
            for batch in buffer.joined():
                # Two pieces of one queue have more than PIECE_BYTES, so they are in different batches. In one batch
                # their ranges would overlap if the log appended it in several parts, and could not be published.
                is_full = size + batch_bytes(batch) > BATCH_BYTES
                if open_batch[0] and (shard != open_shard or is_full):
                    self._send(open_shard, *open_batch)
                    open_batch, size = ([], []), 0

                with np.errstate(over="ignore"):
                    self._fingerprint += fingerprint(topic, batch)
                open_batch[0].append(_Rows(topic, queue_id, batch.num_rows))
                open_batch[1].append(_with_target(topic, queue_id, batch))
                open_shard, size = shard, size + batch_bytes(batch)
        if open_batch[0]:
            self._send(open_shard, *open_batch)

    def _send(self, shard: int, rows: list[_Rows], batches: list[pa.RecordBatch]) -> None:
        receipt = self._sender.send(STAGED_TOPIC, shard, _as_one(batches))
        self._sent.append(_StagedBatch(shard, rows, receipt))

    def finish(self) -> StagedRows:
        """Wait until a majority holds every row. Returns: what a commit needs of them.

        Raises: the error of the first batch that failed. The attempt has failed then.
        """
        self._send_buffers()
        ranges: dict[tuple[str, int, int], list[StagedRange]] = {}
        times_ms = []
        for batch in self._sent:
            receipt = _stored(batch)
            times_ms.append(receipt.store_time_ms)
            for rows, staged in zip(batch.rows, self._ranges_of(batch, receipt), strict=True):
                where = (rows.topic, rows.queue_id, batch.shard)
                _extend(ranges.setdefault(where, []), staged)
        parts = tuple(StagedPart(*where, tuple(some)) for where, some in sorted(ranges.items()))
        return StagedRows(parts, int(self._fingerprint), min(times_ms, default=0))

    def _ranges_of(self, batch: _StagedBatch, receipt: BatchReceipt) -> Iterator[StagedRange]:
        """Where the rows of each queue of a batch are in the staged topic."""
        require(
            receipt.last_offset >= receipt.first_offset >= 0,
            "new rows have offsets",
            receipt=receipt,
        )
        first, last = receipt.first_offset, receipt.last_offset
        is_whole = last - first == receipt.count - 1
        for rows in batch.rows:
            if is_whole:
                last = first + rows.rows - 1
            # Otherwise rows of others are somewhere between these. A publication finds the own ones.
            yield StagedRange(self._producer_id, first, last, rows.rows)
            if is_whole:
                first = last + 1

    def close(self) -> None:
        """Close at once. What was staged and is not committed expires."""
        self._sender.close()

    def __enter__(self) -> StagedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _stored(batch: _StagedBatch) -> BatchReceipt:
    """The receipt of a batch. Raises: as the shard; a row that it refuses counts in those of its queue."""
    try:
        return batch.receipt.result()
    except Rejected as error:
        row = error.fields.get("row")
        if row is None:
            raise
        for rows in batch.rows:
            if row < rows.rows:
                place = f"queue {rows.queue_id} of {rows.topic}"
                if rows.topic == TIMER_TOPIC:
                    place = "later"
                raise renumbered(error, row, f"of a batch for {place}") from None
            row -= rows.rows
        raise


def _as_one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


def _with_target(topic: str, queue_id: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows as the staged topic has them: their properties begin with their topic and queue."""
    head = pa.scalar(target_properties(topic, queue_id), pa.binary())
    properties = pc.binary_join_element_wise(head, batch.column("properties").fill_null(b""), b"")
    columns = [batch.column("body"), batch.column("tag"), properties, batch.column("born_time_ms")]
    return pa.record_batch(columns, schema=PUT_SCHEMA)


def _extend(ranges: list[StagedRange], new: StagedRange) -> None:
    """Add a range: rows that follow each other without a gap become one."""
    if ranges:
        last = ranges[-1]
        whole = StagedRange(
            new.producer_id, last.first_offset, new.last_offset, last.rows + new.rows
        )
        if whole.last_offset - whole.first_offset == whole.rows - 1:
            ranges[-1] = whole
            return
    ranges.append(new)


def fingerprint(topic: str, batch: pa.RecordBatch) -> np.uint64:
    """The sum of hashes of the rows of PUT_SCHEMA: of topic, body, tag and properties, and of no order and no queue."""
    body = _crcs(batch.column("body"))
    tag = _crcs(batch.column("tag").cast(pa.binary()))
    texts = batch.column("properties")
    if topic == TIMER_TOPIC:
        texts = pc.replace_substring_regex(texts, _REAL_QUEUE, "")
    properties = _crcs(texts)
    with np.errstate(over="ignore"):
        mixed = _mixed(body + (properties << np.uint64(32)))
        mixed = _mixed(mixed + tag + (np.uint64(zlib.crc32(topic.encode())) << np.uint64(32)))
        return np.uint64(mixed.sum(dtype=np.uint64))


def _crcs(values: pa.Array) -> npt.NDArray[np.uint64]:
    crcs = body_crcs(values.fill_null(b"")).view(np.uint32)
    return crcs.astype(np.uint64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The mixing steps of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
