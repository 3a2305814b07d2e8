"""The elections of one replica, inside its CommitLog process: the machine, its lock, and its ballot on disk.

`ElectionMachine` decides (replication/election.py). The ballot is in `raymq/meta`, synced before any effect that relies
on it. A log may know a later epoch than its `meta`: the file was lost, or an earlier version of RayMQ wrote none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from raymq.replication.election import (
    Ballot,
    ElectionEffect,
    ElectionEvent,
    ElectionMachine,
    LogFacts,
    Persist,
)
from raymq.replication.wire import ReplicaProcess
from raymq.store.base.clock import Clock
from raymq.store.config.promise import own_durable
from raymq.store.log.commit_log import CommitLog

#: in `raymq/meta`: the highest epoch that this replica has heard, its vote in that epoch, and whether it is complete
BALLOT = "ballot"


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
    ) -> None:
        """Args: `members`: ids of all replicas. `candidates`: those that may lead. `log`: recovered."""
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._machine = ElectionMachine(me, members, _read_ballot(log), candidates=candidates)

    @property
    def epoch(self) -> int:
        """The highest epoch that this replica has heard."""
        return self._machine.epoch

    @property
    def leads(self) -> bool:
        """Whether this process may append: it was elected, and its EPOCH record is in the log."""
        return self._machine.leads

    def step(self, event: ElectionEvent) -> list[ElectionEffect]:
        """Take one event, and persist the ballot if it has changed. Returns: the other effects, in order.

        Raises: OSError, when the ballot could not be synced: no effect may be performed then.
        """
        with self._lock:
            effects = self._machine.step(event, self._clock.monotonic_ms(), self._facts())
            ballots = [effect.ballot for effect in effects if isinstance(effect, Persist)]
            if ballots:
                # Later ballots of one step include the earlier ones.
                self._log.meta.update({BALLOT: _as_json(ballots[-1])})
        return [effect for effect in effects if not isinstance(effect, Persist)]

    def admits(self, leader: ReplicaProcess, epoch: int) -> bool:
        """Whether a frame of log bytes may be taken: `ElectionMachine.admits`."""
        return self._machine.admits(leader, epoch)

    def _facts(self) -> LogFacts:
        log = self._log
        return LogFacts(log.last_epoch, log.end, own_durable(log.config.flush, log.ends))


def _read_ballot(log: CommitLog) -> Ballot:
    """The ballot on disk. The epoch of the log's last record counts, too."""
    known: dict[str, Any] = log.meta.get(BALLOT) or {}
    epoch = int(known.get("epoch", 0))
    if log.last_epoch > epoch:
        return Ballot(log.last_epoch)
    voted_for = known.get("voted_for")
    return Ballot(
        epoch,
        None if voted_for is None else ReplicaProcess(*voted_for),
        known.get("is_complete", True),
    )


def _as_json(ballot: Ballot) -> dict[str, Any]:
    voted_for = None if ballot.voted_for is None else list(ballot.voted_for)
    return {"epoch": ballot.epoch, "voted_for": voted_for, "is_complete": ballot.is_complete}
