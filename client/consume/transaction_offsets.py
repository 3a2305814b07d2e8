"""Offsets of a member that a transaction commits together with what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from raymq.store.groups.claims import Commit
from raymq.store.groups.transaction_requests import OffsetCommit
from raymq.store.state.topics import QueueKey


@dataclass(frozen=True, eq=False)
class OffsetsToCommit:
    """Where a member was in its queues when it gave its offsets, and under which numbers."""

    group: str
    commits: Mapping[QueueKey, Commit]
    #: where each queue is
    shards: Mapping[QueueKey, int]
    #: called with the queues whose offsets are committed
    note_committed: Callable[[Iterable[QueueKey]], None]
    #: called with a queue that another member has, and the number under which this one had it
    lose: Callable[[QueueKey, int], None]

    def of_shard(self, shard: int) -> list[OffsetCommit]:
        """The offsets that one shard stores, by topic."""
        topics: dict[str, dict[int, Commit]] = {}
        for (topic, queue_id), commit in self.commits.items():
            if self.shards[topic, queue_id] == shard:
                topics.setdefault(topic, {})[queue_id] = commit
        return [OffsetCommit(self.group, topic, commits) for topic, commits in topics.items()]

    def committed(self) -> None:
        """The transaction is committed."""
        self.note_committed(self.commits.keys())

    def fenced(self, keys: Iterable[QueueKey]) -> None:
        """The transaction was refused, since others have these queues."""
        for key in keys:
            if key in self.commits:
                self.lose(key, self.commits[key].number)
