"""What a shard knows beside its bytes, as a pure function of the log (design D6, D7).

Topics, queue counters, producer sequences, consumer offsets: every record of the log is applied in order, each
segment begins with SNAPSHOT records of the whole state, so state = latest snapshot + tail.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import Fenced, Rejected

#: topic of the records this module reads and writes; queue 0
INTERNAL_TOPIC = "rmq_sys_raymq"
INTERNAL_QUEUE = 0

#: kinds of internal records (their TAGS property)
TOPIC, OFFSETS, PRODUCER, SNAPSHOT = "TOPIC", "OFFSETS", "PRODUCER", "SNAPSHOT"

#: (producer, topic, queue) entries kept; the least recently written are forgotten first
PRODUCER_ENTRIES_MAX = 20_000
#: runs of consecutive offsets kept a producer and queue; older duplicates are known, their offset is not
RUNS_MAX = 16
UNKNOWN_OFFSET = -1


@dataclass(frozen=True)
class TopicInfo:
    """A topic: queue q lives on shard `shards[q % len(shards)]`."""

    name: str
    queues: int
    shards: tuple[int, ...]

    def shard_of(self, queue_id: int) -> int:
        """The shard that stores a queue."""
        return self.shards[queue_id % len(self.shards)]


class Run(NamedTuple):
    """`count` sequences from `first_sequence` stored at consecutive offsets from `first_offset`."""

    first_sequence: int
    count: int  # type: ignore[assignment]
    first_offset: int


@dataclass
class ProducerQueue:
    """What one producer stored in one queue."""

    #: the sequence the next row must have
    next_sequence: int = 0
    #: physical end of its last record: duplicates are as durable as this
    end_offset: int = 0
    runs: list[Run] = field(default_factory=list)

    def extend(self, sequence: int, count: int, offset: int, end_offset: int) -> None:
        """Record that rows [sequence, sequence+count) were stored from queue offset `offset`."""
        last = self.runs[-1] if self.runs else None
        if (
            last is not None
            and last.first_sequence + last.count == sequence
            and last.first_offset + last.count == offset
        ):
            self.runs[-1] = Run(last.first_sequence, last.count + count, last.first_offset)
        else:
            self.runs.append(Run(sequence, count, offset))
            del self.runs[:-RUNS_MAX]
        self.next_sequence = sequence + count
        self.end_offset = end_offset

    def offset_of(self, sequence: int) -> int:
        """The queue offset a stored sequence got, UNKNOWN_OFFSET when it is older than the runs kept."""
        for run in reversed(self.runs):
            if run.first_sequence <= sequence < run.first_sequence + run.count:
                return run.first_offset + sequence - run.first_sequence
        return UNKNOWN_OFFSET


class Admission(NamedTuple):
    """How much of a batch is already stored."""

    duplicates: int
    first_offset: int
    end_offset: int


class ShardState:
    """Topics, counters, sequences and offsets of one shard. Not thread-safe: the put lock guards it."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicInfo] = {}
        #: next queue offset of every queue that has records, over the full local log
        self.next_offsets: dict[tuple[str, int], int] = {}
        self.producer_epochs: OrderedDict[int, int] = OrderedDict()
        self.producers: OrderedDict[tuple[int, str, int], ProducerQueue] = OrderedDict()
        #: (group, topic) -> queue -> next offset to consume
        self.offsets: dict[tuple[str, str], dict[int, int]] = {}
        self.store_time_ms = 0

    # --- admission ------------------------------------------------------------------------------------------

    def admit(
        self, producer: int, epoch: int, topic: str, queue_id: int, first_sequence: int, count: int
    ) -> Admission:
        """Check a batch's producer, epoch and sequence before anything is stored.

        Returns: how many leading rows are duplicates and where the first of them is.
        Raises: Fenced for an old epoch; Rejected for a gap in the sequence.
        Source: KIP-98 and design D7; unlike Kafka a known prefix is trimmed, not refused.
        """
        known = self.producer_epochs.get(producer, epoch)
        if epoch < known:
            raise Fenced(
                f"producer {producer:#x} has epoch {known}; epoch {epoch} is fenced",
                field="epoch",
                limit=known,
            )
        entry = self.producers.get((producer, topic, queue_id))
        if entry is None:
            if first_sequence:
                raise Rejected(
                    f"producer {producer:#x} is unknown in queue {queue_id} of {topic} but sent sequence "
                    f"{first_sequence}; a new producer starts at 0",
                    field="sequence",
                    limit=0,
                )
            return Admission(0, UNKNOWN_OFFSET, 0)
        if first_sequence > entry.next_sequence:
            raise Rejected(
                f"producer {producer:#x} sent sequence {first_sequence} to queue {queue_id} of {topic}, "
                f"expected {entry.next_sequence}: the rows between are missing",
                field="sequence",
                limit=entry.next_sequence,
            )
        duplicates = min(count, entry.next_sequence - first_sequence)
        if not duplicates:
            return Admission(0, UNKNOWN_OFFSET, 0)
        return Admission(duplicates, entry.offset_of(first_sequence), entry.end_offset)

    # --- applying records -----------------------------------------------------------------------------------

    def apply_rows(
        self,
        topic: str,
        queue_id: int,
        first_offset: int,
        count: int,
        end_offset: int,
        store_time_ms: int,
        *,
        producer: int | None = None,
        epoch: int = 0,
        first_sequence: int = 0,
    ) -> None:
        """Account for consecutive rows of one queue (and one producer) that stand in the log."""
        self.next_offsets[topic, queue_id] = first_offset + count
        self.store_time_ms = max(self.store_time_ms, store_time_ms)
        if producer is None:
            return
        self.raise_epoch(producer, epoch)
        key = (producer, topic, queue_id)
        entry = self.producers.get(key)
        if entry is None:
            entry = self.producers[key] = ProducerQueue()
            if len(self.producers) > PRODUCER_ENTRIES_MAX:
                self.producers.popitem(last=False)
        else:
            self.producers.move_to_end(key)
        entry.extend(first_sequence, count, first_offset, end_offset)

    def raise_epoch(self, producer: int, epoch: int) -> None:
        """Remember the highest epoch of a producer."""
        self.producer_epochs[producer] = max(epoch, self.producer_epochs.get(producer, 0))
        self.producer_epochs.move_to_end(producer)
        if len(self.producer_epochs) > PRODUCER_ENTRIES_MAX:
            self.producer_epochs.popitem(last=False)

    def apply_internal(self, kind: str, body: bytes) -> None:
        """Account for one internal record. Unknown kinds are a newer version's and are ignored."""
        value = json.loads(body)
        if kind == TOPIC:
            self.topics[value["name"]] = TopicInfo(
                value["name"], int(value["queues"]), tuple(value["shards"])
            )
        elif kind == OFFSETS:
            table = self.offsets.setdefault((value["group"], value["topic"]), {})
            table.update({int(queue): int(offset) for queue, offset in value["offsets"].items()})
        elif kind == PRODUCER:
            self.raise_epoch(int(value["producer"]), int(value["epoch"]))
        elif kind == SNAPSHOT:
            self._restore(value)

    # --- snapshots ------------------------------------------------------------------------------------------

    def snapshot(self, part_bytes_max: int) -> list[bytes]:
        """The whole state as bodies of SNAPSHOT records, each at most about `part_bytes_max` bytes.

        The first part says "reset": a reader that meets it forgets what it knew.
        """
        rows: Iterator[dict[str, Any]] = self._rows()
        parts: list[bytes] = []
        part: list[dict[str, Any]] = []
        size = 0
        for row in rows:
            length = len(json.dumps(row, separators=(",", ":"))) + 1
            if part and size + length > part_bytes_max:
                parts.append(_part(part, reset=not parts))
                part, size = [], 0
            part.append(row)
            size += length
        parts.append(_part(part, reset=not parts))
        return parts

    def _rows(self) -> Iterator[dict[str, Any]]:
        yield {"t": "time", "v": self.store_time_ms}
        for topic in self.topics.values():
            yield {"t": "topic", "n": topic.name, "q": topic.queues, "s": list(topic.shards)}
        for (name, queue_id), offset in self.next_offsets.items():
            yield {"t": "queue", "n": name, "q": queue_id, "o": offset}
        for (group, name), table in self.offsets.items():
            yield {
                "t": "offsets",
                "g": group,
                "n": name,
                "o": {str(q): o for q, o in table.items()},
            }
        for producer, epoch in self.producer_epochs.items():
            yield {"t": "epoch", "p": producer, "e": epoch}
        for (producer, name, queue_id), entry in self.producers.items():
            yield {
                "t": "seq",
                "p": producer,
                "n": name,
                "q": queue_id,
                "s": entry.next_sequence,
                "e": entry.end_offset,
                "r": [list(run) for run in entry.runs],
            }

    def _restore(self, value: dict[str, Any]) -> None:
        if value["reset"]:
            self.__init__()  # type: ignore[misc]
        for row in value["rows"]:
            kind = row["t"]
            if kind == "time":
                self.store_time_ms = row["v"]
            elif kind == "topic":
                self.topics[row["n"]] = TopicInfo(row["n"], row["q"], tuple(row["s"]))
            elif kind == "queue":
                key = (row["n"], row["q"])
                # A later part must not undo the rows of the parts before it.
                self.next_offsets[key] = max(row["o"], self.next_offsets.get(key, 0))
            elif kind == "offsets":
                self.offsets[row["g"], row["n"]] = {int(q): o for q, o in row["o"].items()}
            elif kind == "epoch":
                self.producer_epochs[row["p"]] = row["e"]
            elif kind == "seq":
                self.producers[row["p"], row["n"], row["q"]] = ProducerQueue(
                    row["s"], row["e"], [Run(*run) for run in row["r"]]
                )


def _part(rows: list[dict[str, Any]], *, reset: bool) -> bytes:
    return json.dumps({"reset": reset, "rows": rows}, separators=(",", ":")).encode()
