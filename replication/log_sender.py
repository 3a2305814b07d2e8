"""Sends the leader's log to one follower.

The machine is pure: `step(event, now_ms)` returns effects, and reads only the immutable chain that the caller gives it.
The protocol is Raft's log replication; `election.py` has the elections. Every session searches for the last common
byte again, so that neither side needs to remember anything about the other.

    IDLE -connect-> GREETING -HelloReply-> SEARCHING -match-> STREAMING
      ^                |                    |                  |
      +---- disconnect, silence, conflict (at once) or refusal, halt (after halt_retry_ms) ----+

`Replicated` carries the end of the bytes that are durable at the follower *and* equal to the leader's log. From that
end the promise (store/config/promise.py) decides the confirmed end, below which readers see all records. The confirmed
end comes back in `LeaderProgress` and goes to the follower.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from raymq.store.log.chain import ChainUnit
from raymq.store.log.segments.segment_paths import segment_start_of

from . import wire
from .match import ChainView, Match, MatchSearch

MIB = 1024 * 1024
#: how much of the smoothed time of an ack is the newest one
ACK_TIME_WEIGHT = 0.125


@dataclass(frozen=True, kw_only=True)
class SenderLimits:
    """Sizes and periods. No promise depends on any of them."""

    #: log bytes of one AppendEntries. A larger unit is sent alone
    frame_bytes: int = 4 * MIB
    #: log bytes sent and not acknowledged
    window_bytes: int = 64 * MIB
    #: frames sent and not acknowledged: small units are sent together while the follower lags
    window_frames: int = 16
    #: log bytes per second to a follower that lacks a whole frame, while no put waits for it; 0: no limit
    catch_up_bytes_per_s: int = 0
    #: how long few bytes wait for more, while enough other followers get each byte at once
    linger_ms: int = 10
    #: ... and how many bytes do not wait
    linger_bytes: int = 32 * 1024
    #: between two frames, while the follower lacks bytes or does not know the confirmed end
    heartbeat_ms: int = 200
    #: ... while it has all. Followers answer readers by what they heard within a second (heard_ends.py)
    idle_heartbeat_ms: int = 700
    #: a follower that answers nothing for this long is disconnected
    silence_ms: int = 5_000
    #: between two attempts to connect
    retry_ms: int = 200
    #: ... after a refusal that only an operator can end
    halt_retry_ms: int = 5_000


# --- events ---------------------------------------------------------------------------------------


class LeaderProgress(NamedTuple):
    """The leader's committed end, below which log bytes may be sent, and the confirmed end."""

    committed: int
    confirmed: int
    #: enough other followers get each byte at once, so that no put waits for this one
    may_linger: bool = False


class Connected(NamedTuple):
    """The connection that `Connect` asked for is open."""

    #: the leader's first stored offset now, which grows when old files are deleted
    log_start: int = 0


class Disconnected(NamedTuple):
    """The connection could not be opened, or is broken."""

    reason: str


class Damaged(NamedTuple):
    """The next bytes of the leader's log have changed since they were stored."""

    reason: str


class FrameReceived(NamedTuple):
    """A frame from the follower."""

    header: wire.FrameHeader
    message: wire.ReplicaMessage


class ClockTick(NamedTuple):
    """Time has passed."""


SenderEvent: TypeAlias = (
    LeaderProgress | Connected | Disconnected | Damaged | FrameReceived | ClockTick
)


# --- effects --------------------------------------------------------------------------------------


class Connect(NamedTuple):
    """Connect to the follower at its present address."""


class Disconnect(NamedTuple):
    """Drop the connection. `Disconnected` need not be reported for it."""

    reason: str


class Send(NamedTuple):
    """Send a frame, with log bytes [start, stop) of one segment as its body if start < stop."""

    header: wire.FrameHeader
    message: wire.ReplicaMessage
    start: int
    stop: int


class Replicated(NamedTuple):
    """Everything below `end` is durable on the follower."""

    end: int


class Halt(NamedTuple):
    """Replication cannot continue without an operator. The machine tries again later nevertheless."""

    reason: str


