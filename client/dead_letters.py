"""Dead letters of groups: which there are, what they say, and the way back to where they came from."""

from __future__ import annotations

import secrets
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.actors.api.leases import packed_offsets
from raymq.client.arguments import check_number
from raymq.client.consume.selector import selector_of
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, DeliveryUnknown, Rejected, Unavailable
from raymq.store.base.format import check_group_name
from raymq.store.groups.leases.options import COPIES_MAX
from raymq.store.groups.leases.requests import offsets_of
from raymq.store.queues.raw_records import fault_of
from raymq.store.records.dead_letter import (
    DEAD_HOLDER,
    DEAD_REASON,
    origin_queue,
    origin_topic,
    redrives_of,
)
from raymq.store.records.properties import decode
from raymq.store.records.record_decode import decode_column
from raymq.store.records.requests import FetchSlice
from raymq.store.state.topics import dlq_topic, unknown_topic

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: dead letters that one call of a shard looks for
READ_RECORDS = 500
#: how long a call is repeated whose outcome is not known, and the pause before each repetition
REPEAT_S, REPEAT_PAUSE_MS = 60.0, 200
#: how often progress is shown
PROGRESS_S = 1.0


@dataclass(frozen=True)
class DeadLetter:
    """A message that a group could not handle, as `Cluster.dead_letters` finds it."""

    group: str
    #: as it is in the topic %DLQ%GROUP, with the properties that a user has set
    message: ReceivedMessage
    #: where it came from; None: it does not say so
    original_topic: str | None
    original_queue_id: int | None
    #: how often it was delivered
    attempts: int
    #: why it is dead; None: a client of RocketMQ or `send_back` has put it there, which say no reason
    reason: str | None
    #: the session of the worker that had it last, as hexadecimal digits
    holder: str | None
    #: how often it was put back before
    redrives: int


def dead_letter_groups(cluster: ClusterHandle, group: str | None) -> dict[str, dict[str, Any]]:
    """See `Cluster.dead_letter_groups`."""
    arguments = {} if group is None else {"group": group}
    found: dict[str, dict[str, Any]] = {}
    for shard in range(cluster.shards):
        answer = cluster.call(shard, "dead_letter_counts", arguments)
        for name, (count, oldest_ms, newest_ms) in answer["groups"].items():
            facts = found.setdefault(name, {"count": 0, "oldest_ms": None, "newest_ms": None})
            facts["count"] += count
            facts["oldest_ms"] = _known(min, facts["oldest_ms"], oldest_ms)
            facts["newest_ms"] = _known(max, facts["newest_ms"], newest_ms)
    return dict(sorted(found.items()))


def _known(choose: Callable[..., int], *times: int | None) -> int | None:
    known = [each for each in times if each is not None]
    return choose(known) if known else None


# --- what they say --------------------------------------------------------------------------------


def dead_letters(
    cluster: ClusterHandle, group: str, *, max_records: int, where: str | None
) -> list[DeadLetter]:
    """See `Cluster.dead_letters`."""
    check_number("max_records", max_records, 1)
    _check_group(cluster, group)
    found: list[DeadLetter] = []
    for shard in range(cluster.shards):
        rows = _rows(cluster, shard, group, where, with_records=True)
        for number, (queue_id, offset, text) in enumerate(rows):
            if number >= max_records:
                break
            found.append(_letter(group, shard, queue_id, offset, text))
    found.sort(key=lambda each: (each.message.store_time_ms, each.message.shard))
    return found[:max_records]


def _check_group(cluster: ClusterHandle, group: str) -> None:
    """Raises: Rejected for a group that has no topic of dead letters."""
    check_group_name(group)
    if dlq_topic(group) not in cluster.topics():
        raise Rejected(
            f"group {group!r} has no dead letters: topic {dlq_topic(group)} does not exist. `raymq dlq list` shows the "
            "groups that have some",
            field="group",
            limit="a group with dead letters",
            found=group,
        )


