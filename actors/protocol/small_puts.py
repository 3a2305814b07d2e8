"""Small puts as plain bytes, many in one message: an Arrow message of a few rows costs more than the rest of the put.

message   kind (1 byte), then puts, one after the other
put       _PUT, topic, a _ROW for each row, the columns of MORE_SCHEMA that the put has, then tag, properties and body
          of each row
columns   flag and sys_flag: 4 bytes a row. born_host: a byte a row with the length of its host, 0 for null; the hosts
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from raymq.store.base.errors import Rejected
from raymq.store.config.promise import ACKS
from raymq.store.records.record import SmallBatch

#: bits, queue, id, read, pid, epoch, seq; bytes of the topic, rows
_PUT = struct.Struct("<BiqqQqqHH")
#: born time, bytes of body, tag and properties; -1 for null
_ROW = struct.Struct("<qIii")
_KIND = bytes([1])
#: the bits: a producer id, the ack mode as its index in ACKS, and which columns of MORE_SCHEMA follow
_HAS_PID = 1
_ACKS_SHIFT, _ACKS_MASK = 1, 0x1E
_HAS_FLAGS, _HAS_SYS_FLAGS, _HAS_BORN_HOSTS = 0x20, 0x40, 0x80
_HAS_MORE = _HAS_FLAGS | _HAS_SYS_FLAGS | _HAS_BORN_HOSTS

#: metadata as in actors/api/puts.py, and the rows
SmallPut = tuple[dict[str, Any], SmallBatch]


def pack_puts(puts: Iterable[SmallPut]) -> bytes:
    """Small puts, in their order, as one message."""
    parts = [_KIND]
    for meta, batch in puts:
        topic = meta["topic"].encode()
        bits = ACKS.index(meta["acks"]) << _ACKS_SHIFT
        pid = meta["pid"]
        if pid is None:
            pid = 0
        else:
            bits |= _HAS_PID
        queue, number, read, rows = meta["queue"], meta["id"], meta["read"], batch.num_rows
        sequence = meta["seq"]
        bodies, tags, texts, born_times_ms, flags, sys_flags, born_hosts = batch
        more: list[bytes] = []
        if flags is not None:
            bits |= _HAS_FLAGS
            more.append(_packed_ints(flags))
        if sys_flags is not None:
            bits |= _HAS_SYS_FLAGS
            more.append(_packed_ints(sys_flags))
        if born_hosts is not None:
            bits |= _HAS_BORN_HOSTS
            hosts = [host or b"" for host in born_hosts]
            more += (bytes(map(len, hosts)), *hosts)
        parts.append(
            _PUT.pack(bits, queue, number, read, pid, meta["epoch"], sequence, len(topic), rows)
        )
        parts.append(topic)

        values: list[bytes] = []
        for body, tag, properties, born in zip(bodies, tags, texts, born_times_ms, strict=True):
            text = None if tag is None else tag.encode()
            parts.append(
                _ROW.pack(
                    born,
                    len(body),
                    -1 if text is None else len(text),
                    -1 if properties is None else len(properties),
                )
            )
            values += (text or b"", properties or b"", body)
        parts += more
        parts += values

    return b"".join(parts)


def unpack_puts(data: bytes) -> list[SmallPut] | None:
    """The inverse of `pack_puts`; None for another message. Raises: Rejected when it is damaged."""
    if data[:1] != _KIND:
        return None

    puts: list[SmallPut] = []
    at, end = 1, len(data)
    try:
        while at < end:
            put, at = _unpack_put(data, at)
            puts.append(put)
        if not puts or at > end:
            raise ValueError(f"it has {end} bytes, its fields say {at}")
    except (struct.error, ValueError, IndexError) as error:
        raise Rejected(
            f"bad put of small batches: {error}", field="metadata", limit="raymq.actors.protocol"
        ) from error
    return puts


def _unpack_put(data: bytes, at: int) -> tuple[SmallPut, int]:
    """The put at a position of the message, and where it ends."""
    bits, queue, number, read, pid, epoch, sequence, topic_bytes, rows = _PUT.unpack_from(data, at)
    topic_at = at + _PUT.size
    table_at = topic_at + topic_bytes
    at = table_at + rows * _ROW.size

    table = data[table_at:at]
    bodies: list[bytes] = []
    tags: list[str | None] = []
    properties: list[bytes | None] = []
    born_times_ms: list[int] = []
    batch = SmallBatch(bodies, tags, properties, born_times_ms)
    if bits & _HAS_MORE:
        at, more = _unpack_more(data, at, bits, rows)
        batch = SmallBatch(bodies, tags, properties, born_times_ms, *more)
    for born, body_bytes, tag_bytes, property_bytes in _ROW.iter_unpack(table):
        if tag_bytes < -1 or property_bytes < -1:
            raise ValueError("a negative length")
        born_times_ms.append(born)
        if tag_bytes < 0:
            tags.append(None)
        else:
            tags.append(data[at : at + tag_bytes].decode())
            at += tag_bytes
        if property_bytes < 0:
            properties.append(None)
        else:
            properties.append(data[at : at + property_bytes])
            at += property_bytes
        bodies.append(data[at : at + body_bytes])
        at += body_bytes

    if at > len(data) or len(bodies) != rows:
        raise ValueError(f"it has {len(data)} bytes, its fields say {at} or more")

    meta = {
        "id": number,
        "topic": data[topic_at:table_at].decode(),
        "queue": queue,
        "pid": pid if bits & _HAS_PID else None,
        "epoch": epoch,
        "seq": sequence,
        "acks": ACKS[(bits & _ACKS_MASK) >> _ACKS_SHIFT],
        "read": read,
    }
    return (meta, batch), at


def _packed_ints(values: list[int | None]) -> bytes:
    return struct.pack(f"<{len(values)}i", *[value or 0 for value in values])


def _unpack_more(data: bytes, at: int, bits: int, rows: int) -> tuple[int, tuple[Any, ...]]:
    """Where the columns of MORE_SCHEMA end, which begin at a position of the message, and the columns; None: absent."""
    flags = sys_flags = hosts = None
    ints = struct.Struct(f"<{rows}i")
    if bits & _HAS_FLAGS:
        flags, at = [*ints.unpack_from(data, at)], at + ints.size
    if bits & _HAS_SYS_FLAGS:
        sys_flags, at = [*ints.unpack_from(data, at)], at + ints.size
    if bits & _HAS_BORN_HOSTS:
        lengths, at = data[at : at + rows], at + rows
        hosts = []
        for length in lengths:
            hosts.append(data[at : at + length] or None)
            at += length
        if len(hosts) != rows:
            raise ValueError(f"it has {len(data)} bytes, its fields say {at} or more")
    return at, (flags, sys_flags, hosts)
