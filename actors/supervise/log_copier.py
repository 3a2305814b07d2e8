"""Copies what this replica's log lacks from a replica that cannot lead, so that this one can be elected.

R16 of docs/design.md says which replicas vote, and cannot lead.

`ElectionMachine` says of whom, `LogCopy` what to ask, and the streams of the leaders take the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from raymq.replication.election_events import CopyLog
from raymq.replication.log_copy import LogCopy
from raymq.replication.wire import AppendEntries, Probe
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.log.chain import ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.segments.segment_paths import segment_start_of

from .election_peers import PeerCalls

logger = logging.getLogger("raymq.elections")

#: how long one call may take, and the most bytes that it asks for
CALL_S, RANGE_BYTES = 10.0, 1 << 20

#: takes bytes of an offered log. Raises: Unavailable when they may not be taken any more
TakeCopied = Callable[[CopyLog, AppendEntries, memoryview], None]


class LogCopier:
    """The copies of one replica, one after the other. Callers: any thread; `run` has a thread of its own."""

    def __init__(
        self,
        log: CommitLog,
        connect: Callable[[int], PeerCalls],
        *,
        take: TakeCopied,
        log_lock: AbstractContextManager[object],
    ) -> None:
        """Args: `connect`: makes the calls of a replica. `take`: stores the bytes that follow, or replaces others.

        `log_lock`: held by changes of the log.
        """
        self._log = log
        self._log_lock = log_lock
        self._connect = connect
        self._take = take
        #: the best one that was not tried yet
        self._offer: CopyLog | None = None
        self._changed = threading.Condition()

    def offer(self, offer: CopyLog) -> None:
        """Copy that log soon. Returns at once."""
        with self._changed:
            if self._offer is None or self._offer.recency < offer.recency:
                self._offer = offer
            self._changed.notify()

    def wake(self) -> None:
        """Check `stopping`."""
        with self._changed:
            self._changed.notify()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Copy what is offered until `stopping` returns True: the body of a thread."""
        while not stopping():
            with self._changed:
                self._changed.wait_for(lambda: self._offer is not None or stopping())
                offer, self._offer = self._offer, None
            if offer is None:
                continue
            try:
                self.copy(offer)
            except Exception as error:
                # Whatever it is, the next election offers the log again. The thread must stay.
                expected = isinstance(error, (RayMQError, OSError))
                level = logging.WARNING if expected else logging.ERROR
                logger.log(
                    level,
                    "the log of replica %d was not copied: %s",
                    offer.source.id,
                    error,
                    exc_info=not expected,
                )

    def copy(self, offer: CopyLog) -> None:
        """Copy a log to its end. Raises: RayMQError, OSError; what was taken until then stays."""
        log = self._log
        # An empty log begins where the other one does.
        start, end = (0, 0) if log.is_empty else (log.start, log.end)
        copy = LogCopy(
            _OwnChain(log, self._log_lock),
            end,
            offer.recency,
            log_start=start,
            segment_size_bytes=log.config.segment_size_bytes,
            range_bytes=RANGE_BYTES,
        )
        logger.warning(
            "replica %d cannot lead and has more of the log, up to %d: it is copied from %d on",
            offer.source.id,
            offer.end,
            end,
        )

        calls = self._connect(offer.source.id)
        try:
            while (question := copy.question) is not None:
                if isinstance(question, Probe):
                    copy.take_match(*calls.log_match(question.candidates, CALL_S))
                else:
                    units = copy.take_range(calls.log_units(*question, CALL_S))
                    if units is not None:
                        self._take(offer, *units)
                if copy.question == question:
                    raise Unavailable(f"{question} got an answer to another question")
        finally:
            with contextlib.suppress(RayMQError, OSError):
                calls.close()
        if copy.failed:
            logger.warning(
                "replica %d has deleted what this replica lacks, or has another log by now",
                offer.source.id,
            )


class _OwnChain:
    """The chain of this replica's log, as `MatchSearch` reads it."""

    def __init__(self, log: CommitLog, lock: AbstractContextManager[object]) -> None:
        self._log = log
        self._lock = lock

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        """See `ChainView.read_from`."""
        size = self._log.config.segment_size_bytes
        stop = min(segment_start_of(offset, size) + size, offset + max_bytes)
        with self._lock:
            return self._log.chain.units(offset, stop)
