"""The Flight server of a replica: put, fetch and replication streams, and operations as actions.

The put stream is in put_stream.py.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight

from raymq.actors.api import fetches, leases
from raymq.actors.api.held_fetch import HeldFetch
from raymq.actors.api.shard_api import ShardBackend
from raymq.actors.protocol import flight_messages
from raymq.actors.protocol import tls as tls_files
from raymq.actors.protocol.grpc_polling import read_in_waiting_threads
from raymq.store.base.clock import Clock
from raymq.store.base.errors import AnotherShard, RayMQError, Rejected, Unavailable, to_wire
from raymq.store.base.files import Files
from raymq.store.records.requests import FetchRequest, FetchSlice

from .call_flood import CallFlood
from .put_stream import GONE, PutStreamServer, chunks
from .receive_memory import ReceiveMemory

#: how long one fetch may wait. Longer waits are cut
FETCH_WAIT_MS_MAX = 60_000
#: how soon a waiting fetch notices that its client has left
LEFT_CHECK_MS = 250
#: how long `close` waits for clients to end their streams
CLOSE_TIMEOUT_S = 2.0
#: ... and then for gRPC, which waits for idle connections, too
ANSWERS_TIMEOUT_S = 0.25


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one backend. Made by `serve`."""

    def __init__(
        self,
        backend: ShardBackend,
        host: str,
        port: int,
        token: str,
        tls: bool = False,
        on_bound: Callable[[int], None] | None = None,
    ) -> None:
        """See `serve`."""
        self._backend = backend
        self._memory = ReceiveMemory()
        self._stop_notices: set[Callable[[], None]] = set()
        self._lock = threading.Lock()
        #: streams and operations that run; notified when there are none
        self._running = 0
        self._is_quiet = threading.Condition(self._lock)
        self._stopping = False
        #: `on_bound` has returned
        self._admits = threading.Event()

        identity = tls_files.server_identity(os.environ, Files()) if tls else None
        read_in_waiting_threads()
        super().__init__(
            f"{'grpc' if identity is None else 'grpc+tls'}://{host}:{port}",
            tls_certificates=None if identity is None else [identity],
            middleware={"auth": _Authorization(token)},
        )
        # Calls arrive from here on, and wait.
        try:
            if on_bound is not None:
                on_bound(self.port)
        except BaseException:
            self._admits.set()
            self.shutdown()
            raise
        self._admits.set()

    def close(self) -> None:
        """Stop listening at once, send GOAWAY on every stream, wait a short while for their ends.

        Callers: one thread, not of a stream. A client that does not end its stream keeps a thread of this process,
        which is about to end. One whose connection is idle hears of the end with its next call: nothing of it is
        waited for.
        """
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._memory.close()
            stop_notices = list(self._stop_notices)
        # Flight's shutdown stops listening, then waits for streams without a limit.
        stopper = threading.Thread(target=self.shutdown, name="raymq-flight-stop", daemon=True)
        stopper.start()
        for send_goaway in stop_notices:
            send_goaway()
        with self._is_quiet:
            self._is_quiet.wait_for(lambda: not self._running, CLOSE_TIMEOUT_S)
        # Their last answers leave meanwhile, and the port comes free.
        stopper.join(ANSWERS_TIMEOUT_S)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """While a stream or an operation runs, `close` waits for it."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._is_quiet:
                self._running -= 1
                self._is_quiet.notify_all()

    @contextlib.contextmanager
    def _notify_on_stop(self, send_goaway: Callable[[], None]) -> Iterator[None]:
        """While a stream runs, `close` can send GOAWAY on it."""
        with self._lock:
            self._stop_notices.add(send_goaway)
            stopping = self._stopping
        try:
            if stopping:
                send_goaway()
            yield
        finally:
            with self._lock:
                self._stop_notices.discard(send_goaway)

    # --- actions ----------------------------------------------------------------------------------

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[flight.Result]:
        """Serve one administrative operation: JSON in, {"result"} or {"error"} out."""
        self._admits.wait()
        with self._counted():
            answer = self._answer(action)
        yield flight.Result(flight_messages.pack(answer))

    def _answer(self, action: flight.Action) -> dict[str, object]:
        """The answer to an operation."""
        try:
            request = flight_messages.unpack(action.body)
            self._check_identity(request)
        except RayMQError as error:
            return {"error": to_wire(error)}
        except (TypeError, ValueError, KeyError) as error:
            return {"error": to_wire(_bad_arguments(action.type, error))}
        return self._called(action.type, request.get("args", {}))

    def _called(self, op: str, arguments: dict[str, Any]) -> dict[str, object]:
        """{"result"} or {"error"} of an operation."""
        try:
            return {"result": self._backend.call(op, arguments)}
        except RayMQError as error:
            return {"error": to_wire(error)}
        except (TypeError, ValueError, KeyError) as error:
            return {"error": to_wire(_bad_arguments(op, error))}

    def _check_identity(self, request: dict[str, object]) -> None:
        mine = self._backend.identity()
        for name in ("cluster_id", "shard"):
            want = request.get(name)
            if want is not None and want != mine[name]:
                raise AnotherShard(
                    f"this is {name} {mine[name]!r}, not {want!r}: the address belongs to another "
                    "shard or cluster now",
                    field=name,
                    limit=mine[name],
                )

    # --- streams ----------------------------------------------------------------------------------

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: Any,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Serve a stream until its client ends it. Errors are sent as errors of errors.py."""
        self._admits.wait()
        with self._counted():
            self._serve(context, descriptor, reader, writer)

    def _serve(
        self,
        context: flight.ServerCallContext,
        descriptor: Any,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        try:
            opening = flight_messages.unpack(descriptor.command)
            self._check_identity(opening)
            op = opening.get("op")

            if op == flight_messages.PUT:
                put_stream = PutStreamServer(
                    self._backend, reader, writer, self._memory, born_host_of(context.peer())
                )
                with self._notify_on_stop(put_stream.goaway):
                    put_stream.run()
            elif op == flight_messages.FETCH:
                self._fetch(context, reader, writer)
            elif op == flight_messages.REPLICATE:
                self._replicate(reader, writer)
            else:
                raise Rejected(f"unknown stream {op!r}", field="op", limit="put, fetch, replicate")
        except RayMQError as error:
            raise _flight_error(error) from error
        except (TypeError, ValueError, KeyError) as error:
            wrong = Rejected(
                f"bad stream: {error!r}", field="metadata", limit="raymq.actors.protocol"
            )
            raise _flight_error(wrong) from error

    def _fetch(
        self,
        context: flight.ServerCallContext,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        writer.begin(flight_messages.FETCH_SCHEMA)
        with _LockedSend(writer) as send, self._notify_on_stop(send.goaway):
            for chunk in chunks(reader):
                request = flight_messages.unpack(chunk.app_metadata)
                number = request.get("id", 0)
                try:
                    if "lease" in request:
                        self._lease(context, send, number, request["lease"])
                        continue
                    if "settle" in request:
                        answer = self._called("settle", request["settle"])
                        send(flight_messages.pack({"id": number, **answer}))
                        continue
                    wanted = fetches.unpack_request(request, wait_limit_ms=FETCH_WAIT_MS_MAX)
                    slices = self._read(context, wanted)
                except RayMQError as error:
                    send(flight_messages.pack({"id": number, "error": to_wire(error)}))
                    continue

                if not slices:
                    send(flight_messages.pack({"id": number, "end": True}))
                for part in slices:
                    self._send_slice(send, number, part, is_last=part is slices[-1])

    def _read(self, context: flight.ServerCallContext, request: FetchRequest) -> list[FetchSlice]:
        """One fetch, whose wait ends early when the client has left or the server stops.

        gRPC tells neither to a thread that waits, so this one looks now and then.
        """
        woken = threading.Event()
        with HeldFetch(self._backend, request, Clock(), woken.set) as held:
            while True:
                woken.clear()
                found = held.poll()
                if found is not None:
                    return found
                while not self._stopping and not context.is_cancelled():
                    left_ms = held.left_ms()
                    if not left_ms or woken.wait(min(left_ms, LEFT_CHECK_MS) / 1000):
                        break
                else:
                    return []

    def _lease(
        self,
        context: flight.ServerCallContext,
        send: _LockedSend,
        number: int,
        fields: dict[str, Any],
    ) -> None:
        """Answer a request for leased messages. Raises: RayMQError."""
        call = leases.unpack_call(fields, wait_limit_ms=FETCH_WAIT_MS_MAX)
        found = self._backend.lease(call, lambda: self._stopping or context.is_cancelled())
        head, records = leases.pack_leased(found)
        head["id"] = number
        if records is None:
            send(flight_messages.pack(head))
        else:
            send(*flight_messages.pack_records(head, records))

    @staticmethod
    def _send_slice(send: _LockedSend, number: int, part: FetchSlice, *, is_last: bool) -> None:
        head, records = fetches.pack_slice(part)
        head |= {"id": number, "end": is_last}
        if records is None:
            send(flight_messages.pack(head))
        else:
            send(*flight_messages.pack_records(head, records))

    def _replicate(
        self, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter
    ) -> None:
        writer.begin(flight_messages.FRAME_SCHEMA)

        def frames() -> Iterator[tuple[bytes, Any]]:
            for chunk in chunks(reader):
                yield flight_messages.unpack_frame(chunk.app_metadata, chunk.data)

        with _LockedSend(writer) as send, self._notify_on_stop(send.goaway):

            def answer(header: bytes, body: object = None) -> None:
                send(*flight_messages.pack_frame(header, body))

            self._backend.replicate(frames(), answer)


def _bad_arguments(op: str, error: Exception) -> Rejected:
    return Rejected(f"{op}: bad arguments: {error}", field="args", limit="the operation's")


def _flight_error(error: RayMQError) -> flight.FlightServerError:
    return flight.FlightServerError(str(error), extra_info=flight_messages.pack(to_wire(error)))


class _LockedSend:
    """Serialises the writes of a stream by its handler, the backend's threads and `close`.

    The native writer is freed when the handler returns, and a later write would crash the process. So all writes are
    made inside a `with` block of this object.
    """

    def __init__(self, writer: flight.MetadataRecordBatchWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def __call__(self, metadata: bytes, batch: pa.RecordBatch | None = None) -> None:
        """Send a message. Raises: Unavailable when the stream has ended."""
        with self._lock:
            if self._writer is None:
                raise Unavailable("the stream has ended", field="stream")
            try:
                if batch is None:
                    self._writer.write_metadata(metadata)
                else:
                    self._writer.write_with_metadata(batch, metadata)
            except GONE as error:
                raise Unavailable(f"the client is gone: {error}", field="stream") from error

    def goaway(self) -> None:
        """Send GOAWAY: the server stops."""
        # The client may have left already.
        with contextlib.suppress(Unavailable):
            self(flight_messages.GOAWAY)

    def __enter__(self) -> _LockedSend:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._writer = None


class _Authorization(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without the cluster's token."""

    def __init__(self, token: str) -> None:
        self._want = flight_messages.bearer(token)
        self._flood = CallFlood()

    def start_call(self, info: object, headers: dict[str, list[Any]]) -> None:
        """Check the token of a call. Raises: FlightUnauthenticatedError."""
        self._flood.note_call()
        values = headers.get(flight_messages.AUTHORIZATION, [])
        if not values:
            raise flight.FlightUnauthenticatedError(
                "no token: pass token=... or set RAYMQ_TOKEN to the content of the file `token` in "
                "the cluster's data directory"
            )
        if len(values) > 1:
            raise flight.FlightUnauthenticatedError(
                f"{len(values)} authorization headers: send one"
            )
        have = values[0] if isinstance(values[0], bytes) else values[0].encode()
        if not hmac.compare_digest(have, self._want):
            raise flight.FlightUnauthenticatedError(
                "wrong token: use the content of the file `token` in the cluster's data directory"
            )


def serve(
    backend: ShardBackend,
    *,
    host: str,
    port: int,
    token: str,
    tls: bool = False,
    on_bound: Callable[[int], None] | None = None,
) -> Server:
    """Serve a backend at host:port (0: any free port, see `.port`). `.close()` ends it.

    With `tls` the certificate comes from Ray's certificate variables (tls.py). `on_bound` is called with the port,
    before the first call is served. Raises: Rejected when the certificates are missing or wrong.
    """
    return Server(backend, host, port, token, tls, on_bound)


def born_host_of(peer: str) -> tuple[str, int] | None:
    """IP and port of a client as gRPC names it, ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5; None for any other name.

    An IPv4 address that arrived at an IPv6 socket is an IPv4 address.
    """
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    # A link-local address ends in the name of an interface.
    ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), int(port)
