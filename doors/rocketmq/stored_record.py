"""Fields of a record that the server reads and writes without decoding it."""

from __future__ import annotations

import asyncio
import struct

from raymq.store.base import format as fmt
from raymq.store.base.errors import OffsetOutOfRange
from raymq.store.records.requests import FetchRequest

from .shards import Shards
from .topology import BrokerAddress, BrokerQueues

_INT, _LONG = struct.Struct(">i"), struct.Struct(">q")
#: one record may have so many bytes
RECORD_BYTES = 64 << 20


async def read_record(
    shards: Shards, shard: int, topic: str, queue_id: int, offset: int
) -> bytes | None:
    """The record of a message; None: it is not there. Raises: RayMQError."""
    request = FetchRequest(
        topic, {queue_id: offset}, max_bytes=RECORD_BYTES, max_records=1, wait_ms=0
    )
    for part in await shards.fetch(shard, request):
        if part.error is not None:
            raise part.error
        if part.records is not None and len(part.records):
            found: bytes = part.records[0].as_py()
            (at,) = _LONG.unpack_from(found, fmt.QUEUE_OFFSET_AT)
            # Of a compacted topic the next message that is left may come instead.
            return found if at == offset else None
    return None


async def stored_ms(shards: Shards, shard: int, topic: str, queue_id: int, offset: int) -> int:
    """When a message was stored; 0: it is not there. Raises: RayMQError."""
    if offset < 0:
        return 0
    try:
        record = await read_record(shards, shard, topic, queue_id, offset)
    except OffsetOutOfRange:
        return 0
    return 0 if record is None else fmt.store_time_ms(record)


async def all_stored_ms(
    shards: Shards, shard: int, topic: str, offsets: dict[int, int]
) -> dict[int, int]:
    """`stored_ms` of one message of each queue. Args: `offsets`: queue -> offset."""
    found = await asyncio.gather(
        *(stored_ms(shards, shard, topic, queue_id, offset) for queue_id, offset in offsets.items())
    )
    return dict(zip(offsets, found, strict=True))


def as_of_broker(
    record: bytes, queues: BrokerQueues, queue_id: int, address: BrokerAddress | None
) -> bytes:
    """A record with the queue's number at its broker, and the address of that as its store host.

    Tools take both from the record, and dial the store host.
    """
    changed = bytearray(record)
    _INT.pack_into(changed, fmt.QUEUE_ID_AT, queues.number(queue_id))
    place = _store_host_at(record)
    host = b"" if address is None else fmt.pack_host(address.host, address.port)
    if len(host) == place.stop - place.start:
        changed[place] = host
    return bytes(changed)


def store_host(record: bytes) -> bytes:
    """The store host of a record, which message ids begin with."""
    return record[_store_host_at(record)]


def with_store_host(record: bytes, host: bytes) -> bytes:
    """A record with another store host, of the same length."""
    changed = bytearray(record)
    changed[_store_host_at(record)] = host
    return bytes(changed)


def _store_host_at(record: bytes) -> slice:
    (sys_flag,) = _INT.unpack_from(record, fmt.SYS_FLAG_AT)
    at = fmt.STORE_TIME_AT + 8
    if sys_flag & fmt.SYS_BORN_HOST_V6:
        at += fmt.IPV6_EXTRA_BYTES
    return slice(at, at + fmt.HOST_BYTES[bool(sys_flag & fmt.SYS_STORE_HOST_V6)])
