"""The state of a shard: topics, counters, sequences and offsets, as a pure function of the log.

It has topics, queue counters, producer sequences and consumer offsets. Every record of the log is applied in order, and
each segment begins with SNAPSHOT records of the whole state. So state = latest complete snapshot + tail.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from raymq.store.base.errors import Corrupt, Fenced, SequenceGap

from . import snapshot_columns
from .producer_table import ENTRY_DTYPE, EPOCH_DTYPE, UNKNOWN_OFFSET, ProducerTable, Run
from .topic_schema import ALLOWED, NULL_VALUES, SCHEMA
from .unconfirmed import ReplacedValues

#: topic and queue of the records that this module reads and writes
INTERNAL_TOPIC = "rmq_sys_raymq"
INTERNAL_QUEUE = 0

#: kinds of state records (their TAGS property)
TOPIC, OFFSETS, PRODUCER, SNAPSHOT = "TOPIC", "OFFSETS", "PRODUCER", "SNAPSHOT"
#: kind of the record that a leader begins its epoch with (glossary: epoch)
EPOCH = "EPOCH"
#: kind of the record that a bundle begins with (inner_message.py): the progress of a service of the store
PROGRESS = "PROGRESS"

#: kinds whose records are JSON, without those of parts that layers above keep
_JSON_KINDS = (TOPIC, OFFSETS, PRODUCER, EPOCH, PROGRESS)

#: in `ShardState.progress`: wall clock ms -> which majority of the replicas was lost. An operator has given them up, or
#: they came back with empty disks
UNCLEAN_RECOVERIES = "unclean_recoveries"
#: in `ShardState.progress`: replica -> the generation in which that replica was complete
COMPLETE_REPLICAS = "complete_replicas"
#: in `ShardState.progress`: how many shards the cluster has since some were added. New topics may be on `known` ones,
#: and are on all of the `joined` ones. It had `created` ones before
SHARDS = "shards"
#: in `ShardState.progress`: option of the store -> what an operator has set while the cluster ran: `value`, `before`,
#: `at_ms` (wall clock) and `by`
OPTIONS = "options"

#: before each record of a packed part in a snapshot: bytes of its kind, and of its body
_PACKED = struct.Struct("<BI")

#: topic attribute, and its value for compaction topics (TopicAttributes, CleanupPolicy)
CLEANUP_POLICY, COMPACTION, DELETE = "cleanup.policy", "COMPACTION", "DELETE"


class BundleRange(NamedTuple):
    """The place of a bundle in the log, as physical offsets."""

    start: int
    end: int

    def is_cut_at(self, offset: int) -> bool:
        """Whether a log that ends at `offset` ends in half of the bundle."""
        return self.start < offset < self.end


#: no bundle
NO_BUNDLE = BundleRange(0, 0)


def bundle_range(at: int, body: bytes) -> BundleRange:
    """The bundle that a PROGRESS record at physical offset `at` begins. Raises: as `apply_state_record`."""
    return BundleRange(at, int(json.loads(body)["end"]))


@dataclass(frozen=True)
class TopicInfo:
    """A topic: queue q is on shard `shards[q % len(shards)]`."""

    name: str
    queues: int
    shards: tuple[int, ...]
    #: RocketMQ's topic attributes, as pairs in the order of their names
    attributes: tuple[tuple[str, str], ...] = ()
    #: how many queues it had before each time when some were added, ascending
    former_queues: tuple[int, ...] = ()
    #: so many of its queues, the last ones, are not shown to clients yet, because other shards may not know them
    hidden_queues: int = 0

    @property
    def compacted(self) -> bool:
        """Whether the topic keeps the latest message of each key (store/compaction)."""
        return (CLEANUP_POLICY, COMPACTION) in self.attributes

    @property
    def schema(self) -> str | None:
        """The columns of the topic's values, as JSON; None: its values are bytes."""
        return dict(self.attributes).get(SCHEMA)

    def shard_of(self, queue_id: int) -> int:
        """The shard that stores a queue."""
        return self.shards[queue_id % len(self.shards)]

    def shown(self) -> dict[str, Any]:
        """The facts for clients: `queues`, `shards`; where that is so, `compacted`, `schema`, `allow_null_values`,
        `former_queues`, `all_queues`.
        """
        facts: dict[str, Any] = {
            "queues": self.queues - self.hidden_queues,
            "shards": list(self.shards),
        }
        if self.compacted:
            facts["compacted"] = True
        if self.schema is not None:
            facts["schema"] = json.loads(self.schema)
        if (NULL_VALUES, ALLOWED) in self.attributes:
            facts["allow_null_values"] = True
        if self.former_queues:
            facts["former_queues"] = list(self.former_queues)
        if self.hidden_queues:
            facts["all_queues"] = self.queues
        return facts


