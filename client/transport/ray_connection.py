"""A client's connection to a shard through its Ray actor, with the methods of `flight_client.ShardConnection`.

For clients that reach only Ray's port (`ray://`). It has no generators or sockets. Put streams are pipelined actor
calls, and long polls are calls that wait a short time each. Only this module of the clients' side imports Ray. It is
loaded only if transport="ray" is used.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any

import pyarrow as pa
import ray
import ray.exceptions
import ray.util.client

from raymq.actors.api import fetches, leases
from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.puts import unpack_acks
from raymq.actors.protocol.flight_messages import FETCH_SCHEMA
from raymq.actors.protocol.ray_calls import READ_WAIT_MS_MAX, pack_call
from raymq.actors.protocol.small_puts import SmallPut
from raymq.client.client_thread import check_real_threads
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    DeliveryUnknown,
    NotReached,
    RayMQError,
    Rejected,
    Unavailable,
)
from raymq.store.base.status import PutStatus
from raymq.store.records.record import SmallBatch, batch_bytes
from raymq.store.records.requests import FetchRequest, FetchSlice

from .actor_names import NAMESPACE
from .flight_client import CALL_TIMEOUT_S

#: concurrent calls of one put stream: at the disk, on the way to it and on the way back
CALLS_MAX = 4
#: batches that are ready share one call up to this size
CALL_BYTES = 4 << 20
#: the calling thread waits directly for this long, and `abort` cannot wake it. After that it waits by a future, whose
#: callback runs in another thread and costs 0.15 ms
DIRECT_S = 0.05


def translate(error: BaseException, name: str) -> RayMQError:
    """A failed call as RayMQError: the shard's error, else Unavailable.

    An interrupted call may have run. ShardSender treats a broken stream as unknown, and every operation of `call` may
    be repeated.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, RayMQError):
            return cause
        return Unavailable(f"{name}: {cause!r}", actor=name)
    if isinstance(error, RayMQError):
        return error
    lines = str(error).strip().splitlines()
    return Unavailable(f"{name}: {lines[0] if lines else type(error).__name__}", actor=name)


