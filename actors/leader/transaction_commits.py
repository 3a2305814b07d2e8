"""Transactions that lie on this shard, for a leader: an answer leaves when its decision is durable."""

from __future__ import annotations

from collections.abc import Sequence

from raymq.actors.api.transactions import WorkerAcks
from raymq.store.base.failpoints import fail_point
from raymq.store.groups.transaction_requests import (
    COMMITTED,
    TransactionCommit,
    TransactionName,
    TransactionOutcome,
)
from raymq.store.services.transaction_commits import TransactionCommits

from .group_records import note_level
from .metrics import ByTags
from .worker_leases import LeaseHost, WorkerLeases


class LeaderCommits:
    """Decides by `TransactionCommits`. Threads: any may call."""

    def __init__(self, leader: LeaseHost, leases: WorkerLeases) -> None:
        self._leader = leader
        self._leases = leases
        self._service = TransactionCommits(leader.store, leases.service)

    def commit(self, wanted: TransactionCommit, acks: Sequence[WorkerAcks]) -> TransactionOutcome:
        """See `TransactionCommits.commit`. Args: `acks`: those of `wanted`, with the options of their workers."""
        fail_point("transactions.begin")
        for each in acks:
            self._leases.note_use(each)
        if wanted.offsets:
            note_level(self._leader)
        self._leader.announce()
        outcome = self._service.commit(wanted)
        fail_point("transactions.appended")
        if outcome.decision == COMMITTED and not outcome.is_repeated:
            for each in acks:
                self._leases.wake(each.acks.group)
        self._await(outcome)
        fail_point("transactions.confirmed")
        return outcome

    def abort(self, name: TransactionName) -> TransactionOutcome:
        """See `TransactionCommits.abort`."""
        outcome = self._service.abort(name)
        self._await(outcome)
        return outcome

    def counts(self) -> ByTags:
        """(decision,) -> transactions that were decided so since this leadership began."""
        return {(decision,): count for decision, count in self._service.counts.items()}

    def _await(self, outcome: TransactionOutcome) -> None:
        self._leases.await_log(has_appended=not outcome.is_repeated)
