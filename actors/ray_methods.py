"""What a shard offers to clients that reach only Ray: put streams, reads and operations as plain calls.

A put stream is a number of `append` calls. Ray starts the calls of a concurrency group in any order (several threads;
large arguments come later than small ones), so each carries its number and waits for its turn. Batches and records
travel as buffers of Arrow's stream format, which Ray moves through the object store where they are large.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymq.store.errors import Bug, RayMQError, Rejected, Unavailable, to_wire
from raymq.store.put import FetchRequest, FetchSlice, PutRequest
from raymq.store.record import PUT_SCHEMA

from .shard_api import PutTicket, ShardBackend
from .shells import GROUPS

#: calls that may wait for their turn: as many threads are left for those whose turn it is
EARLY_MAX = GROUPS["append"] // 2
#: a predecessor that has not come by then will not come
TURN_WAIT_S = 5.0
#: streams remembered; whoever comes back later than so many others must open a new one
STREAMS_MAX = 4096

FETCH_BYTES_MAX = 64 << 20
#: one call of a reader waits so long at most: a reader that has left holds its thread no longer
READ_WAIT_MS_MAX = 2_000
#: while so many read, each waits shortly, so that all get their turn
CROWD = GROUPS["read"] // 2
CROWDED_WAIT_MS = 100

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
        #: guards everything below, and tells that a turn has come
        self._changed = threading.Condition()
        #: the one that was used last stands last
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._early = 0
        self._reading = 0

    # --- put streams --------------------------------------------------------------------------------

    def open_stream(self, cluster_id: str) -> str:
        """A new put stream. Raises: Rejected when this is another cluster."""
        self._check_identity(cluster_id)
        name = secrets.token_hex(8)
        with self._changed:
            self._streams[name] = _Stream()
            while len(self._streams) > STREAMS_MAX:
                _, forgotten = self._streams.popitem(last=False)
                forgotten.broken = True
                self._changed.notify_all()
        return name

    def append(
        self, stream: str, number: int, batches: list[tuple[dict[str, Any], Any]], alone: bool
    ) -> list[dict[str, Any]]:
        """Call `number` (from 1 on) of a stream: put its batches in order, wait until all are answered.

        Args: a batch is (metadata as in cluster/protocol.py, buffer of a PUT_SCHEMA batch). `alone`: the producer
        sends nothing before the answer.
        Returns: an ack a batch, in order, as in cluster/protocol.py.
        Raises: Unavailable when the stream is not known (any more) or a call before this one is missing; nothing of
        this call was stored then, and the stream takes no more.
        """
        turn = self._take_turn(stream, number)
        try:
            results = [
                (meta, self._put(meta, data, alone and len(batches) == 1)) for meta, data in batches
            ]
        finally:
            with self._changed:
                turn.next += 1
                self._changed.notify_all()
        return [_ack(meta, result) for meta, result in results]

    def _take_turn(self, stream: str, number: int) -> _Stream:
        with self._changed:
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
            return self._backend.put(_put_request(meta, data), alone=alone)
        except RayMQError as error:
            return error
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            return Rejected(f"bad put: {error!r}", field="metadata", limit="cluster/protocol.py")
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
        with self._changed:
            self._reading += 1
            crowded = self._reading > CROWD
        try:
            limit_ms = CROWDED_WAIT_MS if crowded else READ_WAIT_MS_MAX
            request = FetchRequest(
                topic,
                offsets,
                min(max_bytes, FETCH_BYTES_MAX),
                max_records,
                min(wait_ms, limit_ms),
            )
            return [_slice(part) for part in self._backend.fetch(request)]
        finally:
            with self._changed:
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


def _put_request(meta: dict[str, Any], data: Any) -> PutRequest:
    acks = meta.get("acks", "quorum")
    if acks not in ("quorum", "leader"):
        raise Rejected(f"acks is {acks!r}", field="acks", limit="quorum, leader")
    return PutRequest(
        str(meta["topic"]),
        int(meta["queue"]),
        pa.ipc.read_record_batch(data, PUT_SCHEMA),
        meta.get("pid"),
        int(meta.get("epoch", 0)),
        int(meta.get("seq", 0)),
        acks,
    )


def _ack(meta: dict[str, Any], result: PutTicket | RayMQError) -> dict[str, Any]:
    number = meta.get("id", 0)
    try:
        if isinstance(result, RayMQError):
            raise result
        return {"id": number, **result.wait()._asdict()}
    except RayMQError as error:
        return {"id": number, "error": to_wire(error)}


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
