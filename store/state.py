"""What a shard knows beside its bytes, as a pure function of the log (design D6, D7).

Topics, queue counters, producer sequences, consumer offsets: every record of the log is applied in order, each
segment begins with SNAPSHOT records of the whole state, so state = latest complete snapshot + tail.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from .errors import Corrupt, Fenced, Rejected

#: topic of the records this module reads and writes; queue 0
INTERNAL_TOPIC = "rmq_sys_raymq"
INTERNAL_QUEUE = 0

#: kinds of internal records (their TAGS property)
TOPIC, OFFSETS, PRODUCER, SNAPSHOT = "TOPIC", "OFFSETS", "PRODUCER", "SNAPSHOT"
#: how far a service of the store came; the record that a group begins with (inner_message.py)
PROGRESS = "PROGRESS"

#: topic attribute, and its value for compaction topics (TopicAttributes, CleanupPolicy)
CLEANUP_POLICY, COMPACTION, DELETE = "cleanup.policy", "COMPACTION", "DELETE"

#: (producer, topic, queue) entries kept; the least recently written are forgotten first
PRODUCER_ENTRIES_MAX = 20_000
#: runs of consecutive offsets kept a producer and queue; rows between them are searched (duplicates.py)
RUNS_MAX = 16
#: of these, the newest that are always kept
RUNS_RECENT = 6
#: dropped at once when there are too many
RUNS_DROPPED = 5
UNKNOWN_OFFSET = -1


@dataclass(frozen=True)
class TopicInfo:
    """A topic: queue q lives on shard `shards[q % len(shards)]`."""

    name: str
    queues: int
    shards: tuple[int, ...]
    #: RocketMQ's topic attributes, as pairs in the order of their names
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def compacted(self) -> bool:
        """Whether the topic keeps the latest message of each key (store/compaction)."""
        return (CLEANUP_POLICY, COMPACTION) in self.attributes

    def shard_of(self, queue_id: int) -> int:
        """The shard that stores a queue."""
        return self.shards[queue_id % len(self.shards)]


class Run(NamedTuple):
    """`count` sequences from `first_sequence` stored at consecutive offsets from `first_offset`."""

    first_sequence: int
    count: int  # type: ignore[assignment]
    first_offset: int


class Found(NamedTuple):
    """A run that a search found, and the physical end of its last record."""

    first_sequence: int
    count: int  # type: ignore[assignment]
    first_offset: int
    end: int


@dataclass
class ProducerQueue:
    """What one producer stored in one queue."""

    #: the sequence the next row must have
    next_sequence: int = 0
    #: physical end of its last record: duplicates are as durable as this
    end_offset: int = 0
    #: the first run, some that are old, the newest; never changed in place but at its end
    runs: list[Run] = field(default_factory=list)
    #: what was searched last: the next rows are asked for next. No part of the state
    found: Found | None = field(default=None, compare=False)

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
            if len(self.runs) > RUNS_MAX:
                self._thin_out()
        self.next_sequence = sequence + count
        self.end_offset = end_offset

    def _thin_out(self) -> None:
        """Drop the old runs that leave the fewest offsets to search; both ends of a long pause stay.

        The first run stays too: an older row of the producer is one of a life that was forgotten.
        """
        runs = self.runs
        old = sorted(
            range(1, len(runs) - RUNS_RECENT),
            key=lambda i: runs[i + 1].first_offset - runs[i - 1].first_offset - runs[i - 1].count,
        )
        dropped = set(old[:RUNS_DROPPED])
        self.runs = [run for i, run in enumerate(runs) if i not in dropped]

    def span_of(self, sequence: int) -> tuple[int, int]:
        """The queue offsets [low, high) where a sequence can stand; empty when it is none of the stored.

        Callers: any thread, without the put lock.
        """
        runs = list(self.runs)
        after = bisect_right(runs, sequence, key=itemgetter(0))
        if not after:
            return 0, 0
        run = runs[after - 1]
        low = run.first_offset + sequence - run.first_sequence
        if sequence < run.first_sequence + run.count:
            return low, low + 1
        if after == len(runs):
            return 0, 0
        high = runs[after].first_offset - (runs[after].first_sequence - sequence) + 1
        found = self.found
        if found is not None and found.first_sequence <= sequence:
            # Offsets never grow slower than sequences.
            low = max(low, found.first_offset + sequence - found.first_sequence)
            if sequence < found.first_sequence + found.count:
                return low, low + 1
        return low, high

    def offset_of(self, sequence: int) -> int:
        """The queue offset a stored sequence got; UNKNOWN_OFFSET when it must be searched."""
        low, high = self.span_of(sequence)
        return low if high - low == 1 else UNKNOWN_OFFSET


class Admission(NamedTuple):
    """How much of a batch is already stored."""

    duplicates: int
    first_offset: int
    end_offset: int


#: nothing of it is
ALL_NEW = Admission(0, UNKNOWN_OFFSET, 0)


class ShardState:
    """Topics, counters, sequences and offsets of one shard. Not thread-safe: the put lock guards it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.topics: dict[str, TopicInfo] = {}
        #: next queue offset of every queue that has records, over the full local log
        self.next_offsets: dict[tuple[str, int], int] = {}
        self.producer_epochs: OrderedDict[int, int] = OrderedDict()
        self.producers: OrderedDict[tuple[int, str, int], ProducerQueue] = OrderedDict()
        #: (group, topic) -> queue -> next offset to consume
        self.offsets: dict[tuple[str, str], dict[int, int]] = {}
        #: service -> key -> JSON value: how far delay levels, timers, transactions and the like came
        self.progress: dict[str, dict[str, Any]] = {}
        self.store_time_ms = 0
        self._parts = SnapshotParts()

    # --- admission ------------------------------------------------------------------------------------------

    def admit(
        self, producer: int, epoch: int, topic: str, queue_id: int, first_sequence: int, count: int
    ) -> Admission:
        """Check a batch's producer, epoch and sequence before anything is stored.

        Returns: how many leading rows are duplicates and where the first of them is, if that is known here.
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
            return ALL_NEW
        if first_sequence > entry.next_sequence:
            raise Rejected(
                f"producer {producer:#x} sent sequence {first_sequence} to queue {queue_id} of {topic}, "
                f"expected {entry.next_sequence}: the rows between are missing",
                field="sequence",
                limit=entry.next_sequence,
            )
        duplicates = min(count, entry.next_sequence - first_sequence)
        if not duplicates:
            return ALL_NEW
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

    def apply_internal(self, kind: str, body: bytes) -> bool:
        """Account for one internal record. Unknown kinds are a newer version's and are ignored.

        Returns: whether it completed a snapshot, which is all that is known now.
        Raises: what `reading_internal` makes Corrupt of, for a body that no store of ours wrote.
        """
        if kind == SNAPSHOT:
            parts = self._parts.add(body)
            if parts is not None:
                self._restore(parts)
            return parts is not None
        value = json.loads(body)
        if kind == TOPIC:
            self._add_topic(
                value["name"], value["queues"], value["shards"], value.get("attributes", {})
            )
        elif kind == OFFSETS:
            offsets = self.offsets.setdefault((_text(value["group"]), _text(value["topic"])), {})
            offsets.update({int(queue): int(offset) for queue, offset in value["offsets"].items()})
        elif kind == PRODUCER:
            self.raise_epoch(int(value["producer"]), int(value["epoch"]))
        elif kind == PROGRESS:
            table = self.progress.setdefault(_text(value["service"]), {})
            for key, found in value["set"].items():
                if found is None:
                    table.pop(key, None)
                else:
                    table[key] = found
        return False

    # --- snapshots ------------------------------------------------------------------------------------------

    def snapshot(self, part_bytes_max: int) -> list[bytes]:
        """The whole state as bodies of SNAPSHOT records, each at most about `part_bytes_max` bytes.

        They are numbered: a reader believes them when it has met all of them, one behind the other.
        """
        parts: list[list[str]] = [[]]
        size = 0
        for text in self._rows():
            if parts[-1] and size + len(text) > part_bytes_max:
                parts.append([])
                size = 0
            parts[-1].append(text)
            size += len(text) + 1
        return [
            f'{{"part":{number},"parts":{len(parts)},"rows":[{",".join(part)}]}}'.encode()
            for number, part in enumerate(parts)
        ]

    def _rows(self) -> Iterator[str]:
        """The rows as JSON. Of queues and producers there are many, and puts wait: these are put together as text."""
        yield from map(_json, self._few())
        names = {name: _json(name) for name, _ in self.next_offsets}
        for (name, queue_id), offset in self.next_offsets.items():
            yield f'{{"t":"queue","n":{names[name]},"q":{queue_id},"o":{offset}}}'
        for producer, epoch in self.producer_epochs.items():
            yield f'{{"t":"epoch","p":{producer},"e":{epoch}}}'
        names |= {name: _json(name) for _, name, _ in self.producers if name not in names}
        for (producer, name, queue_id), entry in self.producers.items():
            runs = ",".join(f"[{first},{count},{at}]" for first, count, at in entry.runs)
            yield (
                f'{{"t":"seq","p":{producer},"n":{names[name]},"q":{queue_id},'
                f'"s":{entry.next_sequence},"e":{entry.end_offset},"r":[{runs}]}}'
            )

    def _few(self) -> Iterator[dict[str, Any]]:
        yield {"t": "time", "v": self.store_time_ms}
        for topic in self.topics.values():
            attributes = {"a": dict(topic.attributes)} if topic.attributes else {}
            shards = list(topic.shards)
            yield {"t": "topic", "n": topic.name, "q": topic.queues, "s": shards, **attributes}
        for (group, name), table in self.offsets.items():
            yield {
                "t": "offsets",
                "g": group,
                "n": name,
                "o": {str(q): o for q, o in table.items()},
            }
        for service, values in self.progress.items():
            for key, value in values.items():
                yield {"t": "progress", "s": service, "k": key, "v": value}

    def _restore(self, parts: list[list[dict[str, Any]]]) -> None:
        """Forget what was known, and know what a complete snapshot says."""
        self.clear()
        for row in itertools.chain.from_iterable(parts):
            kind = row["t"]
            if kind == "time":
                self.store_time_ms = int(row["v"])
            elif kind == "topic":
                self._add_topic(row["n"], row["q"], row["s"], row.get("a", {}))
            elif kind == "queue":
                self.next_offsets[_text(row["n"]), int(row["q"])] = int(row["o"])
            elif kind == "offsets":
                table = {int(q): int(o) for q, o in row["o"].items()}
                self.offsets[_text(row["g"]), _text(row["n"])] = table
            elif kind == "progress":
                self.progress.setdefault(_text(row["s"]), {})[_text(row["k"])] = row["v"]
            elif kind == "epoch":
                self.producer_epochs[int(row["p"])] = int(row["e"])
            elif kind == "seq":
                self.producers[int(row["p"]), _text(row["n"]), int(row["q"])] = ProducerQueue(
                    int(row["s"]),
                    int(row["e"]),
                    [Run(int(first), int(count), int(at)) for first, count, at in row["r"]],
                )

    def _add_topic(self, name: Any, queues: Any, shards: Any, attributes: Any) -> None:
        ids = tuple(int(shard) for shard in shards)
        if int(queues) < 1 or not ids:
            raise ValueError(f"a topic has queues and shards, not {queues!r} and {shards!r}")
        self.topics[_text(name)] = TopicInfo(
            name, int(queues), ids, tuple(sorted(attributes.items()))
        )


#: kept: json.dumps makes one for each call
_json = json.JSONEncoder(separators=(",", ":")).encode


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


@contextmanager
def reading_internal(kind: str, at: int) -> Iterator[None]:
    """Of a record of the internal topic at physical offset `at`. Raises: Corrupt when it cannot be understood."""
    try:
        yield
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Corrupt(
            f"the internal record at offset {at} ({kind or 'of no kind'}) cannot be read: {error!r}. No store of ours "
            "writes such a one; restore the replica from its peer, or from a copy.",
            offset=at,
            rule="internal records can be read",
            found=kind,
        ) from error


class SnapshotParts:
    """Puts the parts of snapshots together. A broken-off one has no last part and is never complete."""

    def __init__(self) -> None:
        self._parts: list[list[dict[str, Any]]] = []

    def add(self, body: bytes) -> list[list[dict[str, Any]]] | None:
        """Take the body of the next SNAPSHOT record. Returns: the rows of all parts with the last one."""
        value = json.loads(body)
        part, parts, rows = int(value["part"]), int(value["parts"]), list(value["rows"])
        if part == 0:
            self._parts = []
        if part != len(self._parts):
            return None
        self._parts.append(rows)
        return self._parts if len(self._parts) == parts else None
