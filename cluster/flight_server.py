"""The Flight server of a replica: puts, fetches and replication as exchange streams, everything else as actions.

One reader thread (the handler) and one writer thread a put stream; bytes in flight are bounded, so a slow disk
slows its producers down instead of filling memory (design D1).
"""

from __future__ import annotations

import hmac
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from raymq.actors.shard_api import PutTicket, ShardBackend
from raymq.store.errors import Bug, RayMQError, Rejected, to_wire
from raymq.store.put import FetchRequest, PutRequest
from raymq.store.record import PUT_SCHEMA

from . import protocol

#: bytes of batches that one stream may have unanswered
IN_FLIGHT_BYTES_MAX = 64 << 20
#: acks sent in one message at most
ACKS_MAX = 256


class Server(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one backend."""

    def __init__(self, backend: ShardBackend, host: str, port: int, token: str) -> None:
        super().__init__(
            f"grpc://{host}:{port}",
            middleware={"auth": _AuthFactory(token)},
        )
        self._backend = backend

    def close(self) -> None:
        """Stop accepting at once. Streams that clients hold open end with them or with this process."""
        # shutdown() waits for open streams, and a consumer may keep one open for ever.
        threading.Thread(target=self.shutdown, name="raymq-flight-stop", daemon=True).start()

    # --- actions ----------------------------------------------------------------------------------------------

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        """An administrative operation: JSON in, {"result"} or {"error"} out."""
        try:
            request = protocol.unpack(action.body)
            self._check_identity(request)
            answer = {"result": self._backend.call(action.type, request.get("args", {}))}
        except RayMQError as error:
            answer = {"error": to_wire(error)}
        except (TypeError, ValueError, KeyError) as error:
            wrong = Rejected(f"{action.type}: bad arguments: {error}", field="args", limit="see docs")
            answer = {"error": to_wire(wrong)}
        yield flight.Result(protocol.pack(answer))

    def _check_identity(self, request: dict[str, Any]) -> None:
        mine = self._backend.identity()
        for name in ("cluster_id", "shard"):
            want = request.get(name)
            if want is not None and want != mine[name]:
                raise Rejected(
                    f"this is {name} {mine[name]!r}, not {want!r}: the address belongs to another shard or cluster",
                    field=name,
                    limit=mine[name],
                )

    # --- streams ----------------------------------------------------------------------------------------------

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Dispatch a stream by its descriptor."""
        opening = protocol.unpack(descriptor.command)
        try:
            self._check_identity(opening)
        except RayMQError as error:
            raise flight.FlightServerError(str(error), extra_info=protocol.pack(to_wire(error))) from error
        op = opening.get("op")
        if op == protocol.PUT:
            _PutStream(self._backend, reader, writer).run()
        elif op == protocol.FETCH:
            self._fetch(reader, writer)
        elif op == protocol.REPLICATE:
            self._replicate(reader, writer)
        else:
            raise flight.FlightServerError(f"unknown stream {op!r}")

    def _fetch(self, reader: Any, writer: Any) -> None:
        writer.begin(protocol.FETCH_SCHEMA)
        for chunk in _chunks(reader):
            request = protocol.unpack(chunk.app_metadata)
            number = request["id"]
            try:
                slices = self._backend.fetch(
                    FetchRequest(
                        request["topic"],
                        {int(q): int(o) for q, o in request["offsets"].items()},
                        request["max_bytes"],
                        request["max_records"],
                        request["wait_ms"],
                    )
                )
            except RayMQError as error:
                writer.write_metadata(protocol.pack({"id": number, "error": to_wire(error)}))
                continue
            for part in slices:
                head = {"id": number, "queue": part.queue_id}
                if part.error is not None:
                    writer.write_metadata(protocol.pack({**head, "error": to_wire(part.error)}))
                    continue
                head |= {
                    "first_offset": part.first_offset,
                    "next_offset": part.next_offset,
                    "min_offset": part.min_offset,
                    "max_offset": part.max_offset,
                }
                batch = pa.record_batch([part.records], schema=protocol.FETCH_SCHEMA)
                writer.write_with_metadata(batch, protocol.pack(head))
            writer.write_metadata(protocol.pack({"id": number, "end": True}))

    def _replicate(self, reader: Any, writer: Any) -> None:
        writer.begin(protocol.FRAME_SCHEMA)

        def frames() -> Iterator[tuple[bytes, Any]]:
            for chunk in _chunks(reader):
                yield bytes(chunk.app_metadata), protocol.frame_body(chunk.data)

        def send(header: bytes, body: Any) -> None:
            if body is None:
                writer.write_metadata(header)
            else:
                writer.write_with_metadata(protocol.frame_batch(body), header)

        try:
            self._backend.replicate(frames(), send)
        except RayMQError as error:
            raise flight.FlightServerError(str(error), extra_info=protocol.pack(to_wire(error))) from error


def _chunks(reader: Any) -> Iterator[Any]:
    while True:
        try:
            yield reader.read_chunk()
        except StopIteration:
            return


class _PutStream:
    """One producer's stream: batches in, acks out in the same order."""

    def __init__(self, backend: ShardBackend, reader: Any, writer: Any) -> None:
        self._backend = backend
        self._reader = reader
        self._writer = writer
        #: (request id, ticket or error, bytes); None ends the writer
        self._pending: queue.SimpleQueue[tuple[int, PutTicket | RayMQError, int] | None] = (
            queue.SimpleQueue()
        )
        self._in_flight = 0
        self._room = threading.Condition()
        self._broken: Exception | None = None

    def run(self) -> None:
        """Read until the producer is done; every batch read is answered before this returns."""
        self._writer.begin(protocol.FETCH_SCHEMA)
        answers = threading.Thread(target=self._write, name="raymq-put-acks", daemon=True)
        answers.start()
        try:
            for chunk in _chunks(self._reader):
                self._put(chunk)
                if self._broken is not None:
                    break
        finally:
            self._pending.put(None)
            answers.join()

    def _put(self, chunk: Any) -> None:
        meta = protocol.unpack(chunk.app_metadata)
        batch = chunk.data
        size = 0 if batch is None else batch.nbytes
        with self._room:
            self._room.wait_for(lambda: self._in_flight <= IN_FLIGHT_BYTES_MAX or self._broken)
            self._in_flight += size
        answer: PutTicket | RayMQError
        try:
            if batch is None:
                raise Rejected("the message has no rows", field="batch", limit="a record batch")
            answer = self._backend.put(
                PutRequest(
                    meta["topic"],
                    meta["queue"],
                    batch,
                    meta.get("pid"),
                    meta.get("epoch", 0),
                    meta.get("seq", 0),
                    meta.get("acks", "quorum"),
                )
            )
        except RayMQError as error:
            answer = error
        except (KeyError, TypeError, ValueError) as error:
            answer = Rejected(f"bad put metadata: {error!r}", field="metadata", limit="see docs/wire.md")
        self._pending.put((meta.get("id", 0), answer, size))

    def _write(self) -> None:
        ended = False
        while not ended:
            item = self._pending.get()
            if item is None:
                return
            acks: list[dict[str, Any]] = []
            size = 0
            while True:
                acks.append(self._ack(item[0], item[1]))
                size += item[2]
                # Answers that are ready ride along; nobody waits for later ones.
                if len(acks) >= ACKS_MAX or self._pending.empty():
                    break
                following = self._pending.get()
                if following is None:
                    ended = True
                    break
                ticket = following[1]
                if isinstance(ticket, PutTicket) and not ticket.done:
                    self._send(acks, size)
                    acks, size = [], 0
                item = following
            self._send(acks, size)

    def _ack(self, number: int, answer: PutTicket | RayMQError) -> dict[str, Any]:
        try:
            if isinstance(answer, RayMQError):
                raise answer
            outcome = answer.wait()
        except RayMQError as error:
            return {"id": number, "error": to_wire(error)}
        except Exception as error:
            return {"id": number, "error": to_wire(Bug(f"put: {error!r}"))}
        return {"id": number, **outcome._asdict()}

    def _send(self, acks: list[dict[str, Any]], size: int) -> None:
        if acks and self._broken is None:
            try:
                self._writer.write_metadata(protocol.pack({"acks": acks}))
            except Exception as error:
                # The producer is gone; what it sent stays stored, it will ask again with the same sequences.
                self._broken = error
        with self._room:
            self._in_flight -= size
            self._room.notify_all()


class _AuthFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without the cluster's token."""

    def __init__(self, token: str) -> None:
        self._want = protocol.bearer(token)

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        """Raises: FlightUnauthenticatedError."""
        for value in headers.get(protocol.AUTHORIZATION, []):
            have = value if isinstance(value, bytes) else value.encode()
            if hmac.compare_digest(have, self._want):
                return
            raise flight.FlightUnauthenticatedError(
                "wrong token: use the cluster's own (file `token` in its data directory, or RAYMQ_TOKEN)"
            )
        raise flight.FlightUnauthenticatedError(
            "no token: give token=... or set RAYMQ_TOKEN (file `token` in the cluster's data directory)"
        )


def serve(backend: ShardBackend, *, host: str, port: int, token: str) -> Server:
    """Serve a backend at host:port (0: any free port). Close it with `.close()`; `.port` tells the port."""
    return Server(backend, host, port, token)


__all__ = ["PUT_SCHEMA", "Server", "serve"]