class RayShardConnection:
    """A connection to one shard by its actor's name. Threads: any; a stream has one sender and one receiver."""

    def __init__(self, name: str, cluster_id: str) -> None:
        """Raises: Rejected without real threads, or when this process is not connected to a Ray; Unavailable when the
        actor does not run.
        """
        check_real_threads()
        if not ray.is_initialized():
            raise Rejected(
                "this process is not connected to Ray, by which it should reach the shards: call "
                "ray.init(address=...) first, or connect with transport='flight'",
                field="transport",
                limit="flight",
            )
        self.endpoint = name
        self._cluster_id = cluster_id
        try:
            self._actor = ray.get_actor(name, namespace=NAMESPACE)
        except Exception as error:
            # Ray Client raises errors of many types, gRPC's own among them.
            found = translate(error, name)
            raise NotReached(found.message, **found.fields) from error

    def call(
        self, op: str, args: Mapping[str, object] | None = None, timeout: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Run an administrative operation. `timeout` is in seconds. Raises: like `ShardConnection.call`."""
        try:
            reference: Any = self._actor.call.remote(self._cluster_id, op, args or {})
            result: dict[str, Any] = ray.get(reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise DeliveryUnknown(
                f"{self.endpoint}: no answer in time; the operation may or may not have run",
                status=PutStatus.UNKNOWN_ERROR.value,
            ) from error
        except Exception as error:
            raise translate(error, self.endpoint) from error
        return result

    def begin(self, op: str, args: Mapping[str, object]) -> Future[dict[str, Any]]:
        """Begin an administrative operation and return its future, which raises like `call`. Raises: Unavailable."""
        answer: Future[dict[str, Any]] = Future()

        def finish(done: Future[dict[str, object]]) -> None:
            try:
                answer.set_result(done.result())
            except Exception as error:
                answer.set_exception(translate(error, self.endpoint))

        try:
            reference: Any = self._actor.call.remote(self._cluster_id, op, args)
            reference.future().add_done_callback(finish)
        except Exception as error:
            raise translate(error, self.endpoint) from error
        return answer

    def put_stream(self) -> RayPutStream:
        """A stream for batches of PUT_SCHEMA. Nothing is sent yet."""
        return RayPutStream(self._actor, self.endpoint, self._cluster_id)

    def fetch_stream(self) -> RayFetchStream:
        """A stream for reads. Nothing is sent yet."""
        return RayFetchStream(self._actor, self.endpoint, self._cluster_id)

    def close(self) -> None:
        """Do nothing: the connection holds nothing open, and Ray's own connections stay."""


class _RayStream:
    """The base of the streams. Any thread may call `abort`."""

    def __init__(self, actor: Any, name: str, cluster_id: str) -> None:
        self._actor = actor
        self._name = name
        self._cluster_id = cluster_id
        #: whether the stream is broken. `_aborted` wakes threads that wait for an answer
        self._left = False
        self._aborted: Future[None] = Future()

    def _result(self, reference: Any) -> Any:
        """The answer of a call. Raises: the call's error; Unavailable when the stream breaks before it."""
        try:
            # Not with Ray Client: there each try costs a round trip.
            if type(reference) is ray.ObjectRef:
                try:
                    return ray.get(reference, timeout=DIRECT_S)
                except ray.exceptions.GetTimeoutError:
                    self._check()

            answer = reference.future()
            wait((answer, self._aborted), CALL_TIMEOUT_S, FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        except Exception as error:
            raise translate(error, self._name) from error

        why = "the stream was closed" if self._left else f"no answer for {CALL_TIMEOUT_S:g} s"
        raise Unavailable(f"{self._name}: {why}", actor=self._name)

    def _check(self) -> None:
        if self._left:
            raise Unavailable(f"{self._name}: the stream was closed", actor=self._name)

    def abort(self) -> None:
        """Break the stream: threads that read or write it get Unavailable. Calls under way may still be done."""
        self._left = True
        # The future may be finished already.
        with contextlib.suppress(InvalidStateError):
            self._aborted.set_result(None)

    def close(self) -> None:
        """End the stream at once, answered or not. It must not be used afterwards."""
        self.abort()


class RayPutStream(_RayStream):
    """Batches out, acks in, in order: at most CALLS_MAX calls under way, later batches wait here for the next call."""

    #: the shard sets no limit: `CALLS_MAX` bounds the calls under way
    stream_limit_bytes: int | None = None

    def __init__(self, actor: Any, name: str, cluster_id: str) -> None:
        super().__init__(actor, name, cluster_id)
        #: calls under way, oldest first; None wakes the receiver of a broken stream
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: guards everything below
        self._lock = threading.Lock()
        #: reference of the latest answered call: Ray releases it while the next answer is awaited
        self._answered: Any = None
        #: the actor's method, looked up once: each lookup makes a new object
        self._append: Any = None
        #: the stream's name at the shard; empty before the stream is open
        self._stream = ""
        self._number = 0
        self._under_way = 0
        self._waiting: deque[tuple[dict[str, Any], pa.RecordBatch | SmallBatch]] = deque()

    def opened(self) -> None:
        """Wait until the shard has accepted the stream. Raises: Unavailable; Rejected when refused."""
        try:
            self._append = self._actor.append
            reference = self._actor.open_stream.remote(self._cluster_id, _node_ip())
        except Exception as error:
            raise translate(error, self._name) from error
        stream: str = self._result(reference)
        with self._lock:
            self._stream = stream

    def send(self, meta: dict[str, object], batch: pa.RecordBatch) -> None:
        """Send one batch. Raises: Unavailable when the stream broke."""
        self._send([(meta, batch)])

    def send_small(self, puts: list[SmallPut]) -> None:
        """Send small batches, in one call if they fit. Raises: Unavailable when the stream broke."""
        self._send(puts)

    def _send(self, puts: Sequence[tuple[dict[str, object], pa.RecordBatch | SmallBatch]]) -> None:
        self._check()
        if not self._stream:
            self.opened()
        with self._lock:
            self._waiting += puts
            self._submit()

    def _submit(self) -> None:
        """Make calls of the waiting batches. Needs the lock."""
        while self._waiting and self._under_way < CALLS_MAX:
            items = [self._waiting.popleft()]
            size = batch_bytes(items[0][1]) if self._waiting else 0
            while self._waiting and (size := size + batch_bytes(self._waiting[0][1])) <= CALL_BYTES:
                items.append(self._waiting.popleft())

            self._number += 1
            try:
                reference = self._append.remote(*pack_call(self._stream, self._number, items))
            except Exception as error:
                # A number is missing now: the stream cannot be used any more.
                self.abort()
                raise translate(error, self._name) from error

            self._under_way += 1
            self._calls.put(reference)

    def receive(self) -> list[dict[str, Any]]:
        """Wait for the acks of the next call. Raises: Unavailable (the stream broke), Rejected (it was refused)."""
        reference = self._calls.get()
        if reference is None:
            self._calls.put(None)
            self._check()
        self._answered = reference
        acks, _ = unpack_acks(self._result(reference))
        with self._lock:
            self._under_way -= 1
            if self._waiting:
                self._submit()
        return acks

    def abort(self) -> None:
        """Like `_RayStream.abort`."""
        super().abort()
        self._calls.put(None)


def _node_ip() -> str | None:
    """The IP address of the node that this process runs on; None with Ray Client, whose calls another process makes."""
    util: Any = ray.util
    return None if util.client.ray.is_connected() else str(util.get_node_ip_address())


class RayFetchStream(_RayStream):
    """Reads and leases, one request at a time."""

    def lease(self, call: LeaseCall) -> LeasedMessages:
        """Like `flight_client.FlightFetchStream.lease`. A long wait is several calls."""
        clock = Clock()
        deadline_ms = clock.monotonic_ms() + call.wait_ms
        while True:
            self._check()
            left = max(0, deadline_ms - clock.monotonic_ms())
            short = call._replace(wait_ms=min(left, READ_WAIT_MS_MAX))
            try:
                reference = self._actor.lease.remote(self._cluster_id, leases.pack_call(short))
            except Exception as error:
                raise translate(error, self._name) from error
            head, data = self._result(reference)
            found = leases.unpack_leased(head, _records(data))
            if found.number or clock.monotonic_ms() >= deadline_ms:
                return found

    def settle(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Like `flight_client.FlightFetchStream.settle`."""
        self._check()
        try:
            reference = self._actor.call.remote(self._cluster_id, "settle", arguments)
        except Exception as error:
            raise translate(error, self._name) from error
        result: dict[str, Any] = self._result(reference)
        return result

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Like `flight_client.FlightFetchStream.fetch`. A long wait is several calls."""
        clock = Clock()
        deadline_ms = clock.monotonic_ms() + request.wait_ms
        while True:
            self._check()
            left = max(0, deadline_ms - clock.monotonic_ms())
            short = request._replace(wait_ms=min(left, READ_WAIT_MS_MAX))
            try:
                reference = self._actor.read.remote(self._cluster_id, fetches.pack_request(short))
            except Exception as error:
                raise translate(error, self._name) from error
            found = self._result(reference)
            if found or clock.monotonic_ms() >= deadline_ms:
                return [_fetched(*part) for part in found]


def _fetched(head: dict[str, object], data: pa.Buffer | None) -> FetchSlice:
    return fetches.unpack_slice(head, _records(data))


def _records(data: pa.Buffer | None) -> pa.Array | None:
    return None if data is None else pa.ipc.read_record_batch(data, FETCH_SCHEMA).column(0)
