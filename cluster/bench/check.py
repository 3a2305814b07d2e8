"""What a benchmark was promised, and whether the log kept it: nothing lost, repeated or out of order.

The promise is a worker's `Ledger`: which of its rows were acknowledged. A row whose fate nobody told
(design D11) may be there once or not at all; a refused one must not be there. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.cluster.consume.range_reader import read_range
from raymq.store.queues.raw_records import decode_records

from .messages import damaged_rows, read_headers
from .plan import BenchPlan

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

Int64s = npt.NDArray[np.int64]

#: faults that are told one by one
EXAMPLES_MAX = 10


@dataclass
class LaneLedger:
    """Rows of one worker in one lane, as half-open ranges of sequences."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    #: the sequence behind the last row; what is in neither list has an unknown fate
    next_sequence: int = 0


@dataclass
class Ledger:
    """What became of all rows of one worker. Not thread-safe."""

    worker: int
    lanes: dict[int, LaneLedger] = field(default_factory=dict)

    def acknowledge(self, lane: int, first: int, count: int) -> None:
        """Rows [first, first + count) are promised."""
        _append(self._lane(lane, first + count).acknowledged, first, count)

    def refuse(self, lane: int, first: int, count: int) -> None:
        """Rows [first, first + count) are certainly not stored."""
        _append(self._lane(lane, first + count).refused, first, count)

    def leave_open(self, lane: int, first: int, count: int) -> None:
        """Nobody knows whether rows [first, first + count) are stored."""
        self._lane(lane, first + count)

    def _lane(self, lane: int, end: int) -> LaneLedger:
        found = self.lanes.setdefault(lane, LaneLedger())
        found.next_sequence = max(found.next_sequence, end)
        return found

    @property
    def acknowledged(self) -> int:
        """Rows promised."""
        return sum(_rows(lane.acknowledged) for lane in self.lanes.values())

    @property
    def refused(self) -> int:
        """Rows certainly not stored."""
        return sum(_rows(lane.refused) for lane in self.lanes.values())

    @property
    def unknown(self) -> int:
        """Rows whose fate nobody told."""
        total = sum(lane.next_sequence for lane in self.lanes.values())
        return total - self.acknowledged - self.refused


def promised_rows(ledgers: Iterable[Ledger]) -> dict[int, int]:
    """lane -> rows that were acknowledged, of all workers."""
    total: dict[int, int] = {}
    for ledger in ledgers:
        for lane, promised in ledger.lanes.items():
            total[lane] = total.get(lane, 0) + _rows(promised.acknowledged)
    return total


def _append(ranges: list[tuple[int, int]], first: int, count: int) -> None:
    # Acknowledgements of a lane come in order, so that one range holds nearly all.
    if ranges and ranges[-1][1] == first:
        ranges[-1] = (ranges[-1][0], first + count)
    else:
        ranges.append((first, first + count))


