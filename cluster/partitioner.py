"""Which queue a key belongs to: Kafka's default partitioner, so that both agree.

queue = murmur2(key) & 0x7fffffff % queues. Vectorised over a key column: four bytes of every key at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_M = np.uint32(0x5BD1E995)
_SEED = 0x9747B28C


def murmur2_column(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """murmur2 of every value of a binary column without nulls, uint32[n].

    Source: org.apache.kafka.common.utils.Utils#murmur2.
    """
    count = len(keys)
    offsets = np.frombuffer(keys.buffers()[1], dtype=np.int32)[
        keys.offset : keys.offset + count + 1
    ].astype(np.int64)
    lengths = np.diff(offsets)
    raw = keys.buffers()[2]
    # Padding lets every gather of four bytes stay inside.
    data = np.zeros(int(offsets[-1]) + 4 if count else 4, dtype=np.uint8)
    if raw is not None and count:
        data[: int(offsets[-1])] = np.frombuffer(raw, dtype=np.uint8)[: int(offsets[-1])]
    with np.errstate(over="ignore"):
        h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
        words = lengths // 4
        starts = offsets[:-1]
        for index in range(int(words.max()) if count else 0):
            rows = np.flatnonzero(words > index)
            at = starts[rows] + 4 * index
            k = _word(data, at) * _M
            k ^= k >> np.uint32(24)
            h[rows] = h[rows] * _M ^ k * _M
        tail = lengths % 4
        rest = starts + 4 * words
        for size in (3, 2, 1):
            rows = np.flatnonzero(tail >= size)
            byte = data[rest[rows] + size - 1].astype(np.uint32)
            h[rows] ^= byte << np.uint32(8 * (size - 1))
        rows = np.flatnonzero(tail > 0)
        h[rows] *= _M
        h ^= h >> np.uint32(13)
        h *= _M
        h ^= h >> np.uint32(15)
    return h


def _word(data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    parts = [data[at + i].astype(np.uint32) << np.uint32(8 * i) for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def queues_of(keys: pa.Array, queues: int) -> npt.NDArray[np.int32]:
    """The queue of every key, int32[n]."""
    positive = (murmur2_column(keys) & np.uint32(0x7FFFFFFF)).astype(np.int64)
    return (positive % queues).astype(np.int32)


def queue_of(key: bytes, queues: int) -> int:
    """The queue of one key."""
    return int(queues_of(pa.array([key], pa.binary()), queues)[0])
