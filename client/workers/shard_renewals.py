"""Renews the leases of one shard, with one thread, so that long work loses no message."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping

from raymq.actors.api.leases import ITEMS_MAX
from raymq.client.client_thread import ClientThread, join_at_close
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError

from .held import BELIEF_PERCENT, HeldLease
from .worker_state import WorkerState

logger = logging.getLogger("raymq")

#: leases are renewed after this part of their length
RENEWED_PART = 3
#: after a call that failed
RETRY_S = 0.2


class ShardRenewals:
    """The renewals of one session. Threads: any may call `start` and `close`."""

    def __init__(
        self,
        routes: Routes,
        shard: int,
        arguments: Mapping[str, object],
        state: WorkerState,
        leases: dict[int, HeldLease],
        *,
        lease_s: float,
        clock: Clock,
    ) -> None:
        """Args: `arguments`: of operation `extend_leases`. `leases`: by number; the lock of `state` guards them."""
        self._routes = routes
        self._shard = shard
        self._arguments = arguments
        self._state = state
        self._leases = leases
        self._interval_s = lease_s / RENEWED_PART
        self._clock = clock
        self._is_over = threading.Event()
        self._thread: ClientThread | None = None

    def start(self) -> None:
        """Renew from now on. Later calls do nothing. Needs the lock of the state."""
        if self._thread is None:
            self._thread = ClientThread(self._run, f"raymq-renewals-{self._shard}")
            self._thread.start()

    def close(self) -> None:
        """Renew no more."""
        self._is_over.set()
        if self._thread is not None:
            join_at_close(self._thread, self._routes.transport)

    def abandon(self) -> None:
        """Let the thread end, soon."""
        self._is_over.set()

    def _run(self) -> None:
        wait_s = self._interval_s
        while not self._is_over.wait(wait_s):
            try:
                wait_s = self._interval_s if self._renew() else min(RETRY_S, self._interval_s)
            except BaseException:
                # Without this thread all leases would end.
                logger.exception("the renewal of leases of shard %d", self._shard)

    def _renew(self) -> bool:
        """Renew all leases that are held. Returns: whether the shard has answered."""
        with self._state.lock:
            held = dict(self._leases)
        if not held:
            return True
        sent_ms = self._clock.monotonic_ms()
        try:
            timeout_s = max(1.0, self._interval_s)
            granted_ms: dict[str, int] = {}
            # By number: leases whose answer was lost are not held, and end.
            numbers = list(held)
            for at in range(0, len(numbers), ITEMS_MAX):
                arguments = {**self._arguments, "leases": numbers[at : at + ITEMS_MAX]}
                answer = self._routes.call(self._shard, "extend_leases", arguments, timeout_s)
                granted_ms |= answer["granted_ms"]
        except RayMQError as error:
            logger.debug("leases of shard %d were not renewed: %s", self._shard, error)
            return False

        with self._state.lock:
            for number, lease in held.items():
                if str(number) in granted_ms:
                    length_ms = int(granted_ms[str(number)]) * BELIEF_PERCENT // 100
                    lease.until_ms = max(lease.until_ms, sent_ms + length_ms)
                elif lease.left:
                    lease.is_lost = True
                    self._leases.pop(number, None)
            self._drop_lost()
        return True

    def _drop_lost(self) -> None:
        """Keep lost messages from the program. Needs the lock."""
        state = self._state
        if any(part.lease.is_lost for part in state.ready):
            state.ready = deque(part for part in state.ready if not part.lease.is_lost)
            state.ready_count = sum(part.count for part in state.ready)
            state.changed.notify_all()
