"""The client's side of Arrow Flight: one connection per replica, with streams to put and to fetch. No Ray."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from raymq.actors.api import fetches, leases
from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.puts import unpack_acks
from raymq.actors.protocol import flight_messages, tls
from raymq.actors.protocol.column_puts import pack_put
from raymq.actors.protocol.grpc_polling import read_in_waiting_threads
from raymq.actors.protocol.small_puts import SmallPut, pack_puts
from raymq.client import forks
from raymq.client.client_thread import check_real_threads
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable, from_wire
from raymq.store.base.files import Files
from raymq.store.base.status import PutStatus
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.requests import FetchRequest, FetchSlice

CALL_TIMEOUT_S = 30.0

#: Without a pool of its own a new client inherits the back-off of earlier clients to the same address. It would not try
#: a restarted server for up to two minutes. Retries would hide broken connections.
#: The kernel ends a connection whose bytes the other side has not taken for 5 s: its process is stopped, or its machine
#: is away. A cancelled stream does not end a write that waits for the socket. Pings are rarer than a server tolerates.
#: gRPC would take a proxy from the environment (http_proxy, https_proxy, grpc_proxy). Token and bodies would go to it
#: in the clear, or no replica would be reached, because proxies seldom reach a cluster's own addresses.
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 600_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]

#: exceptions of a stream or call whose server has ended
BROKEN = (flight.FlightError, pa.ArrowException, OSError, StopIteration)


#: what holds native objects of gRPC
_holders: weakref.WeakSet[ShardConnection | FlightStream] = weakref.WeakSet()


def _keep_natives() -> None:
    """Keep the native objects of the parent for ever, in a forked child.

    gRPC does not survive a fork: a destructor would wait for threads that only the parent has.
    """
    for holder in list(_holders):
        for native in holder.natives:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


os.register_at_fork(after_in_child=_keep_natives)


def translate(error: BaseException, endpoint: str) -> RayMQError:
    """A Flight failure as RayMQError: the server's error, a wrong token, else Unavailable."""
    if isinstance(error, RayMQError):
        return error
    if isinstance(error, flight.FlightUnauthenticatedError):
        return Rejected(f"{endpoint}: {_plain(error)}", field="token", limit="the cluster's token")

    extra = getattr(error, "extra_info", None)
    if extra:
        try:
            return from_wire(flight_messages.unpack(extra))
        except (ValueError, KeyError):
            pass

    if isinstance(error, flight.FlightTimedOutError):
        return DeliveryUnknown(
            f"{endpoint}: no answer in time; the operation may or may not have run",
            status=PutStatus.UNKNOWN_ERROR.value,
        )
    if isinstance(error, StopIteration):
        return Unavailable(f"{endpoint}: the server ended the stream", endpoint=endpoint)

    return tls.failure(_plain(error), endpoint)


def _plain(error: BaseException) -> str:
    """The message without the text that gRPC and Flight add."""
    text = str(error).partition(". Detail: ")[0].partition(" gRPC client debug context")[0]
    text = text.rpartition(", with message: ")[2]
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


