"""The Replication actor's connection to a follower: threads that block on the network so that its
loop never does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from raymq.store.errors import Unavailable

#: how long a receiving thread waits before it looks whether it is still wanted
RECEIVE_WAIT_MS = 100


class Stream(Protocol):
    """One connection. One thread sends, another receives and closes."""

    def send(self, header: bytes, body: Any) -> None:
        """Send a frame; `body` is a buffer or None.

        May block; raises when the connection is gone.
        """

    def receive(self, timeout_ms: int) -> tuple[bytes, Any] | None:
        """The next frame; None after the timeout; raises when the connection is gone."""

    def close(self) -> None:
        """End it; a `send` under way raises. May block."""


class Transport(Protocol):
    """Makes connections."""

    def connect(self, endpoint: str) -> Stream:
        """Connect to a follower. May block; raises Unavailable."""


class Up(NamedTuple):
    """The connection stands."""


class Down(NamedTuple):
    """The connection could not be made, or is gone."""

    reason: str


class Frame(NamedTuple):
    """A frame came in."""

    data: bytes


LinkEvent = Up | Down | Frame


class _Connection:
    """One attempt and, if it succeeds, what follows."""

    def __init__(self, link: FollowerConnection) -> None:
        self._link = link
        self._outgoing: deque[tuple[bytes, Any]] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._receiver = threading.Thread(
            target=self._run_receiver, name="raymq-replica-receive", daemon=True
        )

    def start(self) -> None:
        self._receiver.start()

    def send(self, frame: bytes, body: Any) -> None:
        with self._condition:
            if not self._closed:
                self._outgoing.append((frame, body))
                self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._outgoing.clear()
            self._condition.notify_all()

    def join(self, timeout_s: float) -> None:
        self._receiver.join(timeout_s)

    def _run_receiver(self) -> None:
        try:
            stream = self._link.open_stream()
        except Exception as error:
            # Whatever a transport raises, the loop must hear of it.
            self._fail(error)
            return
        try:
            sender = threading.Thread(
                target=self._run_sender, args=(stream,), name="raymq-replica-send", daemon=True
            )
            sender.start()
            self._link.report(self, Up())
            while not self._closed:
                frame = stream.receive(RECEIVE_WAIT_MS)
                if frame is not None:
                    self._link.report(self, Frame(bytes(frame[0])))
        except Exception as error:
            self._fail(error)
        finally:
            self._outgoing.clear()
            # Here, because it may block, which the loop must not.
            stream.close()

    def _run_sender(self, stream: Stream) -> None:
        try:
            while True:
                with self._condition:
                    while not self._outgoing and not self._closed:
                        self._condition.wait()
                    if self._closed:
                        return
                    frame, body = self._outgoing.popleft()
                stream.send(frame, body)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._closed:
            self._link.report(self, Down(f"{type(error).__name__}: {error}"))


class FollowerConnection:
    """At most one connection at a time. Callers: one thread; `wake` is called from others."""

    def __init__(
        self,
        transport: Transport,
        peer_endpoint: Callable[[], str | None],
        *,
        wake: Callable[[], None],
    ) -> None:
        """Args: peer_endpoint: where the follower listens now, None while unknown; wake: there is
        an event.
        """
        self._transport = transport
        self._peer_endpoint = peer_endpoint
        self._wake = wake
        self._lock = threading.Lock()
        self._events: deque[LinkEvent] = deque()
        self._connection: _Connection | None = None

    def connect(self) -> None:
        """Begin to connect; `Up` or `Down` follows."""
        self.disconnect()
        self._connection = _Connection(self)
        # Only now: an event of a connection that is not this one is dropped.
        self._connection.start()

    def disconnect(self) -> None:
        """Drop the connection and every event of it."""
        connection, self._connection = self._connection, None
        with self._lock:
            self._events.clear()
        if connection is not None:
            connection.close()

    def send(self, frame: bytes, body: Any) -> None:
        """Put a frame into the queue of the connection, which the window of the caller bounds."""
        if self._connection is not None:
            self._connection.send(frame, body)

    def take_events(self) -> list[LinkEvent]:
        """What happened since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Drop the connection and wait a moment for its thread."""
        connection = self._connection
        self.disconnect()
        if connection is not None:
            connection.join(2 * RECEIVE_WAIT_MS / 1000)

    def open_stream(self) -> Stream:
        """Callers: the connection's thread. Raises: Unavailable."""
        endpoint = self._peer_endpoint()
        if endpoint is None:
            raise Unavailable("the follower has not said yet where it listens", field="endpoint")
        return self._transport.connect(endpoint)

    def report(self, connection: _Connection, event: LinkEvent) -> None:
        """Callers: the connection's threads."""
        with self._lock:
            if connection is not self._connection:
                return
            self._events.append(event)
        self._wake()