class DeletedTopic(NamedTuple):
    """What is left of deleted topics of one name. The offsets of its queues are never used again."""

    #: how often a topic of this name was deleted. One that exists has this number, too
    generation: int
    #: queue -> the first offset of a later topic's queue
    first_offsets: dict[int, int]


#: of a name of which no topic was deleted
NEVER_DELETED = DeletedTopic(0, {})


class Admission(NamedTuple):
    """The part of a batch that is already stored."""

    duplicates: int
    first_offset: int
    end_offset: int


#: the admission of a batch without a stored row
ALL_NEW = Admission(0, UNKNOWN_OFFSET, 0)


class StatePart(Protocol):
    """A part of the state that a layer above keeps, as a function of its own kinds of records."""

    #: the kinds of records that it applies
    kinds: tuple[str, ...]

    def clear(self) -> None:
        """Forget everything."""

    def apply(self, kind: str, value: Mapping[str, Any]) -> None:
        """Account for one record. Raises: as `ShardState.apply_state_record`."""

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The whole part as records: applied to an empty one, they make this one."""


#: (group, topic) -> queue -> next offset to consume
CommittedOffsets = Mapping[tuple[str, str], Mapping[int, int]]


class PackedPart(Protocol):
    """A part of the state whose records are packed, and not JSON. A layer above keeps it."""

    #: the kinds of records that it applies
    packed_kinds: tuple[str, ...]

    def clear(self) -> None:
        """Forget everything."""

    def apply_packed(self, body: bytes) -> CommittedOffsets:
        """Account for one record. Returns: the offsets that groups have committed with it.

        Raises: as `ShardState.apply_state_record`.
        """

    def packed_records(self) -> Iterator[tuple[str, bytes]]:
        """The whole part as kinds and bodies of records: applied to an empty one, they make this one."""

    def drop_topic(self, topic: str) -> None:
        """Forget what it has of a topic that is deleted."""


class ShardState:
    """Topics, counters, sequences and offsets of one shard. Not thread-safe: the put lock guards it."""

    def __init__(
        self,
        producers: ProducerTable | None = None,
        parts: Iterable[StatePart] = (),
        packed_parts: Iterable[PackedPart] = (),
    ) -> None:
        """Args: `parts`, `packed_parts`: what layers above keep in the state. No two have the same kind of record."""
        #: sequences and epochs of producers
        self.producers = ProducerTable() if producers is None else producers
        self._state_parts = tuple(parts)
        self._part_of_kind = {kind: part for part in self._state_parts for kind in part.kinds}
        self._packed_parts = tuple(packed_parts)
        self._packed_part_of_kind = {
            kind: part for part in self._packed_parts for kind in part.packed_kinds
        }
        #: called with the put lock when options may have been set, or their records were cut off
        self.on_options: Callable[[], None] = _do_nothing
        #: how often topics have changed
        self._topic_changes = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.topics: dict[str, TopicInfo] = {}
        #: by name, also of topics that were made again
        self.deleted_topics: dict[str, DeletedTopic] = {}
        #: next queue offset of every queue that has records, over the full local log
        self.next_offsets: dict[tuple[str, int], int] = {}
        self.producers.clear()
        #: (group, topic) -> queue -> next offset to consume
        self.offsets: dict[tuple[str, str], dict[int, int]] = {}
        #: (group, topic) -> when the newest of these offsets was stored, as its record says; not of all
        self.offset_times_ms: dict[tuple[str, str], int] = {}
        #: what readers see in place of `topics` and `offsets` that are not confirmed yet
        self._replaced_topics: ReplacedValues[str, TopicInfo] = ReplacedValues()
        self._replaced_offsets: ReplacedValues[tuple[str, str], dict[int, int]] = ReplacedValues()
        #: service -> key -> JSON value: the progress of delay levels, timers, transactions and other services
        self.progress: dict[str, dict[str, Any]] = {}
        self.store_time_ms = 0
        #: the epoch of the leader that wrote the last record
        self.log_epoch = 0
        self._parts = SnapshotParts()
        #: topic -> shown queues, and the number of changes of topics before it was made
        self._queue_counts: tuple[int, dict[str, int]] = (-1, {})

        self._topic_changes += 1
        for part in self._state_parts:
            part.clear()
        for packed in self._packed_parts:
            packed.clear()

    # --- admission --------------------------------------------------------------------------------

    def admit(
        self,
        producer_id: int,
        epoch: int,
        topic: str,
        queue_id: int,
        first_sequence: int,
        count: int,
        *,
        may_skip: bool = False,
    ) -> Admission:
        """Check a batch's producer, epoch and sequence before anything is stored.

        Args: `may_skip`: the sequences before the first one may never come.
        Returns: how many leading rows are duplicates, and the offset of the first one, if it is known here.
        Raises: Fenced for an old epoch. Rejected for a gap in the sequence, and for a new producer or queue if the
        shard remembers as many as it may.
        Source: KIP-98. Unlike Kafka, RayMQ trims a known prefix and does not refuse it.
        """
        producers = self.producers
        known = producers.recent_epochs.get(producer_id)
        if known is None:
            known = producers.epoch(producer_id)
        if known is not None and epoch < known:
            raise fenced_error(producer_id, epoch, known)

        entry = producers.open((producer_id, topic, queue_id))
        if entry is None:
            if first_sequence and not may_skip:
                raise SequenceGap(
                    f"producer {producer_id:#x} is unknown in queue {queue_id} of {topic} but sent sequence "
                    f"{first_sequence}; a new producer starts at 0",
                    field="sequence",
                    limit=0,
                )
            producers.check_room(producer_id, self.store_time_ms)
            return ALL_NEW

        if first_sequence > entry.next_sequence and not may_skip:
            raise SequenceGap(
                f"producer {producer_id:#x} sent sequence {first_sequence} to queue {queue_id} of {topic}, "
                f"expected {entry.next_sequence}: the rows between are missing",
                field="sequence",
                limit=entry.next_sequence,
            )

        duplicates = min(count, entry.next_sequence - first_sequence)
        if duplicates <= 0:
            return ALL_NEW
        return Admission(duplicates, entry.offset_of(first_sequence), entry.end_offset)

    # --- applying records -------------------------------------------------------------------------

    def apply_rows(
        self,
        topic: str,
        queue_id: int,
        first_offset: int,
        count: int,
        end_offset: int,
        store_time_ms: int,
        *,
        producer_id: int | None = None,
        epoch: int = 0,
        first_sequence: int = 0,
    ) -> None:
        """Account for consecutive rows of one queue (and one producer) in the log."""
        self.next_offsets[topic, queue_id] = first_offset + count
        self.store_time_ms = max(self.store_time_ms, store_time_ms)
        if producer_id is None:
            return

        producers = self.producers
        if producers.recent_epochs.get(producer_id, -1) < epoch:
            self.raise_epoch(producer_id, epoch)
        key = (producer_id, topic, queue_id)
        # `admit` has just made this entry the newest.
        entry = producers.recent.get(key) or producers.open(key) or producers.make(key)
        entry.extend(first_sequence, count, first_offset, end_offset)
        entry.time_ms = self.store_time_ms

    def raise_epoch(self, producer_id: int, epoch: int) -> None:
        """Remember the highest epoch of a producer."""
        self.producers.raise_epoch(producer_id, epoch, self.store_time_ms)

    def next_epoch(self, producer_id: int) -> int:
        """The epoch after the highest one that a producer had. Raises: Rejected if the table has no room for another
        producer."""
        known = self.producers.epoch(producer_id)
        if known is None:
            self.producers.check_room(producer_id, self.store_time_ms)
            return 0
        return known + 1

    def queue_counts(self) -> Mapping[str, int]:
        """topic -> how many of its queues clients may use. Callers: any thread.

        Returns: another mapping after each change of a topic.
        """
        changes = self._topic_changes
        made_after, counts = self._queue_counts
        if made_after != changes:
            topics = list(self.topics.values())
            counts = {topic.name: topic.queues - topic.hidden_queues for topic in topics}
            # A change that came meanwhile has another number, so that these count once.
            self._queue_counts = changes, counts
        return counts

    def confirmed_topics(self, confirmed: int) -> list[TopicInfo]:
        """The topics below the confirmed end. Args: `confirmed`: that end, as physical offset. Callers: any thread."""
        seen = self._replaced_topics.confirmed_value
        found = [seen(name, topic, confirmed) for name, topic in list(self.topics.items())]
        return [topic for topic in found if topic is not None]

    def confirmed_offsets(self, group: str, topic: str, confirmed: int) -> dict[int, int]:
        """queue -> next offset to consume, below the confirmed end.

        Args: `confirmed`: that end, as physical offset. Callers: any thread.
        """
        key = group, topic
        now = dict(self.offsets.get(key, {}))
        return dict(self._replaced_offsets.confirmed_value(key, now, confirmed) or {})

    def apply_appended(self, kind: str, body: bytes, end: int, confirmed: int) -> None:
        """Account for a state record that a leader has appended. Readers see it from the confirmation of its end on.

        Args: `end`: of the record. `confirmed`: readers see everything below by now. Both are physical offsets.
        """
        if kind in self._packed_part_of_kind:
            for key, offsets in self._packed_part_of_kind[kind].apply_packed(body).items():
                self._note_replaced(key, end, confirmed)
                self.offsets.setdefault(key, {}).update(offsets)
            return
        if kind == TOPIC:
            name = json.loads(body)["name"]
            self._replaced_topics.note(name, self.topics.get(name), end, confirmed)
        elif kind == OFFSETS:
            value = json.loads(body)
            self._note_replaced((value["group"], value["topic"]), end, confirmed)
        self.apply_state_record(kind, body)

    def _note_replaced(self, key: tuple[str, str], end: int, confirmed: int) -> None:
        """Keep the offsets of a group and topic that a record replaces."""
        before = self.offsets.get(key)
        copied = None if before is None else dict(before)
        self._replaced_offsets.note(key, copied, end, confirmed)

    def apply_state_record(self, kind: str, body: bytes) -> bool:
        """Account for one state record. Unknown kinds are a newer version's and are ignored.

        Returns: whether it completed a snapshot, which replaces the whole state.
        Raises: an error that `reading_state_record` turns into Corrupt, for a body that no RayMQ store wrote.
        """
        if kind == SNAPSHOT:
            parts = self._parts.add(body)
            if parts is not None:
                self._restore(parts)
            return parts is not None

        if kind in self._packed_part_of_kind:
            for key, offsets in self._packed_part_of_kind[kind].apply_packed(body).items():
                self.offsets.setdefault(key, {}).update(offsets)
            return False
        if kind not in _JSON_KINDS and kind not in self._part_of_kind:
            return False

        value = json.loads(body)
        if kind == TOPIC and value.get("deleted"):
            self._delete_topic(_text(value["name"]), int(value["generation"]))
        elif kind == TOPIC:
            self._begin_empty(_text(value["name"]))
            self._add_topic(
                value["name"],
                value["queues"],
                value["shards"],
                value.get("attributes", {}),
                former_queues=value.get("former_queues", ()),
                hidden_queues=value.get("hidden_queues", 0),
            )
        elif kind == OFFSETS:
            self._apply_offsets(value)
        elif kind == PRODUCER:
            self.raise_epoch(int(value["producer"]), int(value["epoch"]))
        elif kind == EPOCH:
            self.log_epoch = max(self.log_epoch, int(value["epoch"]))
        elif kind == PROGRESS:
            self._apply_progress(_text(value["service"]), value["set"])
        elif kind in self._part_of_kind:
            self._part_of_kind[kind].apply(kind, value)
        return False

    def _apply_offsets(self, value: Mapping[str, Any]) -> None:
        key = _text(value["group"]), _text(value["topic"])
        offsets = {int(queue): int(offset) for queue, offset in value["offsets"].items()}
        if value.get("deleted"):
            self.offsets.pop(key, None)
            self.offset_times_ms.pop(key, None)
            return
        self.offsets.setdefault(key, {}).update(offsets)
        self._note_offset_time(key, int(value.get("at", 0)))

    def _note_offset_time(self, key: tuple[str, str], at_ms: int) -> None:
        if at_ms > self.offset_times_ms.get(key, 0):
            self.offset_times_ms[key] = at_ms

    def _apply_progress(self, service: str, values: Mapping[str, object]) -> None:
        table = self.progress.setdefault(service, {})
        for key, value in values.items():
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        if service == OPTIONS:
            self.on_options()

    def changed_options(self) -> dict[str, Any]:
        """The options that were set while the cluster ran: option -> value."""
        found = self.progress.get(OPTIONS, {})
        return {
            name: entry["value"]
            for name, entry in list(found.items())
            if isinstance(entry, dict) and "value" in entry
        }

    # --- snapshots --------------------------------------------------------------------------------

    def snapshot(self, part_bytes_max: int) -> list[bytes]:
        """The whole state as bodies of SNAPSHOT records, each at most about `part_bytes_max` bytes.

        The parts are numbered: a reader believes them after it has read all in order. A body is a line of JSON. Entries
        of producers, of which there may be a million, follow it as columns (snapshot_columns.py).
        """
        parts: list[tuple[str, bytes]] = []
        rows: list[str] = []
        size = 0
        for text in self._rows():
            if rows and size + len(text) > part_bytes_max:
                parts.append((",".join(rows), b""))
                rows, size = [], 0
            rows.append(text)
            size += len(text) + 1
        parts.append((",".join(rows), b""))

        for header, data in self._columns(part_bytes_max):
            parts.append((_json(header), data))

        bodies: list[bytes] = []
        for number, (text, data) in enumerate(parts):
            # The part is made, so its text and columns are dropped: a large state is in memory once.
            parts[number] = "", b""
            head = f'{{"part":{number},"parts":{len(parts)},"rows":[{text}]}}'.encode()
            bodies.append(b"\n".join((head, data)) if data else head)

        return bodies

    def _rows(self) -> Iterator[str]:
        """The rows as JSON. Rows of queues are made as text, which is quicker: there are many queues, and puts wait
        meanwhile."""
        yield from map(_json, self._small_rows())
        names = {name: _json(name) for name, _ in self.next_offsets}
        for (name, queue_id), offset in self.next_offsets.items():
            yield f'{{"t":"queue","n":{names[name]},"q":{queue_id},"o":{offset}}}'

    def _columns(self, part_bytes_max: int) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Epochs and entries of producers, and the parts whose records are packed."""
        for data in _joined(self._packed_parts, part_bytes_max):
            yield {"t": "packed"}, data
        for epochs in self.producers.epoch_rows():
            for part in snapshot_columns.split(epochs, part_bytes_max):
                yield snapshot_columns.pack("epochs", part)

        queues = self.producers.queues
        name_bytes = np.array([len(name) + 16 for name, _ in queues], dtype=np.int64)
        for entries in self.producers.entries():
            for part in snapshot_columns.split(entries, part_bytes_max, name_bytes):
                rows = part.copy()
                used, rows["queue"] = np.unique(part["queue"], return_inverse=True)
                header, data = snapshot_columns.pack("entries", rows)
                yield {**header, "queues": [queues[number] for number in used.tolist()]}, data

    def _small_rows(self) -> Iterator[dict[str, object]]:
        """The rows of all but queues and producers, of which there are few."""
        yield {"t": "time", "v": self.store_time_ms}
        if self.log_epoch:
            yield {"t": "log_epoch", "v": self.log_epoch}

        for topic in self.topics.values():
            more: dict[str, Any] = {"a": dict(topic.attributes)} if topic.attributes else {}
            if topic.former_queues:
                more |= {"f": list(topic.former_queues), "h": topic.hidden_queues}
            shards = list(topic.shards)
            yield {"t": "topic", "n": topic.name, "q": topic.queues, "s": shards, **more}
        for name, deleted in self.deleted_topics.items():
            first = {str(queue_id): offset for queue_id, offset in deleted.first_offsets.items()}
            yield {"t": "deleted", "n": name, "g": deleted.generation, "f": first}

        for (group, name), table in self.offsets.items():
            offsets = {str(queue_id): offset for queue_id, offset in table.items()}
            at_ms = self.offset_times_ms.get((group, name))
            more = {"at": at_ms} if at_ms else {}
            yield {"t": "offsets", "g": group, "n": name, "o": offsets, **more}

        for service, values in self.progress.items():
            for key, value in values.items():
                yield {"t": "progress", "s": service, "k": key, "v": value}
        for part in self._state_parts:
            for kind, record in part.records():
                yield {"t": "record", "k": kind, "v": record}

    def _restore(self, parts: list[list[dict[str, Any]]]) -> None:
        """Replace the state by that of a complete snapshot."""
        self.clear()
        entries: list[Any] = []
        epochs: list[Any] = []

        for row in itertools.chain.from_iterable(parts):
            match row["t"]:
                case "time":
                    self.store_time_ms = int(row["v"])
                case "log_epoch":
                    self.log_epoch = int(row["v"])
                case "topic":
                    self._add_topic(
                        row["n"],
                        row["q"],
                        row["s"],
                        row.get("a", {}),
                        former_queues=row.get("f", ()),
                        hidden_queues=row.get("h", 0),
                    )
                case "deleted":
                    first = {int(q): int(o) for q, o in row["f"].items()}
                    self.deleted_topics[_text(row["n"])] = DeletedTopic(int(row["g"]), first)
                case "queue":
                    self.next_offsets[_text(row["n"]), int(row["q"])] = int(row["o"])
                case "offsets":
                    key = _text(row["g"]), _text(row["n"])
                    self.offsets[key] = {int(q): int(o) for q, o in row["o"].items()}
                    self._note_offset_time(key, int(row.get("at", 0)))
                case "progress":
                    self.progress.setdefault(_text(row["s"]), {})[_text(row["k"])] = row["v"]
                case "record":
                    if row["k"] in self._part_of_kind:
                        self._part_of_kind[row["k"]].apply(row["k"], row["v"])
                case "packed":
                    for kind, body in _split(row["data"]):
                        if kind in self._packed_part_of_kind:
                            self._packed_part_of_kind[kind].apply_packed(body)
                case "entries":
                    entries.append(self._unpack_entries(row))
                case "epochs":
                    epochs.append(snapshot_columns.unpack(row, EPOCH_DTYPE))
                case "epoch":
                    self.raise_epoch(int(row["p"]), int(row["e"]))
                case "seq":
                    self._restore_entry(row)

        if entries or epochs:
            self.producers.load(entries, epochs)
        self.on_options()

    def _unpack_entries(self, row: dict[str, Any]) -> Any:
        """Entries of producers, with the numbers that their queues have in this table."""
        part = snapshot_columns.unpack(row, ENTRY_DTYPE)
        queues = [(_text(name), int(number)) for name, number in row["queues"]]
        part["queue"] = self.producers.queue_numbers(queues)[part["queue"]]
        return part

    def _restore_entry(self, row: dict[str, Any]) -> None:
        """An entry as earlier versions wrote it."""
        key = (int(row["p"]), _text(row["n"]), int(row["q"]))
        entry = self.producers.open(key) or self.producers.make(key)
        entry.runs = [Run(int(first), int(count), int(at)) for first, count, at in row["r"]]
        entry.next_sequence, entry.end_offset = int(row["s"]), int(row["e"])
        entry.time_ms = self.store_time_ms

    def _add_topic(
        self,
        name: Any,
        queues: Any,
        shards: Any,
        attributes: Any,
        *,
        former_queues: Any,
        hidden_queues: Any,
    ) -> None:
        ids = tuple(int(shard) for shard in shards)
        if int(queues) < 1 or not ids or not 0 <= int(hidden_queues) < int(queues):
            raise ValueError(f"a topic has queues and shards, not {queues!r} and {shards!r}")
        pairs = tuple(sorted(attributes.items()))
        former = tuple(int(count) for count in former_queues)
        self.topics[_text(name)] = TopicInfo(
            name, int(queues), ids, pairs, former, int(hidden_queues)
        )
        self._topic_changes += 1

    def _begin_empty(self, name: str) -> None:
        """Let a topic that is made again begin after all messages of its name. Delayed ones may have come while no
        topic had it. Snapshots have the result.
        """
        before = self.deleted_topics.get(name)
        if before is not None and name not in self.topics:
            first = {**before.first_offsets, **self._ends_of(name)}
            self.deleted_topics[name] = before._replace(first_offsets=first)

    def _ends_of(self, name: str) -> dict[int, int]:
        """queue -> its next offset, of the queues of a name that have records."""
        return {
            queue: offset for (topic, queue), offset in self.next_offsets.items() if topic == name
        }

    def _delete_topic(self, name: str, generation: int) -> None:
        """Account for a deletion. Another topic of this name goes on at the offsets where this one ended.

        Claims of consumer groups stay: their numbers fence former owners of the queues.
        """
        before = self.deleted_topics.get(name, NEVER_DELETED)
        if generation <= before.generation:
            # Repeated.
            return
        first = {**before.first_offsets, **self._ends_of(name)}
        self.deleted_topics[name] = DeletedTopic(generation, first)
        self.topics.pop(name, None)
        for key in [key for key in self.offsets if key[1] == name]:
            del self.offsets[key]
            self.offset_times_ms.pop(key, None)
        for part in self._packed_parts:
            part.drop_topic(name)
        self._topic_changes += 1

    def generation(self, topic: str) -> int:
        """How often a topic of this name was deleted. Callers: any thread."""
        return self.deleted_topics.get(topic, NEVER_DELETED).generation

    def first_offset(self, topic: str, queue_id: int) -> int:
        """The first offset that a queue may have: those below were of a deleted topic. Callers: any thread."""
        return self.deleted_topics.get(topic, NEVER_DELETED).first_offsets.get(queue_id, 0)


