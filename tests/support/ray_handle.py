"""The handle of a shard's actor without Ray: calls run in threads, as many as the concurrency groups have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raymq.actors.server.ray.concurrency_groups import GROUP_OF, GROUPS
from raymq.actors.server.ray.ray_methods import RayMethods
from raymq.client.transport.ray_connection import RayShardConnection, translate
from raymq.store.base.errors import RayMQError

from .fake_backend import CLUSTER_ID


class Handle:
    """An actor handle over RayMethods: each concurrency group is a pool. Calls may be held back or fail."""

    def __init__(self, methods: RayMethods) -> None:
        self.methods = methods
        self.pools = {group: ThreadPoolExecutor(size) for group, size in GROUPS.items()}
        #: (method, arguments) of every call
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        #: decides about a call before it runs: may wait or raise
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda method, args: None

    def __getattr__(self, method: str) -> Any:
        return Method(self, method)

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        """The work of a thread of the group."""
        self.before(method, args)
        return getattr(self.methods, method)(*args)

    def close(self) -> None:
        """End the threads."""
        for pool in self.pools.values():
            pool.shutdown(cancel_futures=True)


class Method:
    """`handle.method`."""

    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    def remote(self, *args: Any) -> Reference:
        """Start the call."""
        self.handle.calls.append((self.name, args))
        pool = self.handle.pools[GROUP_OF[self.name]]
        return Reference(pool.submit(self.handle.run, self.name, args))


class Reference:
    """An object reference."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        """The answer, as Ray's reference gives it."""
        return self._future


class HandleConnection(RayShardConnection):
    """A connection whose actor is a handle."""

    def __init__(self, handle: Handle, cluster_id: str = CLUSTER_ID) -> None:
        self.endpoint = "shard-0"
        self._cluster_id = cluster_id
        self._actor = handle

    def call(
        self, op: str, args: dict[str, Any] | None = None, timeout: float = 30.0
    ) -> dict[str, Any]:
        """Call without `ray.get`."""
        try:
            found: dict[str, Any] = self._actor.methods.call(self._cluster_id, op, args or {})
        except RayMQError as error:
            raise translate(error, self.endpoint) from error
        return found
