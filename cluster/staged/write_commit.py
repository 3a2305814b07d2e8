"""The commit of a staged write: one decision, then the publication of what it names. Pure: no shard is called here.

    begin -> Decide -> Decided(first decision) -> Publish of each part, again until it is complete -> done

    begin of a batch of a stream -> BeginBatch of each topic and shard -> BatchBegun -> Decide -> ...
                     Superseded, at any time -> done

The first decision on a write counts. A committer whose own decision came later publishes the rows of the first one. So
any number of committers may run, and any may end anywhere: a later commit of the same write goes on, also one of other
rows. Two writes of different rows under one name differ in their fingerprint (`has_same_rows`).

The batches of a stream share a producer in each queue, so a decision says which sequence its first row there has. A
batch begins after those before it are committed. It fences them, and learns how many rows they stored. A batch that
finds a later one is therefore committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from raymq.store.base.errors import require
from raymq.store.services.staged_rows import StagedRange
from raymq.store.services.write_decisions import StreamBatch, batch_of

_MASK = (1 << 64) - 1


class StagedPart(NamedTuple):
    """Staged rows for one queue, in the order in which they will be there."""

    topic: str
    queue_id: int
    shard: int
    ranges: tuple[StagedRange, ...]
    #: of the first row among those of its producer in the queue
    first_sequence: int = 0

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

    def to_json(self) -> dict[str, Any]:
        """These rows as a JSON value."""
        return {
            "fingerprint": self.fingerprint,
            "staged_ms": self.staged_ms,
            "parts": [
                [*part[:3], [list(each) for each in part.ranges], part.first_sequence]
                for part in self.parts
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StagedRows:
        """The rows of a JSON value."""
        parts = []
        for part in value["parts"]:
            # The first decisions had no sequences.
            topic, queue_id, shard, ranges, first_sequence = (*part, 0)[:5]
            staged = tuple(StagedRange(*each) for each in ranges)
            parts.append(StagedPart(topic, queue_id, shard, staged, first_sequence))
        return cls(tuple(parts), value["fingerprint"], value["staged_ms"])

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
    #: the write is a batch of a stream
    batch: StreamBatch | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON value that a shard keeps."""
        value = {"write_id": self.write_id, **self.staged.to_json()}
        if self.batch is not None:
            value.update(stream=self.batch.stream, batch=self.batch.number)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WriteDecision:
        """The decision that a shard returned."""
        return cls(value["write_id"], StagedRows.from_json(value), batch_of(value))


# --- effects and events ---------------------------------------------------------------------------


class BeginBatch(NamedTuple):
    """Fence the batches before this one on a shard. `BatchBegun` follows, or `Superseded`."""

    batch: StreamBatch
    topic: str
    shard: int


class Decide(NamedTuple):
    """Store the decision, unless there is one; `Decided` follows with the one that counts."""

    decision: WriteDecision


class Publish(NamedTuple):
    """Publish more rows of a part of the decision; `PartPublished` follows."""

    part: StagedPart
    batch: StreamBatch | None = None


class BatchBegun(NamedTuple):
    """How many rows of earlier batches each queue of a topic on a shard has."""

    topic: str
    shard: int
    #: queue id -> rows; a queue without any is left out
    rows: Mapping[int, int]


class Superseded(NamedTuple):
    """A later batch of the stream has begun."""


class Decided(NamedTuple):
    """The decision that counts."""

    decision: WriteDecision


class PartPublished(NamedTuple):
    """So many rows of a part are published."""

    part: StagedPart
    rows: int
    is_complete: bool


CommitEffect: TypeAlias = BeginBatch | Decide | Publish
CommitEvent: TypeAlias = BatchBegun | Superseded | Decided | PartPublished


class WriteCommit:
    """One commit by one committer. A committer that ended is replaced by another one with rows of its own."""

    def __init__(self, own: WriteDecision) -> None:
        self._own = own
        #: the decision that counts; None: not known yet
        self.decision: WriteDecision | None = None
        #: a later batch of the stream has begun, so every row of this one is published
        self.is_superseded = False
        self._unbegun: set[tuple[str, int]] = set()
        self._left: set[StagedPart] = set()

    def begin(self) -> list[CommitEffect]:
        """The first effects to perform."""
        batch = self._own.batch
        if batch is None or not self._own.staged.parts:
            return [Decide(self._own)]
        self._unbegun = {(part.topic, part.shard) for part in self._own.staged.parts}
        return [BeginBatch(batch, *where) for where in sorted(self._unbegun)]

    def step(self, event: CommitEvent) -> list[CommitEffect]:
        """Take one event. Returns: the effects to perform, in any order."""
        if self.is_superseded:
            return []
        if isinstance(event, Superseded):
            self.is_superseded = True
            return []
        if isinstance(event, BatchBegun):
            return self._begun(event)
        if isinstance(event, PartPublished):
            if not event.is_complete:
                return [self._publish(event.part)]
            self._left.discard(event.part)
            return []

        self.decision = event.decision
        self._left = set(event.decision.staged.parts)
        return [self._publish(part) for part in event.decision.staged.parts]

    def _begun(self, event: BatchBegun) -> list[CommitEffect]:
        """Put the sequences of a topic's queues on a shard into the decision. It is stored when it has all of them."""
        where = (event.topic, event.shard)
        parts = tuple(
            part._replace(first_sequence=event.rows.get(part.queue_id, 0))
            if (part.topic, part.shard) == where
            else part
            for part in self._own.staged.parts
        )
        self._own = self._own._replace(staged=self._own.staged._replace(parts=parts))
        self._unbegun.discard(where)
        return [] if self._unbegun else [Decide(self._own)]

    def _publish(self, part: StagedPart) -> Publish:
        require(self.decision is not None, "what is published is decided", part=part[:3])
        return Publish(part, self.decision.batch)  # type: ignore[union-attr]

    @property
    def is_done(self) -> bool:
        """Whether every row of the write is published."""
        return self.is_superseded or (self.decision is not None and not self._left)

    @property
    def is_repeated(self) -> bool:
        """Whether the rows of another commit count."""
        if self.is_superseded:
            return True
        return self.decision is not None and self.decision.staged.parts != self._own.staged.parts

    @property
    def has_same_rows(self) -> bool:
        """Whether the decision that counts is about the same rows, in whatever order."""
        if self.decision is None:
            return False
        own, counted = self._own.staged, self.decision.staged
        return (own.rows, own.fingerprint) == (counted.rows, counted.fingerprint)