def _rows(ranges: list[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


@dataclass
class Verdict:
    """What was found on reading back; rows."""

    acknowledged: int = 0
    #: rows of this run, repeated ones too
    read: int = 0
    #: acknowledged and not there
    lost: int = 0
    #: acknowledged, and behind the last one that readers see of a queue which is still too short: late, or lost
    hidden: int = 0
    #: there once more than once
    duplicates: int = 0
    #: behind a later row of the same worker and queue
    disorder: int = 0
    #: not the bytes that were sent
    damaged: int = 0
    #: there although refused, or never sent
    phantom: int = 0
    #: in mode e2e: stored, and not handed to the consumer that waited for it
    unread: int = 0
    #: the first faults, in words
    examples: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """All that should be none."""
        counts = (self.lost, self.hidden, self.duplicates, self.disorder, self.damaged)
        return sum(counts) + self.phantom + self.unread

    def add(self, other: Verdict) -> None:
        """Add what was found elsewhere."""
        for name, value in vars(other).items():
            if name != "examples":
                setattr(self, name, getattr(self, name) + value)
        self.examples = [*self.examples, *other.examples][:EXAMPLES_MAX]

    def tell(self, text: str) -> None:
        """Note a fault in words."""
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(text)


class SequenceCheck:
    """The rows of one worker in one lane, as they are read."""

    def __init__(self, where: str) -> None:
        self._where = where
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

    def _judge(self, sequences: Int64s, back: npt.NDArray[np.bool_]) -> None:
        """Some rows do not come behind all others: repeated ones, or late ones."""
        first_time = np.zeros(len(sequences), dtype=bool)
        first_time[np.unique(sequences, return_index=True)[1]] = True
        repeated = (self._seen[sequences] > 0) | ~first_time
        late = back & ~repeated
        self.verdict.duplicates += int(repeated.sum())
        self.verdict.disorder += int(late.sum())
        for word, rows in (("is there again", repeated), ("comes too late", late)):
            for sequence in sequences[rows][:EXAMPLES_MAX].tolist():
                self.verdict.tell(f"{self._where}: sequence {sequence} {word}")

    def finish(self, ledger: LaneLedger | None, *, short: bool = False) -> Verdict:
        """Compare what was read with what was promised; `short`: the queue ends before that."""
        verdict, promised = self.verdict, ledger or LaneLedger()
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
                verdict.tell(f"{self._where}: sequence {sequence} {word}")
        return verdict

    def _grow(self, size: int) -> None:
        if size > len(self._seen):
            grown = np.zeros(max(size, 2 * len(self._seen)), dtype=np.uint8)
            grown[: len(self._seen)] = self._seen
            self._seen = grown


class LaneChecks:
    """The checks of several lanes, a worker and lane each. Not thread-safe."""

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self.checks: dict[tuple[int, int], SequenceCheck] = {}
        self.damaged = 0

    def feed(self, lane: int, bodies: pa.Array, *, check_bytes: bool) -> npt.NDArray[np.void]:
        """Rows of one queue in the order of their offsets. Returns: the headers of this run's."""
        headers, rows = read_headers(bodies, self._plan.run)
        if check_bytes:
            self.damaged += damaged_rows(bodies, headers, rows)
        # A row in another queue than it was sent to counts as damaged, and is missed where it belongs.
        right = (headers["lane"] == lane) & (headers["sequence"] >= 0)
        here: npt.NDArray[np.void] = headers[right]
        self.damaged += len(headers) - len(here)
        for worker in np.unique(here["worker"]).tolist():
            own = here["sequence"][here["worker"] == worker].astype(np.int64)
            self._check(worker, lane).feed(own)
        return here

    def _check(self, worker: int, lane: int) -> SequenceCheck:
        found = self.checks.get((worker, lane))
        if found is None:
            topic, queue = self._plan.lane(lane)
            where = f"worker {worker}, {topic} queue {queue}"
            found = self.checks[worker, lane] = SequenceCheck(where)
        return found

    def finish(
        self, ledgers: list[Ledger], lanes: list[int], short: Collection[int] = ()
    ) -> Verdict:
        """Compare with all ledgers, for the lanes that were fed from begin to end; `short` end before that."""
        whole = Verdict(damaged=self.damaged)
        if self.damaged:
            whole.tell(f"{self.damaged} rows are not the bytes that were sent")
        for ledger in ledgers:
            for lane in set(ledger.lanes) & set(lanes):
                self._check(ledger.worker, lane)
        promised = {ledger.worker: ledger.lanes for ledger in ledgers}
        for (worker, lane), check in sorted(self.checks.items()):
            told = promised.get(worker, {}).get(lane)
            whole.add(check.finish(told, short=lane in short))
        return whole


@dataclass(frozen=True)
class LaneRange:
    """Offsets [first, last) of a lane, and where they are."""

    lane: int
    shard: int
    first: int
    last: int


def verify(
    cluster: Cluster, plan: BenchPlan, ranges: list[LaneRange], ledgers: list[Ledger]
) -> Iterator[int | Verdict]:
    """Read ranges back and compare every row with the ledgers.

    Yields the rows of each piece read, at the end the verdict.
    Raises: OffsetOutOfRange when retention took rows meanwhile; Unavailable.
    """
    checks = LaneChecks(plan)
    for place in ranges:
        topic, queue = plan.lane(place.lane)
        for records in read_range(cluster, topic, queue, place.shard, place.first, place.last):
            bodies = decode_records(records).column("body")
            checks.feed(place.lane, bodies, check_bytes=True)
            yield len(bodies)
    promised = promised_rows(ledgers)
    short = {at.lane for at in ranges if at.last - at.first < promised.get(at.lane, 0)}
    yield checks.finish(ledgers, [place.lane for place in ranges], short)
