"""Puts dead letters back where they came from: the copy and the settlement of the dead letter are one append group.

What was put back is settled for the group %REDRIVE%GROUP, in the queues of %DLQ%GROUP. So a dead letter goes back once,
whatever fails, and the topic of dead letters itself never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected, Unavailable
from raymq.store.base.format import DLQ_PREFIX
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.lease_machine import LeaseMachine, LeasePlan
from raymq.store.groups.leases.offsets import OffsetColumn
from raymq.store.groups.leases.options import COPIES_MAX, LeaseOptions
from raymq.store.groups.leases.requests import (
    Copy,
    Destination,
    SettleAnswer,
    SettleItem,
    SettleRequest,
    copy_to,
    offsets_of,
)
from raymq.store.put.inner_message import EncodedInner
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.dead_letter import ORIGIN_ID, origin_queue, origin_topic
from raymq.store.state.features import PAUSES_LEVEL
from raymq.store.state.topics import (
    QueueKey,
    dlq_topic,
    is_system_topic,
    redrive_group,
    unknown_topic,
)

from .lease_copies import LeaseCopies, PreparedCopy
from .lease_decisions import LeaseDecision, LeaseDecisions
from .redriven_message import redriven
from .stored_message import StoredMessage, read

#: offsets between the oldest dead letter of a queue and one that goes back
WINDOW = LeaseOptions().window
#: dead letters that were never put back, at which one look goes on
LOOK_OFFSETS = 4_096


class RecordFinder(Protocol):
    """What finds a record by its message id: `Query`."""

    def by_id(self, message_id: str) -> pa.RecordBatch: ...


@dataclass(frozen=True)
class DeadQueue:
    """The dead letters of one queue that were not put back."""

    key: QueueKey
    #: those that were passed over, ascending
    passed: OffsetColumn
    #: the range of those after them
    first: int
    stop: int

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.passed) + self.stop - self.first

    @property
    def oldest(self) -> int:
        """The offset of the oldest one. Callers: if there is one."""
        return int(self.passed[0]) if len(self.passed) else self.first

    @property
    def newest(self) -> int:
        """The offset of the newest one. Callers: if there is one."""
        return self.stop - 1 if self.stop > self.first else int(self.passed[-1])

    def next_of(self, begin: int) -> tuple[OffsetColumn, int]:
        """The next ones from an offset on, and where to go on; the end of the queue if these are all."""
        passed = self.passed[self.passed >= begin]
        first = max(self.first, begin)
        stop = min(self.stop, first + LOOK_OFFSETS)
        found = np.concatenate((passed, np.arange(first, max(first, stop))))
        return found, max(first, stop)


class NotRedriven(NamedTuple):
    """A dead letter that stays."""

    queue_id: int
    offset: int
    #: settled: it was put back, or has expired; later: this call has no room for it; refused: it cannot go back
    why: str
    text: str


class Redriven(NamedTuple):
    """What one call has put back."""

    #: topic -> dead letters that went there
    topics: Mapping[str, int]
    stays: Sequence[NotRedriven]
    #: None: nothing was decided
    decision: LeaseDecision | None


class _Looked(NamedTuple):
    """What the messages of a call say. Each is named by its queue and its offset."""

    found: dict[tuple[QueueKey, int], Destination]
    copies: dict[Copy, PreparedCopy]
    #: why they stay
    faults: dict[tuple[QueueKey, int], str]
    #: the copies of those before them are as large as one append may be
    unread: set[tuple[QueueKey, int]]


class RedriveService:
    """The dead letters of a shard, while it leads. Threads: any may call."""

    def __init__(
        self, store: ServiceHost, decisions: LeaseDecisions, copies: LeaseCopies, *, shard: int
    ) -> None:
        self._store = store
        self._copies = copies
        self._decisions = decisions
        self._shard = shard

    # --- what there is ----------------------------------------------------------------------------

    def groups(self) -> list[str]:
        """The groups that have a topic of dead letters."""
        topics = list(self._store.state.topics)
        return sorted(each.removeprefix(DLQ_PREFIX) for each in topics if _is_dlq(each))

    def queues(self, group: str) -> list[DeadQueue]:
        """The dead letters of a group on this shard, by queue."""
        topic = dlq_topic(group)
        info = self._store.state.topics.get(topic)
        count = 0 if info is None else info.queues
        keys = [
            (topic, each) for each in range(count) if info and info.shard_of(each) == self._shard
        ]
        ranges = {key: self._store.queue_range(*key) for key in keys}
        found: list[DeadQueue] = []

        def look() -> list[tuple[str, bytes]]:
            columns = self._store.leases.group(redrive_group(group)).queues
            for key, (first, stop) in ranges.items():
                known = columns.get(key)
                passed = offsets_of([]) if known is None else known.unsettled()
                begin = first if known is None else max(first, known.next)
                found.append(
                    DeadQueue(key, passed[passed >= first], min(begin, stop), max(first, stop))
                )
            return []

        self._store.inner_put.put_decided(look)
        return found

    # --- the way back -----------------------------------------------------------------------------

    def redrive(
        self,
        group: str,
        session: bytes,
        settle: int,
        offsets: Mapping[int, OffsetColumn],
        *,
        topic: str | None = None,
        find: RecordFinder | None = None,
        is_trial: bool = False,
    ) -> Redriven:
        """Put dead letters back, each with its settlement, all in one append group.

        Args: `settle`: number of the session's call; a repeated one puts nothing back again, and gets the same answer.
        `offsets`: of the queues of %DLQ%GROUP. `topic`: where they go; None: the topic from which each came. `find`:
        finds the queue from which a dead letter came, if it does not say so itself. `is_trial`: change nothing.
        Raises: Rejected for a topic that cannot get them, and for a call that is older than the session's newest;
        Unavailable: the same call may be repeated. Otherwise as `InnerPut.put_groups`.
        """
        dead_topic = dlq_topic(group)
        if topic is not None:
            self._check_topic(topic)
        keys = {(dead_topic, queue_id): each for queue_id, each in offsets.items()}
        looked = self._look(keys, topic, find)

        decision = None
        if is_trial:
            refused = self._settled(self._left(group), keys) | set(looked.faults) | looked.unread
        else:
            decision = self._decide(group, session, settle, keys, looked)
            refused = _refused_of(decision, session, settle)
        topics: dict[str, int] = {}
        for place, destination in looked.found.items():
            if place not in refused:
                name = destination.key[0]
                topics[name] = topics.get(name, 0) + 1
        return Redriven(topics, self._stays(group, keys, refused, looked), decision)

    def _decide(
        self,
        group: str,
        session: bytes,
        settle: int,
        keys: Mapping[QueueKey, OffsetColumn],
        looked: _Looked,
    ) -> LeaseDecision:
        self._store.note_feature_level(PAUSES_LEVEL)
        self._begin(group, keys)
        items = [SettleItem(0, key, offsets, SettleOutcome.ACKED) for key, offsets in keys.items()]
        request = SettleRequest(session, settle, items)

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            for destination in looked.found.values():
                self._check_unchanged(destination)
            return machine.redrive(request, looked.found, now_ms)

        return self._decisions.decide(redrive_group(group), decide, prepared=looked.copies)

    def _check_unchanged(self, destination: Destination) -> None:
        """Raises: Unavailable for a topic that was deleted meanwhile. Has the put lock."""
        topic, state = destination.key[0], self._store.state
        if topic not in state.topics or state.generation(topic) != destination.generation:
            raise Unavailable(f"topic {topic} was deleted meanwhile; ask again", field="topic")

    def _begin(self, group: str, keys: Mapping[QueueKey, OffsetColumn]) -> None:
        """Let the queues of dead letters begin for the group that puts them back, and settle what has expired."""
        ranges = {key: self._store.queue_range(*key) for key in keys}

        def decide(machine: LeaseMachine, now_ms: int) -> LeasePlan:
            plan = LeasePlan()
            for key, (first, _) in ranges.items():
                if key[0] not in self._store.state.topics:
                    raise unknown_topic(key[0])
                plan.groups += (*machine.begin(key, first).groups, *machine.trim(key, first).groups)
            return plan

        self._decisions.decide(redrive_group(group), decide)

    # --- where to ---------------------------------------------------------------------------------

    def _look(
        self,
        keys: Mapping[QueueKey, OffsetColumn],
        topic: str | None,
        find: RecordFinder | None,
    ) -> _Looked:
        """Read dead letters, and make the copies that go back, as many as one append may have."""
        looked = _Looked({}, {}, {}, set())
        room = self._store.config.bundle_bytes_max
        for key, offset, message in self._messages(keys):
            if room <= 0:
                looked.unread.add((key, offset))
                continue
            try:
                if isinstance(message, Corrupt):
                    raise message
                if message is None:
                    self._check_gone(key, offset)
                    continue
                found, encoded = self._copy(message, topic, find)
            except (Rejected, Corrupt) as error:
                looked.faults[key, offset] = str(error)
                continue

            room -= encoded.size
            looked.found[key, offset] = found
            copy = copy_to(key, offset, found)
            looked.copies[copy] = PreparedCopy(found.generation, encoded)
        return looked

    def _messages(
        self, keys: Mapping[QueueKey, OffsetColumn]
    ) -> Iterator[tuple[QueueKey, int, StoredMessage | Corrupt | None]]:
        """The messages at some offsets; None: none is there. Neighbours are read together."""
        for key, offsets in keys.items():
            ahead: dict[int, StoredMessage] = {}
            for offset in offsets.tolist():
                if offset not in ahead:
                    try:
                        rows, _ = read(self._store, *key, offset, max_records=COPIES_MAX)
                    except OffsetOutOfRange:
                        rows = []
                    except Corrupt as error:
                        yield key, offset, error
                        continue
                    ahead = {each.queue_offset: each for each in rows}
                yield key, offset, ahead.get(offset)

    def _check_gone(self, key: QueueKey, offset: int) -> None:
        """Raises: Rejected, unless there was a message once."""
        _, stop = self._store.queue_range(*key)
        if offset >= stop:
            raise Rejected(f"the queue ends at {stop}")

    def _copy(
        self, message: StoredMessage, topic: str | None, find: RecordFinder | None
    ) -> tuple[Destination, EncodedInner]:
        """Where a dead letter goes, and its copy. Raises: Rejected: it stays, and why."""
        name = topic or origin_topic(message.properties)
        if not name:
            raise Rejected("it does not say from which topic it came: name one with --to")

        own = self._check_topic(name)
        queue_id = self._queue_before(message, name, find)
        if queue_id is None:
            # Those of one queue stay together.
            queue_id = own[message.queue_offset % len(own)]
        elif queue_id not in own:
            if topic is None:
                raise Rejected(
                    f"topic {name} has no queue {queue_id} on shard {self._shard} any more"
                )
            queue_id = own[queue_id % len(own)]

        destination = Destination((name, queue_id), self._store.state.generation(name))
        made = redriven(message, destination.key)
        encoded = EncodedInner(made, store_host=self._store.log.store_host)
        fault = self._copies.size_fault(encoded)
        if fault:
            raise Rejected(fault)
        return destination, encoded

    def _queue_before(
        self, message: StoredMessage, topic: str, find: RecordFinder | None
    ) -> int | None:
        """The queue from which a dead letter came; None: it is not known."""
        known = origin_queue(message.properties)
        if known is not None or find is None:
            return known
        try:
            row = find.by_id(message.properties.get(ORIGIN_ID, "")).to_pylist()[0]
        except (Rejected, OffsetOutOfRange, Corrupt):
            # Of another shard, or deleted by now.
            return None
        is_same = row["topic"] == origin_topic(message.properties)
        return int(row["queue_id"]) if is_same else None

    def _check_topic(self, topic: str) -> list[int]:
        """The queues of a topic on this shard. Raises: Rejected for one that cannot get dead letters here."""
        info = self._store.state.topics.get(topic)
        if info is None:
            raise unknown_topic(topic)
        if is_system_topic(topic) or _is_dlq(topic):
            raise Rejected(
                f"dead letters do not go to topic {topic}: name a topic of your own", field="topic"
            )
        own = [each for each in range(info.queues) if info.shard_of(each) == self._shard]
        if not own:
            raise Rejected(
                f"topic {topic} has no queue on shard {self._shard}, and a dead letter stays on its shard: name a "
                "topic with a queue on every shard",
                field="topic",
                limit="a topic with a queue on the shard",
                found=topic,
            )
        return own

    def _left(self, group: str) -> dict[QueueKey, DeadQueue]:
        return {each.key: each for each in self.queues(group)}

    # --- what stays -------------------------------------------------------------------------------

    def _settled(
        self,
        left: Mapping[QueueKey, DeadQueue],
        keys: Mapping[QueueKey, OffsetColumn],
    ) -> set[tuple[QueueKey, int]]:
        """Those of these offsets that are no dead letters any more."""
        found = set()
        for key, offset in _each(keys):
            queue = left.get(key)
            is_left = queue is not None and (
                queue.first <= offset < queue.stop or bool(np.isin(offset, queue.passed))
            )
            if not is_left:
                found.add((key, offset))
        return found

    def _stays(
        self,
        group: str,
        keys: Mapping[QueueKey, OffsetColumn],
        refused: set[tuple[QueueKey, int]],
        looked: _Looked,
    ) -> list[NotRedriven]:
        """Why the refused ones stay, as far as it is known now."""
        if not refused:
            return []
        left = self._left(group)
        settled = self._settled(left, keys)

        stays = []
        for key, offset in _each(keys):
            if (key, offset) not in refused:
                continue
            place = key, offset
            why, text = "later", ""
            if place in looked.faults:
                why, text = "refused", looked.faults[place]
            elif place in settled or not (place in looked.found or place in looked.unread):
                why = "settled"
            elif offset - left[key].oldest >= WINDOW:
                text = f"{WINDOW} dead letters and more are before it: put some of these back first"
                why = "refused"
            stays.append(NotRedriven(key[1], offset, why, text))
        return stays


def _refused_of(decision: LeaseDecision, session: bytes, settle: int) -> set[tuple[QueueKey, int]]:
    """What a decision has refused. Raises: Rejected for a call that is older than the session's newest."""
    answer = decision.plan.answer
    if not isinstance(answer, SettleAnswer):
        raise Rejected(
            f"the session has made a newer request than {settle}",
            field="settle",
            limit="the newest request",
            found=settle,
        )
    return {(each.key, offset) for each in answer.refused for offset in each.offsets.tolist()}


def _each(keys: Mapping[QueueKey, OffsetColumn]) -> Iterator[tuple[QueueKey, int]]:
    for key, offsets in keys.items():
        for offset in offsets.tolist():
            yield key, offset


def _is_dlq(topic: str) -> bool:
    return topic.startswith(DLQ_PREFIX)
