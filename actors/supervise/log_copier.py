"""Copies what this replica's log lacks from a replica that cannot lead, so that this one can be elected.

R16 of docs/design.md says which replicas vote, and cannot lead.

`ElectionMachine` says of whom, `LogCopy` what to ask, and the streams of the leaders take the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from raymq.replication.election import CopyLog
from raymq.replication.log_copy import LogCopy
from raymq.replication.wire import AppendEntries, Probe
from raymq.store.base.errors import RayMQError
from raymq.store.log.chain import ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.mending.sound_bytes import ANSWER_BYTES_MAX
from raymq.store.log.segments.segment_paths import segment_start_of

from .election_peers import PeerCalls

logger = logging.getLogger("raymq.elections")

#: how long one call may take
CALL_S = 5.0

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
    ) -> None:
        """Args: `connect`: makes the calls of a replica. `take`: stores the bytes that follow, or replaces others."""
        self._log = log
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
        copy = LogCopy(
            _OwnChain(log),
            log.end,
            offer.end,
            log_start=log.start,
            segment_size_bytes=log.config.segment_size_bytes,
            range_bytes=ANSWER_BYTES_MAX,
        )
        logger.warning(
            "replica %d cannot lead and has more of the log, up to %d: it is copied from %d on",
            offer.source.id,
            offer.end,
            log.end,
        )

        calls = self._connect(offer.source.id)
        try:
            while (question := copy.question) is not None:
                if isinstance(question, Probe):
                    copy.take_match(*calls.log_match(question.candidates, CALL_S))
                    continue
                units = copy.take_range(calls.log_units(*question, CALL_S))
                if units is not None:
                    self._take(offer, *units)
        finally:
            with contextlib.suppress(RayMQError, OSError):
                calls.close()
        if copy.failed:
            logger.warning(
                "the logs of this replica and of replica %d share no place", offer.source.id
            )


class _OwnChain:
    """The chain of this replica's log, as `MatchSearch` reads it."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        """See `ChainView.read_from`."""
        size = self._log.config.segment_size_bytes
        stop = min(segment_start_of(offset, size) + size, offset + max_bytes)
        return self._log.chain.units(offset, stop)
