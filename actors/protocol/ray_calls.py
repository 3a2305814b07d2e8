"""The calls of a shard's Ray actor by which a client puts and reads without Flight (ray://).

    open_stream(cluster_id, node_ip or None) -> name of a new put stream
    append(call, buffers)   -> acks; `pack_call` makes the arguments, `unpack_acks` reads the answer
    read(cluster_id, fetch) -> per queue: the head of actors/api/fetches.py, its records as the buffer of a FETCH_SCHEMA
                               batch
    call(cluster_id, op, args) -> the operation's result

A put stream is a sequence of `append` calls. Each carries its number, because Ray starts the calls of a concurrency
group in any order. Small calls and answers are a single `bytes`: the one type that Ray neither pickles nor copies more
than once. Large batches travel as buffers of Arrow's stream format, which Ray moves through the object store.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pyarrow as pa

from raymq.store.base.errors import RayMQError, Rejected, to_wire
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import PutOutcome

from .column_puts import with_more
from .small_puts import pack_puts, unpack_puts

#: batches of a call up to this size travel inside of it. Ray's own limit is 100 KB per argument
INLINE_BYTES = 64 << 10
#: longest wait of one read call: a reader that has left holds its thread no longer
READ_WAIT_MS_MAX = 2_000
#: where batches begin in a call that carries them
_ALIGN = 8
#: a call of small batches: kind (no other call begins with it), stream, number, producer_waits; then the puts
_SMALL_CALL = struct.Struct("<B16sQ?")
_SMALL_CALL_KIND = 2
#: the answer of a call whose one batch is stored: kind (JSON begins with another byte), then the ack
_ONE_ACK = struct.Struct("<B7q")
_ONE_ACK_KIND = 1
_ACK_FIELDS = ("id", *PutOutcome._fields)


def pack_call(
    stream: str,
    number: int,
    batches: list[tuple[dict[str, object], pa.RecordBatch | SmallBatch]],
    *,
    producer_waits: bool,
) -> tuple[bytes] | tuple[bytes, list[pa.Buffer]]:
    """The arguments of `append`: call `number` (from 1 on) of a stream.

    Args: `batches`: pairs of metadata, as in flight_messages.py, and PUT_SCHEMA batch or small one.
    `producer_waits`: the producer sends nothing before the answer.
    """
    small = [(meta, data) for meta, data in batches if isinstance(data, SmallBatch)]
    if len(small) == len(batches):
        fields = _SMALL_CALL.pack(_SMALL_CALL_KIND, stream.encode(), number, producer_waits)
        return (fields + pack_puts(small),)

    # As whole buffers: a pickled slice of a batch would bring the whole batch with it.
    whole = [(meta, _columns(data)) for meta, data in batches]
    metas = [with_more(meta, data) for meta, data in whole]
    buffers = [data.serialize() for _, data in whole]
    sizes = [data.size for data in buffers]
    head: dict[str, Any] = {
        "stream": stream,
        "number": number,
        "producer_waits": producer_waits,
        "batches": metas,
    }
    if sum(sizes) > INLINE_BYTES:
        return json.dumps(head).encode(), buffers

    text = json.dumps({**head, "sizes": sizes}).encode()
    start = _aligned(4 + len(text))
    # Sizes of batches of Arrow's stream format are multiples of 8 themselves.
    return (b"".join([start.to_bytes(4, "little"), text.ljust(start - 4), *buffers]),)


def unpack_call(
    call: bytes, buffers: list[object] | None = None
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Any]]]:
    """The inverse of `pack_call`. Raises: Rejected for other arguments."""
    try:
        if call[0] == _SMALL_CALL_KIND:
            puts = unpack_puts(call[_SMALL_CALL.size :])
            if puts is None:
                raise ValueError("of small batches")
            _, name, number, producer_waits = _SMALL_CALL.unpack_from(call)
            stream = name.decode("ascii", "replace")
            return {"stream": stream, "number": number, "producer_waits": producer_waits}, [*puts]

        if buffers is not None:
            head = json.loads(call)
        else:
            whole, at = pa.py_buffer(call), int.from_bytes(call[:4], "little")
            head, buffers = json.loads(call[4:at]), []
            for size in head["sizes"]:
                buffers.append(whole.slice(at, size))
                at += size

        return head, list(zip(head["batches"], buffers, strict=True))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Rejected(f"bad call: {error!r}", field="call", limit="pack_call") from error


def pack_acks(results: list[tuple[object, PutOutcome | RayMQError]]) -> bytes:
    """The answer of `append`: the outcomes of the batches with these ids."""
    if len(results) == 1 and isinstance(results[0][1], PutOutcome):
        try:
            return _ONE_ACK.pack(_ONE_ACK_KIND, results[0][0], *results[0][1])
        except struct.error:
            # The client chooses ids. This one is not a 64-bit number.
            pass
    return json.dumps([_ack(number, outcome) for number, outcome in results]).encode()


def unpack_acks(answer: bytes) -> list[dict[str, Any]]:
    """The inverse of `pack_acks`, as acks of a put stream."""
    if answer[0] == _ONE_ACK_KIND:
        return [dict(zip(_ACK_FIELDS, _ONE_ACK.unpack(answer)[1:], strict=True))]
    acks: list[dict[str, Any]] = json.loads(answer)
    return acks


def _ack(number: object, result: PutOutcome | RayMQError) -> dict[str, object]:
    if isinstance(result, RayMQError):
        return {"id": number, "error": to_wire(result)}
    return {"id": number, **result._asdict()}


def _columns(batch: pa.RecordBatch | SmallBatch) -> pa.RecordBatch:
    return batch.to_batch() if isinstance(batch, SmallBatch) else batch


def _aligned(size: int) -> int:
    return -size % _ALIGN + size
