"""Copies of leased messages for the dead letters and the retry topic, made before the put lock is taken.

A settlement names its copies. They are read and encoded while other puts go on; then the same settlement is decided
again, and finds them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymq.store.base.errors import Corrupt, Rejected
from raymq.store.base.format import RETRY_PREFIX
from raymq.store.delay.delayed_record import BUNDLE_RESERVE_BYTES
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.requests import Copy
from raymq.store.put.inner_message import EncodedInner, InnerMessage
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.dead_letter import DEAD_HOLDER, DEAD_REASON, ORIGIN_QUEUE
from raymq.store.state.topics import dlq_topic, retry_topic

from .redriven_message import redriven
from .retry import copy_of, queue_of
from .stored_message import StoredMessage, read_one

#: what the records around one copy take at most: the head of the bundle and the settlement
_AROUND_BYTES = 2 * BUNDLE_RESERVE_BYTES


class PreparedCopy(NamedTuple):
    """A copy that is ready to be appended."""

    #: how often topics of its target's name were deleted by then
    generation: int
    #: None: there is no copy
    encoded: EncodedInner | None
    #: why a message has no copy
    fault: str = ""
    #: the message can be read, and no record has room for its copy
    stays: bool = False


#: copies by what was asked for
PreparedCopies = Mapping[Copy, PreparedCopy]


class LeaseCopies:
    """Reads and encodes messages that leases copy. Threads: any may call."""

    def __init__(self, store: ServiceHost, shard: int) -> None:
        self._store = store
        self._shard = shard

    def target(self, group: str, copy: Copy) -> str:
        """The topic that gets a copy."""
        if copy.destination is not None:
            return copy.destination.key[0]
        return dlq_topic(group) if copy.outcome == SettleOutcome.DEAD else retry_topic(group)

    def missing(self, group: str, wanted: Sequence[Copy], prepared: PreparedCopies) -> list[Copy]:
        """The copies that have to be made, or made again since their topic was deleted. Callers: with the put lock."""
        state = self._store.state
        found = []
        for copy in wanted:
            known, target = prepared.get(copy), self.target(group, copy)
            is_there = target in state.topics
            if known is None or not is_there or known.generation != state.generation(target):
                found.append(copy)
        return found

    def prepare(self, group: str, copy: Copy) -> PreparedCopy:
        """Make a copy, and its topic if that is missing. Without the put lock. Raises: as `ServiceHost.put`."""
        target, destination = self.target(group, copy), copy.destination
        if destination is None:
            queue_id = queue_of(self._store, target, self._shard)
            generation = self._store.state.generation(target)
        else:
            (_, queue_id), generation = destination
        # What cannot go back stays a dead letter.
        stays = destination is not None
        try:
            message = read_one(self._store, *copy.key, copy.offset)
        except Corrupt as error:
            return PreparedCopy(generation, None, str(error), stays=stays)
        if message is None:
            return PreparedCopy(generation, None, stays=stays)

        fault = ""
        for made in self._forms(message, copy, target, queue_id):
            try:
                encoded = EncodedInner(made, store_host=self._store.log.store_host)
            except Rejected as error:
                fault = str(error)
                continue
            fault = self.size_fault(encoded)
            if not fault:
                return PreparedCopy(generation, encoded)
        return PreparedCopy(generation, None, fault, stays=True)

    def size_fault(self, encoded: EncodedInner) -> str:
        """Why a copy is too large for the log; empty: it is not."""
        limit = self._store.config.record_bytes_max - _AROUND_BYTES
        if encoded.size <= limit:
            return ""
        return f"the copy makes a record of {encoded.size} bytes, the limit is {limit}"

    def _forms(
        self, message: StoredMessage, copy: Copy, target: str, queue_id: int
    ) -> list[InnerMessage]:
        """The copy of a message, and the same with less of what is known of it: there may be no room for that."""
        if copy.destination is not None:
            return [redriven(message, copy.destination.key)]
        is_dead = copy.outcome == SettleOutcome.DEAD
        level = 0 if is_dead else self.level_of(copy.delay_ms)
        made = copy_of(message, target, queue_id, level, copy.attempts)
        more = {}
        if not message.topic.startswith(RETRY_PREFIX):
            more[ORIGIN_QUEUE] = str(message.queue_id)
        if not is_dead:
            return [replace(made, properties={**made.properties, **more}), made]

        more[DEAD_REASON] = copy.reason
        if copy.holder:
            more[DEAD_HOLDER] = copy.holder.hex()
        return [
            replace(made, properties={**made.properties, **more}),
            made,
            replace(made, properties=message.properties),
        ]

    @property
    def delay_ms_max(self) -> int:
        """The longest delay that the retry topic knows."""
        return self._store.config.delay_levels_ms[-1]

    def level_of(self, delay_ms: int) -> int:
        """The first delay level that is not shorter than a delay."""
        levels = self._store.config.delay_levels_ms
        return min(bisect.bisect_left(levels, delay_ms) + 1, len(levels))
