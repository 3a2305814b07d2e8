"""The calls of a shard's Ray actor by which a client puts and reads without Flight (ray://).

    open_stream(cluster_id, node_ip or None) -> name of a new put stream
    append(call, buffers)   -> acks of actors/api/puts.py; `pack_call` makes the arguments
    read(cluster_id, fetch) -> per queue: the head of actors/api/fetches.py, its records as the buffer of a FETCH_SCHEMA
                               batch
    call(cluster_id, op, args) -> the operation's result

A put stream is a sequence of `append` calls, which carry the messages of actors/api/puts.py. Each has its number,
because Ray starts the calls of a concurrency group in any order:

call      the stream's name, the number, how many messages; the sizes of each; their metadata, zeros up to a multiple of
          8 bytes, and their columns as Arrow writes a batch

A call and its answer are a single `bytes`: the one type that Ray neither pickles nor copies more than once. Columns of
more than INLINE_BYTES travel as buffers beside it, which Ray moves through the object store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from raymq.store.base.errors import Rejected
from raymq.store.records.record import SmallBatch

from .column_puts import pack_put
from .small_puts import pack_puts

#: columns of a call up to this size travel inside of it. Ray's own limit is 100 KB per argument
INLINE_BYTES = 64 << 10
#: longest wait of one read call: a reader that has left holds its thread no longer
READ_WAIT_MS_MAX = 2_000
#: where columns begin in a call that carries them. Sizes of batches as Arrow writes them are multiples of it
_ALIGN = 8
#: stream, number, how many messages
_HEAD = struct.Struct("<16sQI")
#: bytes of a message's metadata and of its columns; 0: it has none
_SIZES = struct.Struct("<II")

#: a message of a put stream: its metadata and its columns
Message = tuple[bytes, pa.Buffer | None]


class Call(NamedTuple):
    """A call of a put stream."""

    stream: str
    number: int
    messages: list[Message]


def pack_call(
    stream: str, number: int, puts: Iterable[tuple[dict[str, Any], pa.RecordBatch | SmallBatch]]
) -> tuple[bytes] | tuple[bytes, list[pa.Buffer]]:
    """The arguments of `append`: call `number` (from 1 on) of a stream.

    Args: `puts`: pairs of metadata, as in actors/api/puts.py, and batch. Small ones in a row share a message.
    """
    messages: list[Message] = []
    for is_small, run in groupby(puts, lambda put: isinstance(put[1], SmallBatch)):
        if is_small:
            messages.append((pack_puts(run), None))
            continue
        for meta, batch in run:
            metadata, columns = pack_put(meta, batch)
            # As a whole buffer: a pickled slice of a batch would bring the whole batch with it.
            messages.append((metadata, columns.serialize()))

    metas = [metadata for metadata, _ in messages]
    buffers = [columns for _, columns in messages if columns is not None]
    sizes = [
        _SIZES.pack(len(metadata), columns.size if columns else 0) for metadata, columns in messages
    ]
    call = b"".join([_HEAD.pack(stream.encode(), number, len(messages)), *sizes, *metas])
    if not buffers:
        return (call,)
    if sum(columns.size for columns in buffers) > INLINE_BYTES:
        return call, buffers
    return (b"".join([call, bytes(-len(call) % _ALIGN), *buffers]),)


def unpack_call(call: bytes, buffers: list[Any] | None = None) -> Call:
    """The inverse of `pack_call`. Raises: Rejected for other arguments."""
    try:
        stream, number, count = _HEAD.unpack_from(call)
        at = _HEAD.size + count * _SIZES.size
        sizes = [*_SIZES.iter_unpack(call[_HEAD.size : at])]
        metas = []
        for size, _ in sizes:
            metas.append(call[at : at + size])
            at += size

        if buffers is None:
            buffers, whole = [], pa.py_buffer(call)
            at += -at % _ALIGN if at < len(call) else 0
            for _, size in sizes:
                if size:
                    buffers.append(whole.slice(at, size))
                    at += size
        left = iter(buffers)
        messages = [
            (metadata, next(left) if size else None)
            for metadata, (_, size) in zip(metas, sizes, strict=True)
        ]
        if at != len(call) or [*left]:
            raise ValueError(f"it has {len(call)} bytes, its sizes say {at}")
        return Call(stream.rstrip(b"\0").decode("ascii", "replace"), number, messages)
    except (StopIteration, TypeError, ValueError, IndexError, struct.error) as error:
        raise Rejected(f"bad call: {error!r}", field="call", limit="pack_call") from error
