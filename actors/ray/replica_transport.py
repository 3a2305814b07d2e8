"""How the replicas of a shard reach each other: a replica is a client of the others' Flight servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raymq.actors.protocol import flight_messages
from raymq.actors.protocol.log_units import unpack_sound_bytes
from raymq.client.transport.flight_client import FlightStream, ShardConnection
from raymq.store.base.errors import Unavailable
from raymq.store.log.mending.fitting import SoundBytes


class ReplicaStream(FlightStream):
    """Frames to a follower and back: the ReplicationStream of Replication. A second thread may receive."""

    schema = flight_messages.FRAME_SCHEMA

    def send(self, header: bytes, body: object = None) -> None:
        """Send one frame. `body` is any buffer of log bytes. Raises: Unavailable."""
        self._write(*flight_messages.pack_frame(header, body))

    def receive(self) -> tuple[bytes, Any]:
        """Wait for the next frame: header, and body or None. Raises: Unavailable, once the stream broke."""
        chunk = self._read()
        try:
            return flight_messages.unpack_frame(chunk.app_metadata, chunk.data)
        except ValueError as error:
            raise Unavailable(f"not a frame of a replica: {error}", field="stream") from error

    def close(self) -> None:
        """End the stream and its connection."""
        super().close()
        self._connection.close()


def replica_stream(connection: ShardConnection) -> ReplicaStream:
    """A stream of a leader's Replication to a follower. Raises: Unavailable."""
    return ReplicaStream(*connection.exchange(flight_messages.REPLICATE), connection)


class ReplicaCalls:
    """Calls of one other replica, for elections and for damaged bytes: the PeerCalls of ElectionPeers."""

    def __init__(self, connection: ShardConnection, sender: Callable[[], dict[str, Any]]) -> None:
        """Args: `sender`: which replica calls, and which addresses it knows, now."""
        self._connection = connection
        self._sender = sender

    def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
        """Deliver a message. Returns: the messages that answer it. Raises: RayMQError."""
        arguments = {"frame": frame.hex(), **self._sender()}
        answer = self._connection.call("elect", arguments, timeout=timeout_s)
        return [bytes.fromhex(each) for each in answer["frames"]]

    def replica_id(self, timeout_s: float) -> int:
        """Which replica it is. Raises: RayMQError."""
        return int(self._connection.call("replica_id", {}, timeout=timeout_s)["replica"])

    def log_units(self, start: int, stop: int, timeout_s: float) -> SoundBytes:
        """Log bytes [start, stop) of that replica. Raises: RayMQError; Corrupt if that replica has damage there."""
        arguments = {"start": start, "stop": stop}
        return unpack_sound_bytes(self._connection.call("log_units", arguments, timeout=timeout_s))

    def log_match(self, candidates: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int, int]:
        """See `PeerCalls.log_match`. Raises: RayMQError."""
        arguments = {"candidates": [list(each) for each in candidates]}
        answer = self._connection.call("log_match", arguments, timeout=timeout_s)
        return int(answer["candidate"]), int(answer["last_end"])

    def status(self, timeout_s: float) -> dict[str, Any]:
        """What that replica says of itself. Raises: RayMQError."""
        return self._connection.call("status", {}, timeout=timeout_s)

    def close(self) -> None:
        """Release the connection."""
        self._connection.close()


class ReplicaTransport:
    """Connects the replicas of one shard."""

    def __init__(self, token: str, *, cluster_id: str, shard: int) -> None:
        self._token = token
        self._cluster_id = cluster_id
        self._shard = shard

    def connect(self, endpoint: str) -> ReplicaStream:
        """Open a stream to the follower at host:port. Raises: Unavailable."""
        connection = self._connection(endpoint)
        try:
            return replica_stream(connection)
        except BaseException:
            connection.close()
            raise

    def replica_calls(self, endpoint: str, sender: Callable[[], dict[str, object]]) -> ReplicaCalls:
        """Calls of the replica at host:port. Args: `sender`: as for ReplicaCalls."""
        return ReplicaCalls(self._connection(endpoint), sender)

    def _connection(self, endpoint: str) -> ShardConnection:
        return ShardConnection(endpoint, self._token, self._cluster_id, self._shard)
