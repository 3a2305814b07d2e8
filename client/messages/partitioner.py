"""Chooses the queue of a key by Kafka's murmur2, so that a key has the same place in both.

Source: org.apache.kafka.common.utils.Utils#murmur2 and BuiltInPartitioner#partitionForKey.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.records.binary_columns import value_bytes, value_lengths, value_offsets

#: hashes of longer keys are not kept
FREQUENT_KEY_BYTES_MAX = 64

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF

UInt32s = npt.NDArray[np.uint32]


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 of a key, as an unsigned 32-bit number."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if length > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def queue_of(key: bytes, queues: int) -> int:
    """The queue of a key in a topic of `queues` queues."""
    hashed = _murmur2_of_frequent(key) if len(key) <= FREQUENT_KEY_BYTES_MAX else murmur2(key)
    return (hashed & _POSITIVE) % queues


#: keys recur, and hashing 8 bytes in Python takes a microsecond
_murmur2_of_frequent = lru_cache(maxsize=4096)(murmur2)


def murmur2_column(keys: pa.Array) -> UInt32s:
    """murmur2 of each value of a binary or string column. A null counts as empty."""
    values, lengths = value_bytes(keys), value_lengths(keys)
    starts = value_offsets(keys)[:-1].astype(np.int64)
    m = np.uint32(_M)
    h = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    words = lengths >> 2

    # Each step hashes one word position of all keys that are long enough.
    rows = np.flatnonzero(words > 0)
    position = 0
    while len(rows):
        at = starts[rows] + 4 * position
        k = values[at[:, None] + np.arange(4)].view("<u4")[:, 0].astype(np.uint32) * m
        k = (k ^ k >> np.uint32(24)) * m
        h[rows] = h[rows] * m ^ k
        position += 1
        rows = rows[words[rows] > position]

    tail_bytes = lengths & 3
    for size in (1, 2, 3):
        rows = np.flatnonzero(tail_bytes == size)
        if len(rows):
            at = starts[rows] + 4 * words[rows]
            tail = np.zeros(len(rows), dtype=np.uint32)
            for byte in range(size):
                tail |= values[at + byte].astype(np.uint32) << np.uint32(8 * byte)
            h[rows] = (h[rows] ^ tail) * m

    h = (h ^ h >> np.uint32(13)) * m
    return h ^ h >> np.uint32(15)


def queues_of(keys: pa.Array, queues: int) -> npt.NDArray[np.int32]:
    """The queue of each key of a column."""
    return ((murmur2_column(keys) & np.uint32(_POSITIVE)) % np.uint32(queues)).astype(np.int32)
