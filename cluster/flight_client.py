"""The client's end of the wire: one connection a shard, streams for puts, fetches and replication. No Ray."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from raymq.store.errors import RayMQError, Rejected, Unavailable, from_wire
from raymq.store.record import PUT_SCHEMA

from . import protocol

#: a call that takes longer fails as Unavailable
CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0


def translate(error: Exception, endpoint: str) -> RayMQError:
    """A Flight failure in our words."""
    if isinstance(error, RayMQError):
        return error
    if isinstance(error, flight.FlightUnauthenticatedError):
        return Rejected(f"{endpoint}: {_first_line(error)}", field="token", limit="the cluster's token")
    extra = getattr(error, "extra_info", b"")
    if extra:
        try:
            return from_wire(protocol.unpack(extra))
        except (ValueError, KeyError):
            pass
    return Unavailable(f"{endpoint}: {_first_line(error)}", field="endpoint", endpoint=endpoint)


def _first_line(error: Exception) -> str:
    return str(error).split(". Detail")[0].splitlines()[0] if str(error) else type(error).__name__


class ShardConnection:
    """A connection to one replica. Threads: any; each stream has one sender and one receiver."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        cluster_id: str | None = None,
        shard: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._identity = {"cluster_id": cluster_id, "shard": shard}
        self._headers = [(protocol.AUTHORIZATION.encode(), protocol.bearer(token))]
        self._client = flight.FlightClient(
            f"grpc://{endpoint}", generic_options=[("grpc.enable_retries", 0)]
        )

    def _options(self, timeout_s: float | None) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)

    def call(
        self, op: str, args: dict[str, Any] | None = None, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """An administrative operation. Raises: what the shard raised; Unavailable when it cannot be reached."""
        body = protocol.pack({**self._identity, "args": args or {}})
        try:
            results = list(
                self._client.do_action(flight.Action(op, body), options=self._options(timeout_s))
            )
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise translate(error, self.endpoint) from error
        answer = protocol.unpack(results[0].body)
        if "error" in answer:
            raise from_wire(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _exchange(self, op: str) -> tuple[Any, Any]:
        command = protocol.pack({"op": op, **self._identity})
        descriptor = flight.FlightDescriptor.for_command(command)
        try:
            return self._client.do_exchange(descriptor, options=self._options(None))  # type: ignore[no-any-return]
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise translate(error, self.endpoint) from error

    def put_stream(self) -> PutStream:
        """A stream for batches of PUT_SCHEMA."""
        return PutStream(*self._exchange(protocol.PUT), self.endpoint)

    def fetch_stream(self) -> FetchStream:
        """A stream for reads."""
        return FetchStream(*self._exchange(protocol.FETCH), self.endpoint)

    def replica_stream(self) -> ReplicaStream:
        """A stream to a follower."""
        return ReplicaStream(*self._exchange(protocol.REPLICATE), self.endpoint)

    def close(self) -> None:
        """Close the connection; its streams end with errors."""
        self._client.close()


class _Stream:
    def __init__(self, writer: Any, reader: Any, endpoint: str) -> None:
        self._writer = writer
        self._reader = reader
        self._endpoint = endpoint

    def _guard(self, error: Exception) -> RayMQError:
        return translate(error, self._endpoint)

    def close(self) -> None:
        """End the stream from this side at once."""
        for end in (self._reader.cancel, self._writer.close):
            try:
                end()
            except (pa.ArrowException, flight.FlightError, OSError):
                continue


_BROKEN = (pa.ArrowException, flight.FlightError, OSError, StopIteration)


class PutStream(_Stream):
    """Batches out, acks in, in order."""

    def __init__(self, writer: Any, reader: Any, endpoint: str) -> None:
        super().__init__(writer, reader, endpoint)
        try:
            writer.begin(PUT_SCHEMA)
        except _BROKEN as error:
            raise self._guard(error) from error

    def send(self, meta: dict[str, Any], batch: pa.RecordBatch) -> None:
        """Send one batch. Raises: Unavailable when the stream broke."""
        try:
            self._writer.write_with_metadata(batch, protocol.pack(meta))
        except _BROKEN as error:
            raise self._guard(error) from error

    def receive(self) -> list[dict[str, Any]]:
        """The next acks; blocks. Raises: Unavailable when the stream broke."""
        try:
            chunk = self._reader.read_chunk()
        except _BROKEN as error:
            raise self._guard(error) from error
        acks: list[dict[str, Any]] = protocol.unpack(chunk.app_metadata)["acks"]
        return acks

    def done_sending(self) -> None:
        """No more batches; acks still come."""
        try:
            self._writer.done_writing()
        except _BROKEN as error:
            raise self._guard(error) from error


class FetchStream(_Stream):
    """Requests out, batches of raw records in. One request at a time."""

    def __init__(self, writer: Any, reader: Any, endpoint: str) -> None:
        super().__init__(writer, reader, endpoint)
        try:
            writer.begin(protocol.FETCH_SCHEMA)
        except _BROKEN as error:
            raise self._guard(error) from error
        self._number = 0

    def fetch(
        self,
        topic: str,
        offsets: dict[int, int],
        *,
        max_bytes: int,
        max_records: int,
        wait_ms: int,
    ) -> list[tuple[dict[str, Any], pa.Array]]:
        """Read queues: (metadata, raw records) a queue that has something.

        Raises: the first queue's error (OffsetOutOfRange...), Unavailable when the stream broke.
        """
        self._number += 1
        request = {
            "id": self._number,
            "topic": topic,
            "offsets": {str(q): o for q, o in offsets.items()},
            "max_bytes": max_bytes,
            "max_records": max_records,
            "wait_ms": wait_ms,
        }
        found: list[tuple[dict[str, Any], pa.Array]] = []
        failed: RayMQError | None = None
        try:
            self._writer.write_metadata(protocol.pack(request))
            while True:
                chunk = self._reader.read_chunk()
                meta = protocol.unpack(chunk.app_metadata)
                if meta.get("end"):
                    break
                if "error" in meta:
                    failed = failed or from_wire(meta["error"])
                    if "queue" not in meta:
                        break
                    continue
                found.append((meta, chunk.data.column(0)))
        except _BROKEN as error:
            raise self._guard(error) from error
        if failed is not None and not found:
            raise failed
        return found


class ReplicaStream(_Stream):
    """Frames to a follower and back: the Stream of actors/replicator.py."""

    def __init__(self, writer: Any, reader: Any, endpoint: str) -> None:
        super().__init__(writer, reader, endpoint)
        try:
            writer.begin(protocol.FRAME_SCHEMA)
        except _BROKEN as error:
            raise self._guard(error) from error
        self._received: queue.SimpleQueue[tuple[bytes, Any] | RayMQError] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="raymq-replica-acks", daemon=True).start()

    def send(self, header: bytes, body: Any = None) -> None:
        """Send one frame. Raises: Unavailable when the stream broke."""
        try:
            if body is None:
                self._writer.write_metadata(header)
            else:
                self._writer.write_with_metadata(protocol.frame_batch(body), header)
        except _BROKEN as error:
            raise self._guard(error) from error

    def _receive(self) -> None:
        try:
            while True:
                chunk = self._reader.read_chunk()
                self._received.put((bytes(chunk.app_metadata), protocol.frame_body(chunk.data)))
        except _BROKEN as error:
            self._received.put(self._guard(error))

    def receive(self, timeout_ms: int) -> tuple[bytes, Any] | None:
        """The next frame, None when none came in time. Raises: Unavailable when the stream broke."""
        try:
            item = self._received.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            return None
        if isinstance(item, RayMQError):
            self._received.put(item)
            raise item
        return item


class ReplicaTransport:
    """Connects a leader's Replication role to its follower."""

    def __init__(self, token: str, *, cluster_id: str, shard: int) -> None:
        self._token = token
        self._cluster_id = cluster_id
        self._shard = shard

    def connect(self, endpoint: str) -> ReplicaStream:
        """Raises: Unavailable."""
        connection = ShardConnection(
            endpoint, self._token, cluster_id=self._cluster_id, shard=self._shard
        )
        return connection.replica_stream()
