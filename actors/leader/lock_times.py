"""When clients of RocketMQ have renewed their locks of queues: what no record of the log says.

Source: RebalanceLockManager. A lock there is lost with the broker's process. Here the log has it, and a new leader
takes each one for renewed when it began to lead.
"""

from __future__ import annotations

from collections.abc import Iterable

from raymq.store.base.clock import Clock

#: a lock that is not renewed for so long is over. Clients trust theirs for 30 s, and renew them every 20 s
LOCK_EXPIRY_MS = 60_000
#: locks of which the time is kept before those that are over are forgotten
KEPT_MAX = 10_000


class LockTimes:
    """By group, topic and queue. Not thread-safe: the put lock guards it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.monotonic_ms()
        self._renewed_ms: dict[tuple[str, str, int], int] = {}
        self._forget_at = KEPT_MAX

    def renew(self, group: str, topic: str, queues: Iterable[int]) -> None:
        """A client has these queues now."""
        now_ms = self._clock.monotonic_ms()
        for queue_id in queues:
            self._renewed_ms[group, topic, queue_id] = now_ms
        if len(self._renewed_ms) > self._forget_at:
            over_ms = now_ms - LOCK_EXPIRY_MS
            # Those without a time count from the begin, which is not later.
            found = {key: at_ms for key, at_ms in self._renewed_ms.items() if at_ms > over_ms}
            self._renewed_ms = found
            self._forget_at = max(KEPT_MAX, 2 * len(found))

    def is_over(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether the lock of a queue was not renewed for too long."""
        return self.age_ms(group, topic, queue_id) >= LOCK_EXPIRY_MS

    def age_ms(self, group: str, topic: str, queue_id: int) -> int:
        """How long ago the lock of a queue was renewed, or this leader began."""
        at_ms = self._renewed_ms.get((group, topic, queue_id), self._began_ms)
        return self._clock.monotonic_ms() - at_ms
