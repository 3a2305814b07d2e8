"""Where a consumer begins to read queues: at its group's committed offsets, else where its `start` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from numbers import Integral
from typing import Any, NamedTuple

from raymq.client.arguments import check_offsets, plain_int
from raymq.client.times import check_time
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.errors import Rejected

from .consumer_config import Start
from .offsets_by_time import ask_offsets

_START_HELP = "start='earliest', 'latest', a datetime, an offset, or {queue_id: offset}"


class Begins(NamedTuple):
    """Where queues of one topic begin."""

    #: queue_id -> offset
    offsets: dict[int, int]
    #: those whose offset the caller chose: no shard has said that the queue holds it
    chosen: set[int]


class StartOffsets:
    """Asks the shards for one consumer. Args: `group`: None: it has none."""

    def __init__(self, routes: Routes, group: str | None) -> None:
        self._routes = routes
        self._group = group

    def begin(self, route: TopicRoute, queues: list[int], start: Start) -> Begins:
        """Where queues of a topic begin. Args: `start`: for queues without a committed offset.

        Raises: Rejected for a queue that the topic lacks, and when `start` says nothing of one; Unavailable.
        """
        shards = {route.shard_of(queue_id) for queue_id in queues}
        has_more = route.queues > route.first_queues
        asked = route.shards if has_more else shards
        committed = self.committed(route.name, asked) if self._group is not None else {}
        found = {queue_id: committed[queue_id] for queue_id in queues if queue_id in committed}
        if committed:
            # The group, if not this consumer of it, has read the topic before it got these queues.
            added = [each for each in queues if each >= route.first_queues]
            found = self.first_offsets(route, added) | found
        missing = [queue_id for queue_id in queues if queue_id not in found]
        if not missing:
            return Begins(found, set())

        if start in ("earliest", "latest"):
            ranges = self.ranges(route.name, map(route.shard_of, missing))
            side = 0 if start == "earliest" else 1
            return Begins(found | {each: ranges[each][side] for each in missing}, set())
        if isinstance(start, datetime):
            times = dict.fromkeys(missing, check_time("start", start))
            asked_for = ask_offsets(self._routes.call, route.name, route.shard_of, times)
            return Begins(found | asked_for, set())
        return Begins(found | self._chosen(route.name, missing, plain_int(start)), set(missing))

    def _chosen(self, topic: str, missing: list[int], start: Start) -> dict[int, int]:
        """The offsets that the caller has named. Raises: Rejected."""
        if isinstance(start, int):
            check_offsets(dict.fromkeys(missing, start))
            return dict.fromkeys(missing, start)
        if isinstance(start, Mapping):
            # With several topics, queues are named with theirs.
            names = {each: each if each in start else (topic, each) for each in missing}
            if not all(name in start for name in names.values()):
                raise _incomplete(topic, missing, start)
            offsets = {queue_id: start[name] for queue_id, name in names.items()}
            check_offsets(offsets)
            return {queue_id: int(offset) for queue_id, offset in offsets.items()}

        why = "there is no group" if self._group is None else f"group {self._group!r} has no offset"
        raise Rejected(
            f"{why} for the queues {missing} of {topic}, and start is {start!r}: use {_START_HELP}",
            field="start",
            limit=_START_HELP,
        )

    def ranges(self, topic: str, shards: Iterable[int]) -> dict[int, tuple[int, int]]:
        """queue_id -> (lowest offset, next offset), of the queues that shards have."""
        found: dict[int, tuple[int, int]] = {}
        for shard in sorted(set(shards)):
            answer = self._routes.call(shard, "queue_ranges", {"topic": topic})
            found.update({int(queue_id): (low, high) for queue_id, (low, high) in answer.items()})
        return found

    def first_offsets(self, route: TopicRoute, queues: list[int]) -> dict[int, int]:
        """queue_id -> offset of the first message of each of these queues."""
        if not queues:
            return {}
        ranges = self.ranges(route.name, map(route.shard_of, queues))
        return {queue_id: ranges[queue_id][0] for queue_id in queues}

    def committed(self, topic: str, shards: Iterable[int]) -> dict[int, int]:
        """queue_id -> committed offset of the group, of the queues that shards have. Queues without one are missing."""
        found: dict[int, int] = {}
        arguments: dict[str, Any] = {"group": self._group, "topic": topic}
        for shard in sorted(set(shards)):
            table = self._routes.call(shard, "offsets", arguments)
            found.update({int(queue_id): int(offset) for queue_id, offset in table.items()})
        return found


def _incomplete(topic: str, missing: list[int], start: Mapping[Any, int]) -> Rejected:
    texts = [each for each in start if not isinstance(each, (Integral, tuple))]
    fault = f"names the queues {sorted(start, key=str)}, and lacks some of {missing} of {topic}"
    if texts:
        fault = f"has the key {texts[0]!r}, a {type(texts[0]).__name__}; queue ids are numbers"
    return Rejected(
        f"start {fault}: give {{queue_id: offset}} with each of {missing}, or 'earliest' or 'latest'",
        field="start",
        limit=_START_HELP,
    )
