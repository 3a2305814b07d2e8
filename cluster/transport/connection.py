"""A connection to a shard, by either transport: Arrow Flight, or Ray's actor calls."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from raymq.cluster.arguments import check_choice

from .flight_client import ShardConnection

if TYPE_CHECKING:
    from .flight_client import FlightFetchStream, FlightPutStream
    from .ray_connection import RayFetchStream, RayPutStream, RayShardConnection

Transport = Literal["flight", "ray"]

#: both transports have the same methods
Connection: TypeAlias = "ShardConnection | RayShardConnection"
PutStream: TypeAlias = "FlightPutStream | RayPutStream"
FetchStream: TypeAlias = "FlightFetchStream | RayFetchStream"


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

    Args: `endpoint`: host:port with Flight, the name of the shard's actor with Ray. Flight alone uses `token` and
    `ca`: Ray admits its own clients.
    Raises: Rejected (the transport cannot be used in this process), Unavailable.
    """
    if transport == "flight":
        return ShardConnection(endpoint, token, cluster_id, shard, ca=ca)
    check_choice("transport", transport, ("flight", "ray"))
    # Imported here: Spark's workers use this module and must not depend on Ray.
    module = importlib.import_module("raymq.cluster.transport.ray_connection")
    return cast(Connection, module.RayShardConnection(endpoint, cluster_id))
