"""Orders the changes of a followed log, and pauses the satellites while they would count from what changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from raymq.actors.shared.heartbeat import Heartbeat
from raymq.store.base.errors import Unavailable
from raymq.store.engine.message_store import MessageStore

from .supervisor import Supervisor


class LogGuard:
    """The lock of one replica's log, and its satellites as they see that log. Callers: any thread."""

    def __init__(
        self,
        store: MessageStore,
        supervisor: Supervisor,
        heartbeat: Heartbeat,
        *,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Args: `is_stopping`: whether the process is ending."""
        self._store = store
        self._supervisor = supervisor
        self._heartbeat = heartbeat
        self._is_stopping = is_stopping
        #: notified when this replica leads, or follows, from now on
        self._changed = threading.Condition()
        #: held by changes of a followed log, and while this replica begins to lead; before the dispatcher's pause
        self.lock = threading.RLock()

    def begin_satellites(self) -> None:
        """Let the satellites count from the log's ends. Callers: while no satellite is granted."""
        log = self._store.log
        self._supervisor.begin(appended=log.end, synced=log.synced, confirmed=log.confirmed)

    @contextlib.contextmanager
    def satellites_paused(self) -> Iterator[None]:
        """Around a change of what the satellites count from: they end before, and are granted again after it.

        Raises: Unavailable, with nothing changed, if one does not end.
        """
        with self._heartbeat.blocking_call:
            self._supervisor.revoke_all()
            try:
                yield
            finally:
                # Also after an error: without satellites nothing would be synced any more.
                self.begin_satellites()

    @contextlib.contextmanager
    def satellites_paused_for_cut(self) -> Iterator[None]:
        """Around a take-over: end the satellites if it has to cut the log, which is after a power loss at most."""
        followed = self._store.followed
        if followed is None or not followed.apply_all():
            yield
            return
        with self.satellites_paused():
            yield

    def await_follower(self, timeout_s: float) -> None:
        """Wait until this replica follows, after a newer leader was heard. Raises: Unavailable."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._follows() or self._is_stopping(), timeout_s
            ):
                raise Unavailable("this replica has not ended its own leadership yet", field="role")

    def _follows(self) -> bool:
        """Whether another replica may write the log."""
        followed = self._store.followed
        return followed is not None and not followed.ended

    def wake(self) -> None:
        """Let `await_follower` check again: the role has changed, or the process is ending."""
        with self._changed:
            self._changed.notify_all()
