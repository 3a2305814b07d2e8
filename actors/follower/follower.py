"""The CommitLog role of a follower: has the leader's units synced, notes how far they are, and serves some reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.shard_api import PutTicket
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.actors.supervise.role import ReplicaRole, not_leading
from raymq.store.base.errors import RayMQError
from raymq.store.log.clean import CleanService
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest

from .log_port import FollowerLogPort
from .reads import FollowerReads

logger = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps while all is synced, and while it is not: a wakeup ends the sleep
IDLE_WAIT_MS = 500
BUSY_WAIT_MS = 10
#: how often satellites are supervised while acks are due at each wakeup
TICK_MS = 20

#: a follower delivers no delayed messages. A leader keeps their records, as a rule for two days at most
RESERVED_HOURS_MIN = 72


class Follower(ReplicaRole):
    """A follower of a shard. `FollowerSession` serves the leader's streams. Clients are sent to the leader.

    Only readers that take the answer of any replica are served: `FollowerReads`.
    """

    mode = display_name = "follower"
    # As a rule no reader is here, and the dispatch of one message costs more than all else that a follower does for it.
    dispatch_linger_s = 0.5

    def __init__(self, parts: ReplicaParts, port: FollowerLogPort) -> None:
        self._store = parts.store
        self._log = parts.log
        self._supervisor = parts.supervisor
        self._serving = parts.serving
        self._elections = parts.election_loop
        self._clock = parts.clock
        self._port = port
        self._reads = FollowerReads(parts, port.heard)
        self._ticked_ms = 0

    def make_cleaner(self) -> CleanService:
        """See `ReplicaRole.make_cleaner`."""
        # No service that delivers delayed messages says here which records it needs.
        store = self._store
        return CleanService(
            store.log, store.retention, flags=store.flags, reserved_hours_min=RESERVED_HOURS_MIN
        )

    @property
    def visible_end(self) -> int:
        """See `ReplicaRole.visible_end`. An earlier leadership of this replica may have left more in the state."""
        return self._log.confirmed

    def step(self) -> None:
        """See `ReplicaRole.step`."""
        log = self._log
        is_idle = log.synced >= log.end
        wait_ms = self._elections.idle_wait_ms(IDLE_WAIT_MS) if is_idle else BUSY_WAIT_MS
        self._supervisor.wait(wait_ms)
        # Acks first: while the leader sends, most wakeups are about them.
        has_moved = self._port.note_progress()
        now_ms = self._clock.monotonic_ms()
        if not has_moved or now_ms - self._ticked_ms >= TICK_MS:
            self._supervisor.tick()
            self._ticked_ms = now_ms
        self._serving.check_poisoned()

    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """A follower takes no puts."""
        return [not_leading(self._elections) for _ in requests]

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `FollowerReads.fetch`. Raises: also Unavailable for a reader that takes only the leader's answer."""
        if request.seen_epoch is None:
            raise not_leading(self._elections)
        return self._reads.fetch(request)

    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """A follower leases no messages."""
        raise not_leading(self._elections)

    def call(self, op: str, args: Mapping[str, object]) -> dict[str, Any]:
        """A follower answers only the operations of any replica."""
        raise not_leading(self._elections)

    def answer_waiting(self) -> None:
        """See `ReplicaRole.answer_waiting`."""
        self._port.wake()

    def close(self) -> None:
        """See `ReplicaRole.close`: what is confirmed is dispatched, and everything is synced."""
        self._port.close()
