"""Replication's connection to one follower: its threads block on the network and the disk for Replication's loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from raymq.replication.log_sender import Connected, Disconnected, FrameReceived
from raymq.replication.wire import decode
from raymq.store.base.errors import Rejected, Unavailable

#: how long `FollowerConnection.close` waits for the connection's thread
CLOSE_WAIT_S = 0.2
#: how long the last frame of a connection may take
LAST_FRAME_S = 1.0

#: reads the body of a frame. May block. Raises: any error, which ends the connection
ReadBody = Callable[[], Any]

ConnectionEvent = Connected | Disconnected | FrameReceived


class ReplicationStream(Protocol):
    """One connection. One thread at a time sends, another receives and closes, any aborts."""

    def send(self, header: bytes, body: object) -> None:
        """Send a frame. `body` is a buffer or None. May block. Raises: any error, once the connection is lost."""

    def receive(self) -> tuple[bytes, Any]:
        """Wait for the next frame. Raises: any error, once the connection is lost or aborted."""

    def abort(self) -> None:
        """End a `send` and a `receive` under way. Does not block."""

    def close(self) -> None:
        """End the stream. A `send` under way raises. May block."""


class FollowerTransport(Protocol):
    """Makes connections."""

    def connect(self, endpoint: str) -> ReplicationStream:
        """Connect to a follower. May block. Raises: Unavailable."""


class _Connection:
    """One attempt to connect and, if it succeeds, the connection."""

    def __init__(self, owner: FollowerConnection) -> None:
        self._owner = owner
        self._outgoing: deque[tuple[bytes, ReadBody]] = deque()
        self._condition = threading.Condition()
        #: the sending thread reads a body, or is in `ReplicationStream.send`
        self._sending = False
        #: None before it is open
        self._stream: ReplicationStream | None = None
        self._closed = False
        self.receiver = threading.Thread(
            target=self._run_receiver, name="raymq-replica-receive", daemon=True
        )

    def send(self, frame: bytes, body: object, *, cannot_block: bool) -> None:
        with self._condition:
            if self._closed:
                return
            stream = self._stream
            if not cannot_block or stream is None or self._outgoing or self._sending:
                self._outgoing.append((frame, lambda: body))
                self._condition.notify()
                return
        # The sending thread has nothing to send before this returns, because the caller is the only one that gives it
        # frames. A hand-over to that thread would cost more than the write.
        try:
            stream.send(frame, body)
        except Exception as error:
            self._fail(error)

    def send_later(self, frame: bytes, read: ReadBody) -> None:
        with self._condition:
            if not self._closed:
                self._outgoing.append((frame, read))
                self._condition.notify()

    def close(self, last: bytes | None = None) -> None:
        """End it soon. Args: `last`: a frame that is sent before, instead of those that wait."""
        with self._condition:
            self._closed = True
            self._outgoing.clear()
            if last is not None and self._stream is not None:
                self._outgoing.append((last, lambda: None))
                # The follower may read nothing.
                timer = threading.Timer(LAST_FRAME_S, self._stream.abort)
                timer.daemon = True
                timer.start()
            elif self._stream is not None:
                self._stream.abort()
            self._condition.notify_all()

    def _run_receiver(self) -> None:
        try:
            stream = self._owner.open_stream()
        except Exception as error:
            # Any exception of a transport must reach the loop.
            self._fail(error)
            return

        sender = threading.Thread(
            target=self._run_sender, args=(stream,), name="raymq-replica-send", daemon=True
        )
        try:
            with self._condition:
                if self._closed:
                    return
                self._stream = stream
            sender.start()
            self._owner.report(self, Connected(self._owner.log_start()))
            while True:
                frame, _ = stream.receive()
                self._owner.report(self, _read(frame))
        except Exception as error:
            self._fail(error)
        finally:
            self.close()
            # Here, because it may block, which the loop must not.
            stream.close()

    def _run_sender(self, stream: ReplicationStream) -> None:
        try:
            while True:
                with self._condition:
                    self._sending = False
                    while not self._outgoing and not self._closed:
                        self._condition.wait()
                    if not self._outgoing:
                        return
                    frame, read = self._outgoing.popleft()
                    self._sending = True
                body = read()
                if body is not None and self._closed:
                    # It was closed during the read, which may have taken long. The last frame has no body.
                    continue

                # The last frame is the only one that is left after `close`. An end at once would overtake it: the timer
                # ends the stream.
                stream.send(frame, body)
        except Exception as error:
            self._fail(error)
            stream.abort()

    def _fail(self, error: Exception) -> None:
        """Report the first error, which ends the connection. The other thread then fails, too."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
        self._owner.report(self, Disconnected(f"{type(error).__name__}: {error}"))


