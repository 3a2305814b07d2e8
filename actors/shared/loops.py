"""Runs the service loops of a CommitLog process: which errors a loop retries, and which end it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from raymq.store.errors import Bug, Corrupt, RayMQError, StorageFull, Unavailable
from raymq.store.files import SyncFailed

from .failures import ActiveFailures

logger = logging.getLogger("raymq.commit_log")

#: from a refused operation (no descriptor, no memory, no space, a disk that does not answer) to the next try
RETRY_S = 0.1


def retrying(
    name: str,
    body: Callable[[], None],
    *,
    stopping: Callable[[], bool],
    failures: ActiveFailures,
    fail: Callable[[RayMQError], None],
) -> Callable[[], None]:
    """A service loop that starts again after a transient error; `fail` gets every other error.

    `body` clears the failure from `failures` once it works again.
    """
    pause = threading.Event()

    def run() -> None:
        while True:
            try:
                body()
                return
            except SyncFailed as error:
                fail(Unavailable(f"{name}: {error}", field="store"))
                return
            except (OSError, StorageFull) as error:
                failures.note(name, error)
            except RayMQError as error:
                fail(error)
                return
            except Exception as error:
                logger.exception("service loop died")
                fail(Unavailable(f"{name}: {error!r}", field="store"))
                return
            pause.wait(RETRY_S)
            if stopping():
                return

    return run


def restart_may_help(error: RayMQError, *, sync_failed: bool) -> bool:
    """Whether the process should restart because of this error.

    Not after a failed sync, for corrupt bytes or for a bug: a restart would fail in the same way. The replica then
    stays up, serves reads and reports why it takes no writes.
    """
    return not sync_failed and not isinstance(error, (Corrupt, Bug))
