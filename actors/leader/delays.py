"""Delay levels and timers of a leader, on a thread of their own that sleeps while nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raymq.actors.shared.troubles import Troubles
from raymq.store.clock import Clock
from raymq.store.delay.delay_service import DelayService
from raymq.store.errors import Bug, RayMQError
from raymq.store.message_store import MessageStore
from raymq.store.requests import Append

#: messages delivered before their promise is waited for: a slow disk slows deliveries down, as it does producers
RUN_MESSAGES = 2048
#: how often to look while something waits: the wall clock may be set
LOOK_S = 1.0
#: after a failure (ScheduleMessageService.DELAY_FOR_A_PERIOD)
RETRY_S = 10.0
#: the name of this trouble
PART = "what is to be delivered later"


class Delays:
    """Delivers what waited. Threads: `run` is one of its own; any may call `note`."""

    def __init__(
        self,
        store: MessageStore,
        *,
        clock: Clock,
        check_serving: Callable[[], None],
        await_promise: Callable[[Append], None],
        troubles: Troubles | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._check_serving = check_serving
        self._await_promise = await_promise
        self._service = DelayService(store)
        self._wake = threading.Event()
        self._seen = -1
        self._stopping = False
        self._running = threading.Lock()
        self._troubles = Troubles() if troubles is None else troubles

    def note(self) -> None:
        """Something was dispatched: look, if it is to be delivered later. Callers: the dispatching thread."""
        if self._store.delayed != self._seen:
            self._seen = self._store.delayed
            self._wake.set()

    def run(self) -> None:
        """Deliver until told to stop."""
        wait_s: float | None = 0.0
        while not self._stopping:
            self._wake.wait(wait_s)
            self._wake.clear()
            try:
                wait_s = self._step()
                self._troubles.clear(PART)
            except Bug:
                raise
            except (RayMQError, OSError) as error:
                if not self._stopping:
                    self._troubles.note(PART, error)
                wait_s = RETRY_S

    def _step(self) -> float | None:
        """Returns: seconds until the next look; None: when something is put."""
        with self._running:
            if self._stopping:
                return 0.0
            self._check_serving()
            now = self._clock.now_ms()
            ran = self._service.run_once(now, limit=RUN_MESSAGES)
        if ran.messages:
            end = self._store.log.end
            self._await_promise(Append(-1, ran.messages, 0, now, -1, end))
        if ran.next_due_ms is None:
            # Once more behind deliveries: the timers' files are completed then.
            return LOOK_S if ran.messages else None
        return min(LOOK_S, max(0.0, (ran.next_due_ms - self._clock.now_ms()) / 1000))

    def stop(self) -> None:
        """End `run`."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Complete the timers' files, behind the last sync of the log. Raises: StorageFull, OSError."""
        with self._running:
            self._service.close(self._clock.now_ms())

    def abandon(self) -> None:
        """Let go of the timers' files as a crash would."""
        with self._running:
            self._service.abandon()