def _read(frame: bytes) -> FrameReceived | Disconnected:
    try:
        return FrameReceived(*decode(frame))
    except Rejected as error:
        # A peer that speaks another version, or a broken transport: a new connection is the remedy.
        return Disconnected(error.message)


class FollowerConnection:
    """At most one connection at a time. Callers: one thread at a time. `wake` and `on_frame` are called from others."""

    def __init__(
        self,
        transport: FollowerTransport,
        peer_endpoint: Callable[[], str | None],
        *,
        log_start: Callable[[], int],
        wake: Callable[[], None],
        on_frame: Callable[[], None],
    ) -> None:
        """Args: `peer_endpoint`: the follower's endpoint now; None: unknown.

        `log_start`: the first offset of the leader's log. `on_frame`: called after a frame has arrived, on the thread
        that received it. `wake`: called after each other event; it must not call this connection.
        """
        self._transport = transport
        self._peer_endpoint = peer_endpoint
        self.log_start = log_start
        self._wake = wake
        self._on_frame = on_frame
        self._lock = threading.Lock()
        self._events: deque[ConnectionEvent] = deque()
        self._connection: _Connection | None = None

    def connect(self) -> None:
        """Begin to connect. A `Connected` or `Disconnected` event follows."""
        self.disconnect()
        self._connection = _Connection(self)
        # Only now: `report` drops events of any connection but `_connection`.
        self._connection.receiver.start()

    def disconnect(self, last: bytes | None = None) -> None:
        """Drop the connection and every event of it. Args: `last`: a frame that is sent before."""
        connection, self._connection = self._connection, None
        with self._lock:
            self._events.clear()
        if connection is not None:
            connection.close(last)

    def send(self, frame: bytes, body: object, *, cannot_block: bool = False) -> None:
        """Send a frame soon. Frames wait in the connection's queue, which the caller's window bounds.

        Args: `cannot_block`: the follower has read so much that the transport takes this frame at once.
        """
        if self._connection is not None:
            self._connection.send(frame, body, cannot_block=cannot_block)

    def send_later(self, frame: bytes, read: ReadBody) -> None:
        """Send a frame soon, whose body the sending thread reads before. It waits as in `send`."""
        if self._connection is not None:
            self._connection.send_later(frame, read)

    def take_events(self) -> list[ConnectionEvent]:
        """The events since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Drop the connection and wait a moment for its thread."""
        connection = self._connection
        self.disconnect()
        if connection is not None:
            connection.receiver.join(CLOSE_WAIT_S)

    def open_stream(self) -> ReplicationStream:
        """Open a stream to the follower. Callers: the connection's thread. Raises: Unavailable."""
        endpoint = self._peer_endpoint()
        if endpoint is None:
            raise Unavailable("the follower's address is not known yet", field="endpoint")
        return self._transport.connect(endpoint)

    def report(self, connection: _Connection, event: ConnectionEvent) -> None:
        """Take an event, unless its connection has been replaced. Callers: the connection's threads."""
        with self._lock:
            if connection is not self._connection:
                return
            self._events.append(event)
        if isinstance(event, FrameReceived):
            self._on_frame()
        else:
            self._wake()
