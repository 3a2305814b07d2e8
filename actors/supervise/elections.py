"""The elections of one replica, inside its CommitLog process: the machine, its lock, and its ballot on disk.

`ElectionMachine` decides (replication/election.py), and each step performs its effects. `BeginEpoch` and `StepDown`
say which epoch the role of this replica has to lead. The ack loop then changes the role, because that takes time.

The ballot is in `raymq/meta`, synced before any effect that relies on it. A log may know a later epoch than its `meta`:
the file was lost, or an earlier version of RayMQ wrote none.

Promise, vote, append and truncation of a replica exclude each other: a step holds the put lock, under which all bytes
of the log are written. A step that raises the epoch also raises `CommitLog.epoch_floor`, so that no later write of an
older epoch comes through. A vote therefore covers every byte that this replica ever reported to an older leader.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raymq.replication.election import ElectionMachine
from raymq.replication.election_events import (
    Ballot,
    BeginEpoch,
    CheckAsked,
    CopyLog,
    ElectionEffect,
    ElectionEvent,
    ElectionTick,
    HandOver,
    LeaderLost,
    LogFacts,
    OwnSyncFailed,
    Received,
    ResumePuts,
    SendElection,
    StepDown,
    StopPuts,
)
from raymq.replication.election_limits import ElectionLimits
from raymq.replication.wire import (
    Election,
    FrameHeader,
    ReplicaProcess,
    cluster_key,
    decode,
    encode,
)
from raymq.store.base.clock import Clock
from raymq.store.base.errors import AnotherShard, Rejected
from raymq.store.base.running_flags import FENCED, RunningFlags
from raymq.store.config.promise import own_durable
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.control_files.meta import POWER_LOST
from raymq.store.log.mending.sound_bytes import last_given_unit
from raymq.store.put.put_lock import PutLock

from .ballot import BALLOT

logger = logging.getLogger("raymq.commit_log")

#: between two ticks of the machine
TICK_MS = 50

#: sends an encoded message to a replica, soon or never
SendToReplica = Callable[[int, bytes], None]


def _drop(replica: int, frame: bytes) -> None:
    """A message that is lost, as any message may be."""


@dataclass(frozen=True, kw_only=True)
class ElectionPorts:
    """What the elections of one replica ask of its other parts, and report to them. None of these may block."""

    #: up to where the log equals that of a leader, and the epoch of that leader
    matched: Callable[[], tuple[int, int]] = lambda: (0, 0)
    #: whether the disk takes appends, as far as the last one has shown
    is_writable: Callable[[], bool] = lambda: True
    #: whether this replica's Replication runs, which sends the log to others
    can_stream: Callable[[], bool] = lambda: True
    #: the other replicas that this one cannot call
    uncallable: Callable[[], frozenset[int]] = frozenset
    #: called after a step that began or ended a leadership, or after which `tick` is due sooner
    on_change: Callable[[], None] = lambda: None
    #: called with the process of each message that another replica sent by a call of its own
    on_heard: Callable[[ReplicaProcess], None] = lambda process: None
    #: called with a log to copy before this replica can be elected
    copy_log: Callable[[CopyLog], None] = lambda offer: None
    send_frame: SendToReplica = _drop


class Elections:
    """The elections of one replica. Callers: any thread."""

    def __init__(
        self,
        log: CommitLog,
        me: ReplicaProcess,
        *,
        members: Sequence[int],
        candidates: Sequence[int],
        clock: Clock,
        put_lock: PutLock,
        flags: RunningFlags,
        cluster_id: str = "",
        shard: int = 0,
        limits: ElectionLimits | None = None,
        is_new_complete: bool = True,
        is_preferred: bool = False,
        generations: Sequence[int] = (),
        least_epoch: int = 0,
    ) -> None:
        """Args: `members`: ids of all replicas. `candidates`: those that may lead. `log`: recovered.

        `generations`: of all replicas, and `least_epoch`: the epoch that each has heard at least, as the operator knew
        them when this process was made.

        `put_lock`: orders all writes of the log. `flags`: FENCED is set while this replica does not lead.
        `is_preferred`: see ElectionMachine. `is_new_complete`: whether a replica without a ballot counts as complete
        (R13 of docs/design.md).
        """
        self._log = log
        self._clock = clock
        self._put_lock = put_lock
        self._flags = flags
        self._cluster = cluster_key(cluster_id)
        self._shard = shard
        #: of the last `BeginEpoch`, until a `StepDown`
        self._elected_epoch: int | None = None
        self._stored, ballot = _read_ballot(log, candidates, is_new_complete=is_new_complete)
        ballot = ballot.with_generations(tuple(generations)).with_epoch(least_epoch)
        self._machine = ElectionMachine(
            me, members, ballot, candidates=candidates, limits=limits, is_preferred=is_preferred
        )
        #: the machine knows of a sync that has failed
        self._has_failed = False
        #: messages of steps whose ballot is not on disk yet
        self._unsent: list[SendElection] = []
        self._ticked_ms = -TICK_MS
        #: notified of each step, while `await_check` callers wait
        self._stepped = threading.Condition()
        self._awaiting = 0

        self.me = me
        self.members = tuple(members)
        self._ports = ElectionPorts()
        log.epoch_floor = ballot.epoch

    def connect(self, **ports: Any) -> None:
        """Let the elections ask and reach other parts. Args: `ports`: those of `ElectionPorts` that change."""
        self._ports = replace(self._ports, **ports)

    @property
    def uncallable(self) -> frozenset[int]:
        """The other replicas that this one cannot call."""
        return self._ports.uncallable()

    @property
    def epoch(self) -> int:
        """The highest epoch that this replica has heard."""
        return self._machine.epoch

    @property
    def is_complete(self) -> bool:
        """Whether the log has everything that this replica ever reported as durable."""
        return self._machine.ballot.is_complete

    @property
    def incomplete_voters(self) -> tuple[int, ...]:
        """The replicas that were not complete when they elected this process, this replica included."""
        return self._machine.incomplete_voters

    def generation(self, replica: int) -> int:
        """The newest generation of a replica that this one has heard of."""
        return self._machine.ballot.generation(replica)

    @property
    def leader(self) -> ReplicaProcess | None:
        """The leader of the present epoch, as far as it is known."""
        return self._machine.leader

    @property
    def elected_epoch(self) -> int | None:
        """The epoch that the role of this replica has to lead, its EPOCH record may be missing; None: it follows.

        `ElectionPorts.on_change` is called when it has changed.
        """
        return self._elected_epoch

    @property
    def leads(self) -> bool:
        """Whether this process may append: it was elected, and its EPOCH record is in the log."""
        return self._machine.leads

    def step(self, event: ElectionEvent) -> None:
        """Take one event: persist the ballot if it has changed, then send the messages.

        Raises: OSError, when the ballot could not be synced. Nothing is sent then, before a later step has synced it.
        """
        for each in self._step(event):
            self._post(each)

    def leave(self) -> None:
        """Lead no more, because this process writes nothing more. After a failed sync it votes. Raises: OSError."""
        self.step(OwnSyncFailed())

    def tick(self) -> None:
        """Let the machine do what is due by the time, when the last tick is TICK_MS old. Raises: OSError."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._ticked_ms >= TICK_MS:
            self._ticked_ms = now_ms
            self.step(ElectionTick(chance=random.random()))

    def wait_ms(self) -> int:
        """How long `tick` may stay uncalled, but for TICK_MS at least."""
        return max(TICK_MS, self._machine.wait_ms(self._clock.monotonic_ms()))

    def receive(self, frame: bytes) -> list[bytes]:
        """Take a message of another replica. Returns: the messages to its sender. Others are sent.

        Raises: Rejected for a frame of another cluster or shard, of a replica that was replaced, or that cannot be
        read; OSError.
        """
        event = self._received(frame)
        self._check_not_replaced(event.sender)
        # After this refusal the sender drops its connection, and asks where the new replica is.
        self._check_not_replaced(self.me)
        self._ports.on_heard(event.sender)

        answers = []
        for each in self._step(event):
            if each.addressee.id == event.sender.id:
                answers.append(self._encode(each))
            else:
                self._post(each)
        return answers

    def _check_not_replaced(self, process: ReplicaProcess) -> None:
        """Raises: Rejected for a process of a replica whose place has a newer one."""
        if self._machine.is_replaced(process):
            raise Rejected(
                f"replica {process.id} was replaced: a process of its generation {process.generation} is not heard any "
                "more",
                field="generation",
                limit=self._machine.ballot.generation(process.id),
                found=process.generation,
            )

    def take(self, frame: bytes) -> None:
        """Take a message that answers one of this replica. Raises: as `receive`."""
        self.step(self._received(frame))

    def _received(self, frame: bytes) -> Received:
        """The event of a message. Raises: Rejected."""
        header, message = decode(frame)
        if header.cluster != self._cluster or header.shard != self._shard:
            raise AnotherShard(
                "the message is of another cluster or shard", field="shard", limit=self._shard
            )
        if not isinstance(message, Election):
            kind = type(message).__name__
            raise Rejected(f"{kind} is not a message of elections", field="kind", found=kind)
        return Received(header.sender, header.addressee, header.epoch, message)

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether a frame of log bytes may be taken: `ElectionMachine.admits`."""
        return self._machine.admits(leader, epoch)

    def follows(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether `step(LeaderHeard)` would change nothing, and the epoch is on disk."""
        machine = self._machine
        # The ballot last: a step of another thread may not have stored it yet.
        return machine.follows(leader, epoch) and machine.ballot == self._stored

    def epoch_to_copy(self, offer: CopyLog) -> int | None:
        """The epoch under which bytes of an offered log may be written now; None: they may not.

        Callers: while nothing else changes the log. A later epoch refuses the write.
        """
        log, epoch = self._log, self._machine.epoch
        may_copy = self._machine.may_copy(offer.recency, (log.last_epoch, log.end))
        return epoch if may_copy and self._machine.ballot == self._stored else None

    def is_replaced(self, process: ReplicaProcess) -> bool:
        """Whether an operator has given the place of this process's replica to a newer one."""
        return self._machine.is_replaced(process)

    @property
    def has_successor(self) -> bool:
        """Whether a follower could soon lead in place of this replica, which leads, and has a better disk perhaps."""
        machine = self._machine
        return not machine.bears_stall and machine.best_successor() is not None

    def admit_puts(self, epoch: int) -> bool:
        """Take puts, if this process still leads that epoch. Returns: whether it does."""
        with self._put_lock:
            admitted = self._machine.leads and self._machine.epoch == epoch
            if admitted:
                self._flags.clear(FENCED)
            return admitted

    def await_check(self, epoch: int, timeout_ms: int) -> bool:
        """Wait until a majority has said that an epoch was the newest after this call began.

        Returns: False, if this process does not lead it any more, or the time is up. Raises: OSError.
        """
        self.step(CheckAsked())
        # If a later check has begun already, it serves as well.
        check = self._machine.check_number
        with self._stepped:
            self._awaiting += 1
            try:
                self._stepped.wait_for(
                    lambda: self.elected_epoch != epoch or self._machine.led_at(check),
                    timeout_ms / 1000,
                )
                # Only the numbers of one leadership can be compared.
                return self._machine.led_at(check) and self.elected_epoch == epoch
            finally:
                self._awaiting -= 1

    def _step(self, event: ElectionEvent) -> list[SendElection]:
        """Step the machine and persist the ballot. Returns: the messages that may be sent now. Raises: OSError."""
        machine = self._machine
        changes: list[str] = []
        offers: list[CopyLog] = []
        with self._put_lock:
            led = self._elected_epoch
            now_ms, facts = self._clock.monotonic_ms(), self._facts()
            effects = [*self._note_failed_sync(now_ms, facts), *machine.step(event, now_ms, facts)]
            # From here on no byte of an older epoch is written.
            self._log.epoch_floor = machine.epoch
            for effect in effects:
                if isinstance(effect, SendElection):
                    self._unsent.append(effect)
                elif isinstance(effect, BeginEpoch):
                    self._elected_epoch = effect.epoch
                elif isinstance(effect, (StepDown, StopPuts)):
                    self._flags.set(FENCED)
                    if isinstance(effect, StepDown):
                        self._elected_epoch = None
                    changes.append(f"no puts are taken any more: {effect.reason}")
                elif isinstance(effect, ResumePuts):
                    self._flags.clear(FENCED)
                    changes.append(f"puts are taken again: {effect.reason}")
                elif isinstance(effect, CopyLog):
                    offers.append(effect)
            has_changed = led != self._elected_epoch

            if machine.ballot != self._stored:
                self._log.meta.update({BALLOT: _as_json(machine.ballot), POWER_LOST: None})
                self._stored = machine.ballot
            sends, self._unsent = self._unsent, []

        if self._awaiting:
            with self._stepped:
                self._stepped.notify_all()
        for change in changes:
            logger.warning("epoch %d: %s", machine.epoch, change)
        for offer in offers:
            self._ports.copy_log(offer)
        if has_changed or isinstance(event, (HandOver, LeaderLost)):
            self._ports.on_change()
        return sends

    def _note_failed_sync(self, now_ms: int, facts: LogFacts) -> list[ElectionEffect]:
        """Tell the machine of a failed sync before any other event. Callers: with the put lock held.

        From here on the facts are those of what is synced. A log that was reported as durable above that lacks it: no
        vote, and no answer to a join, may come between.
        """
        log = self._log
        if not log.health.sync_failed or self._has_failed:
            return []
        self._has_failed = True
        is_complete = log.synced >= own_durable(log.config.flush, log.ends)
        return self._machine.step(OwnSyncFailed(is_complete=is_complete), now_ms, facts)

    def _post(self, send: SendElection) -> None:
        self._ports.send_frame(send.addressee.id, self._encode(send))

    def _encode(self, send: SendElection) -> bytes:
        header = FrameHeader(
            self._cluster, self._shard, self._machine.me, send.addressee, send.epoch, 0
        )
        return encode(header, send.message)

    def _facts(self) -> LogFacts:
        log = self._log
        if log.health.sync_failed:
            return self._facts_of_synced()
        durable = own_durable(log.config.flush, log.ends)
        return LogFacts(
            log.last_epoch,
            log.end,
            durable,
            *self._ports.matched(),
            is_writable=self._ports.is_writable(),
            can_stream=self._ports.can_stream(),
            uncallable=self._ports.uncallable(),
        )

    def _facts_of_synced(self) -> LogFacts:
        """Of a log of which a sync has failed: nothing above its synced end can be trusted, and nothing is written."""
        log, epoch, last = self._log, 0, last_given_unit(self._log)
        if log.synced > log.start:
            # Without a unit the epoch is not known: the sync that failed was perhaps that of a cut. None is higher than
            # that of the ballot.
            epoch = self._machine.epoch if last is None else last.epoch
        return LogFacts(
            epoch,
            log.synced,
            log.synced,
            is_writable=False,
            can_stream=False,
            uncallable=self._ports.uncallable(),
            offered=(0, 0) if last is None else (last.epoch, last.end),
        )


