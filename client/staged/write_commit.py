"""The commit of a staged write: one decision, then the publication of what it names. Pure: no shard is called here.

    begin -> Decide -> Decided(first decision) -> Publish of each part, again until it is complete -> done

A batch of a stream is decided after the rows of the batch before are published, because rows of both have one producer:
those of the later batch hide how far the earlier one is.

    begin -> Decide -> NotDecided(decision on the batch before) -> Publish of its parts -> Decide -> Decided -> ...

The first decision on a write counts. A committer whose own decision came later publishes the rows of the first one. So
any number of committers may run, and any may end anywhere: a later commit of the same write goes on, also one of other
rows. Two writes of different rows under one name differ in their fingerprint (`has_same_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from raymq.store.base.errors import require
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.records.staged_range import StagedRange

_MASK = (1 << 64) - 1


class StagedPart(NamedTuple):
    """Staged rows for one queue, in the order in which they will be there."""

    topic: str
    queue_id: int
    shard: int
    ranges: tuple[StagedRange, ...]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.ranges)


class StagedRows(NamedTuple):
    """What one task has staged, or several. Tasks send it to the committer as JSON."""

    parts: tuple[StagedPart, ...]
    #: the sum of the rows' hashes, 64 bits: it does not depend on their order
    fingerprint: int
    #: store time of the first row, ms; 0 without rows
    staged_ms: int

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def to_json(self) -> dict[str, object]:
        """These rows as a JSON value."""
        return {
            "fingerprint": self.fingerprint,
            "staged_ms": self.staged_ms,
            "parts": [[*part[:3], [list(each) for each in part.ranges]] for part in self.parts],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StagedRows:
        """The rows of a JSON value."""
        parts = tuple(
            StagedPart(topic, queue_id, shard, tuple(StagedRange(*each) for each in ranges))
            for topic, queue_id, shard, ranges in value["parts"]
        )
        return cls(parts, value["fingerprint"], value["staged_ms"])

    @classmethod
    def joined(cls, found: Iterable[StagedRows]) -> StagedRows:
        """The rows of several tasks. In each queue those of an earlier task come first."""
        all_rows = list(found)
        ranges: dict[tuple[str, int, int], list[StagedRange]] = {}
        for each in all_rows:
            for part in each.parts:
                ranges.setdefault(part[:3], []).extend(part.ranges)
        parts = tuple(StagedPart(*where, tuple(some)) for where, some in sorted(ranges.items()))
        times_ms = [each.staged_ms for each in all_rows if each.staged_ms]
        return cls(
            parts,
            sum(each.fingerprint for each in all_rows) & _MASK,
            min(times_ms, default=0),
        )


class WriteDecision(NamedTuple):
    """The rows of a write."""

    write_id: str
    staged: StagedRows
    #: the topic of a stream's sink, "": each row names its own; None: unknown, or not of a stream's sink
    topic: str | None = None
    #: of a stream, the name of the query and the number of the batch; None: the write has producers of its own
    batch: tuple[str, int] | None = None

    def to_json(self) -> dict[str, object]:
        """The JSON value that a shard keeps."""
        topic = {} if self.topic is None else {"topic": self.topic}
        batch = {} if self.batch is None else {"batch": list(self.batch)}
        return {"write_id": self.write_id, **topic, **batch, **self.staged.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WriteDecision:
        """The decision that a shard returned."""
        batch = value.get("batch")
        return cls(
            value["write_id"],
            StagedRows.from_json(value),
            value.get("topic"),
            None if batch is None else (batch[0], batch[1]),
        )


# --- effects and events ---------------------------------------------------------------------------


class Decide(NamedTuple):
    """Store the decision, unless there is one; `Decided` follows with the one that counts, or `NotDecided`."""

    decision: WriteDecision
    #: of a stream: the newest batch whose rows are published, as far as is known
    complete: int | None = None


class Publish(NamedTuple):
    """Publish more rows of a part of a decision; `PartPublished` follows."""

    decision: WriteDecision
    part: StagedPart


class Decided(NamedTuple):
    """The decision that counts."""

    decision: WriteDecision
    #: all its rows are published: a later batch is decided
    is_published: bool = False


class NotDecided(NamedTuple):
    """Nothing is decided before the rows of this batch are published: the last one before."""

    previous: WriteDecision


class PartPublished(NamedTuple):
    """So many rows of a part are published."""

    decision: WriteDecision
    part: StagedPart
    rows: int
    is_complete: bool


CommitEffect: TypeAlias = Decide | Publish
CommitEvent: TypeAlias = Decided | NotDecided | PartPublished


class WriteCommit:
    """One commit by one committer. A committer that ended is replaced by another one with rows of its own."""

    def __init__(self, own: WriteDecision, *, complete: int | None = None) -> None:
        """Args: `complete`: as of `Decide`."""
        self._own = own
        self._complete = complete
        #: the decision that counts; None: not known yet
        self.decision: WriteDecision | None = None
        self._left: set[StagedPart] = set()

    def begin(self) -> list[CommitEffect]:
        """The first effects to perform."""
        return [Decide(self._own, self._complete)]

    def step(self, event: CommitEvent) -> list[CommitEffect]:
        """Take one event. Returns: the effects to perform, in any order."""
        if isinstance(event, Decided):
            self.decision = event.decision
            return [] if event.is_published else self._publish(event.decision)
        if isinstance(event, NotDecided):
            require(event.previous.batch is not None, "only a batch has one before")
            self._complete = event.previous.batch[1]  # type: ignore[index]
            return self._publish(event.previous) or self.begin()

        if not event.is_complete:
            return [Publish(event.decision, event.part)]
        self._left.discard(event.part)
        return self.begin() if self.decision is None and not self._left else []

    def _publish(self, decision: WriteDecision) -> list[CommitEffect]:
        self._left = set(decision.staged.parts)
        return [Publish(decision, part) for part in decision.staged.parts]

    @property
    def is_done(self) -> bool:
        """Whether every row of the write is published."""
        return self.decision is not None and not self._left

    @property
    def has_same_rows(self) -> bool:
        """Whether the decision that counts is about the same rows, in whatever order."""
        if self.decision is None:
            return False
        own, counted = self._own.staged, self.decision.staged
        return (own.rows, own.fingerprint) == (counted.rows, counted.fingerprint)

    @property
    def has_same_topic(self) -> bool:
        """Whether the decision that counts is of a sink to the same topic, as far as it says."""
        if self.decision is None or self._own.topic is None:
            return True
        if self.decision.topic is not None:
            return self.decision.topic == self._own.topic
        # Decisions of earlier versions have no topic of their own.
        topics = {part.topic for part in self.decision.staged.parts} - {TIMER_TOPIC}
        return not self._own.topic or topics <= {self._own.topic}
