"""The messages of a benchmark: made, and read back, as columns. Every byte can be checked.

A body is a header and a slice of one fixed block of random bytes, which the header names. Sequences
count the rows of one worker in one queue from 0 on, without gaps. Does not import Ray.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.client.messages.keys import key_properties
from raymq.client.messages.partitioner import queues_of
from raymq.store.base.arrays import Bytes, Int64s
from raymq.store.base.errors import require
from raymq.store.records.binary_columns import value_bytes, value_offsets
from raymq.store.records.record import PUT_SCHEMA

from .plan import BODY_BYTES_MAX, BODY_BYTES_MIN, BenchPlan, Keys, Rng

#: little-endian. `due_us` is the wall clock at which the message should have been sent
HEADER = np.dtype(
    [
        ("run", "<i8"),
        ("worker", "<i4"),
        ("queue_index", "<i4"),
        ("sequence", "<i8"),
        ("due_us", "<i8"),
        ("size", "<i8"),
        #: the position in the block of the bytes after the header
        ("payload", "<i8"),
    ]
)
require(HEADER.itemsize == BODY_BYTES_MIN, "the header's size", size=HEADER.itemsize)

#: bodies begin in the first part. The block is longer by the longest body
_STARTS = 1 << 20
#: bytes compared at a time: the comparison takes ten times as much memory
_CHECK_BYTES = 4 << 20


@lru_cache(maxsize=1)
def payload_block() -> Bytes:
    """The random bytes of all bodies: the same in every process, and nothing that compresses."""
    return np.random.default_rng(20_170_925).integers(
        0, 256, _STARTS + BODY_BYTES_MAX, dtype=np.uint8
    )


class RowMaker:
    """Makes the rows of one worker: sizes and keys are drawn, bodies filled, queue by queue."""

    def __init__(self, plan: BenchPlan, worker: int) -> None:
        self._plan = plan
        self._worker = worker
        self._rng: Rng = np.random.default_rng([plan.run, worker])
        self._keys = None if plan.keys is None else KeyTable(plan.keys, plan.queues)
        self._block = payload_block()
        #: queue index -> sequence of the next row
        self.sequences: dict[int, int] = {}
        self._turn = worker

    def make(self, due_us: Int64s) -> list[tuple[int, Int64s, pa.RecordBatch]]:
        """Rows for messages that are due at these times, wall clock.

        Returns: (queue index, its rows' due times, PUT_SCHEMA batch), one per queue. Without keys all rows go
        to one queue, the rows of the next call to the next queue. Keys choose among the queues of one topic.
        """
        plan, turn = self._plan, self._turn
        self._turn += 1
        if self._keys is None:
            queue_index = plan.queue_indexes[turn % len(plan.queue_indexes)]
            return [self._rows(queue_index, due_us, pa.nulls(len(due_us), pa.binary()))]
        first_index = turn % plan.topics * plan.queues
        queues, properties = self._keys.draw(self._rng, len(due_us))
        made = []
        for queue in np.unique(queues).tolist():
            rows = np.flatnonzero(queues == queue)
            made.append(self._rows(first_index + queue, due_us[rows], properties.take(rows)))
        return made

    def _rows(
        self, queue_index: int, due_us: Int64s, properties: pa.Array
    ) -> tuple[int, Int64s, pa.RecordBatch]:
        count = len(due_us)
        sizes = self._plan.size.draw(self._rng, count)
        first = self.sequences.get(queue_index, 0)
        self.sequences[queue_index] = first + count

        headers = np.zeros(count, dtype=HEADER)
        headers["run"] = self._plan.run
        headers["worker"] = self._worker
        headers["queue_index"] = queue_index
        headers["sequence"] = np.arange(first, first + count)
        headers["due_us"] = due_us
        headers["size"] = sizes
        headers["payload"] = self._rng.integers(0, _STARTS, count)

        bodies, tags = _bodies(headers, self._block), pa.nulls(count, pa.string())
        columns = [bodies, tags, properties, pa.array(due_us // 1000)]
        batch = pa.RecordBatch.from_arrays(columns, schema=PUT_SCHEMA)
        return queue_index, due_us, batch


class KeyTable:
    """All keys once: their properties, their queues and how likely each is."""

    def __init__(self, keys: Keys, queues: int) -> None:
        texts = pa.array([b"key-%d" % number for number in range(keys.count)], pa.binary())
        self._queues = queues_of(texts, queues)
        self._properties = key_properties(texts)
        self._weights = keys.weights()

    def draw(self, rng: Rng, count: int) -> tuple[npt.NDArray[np.int32], pa.Array]:
        """The queue and the encoded properties of `count` rows."""
        chosen = np.searchsorted(self._weights, rng.random(count), side="right")
        # The sum of all probabilities may end a little below 1.
        chosen = np.minimum(chosen, len(self._queues) - 1)
        return self._queues[chosen], self._properties.take(pa.array(chosen))


def _bodies(headers: npt.NDArray[np.void], block: Bytes) -> pa.Array:
    """The body column that the headers describe."""
    sizes = headers["size"]
    offsets = np.zeros(len(headers) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])

    if len(headers) and (sizes == sizes[0]).all():
        # One view per start and one copy for all: much faster than the general case below.
        windows = np.lib.stride_tricks.sliding_window_view(block, int(sizes[0]))
        data = windows[headers["payload"]].reshape(-1)
    else:
        at = np.repeat(headers["payload"] - offsets[:-1], sizes) + np.arange(offsets[-1])
        data = block[at]

    header_positions = offsets[:-1, None] + np.arange(HEADER.itemsize)
    data[header_positions] = headers.view(np.uint8).reshape(len(headers), HEADER.itemsize)

    return pa.Array.from_buffers(
        pa.binary(), len(headers), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def body_bytes(bodies: pa.Array) -> int:
    """Bytes of a body column."""
    offsets = value_offsets(bodies)
    return int(offsets[-1] - offsets[0])


def read_headers(bodies: pa.Array, run: int) -> tuple[npt.NDArray[np.void], Int64s]:
    """The headers of the rows that belong to a run, and which rows these are.

    Bodies that are too short, or whose header has another size, belong to none: verification misses them.
    """
    offsets = value_offsets(bodies).astype(np.int64)
    sizes = np.diff(offsets)
    rows = np.flatnonzero(sizes >= HEADER.itemsize)
    header_positions = offsets[rows, None] + np.arange(HEADER.itemsize)
    headers = np.ascontiguousarray(value_bytes(bodies)[header_positions]).view(HEADER).reshape(-1)
    own = (headers["run"] == run) & (headers["size"] == sizes[rows])
    return headers[own], rows[own]


def damaged_rows(bodies: pa.Array, headers: npt.NDArray[np.void], rows: Int64s) -> int:
    """How many of the rows have another payload than their header says."""
    block, damaged, start = payload_block(), 0, 0
    ends = np.cumsum(headers["size"])
    inside = (headers["payload"] >= 0) & (headers["payload"] < _STARTS)
    damaged += int((~inside).sum())
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _CHECK_BYTES, side="right")))
        part = np.flatnonzero(inside[start:stop]) + start
        got = bodies.take(pa.array(rows[part]))
        want = _bodies(headers[part], block)
        if not got.equals(want):
            damaged += int(pc.sum(pc.not_equal(got, want)).as_py())
        start = stop
    return damaged