def _read_ballot(
    log: CommitLog, candidates: Sequence[int], *, is_new_complete: bool
) -> tuple[Ballot | None, Ballot]:
    """The ballot on disk, None without one; and the ballot to begin with.

    The epoch of the log's last record counts, too. After a power loss a log that was not synced with each put may lack
    records that this replica has reported as durable (R13).
    """
    may_lack = len(candidates) > 1 and bool(log.meta.get(POWER_LOST))
    known: dict[str, Any] | None = log.meta.get(BALLOT)
    if known is None:
        is_complete = (is_new_complete or log.end > 0) and not may_lack
        return None, Ballot(log.last_epoch, None, is_complete)

    voted_for = known.get("voted_for")
    stored = Ballot(
        int(known.get("epoch", 0)),
        None if voted_for is None else ReplicaProcess(*voted_for),
        bool(known.get("is_complete", True)),
        tuple(int(each) for each in known.get("generations", ())),
    )
    ballot = stored
    if log.last_epoch > ballot.epoch:
        ballot = ballot._replace(epoch=log.last_epoch, voted_for=None)
    if may_lack:
        ballot = ballot._replace(is_complete=False)
    return stored, ballot


def _as_json(ballot: Ballot) -> dict[str, Any]:
    voted_for = None if ballot.voted_for is None else list(ballot.voted_for)
    known = {"epoch": ballot.epoch, "voted_for": voted_for, "is_complete": ballot.is_complete}
    return {**known, "generations": list(ballot.generations)} if ballot.generations else known
