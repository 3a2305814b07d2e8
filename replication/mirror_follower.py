"""The follower's side of replication: R1, R4, R8, R9 and R10 as a pure machine.

`step(header, message, log)` looks at the log through a read-only view and returns effects; whoever
performs them holds the replica's writer lock over both, and answers `Acknowledge` from the log as
it is then.

Invariant: bytes below the follower's own C never change. What differs above it is cut only on
proof, that is when a leader's bytes were compared and differ (R9).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from raymq.store.log.chain import ChainUnit

from .wire import (
    Ack,
    Append,
    Conflict,
    Header,
    Hello,
    HelloOk,
    Member,
    Message,
    Probe,
    ProbeOk,
    Reason,
    Refused,
)


class LogView(Protocol):
    """What the machine may know of the follower's log."""

    def end(self) -> tuple[int, int, int]:
        """(appended end, last chain value, last epoch)."""

    def chain_at(self, offset: int) -> tuple[int, int] | None:
        """(chain value, epoch) of the unit that ends at `offset`; None where no unit ends there."""

    def synced(self) -> int:
        """Everything below is durable, as the flush mode means it."""

    def confirmed(self) -> int:
        """The C this replica knows."""

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        """Where the log's bytes first differ from the units' bytes, or the end of the shorter of
        both.

        Raises: Corrupt when `data` has not the CRCs of its units: then it proves nothing.
        """


# --- effects --------------------------------------------------------------------------------------


class AppendUnits(NamedTuple):
    """Append the message's units from the `first` on; they continue the log."""

    units: tuple[ChainUnit, ...]


class AdoptUnits(NamedTuple):
    """The log's bytes are these units' as far as it reaches: take the units over, write what is
    missing.
    """

    units: tuple[ChainUnit, ...]


class Truncate(NamedTuple):
    """Cut the log here, above C, durably."""

    offset: int


class AdvanceConfirmed(NamedTuple):
    """C is at least this."""

    confirmed: int


class Reply(NamedTuple):
    """Answer with this."""

    message: Message


class Acknowledge(NamedTuple):
    """Answer with an ACK of the log as it is when everything before is done."""


class HaltReplica(NamedTuple):
    """Refuse everything from now on; a human must look."""

    reason: str


Effect: TypeAlias = (
    AppendUnits | AdoptUnits | Truncate | AdvanceConfirmed | Reply | Acknowledge | HaltReplica
)


