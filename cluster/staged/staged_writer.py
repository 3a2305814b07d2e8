"""Stages the rows of one task attempt, under a producer id of its own. So the rows of a zombie belong to no write."""

from __future__ import annotations

import zlib
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.produce.queue_sequence import BatchReceipt, new_producer_id
from raymq.cluster.produce.send_future import BatchFuture
from raymq.cluster.transport.routes import Routes
from raymq.store.base.checksum import body_crcs
from raymq.store.base.errors import require
from raymq.store.base.format import STAGED_TOPIC
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.services.staged_rows import StagedRange, target_properties

from .write_commit import StagedPart, StagedRows


class _StagedBatch(NamedTuple):
    topic: str
    queue_id: int
    shard: int
    receipt: BatchFuture


class StagedWriter:
    """One attempt. Callers: one thread.

    Args: `routes`: of the cluster.
    """

    def __init__(self, routes: Routes) -> None:
        self._producer_id = new_producer_id()
        # A decision must not name rows that a failover takes back.
        self._sender = BatchSender(routes, producer_id=self._producer_id, acks="quorum")
        self._batches: list[_StagedBatch] = []
        self._fingerprint = np.uint64(0)

    def write(self, topic: str, queue_id: int, batch: pa.RecordBatch) -> None:
        """Stage rows of PUT_SCHEMA for one queue.

        Raises: Rejected for rows that the topic cannot take, also at a later call or `finish`; Unavailable.
        """
        if not batch.num_rows:
            return
        shard = self._sender.topic(topic).shard_of(queue_id)
        with np.errstate(over="ignore"):
            self._fingerprint += fingerprint(topic, batch)
        head = pa.scalar(target_properties(topic, queue_id), pa.binary())
        properties = pc.binary_join_element_wise(
            head, batch.column("properties").fill_null(b""), b""
        )
        columns = [
            batch.column("body"),
            batch.column("tag"),
            properties,
            batch.column("born_time_ms"),
        ]
        staged = pa.record_batch(columns, schema=PUT_SCHEMA)
        future = self._sender.send(STAGED_TOPIC, shard, staged)
        self._batches.append(_StagedBatch(topic, queue_id, shard, future))

    def finish(self) -> StagedRows:
        """Wait until a majority holds every row. Returns: what a commit needs of them.

        Raises: the error of the first batch that failed. The attempt has failed then.
        """
        ranges: dict[tuple[str, int, int], list[StagedRange]] = {}
        times_ms = []
        for batch in self._batches:
            receipt = batch.receipt.result()
            require(
                receipt.last_offset >= receipt.first_offset >= 0,
                "new rows have offsets",
                receipt=receipt,
            )
            times_ms.append(receipt.store_time_ms)
            _extend(ranges.setdefault(batch[:3], []), self._range_of(receipt))
        parts = tuple(StagedPart(*where, tuple(some)) for where, some in sorted(ranges.items()))
        return StagedRows(parts, int(self._fingerprint), min(times_ms, default=0))

    def _range_of(self, receipt: BatchReceipt) -> StagedRange:
        return StagedRange(
            self._producer_id, receipt.first_offset, receipt.last_offset, receipt.count
        )

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
    """The sum of hashes of the rows of PUT_SCHEMA: of topic, body, tag and properties, and of no order."""
    body = _crcs(batch.column("body"))
    tag = _crcs(batch.column("tag").cast(pa.binary()))
    properties = _crcs(batch.column("properties"))
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
