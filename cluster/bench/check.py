"""Compares the receipts of a benchmark with the messages in the log: nothing lost, repeated or out of order.

The promise is a worker's `Ledger`: which of its rows were acknowledged. A row whose
outcome is unknown may be there once or not at all. A refused row must not be there. Does not import Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.client.consume.range_reader import read_range
from raymq.cluster.cluster import Cluster
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.queues.raw_records import decode_records

from .messages import damaged_rows, read_headers
from .plan import BenchPlan

#: faults that are listed one by one
EXAMPLES_MAX = 10


@dataclass
class QueueLedger:
    """Rows of one worker in one queue, as half-open ranges of sequences."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    #: the sequence after the last row. The outcome of a row in neither list is unknown
    next_sequence: int = 0


@dataclass
class Ledger:
    """The outcome of every row of one worker. Not thread-safe."""

    worker: int
    queues: dict[int, QueueLedger] = field(default_factory=dict)

    def acknowledge(self, queue_index: int, first: int, count: int) -> None:
        """Rows [first, first + count) are promised."""
        _append(self._queue(queue_index, first + count).acknowledged, first, count)

    def refuse(self, queue_index: int, first: int, count: int) -> None:
        """Rows [first, first + count) are certainly not stored."""
        _append(self._queue(queue_index, first + count).refused, first, count)

    def leave_open(self, queue_index: int, first: int, count: int) -> None:
        """Whether rows [first, first + count) are stored is unknown."""
        self._queue(queue_index, first + count)

    def _queue(self, queue_index: int, end: int) -> QueueLedger:
        found = self.queues.setdefault(queue_index, QueueLedger())
        found.next_sequence = max(found.next_sequence, end)
        return found

    @property
    def acknowledged(self) -> int:
        """Rows promised."""
        return sum(_rows(queue.acknowledged) for queue in self.queues.values())

    @property
    def refused(self) -> int:
        """Rows certainly not stored."""
        return sum(_rows(queue.refused) for queue in self.queues.values())

    @property
    def unknown(self) -> int:
        """Rows whose outcome is unknown."""
        total = sum(queue.next_sequence for queue in self.queues.values())
        return total - self.acknowledged - self.refused


def promised_rows(ledgers: Iterable[Ledger]) -> dict[int, int]:
    """Queue index -> rows that were acknowledged, of all workers."""
    total: dict[int, int] = {}
    for ledger in ledgers:
        for queue_index, queue in ledger.queues.items():
            total[queue_index] = total.get(queue_index, 0) + _rows(queue.acknowledged)
    return total


def _append(ranges: list[tuple[int, int]], first: int, count: int) -> None:
    # Acknowledgements of one queue come in order, so that one range holds nearly all.
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], first + count)
    else:
        ranges.append((first, first + count))


