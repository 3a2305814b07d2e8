"""What a shard offers to clients that reach only Ray: put streams, reads and operations as plain calls.

A put stream is a number of `append` calls. Ray starts the calls of a concurrency group in any order (several threads;
large arguments come later than small ones), so each carries its number and waits for its turn. Small ones are a
single `bytes`, both ways: the one type that Ray neither pickles nor copies more than once. Large batches and records
travel as buffers of Arrow's stream format, which Ray moves through the object store.
"""

from __future__ import annotations

import json
import secrets
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymq.actors.api.call_arguments import fetch_request
from raymq.actors.api.row_message import pack_row, unpack_row
from raymq.actors.api.shard_api import PutTicket, ShardBackend, put_request
from raymq.store.errors import Bug, RayMQError, Rejected, Unavailable, to_wire
from raymq.store.record import PUT_SCHEMA, Row
from raymq.store.requests import FetchSlice, PutOutcome

from .actor_classes import GROUPS

#: calls that may wait for their turn: as many threads are left for those whose turn it is
EARLY_MAX = GROUPS["append"] // 2
#: a predecessor that has not come by then will not come
TURN_WAIT_S = 5.0
#: streams remembered; whoever comes back later than so many others must open a new one
STREAMS_MAX = 4096

FETCH_BYTES_MAX = 64 << 20
#: one call of a reader waits so long at most: a reader that has left holds its thread no longer
READ_WAIT_MS_MAX = 2_000
#: while so many read, each waits shortly, so that all get their turn: a call costs about a millisecond of CPU
CROWD = GROUPS["read"] * 3 // 4
CROWDED_WAIT_MS = 250

#: batches of a call up to this size travel inside of it; Ray's own limit is 100 KB an argument
INLINE_BYTES = 64 << 10
#: where batches begin in a call that carries them
_ALIGN = 8
#: a call of a single row: kind (no other call begins with it), stream, number, alone; then the row
_ROW_CALL = struct.Struct("<B16sQ?")
_ROW_CALL_KIND = 2
#: the answer of a call whose one batch is stored: kind (JSON begins with another byte), then the ack
_ONE_ACK = struct.Struct("<B7q")
_ONE_ACK_KIND = 1
_ACK_FIELDS = ("id", *PutOutcome._fields)

#: rows of a read's answer: raw RocketMQ records
RECORD_SCHEMA = pa.schema([pa.field("record", pa.binary(), nullable=False)])


@dataclass
class _Stream:
    """The order of one put stream's calls."""

    #: the call whose turn it is
    next: int = 1
    #: a call was refused or did not come: no later one may overtake it
    broken: bool = False


