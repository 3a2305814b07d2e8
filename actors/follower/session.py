"""The follower's side of replication, inside the follower's CommitLog process.

A stream delivers frames, `LogReceiver` decides, and `FollowerLog` performs its effects. Promise, append, truncation
and acknowledgement happen under one lock, so no answer describes a log that another stream is changing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from raymq.actors.api.shard_api import Frames, SendFrame
from raymq.actors.supervise.elections import Elections
from raymq.replication import log_receiver, wire
from raymq.replication.election_events import CopyLog, LeaderHeard, LeaderLost
from raymq.store.base.errors import ChainDamaged, RayMQError, Rejected, Unavailable
from raymq.store.log.chain import ChainUnit

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: how often the acknowledging thread checks whether its stream has ended
ACK_WAIT_MS = 500
#: log bytes of a frame without an ack of its own, if their sync is still to come
UNACKNOWLEDGED_BYTES_MAX = 64 << 10
#: acks since the leader's last frame that a thread sends which must not block. HTTP/2 takes 400 of a leader that reads
#: nothing
UNREAD_ACKS_MAX = 50
#: between two checks of a log that is stopping, whose `wait_durable` returns at once
STOPPING_WAIT_S = 0.002


class FollowerLog(log_receiver.LogView, Protocol):
    """The follower's log. Calls that change it come one at a time."""

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Append units that continue the log. `data` is their bytes. Raises: Corrupt when a CRC differs."""

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Replace the chain from `units[0].start` on. Bytes after the log's end are written.

        Below its end the log has the units' bytes already. Raises: Corrupt when a CRC differs.
        """

    def truncate(self, offset: int) -> None:
        """Cut the log, durably. Raises: Corrupt below the confirmed end."""

    def begin_at(self, start: int, chain_value: int) -> None:
        """Let the empty log begin at the start of a file, where the leader's chain value is `chain_value`. Durable."""

    def advance_confirmed(self, confirmed: int) -> None:
        """The confirmed end is at least this."""

    def note_heard(self, confirmed: int, epoch: int) -> None:
        """The leader of an epoch, which is not over here, names this confirmed end now."""

    def wait_durable(self, offset: int, timeout_ms: int) -> int:
        """Wait until `durable() >= offset`, the log is stopping, or the time is up. Returns: the durable end."""

    def is_stopping(self) -> bool:
        """Whether `wait_durable` returns at once, because the process is ending."""