class MirrorFollower:
    """One life of a follower, over all its sessions."""

    def __init__(self, *, cluster: bytes, shard: int, me: Member, leader_id: int = 0) -> None:
        self._cluster = cluster
        self._shard = shard
        self._me = me
        self._leader = Member(leader_id, 0)
        self._session = 0
        #: the highest epoch heard; the log's last epoch counts too
        self.promised = 0
        #: the log is the leader's up to here, as far as this session knows
        self.matched_end = 0
        self._matched_value = 0
        self._matched = False
        #: why everything is refused; "" while it is not
        self.halted = ""
        #: frames dropped because they were of another life, session or addressee (R1)
        self.dropped = 0

    def step(
        self, header: Header, message: Message, data: memoryview | None, log: LogView
    ) -> list[Effect]:
        """Take one frame of a leader. Raises: Corrupt from `log.same_until`."""
        if not self._is_mine(header, message):
            self.dropped += 1
            return []
        epoch = max(self.promised, log.end()[2])
        if header.epoch < epoch:
            # Answered to whoever asks, who may be a stranger to this session.
            text = f"epoch {header.epoch} is over, {epoch} is promised"
            return [Reply(Refused(Reason.EPOCH, epoch, text))]
        self.promised = header.epoch
        if isinstance(message, Hello):
            # The newest connection counts: frames of older ones that still come in are dropped from
            # here on.
            self._leader, self._session = header.sender, header.session
            self.matched_end = self._matched_value = 0
            self._matched = False
        if self.halted:
            return [self._refuse(Reason.HALTED, self.halted)]
        if isinstance(message, Hello):
            return [self._greet(log)]
        if isinstance(message, Probe):
            return [self._probe(message, log)]
        if isinstance(message, Append):
            return self._append(message, data, log)
        self.dropped += 1
        return []

    def header(self) -> Header:
        """Of an answer to the present leader."""
        return Header(
            self._cluster, self._shard, self._me, self._leader, self.promised, self._session
        )

    def acknowledge(self, log: LogView) -> Ack:
        """What R10 tells. A log beyond the match may be durable, but whose it is nobody has
        compared.
        """
        end = log.end()[0]
        return Ack(self.matched_end, end, min(log.synced(), self.matched_end))

    def leave(self) -> None:
        """Forget the session: what it asked for could not be done, so its match means nothing.

        Callers: at once.
        """
        self._leader = Member(self._leader.id, 0)
        self.matched_end = self._matched_value = 0
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether this session has been matched, so that an ACK means something to the leader."""
        return self._matched and not self.halted

    def _is_mine(self, header: Header, message: Message) -> bool:
        if header.cluster != self._cluster or header.shard != self._shard:
            return False
        if header.addressee.id != self._me.id or header.sender.id != self._leader.id:
            return False
        if isinstance(message, Hello):
            older = header.sender == self._leader and header.session <= self._session
            return not older and header.addressee.incarnation in (0, self._me.incarnation)
        return (
            header.addressee == self._me
            and header.sender == self._leader
            and header.session == self._session
        )

    def _refuse(self, reason: int, text: str) -> Reply:
        return Reply(Refused(reason, self.promised, text))

    def _greet(self, log: LogView) -> Reply:
        end, _, epoch = log.end()
        at_end = log.chain_at(end)
        value = -1 if at_end is None else at_end[0]
        return Reply(HelloOk(end, log.synced(), log.confirmed(), value, epoch))

    def _probe(self, message: Probe, log: LogView) -> Reply:
        candidates = message.candidates
        last_end = candidates[-1][0] if candidates else -1
        for index in range(len(candidates) - 1, -1, -1):
            if _holds(log, *candidates[index]):
                return Reply(ProbeOk(index, last_end))
        return Reply(ProbeOk(-1, last_end))

    def _append(self, message: Append, data: memoryview | None, log: LogView) -> list[Effect]:
        known = (self.matched_end, self._matched_value) == message[:2]
        if not known and not _holds(log, message.prev_end, message.prev_chain):
            end, _, epoch = log.end()
            return [Reply(Conflict(epoch, end))]
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

    def _store(self, message: Append, data: memoryview | None, log: LogView) -> list[Effect]:
        units = message.units
        end, value, _ = log.end()
        if units and units[0].start == end and units[0].previous == value:
            return [AppendUnits(units)]
        # Bytes that were sent before: the same chain value means the same log, nothing to write or
        # compare.
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

    def _reconcile(self, message: Append, data: memoryview | None, log: LogView) -> list[Effect]:
        """Where the log has bytes in other units: they are compared, kept, or replaced above C."""
        units = message.units
        same = log.same_until(list(units), bytes_of(units, data))
        if same >= min(log.end()[0], units[-1].end):
            return [AdoptUnits(units)]
        if same < log.confirmed():
            self.halted = (
                f"bytes at {same} differ from the leader's below this follower's confirmed offset "
                f"{log.confirmed()}: one of the two stores is damaged; run `raymq store verify` on "
                "both"
            )
            return [HaltReplica(self.halted), self._refuse(Reason.HALTED, self.halted)]
        differs = next(unit for unit in units if same < unit.end)
        # This follower may not have heard yet of the C that it made possible; what it has below
        # must stay on its disk, also where a unit that differs begins before it.
        confirmed = max(log.confirmed(), min(message.confirmed, same))
        return [Truncate(max(differs.start, confirmed)), AdoptUnits(units)]


def bytes_of(units: tuple[ChainUnit, ...], data: memoryview | None) -> memoryview:
    """The bytes of a frame's last units."""
    whole = memoryview(b"") if data is None else data
    return whole[len(whole) - (units[-1].end - units[0].start) :]


def _holds(log: LogView, end: int, value: int) -> bool:
    """Whether the log has this chain value at this offset.

    Below offset 0 there is nothing, on which all agree.
    """
    if end == 0:
        return True
    at = log.chain_at(end)
    return at is not None and at[0] == value
