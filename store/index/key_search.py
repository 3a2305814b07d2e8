"""Finding the newest messages of one key: a walk from record to record, without arrays.

A query returns some dozens of records: for these plain Python takes half the time of numpy. Several keys share the
numpy calls of `query_keys`.
"""

from __future__ import annotations

from itertools import count

from raymq.store.checksum import body_crc
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.keys import keys_of
from raymq.store.records.one_record import record_at
from raymq.store.records.record_walk import WalkStop

from .index_service import IndexService

#: later than any store time
TIME_MAX_MS = (1 << 63) - 1
#: bytes read for one record; a larger one is read whole
LOOK_BYTES = 2048


def newest(
    log: CommitLog,
    index: IndexService,
    topic: str,
    key: str,
    limit: int,
    span: tuple[int, int],
    *,
    exact: bool,
) -> dict[int, bytes]:
    """The newest records of a key by physical offset, `limit` at most.

    Args: `span`: the first and the last store time (ms); `exact`: as of `Query.by_key`.
    Entries of deleted files are left out, and so are those at which no record begins: RocketMQ leaves such entries
    when it cuts a log. Raises: Corrupt for a record whose body is damaged, or that the disk does not give back.
    """
    found: dict[int, bytes] = {}
    begin_ms, end_ms = span
    low, high = log.start, log.confirmed
    for places in index.find(topic, key, begin_ms, end_ms, limit):
        stored = [place for place in places if low <= place < high]
        heads = log.read_each(stored, LOOK_BYTES)
        for at, place in zip(count(0, LOOK_BYTES), stored, strict=False):
            data = heads
            parts = record_at(data, at, place - at)
            if parts is None or parts[0] > at + LOOK_BYTES:
                data = _read_whole(log, place, heads[at : at + 4])
                parts = record_at(data, 0, place)
                if parts is None:
                    continue
                at = 0
            end, time_ms, topic_at, topic_end, body_at, body_end, crc = parts
            if not begin_ms <= time_ms <= end_ms:
                continue
            if exact and not (
                str(data[topic_at:topic_end], "utf-8", "replace") == topic
                and key in keys_of(data[topic_end + 2 : end])
            ):
                continue
            # A slice of bytes is a copy, which for small bodies costs less than a view.
            body = (data if data is heads else memoryview(data))[body_at:body_end]
            if body and body_crc(body) != crc:
                raise log.damage(place, WalkStop.BAD_CRC.value)
            # A key that stands twice in one message gives the same offset twice.
            found[place] = data[at:end]
            if len(found) == limit:
                return found
    return found


def _read_whole(log: CommitLog, place: int, size_field: bytes) -> bytes:
    """All bytes of a record that is larger than LOOK_BYTES; b"" where no record of a possible size begins."""
    size = int.from_bytes(size_field, "big")
    left_in_file = log.config.segment_size_bytes - place % log.config.segment_size_bytes
    is_possible = LOOK_BYTES < size <= min(left_in_file, log.config.record_bytes_max)
    return log.read_each([place], size) if is_possible else b""
