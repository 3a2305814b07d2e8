"""A connection to a shard, by either transport: Arrow Flight, or Ray's actor calls."""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol, cast

import pyarrow as pa

from raymq.cluster.arguments import check_choice
from raymq.store.record import Row
from raymq.store.requests import FetchSlice

from .flight_client import ShardConnection

Transport = Literal["flight", "ray"]


class PutStream(Protocol):
    """Batches out, acks in, in order. See `flight_client.FlightPutStream`."""

    #: bytes that may be unanswered, as the shard said; None: it set no limit
    window_bytes: int | None

    def opened(self) -> None:
        """Wait until the shard has accepted the stream."""

    def send(self, meta: dict[str, Any], batch: pa.RecordBatch | Row) -> None:
        """Send one batch."""

    def receive(self) -> list[dict[str, Any]]:
        """The next acks; blocks."""

    def abort(self) -> None:
        """Break the stream. Callers: any thread."""

    def close(self) -> None:
        """End the stream at once."""


class FetchStream(Protocol):
    """Reads, one request at a time. See `flight_client.FlightFetchStream`."""

    def fetch(
        self,
        topic: str,
        offsets: dict[int, int],
        *,
        max_bytes: int,
        max_records: int,
        wait_ms: int,
    ) -> list[FetchSlice]:
        """Read queues; waits up to `wait_ms` while all are empty."""

    def abort(self) -> None:
        """Break the stream. Callers: any thread."""

    def close(self) -> None:
        """End the stream at once."""


class Connection(Protocol):
    """A connection as clients use it. See `flight_client.ShardConnection`."""

    def call(
        self, op: str, args: dict[str, Any] | None = None, timeout: float = 30.0
    ) -> dict[str, Any]:
        """An administrative operation; `timeout` in seconds."""

    def put_stream(self) -> PutStream:
        """A stream for batches of PUT_SCHEMA."""

    def fetch_stream(self) -> FetchStream:
        """A stream for reads."""

    def close(self) -> None:
        """Close the connection, after its streams."""


def open_connection(
    transport: Transport,
    endpoint: str,
    *,
    token: str,
    cluster_id: str | None,
    shard: int,
    ca: bytes | None = None,
) -> Connection:
    """A connection to one shard.

    Args: `endpoint` is host:port with Flight, the name of the shard's actor with Ray. Flight alone uses `token` and
    `ca`: Ray admits its own clients.
    Raises: Rejected (the transport cannot be used in this process), Unavailable.
    """
    if transport == "flight":
        return ShardConnection(endpoint, token, cluster_id, shard, ca=ca)
    check_choice("transport", transport, ("flight", "ray"))
    # Imported here: Spark's workers use this module and must not depend on Ray.
    module = importlib.import_module("raymq.cluster.transport.ray_connection")
    return cast(Connection, module.RayShardConnection(endpoint, cluster_id))