def _rows(ranges: list[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


@dataclass
class Verdict:
    """The result of reading back, in rows."""

    acknowledged: int = 0
    #: rows of this run, repeated ones too
    read: int = 0
    #: acknowledged and not there
    lost: int = 0
    #: acknowledged, but past the visible end of a queue that is still too short: late, or lost
    hidden: int = 0
    #: there more than once
    duplicates: int = 0
    #: after a later row of the same worker and queue
    disorder: int = 0
    #: not the bytes that were sent
    damaged: int = 0
    #: there although it was refused or never sent
    phantom: int = 0
    #: in mode e2e: stored, and not handed to the consumer that waited for it
    unread: int = 0
    #: the first faults, in words
    examples: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """The sum of all faults."""
        counts = (self.lost, self.hidden, self.duplicates, self.disorder, self.damaged)
        return sum(counts) + self.phantom + self.unread

    def add(self, other: Verdict) -> None:
        """Add the counts and examples of another verdict."""
        for name, value in vars(other).items():
            if name != "examples":
                setattr(self, name, getattr(self, name) + value)
        self.examples = [*self.examples, *other.examples][:EXAMPLES_MAX]

    def note(self, text: str) -> None:
        """Note a fault in words."""
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(text)


class SequenceCheck:
    """The rows of one worker in one queue, as they are read."""

    def __init__(self, rows_of: str) -> None:
        #: worker and queue of the rows, for the faults in words
        self._rows_of = rows_of
        self._seen = np.zeros(1024, dtype=np.uint8)
        self._highest = -1
        self.verdict = Verdict()

    def feed(self, sequences: Int64s) -> None:
        """Rows in the order of their offsets."""
        if not len(sequences):
            return
        self.verdict.read += len(sequences)
        self._grow(int(sequences.max()) + 1)
        before = np.maximum.accumulate(np.concatenate([[self._highest], sequences]))
        self._highest = int(before[-1])
        back = sequences <= before[:-1]
        if back.any():
            self._judge(sequences, back)
        self._seen[sequences] = 1

    def _judge(self, sequences: Int64s, back: Bools) -> None:
        """Count the rows that do not follow all others: repeated ones and late ones."""
        first_time = np.zeros(len(sequences), dtype=bool)
        first_time[np.unique(sequences, return_index=True)[1]] = True
        repeated = (self._seen[sequences] > 0) | ~first_time
        late = back & ~repeated
        self.verdict.duplicates += int(repeated.sum())
        self.verdict.disorder += int(late.sum())
        for word, rows in (("is there again", repeated), ("comes too late", late)):
            for sequence in sequences[rows][:EXAMPLES_MAX].tolist():
                self.verdict.note(f"{self._rows_of}: sequence {sequence} {word}")

    def finish(self, ledger: QueueLedger | None, *, short: bool = False) -> Verdict:
        """Compare the rows read with the ledger. `short`: the queue ends before the acknowledged rows do."""
        verdict, promised = self.verdict, ledger or QueueLedger()
        self._grow(promised.next_sequence)

        expected = np.zeros(len(self._seen), dtype=bool)
        allowed = np.zeros(len(self._seen), dtype=bool)
        allowed[: promised.next_sequence] = True
        for first, end in promised.acknowledged:
            expected[first:end] = True
        for first, end in promised.refused:
            allowed[first:end] = False

        seen = self._seen > 0
        missing = expected & ~seen
        hidden = missing & short
        hidden[: self._highest + 1] = False

        verdict.acknowledged += _rows(promised.acknowledged)
        for name, word, rows in (
            ("lost", "was acknowledged and is not there", missing & ~hidden),
            ("hidden", "was acknowledged and is not visible so far", hidden),
            ("phantom", "is there and was never stored", seen & ~allowed),
        ):
            setattr(verdict, name, getattr(verdict, name) + int(rows.sum()))
            for sequence in np.flatnonzero(rows)[:EXAMPLES_MAX].tolist():
                verdict.note(f"{self._rows_of}: sequence {sequence} {word}")
        return verdict

    def _grow(self, size: int) -> None:
        if size > len(self._seen):
            grown = np.zeros(max(size, 2 * len(self._seen)), dtype=np.uint8)
            grown[: len(self._seen)] = self._seen
            self._seen = grown


class QueueChecks:
    """The checks of several queues, one per worker and queue. Not thread-safe."""

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self.checks: dict[tuple[int, int], SequenceCheck] = {}
        self.damaged = 0

    def feed(
        self, queue_index: int, bodies: pa.Array, *, check_bytes: bool
    ) -> npt.NDArray[np.void]:
        """Rows of one queue in the order of their offsets. Returns: the headers of this run's."""
        headers, rows = read_headers(bodies, self._plan.run)
        if check_bytes:
            self.damaged += damaged_rows(bodies, headers, rows)
        # A row in another queue than it was sent to counts as damaged, and as missing in its own queue.
        right = (headers["queue_index"] == queue_index) & (headers["sequence"] >= 0)
        here: npt.NDArray[np.void] = headers[right]
        self.damaged += len(headers) - len(here)
        for worker in np.unique(here["worker"]).tolist():
            own = here["sequence"][here["worker"] == worker].astype(np.int64)
            self._check(worker, queue_index).feed(own)
        return here

    def _check(self, worker: int, queue_index: int) -> SequenceCheck:
        found = self.checks.get((worker, queue_index))
        if found is None:
            topic, queue = self._plan.topic_and_queue(queue_index)
            rows_of = f"worker {worker}, {topic} queue {queue}"
            found = self.checks[worker, queue_index] = SequenceCheck(rows_of)
        return found

    def finish(
        self, ledgers: list[Ledger], indexes: list[int], short: Collection[int] = ()
    ) -> Verdict:
        """Compare with all ledgers, for queues that were read from begin to end. Those in `short` end early."""
        whole = Verdict(damaged=self.damaged)
        if self.damaged:
            whole.note(f"{self.damaged} rows are not the bytes that were sent")
        for ledger in ledgers:
            for queue_index in set(ledger.queues) & set(indexes):
                self._check(ledger.worker, queue_index)
        promised = {ledger.worker: ledger.queues for ledger in ledgers}
        for (worker, queue_index), check in sorted(self.checks.items()):
            ledger_of = promised.get(worker, {}).get(queue_index)
            whole.add(check.finish(ledger_of, short=queue_index in short))
        return whole


@dataclass(frozen=True)
class ReadRange:
    """Offsets [start, end) of one queue, and its shard. `end` is -1 while the queue grows."""

    queue_index: int
    shard: int
    start: int
    end: int


def verify(
    cluster: Cluster, plan: BenchPlan, ranges: list[ReadRange], ledgers: list[Ledger]
) -> Iterator[int | Verdict]:
    """Read ranges back and compare every row with the ledgers.

    Yields the rows of each piece read, at the end the verdict.
    Raises: OffsetOutOfRange when retention deletes rows before they are read; Unavailable.
    """
    checks = QueueChecks(plan)
    for span in ranges:
        topic, queue = plan.topic_and_queue(span.queue_index)
        for records in read_range(cluster, topic, queue, span.shard, span.start, span.end):
            bodies = decode_records(records).column("body")
            checks.feed(span.queue_index, bodies, check_bytes=True)
            yield len(bodies)
    promised = promised_rows(ledgers)
    short = {
        span.queue_index
        for span in ranges
        if span.end - span.start < promised.get(span.queue_index, 0)
    }
    yield checks.finish(ledgers, [span.queue_index for span in ranges], short)
