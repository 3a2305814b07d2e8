"""A connection to a shard, by either transport: Arrow Flight, or Ray's actor calls."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

from raymq.client import forks
from raymq.client.arguments import check_choice
from raymq.client.client_thread import ClientThread
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError

from .ask import SILENT_MS
from .flight_client import ShardConnection

if TYPE_CHECKING:
    from raymq.actors.api.leases import LeaseCall, LeasedMessages
    from raymq.store.records.requests import FetchRequest, FetchSlice

    from .flight_client import FlightPutStream
    from .ray_connection import RayPutStream, RayShardConnection

_Answer = TypeVar("_Answer")

logger = logging.getLogger("raymq")

#: longest wait of one fetch at a shard whose leader may change: a silent one is noticed soon
FOLLOWED_WAIT_MS = 2_000
#: how often fetches are checked for silence: a blocked read has no timeout of its own
CHECK_S = 1.0

Transport = Literal["flight", "ray"]

#: both transports have the same methods
Connection: TypeAlias = "ShardConnection | RayShardConnection"
PutStream: TypeAlias = "FlightPutStream | RayPutStream"


class FetchStream(Protocol):
    """A stream for reads, one request at a time. Any thread may call `abort`, only the owner the rest."""

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read queues. Waits up to `wait_ms` at the server while all are empty. Raises: RayMQError."""

    def abort(self) -> None:
        """Break the stream: a thread that reads gets Unavailable."""

    def close(self) -> None:
        """End the stream. It must not be used afterwards."""


class LeaseStream(FetchStream, Protocol):
    """A stream to the leader, which leases messages as well."""

    def lease(self, call: LeaseCall) -> LeasedMessages:
        """Lease messages. Waits up to `wait_ms` at the server while there are none. Raises: RayMQError."""

    def settle(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Settle leased messages: operation `settle`. Raises: RayMQError."""


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
    module = importlib.import_module("raymq.client.transport.ray_connection")
    return cast(Connection, module.RayShardConnection(endpoint, cluster_id))


class FollowedFetchStream:
    """A fetch stream that is left when its replica is silent, and another one leads or it does not answer at all.

    A stopped process keeps its connections open, so that a read of it would wait without end.
    """

    def __init__(
        self,
        stream: LeaseStream,
        watch: FetchWatch,
        *,
        on_failure: Callable[[RayMQError], object],
        ask_who_leads: Callable[[Callable[[], None]], None],
        silent_ms: int | None = None,
    ) -> None:
        """Args: `ask_who_leads`: asks the replicas without waiting, and calls its argument when the stream is
        to be left.

        `silent_ms`: how late an answer is when `ask_who_leads` is called; None: SILENT_MS.
        """
        self._stream = stream
        self._watch = watch
        self._on_failure = on_failure
        self._ask_who_leads = ask_who_leads
        self._silent_ms = SILENT_MS if silent_ms is None else silent_ms
        self._clock = Clock()
        #: guards `_closed`: a closed stream must not be aborted
        self._lock = threading.Lock()
        self._closed = False
        self._forks = forks.count
        #: when the answer of the fetch under way is late; None: no fetch is under way
        self._late_ms: int | None = None
        watch.add(self)

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Like `flight_client.FlightFetchStream.fetch`, but waits for FOLLOWED_WAIT_MS at most."""
        short = request._replace(wait_ms=min(request.wait_ms, FOLLOWED_WAIT_MS))
        return self._followed(lambda: self._stream.fetch(short), short.wait_ms)

    def lease(self, call: LeaseCall) -> LeasedMessages:
        """Like `flight_client.FlightFetchStream.lease`, but waits for FOLLOWED_WAIT_MS at most."""
        short = call._replace(wait_ms=min(call.wait_ms, FOLLOWED_WAIT_MS))
        return self._followed(lambda: self._stream.lease(short), short.wait_ms)

    def settle(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Like `flight_client.FlightFetchStream.settle`."""
        return self._followed(lambda: self._stream.settle(arguments), 0)

    def _followed(self, ask: Callable[[], _Answer], wait_ms: int) -> _Answer:
        """The answer of the replica, unless that is left meanwhile. Raises: RayMQError."""
        self._late_ms = self._clock.monotonic_ms() + wait_ms + self._silent_ms
        try:
            return ask()
        except RayMQError as error:
            self._on_failure(error)
            raise
        finally:
            self._late_ms = None

    def check(self, now_ms: int) -> None:
        """Ask who leads if the answer of a fetch is late. Called about every second."""
        late_ms = self._late_ms
        if late_ms is not None and now_ms >= late_ms:
            self._ask_who_leads(self.abort)

    def abort(self) -> None:
        """Break the stream: a thread that reads gets Unavailable."""
        with self._lock:
            if not self._closed:
                self._stream.abort()

    def close(self) -> None:
        """End the stream. It must not be used afterwards."""
        if forks.count != self._forks:
            # The locks may be held by threads of the parent.
            return
        self._watch.remove(self)
        with self._lock:
            self._closed = True
        self._stream.close()


class FetchWatch:
    """Checks a client's followed streams about every second. Its thread runs while there are any."""

    def __init__(self) -> None:
        #: guards the fields below, and is held during the checks: after `remove` no check calls Ray
        self._changed = threading.Condition()
        self._streams: set[FollowedFetchStream] = set()
        self._thread: threading.Thread | None = None

    def add(self, stream: FollowedFetchStream) -> None:
        """Check a stream from now on."""
        with self._changed:
            self._streams.add(stream)
            if self._thread is None:
                self._thread = ClientThread(self._run, "raymq-fetch-watch")
                self._thread.start()

    def remove(self, stream: FollowedFetchStream) -> None:
        """Check a stream no more."""
        with self._changed:
            self._streams.discard(stream)
            self._changed.notify_all()

    def _run(self) -> None:
        clock = Clock()
        with self._changed:
            while self._streams:
                self._changed.wait(CHECK_S)
                now_ms = clock.monotonic_ms()
                for stream in list(self._streams):
                    try:
                        stream.check(now_ms)
                    except BaseException:
                        # Without this thread no silent shard would ever be left.
                        logger.exception("a check of a fetch")
            self._thread = None
