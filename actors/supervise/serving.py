"""Whether one replica still writes: until a part of its process fails for good, or the process ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raymq.actors.shared.heartbeat import Heartbeat
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, Corrupt, NotServing, RayMQError, Unavailable
from raymq.store.base.status import PutStatus
from raymq.store.log.commit_log import CommitLog
from raymq.store.put.put_lock import PutLock

from .supervisor import Supervisor

logger = logging.getLogger("raymq.commit_log")

#: between two tries to take back a failed append
TAKE_BACK_RETRY_MS = 500


class Serving:
    """Whether one replica writes, and why not. Callers: any thread."""

    def __init__(
        self,
        log: CommitLog,
        supervisor: Supervisor,
        heartbeat: Heartbeat,
        *,
        put_lock: PutLock,
        clock: Clock,
        takes_back: bool,
        display_name: Callable[[], str],
        on_failed: Callable[[], None],
        end_process: Callable[[str], None] | None,
    ) -> None:
        """Args: `takes_back`: an append that failed is taken back, because no other replica could lead instead.

        `display_name`: how messages call this replica at present. `on_failed`: answers those that wait, and leaves the
        elections. `end_process`: as of `ReplicaOptions`.
        """
        #: why this replica has stopped writing; None: it has not
        self.stop_error: RayMQError | None = None
        self._log = log
        self._supervisor = supervisor
        self._heartbeat = heartbeat
        self._put_lock = put_lock
        self._clock = clock
        self._may_take_back = takes_back
        self._display_name = display_name
        self._on_failed = on_failed
        self._end_process = end_process
        self._stopping = False
        self._next_take_back_ms = 0

    def is_stopping(self) -> bool:
        """Whether the process is ending."""
        return self._stopping

    def stop(self) -> None:
        """The process ends: from now on nothing more is served, and no error counts."""
        self._stopping = True

    def check(self) -> None:
        """Check that this replica writes. Raises: Unavailable."""
        if self.stop_error is None and not self._stopping:
            return
        cause = f"stopped writing: {self.stop_error}" if self.stop_error else "is stopping"
        raise NotServing(
            f"the {self._display_name()} {cause}",
            field="shard",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
        )

    def check_poisoned(self) -> None:
        """Raises: Unavailable, when the log takes nothing more."""
        if self._supervisor.poisoned is not None:
            with self._heartbeat.blocking_call:
                self._log.health.poison(self._supervisor.poisoned)
        if self._log.health.poisoned is not None and not self._takes_back():
            # If no sync has failed, the next start cuts off a failed append that could not be undone.
            raise Unavailable(
                self._log.health.poisoned,
                field="store",
                status=PutStatus.SERVICE_NOT_AVAILABLE.value,
            )

    def _takes_back(self) -> bool:
        """Whether the append that failed last is taken back, or tried again later.

        The disk may work again, and meanwhile reads go on. Of several candidates another one leads sooner if this
        process ends.
        """
        if not self._may_take_back or not self._log.health.may_take_back:
            return False
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._next_take_back_ms:
            self._next_take_back_ms = now_ms + TAKE_BACK_RETRY_MS
            with self._heartbeat.blocking_call, self._put_lock:
                self._log.health.take_back()
        return True

    def fail(self, error: RayMQError) -> None:
        """A part of the process is dead: the replica stops writing, rather than continue without it.

        If a restart may help, the process ends and Ray starts the next one. After a failed sync, for corrupt bytes
        or for a bug a restart would fail in the same way. Then the replica stays up, serves reads and reports why.
        """
        if self._stopping or self.stop_error is not None:
            return
        logger.error("the %s stops writing: %s", self._display_name(), error)
        self.stop_error = error
        try:
            self._on_failed()
        finally:
            lasting = (
                self._log.health.sync_failed
                or self._supervisor.poisoned is not None
                or isinstance(error, (Corrupt, Bug))
            )
            if self._end_process is not None and not lasting:
                self._end_process(str(error))