SenderEffect: TypeAlias = Connect | Disconnect | Send | Replicated | Halt


class Phase(Enum):
    """The state of the session."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    SEARCHING = "searching"
    STREAMING = "streaming"


class LogSender:
    """The leader's side in one process, over all its sessions."""

    def __init__(
        self,
        *,
        cluster: bytes,
        shard: int,
        me: wire.ReplicaProcess,
        follower_id: int,
        chain: ChainView,
        segment_size_bytes: int,
        epoch: int = 0,
        log_start: int = 0,
        confirmed: int = 0,
        sessions_before: int = 0,
        generation: int = 0,
        limits: SenderLimits | None = None,
    ) -> None:
        """Args: `confirmed`: the confirmed end now. `log_start`: the leader's first stored offset.

        `sessions_before`: the sessions of `me` in this epoch have higher numbers. `generation`: processes of an older
        generation of the follower are not heard (R17 of docs/design.md).
        """
        self._cluster = cluster
        self._shard = shard
        self._me = me
        self._chain = chain
        self._size = segment_size_bytes
        self._epoch = epoch
        self._log_start = log_start
        self._limits = limits or SenderLimits()
        self._peer = wire.ReplicaProcess(follower_id, 0)
        self._generation = generation

        #: time of the step under way
        self._now_ms = 0
        self._effects: list[SenderEffect] = []
        self._session = sessions_before

        self._search: MatchSearch | None = None
        self._committed = 0
        self._may_linger = False
        #: since when bytes wait to be sent; None: none do
        self._unsent_since_ms: int | None = None
        self._sent_end = 0
        self._sent_value = 0
        self._sent_at_ms = 0
        #: the confirmed end in the last frame
        self._sent_confirmed = 0
        #: since when the chain does not have the next units; None: it has
        self._starved_ms: int | None = None
        self._in_flight: deque[int] = deque()
        #: before then nothing is sent to a follower that catches up
        self._catch_up_ms = 0.0
        #: the end of the frame whose ack is timed, and when it was sent; None: no frame is
        self._timed: tuple[int, int] | None = None
        #: None: no ack was timed yet
        self._smoothed_ack_ms: float | None = None
        self._next_connect_ms = 0
        self._received_ms = 0

        #: the state of the session
        self.phase = Phase.IDLE
        #: the follower's log equals the leader's up to here, as far as this session knows
        self.matched_end = 0
        #: the matched bytes are durable at the follower up to here
        self.replicated_end = 0
        #: the follower has everything that it ever reported as durable, so that its acks count
        self.is_complete = False
        #: when the follower acknowledged last; 0: not yet
        self.heard_ms = 0
        #: the confirmed end
        self.confirmed = confirmed
        #: why replication makes no progress, or "" while it does
        self.stall_reason = ""
        #: frames dropped because they belong to another process, session or addressee
        self.dropped = 0

    def set_limits(self, limits: SenderLimits) -> None:
        """Keep to other limits from now on."""
        self._limits = limits

    def step(self, event: SenderEvent, now_ms: int) -> list[SenderEffect]:
        """Take one event. Returns: the effects to perform, in order."""
        self._now_ms, self._effects = now_ms, []

        if isinstance(event, LeaderProgress):
            self._committed = max(self._committed, event.committed)
            self.confirmed = max(self.confirmed, event.confirmed)
            self._may_linger = event.may_linger
        elif isinstance(event, FrameReceived):
            self._receive(event)
        elif isinstance(event, Connected):
            self._log_start = max(self._log_start, event.log_start)
            self._send_hello()
        elif isinstance(event, Disconnected) and self.phase is not Phase.IDLE:
            # While idle it reports a connection that this side has dropped, with its own delay.
            self._drop(self._limits.retry_ms, event.reason)
        elif isinstance(event, Damaged):
            self._halt(event.reason)

        self._check_time()
        if self.phase is Phase.STREAMING:
            self._send_units()
        return self._effects

    def wait_ms(self, now_ms: int) -> int:
        """How long `step` may stay uncalled without an event."""
        if self.phase is Phase.IDLE:
            return max(0, self._next_connect_ms - now_ms)
        if self.phase is not Phase.STREAMING:
            return self._limits.heartbeat_ms
        due_ms = self._sent_at_ms + self._heartbeat_ms
        if self._is_throttled(now_ms):
            return max(0, min(due_ms, math.ceil(self._catch_up_ms)) - now_ms)
        if self._unsent_since_ms is not None and self._may_linger:
            linger_due_ms = self._unsent_since_ms + self._limits.linger_ms
            if linger_due_ms > now_ms:
                # Bytes that are due wait for an ack, because the window is full.
                due_ms = min(due_ms, linger_due_ms)
        return max(0, due_ms - now_ms)

    def ack_ms(self, now_ms: int) -> float:
        """How long the follower takes from a frame to its durable end: smoothed, or the wait under way if longer.

        Infinite before the first ack: what is not known displaces nothing.
        """
        if self._smoothed_ack_ms is None:
            return math.inf
        waited_ms = 0 if self._timed is None else now_ms - self._timed[1]
        return max(self._smoothed_ack_ms, waited_ms)

    @property
    def _heartbeat_ms(self) -> int:
        """How long the stream may be silent."""
        has_all = self.replicated_end >= self._sent_end and self._sent_confirmed >= self.confirmed
        return self._limits.idle_heartbeat_ms if has_all else self._limits.heartbeat_ms

    # --- the session ------------------------------------------------------------------------------

    def leader_ended(self) -> Send | None:
        """The last frame of a session whose leader's process has ended; None without a session."""
        if self.phase is not Phase.STREAMING:
            return None
        return Send(self._header(), wire.LeaderEnded(), 0, 0)

    def _send_hello(self) -> None:
        """Begin a session on a new connection."""
        if self.phase is not Phase.CONNECTING:
            return
        self._session += 1
        self._peer = wire.ReplicaProcess(self._peer.id, 0)
        self._in_flight.clear()
        self.matched_end = self.replicated_end = 0
        self.phase = Phase.GREETING
        self._received_ms = self._now_ms
        self._send(wire.Hello(self._committed, self.confirmed))

    def _receive(self, event: FrameReceived) -> None:
        """Take a frame of this session. Others are only counted."""
        header, message = event
        if not self._is_mine(header):
            self.dropped += 1
            return

        self._received_ms = self._now_ms
        if isinstance(message, wire.Refusal):
            self._halt(f"the follower refuses: {message.text}")
        elif isinstance(message, wire.HelloReply) and self.phase is Phase.GREETING:
            self._peer = header.sender
            self._handle_hello_reply(message)
        elif isinstance(message, wire.ProbeReply) and self._search is not None:
            self._search.answer(*message)
            self._continue_search()
        elif isinstance(message, wire.Ack) and self.phase is Phase.STREAMING:
            self._handle_ack(message)
        elif isinstance(message, wire.Conflict) and self.phase is Phase.STREAMING:
            # The follower's log is not as this session assumed: a new session finds the match again.
            self._effects.append(Disconnect("conflict"))
            self._drop(0, f"conflict at {message.end}")

    def _is_mine(self, header: wire.FrameHeader) -> bool:
        """Whether the frame answers this process and session, and comes from the process that answered Hello."""
        return (
            header.cluster == self._cluster
            and header.shard == self._shard
            and header.addressee == self._me
            and header.sender.id == self._peer.id
            and header.sender.generation >= self._generation
            and header.session == self._session
            and self.phase in (Phase.GREETING, Phase.SEARCHING, Phase.STREAMING)
            and self._peer.incarnation in (0, header.sender.incarnation)
        )

    def _handle_hello_reply(self, theirs: wire.HelloReply) -> None:
        """Find where both logs match: at the follower's end if their chain values are equal there, else by a search."""
        if theirs.epoch > self._epoch:
            self._halt(f"the follower's log is of epoch {theirs.epoch}, newer than {self._epoch}")
            return
        if theirs.confirmed > self._committed:
            self._halt(
                f"the follower holds confirmed records up to {theirs.confirmed}, but the leader's "
                f"log ends at {self._committed}: the leader has lost data; copy the follower's "
                "store back, or remove the follower's data directory to give up those records"
            )
            return

        self.phase = Phase.SEARCHING
        if theirs.appended_end == 0 and self._log_start:
            self._begin_empty_log()
            return
        if theirs.chain_value >= 0 and self._value_at(theirs.appended_end) == theirs.chain_value:
            self._start_stream(Match(theirs.appended_end, theirs.chain_value))
            return

        upto = min(theirs.appended_end, self._committed)
        self._search = MatchSearch(
            self._chain, upto, log_start=self._log_start, segment_size_bytes=self._size
        )
        self._continue_search()

    def _begin_empty_log(self) -> None:
        """Let an empty follower begin where this log does: its oldest files are deleted."""
        head = self._chain.read_from(self._log_start, 1)
        if not head:
            # Meanwhile this file was deleted, too. The next session knows the new start.
            self._effects.append(Disconnect("deleted"))
            self._drop(0, f"the log does not begin at {self._log_start} any more")
            return
        match = Match(self._log_start, head[0].previous)
        self._send(wire.BeginLog(*match))
        self._start_stream(match)

    def _value_at(self, offset: int) -> int | None:
        """The leader's chain value at an offset, or None if that takes a search."""
        if offset < self._log_start:
            return None
        if offset == self._sent_end:
            return self._sent_value
        following = self._chain.read_from(offset, 1) if offset < self._committed else []
        return following[0].previous if following else None

    def _continue_search(self) -> None:
        """Send the next probe, or end the search."""
        search = self._search
        if search is None:
            return
        if search.failed:
            self._halt(
                "the follower has nothing in common with the leader's log, which begins at "
                f"{self._log_start}: replace that replica (raymq shard replace-replica)"
            )
        elif search.found is None:
            self._send(search.probe())
        else:
            self._start_stream(search.found)

    def _start_stream(self, match: Match) -> None:
        self._sent_end, self._sent_value = match
        self._search = None
        self._starved_ms = None
        self.stall_reason = ""
        self.phase = Phase.STREAMING
        # The first frame, even without units, lets the follower check the match and report its durable end.
        self._append(())

    def _handle_ack(self, ack: wire.Ack) -> None:
        """Raise the matched end, and the replicated end by what is durable below it."""
        if ack.matched_end > self._sent_end:
            self.dropped += 1
            return
        self.heard_ms = self._now_ms
        self.matched_end = max(self.matched_end, ack.matched_end)
        while self._in_flight and self._in_flight[0] <= self.matched_end:
            self._in_flight.popleft()
        # Bytes after the match may be durable there, but they are not known to be the leader's.
        durable = min(ack.durable_end, self.matched_end)
        counts_now = ack.is_complete and not self.is_complete and self.replicated_end > 0
        self.is_complete = ack.is_complete
        if durable > self.replicated_end or counts_now:
            self.replicated_end = max(durable, self.replicated_end)
            self._effects.append(Replicated(self.replicated_end))
        if self._timed is not None and self._timed[0] <= self.replicated_end:
            taken_ms = float(self._now_ms - self._timed[1])
            before_ms = taken_ms if self._smoothed_ack_ms is None else self._smoothed_ack_ms
            self._smoothed_ack_ms = before_ms + (taken_ms - before_ms) * ACK_TIME_WEIGHT
            self._timed = None

    def _halt(self, reason: str) -> None:
        """Disconnect, report a new reason to the operator, and try again later."""
        self._effects.append(Disconnect("halted"))
        if reason != self.stall_reason:
            self._effects.append(Halt(reason))
        self._drop(self._limits.halt_retry_ms, reason)

    def _drop(self, retry_ms: int, reason: str) -> None:
        self.phase = Phase.IDLE
        self.stall_reason = reason
        self._search = None
        self._in_flight.clear()
        self._timed = None
        self._next_connect_ms = self._now_ms + retry_ms

    def _check_time(self) -> None:
        """Connect when it is due, and disconnect from a silent follower."""
        if self.phase is Phase.IDLE:
            if self._now_ms >= self._next_connect_ms:
                self.phase = Phase.CONNECTING
                self._sent_at_ms = self._now_ms
                self._effects.append(Connect())
        elif (
            self.phase is not Phase.CONNECTING
            and self._now_ms - self._received_ms > self._limits.silence_ms
        ):
            self._effects.append(Disconnect("silent"))
            self._drop(self._limits.retry_ms, "the follower is silent")

    # --- the stream -------------------------------------------------------------------------------

    def _send_units(self) -> None:
        """Send units while the window has room, and a heartbeat if nothing was sent for long."""
        limits = self._limits
        while (
            self._sent_end < self._committed
            and not self._lingers()
            and not self._is_throttled(self._now_ms)
            and len(self._in_flight) < limits.window_frames
            and self._sent_end - self.matched_end < limits.window_bytes
        ):
            units = self._next_units()
            if not units:
                if self._is_starved():
                    self._effects.append(Disconnect("no units"))
                    self._drop(limits.retry_ms, f"the chain has no unit at {self._sent_end}")
                    return
                break
            self._starved_ms = None
            self._append(units)
        if self._now_ms - self._sent_at_ms >= self._heartbeat_ms:
            self._append(())

    def _lingers(self) -> bool:
        """Whether the unsent bytes wait for more, so that one frame, one sync and one ack serve many puts."""
        if self._unsent_since_ms is None:
            self._unsent_since_ms = self._now_ms
        return (
            self._may_linger
            and self._committed - self._sent_end < self._limits.linger_bytes
            and self._now_ms - self._unsent_since_ms < self._limits.linger_ms
        )

    def _is_throttled(self, now_ms: int) -> bool:
        """Whether the follower catches up, has got its share of bytes until later, and keeps no put waiting."""
        lag = self._committed - self._sent_end
        return self._may_linger and lag >= self._limits.frame_bytes and now_ms < self._catch_up_ms

    def _is_starved(self) -> bool:
        """Whether the chain gives no whole unit below the committed end for long.

        Retention may have deleted the file of the next units. A new session knows the log's new start.
        """
        if self._starved_ms is None:
            self._starved_ms = self._now_ms
        return self._now_ms - self._starved_ms > self._limits.silence_ms

    def _next_units(self) -> tuple[ChainUnit, ...]:
        """The units after the bytes sent, of one segment, so that the body is one range of a file."""
        units = self._chain.read_from(self._sent_end, self._limits.frame_bytes)[: wire.UNITS_LIMIT]
        segment_end = segment_start_of(self._sent_end, self._size) + self._size
        limit = min(self._committed, segment_end)
        # From the first on: a unit beyond the limit is still being written, and may be seen in part.
        return tuple(itertools.takewhile(lambda unit: unit.start < unit.end <= limit, units))

    def _append(self, units: tuple[ChainUnit, ...]) -> None:
        message = wire.AppendEntries(self._sent_end, self._sent_value, self.confirmed, units)
        self._sent_confirmed = self.confirmed
        self._send(message, self._sent_end, message.end)
        if units:
            self._sent_end, self._sent_value = units[-1].end, units[-1].value
            if self._sent_end >= self._committed:
                self._unsent_since_ms = None
            if self._limits.catch_up_bytes_per_s:
                took_ms = (
                    1000 * (self._sent_end - message.prev_end) / self._limits.catch_up_bytes_per_s
                )
                self._catch_up_ms = max(self._now_ms, self._catch_up_ms) + took_ms
            if self._timed is None:
                self._timed = self._sent_end, self._now_ms
            self._in_flight.append(self._sent_end)

    def _send(self, message: wire.ReplicaMessage, start: int = 0, stop: int = 0) -> None:
        self._sent_at_ms = self._now_ms
        self._effects.append(Send(self._header(), message, start, stop))

    def _header(self) -> wire.FrameHeader:
        return wire.FrameHeader(
            self._cluster, self._shard, self._me, self._peer, self._epoch, self._session
        )
