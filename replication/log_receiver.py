"""The follower's side of replication as a pure machine.

`step(header, message, data, log)` reads the log through a read-only view and returns effects. The caller holds the
replica's writer lock while it steps and performs the effects. It answers `Acknowledge` from the log after the effects.

Invariant: bytes below the follower's confirmed end never change. Bytes above that end are cut only on proof, that is
after a leader's bytes were compared with them and differ.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from raymq.store.log.chain import ChainUnit

from . import wire


class LogTail(NamedTuple):
    """Where a log ends, with the chain value and the epoch of its last unit."""

    end: int
    chain_value: int
    epoch: int


class LogView(Protocol):
    """The follower's log, as the machine reads it."""

    def tail(self) -> LogTail:
        """The appended end, and the last unit's facts."""

    def chain_value_at(self, offset: int) -> int | None:
        """The chain value after the unit that ends at `offset`, or None if no unit ends there."""

    def is_empty(self) -> bool:
        """Whether the log has no byte, wherever it begins."""

    def durable(self) -> int:
        """The durable end: everything below it is in the log as durably as the flush mode asks."""

    def confirmed(self) -> int:
        """The confirmed end, as far as this replica knows."""

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        """The first offset at which the log's bytes differ from the units' bytes, or the end of the shorter of both.

        Raises: Corrupt when `data` has other CRCs than its units: such bytes prove nothing.
        """


# --- effects --------------------------------------------------------------------------------------


class AppendUnits(NamedTuple):
    """Append these units of the message. They continue the log."""

    units: tuple[ChainUnit, ...]


class AdoptUnits(NamedTuple):
    """The log has these units' bytes as far as it reaches: replace its chain by them, write the missing bytes."""

    units: tuple[ChainUnit, ...]


class Truncate(NamedTuple):
    """Cut the log here, above the confirmed end, durably."""

    offset: int


class BeginAt(NamedTuple):
    """Let the empty log begin at `start`, where the leader's chain value is `chain_value`."""

    start: int
    chain_value: int


class AdvanceConfirmed(NamedTuple):
    """The confirmed end is at least this."""

    confirmed: int


class Reply(NamedTuple):
    """Answer with this message."""

    message: wire.ReplicaMessage


class Acknowledge(NamedTuple):
    """Answer with an Ack of the log as it is after the effects before."""


class HaltReplica(NamedTuple):
    """Refuse everything from now on, until an operator repairs the store."""

    reason: str


ReceiverEffect: TypeAlias = (
    AppendUnits
    | AdoptUnits
    | Truncate
    | BeginAt
    | AdvanceConfirmed
    | Reply
    | Acknowledge
    | HaltReplica
)


