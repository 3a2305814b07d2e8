"""The half messages of a leader: found when they are first needed, and given up when they are old."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.base.format import HALF_TOPIC
from raymq.store.records.requests import AppendedRows
from raymq.store.services.half_messages import HalfMessages

logger = logging.getLogger("raymq.commit_log")

#: how often it looks for old half messages
SWEEP_MS = 60_000


class Transactions:
    """The half messages of a leader. Threads: any may call `loaded`, the maintenance loop calls `step`."""

    def __init__(
        self,
        parts: ReplicaParts,
        *,
        check_serving: Callable[[], None],
        await_promise: Callable[[AppendedRows], None],
        await_dispatch: Callable[[], None],
        publish: Callable[[AppendedRows], None],
    ) -> None:
        self._store = parts.store
        self._clock = parts.clock
        self._check_serving = check_serving
        self._await_promise = await_promise
        self._await_dispatch = await_dispatch
        self._publish = publish
        self._halves = HalfMessages(parts.store)
        self._next_sweep_ms = self._clock.monotonic_ms() + SWEEP_MS

    def loaded(self) -> HalfMessages:
        """The half messages, with those that the leaders before have left. Raises: Unavailable, DeliveryUnknown."""
        if self._halves.is_loaded:
            return self._halves
        try:
            self._halves.load()
        except Unavailable:
            # Those that it lacks are in the log, of a leader before this one.
            self._await_promise(AppendedRows.up_to(self._store.log.end))
            self._await_dispatch()
            self._halves.load()
        return self._halves

    def open_halves(self) -> tuple[int, int] | None:
        """How many half messages are open, and how long ago the oldest one was stored, in ms. Callers: any thread.

        Returns: None while it is not known yet which ones the leaders before have left: for a minute at most.
        """
        if (HALF_TOPIC, 0) not in self._store.state.next_offsets:
            return 0, 0
        return (self._halves.open_count, self._halves.oldest_ms) if self._halves.is_loaded else None

    def step(self) -> None:
        """Give up old half messages, if it is time to look."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_sweep_ms:
            return
        self._next_sweep_ms = now_ms + SWEEP_MS
        if (HALF_TOPIC, 0) not in self._store.state.next_offsets:
            return

        try:
            self._check_serving()
            self._halves.load()
            swept = self._halves.sweep()
        except (RayMQError, OSError) as error:
            # They stay open. The next sweep tries again.
            is_expected = isinstance(error, Unavailable)
            logger.log(logging.INFO if is_expected else logging.WARNING, "half messages: %s", error)
            return
        except Exception:
            # No half message may end a leader, and the one after it.
            logger.exception("half messages")
            return

        if swept.is_full:
            self._next_sweep_ms = now_ms
        if swept.has_put:
            self._publish(AppendedRows.up_to(self._store.log.end))
