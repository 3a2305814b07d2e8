"""A thread that fetches from one shard, and opens its stream again when that breaks.

At the end of the program it is made to end, too: a thread that waits in gRPC while Python takes its modules down may
end the process with a signal.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable

from raymq.client import forks
from raymq.client.client_thread import ClientThread, join_at_close
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, RayMQError

from .connection import FetchStream
from .routes import Routes

logger = logging.getLogger("raymq")

BACKOFF_MS = 20
BACKOFF_MS_MAX = 1000
#: longest wait at the end of a program for all threads of this kind
EXIT_JOIN_S = 1.0


_threads: weakref.WeakSet[FetchThread] = weakref.WeakSet()


class FetchThread:
    """The base of the readers that have a thread. `changed` guards their fields and wakes the thread."""

    def __init__(
        self,
        routes: Routes,
        shard: int,
        changed: threading.Condition,
        ended: Callable[[], bool],
        *,
        name: str,
    ) -> None:
        """Start the thread, which runs until `ended()`. A subclass sets its own fields before."""
        self._routes = routes
        self.shard = shard
        self._changed = changed
        self._has_ended = ended
        self._program_ends = False
        self._forks = forks.count
        #: the stream under way; None also after `restart`
        self._stream: FetchStream | None = None
        self._thread = ClientThread(self._run, name)
        self._thread.start()
        if not _threads:
            # Registered late: exit functions run in reverse order, and Ray's must come after it.
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _threads.add(self)

    def _ended(self) -> bool:
        return self._program_ends or self._has_ended()

    def _open_stream(self) -> FetchStream:
        """A stream to fetch from. Raises: RayMQError."""
        return self._routes.fetch_stream(self.shard)

    def _fetch(self, stream: FetchStream) -> bool:
        """One fetch, once there is something to fetch. False: end, or open a new stream. Raises: RayMQError."""
        raise NotImplementedError

    def _handle_failure(self, error: RayMQError, stream: FetchStream | None) -> bool:
        """Record a failure. False: no pause is needed."""
        return True

    def _run(self) -> None:
        while not self._ended():
            try:
                self._fetch_until_ended()
            except BaseException:
                # Without this thread its reader would wait for ever.
                logger.exception("the reading of shard %d", self.shard)
                with self._changed:
                    self._changed.wait_for(self._ended, BACKOFF_MS_MAX / 1000)

    def _fetch_until_ended(self) -> None:
        failures = 0
        while not self._ended():
            stream: FetchStream | None = None
            try:
                stream = self._open_stream()
                with self._changed:
                    # It may have been made to end while the stream was opened.
                    if self._ended():
                        return
                    self._stream = stream
                while self._fetch(stream):
                    failures = 0
            except BaseException as error:
                # Also a bug, which the reader must hear of.
                fault = error if isinstance(error, RayMQError) else Bug(f"a fetch: {error!r}")
                if self._handle_failure(fault, stream):
                    failures += 1
            finally:
                with self._changed:
                    self._stream = None
                if stream is not None:
                    stream.close()

            if failures and not self._ended():
                delay_ms = min(BACKOFF_MS << min(failures - 1, 10), BACKOFF_MS_MAX)
                with self._changed:
                    self._changed.wait_for(self._ended, delay_ms / 1000)
                self._routes.refresh()

    def restart(self) -> None:
        """Abandon the fetch under way. Needs the lock."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abort()

    def end_with_program(self) -> None:
        """Let the thread end, without waiting for it. Callers: an exit function."""
        self._program_ends = True
        # A thread that was stopped may have the lock.
        if self._forks == forks.count and self._changed.acquire(timeout=EXIT_JOIN_S):
            try:
                self.restart()
                self._changed.notify_all()
            finally:
                self._changed.release()

    def join_for(self, timeout_s: float) -> None:
        """Wait for the thread for so long. Callers: an exit function."""
        if self._forks == forks.count:
            self._thread.join(timeout_s)

    def join(self) -> None:
        """Wait for the thread, after it was made to end and `restart` was called."""
        join_at_close(self._thread, self._routes.transport)


def _end_all() -> None:
    threads = list(_threads)
    for each in threads:
        each.end_with_program()
    clock = Clock()
    until_s = clock.monotonic() + EXIT_JOIN_S
    for each in threads:
        each.join_for(max(0.0, until_s - clock.monotonic()))
