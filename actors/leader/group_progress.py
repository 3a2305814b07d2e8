"""How far consumer groups are on the queues of a shard: for metrics, and for people who ask."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from raymq.store.base.format import DLQ_PREFIX
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.leases.group_leases import GroupLeases
from raymq.store.groups.leases.pauses import PAUSES
from raymq.store.state.topics import REDRIVE_PREFIX, redrive_group

from .metrics import ByTags

#: (topic, group) pairs that are reported, and groups, so that a program with a new group for each run cannot fill
#: Prometheus
LAGS_MAX = 500


class GroupProgress:
    """Callers: any thread, one at a time."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        #: (topic, group) -> place of its oldest message in the log, and the store time of that message
        self._oldest: dict[tuple[str, ...], tuple[int, int]] = {}

    def lags(self) -> ByTags:
        """(topic, group) -> messages between its committed offsets and the ends of these queues.

        Only queues of this shard for which the group has committed offsets: in others its start is not known.
        """
        store = self._store
        return {
            names: sum(
                max(0, store.queue_range(names[0], queue_id)[1] - offset)
                for queue_id, offset in offsets.items()
            )
            for names, offsets in self._offsets().items()
        }

    def lag_seconds(self) -> ByTags:
        """(topic, group) -> age of the oldest message after its committed offsets, in seconds; 0: there is none."""
        ages, oldest = {}, {}
        for names, offsets in self._offsets().items():
            ages[names] = 0
            place = self._store.query.oldest_of(names[0], offsets)
            if place is None:
                continue
            known = self._oldest.get(names)
            # A group that stands still is not looked up again: its message may be an old one, on a busy disk.
            time_ms = known[1] if known and known[0] == place else self._time_at(place)
            if time_ms is not None:
                oldest[names] = place, time_ms
                ages[names] = self._age_ms(time_ms) // 1000
        self._oldest = oldest
        return ages

    def ages_ms(self, topic: str, offsets: Mapping[int, int]) -> dict[int, int]:
        """queue -> age of the message at an offset of it, or the next one. A queue that has none is left out."""
        ages = {}
        for queue_id, offset in offsets.items():
            place = self._store.query.oldest_of(topic, {queue_id: offset})
            time_ms = None if place is None else self._time_at(place)
            if time_ms is not None:
                ages[queue_id] = self._age_ms(time_ms)
        return ages

    def members(self) -> ByTags:
        """(group,) -> its members, of the groups that this shard coordinates."""
        groups = islice(list(self._store.groups.groups.items()), LAGS_MAX)
        return {(name,): len(group.members) for name, group in groups}

    def leased(self) -> ByTags:
        """(group,) -> messages that its workers have."""
        return {(name,): group.in_flight for name, group in self._leases()}

    def undelivered(self) -> ByTags:
        """(group,) -> messages that its workers have had, and that wait for their next delivery."""
        return {(name,): group.waiting for name, group in self._leases()}

    def outcomes(self) -> ByTags:
        """(group, outcome) -> messages of its workers that have met it, since this process knows the group."""
        return {
            (name, outcome.name.lower()): count
            for name, group in self._leases()
            for outcome, count in list(group.counts.items())
        }

    def paused(self) -> ByTags:
        """(group,) -> why its workers get nothing here: the place in `PAUSES`."""
        return {(name,): PAUSES.index(group.paused) for name, group in self._leases()}

    def highest_attempts(self) -> ByTags:
        """(group,) -> the most deliveries of a message that its workers have not settled."""
        return {
            (name,): max((each.highest_attempts for each in list(group.queues.values())), default=0)
            for name, group in self._leases()
        }

    def dead_letters(self) -> ByTags:
        """(group,) -> its dead letters on this shard that were not put back."""
        topics = [each for each in list(self._store.state.topics) if each.startswith(DLQ_PREFIX)]
        found: dict[tuple[str, ...], int] = {
            (topic.removeprefix(DLQ_PREFIX),): 0 for topic in topics[:LAGS_MAX]
        }
        for topic, queue_id in self._store.queues():
            group = topic.removeprefix(DLQ_PREFIX)
            if not topic.startswith(DLQ_PREFIX) or (group,) not in found:
                continue
            first, end = self._store.queue_range(topic, queue_id)
            known = self._store.leases.group(redrive_group(group)).queues.get((topic, queue_id))
            count = end - first
            if known is not None:
                count = known.waiting_count + max(0, end - max(first, known.next))
            found[group,] += count
        return found

    def _leases(self) -> list[tuple[str, GroupLeases]]:
        groups = list(self._store.leases.groups.items())
        return [each for each in groups if not _puts_back(each[0])][:LAGS_MAX]

    def _offsets(self) -> dict[tuple[str, ...], dict[int, int]]:
        # Copies: puts change these tables during the iteration.
        found = islice(
            (
                each
                for each in list(self._store.state.offsets.items())
                if not _puts_back(each[0][0])
            ),
            LAGS_MAX,
        )
        return {(topic, group): dict(offsets) for (group, topic), offsets in found}

    def _time_at(self, place: int) -> int | None:
        return self._store.query.store_time_at(place)

    def _age_ms(self, time_ms: int) -> int:
        return max(0, self._store.clock.now_ms() - time_ms)


def _puts_back(group: str) -> bool:
    """Whether a group is the one that puts dead letters of another one back: that has no lag."""
    return group.startswith(REDRIVE_PREFIX)
