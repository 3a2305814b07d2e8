"""Combines the flush future and the replica future of each put into its outcome, as RocketMQ's broker does.

Source: CommitLog#handleDiskFlushAndHA and GroupTransferService, RocketMQ 5.3.3. The answer is given when both futures
are done: PUT_OK if both are kept, otherwise the flush's failure, overwritten by the replica's.

Puts of one promise are numbered from 1 in the order in which they began to wait. Success is one watermark,
`acknowledged`: the promise of every put that ends there or before is kept. An exception is an entry, `LatePuts`: the
number and end of the last such put, and their status. Puts that begin to wait together are one entry, so nothing is
done per put.

Each future times out some time after its put began to wait. A put whose futures are both kept or timed out has its
outcome. One rule differs from RocketMQ: a future that is kept after its timeout, while the put still waits for the
other future, counts as kept. The put is answered only after that, so that PUT_OK is true.

Replication uses this combiner for promises that name replicas. CommitLog uses it for all others, whose replica future
is complete from the start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from raymq.store.base.status import PutStatus
from raymq.store.config.promise import Ends, Promise

#: puts that begin to wait within this time of each other share the deadline of the last one. This bounds the number of
#: deadlines, and is short compared with a timeout of seconds
DEADLINE_STEP_MS = 10


class LatePuts(NamedTuple):
    """Puts up to `number` that end at `end` or before, and have no outcome yet, missed their deadline."""

    number: int
    end: int
    status: PutStatus


@dataclass(slots=True)
class _DeadlineGroup:
    """Puts that began to wait within DEADLINE_STEP_MS of each other."""

    #: number of the last put
    number: int
    #: the highest end of all puts so far
    end: int
    #: when the first put began to wait, and the last one, whose deadline counts for all
    first_since_ms: int
    last_since_ms: int


class PutCombiner:
    """The outcomes of all puts of one promise."""

    def __init__(
        self,
        promise: Promise,
        *,
        flush_timeout_ms: int,
        replica_timeout_ms: int,
        acknowledged: int = 0,
    ) -> None:
        """Args: `acknowledged`: the acknowledged end so far."""
        self._promise = promise
        self.set_timeouts(flush_timeout_ms, replica_timeout_ms)
        #: the promise of puts that end here or before is kept. It never falls
        self.acknowledged = acknowledged
        #: in the order of both numbers and ends
        self._groups: deque[_DeadlineGroup] = deque()
        self._reported: list[LatePuts] = []

    def set_timeouts(self, flush_timeout_ms: int, replica_timeout_ms: int) -> None:
        """Wait so long from now on, also for the puts that wait."""
        self._flush_timeout_ms = flush_timeout_ms
        self._replica_timeout_ms = replica_timeout_ms
        self._least_timeout_ms = min(flush_timeout_ms, replica_timeout_ms)

    @property
    def waiting(self) -> bool:
        """Whether a put may be without outcome."""
        return bool(self._groups)

    def add(self, number: int, end: int, since_ms: int) -> None:
        """Puts up to `number`, which end at `end` or before, have waited since `since_ms` (monotonic)."""
        groups = self._groups
        if groups:
            last = groups[-1]
            # A put that was sent again may end before puts that came earlier.
            end = max(end, last.end)
            if since_ms - last.first_since_ms < DEADLINE_STEP_MS:
                last.number = number
                last.end = end
                last.last_since_ms = since_ms
                return
        if end > self.acknowledged:
            groups.append(_DeadlineGroup(number, end, since_ms, since_ms))

    def combine(self, ends: Ends, now_ms: int) -> list[LatePuts]:
        """Note how far the shard is, which moves `acknowledged`. Returns: the puts that have become late."""
        self.acknowledged = max(self.acknowledged, self._promise.acknowledged_end(ends))

        groups = self._groups
        while groups and groups[0].end <= self.acknowledged:
            groups.popleft()
        if not groups or now_ms - groups[0].last_since_ms < self._least_timeout_ms:
            return []

        late = self._find_late(ends, now_ms)
        while groups and any(
            groups[0].number <= entry.number and groups[0].end <= entry.end for entry in late
        ):
            groups.popleft()

        if late == self._reported:
            return []
        self._reported = late
        return late

    def _find_late(self, ends: Ends, now_ms: int) -> list[LatePuts]:
        """The puts that have waited too long. Watermarks and deadlines follow the log's order, so they are two ranges:

        up to min(flush_end, replica_end)   kept
        up to max(flush_end, replica_end)   waits for one future
        after max(flush_end, replica_end)   waits for both futures
        """
        flush_late = replica_late = None
        for group in self._groups:
            waited_ms = now_ms - group.last_since_ms
            if waited_ms >= self._flush_timeout_ms:
                flush_late = group
            if waited_ms >= self._replica_timeout_ms:
                replica_late = group
            if waited_ms < self._least_timeout_ms:
                break

        flush_end = self._promise.flush_end(ends)
        replica_end = self._promise.replica_end(ends)
        late = []
        late_by_one = flush_late if flush_end < replica_end else replica_late
        if late_by_one:
            late.append((late_by_one.number, min(late_by_one.end, max(flush_end, replica_end))))
        if flush_late and replica_late:
            late_by_both = min(flush_late, replica_late, key=lambda group: group.number)
            late.append((late_by_both.number, late_by_both.end))

        return [
            LatePuts(number, end, self._promise.late_status(ends, end))
            for number, end in late
            if end > self.acknowledged
        ]
