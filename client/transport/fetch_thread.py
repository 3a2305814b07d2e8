"""A thread that fetches from one shard, and opens its stream again when that breaks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from raymq.client.client_thread import ClientThread, join_at_close
from raymq.store.base.errors import Bug, RayMQError

from .connection import FetchStream
from .routes import Routes

logger = logging.getLogger("raymq")

BACKOFF_MS = 20
BACKOFF_MS_MAX = 1000


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
        self._ended = ended
        #: the stream under way; None also after `restart`
        self._stream: FetchStream | None = None
        self._thread = ClientThread(self._run, name)
        self._thread.start()

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

    def join(self) -> None:
        """Wait for the thread, after it was made to end and `restart` was called."""
        join_at_close(self._thread, self._routes.transport)