#: one encoder for all calls: json.dumps makes one for each
_json = json.JSONEncoder(separators=(",", ":")).encode


def topic_body(topic: TopicInfo) -> bytes:
    """The body of a TOPIC record."""
    value: dict[str, Any] = {
        "name": topic.name,
        "queues": topic.queues,
        "shards": list(topic.shards),
    }
    if topic.attributes:
        value["attributes"] = dict(topic.attributes)
    if topic.former_queues:
        former = list(topic.former_queues)
        value |= {"former_queues": former, "hidden_queues": topic.hidden_queues}
    return _json(value).encode()


def deleted_topic_body(name: str, generation: int) -> bytes:
    """The body of the TOPIC record of a deletion. Args: `generation`: how often topics of the name are deleted then."""
    return _json({"name": name, "deleted": True, "generation": generation}).encode()


def offsets_body(
    group: str, topic: str, offsets: Mapping[int, int], at_ms: int | None = None
) -> bytes:
    """The body of an OFFSETS record. Args: `at_ms`: now, ms since 1970; None: not known, and they are kept for ever."""
    value = {"group": group, "topic": topic, "offsets": {str(k): v for k, v in offsets.items()}}
    return _json(value if at_ms is None else {**value, "at": at_ms}).encode()


def no_offsets_body(group: str, topic: str) -> bytes:
    """The body of an OFFSETS record that deletes those of a group."""
    value = {"group": group, "topic": topic, "offsets": {}, "deleted": True}
    return _json(value).encode()


