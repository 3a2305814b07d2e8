"""The follower's end of replication, inside the follower's CommitLog process (design D5).

Frames come in from a stream, `MirrorFollower` decides, the store port performs. Promise, append,
truncation and acknowledgement happen under one lock, so that no answer ever describes a log that
another stream is changing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from raymq.replication.mirror_follower import (
    Acknowledge,
    AdoptUnits,
    AdvanceConfirmed,
    AppendUnits,
    Effect,
    LogView,
    MirrorFollower,
    Reply,
    Truncate,
    bytes_of,
)
from raymq.replication.wire import (
    Append,
    Header,
    Member,
    Message,
    Reason,
    Refused,
    cluster_key,
    decode,
    encode,
)
from raymq.store.errors import Corrupt, RayMQError, Rejected
from raymq.store.log.chain import ChainUnit

#: how often the acknowledging thread looks whether its stream still lives
ACK_WAIT_MS = 200
#: between two looks at a store that does not wait any more
STOPPING_WAIT_S = 0.002

Frames = Iterator[tuple[bytes, Any]]
SendFrame = Callable[[bytes, Any], None]


class StorePort(LogView, Protocol):
    """The follower's log. Calls that change it come one at a time."""

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Append units that continue the log; `data` is their bytes.

        Raises: Corrupt when a CRC does not fit.
        """

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Replace the chain from `units[0].start` on; the log's bytes are theirs as far as it
        reaches, the rest is written. Raises: Corrupt when a CRC does not fit.
        """

    def truncate(self, offset: int) -> None:
        """Cut the log, durably. Raises: Corrupt below C."""

    def advance_confirmed(self, confirmed: int) -> None:
        """C is at least this."""

    def wait_synced(self, offset: int, timeout_ms: int) -> int:
        """Wait until `synced() >= offset` or the time is up. Returns: the synced end."""


class FollowerSession:
    """One life of a follower.

    Callers: one thread a stream in `run`; the newest stream's leader is served.
    """

    def __init__(self, store: StorePort, identity: dict[str, Any]) -> None:
        """Args: identity: cluster_id, shard, replica, incarnation of this process."""
        self._store = store
        self._lock = threading.Lock()
        self._machine = MirrorFollower(
            cluster=cluster_key(str(identity["cluster_id"])),
            shard=int(identity["shard"]),
            me=Member(int(identity["replica"]), int(identity["incarnation"])),
        )

    def run(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream until it ends, or another stream's leader has taken over, or a frame was
        refused.

        Raises: Rejected for a frame that cannot be read; what `frames` and `send` raise.
        """
        stream = _Stream(send)
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
            acknowledger.join()

    def status(self) -> dict[str, Any]:
        """For people."""
        machine = self._machine
        return {
            "matched_end": machine.matched_end,
            "promised": machine.promised,
            "halted": machine.halted or None,
            "dropped_frames": machine.dropped,
        }

    def _serve(self, frame: bytes, body: Any, stream: _Stream) -> bool:
        header, message = decode(frame)
        data = None if body is None else memoryview(body).cast("B")
        if isinstance(message, Append):
            _check_body(message, data)
        with self._lock:
            machine = self._machine
            replies, acknowledges = self._perform(header, message, data)
            current = machine.header()
            served = (header.sender, header.session) == (current.addressee, current.session)
            refused = any(isinstance(reply, Refused) for reply in replies)
            if served:
                stream.header = current
                if refused:
                    machine.leave()
            elif stream.header is not None:
                # A newer connection of the leader is served.
                return False
            answering = current._replace(addressee=header.sender, session=header.session)
        for reply in replies:
            stream.send(encode(answering, reply))
        if acknowledges:
            self._send_ack(stream)
        return not refused

    def _perform(
        self, header: Header, message: Message, data: memoryview | None
    ) -> tuple[list[Message], bool]:
        """Returns: what to answer, and whether to acknowledge."""
        replies: list[Message] = []
        acknowledges = False
        try:
            for effect in self._machine.step(header, message, data, self._store):
                if isinstance(effect, Reply):
                    replies.append(effect.message)
                elif isinstance(effect, Acknowledge):
                    acknowledges = True
                else:
                    self._change(effect, data)
        except (RayMQError, OSError) as error:
            # Nothing is acknowledged of what could not be stored; the leader comes back and asks.
            damaged = isinstance(error, Corrupt) and error.fields.get("rule") == "chain crc"
            reason = Reason.DAMAGED if damaged else Reason.UNAVAILABLE
            replies, acknowledges = [Refused(reason, self._machine.promised, str(error))], False
        return replies, acknowledges

    def _change(self, effect: Effect, data: memoryview | None) -> None:
        store = self._store
        if isinstance(effect, AppendUnits):
            store.append_units(list(effect.units), bytes_of(effect.units, data))
        elif isinstance(effect, AdoptUnits):
            store.adopt_units(list(effect.units), bytes_of(effect.units, data))
        elif isinstance(effect, Truncate):
            store.truncate(effect.offset)
        elif isinstance(effect, AdvanceConfirmed):
            store.advance_confirmed(effect.confirmed)

    def _acknowledge_syncs(self, stream: _Stream) -> None:
        seen = -1
        while not stream.ended.is_set():
            synced = self._store.wait_synced(seen + 1, ACK_WAIT_MS)
            if synced <= seen:
                # A store that is stopping does not wait.
                stream.ended.wait(STOPPING_WAIT_S)
                continue
            seen = synced
            try:
                self._send_ack(stream)
            except Exception:
                # The stream is broken, whatever its transport calls that; its reader finds out.
                return

    def _send_ack(self, stream: _Stream) -> None:
        # The stream's lock outside: acknowledgements leave in the order in which they were true.
        with stream.lock:
            with self._lock:
                machine = self._machine
                if not machine.matched or stream.header != machine.header():
                    return
                ack = encode(machine.header(), machine.acknowledge(self._store))
            stream.send(ack)


class _Stream:
    """One stream of a leader."""

    def __init__(self, send: SendFrame) -> None:
        self._send = send
        #: over sending; before the session's lock
        self.lock = threading.RLock()
        self.ended = threading.Event()
        #: of the session that this stream carries; None before its HELLO
        self.header: Header | None = None

    def send(self, frame: bytes) -> None:
        """One frame at a time."""
        with self.lock:
            self._send(frame, None)


def _check_body(message: Append, data: memoryview | None) -> None:
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
