"""Connections that are kept open between calls: to open one costs more than most calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from raymq.client import forks
from raymq.store.base.clock import Clock

from .flight_client import ShardConnection

#: a connection that was idle for longer is not used again: what lies between may have forgotten it, and a call would
#: notice that after seconds
IDLE_MS_MAX = 10_000


class KeptConnections:
    """One connection for the calls to each replica, which all threads share, until `close`.

    A connection that fails is closed. One on which the replica has refused something stays open. Threads: any.
    """

    def __init__(self, connect: Callable[[int, str], ShardConnection], clock: Clock) -> None:
        """Args: `connect`: opens a connection to an endpoint of a shard."""
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        #: (shard, endpoint) -> the open connection, and when its last call ended
        self._open: dict[tuple[int, str], tuple[ShardConnection, int]] = {}
        self._forks = forks.count
        self._is_closed = False

    def call(
        self, shard: int, endpoint: str, op: str, args: Mapping[str, object], timeout_s: float
    ) -> dict[str, Any]:
        """Call an operation. Raises: as `ShardConnection.call`."""
        key = shard, endpoint
        connection = self._held(key)
        if connection is None:
            with closing(self._connect(shard, endpoint)) as own:
                return own.call(op, args, timeout=timeout_s)
        try:
            return connection.call_held(op, args, timeout_s)
        finally:
            if connection.is_broken:
                self._drop(key, connection)
            else:
                self._note_used(key, connection)
            connection.release()

    def _held(self, key: tuple[int, str]) -> ShardConnection | None:
        """A connection that stays open until it is released. None: after `close`."""
        if self._forks != forks.count:
            # Those of the parent are left alone. A new one is refused if the parent was connected.
            self._lock, self._open, self._forks = threading.Lock(), {}, forks.count
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            if self._is_closed:
                return None
            found, used_ms = self._open.get(key, (None, 0))
            if found is not None and now_ms - used_ms <= IDLE_MS_MAX:
                found.acquire()
                return found

        made = self._connect(*key)
        with self._lock:
            # Another thread may have been quicker. Both go on; one of the two is kept.
            if not self._is_closed:
                old, _ = self._open.get(key, (None, 0))
                self._open[key] = made, now_ms
                made.acquire()
                if old is not None:
                    old.close()
                return made
        made.close()
        return None

    def _note_used(self, key: tuple[int, str], connection: ShardConnection) -> None:
        with self._lock:
            if self._open.get(key, (None, 0))[0] is connection:
                self._open[key] = connection, self._clock.monotonic_ms()

    def _drop(self, key: tuple[int, str], connection: ShardConnection) -> None:
        with self._lock:
            if self._open.get(key, (None, 0))[0] is connection:
                del self._open[key]
        # Calls of other threads end by themselves.
        connection.close()

    def close(self) -> None:
        """Close all. From here on each call opens a connection of its own."""
        if self._forks != forks.count:
            return
        with self._lock:
            self._is_closed = True
            left, self._open = self._open, {}
        for connection, _ in left.values():
            connection.close()