class RayMethods:
    """The methods over one backend. Any thread may call any of them."""

    def __init__(self, backend: ShardBackend, *, turn_wait_s: float = TURN_WAIT_S) -> None:
        self._backend = backend
        self._turn_wait_s = turn_wait_s
        #: guards everything below; `_changed` tells that a turn has come
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: the one that was used last stands last
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._early = 0
        self._reading = 0

    # --- put streams --------------------------------------------------------------------------------

    def open_stream(self, cluster_id: str) -> str:
        """A new put stream. Raises: Rejected when this is another cluster."""
        self._check_identity(cluster_id)
        name = secrets.token_hex(8)
        with self._lock:
            self._streams[name] = _Stream()
            while len(self._streams) > STREAMS_MAX:
                _, forgotten = self._streams.popitem(last=False)
                forgotten.broken = True
                self._changed.notify_all()
        return name

    def append(self, call: bytes, buffers: list[Any] | None = None) -> bytes:
        """A call of a stream: put its batches in order, wait until all are answered.

        Args: as `pack_call` makes them.
        Returns: an ack a batch, in order, as in cluster/transport/protocol.py; `unpack_acks` reads them.
        Raises: Unavailable when the stream is not known (any more) or a call before this one is missing; nothing of
        this call was stored then, and the stream takes no more.
        """
        head, batches = unpack_call(call, buffers)
        alone = head["alone"] and len(batches) == 1
        turn = self._take_turn(head["stream"], head["number"])
        results = []
        try:
            for meta, data in batches:
                results.append((meta, self._put(meta, data, alone)))
        finally:
            with self._lock:
                turn.next += 1
                if self._early:
                    self._changed.notify_all()
        return pack_acks([(meta.get("id", 0), _outcome(result)) for meta, result in results])

    def _take_turn(self, stream: str, number: int) -> _Stream:
        with self._lock:
            turn = self._streams.get(stream)
            if turn is None:
                raise Unavailable(
                    "the put stream is not known here: open a new one", field="stream"
                )
            self._streams.move_to_end(stream)
            if turn.next < number and not turn.broken and self._early < EARLY_MAX:
                self._early += 1
                try:
                    self._changed.wait_for(
                        lambda: turn.broken or turn.next >= number, self._turn_wait_s
                    )
                finally:
                    self._early -= 1
            if turn.broken or turn.next != number:
                turn.broken = True
                self._changed.notify_all()
                raise Unavailable(
                    f"call {number} of the put stream came where {turn.next} was due",
                    field="stream",
                )
            return turn

    def _put(self, meta: dict[str, Any], data: Any, alone: bool) -> PutTicket | RayMQError:
        try:
            batch = data if isinstance(data, Row) else pa.ipc.read_record_batch(data, PUT_SCHEMA)
            return self._backend.put(put_request(meta, batch), alone=alone)
        except RayMQError as error:
            return error
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            return Rejected(
                f"bad put: {error!r}", field="metadata", limit="cluster/transport/protocol.py"
            )
        except Exception as error:
            # The batches behind it must still be answered.
            return Bug(f"put: {error!r}")

    # --- reads and operations -----------------------------------------------------------------------

    def read(
        self,
        cluster_id: str,
        topic: str,
        offsets: dict[int, int],
        max_bytes: int,
        max_records: int,
        wait_ms: int,
    ) -> list[tuple[int, int, int, int, int, Any, dict[str, Any] | None]]:
        """Read queues; waits while none has anything, up to `wait_ms` or what READ_WAIT_MS_MAX allows.

        Returns: (queue, first offset, next offset, min offset, max offset, records or None, error or None) of each
        queue that has records or an error; records are the buffer of a RECORD_SCHEMA batch.
        """
        self._check_identity(cluster_id)
        with self._lock:
            self._reading += 1
            crowded = self._reading > CROWD
        try:
            limit_ms = CROWDED_WAIT_MS if crowded else READ_WAIT_MS_MAX
            request = fetch_request(
                topic,
                offsets,
                max_bytes=max_bytes,
                max_records=max_records,
                wait_ms=wait_ms,
                bytes_limit=FETCH_BYTES_MAX,
                wait_limit_ms=limit_ms,
            )
            return [_slice(part) for part in self._backend.fetch(request)]
        except (TypeError, ValueError, KeyError) as error:
            raise Rejected(f"bad read: {error!r}", field="offsets", limit="the method's") from error
        finally:
            with self._lock:
                self._reading -= 1

    def call(self, cluster_id: str, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """An administrative operation. Raises: what the shard raises, Rejected for bad arguments."""
        self._check_identity(cluster_id)
        try:
            return self._backend.call(op, args)
        except (TypeError, ValueError, KeyError) as error:
            raise Rejected(
                f"{op}: bad arguments: {error}", field="args", limit="the operation's"
            ) from error

    def _check_identity(self, cluster_id: str) -> None:
        mine = self._backend.identity()["cluster_id"]
        if cluster_id != mine:
            raise Rejected(
                f"this is cluster_id {mine!r}, not {cluster_id!r}: the name belongs to another cluster now",
                field="cluster_id",
                limit=mine,
            )


def pack_call(
    stream: str,
    number: int,
    batches: list[tuple[dict[str, Any], pa.RecordBatch | Row]],
    *,
    alone: bool,
) -> tuple[bytes] | tuple[bytes, list[pa.Buffer]]:
    """The arguments of `append`: call `number` (from 1 on) of a stream.

    Args: a batch is (metadata as in cluster/transport/protocol.py, PUT_SCHEMA batch or row). `alone`: the producer
    sends nothing before the answer.
    """
    if len(batches) == 1:
        meta, row = batches[0]
        if isinstance(row, Row):
            words = _ROW_CALL.pack(_ROW_CALL_KIND, stream.encode(), number, alone)
            return (words + pack_row(meta, row),)
    # As whole buffers: a pickled slice of a batch would bring all of what it is a slice of.
    metas, buffers = [meta for meta, _ in batches], [_buffer(data) for _, data in batches]
    sizes = [data.size for data in buffers]
    head: dict[str, Any] = {"stream": stream, "number": number, "alone": alone, "batches": metas}
    if sum(sizes) > INLINE_BYTES:
        return json.dumps(head).encode(), buffers
    words = json.dumps({**head, "sizes": sizes}).encode()
    start = _aligned(4 + len(words))
    # Sizes of batches of Arrow's stream format are multiples of 8 themselves.
    return (b"".join([start.to_bytes(4, "little"), words.ljust(start - 4), *buffers]),)


def unpack_call(
    call: bytes, buffers: list[Any] | None = None
) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Any]]]:
    """Raises: Rejected when it is no call."""
    try:
        if call[0] == _ROW_CALL_KIND:
            single = unpack_row(call[_ROW_CALL.size :])
            if single is None:
                raise ValueError("of a row")
            _, name, number, alone = _ROW_CALL.unpack_from(call)
            stream = name.decode("ascii", "replace")
            return {"stream": stream, "number": number, "alone": alone}, [single]
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