def producer_body(producer_id: int, epoch: int) -> bytes:
    """The body of a PRODUCER record."""
    return _json({"producer": producer_id, "epoch": epoch}).encode()


def epoch_body(epoch: int) -> bytes:
    """The body of an EPOCH record."""
    return _json({"epoch": epoch}).encode()


def _joined(parts: Iterable[PackedPart], part_bytes_max: int) -> Iterator[bytes]:
    """The records of packed parts, several together. Each has the lengths of its kind and its body before it."""
    joined: list[bytes] = []
    size = 0
    for part in parts:
        for kind, body in part.packed_records():
            name = kind.encode()
            if joined and size + len(name) + len(body) > part_bytes_max:
                yield b"".join(joined)
                joined, size = [], 0
            joined += (_PACKED.pack(len(name), len(body)), name, body)
            size += _PACKED.size + len(name) + len(body)
    if joined:
        yield b"".join(joined)


def _split(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The inverse of `_joined`. Raises: ValueError for other bytes."""
    at = 0
    while at < len(data):
        if at + _PACKED.size > len(data):
            raise ValueError("a packed part ends in the middle of a record")
        name_bytes, body_bytes = _PACKED.unpack_from(data, at)
        at += _PACKED.size
        body_at, end = at + name_bytes, at + name_bytes + body_bytes
        if end > len(data):
            raise ValueError("a packed part ends in the middle of a record")
        yield data[at:body_at].decode(), data[body_at:end]
        at = end


def _do_nothing() -> None:
    """For a state whose options no store follows."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


@contextmanager
def reading_state_record(kind: str, at: int) -> Iterator[None]:
    """Read a record of the internal topic at physical offset `at`. Raises: Corrupt if it cannot be read."""
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
            f"the state record at offset {at} ({kind or 'of no kind'}) cannot be read: {error!r}. RayMQ never "
            "writes such a record; restore the replica from its peer, or from a copy.",
            offset=at,
            rule="state records can be read",
            found=kind,
        ) from error


class SnapshotParts:
    """Puts the parts of snapshots together. An unfinished snapshot has no last part, so it is never complete."""

    def __init__(self) -> None:
        self._parts: list[list[dict[str, Any]]] = []

    def add(self, body: bytes) -> list[list[dict[str, Any]]] | None:
        """Add the body of the next SNAPSHOT record. Returns: the rows of all parts after the last part; otherwise
        None."""
        text, _, columns = body.partition(b"\n")
        value = json.loads(text)
        part, parts = int(value["part"]), int(value["parts"])
        rows = list(value["rows"])
        if columns:
            (row,) = rows
            row["data"] = columns
        if part == 0:
            self._parts = []
        if part != len(self._parts):
            return None
        self._parts.append(rows)
        return self._parts if len(self._parts) == parts else None


def fenced_error(producer_id: int, epoch: int, known: int) -> Fenced:
    """Why a producer with this epoch may put no more."""
    message = f"producer {producer_id:#x} has epoch {known}; epoch {epoch} is fenced"
    return Fenced(message, field="epoch", limit=known)
