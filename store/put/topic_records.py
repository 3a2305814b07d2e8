"""Changes of a store's topics: each is a record of the log, checked before it is appended."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

from raymq.store.log.commit_log import CommitLog
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import (
    TOPIC,
    ShardState,
    TopicInfo,
    deleted_topic_body,
    topic_body,
)
from raymq.store.state.topics import (
    check_more_queues,
    check_new_schema,
    check_new_topic,
    refuse_system_topic,
    unknown_topic,
)

from .inner_put import InnerPut


class TopicRecords:
    """Creates topics, and gives them queues and schemas. Callers: any thread."""

    def __init__(self, log: CommitLog, state: ShardState, inner_put: InnerPut) -> None:
        self._log = log
        self._state = state
        self._inner_put = inner_put
        #: ends of the records of topics that were created since the store was opened, and the log's end at that time
        self._ends: dict[str, int] = {}
        self._opened_end = 0
        #: held from the check whether a topic exists until its record's end is noted
        self._lock = threading.Lock()

    def create(
        self,
        name: str,
        queues: int,
        shards: Iterable[int],
        attributes: Mapping[str, str] | None = None,
        *,
        former_queues: tuple[int, ...] = (),
        hidden_queues: int = 0,
    ) -> AppendedRows | None:
        """Create a topic. Returns: None if the same topic exists already.

        Args: `former_queues`, `hidden_queues`: as in TopicInfo, of a topic that has got queues on other shards.
        Raises: Rejected for a bad name, number or attribute, or if it exists with others.
        """
        with self._lock:
            info = check_new_topic(name, queues, tuple(shards), self._state.topics, attributes)
            if info is None:
                return None
            return self._put(
                replace(info, former_queues=former_queues, hidden_queues=hidden_queues)
            )

    def add_queues(
        self,
        name: str,
        queues: int,
        shards: Iterable[int],
        *,
        are_hidden: bool,
        copied: tuple[tuple[int, ...], int] | None = None,
    ) -> AppendedRows | None:
        """Give a topic more queues, `queues` in all. Returns: None if it has them already.

        Args: `copied`: `former_queues` and `hidden_queues` of another shard. Raises: Rejected: see `check_more_queues`.
        """
        with self._lock:
            known = self._state.topics
            info = check_more_queues(name, queues, tuple(shards), known, are_hidden=are_hidden)
            if info is None:
                return None
            if copied is not None:
                info = replace(info, former_queues=copied[0], hidden_queues=copied[1])
            return self._put(info)

    def set_schema(self, name: str, schema: str) -> AppendedRows | None:
        """Give a topic another schema. Returns: None if it has that already. Raises: as `check_new_schema`."""
        with self._lock:
            info = check_new_schema(name, schema, self._state.topics)
            return None if info is None else self._put(info)

    def delete(self, name: str, generation: int | None = None) -> AppendedRows | None:
        """Delete a topic, or every topic of this name before a generation.

        Args: `generation`: how often topics of the name were deleted on another shard; None: once more than here.
        Returns: None if they are deleted already. Raises: Rejected for a topic that is not for users, and without
        `generation` for one that does not exist.
        """
        refuse_system_topic(name)
        with self._lock:
            here = self._state.generation(name)
            if generation is None:
                if name not in self._state.topics:
                    raise unknown_topic(name)
                generation = here + 1
            if generation <= here:
                return None
            body = deleted_topic_body(name, generation)
            appended = self._inner_put.put_state_record(TOPIC, body)
            self._ends[name] = appended.end_offset
            return appended

    def _put(self, info: TopicInfo) -> AppendedRows:
        """Append the record of a topic. Needs the lock."""
        appended = self._inner_put.put_state_record(TOPIC, topic_body(info))
        self._ends[info.name] = appended.end_offset
        return appended

    def end_of(self, name: str) -> int:
        """The physical offset below which the log proves that the topic exists: the topic is as durable as that."""
        with self._lock:
            return self._ends.get(name, self._opened_end)

    def note_opened(self) -> None:
        """All topics that exist now have their records below the log's end."""
        self._opened_end = self._log.end

    def forget_ends(self) -> None:
        """Forget the ends that an earlier leadership of this replica has noted."""
        self._ends.clear()
