"""Each wire protocol of a shard: its server in front of a backend, and a client's connection to it.

A new protocol gets a line in PROTOCOLS. `tests/actors/test_server_contract.py` then tests it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing

from raymq.actors.server.flight.flight_server import serve
from raymq.actors.server.ray.ray_methods import RayMethods
from raymq.client.transport.connection import Connection
from raymq.client.transport.flight_client import ShardConnection

from .fake_backend import TOKEN, FakeBackend
from .ray_handle import Handle, HandleConnection

#: makes a connection that expects a cluster id
Connect = Callable[[str], Connection]


@contextlib.contextmanager
def flight(backend: FakeBackend) -> Iterator[Connect]:
    """Arrow Flight on 127.0.0.1."""
    with (
        closing(serve(backend, host="127.0.0.1", port=0, token=TOKEN)) as server,
        contextlib.ExitStack() as made,
    ):

        def connect(cluster_id: str) -> Connection:
            connection = ShardConnection(f"127.0.0.1:{server.port}", TOKEN, cluster_id, 0)
            made.callback(connection.close)
            return connection

        yield connect


@contextlib.contextmanager
def ray(backend: FakeBackend) -> Iterator[Connect]:
    """Calls of an actor, in threads in place of Ray's."""
    with closing(Handle(RayMethods(backend))) as handle:
        yield lambda cluster_id: HandleConnection(handle, cluster_id)


PROTOCOLS: dict[str, Callable[[FakeBackend], AbstractContextManager[Connect]]] = {
    "flight": flight,
    "ray": ray,
}