def _rows(
    cluster: ClusterHandle, shard: int, group: str, where: str | None, *, with_records: bool
) -> Iterator[Sequence[Any]]:
    """(queue, offset, record in base64) of the dead letters of one shard, those of each queue ascending."""
    begin: dict[str, int] = {}
    selector = selector_of(None, where)
    wanted = {} if selector is None else {"wanted": list(selector)}
    while True:
        arguments = {"group": group, "max_records": READ_RECORDS, "with_records": with_records}
        answer = cluster.call(shard, "dead_letters", {**arguments, **wanted, "begin": begin})
        yield from answer["found"]
        if not answer["more"]:
            return
        begin = answer["next"]


def _letter(group: str, shard: int, queue_id: int, offset: int, text: str | None) -> DeadLetter:
    records = pa.array([b64decode(text or "")], pa.binary())
    if text is None or fault_of(FetchSlice(queue_id, 0, 1, 0, 1, records, None)) is not None:
        raise Corrupt(
            f"the dead letter of group {group} at {offset} of queue {queue_id} on shard {shard} is damaged",
            shard=shard,
            queue_id=queue_id,
            offset=offset,
        )

    (message,) = received_messages(shard, records)
    row = decode_column(records).to_pylist()[0]
    properties = decode(row["properties"])
    return DeadLetter(
        group=group,
        message=message,
        original_topic=origin_topic(properties) or None,
        original_queue_id=origin_queue(properties),
        attempts=row["reconsume_times"],
        reason=properties.get(DEAD_REASON),
        holder=properties.get(DEAD_HOLDER),
        redrives=redrives_of(properties),
    )


# --- the way back ---------------------------------------------------------------------------------


