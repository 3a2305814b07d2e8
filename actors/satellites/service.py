"""The common part of the services that satellites run: wait for the grant, work under it, end with an exit code.

A plain class: a Ray actor runs `run` in a thread, tests run it in a spawned process. One service serves one grant
(satellite.py). When its work ends the process ends, and its host starts the next.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from raymq.store.config.running_config import RunningConfig
from raymq.store.config.store_config import StoreConfig

from .satellite import GrantStatus, Satellite

#: a wait right after work: a lost wakeup delays by this (RocketMQ's waitForRunning(10))
BUSY_WAIT_MS = 10

#: `stop` was called
EXIT_STOPPED = 0
#: CommitLog closed in order: the next process waits for its return
EXIT_STOPPED_BY_COMMIT_LOG = 80
#: the grant was revoked, or another CommitLog began
EXIT_FENCED = 81
#: a sync failed, and the failure is published
EXIT_SYNC_FAILED = 82
#: the loop raised: a bug, or the disk refused another call than a sync
EXIT_BUG = 83

#: how a service ends -> its process's exit code
EXIT_CODES = {
    GrantStatus.LEAVING: EXIT_STOPPED,
    GrantStatus.STOPPED: EXIT_STOPPED_BY_COMMIT_LOG,
    GrantStatus.FENCED: EXIT_FENCED,
}


def serve_grants(make: Callable[[], Service], *, linger_ms: int) -> None:
    """Serve grant after grant in this process, with a new service for each.

    A role so gets its next service without Ray. Everything that a service had open is closed before the next one asks
    for a grant. The process ends as that of `Service.run`, unless a grant was revoked.
    """
    while make().run(linger_ms=linger_ms, ends_when_fenced=False):
        pass


class Service(ABC):
    """One role for one grant. Callers: `run` or `serve` by one thread; `stop` by any."""

    def __init__(
        self, replica_dir: str | Path, role: str, config: StoreConfig, files: Files | None = None
    ) -> None:
        #: follows the options that change while the store is open
        self._config = RunningConfig.of(config)
        self._clock = Clock()
        self._files = files or Files()
        #: closes the files of the service
        self._undo = contextlib.ExitStack()
        self._satellite = Satellite(replica_dir, role, clock=self._clock, files=self._files)

    def run(self, *, linger_ms: int = 0, ends_when_fenced: bool = True) -> bool:
        """Serve, then end the process and everything in it.

        Args: `linger_ms`: how long the process of a CommitLog that closed in order stays. `ends_when_fenced`: end the
        process when its grant was revoked, too.
        Returns: only after `stop`, False; and True when the grant was revoked, unless that ends the process.
        """
        code = EXIT_BUG
        try:
            code = self.serve()
        except Exception:
            # The host of this thread would only log it, and continue without its service.
            traceback.print_exc()
            sys.stderr.flush()
        if code == EXIT_STOPPED_BY_COMMIT_LOG:
            self._clock.sleep_ms(linger_ms)
        if code == EXIT_FENCED and not ends_when_fenced:
            return True
        if code != EXIT_STOPPED:
            os._exit(code)
        return False

    def serve(self) -> int:
        """Wait for the grant and work under it. Returns: an EXIT_* code, when the grant is over."""
        with contextlib.closing(self._satellite), self._undo:
            status = self._satellite.await_grant()
            return self._work() if status is GrantStatus.GRANTED else EXIT_CODES[status]

    def _follow_options(self) -> bool:
        """Take changed options. Returns: whether one has another value now. Callers: `_work`, at each turn."""
        changed = self._satellite.take_options()
        if changed is None:
            return False
        timed = changed.get("flush_commit_log_timed")
        if timed is not None:
            changed["flush_commit_log_timed"] = bool(timed)
        return self._config.follow(changed)

    def stop(self) -> None:
        """End the service soon, in order. Callers: any thread."""
        self._satellite.stop()

    @abstractmethod
    def _work(self) -> int:
        """Work until the grant is over. Returns: an EXIT_* code."""
