"""Finding the newest messages of one key: a walk from record to record, without arrays.

A query returns some dozens of records. For these plain Python takes half the time of numpy. A query for several keys
shares the numpy calls of `query_keys`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.checksum import BODY_CRC_MASK, crc32
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.binary_columns import binary_array
from raymq.store.records.keys import keys_of
from raymq.store.records.one_record import record_at, records_at_each
from raymq.store.records.record_walk import WalkStop

from .index_service import IndexService

#: later than any store time
TIME_MAX_MS = (1 << 63) - 1
#: bytes read for each record: a multiple of the first, and at most the second. A larger record is read once more
READ_BYTES_STEP, READ_BYTES_MAX = 64, 8192


class KeyHits(NamedTuple):
    """The messages of a query. Hit i says that message `rows[i]` of `records` has key `keys[i]`."""

    keys: Int64s
    rows: Int64s
    #: physical offset of each record
    offsets: Int64s
    #: raw RocketMQ records, in the order of the log, each once
    records: pa.Array

    def select(self, kept: Bools) -> KeyHits:
        """Some of the hits, with all records."""
        return self._replace(keys=self.keys[kept], rows=self.rows[kept])


class KeySearch:
    """Finds the newest messages of one key. Callers: any thread."""

    def __init__(self, log: CommitLog, index: IndexService) -> None:
        self._log = log
        self._index = index
        #: bytes read per record: as many as the largest record of the last query has, since messages of one application
        #: have similar sizes
        self._read_bytes = 2048

    def find(
        self, topic: str, key: str, limit: int, span: tuple[int, int], *, exact: bool
    ) -> KeyHits:
        """The newest messages of a key, `limit` at most.

        Args: `span`: the first and the last store time (ms). `exact`: as of `Query.by_key`.
        Raises: Corrupt for a record that is unreadable or whose body is damaged.
        """
        found = self._newest(topic, key, limit, span, exact)
        offsets = sorted(found)
        raw = [found[offset] for offset in offsets]
        if raw:
            largest = max(map(len, raw))
            steps = (largest + READ_BYTES_STEP - 1) // READ_BYTES_STEP
            self._read_bytes = min(steps * READ_BYTES_STEP, READ_BYTES_MAX)
        return KeyHits(
            keys=np.zeros(len(raw), dtype=np.int64),
            rows=np.arange(len(raw)),
            offsets=np.fromiter(offsets, np.int64, len(offsets)),
            records=binary_array(raw),
        )

    def _newest(
        self, topic: str, key: str, limit: int, span: tuple[int, int], exact: bool
    ) -> dict[int, bytes]:
        """Records by physical offset.

        Entries of deleted files are left out. So are entries whose offset begins no record: RocketMQ leaves such
        entries when it cuts a log.
        """
        log, nbytes = self._log, self._read_bytes
        found: dict[int, bytes] = {}
        begin_ms, end_ms = span
        low, high = log.start, log.confirmed

        for candidates in self._index.find(topic, key, begin_ms, end_ms, limit):
            offsets = [offset for offset in candidates if low <= offset < high]
            data = log.reads.raw_each(offsets, nbytes)
            starts = range(0, len(data), nbytes)
            each = records_at_each(data, nbytes, offsets)
            for offset, start, parts in zip(offsets, starts, each, strict=True):
                source = data
                if parts is None:
                    source = self._read_whole(offset, data[start : start + 4])
                    parts = record_at(source, 0, offset)
                    if parts is None:
                        continue
                    start = 0

                end, time_ms, topic_at, topic_end, body_at, body_end, crc = parts
                if not begin_ms <= time_ms <= end_ms:
                    continue
                if exact and not (
                    str(source[topic_at:topic_end], "utf-8", "replace") == topic
                    and key in keys_of(source[topic_end + 2 : end])
                ):
                    continue

                # This is `body_crc` without a Python call for each record.
                if body_at < body_end and crc32(source[body_at:body_end]) & BODY_CRC_MASK != crc:
                    raise log.reads.damage(offset, WalkStop.BAD_CRC.value)

                # A message that has a key twice has two entries of the same offset.
                found[offset] = source[start:end]
                if len(found) == limit:
                    return found

        return found

    def _read_whole(self, offset: int, size_field: bytes) -> bytes:
        """All bytes of a record; empty if its size field is not a possible size."""
        config = self._log.config
        size = int.from_bytes(size_field, "big")
        left_in_file = config.segment_size_bytes - offset % config.segment_size_bytes
        is_possible = size <= min(left_in_file, config.record_bytes_max)
        return self._log.reads.raw_each([offset], size) if is_possible else b""