class FollowerSession:
    """The streams of one follower process.

    Callers: one thread per stream, in `run`. Only the newest stream is served.
    """

    def __init__(
        self,
        log: FollowerLog,
        identity: dict[str, Any],
        elections: Elections,
        *,
        leader_id: int | None = 0,
    ) -> None:
        """Args: `identity`: cluster_id and shard.

        `leader_id`: the only replica that leads; None: any may.
        """
        self._log = log
        self._elections = elections
        self._lock = threading.Lock()
        #: of `matched`. One assignment, made after all effects of a frame: elections read it at any time
        self._matched = (0, 0)
        #: the one that is served; None: none is
        self._stream: _LeaderStream | None = None
        self._machine = log_receiver.LogReceiver(
            cluster=wire.cluster_key(str(identity["cluster_id"])),
            shard=int(identity["shard"]),
            me=elections.me,
            leader_id=leader_id,
            highest_epoch=elections.epoch,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the frame that is being served."""
        return self._machine.highest_epoch

    def take_copied(self, offer: CopyLog, message: wire.AppendEntries, data: memoryview) -> None:
        """See `LeaderStreams.take_copied`. Callers: after an error of it, with no later bytes of that copy."""
        with self._lock:
            epoch = self._elections.epoch_to_copy(offer)
            if epoch is None:
                raise Unavailable(
                    "this replica has heard a leader, or asks for votes, or has more than that log by now",
                    field="epoch",
                )
            # No match with a leader holds once bytes are replaced.
            self._matched = (0, 0)
            for effect in self._machine.copy(offer.source, epoch, message, data, self._log):
                if isinstance(effect, log_receiver.Reply):
                    raise Unavailable(f"the logs differ: {effect.message}", field="prev_end")
                self._change(effect, data)

    def matched(self) -> tuple[int, int]:
        """Up to where the log equals that of a leader, 0 before it was compared; and the epoch of that leader."""
        return self._matched

    def run(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream until it ends, a newer stream replaces it, or a frame is refused.

        Raises: Rejected for a frame that cannot be read; the errors of `frames` and `send`.
        """
        stream = _LeaderStream(send)
        acknowledger = threading.Thread(
            target=self._acknowledge_syncs, args=(stream,), name="raymq-sync-acks", daemon=True
        )
        acknowledger.start()
        try:
            for frame, body in frames:
                if not self._serve(frame, body, stream):
                    return
        finally:
            stream.ended.set()
            with self._lock:
                if self._stream is stream:
                    self._stream = None
            acknowledger.join()

    def _serve(self, frame: bytes, body: Buffer, stream: _LeaderStream) -> bool:
        header, message = wire.decode(frame)
        data = None if body is None else memoryview(body).cast("B")
        if isinstance(message, wire.AppendEntries):
            _check_body(message, data)
        stream.unread_acks = 0

        with self._lock:
            machine = self._machine
            replies, acknowledges = self._perform(header, message, data)
            # The log may have been cut.
            stream.acknowledged = min(stream.acknowledged, self._log.durable())
            current = machine.header()
            served = (header.sender, header.session) == (current.addressee, current.session)
            refused = any(isinstance(reply, wire.Refusal) for reply in replies)
            if served:
                stream.header = current
                self._stream = stream
                if refused:
                    machine.leave()
                matched_end = machine.matched_end if machine.matched else 0
                self._matched = (matched_end, machine.highest_epoch)
                if acknowledges and isinstance(message, wire.AppendEntries):
                    self._log.note_heard(message.confirmed, header.epoch)
            elif stream.header is not None:
                # A newer stream of the leader is served.
                return False
            answering = current._replace(addressee=header.sender, session=header.session)

        for reply in replies:
            stream.send(wire.encode(answering, reply))
        if acknowledges and not self._sync_follows(data):
            self._send_ack(stream)
        return not refused

    def _sync_follows(self, data: memoryview | None) -> bool:
        """Whether the ack of the sync is soon enough for these bytes: each ack costs as much as a small append."""
        is_small = data is not None and len(data) <= UNACKNOWLEDGED_BYTES_MAX
        return is_small and self._log.durable() < self._log.tail().end

    def _perform(
        self, header: wire.FrameHeader, message: wire.ReplicaMessage, data: memoryview | None
    ) -> tuple[list[wire.ReplicaMessage], bool]:
        """Perform the effects of one message. Returns: the replies, and whether to acknowledge."""
        replies: list[wire.ReplicaMessage] = []
        acknowledges = False

        try:
            if self._machine.is_mine(header, message):
                # The epoch is on disk before any answer under it.
                if not self._elections.follows(header.sender, header.epoch):
                    self._elections.step(LeaderHeard(header.sender, header.epoch))
                if not self._elections.admits(header.sender, header.epoch):
                    return [self._refusal_of_leader(header)], False
                if isinstance(message, wire.LeaderEnded):
                    self._elections.step(LeaderLost(header.sender.id, header.epoch))
                    return [], False
            if isinstance(message, wire.Hello):
                # The effects may cut what was equal to the log of an earlier leader.
                self._matched = (0, 0)
            for effect in self._machine.step(header, message, data, self._log):
                if isinstance(effect, log_receiver.Reply):
                    replies.append(effect.message)
                elif isinstance(effect, log_receiver.Acknowledge):
                    acknowledges = True
                else:
                    self._change(effect, data)
        except (RayMQError, OSError) as error:
            # Units that could not be stored are not acknowledged. The leader connects again and asks.
            is_damaged = isinstance(error, ChainDamaged)
            reason = wire.Reason.DAMAGED if is_damaged else wire.Reason.UNAVAILABLE
            return [wire.Refusal(reason, self._machine.highest_epoch, str(error))], False

        return replies, acknowledges

    def _refusal_of_leader(self, header: wire.FrameHeader) -> wire.Refusal:
        """The refusal of a leader whose epoch is over, or that was replaced (rules R4 and R17 of docs/design.md)."""
        newest = self._elections.epoch
        text = f"epoch {header.epoch} is over, because this follower has heard epoch {newest}"
        if self._elections.is_replaced(header.sender):
            text = f"an operator has replaced replica {header.sender.id}, whose process this is"
        return wire.Refusal(wire.Reason.EPOCH, newest, text)

    def _change(self, effect: log_receiver.ReceiverEffect, data: memoryview | None) -> None:
        log = self._log
        if isinstance(effect, log_receiver.AppendUnits):
            log.append_units(list(effect.units), log_receiver.bytes_of(effect.units, data))
        elif isinstance(effect, log_receiver.AdoptUnits):
            log.adopt_units(list(effect.units), log_receiver.bytes_of(effect.units, data))
        elif isinstance(effect, log_receiver.Truncate):
            log.truncate(effect.offset)
        elif isinstance(effect, log_receiver.BeginAt):
            log.begin_at(effect.start, effect.chain_value)
        elif isinstance(effect, log_receiver.AdvanceConfirmed):
            log.advance_confirmed(effect.confirmed)

    def _acknowledge_syncs(self, stream: _LeaderStream) -> None:
        while not stream.ended.is_set():
            self._log.wait_durable(stream.acknowledged + 1, ACK_WAIT_MS)
            if not self._note_synced(stream):
                if self._log.is_stopping():
                    stream.ended.wait(STOPPING_WAIT_S)
                continue
            try:
                self._send_ack(stream)
            except Exception:
                if not stream.broken:
                    raise
                # Its reader gets an error too.
                return

    def _note_synced(self, stream: _LeaderStream) -> bool:
        """Whether another end is durable than was acknowledged. It counts as acknowledged now."""
        # A cut changes both ends. One that was read before it would hide the next sync.
        with self._lock:
            durable = self._log.durable()
            is_new = durable != stream.acknowledged
            stream.acknowledged = durable
        return is_new

    def acknowledge_synced(self) -> bool:
        """Acknowledge what is durable, if that takes no wait. To wake the stream's thread for it costs as much.

        Callers: the ack loop. Returns: False: the thread of the stream has to acknowledge it.
        """
        stream = self._stream
        if stream is None or stream.ended.is_set() or stream.unread_acks >= UNREAD_ACKS_MAX:
            return False
        if not stream.send_lock.acquire(blocking=False):
            return False

        try:
            if not self._lock.acquire(blocking=False):
                return False
            try:
                durable, frame = self._log.durable(), self._make_ack(stream)
                if frame is None:
                    return False
                stream.acknowledged = max(stream.acknowledged, durable)
            finally:
                self._lock.release()

            stream.unread_acks += 1
            stream.send(frame)
            return True
        except Exception:
            if not stream.broken:
                raise
            # Its reader gets an error too.
            return False
        finally:
            stream.send_lock.release()

    def _send_ack(self, stream: _LeaderStream) -> None:
        # The stream's send lock first: acknowledgements are sent in the order in which they are made.
        with stream.send_lock:
            with self._lock:
                frame = self._make_ack(stream)
            if frame is not None:
                stream.send(frame)

    def _make_ack(self, stream: _LeaderStream) -> bytes | None:
        """The ack of the log as it is; None if the stream may carry none. Needs the lock."""
        machine = self._machine
        current = machine.header()
        if not machine.matched or stream.header != current:
            return None
        ack = machine.acknowledge(self._log, is_complete=self._elections.is_complete)
        # Asked after the ends were read: the next leader need not have what comes after a vote.
        if not self._elections.admits(current.addressee, current.epoch):
            return None
        return wire.encode(current, ack)


class _LeaderStream:
    """One stream of a leader."""

    def __init__(self, send: SendFrame) -> None:
        self._send = send
        #: guards sending. A thread takes it before the session's lock
        self.send_lock = threading.RLock()
        #: the durable end that was acknowledged last, as far as the log was not cut since
        self.acknowledged = -1
        self.ended = threading.Event()
        #: a send failed: the transport has ended the stream
        self.broken = False
        #: acks of `acknowledge_synced` since the last frame of the leader
        self.unread_acks = 0
        #: of the session that this stream carries, or None before its Hello
        self.header: wire.FrameHeader | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame, one at a time."""
        with self.send_lock:
            try:
                self._send(frame, None)
            except BaseException:
                self.broken = True
                raise


def _check_body(message: wire.AppendEntries, data: memoryview | None) -> None:
    found = 0 if data is None else len(data)
    expected = message.end - message.prev_end
    at = message.prev_end
    for unit in message.units:
        if unit.start != at or unit.end <= at:
            raise Rejected("the units of a frame are not contiguous", field="units", limit=at)
        at = unit.end
    if found != expected:
        raise Rejected(
            f"a frame has {found} log bytes, its units say {expected}", field="body", limit=expected
        )
