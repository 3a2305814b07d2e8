"""Commits a staged write: performs what `WriteCommit` asks for on the shards, all of them side by side."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, require
from raymq.store.services.decision_body import body_of

from .write_commit import (
    CommitEffect,
    CommitEvent,
    Decide,
    Decided,
    NotDecided,
    PartPublished,
    Publish,
    StagedRows,
    WriteCommit,
    WriteDecision,
)

logger = logging.getLogger("raymq")

#: the shard that keeps the decisions of a cluster: the one shard that every cluster has
DECIDING_SHARD = 0
#: calls side by side, and those of one shard, which has puts to take beside them
CALLS_MAX = 16
SHARD_CALLS_MAX = 2
#: pause before a call that failed is repeated
RETRY_S = 0.2
#: a decision is one message
DECISION_BYTES_MAX = 3 << 20

#: (cluster, query) -> the newest batch that this process has published: the next commit of the query need not do it
_complete: dict[tuple[str | None, str], int] = {}


class CommitResult(NamedTuple):
    """A committed write: every row is published once."""

    write_id: str
    rows: int
    #: the decision of an earlier commit counted: the rows that this commit staged are dropped
    is_repeated: bool
    #: the rows of the decision that counts are those of this commit, in whatever order
    has_same_rows: bool


class Committer:
    """Commits one write. Callers: one thread."""

    def __init__(self, routes: Routes, *, timeout_s: float = 600.0) -> None:
        """Args: `timeout_s`: how long a shard that does not answer is asked again."""
        self._routes = routes
        self._timeout_s = timeout_s
        self._clock = Clock()
        self._stopped = threading.Event()
        self._shard_calls: defaultdict[int, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(SHARD_CALLS_MAX)
        )

    def commit(
        self,
        write_id: str,
        staged: StagedRows,
        *,
        takes_other_rows: bool = False,
        topic: str | None = None,
        batch: tuple[str, int] | None = None,
    ) -> CommitResult:
        """Publish staged rows, or those of the first commit of this write.

        A call that raised, or whose process ended, may be repeated, also by another process with rows of its own.

        Args: `takes_other_rows`: the rows of the first commit may be others. Then they count, and these are dropped.
        `topic`: the topic of a stream's sink, which the first commit must have, too; "": each row names its own.
        `batch`: the name of a query and the number of its batch, which share producers with other batches of it.
        Raises: Rejected when the write was committed with other rows, or by a sink to another topic. All rows of the
        first commit are published then. Rejected also when it comes too late, or has too many ranges. OffsetOutOfRange
        when rows were deleted before they were published; the last error of a shard that does not answer for
        `timeout_s`.
        """
        if not staged.rows:
            staged = staged._replace(staged_ms=self._clock.now_ms())
        own = WriteDecision(write_id, staged, topic, batch)
        _check_size(own)
        complete = None if batch is None else _complete.get(self._query_key(batch))
        machine = WriteCommit(own, complete=complete)
        self._stopped.clear()
        running: set[Future[CommitEvent]] = set()

        with ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="raymq-commit") as pool:
            try:
                effects = machine.begin()
                while effects or running:
                    running |= {pool.submit(self._perform, each, write_id) for each in effects}
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    effects = [effect for each in done for effect in machine.step(each.result())]
            finally:
                # After an error no other call waits for its shard.
                self._stopped.set()
                for each in running:
                    each.cancel()

        require(machine.decision is not None, "a commit ends decided", write_id=write_id)
        counted = machine.decision.staged  # type: ignore[union-attr]
        self._note_complete(machine.decision.batch)  # type: ignore[union-attr]
        if not machine.has_same_topic:
            raise Rejected(
                f"write {write_id} was committed before by a sink to another topic: these {staged.rows} rows are not "
                "stored. Give this sink a name that stays across restarts: query=",
                field="query",
                limit="a name for each sink of a query",
            )
        if not machine.has_same_rows and not takes_other_rows:
            raise Rejected(
                f"write {write_id} was committed before with {counted.rows} other rows, which are published; these "
                f"{staged.rows} rows need a write id of their own",
                field="write_id",
                limit="the same rows",
            )
        is_repeated = counted.parts != staged.parts
        return CommitResult(write_id, counted.rows, is_repeated, machine.has_same_rows)

    def _perform(self, effect: CommitEffect, write_id: str) -> CommitEvent:
        """Perform an effect, again after each error that a retry may mend."""
        until_s = self._clock.monotonic() + self._timeout_s
        while True:
            try:
                if isinstance(effect, Decide):
                    return self._decide(effect)
                with self._shard_calls[effect.part.shard]:
                    return self._publish(effect)
            except RayMQError as error:
                if not error.retriable or self._clock.monotonic() >= until_s:
                    raise
                if self._stopped.wait(RETRY_S):
                    raise
                logger.info("write %s: %s; asked again", write_id, error)

    def _decide(self, effect: Decide) -> CommitEvent:
        arguments: dict[str, Any] = {"decision": effect.decision.to_json()}
        if effect.complete is not None:
            arguments["complete"] = effect.complete
        answer = self._routes.call(DECIDING_SHARD, "decide_write", arguments)
        if "previous" in answer:
            return NotDecided(WriteDecision.from_json(answer["previous"]))
        decision = WriteDecision.from_json(answer["decision"])
        return Decided(decision, bool(answer.get("is_published")))

    def _publish(self, effect: Publish) -> CommitEvent:
        decision, part = effect
        arguments = {
            "write_id": decision.write_id,
            "topic": part.topic,
            "queue_id": part.queue_id,
            "ranges": [list(each) for each in part.ranges],
        }
        if decision.batch is not None:
            arguments["batch"] = list(decision.batch)
        answer = self._routes.call(part.shard, "publish_rows", arguments)
        return PartPublished(decision, part, int(answer["rows"]), bool(answer["is_complete"]))

    def _query_key(self, batch: tuple[str, int]) -> tuple[str | None, str]:
        return self._routes.cluster_id, batch[0]

    def _note_complete(self, batch: tuple[str, int] | None) -> None:
        if batch is not None:
            key = self._query_key(batch)
            _complete[key] = max(batch[1], _complete.get(key, -1))


def _check_size(decision: WriteDecision) -> None:
    size = len(body_of(decision.to_json()))
    if size > DECISION_BYTES_MAX:
        ranges = sum(len(part.ranges) for part in decision.staged.parts)
        raise Rejected(
            f"write {decision.write_id} has {ranges} ranges of rows, and their list {size} bytes; the limit is "
            f"{DECISION_BYTES_MAX}: use fewer tasks, fewer queues, or several writes. Nothing is published",
            field="write_id",
            limit=DECISION_BYTES_MAX,
        )
