"""Combines the flush future and the replica future of each put, as the broker does.

Source: CommitLog#handleDiskFlushAndHA and GroupTransferService, RocketMQ 5.3.3: the answer comes
when both are done; PUT_OK if both are; otherwise the flush's failure, overwritten by the replica's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from raymq.store.status import PutStatus


class Answer(NamedTuple):
    """How a put ended."""

    sequence: int
    status: PutStatus


@dataclass(slots=True)
class _Put:
    sequence: int
    end_offset: int
    flush_deadline_ms: int
    replica_deadline_ms: int
    #: None: not done yet
    flush: PutStatus | None
    replica: PutStatus | None


class PutCombiner:
    """The puts that wait. Invariant: nobody is answered twice."""

    def __init__(self, *, flushed: int = 0, replicated: int = 0) -> None:
        """Args: the ends that are flushed and replicated already."""
        self._flushed = flushed
        self._replicated = replicated
        self._waiting: deque[_Put] = deque()
        #: earliest deadline that may be due; later than every wait when nothing waits
        self._next_deadline_ms: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        sequence: int,
        end_offset: int,
        *,
        wants_flush: bool,
        wants_replica: bool,
        deadline_flush_ms: int,
        deadline_replica_ms: int,
    ) -> list[Answer]:
        """A put that waits until both of what it wants hold for `end_offset`.

        Deadlines are monotonic.
        """
        put = _Put(
            sequence,
            end_offset,
            deadline_flush_ms,
            deadline_replica_ms,
            None if wants_flush and end_offset > self._flushed else PutStatus.PUT_OK,
            None if wants_replica and end_offset > self._replicated else PutStatus.PUT_OK,
        )
        if put.flush is not None and put.replica is not None:
            return [Answer(sequence, PutStatus.PUT_OK)]
        self._waiting.append(put)
        first = min(
            deadline
            for deadline, done in (
                (deadline_flush_ms, put.flush),
                (deadline_replica_ms, put.replica),
            )
            if done is None
        )
        if self._next_deadline_ms is None or first < self._next_deadline_ms:
            self._next_deadline_ms = first
        return []

    def on_flushed(self, offset: int) -> list[Answer]:
        """The leader's log is flushed up to here."""
        if offset <= self._flushed:
            return []
        self._flushed = offset
        return self._settle()

    def on_replicated(self, offset: int) -> list[Answer]:
        """Enough replicas hold the log up to here."""
        if offset <= self._replicated:
            return []
        self._replicated = offset
        return self._settle()

    def on_tick(self, now_ms: int) -> list[Answer]:
        """Deadlines. A put of which one future timed out is answered when the other is done too."""
        if self._next_deadline_ms is None or now_ms < self._next_deadline_ms:
            return []
        for put in self._waiting:
            if put.flush is None and now_ms >= put.flush_deadline_ms:
                put.flush = PutStatus.FLUSH_DISK_TIMEOUT
            if put.replica is None and now_ms >= put.replica_deadline_ms:
                put.replica = PutStatus.FLUSH_SLAVE_TIMEOUT
        answers = self._settle()
        self._next_deadline_ms = min(
            (
                deadline
                for put in self._waiting
                for deadline, done in (
                    (put.flush_deadline_ms, put.flush),
                    (put.replica_deadline_ms, put.replica),
                )
                if done is None
            ),
            default=None,
        )
        return answers

    def _settle(self) -> list[Answer]:
        answers: list[Answer] = []
        waiting: deque[_Put] = deque()
        for put in self._waiting:
            if put.flush is None and put.end_offset <= self._flushed:
                put.flush = PutStatus.PUT_OK
            if put.replica is None and put.end_offset <= self._replicated:
                put.replica = PutStatus.PUT_OK
            if put.flush is None or put.replica is None:
                waiting.append(put)
            else:
                status = put.flush if put.replica is PutStatus.PUT_OK else put.replica
                answers.append(Answer(put.sequence, status))
        self._waiting = waiting
        if not waiting:
            self._next_deadline_ms = None
        return answers