def redrive(
    cluster: ClusterHandle,
    group: str,
    *,
    max_records: int | None,
    rate: float | None,
    to: str | None,
    where: str | None,
    dry_run: bool,
    progress: Callable[[str], object] | None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """See `Cluster.redrive`."""
    if max_records is not None:
        check_number("max_records", max_records, 1)
    if rate is not None:
        check_number("rate", rate, 0.001, 1_000_000, whole=False)
    _check_group(cluster, group)
    counts = {
        shard: cluster.call(shard, "dead_letter_counts", {"group": group})["groups"]
        for shard in range(cluster.shards)
    }
    shards = [shard for shard, found in counts.items() if found]
    if to is not None:
        _check_target(cluster, to, shards)

    ends = {
        shard: cluster.call(shard, "queue_ranges", {"topic": dlq_topic(group)}) for shard in shards
    }
    total = sum(found[group][0] for found in counts.values() if found)
    run = _Run(cluster, group, to, clock or Clock(), rate=rate, is_trial=dry_run)
    run.show = progress or (lambda text: None)
    run.total = total if max_records is None else min(total, max_records)
    for shard in shards:
        left = None if max_records is None else max_records - run.count
        if left is None or left > 0:
            rows = _rows(cluster, shard, group, where, with_records=False)
            run.of_shard(shard, _before(rows, ends[shard]), left)
    return run.facts()


def _before(
    rows: Iterator[Sequence[Any]], ends: Mapping[str, list[int]]
) -> Iterator[tuple[int, int]]:
    """Queue and offset of those that were there at the beginning: one that dies again is not put back again."""
    for queue_id, offset, _ in rows:
        if offset < ends[str(queue_id)][1]:
            yield queue_id, offset


def _check_target(cluster: ClusterHandle, topic: str, shards: list[int]) -> None:
    """Raises: Rejected for a topic without a queue on one of these shards. Nothing was put back."""
    facts = cluster.topics().get(topic)
    if facts is None:
        raise unknown_topic(topic)
    own = {facts["shards"][each % len(facts["shards"])] for each in range(facts["queues"])}
    missing = sorted(set(shards) - own)
    if missing:
        raise Rejected(
            f"topic {topic} has no queue on shard {missing[0]}, which has dead letters, and a dead letter stays on its "
            "shard: name a topic with a queue on every shard",
            field="to",
            limit="a topic with a queue on every shard",
            found=topic,
        )


class _Run:
    """One run over the shards, in one session."""

    def __init__(
        self,
        cluster: ClusterHandle,
        group: str,
        to: str | None,
        clock: Clock,
        *,
        rate: float | None,
        is_trial: bool,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._to = to
        self._clock = clock
        self._rate = rate
        self._is_trial = is_trial
        self._session = secrets.token_hex(16)
        self._settle = 0
        self._begun_s = self._shown_s = clock.monotonic()
        self.show: Callable[[str], object] = lambda text: None
        #: as many as there may be
        self.total = 0
        #: put back
        self.count = 0
        self._topics: dict[str, int] = {}
        self._refused: list[dict[str, Any]] = []
        self._others = 0

    def of_shard(self, shard: int, places: Iterator[tuple[int, int]], most: int | None) -> None:
        """Put dead letters of a shard back, at most so many."""
        limit = self.count + most if most is not None else None
        waiting: list[tuple[int, int]] = []
        for place in places:
            waiting.append(place)
            room = self._batch(limit)
            if len(waiting) >= room:
                waiting = self._put(shard, waiting[:room]) + waiting[room:]
            if limit is not None and self.count >= limit:
                return
        while waiting and (limit is None or self.count < limit):
            room = self._batch(limit)
            waiting = self._put(shard, waiting[:room]) + waiting[room:]

    def _batch(self, limit: int | None) -> int:
        """How many the next call puts back. With a rate, calls are about a tenth of a second apart."""
        most = COPIES_MAX if self._rate is None else max(1, min(COPIES_MAX, int(self._rate / 10)))
        return most if limit is None else max(1, min(most, limit - self.count))

    def _put(self, shard: int, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Put some back. Returns: those that are left for another call."""
        left = self._put_once(shard, places)
        if len(left) < len(places):
            return left
        if len(places) > 1:
            # None had room: the first one alone shows whether it ever has.
            return self._put(shard, places[:1]) + places[1:]
        ((queue_id, offset),) = places
        self._refuse(shard, queue_id, offset, "a worker has it, or no call has room for it")
        return []

    def _put_once(self, shard: int, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self._pace()
        columns: dict[int, list[int]] = {}
        for queue_id, offset in places:
            columns.setdefault(queue_id, []).append(offset)
        self._settle += 1
        arguments: dict[str, Any] = {
            "group": self._group,
            "session": self._session,
            "settle": self._settle,
            "offsets": {
                str(queue_id): packed_offsets(offsets_of(each))
                for queue_id, each in columns.items()
            },
        }
        if self._to is not None:
            arguments["topic"] = self._to
        if self._is_trial:
            arguments["trial"] = True
        answer = self._call(shard, arguments)

        later: list[tuple[int, int]] = []
        for queue_id, offset, why, text in answer["stays"]:
            if why == "later":
                later.append((queue_id, offset))
            elif why == "settled":
                self._others += 1
            else:
                self._refuse(shard, queue_id, offset, text)
        for topic, count in answer["topics"].items():
            self._topics[topic] = self._topics.get(topic, 0) + count
        self.count += len(places) - len(answer["stays"])
        self._report()
        return later

    def _call(self, shard: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call until there is an answer: a repeated call gets the first one. Raises: as `Cluster.redrive`."""
        deadline_s = self._clock.monotonic() + REPEAT_S
        while True:
            try:
                return self._cluster.call(shard, "redrive", arguments)
            except (Unavailable, DeliveryUnknown):
                if self._clock.monotonic() >= deadline_s:
                    raise
            self._clock.sleep_ms(REPEAT_PAUSE_MS)

    def _refuse(self, shard: int, queue_id: int, offset: int, text: str) -> None:
        row = {"shard": shard, "queue_id": queue_id, "offset": offset, "why": text}
        self._refused.append(row)

    def _pace(self) -> None:
        """Wait until the next call keeps to the rate."""
        if self._rate is None or self._is_trial:
            return
        due_s = self._begun_s + self.count / self._rate
        left_s = due_s - self._clock.monotonic()
        if left_s > 0:
            self._clock.sleep_ms(left_s * 1000)

    def _report(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            self.show(f"{self.count} of up to {self.total} dead letters put back")

    def facts(self) -> dict[str, Any]:
        """What came of it."""
        return {
            "group": self._group,
            "dry_run": self._is_trial,
            "redriven": self.count,
            "topics": dict(sorted(self._topics.items())),
            "refused": self._refused,
            "by_others": self._others,
        }