class LogReceiver:
    """The follower's side in one process, over all its sessions."""

    def __init__(
        self,
        *,
        cluster: bytes,
        shard: int,
        me: wire.ReplicaProcess,
        leader_id: int | None = 0,
        highest_epoch: int = 0,
    ) -> None:
        """Args: `leader_id`: the only replica that leads; None: each may, and the caller admits its frames.
        `highest_epoch`: the highest epoch that this replica has heard, in earlier processes too.
        """
        self._cluster = cluster
        self._shard = shard
        self._me = me
        self._any_leader = leader_id is None
        self._leader = wire.ReplicaProcess(leader_id or 0, 0)
        self._session = 0

        #: the highest epoch received. The log's last epoch counts too
        self.highest_epoch = highest_epoch
        #: the log equals the leader's up to here, as far as this session knows
        self.matched_end = 0
        self._matched_value = 0
        self._matched = False

        #: why everything is refused, or "" while it is not
        self.halted = ""
        #: frames dropped because they belong to another process, session or addressee
        self.dropped = 0

    def step(
        self,
        header: wire.FrameHeader,
        message: wire.ReplicaMessage,
        data: memoryview | None,
        log: LogView,
    ) -> list[ReceiverEffect]:
        """Take one frame of a leader. Raises: Corrupt from `log.same_until`."""
        if not self.is_mine(header, message):
            self.dropped += 1
            return []

        epoch = max(self.highest_epoch, log.tail().epoch)
        if header.epoch < epoch:
            # The answer goes to the sender of this frame, which may not be the leader of this session.
            text = f"epoch {header.epoch} is over, because this follower has seen epoch {epoch}"
            return [Reply(wire.Refusal(wire.Reason.EPOCH, epoch, text))]
        self.highest_epoch = header.epoch

        if isinstance(message, wire.Hello):
            # The newest connection counts: from here on frames of older ones are dropped.
            self._leader, self._session = header.sender, header.session
            self.matched_end = self._matched_value = 0
            self._matched = False

        if self.halted:
            return [self._refuse(wire.Reason.HALTED, self.halted)]
        if isinstance(message, wire.Hello):
            return [self._greet(log)]
        if isinstance(message, wire.Probe):
            return [self._probe(message, log)]
        if isinstance(message, wire.AppendEntries):
            return self._append(message, data, log)
        if isinstance(message, wire.BeginLog):
            return self._begin(message, log)
        self.dropped += 1
        return []

    def copy(
        self,
        source: wire.ReplicaProcess,
        epoch: int,
        message: wire.AppendEntries,
        data: memoryview,
        log: LogView,
    ) -> list[ReceiverEffect]:
        """Take bytes of a log that cannot lead: see `log_copy`. No session with a leader survives it.

        A Reply among the effects says why they are not taken. Nothing is confirmed, and nothing is acknowledged.
        Args: `epoch`: of this replica's ballot.
        """
        header = wire.FrameHeader(self._cluster, self._shard, source, self._me, epoch, session=1)
        self.leave()
        try:
            self.step(header, wire.Hello(0, 0), None, log)
            effects = self.step(header, message, data, log)
        finally:
            self.leave()
        return [
            effect for effect in effects if not isinstance(effect, (AdvanceConfirmed, Acknowledge))
        ]

    def header(self) -> wire.FrameHeader:
        """The header of an answer to the present leader."""
        return wire.FrameHeader(
            self._cluster, self._shard, self._me, self._leader, self.highest_epoch, self._session
        )

    def acknowledge(self, log: LogView, *, is_complete: bool = True) -> wire.Ack:
        """The ack of this log. Durable bytes after the match are left out: they have not been compared."""
        end = log.tail().end
        return wire.Ack(self.matched_end, end, min(log.durable(), self.matched_end), is_complete)

    def leave(self) -> None:
        """Forget the session. Callers: at once when an effect failed, because the match means nothing then."""
        self._leader = wire.ReplicaProcess(self._leader.id, 0)
        self.matched_end = self._matched_value = 0
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether this session has been matched, so that an Ack means something to the leader."""
        return self._matched and not self.halted

    def is_mine(self, header: wire.FrameHeader, message: wire.ReplicaMessage) -> bool:
        """Whether a frame is for this process, and from the leader's process that it follows or a new one."""
        if header.cluster != self._cluster or header.shard != self._shard:
            return False
        if header.addressee.id != self._me.id:
            return False
        is_hello = isinstance(message, wire.Hello)
        if header.sender.id != self._leader.id and not (is_hello and self._any_leader):
            return False
        if is_hello:
            older = (
                header.sender == self._leader
                and header.epoch <= self.highest_epoch
                and header.session <= self._session
            )
            return not older and header.addressee.incarnation in (0, self._me.incarnation)
        return (
            header.addressee == self._me
            and header.sender == self._leader
            and header.session == self._session
        )

    def _refuse(self, reason: int, text: str) -> Reply:
        return Reply(wire.Refusal(reason, self.highest_epoch, text))

    def _greet(self, log: LogView) -> Reply:
        if log.is_empty():
            # An empty log ends at 0, wherever it was to begin: the leader's log may begin elsewhere by now.
            return Reply(wire.HelloReply(0, 0, 0, 0, 0))
        end, _, epoch = log.tail()
        value = log.chain_value_at(end)
        if value is None:
            value = -1
        return Reply(wire.HelloReply(end, log.durable(), log.confirmed(), value, epoch))

    def _probe(self, message: wire.Probe, log: LogView) -> Reply:
        candidates = message.candidates
        last_end = candidates[-1][0] if candidates else -1
        for index in range(len(candidates) - 1, -1, -1):
            if _holds(log, *candidates[index]):
                return Reply(wire.ProbeReply(index, last_end))
        return Reply(wire.ProbeReply(-1, last_end))

    def _begin(self, message: wire.BeginLog, log: LogView) -> list[ReceiverEffect]:
        """Begin where the leader's log does, unless this log has bytes, which that would lose."""
        if not log.is_empty():
            return [self._conflict(log)]
        return [BeginAt(message.start, message.chain_value)]

    def _conflict(self, log: LogView) -> Reply:
        tail = log.tail()
        return Reply(wire.Conflict(tail.epoch, tail.end))

    def _append(
        self, message: wire.AppendEntries, data: memoryview | None, log: LogView
    ) -> list[ReceiverEffect]:
        """Store the units if they continue the log, then move the confirmed end."""
        if message.prev_end == 0 and log.tail().end and log.is_empty():
            # An earlier leader's log began later than this leader's.
            return [BeginAt(0, 0), Reply(wire.Conflict(0, 0))]
        is_known = (
            message.prev_end == self.matched_end and message.prev_chain == self._matched_value
        )
        if not is_known and not _holds(log, message.prev_end, message.prev_chain):
            return [self._conflict(log)]

        self._match(message.prev_end, message.prev_chain)
        effects = self._store(message, data, log)
        if self.halted:
            return effects
        if message.units:
            self._match(message.end, message.units[-1].value)

        confirmed = min(message.confirmed, self.matched_end)
        if confirmed > log.confirmed():
            effects.append(AdvanceConfirmed(confirmed))
        effects.append(Acknowledge())
        return effects

    def _match(self, end: int, value: int) -> None:
        self._matched = True
        if end >= self.matched_end:
            self.matched_end, self._matched_value = end, value

    def _store(
        self, message: wire.AppendEntries, data: memoryview | None, log: LogView
    ) -> list[ReceiverEffect]:
        """The effects that make the log hold the units: none for those that it holds already."""
        units = message.units
        end, value, _ = log.tail()
        if units and units[0].start == end and units[0].previous == value:
            return [AppendUnits(units)]

        # Bytes that were sent before: equal chain values mean equal logs, so there is nothing to write or compare.
        held = 0
        while (
            held < len(units)
            and units[held].end <= end
            and _holds(log, units[held].end, units[held].value)
        ):
            held += 1

        units = units[held:]
        if not units:
            return []
        if units[0].start == end and units[0].previous == value:
            return [AppendUnits(units)]
        return self._reconcile(message._replace(units=units), data, log)

    def _reconcile(
        self, message: wire.AppendEntries, data: memoryview | None, log: LogView
    ) -> list[ReceiverEffect]:
        """The log has these bytes in other units: compare, then keep them or replace them above the confirmed end."""
        units = message.units
        same = log.same_until(list(units), bytes_of(units, data))
        if same >= min(log.tail().end, units[-1].end):
            return [AdoptUnits(units)]
        if same < log.confirmed():
            self.halted = (
                f"bytes at {same} differ from the leader's below this follower's confirmed offset "
                f"{log.confirmed()}: one of the two stores is damaged; run `raymq store verify` on "
                "both"
            )
            return [HaltReplica(self.halted), self._refuse(wire.Reason.HALTED, self.halted)]

        differs = next(unit for unit in units if same < unit.end)
        # This follower may not know yet the confirmed end that its own acks made possible. Its bytes below that end
        # must stay on its disk, even if a unit that differs begins before it.
        confirmed = max(log.confirmed(), min(message.confirmed, same))
        return [Truncate(max(differs.start, confirmed)), AdoptUnits(units)]


def bytes_of(units: tuple[ChainUnit, ...], data: memoryview | None) -> memoryview:
    """The bytes of a frame's last units."""
    whole = memoryview(b"") if data is None else data
    return whole[len(whole) - (units[-1].end - units[0].start) :]


def _holds(log: LogView, end: int, value: int) -> bool:
    """Whether the log has this chain value at this offset. At 0 all logs are equal."""
    return end == 0 or log.chain_value_at(end) == value
