"""Connections that are kept open between calls: to open one costs more than most calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from raymq.client import forks
from raymq.store.base.errors import DeliveryUnknown, Unavailable

from .connection import Connection


class KeptConnections:
    """One connection for the calls to each replica, which all threads share. A failure ends it: the next call opens
    another one.

    Threads: any.
    """

    def __init__(self, connect: Callable[[int, str], Connection]) -> None:
        """Args: `connect`: opens a connection to an endpoint of a shard."""
        self._connect = connect
        self._lock = threading.Lock()
        #: (shard, endpoint) -> the open connection
        self._open: dict[tuple[int, str], Connection] = {}
        self._forks = forks.count

    def call(
        self, shard: int, endpoint: str, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, Any]:
        """Call an operation. Raises: as `ShardConnection.call`."""
        connection = self._connection(shard, endpoint)
        try:
            return connection.call(op, args, timeout=timeout_s)
        except (Unavailable, DeliveryUnknown):
            self._drop((shard, endpoint), connection)
            raise

    def _connection(self, shard: int, endpoint: str) -> Connection:
        key = shard, endpoint
        if self._forks != forks.count:
            # Those of the parent are left alone. The new one refuses if the parent was connected.
            self._lock, self._open, self._forks = threading.Lock(), {}, forks.count
        with self._lock:
            found = self._open.get(key)
        if found is not None:
            return found

        made = self._connect(shard, endpoint)
        with self._lock:
            found = self._open.setdefault(key, made)
        if found is not made:
            # Another thread was quicker.
            made.close()
        return found

    def _drop(self, key: tuple[int, str], connection: Connection) -> None:
        with self._lock:
            if self._open.get(key) is connection:
                del self._open[key]
        # Calls of other threads end by themselves.
        connection.close()

    def close(self) -> None:
        """Close all. A later call opens another one."""
        if self._forks != forks.count:
            return
        with self._lock:
            left, self._open = self._open, {}
        for connection in left.values():
            connection.close()
