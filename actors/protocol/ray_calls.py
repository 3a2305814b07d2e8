"""The calls of a shard's Ray actor by which a client puts and reads without Flight (ray://).

    open_stream(cluster_id, node_ip or None) -> name of a new put stream
    append(call, buffers)   -> acks of actors/api/puts.py; `pack_call` makes the arguments
    read(cluster_id, fetch) -> per queue: the head of actors/api/fetches.py, its records as the buffer of a FETCH_SCHEMA
                               batch
    lease(cluster_id, call) -> the head of actors/api/leases.py, its records as above
    call(cluster_id, op, args) -> the operation's result

A put stream is a sequence of `append` calls, which carry the messages of actors/api/puts.py. Each has its number,
because Ray starts the calls of a concurrency group in any order:

call      the stream's name, the number, how many messages, the sizes of each; then of each its metadata, zeros up to a
          multiple of 8 bytes, and its columns as Arrow writes a batch

A call and its answer are a single `bytes`: the one type that Ray neither pickles nor copies more than once. Columns of
more than INLINE_BYTES travel as buffers beside it, one or None per message, which Ray moves through the object store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa

from raymq.store.base.errors import Rejected
from raymq.store.records.record import SmallBatch

from .column_puts import pack_put
from .small_puts import pack_puts

#: columns of a call up to this size travel inside of it. Ray's own limit is 100 KB per argument
INLINE_BYTES = 64 << 10
#: longest wait of one read call: a reader that has left holds its thread no longer
READ_WAIT_MS_MAX = 2_000
#: where columns begin in a call that carries them. The structs below and batches as Arrow writes them keep to it, too
_ALIGN = 8
#: stream, number, how many messages
_HEAD = struct.Struct("<16sQI4x")
#: bytes of a message's metadata and of its columns; 0: it has none, or they are beside the call
_SIZES = struct.Struct("<II")

#: a message of a put stream: its metadata and its columns
PutMessage = tuple[bytes, pa.Buffer | None]


class Call(NamedTuple):
    """A call of a put stream."""

    stream: str
    number: int
    messages: list[PutMessage]


def pack_call(
    stream: str, number: int, puts: Iterable[tuple[dict[str, object], pa.RecordBatch | SmallBatch]]
) -> tuple[bytes] | tuple[bytes, list[pa.Buffer | None]]:
    """The arguments of `append`: call `number` (from 1 on) of a stream.

    Args: `puts`: pairs of metadata, as in actors/api/puts.py, and batch. Small ones in a row share a message.
    """
    messages: list[PutMessage] = []
    for is_small, run in groupby(puts, lambda put: isinstance(put[1], SmallBatch)):
        if is_small:
            messages.append((pack_puts(run), None))
            continue
        for meta, batch in run:
            metadata, columns = pack_put(meta, batch)
            # As a whole buffer: a pickled slice of a batch would bring the whole batch with it.
            messages.append((metadata, columns.serialize()))

    buffers = [columns for _, columns in messages]
    sizes = [0 if columns is None else columns.size for columns in buffers]
    beside = sum(sizes) > INLINE_BYTES
    parts = [_HEAD.pack(stream.encode(), number, len(messages))]
    for (metadata, _), size in zip(messages, sizes, strict=True):
        parts.append(_SIZES.pack(len(metadata), 0 if beside else size))
    for metadata, columns in messages:
        parts += (metadata, bytes(-len(metadata) % _ALIGN))
        if columns is not None and not beside:
            parts.append(columns)
    call = b"".join(parts)
    return (call, buffers) if beside else (call,)


def unpack_call(call: bytes, buffers: list[object] | None = None) -> Call:
    """The inverse of `pack_call`. Raises: Rejected for other arguments."""
    try:
        stream, number, count = _HEAD.unpack_from(call)
        whole, at = pa.py_buffer(call), _HEAD.size + count * _SIZES.size
        messages: list[PutMessage] = []
        for size, columns_size in _SIZES.iter_unpack(call[_HEAD.size : at]):
            columns_at = at + size + -size % _ALIGN
            columns = whole.slice(columns_at, columns_size) if columns_size else None
            messages.append((call[at : at + size], columns))
            at = columns_at + columns_size

        if at != len(call):
            raise ValueError(f"it has {len(call)} bytes, its sizes say {at}")
        if buffers is not None:
            pairs = zip(messages, buffers, strict=True)
            messages = [(metadata, beside) for (metadata, _), beside in pairs]
        return Call(stream.rstrip(b"\0").decode("ascii", "replace"), number, messages)
    except (TypeError, ValueError, IndexError, struct.error) as error:
        raise Rejected(f"bad call: {error!r}", field="call", limit="pack_call") from error
