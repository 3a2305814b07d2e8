"""Serves a shard to clients that reach only Ray: put streams, reads and operations as calls of its actor.

The calls are described in protocol/ray_calls.py. Ray starts the calls of a concurrency group in any order: it uses
several threads, and large arguments arrive later than small ones. So each call of a put stream waits for its turn.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raymq.actors.api import fetches, leases, puts
from raymq.actors.api.shard_api import ShardBackend
from raymq.actors.protocol.flight_messages import FETCH_SCHEMA
from raymq.actors.protocol.ray_calls import READ_WAIT_MS_MAX, unpack_call
from raymq.store.base import format as fmt
from raymq.store.base.errors import AnotherShard, Rejected, Unavailable
from raymq.store.records.requests import FetchSlice

from .concurrency_groups import GROUPS

#: calls that may wait for their turn: as many threads are left for those whose turn it is
EARLY_MAX = GROUPS["append"] // 2
#: how long a call waits for its predecessor
TURN_WAIT_S = 5.0
#: streams that are remembered. A client whose stream is older than this many others must open a new one
STREAMS_MAX = 4096

#: with more readers each waits only a short time, so that all get their turn: a call costs about a millisecond of CPU
CROWD = GROUPS["read"] * 3 // 4
CROWDED_WAIT_MS = 250


@dataclass
class _PutTurns:
    """The order of one put stream's calls."""

    #: the call whose turn it is
    next: int = 1
    #: (IP, port) of the producer; None: not known
    born_host: tuple[str, int] | None = None
    #: a call was refused or did not come: no later one may overtake it
    broken: bool = False


class RayMethods:
    """The methods over one backend. Any thread may call any of them."""

    def __init__(self, backend: ShardBackend, *, turn_wait_s: float = TURN_WAIT_S) -> None:
        self._backend = backend
        self._turn_wait_s = turn_wait_s
        #: guards the fields below. `_changed` is notified when a turn has come
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: in the order of their last use
        self._streams: OrderedDict[str, _PutTurns] = OrderedDict()
        self._early = 0
        self._reading = 0

    # --- put streams ------------------------------------------------------------------------------

    def open_stream(self, cluster_id: str, node_ip: str | None = None) -> str:
        """A new put stream. Args: `node_ip`: of the producer's node; None: not known.

        Raises: Rejected when this is another cluster, or if that is no IP address.
        """
        self._check_identity(cluster_id)
        born_host = None if node_ip is None else (node_ip, 0)
        if born_host is not None:
            fmt.pack_host(*born_host)
        name = secrets.token_hex(8)
        with self._lock:
            self._streams[name] = _PutTurns(born_host=born_host)
            while len(self._streams) > STREAMS_MAX:
                _, forgotten = self._streams.popitem(last=False)
                forgotten.broken = True
                self._changed.notify_all()
        return name

    def append(self, call: bytes, buffers: list[Any] | None = None) -> bytes:
        """A call of a stream: put its batches together and in order, wait until all are answered.

        Args: `call`, `buffers`: the result of `pack_call`.
        Returns: one ack per batch, in order. `puts.unpack_acks` reads them.
        Raises: Unavailable if the stream is not known (any more) or a call before this one is missing. Nothing of
        this call was stored then, and the stream takes no more.
        """
        stream, number, messages = unpack_call(call, buffers)
        turn = self._take_turn(stream, number)
        try:
            received = [puts.unpack_message(*each, turn.born_host) for each in messages]
            ids = [each for message in received for each in message.ids]
            results = puts.put_all(
                self._backend,
                [request for message in received for request in message.requests],
                producer_waits=bool(received) and received[0].producer_waits,
            )
        finally:
            with self._lock:
                turn.next += 1
                if self._early:
                    self._changed.notify_all()
        return puts.pack_acks(zip(ids, results, strict=True))

    def _take_turn(self, stream: str, number: int) -> _PutTurns:
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

    # --- reads and operations ---------------------------------------------------------------------

    def read(
        self, cluster_id: str, fetch: Mapping[str, object]
    ) -> list[tuple[dict[str, Any], Any]]:
        """Read queues, and wait while all are empty, up to the lower of the fetch's wait and READ_WAIT_MS_MAX.

        Args: `fetch`: `fetches.pack_request`.
        Returns: `fetches.pack_slice` of each queue's answer, its records as the buffer of a FETCH_SCHEMA batch.
        """
        self._check_identity(cluster_id)
        with self._lock:
            self._reading += 1
            crowded = self._reading > CROWD

        try:
            limit_ms = CROWDED_WAIT_MS if crowded else READ_WAIT_MS_MAX
            request = fetches.unpack_request(fetch, wait_limit_ms=limit_ms)
            return [_slice(part) for part in self._backend.fetch(request)]
        except (TypeError, ValueError, KeyError) as error:
            raise Rejected(f"bad read: {error!r}", field="offsets", limit="the method's") from error
        finally:
            with self._lock:
                self._reading -= 1

    def lease(
        self, cluster_id: str, fields: Mapping[str, object]
    ) -> tuple[dict[str, object], object]:
        """Lease messages, and wait while there are none, up to the lower of the call's wait and READ_WAIT_MS_MAX.

        Args: `fields`: `leases.pack_call`.
        Returns: `leases.pack_leased`, its records as the buffer of a FETCH_SCHEMA batch.
        """
        self._check_identity(cluster_id)
        with self._lock:
            self._reading += 1
            crowded = self._reading > CROWD

        try:
            limit_ms = CROWDED_WAIT_MS if crowded else READ_WAIT_MS_MAX
            call = leases.unpack_call(fields, wait_limit_ms=limit_ms)
            head, records = leases.pack_leased(self._backend.lease(call, lambda: False))
            return head, None if records is None else _buffer(records)
        except (TypeError, ValueError, KeyError) as error:
            raise Rejected(f"bad lease: {error!r}", field="lease", limit="the method's") from error
        finally:
            with self._lock:
                self._reading -= 1

    def call(self, cluster_id: str, op: str, args: Mapping[str, object]) -> dict[str, Any]:
        """An administrative operation. Raises: the shard's errors, Rejected for bad arguments."""
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
            raise AnotherShard(
                f"this is cluster_id {mine!r}, not {cluster_id!r}: the name belongs to another cluster now",
                field="cluster_id",
                limit=mine,
            )


def _slice(part: FetchSlice) -> tuple[dict[str, object], object]:
    head, records = fetches.pack_slice(part)
    return head, None if records is None else _buffer(records)


def _buffer(records: pa.Array) -> object:
    return pa.record_batch([records], schema=FETCH_SCHEMA).serialize()