class ShardConnection:
    """A connection to one replica. Threads: any; each stream has one sender and one receiver.

    `close` may be called during calls and streams of other threads. These end by themselves, and the last one closes
    the native client: a native client that is closed during a call crashes the process.

    Ports are reused, so with `cluster_id` and `shard` given any other server refuses every call. Nothing is sent before
    the first call. With TLS the server's certificate must be signed by `ca` (PEM), by default by RAY_TLS_CA_CERT, else
    by an authority that the system trusts.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        cluster_id: str | None = None,
        shard: int | None = None,
        *,
        ca: bytes | None = None,
    ) -> None:
        """Raises: Rejected when RAY_TLS_CA_CERT is needed and cannot be used, after a fork, or without real threads."""
        check_real_threads()
        self.endpoint = endpoint
        #: guards the two fields below
        self._lock = threading.Lock()
        #: number of calls and streams that use the native client
        self._users = 0
        self._closed = False
        #: a call got no answer of the replica
        self.is_broken = False
        self._identity = {"cluster_id": cluster_id, "shard": shard}
        self._headers = [(flight_messages.AUTHORIZATION.encode(), flight_messages.bearer(token))]
        location, roots = f"grpc://{endpoint}", None
        if endpoint.startswith(tls.TLS_PREFIX):
            location, roots = f"grpc+{endpoint}", ca or tls.trusted(os.environ, Files())
        forks.check_connects()
        read_in_waiting_threads()
        self._client = flight.FlightClient(location, tls_root_certs=roots, generic_options=_OPTIONS)
        self._forks = forks.count
        _holders.add(self)

    @property
    def natives(self) -> tuple[object, ...]:
        """The native objects."""
        return (self._client,)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and the connection that of its parent: nothing native may be called."""
        return forks.count != self._forks

    def call(
        self, op: str, args: Mapping[str, object] | None = None, timeout: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Run an administrative operation. `timeout` is in seconds.

        Raises: the shard's error; Unavailable when it cannot be reached; DeliveryUnknown when it does not answer in
        time.
        """
        self.acquire()
        try:
            return self.call_held(op, args, timeout)
        finally:
            self.release()

    def call_held(
        self, op: str, args: Mapping[str, object] | None, timeout: float
    ) -> dict[str, Any]:
        """`call`, for a caller that holds the connection by `acquire`: another thread may have closed it since."""
        body = flight_messages.pack({**self._identity, "args": args or {}})
        options = flight.FlightCallOptions(timeout=timeout, headers=self._headers)
        try:
            results = list(self._client.do_action(flight.Action(op, body), options=options))
        except BROKEN as error:
            self.is_broken = True
            raise translate(error, self.endpoint) from error

        answer = flight_messages.unpack(results[0].body)
        if "error" in answer:
            raise from_wire(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def put_stream(self) -> FlightPutStream:
        """A stream for batches of PUT_SCHEMA. Raises: Unavailable."""
        return FlightPutStream(*self.exchange(flight_messages.PUT), self)

    def fetch_stream(self) -> FlightFetchStream:
        """A stream for reads. Raises: Unavailable."""
        return FlightFetchStream(*self.exchange(flight_messages.FETCH), self)

    def exchange(self, op: str) -> tuple[object, object]:
        """The writer and the reader of a new stream, which releases this connection at its end. Raises: Unavailable."""
        descriptor = flight.FlightDescriptor.for_command(
            flight_messages.pack({"op": op, **self._identity})
        )
        options = flight.FlightCallOptions(headers=self._headers)
        self.acquire()
        try:
            writer, reader = self._client.do_exchange(descriptor, options=options)
        except BROKEN as error:
            self.release()
            raise translate(error, self.endpoint) from error
        return writer, reader

    def acquire(self) -> None:
        """Keep the native client open until `release`.

        Raises: Unavailable when the connection is closed; Rejected in a forked child.
        """
        if self.is_inherited:
            forks.check_connects()
        with self._lock:
            if self._closed:
                raise Unavailable(
                    f"{self.endpoint}: the connection is closed", endpoint=self.endpoint
                )
            self._users += 1

    def release(self) -> None:
        """Note the end of a call or stream, or of another use. Callers: once after each `acquire`."""
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._client.close()

    def close(self) -> None:
        """Refuse new calls and streams. The last one under way closes the native client."""
        if self.is_inherited:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = not self._users
        if idle:
            self._client.close()


class FlightStream:
    """The base of the streams. Any thread may call `abort`, only the owner the rest."""

    schema = PUT_SCHEMA

    def __init__(
        self,
        writer: flight.MetadataRecordBatchWriter,
        reader: flight.MetadataRecordBatchReader,
        connection: ShardConnection,
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._connection = connection
        self._closed = False
        _holders.add(self)
        try:
            writer.begin(self.schema)
        except BROKEN as error:
            FlightStream.close(self)
            raise translate(error, connection.endpoint) from error

    @property
    def natives(self) -> tuple[object, ...]:
        """The native objects."""
        return self._writer, self._reader

    def _write(self, metadata: bytes, batch: pa.RecordBatch | None = None) -> None:
        try:
            if batch is None:
                self._writer.write_metadata(metadata)
            else:
                self._writer.write_with_metadata(batch, metadata)
        except BROKEN as error:
            raise translate(error, self._connection.endpoint) from error

    def _read(self) -> Any:
        try:
            chunk = self._reader.read_chunk()
        except BROKEN as error:
            raise translate(error, self._connection.endpoint) from error
        if chunk.data is None and bytes(chunk.app_metadata) == flight_messages.GOAWAY:
            raise Unavailable(
                f"{self._connection.endpoint}: the server stops", endpoint=self._connection.endpoint
            )
        return chunk

    def opened(self) -> None:
        """Wait until the server has accepted the stream. Raises: Unavailable; Rejected when refused."""
        try:
            _ = self._reader.schema
        except BROKEN as error:
            raise translate(error, self._connection.endpoint) from error

    def abort(self) -> None:
        """Break the stream: threads that read or write it get Unavailable."""
        if not self._connection.is_inherited:
            self._reader.cancel()

    def close(self) -> None:
        """End the stream at once, even with unanswered requests. It must not be used afterwards."""
        if self._closed or self._connection.is_inherited:
            return
        self._closed = True
        self._reader.cancel()
        try:
            self._writer.close()
        except BROKEN:
            # A broken or cancelled stream needs no closing.
            pass
        finally:
            self._connection.release()


class FlightPutStream(FlightStream):
    """Batches out, acks in, in order."""

    schema = PUT_SCHEMA
    #: bytes that may be unanswered, as the server said, or None before it has
    stream_limit_bytes: int | None = None

    def send(self, meta: dict[str, object], batch: pa.RecordBatch) -> None:
        """Send one batch. Raises: Unavailable when the stream broke."""
        self._write(*pack_put(meta, batch))

    def send_small(self, puts: list[SmallPut]) -> None:
        """Send small batches in one message. Raises: Unavailable when the stream broke."""
        self._write(pack_puts(puts))

    def receive(self) -> list[dict[str, Any]]:
        """Wait for the next acks. Raises: Unavailable (the stream broke), Rejected (it was refused)."""
        acks, window = unpack_acks(self._read().app_metadata)
        if window is not None:
            self.stream_limit_bytes = window
        return acks


class FlightFetchStream(FlightStream):
    """Requests out, batches of raw records in, one request at a time: fetches, and leases of messages."""

    schema = flight_messages.FETCH_SCHEMA
    _number = 0

    def lease(self, call: LeaseCall) -> LeasedMessages:
        """Lease messages. Waits up to `wait_ms` at the server while there are none.

        Raises: the server's error if it refused the call; Unavailable when the stream broke.
        """
        self._number += 1
        self._write(flight_messages.pack({"id": self._number, "lease": leases.pack_call(call)}))
        chunk = self._read()
        try:
            head, records = flight_messages.unpack_records(chunk.app_metadata, chunk.data)
            if "error" not in head:
                return leases.unpack_leased(head, records)
        except (KeyError, TypeError, ValueError, Rejected) as error:
            raise Unavailable(f"not an answer of a shard: {error}", field="stream") from error
        raise from_wire(head["error"])

    def settle(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Operation `settle`, whose answer takes less time and CPU here than that of `ShardConnection.call`.

        Raises: as `lease`.
        """
        self._number += 1
        self._write(flight_messages.pack({"id": self._number, "settle": arguments}))
        chunk = self._read()
        try:
            answer = flight_messages.unpack(chunk.app_metadata)
            if "error" not in answer:
                result: dict[str, Any] = answer["result"]
                return result
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"not an answer of a shard: {error}", field="stream") from error
        raise from_wire(answer["error"])

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read queues. Waits up to `wait_ms` at the server while all are empty.

        Returns: a FetchSlice for each queue that has records or an error (OffsetOutOfRange...).
        Raises: the server's error if it refused the request; Unavailable when the stream broke.
        """
        self._number += 1
        message = {"id": self._number, **fetches.pack_request(request)}
        self._write(flight_messages.pack(message))

        found: list[FetchSlice] = []
        while True:
            chunk = self._read()
            try:
                meta, records = flight_messages.unpack_records(chunk.app_metadata, chunk.data)
            except (KeyError, TypeError, ValueError) as error:
                raise Unavailable(f"not an answer of a shard: {error}", field="stream") from error
            if "queue" in meta:
                found.append(fetches.unpack_slice(meta, records))
            elif not meta.get("end"):
                raise from_wire(meta["error"])
            if meta.get("end"):
                return found
