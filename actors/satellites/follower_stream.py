"""The stream of log bytes from Replication to one follower: a `LogSender`, and the connection that it works on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from raymq.replication import log_sender
from raymq.replication.log_sender import LogSender, SenderLimits
from raymq.replication.wire import encode
from raymq.store.base.errors import Corrupt

from .follower_connection import FollowerConnection
from .log_reader import LogReader

logger = logging.getLogger("raymq.replication")

#: bytes that a transport takes although the follower reads nothing: HTTP/2 lets 64 KiB pass. Empty frames come beside
UNREAD_BYTES_MAX = 32 << 10
#: log bytes that CommitLog has written within twice this time are in the page cache: to read them does not block
CACHED_MS = 1_000


class FollowerStream:
    """One follower, as Replication sees it. Callers: one thread at a time; `status` by any."""

    def __init__(
        self,
        follower: int,
        sender: LogSender,
        connection: FollowerConnection,
        log: LogReader,
        *,
        blocking_call: AbstractContextManager[None],
        on_replicated: Callable[[], None],
    ) -> None:
        """Args: `blocking_call`: entered around reads of the caller's thread.

        `on_replicated`: called when the follower has more, before the frames that this makes room for.
        """
        self.follower = follower
        self._sender = sender
        self._connection = connection
        self._log = log
        self._blocking_call = blocking_call
        self._on_replicated = on_replicated
        #: damage that the connection's thread has read, until the sender knows it
        self._damage: Corrupt | None = None
        #: bytes from here on were written a short time ago; None: not known yet
        self._cached_from: int | None = None
        #: an end that was committed, and when
        self._marked: tuple[int, int] | None = None
        #: frames sent so far
        self.frames = 0
        #: the damage of this log that stops the stream, a physical offset; None: none does
        self.damaged_at: int | None = None

    def set_limits(self, limits: SenderLimits) -> None:
        """Send by other limits from now on."""
        self._sender.set_limits(limits)

    @property
    def replicated_end(self) -> int:
        """Everything below is durable on the follower, and equals the leader's log; 0: it does not count."""
        return self.durable_end if self.is_complete else 0

    @property
    def is_streaming(self) -> bool:
        """Whether log bytes reach the follower."""
        return self._sender.phase is log_sender.Phase.STREAMING

    @property
    def durable_end(self) -> int:
        """Everything below is durable on the follower, and equals the leader's log."""
        return self._sender.replicated_end

    @property
    def matched_end(self) -> int:
        """Everything below is on the follower, durable or not, and equals the leader's log."""
        return self._sender.matched_end

    @property
    def is_complete(self) -> bool:
        """Whether the follower has everything that it ever reported as durable."""
        return self._sender.is_complete

    @property
    def heard_ms(self) -> int:
        """When the follower acknowledged last, monotonic; 0: not yet."""
        return self._sender.heard_ms

    @property
    def stall_reason(self) -> str:
        """Why nothing reaches the follower; "" while something does."""
        return self._sender.stall_reason

    def take_answers(self, now_ms: int) -> None:
        """Take all that has come from the follower since the last call."""
        damage = self._damage
        if damage is not None:
            self._damage = None
            self._note_damage(damage, now_ms)
        for event in self._connection.take_events():
            self._step(event, now_ms)

    def advance(self, committed: int, confirmed: int, now_ms: int, *, may_linger: bool) -> None:
        """Send what is in the log's files, and the confirmed end. Do what is due by the time.

        Args: `may_linger`: no put waits for this follower, so that few bytes may wait for more.
        """
        if self._marked is None or now_ms - self._marked[1] >= CACHED_MS:
            if self._marked is not None:
                self._cached_from = self._marked[0]
            self._marked = committed, now_ms
        self._step(log_sender.LeaderProgress(committed, confirmed, may_linger), now_ms)

    def wait_ms(self, now_ms: int) -> int:
        """How long `advance` may stay uncalled without an answer."""
        return self._sender.wait_ms(now_ms)

    def ack_ms(self, now_ms: int) -> float:
        """How long the follower takes from a frame to its durable end."""
        return self._sender.ack_ms(now_ms)

    def status(self) -> dict[str, Any]:
        """How far it is, as `Replicator.status` shows it."""
        sender = self._sender
        return {
            "replica": self.follower,
            "phase": sender.phase.value,
            "matched_end": sender.matched_end,
            "replicated_end": sender.replicated_end,
            "is_complete": sender.is_complete,
            "error": sender.stall_reason or None,
            "dropped_frames": sender.dropped,
        }

    def _step(self, event: log_sender.SenderEvent, now_ms: int) -> None:
        """Give the sender an event and perform its effects."""
        with self._blocking_call:
            # The sender reads the chain's file.
            effects = self._sender.step(event, now_ms)
        for effect in effects:
            if isinstance(effect, log_sender.Send):
                try:
                    self._send(effect)
                except Corrupt as error:
                    self._note_damage(error, now_ms)
                    return
            elif isinstance(effect, log_sender.Replicated):
                self._on_replicated()
            elif isinstance(effect, log_sender.Connect):
                self._connection.connect()
            elif isinstance(effect, log_sender.Disconnect):
                self._connection.disconnect()
            elif isinstance(effect, log_sender.Halt):
                logger.error("replica %d gets no log bytes: %s", self.follower, effect.reason)

    def _note_damage(self, error: Corrupt, now_ms: int) -> None:
        """Send neither the damaged bytes nor any after them. CommitLog may repair them."""
        self.damaged_at = int(error.fields["offset"])
        self._step(log_sender.Damaged(str(error)), now_ms)

    def report_leader_ended(self) -> None:
        """End the stream with the word that the leader's process has ended."""
        last = self._sender.leader_ended()
        if last is not None:
            self._connection.disconnect(encode(last.header, last.message))

    def _send(self, effect: log_sender.Send) -> None:
        """Send a frame. Raises: Corrupt when the log's bytes are not those that were stored."""
        frame = encode(effect.header, effect.message)
        has_body = effect.start < effect.stop
        if has_body and (self._cached_from is None or effect.start < self._cached_from):
            # A slow disk delays this follower alone.
            self._connection.send_later(frame, partial(self._read_later, effect))
            self.frames += 1
            return

        body = None
        if has_body:
            with self._blocking_call:
                body = self._log.read(effect.start, effect.stop, effect.message)
            self.damaged_at = None
        has_read_all = effect.start <= self._sender.matched_end
        is_small = effect.stop - effect.start <= UNREAD_BYTES_MAX
        self._connection.send(frame, body, cannot_block=has_read_all and is_small)
        self.frames += 1

    def _read_later(self, effect: log_sender.Send) -> memoryview | None:
        """The body of a frame. Callers: the connection's sending thread.

        The damage of the log is noted here: a follower that was silent during a long read has no connection any more.
        """
        try:
            body = self._log.read(effect.start, effect.stop, effect.message)
        except Corrupt as error:
            self._damage = error
            raise
        self.damaged_at = None
        return body
