"""Commits a staged write: performs what `WriteCommit` asks for on the shards, all of them side by side."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from raymq.cluster.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, require

from .write_commit import (
    CommitEffect,
    CommitEvent,
    Decide,
    Decided,
    PartPublished,
    Publish,
    StagedRows,
    WriteCommit,
    WriteDecision,
)

logger = logging.getLogger("raymq")

#: the shard that keeps the decisions of a cluster: the one shard that every cluster has
DECIDING_SHARD = 0
#: shards that publish side by side
CALLS_MAX = 16
#: pause before a call that failed is repeated
RETRY_S = 0.2


class CommitResult(NamedTuple):
    """A committed write: every row is published once."""

    write_id: str
    rows: int
    #: the decision of an earlier commit counted: the rows that this commit staged are dropped
    is_repeated: bool


class Committer:
    """Commits one write. Callers: one thread."""

    def __init__(self, routes: Routes, *, timeout_s: float = 600.0) -> None:
        """Args: `timeout_s`: how long shards that do not answer are asked again."""
        self._routes = routes
        self._timeout_s = timeout_s
        self._clock = Clock()

    def commit(self, write_id: str, staged: StagedRows) -> CommitResult:
        """Publish staged rows, or those of the first commit of this write.

        A call that raised, or whose process ended, may be repeated, also by another process with rows of its own.

        Raises: Rejected when the write was committed with other rows, or too late; OffsetOutOfRange when rows were
        deleted before they were published; the last error of a shard that does not answer for `timeout_s`.
        """
        own = WriteDecision(
            write_id, staged if staged.rows else staged._replace(staged_ms=self._now_ms())
        )
        machine = WriteCommit(own)
        until_s = self._clock.monotonic() + self._timeout_s
        running: set[Future[CommitEvent]] = set()
        with ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="raymq-commit") as pool:
            try:
                effects = machine.begin()
                while effects or running:
                    running |= {pool.submit(self._perform, each, own, until_s) for each in effects}
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    effects = [effect for each in done for effect in machine.step(each.result())]
            finally:
                for each in running:
                    each.cancel()
        require(machine.decision is not None, "a commit ends decided", write_id=write_id)
        counted = machine.decision.staged  # type: ignore[union-attr]
        return CommitResult(write_id, counted.rows, counted.parts != staged.parts)

    def _now_ms(self) -> int:
        return self._clock.now_ms()

    def _perform(self, effect: CommitEffect, own: WriteDecision, until_s: float) -> CommitEvent:
        """Perform an effect, again after each error that a retry may mend."""
        while True:
            try:
                if isinstance(effect, Decide):
                    return self._decide(effect)
                return self._publish(effect, own.write_id)
            except RayMQError as error:
                left_s = until_s - self._clock.monotonic()
                if not error.retriable or left_s <= 0:
                    raise
                logger.info("write %s: %s; asked again", own.write_id, error)
            self._clock.sleep_ms(int(RETRY_S * 1000))

    def _decide(self, effect: Decide) -> CommitEvent:
        answer = self._routes.call(
            DECIDING_SHARD, "decide_write", {"decision": effect.decision.to_json()}
        )
        return Decided(WriteDecision.from_json(answer["decision"]))

    def _publish(self, effect: Publish, write_id: str) -> CommitEvent:
        part = effect.part
        arguments = {
            "write_id": write_id,
            "topic": part.topic,
            "queue_id": part.queue_id,
            "ranges": [list(each) for each in part.ranges],
        }
        answer = self._routes.call(part.shard, "publish_rows", arguments)
        return PartPublished(part, int(answer["rows"]), bool(answer["is_complete"]))