def _buffer(batch: pa.RecordBatch | Row) -> pa.Buffer:
    return (batch.to_batch() if isinstance(batch, Row) else batch).serialize()


def pack_acks(results: list[tuple[Any, PutOutcome | RayMQError]]) -> bytes:
    """The answer of `append`: what came of the batches with these ids."""
    if len(results) == 1 and isinstance(results[0][1], PutOutcome):
        try:
            return _ONE_ACK.pack(_ONE_ACK_KIND, results[0][0], *results[0][1])
        except struct.error:
            # Ids are the client's: this one is no such number.
            pass
    return json.dumps([_ack(number, outcome) for number, outcome in results]).encode()


def unpack_acks(answer: bytes) -> list[dict[str, Any]]:
    """What `append` answered."""
    if answer[0] == _ONE_ACK_KIND:
        return [dict(zip(_ACK_FIELDS, _ONE_ACK.unpack(answer)[1:], strict=True))]
    acks: list[dict[str, Any]] = json.loads(answer)
    return acks


def _aligned(size: int) -> int:
    return -size % _ALIGN + size


def _outcome(result: PutTicket | RayMQError) -> PutOutcome | RayMQError:
    if isinstance(result, RayMQError):
        return result
    try:
        return result.wait()
    except RayMQError as error:
        return error


def _ack(number: Any, result: PutOutcome | RayMQError) -> dict[str, Any]:
    if isinstance(result, RayMQError):
        return {"id": number, "error": to_wire(result)}
    return {"id": number, **result._asdict()}


def _slice(part: FetchSlice) -> tuple[int, int, int, int, int, Any, dict[str, Any] | None]:
    error = part.error
    if error is None and part.records is None:
        error = Bug("a slice has neither records nor an error")
    if error is not None:
        return part.queue_id, -1, -1, -1, -1, None, to_wire(error)
    records = pa.record_batch([part.records], schema=RECORD_SCHEMA).serialize()
    return (
        part.queue_id,
        part.first_offset,
        part.next_offset,
        part.min_offset,
        part.max_offset,
        records,
        None,
    )
