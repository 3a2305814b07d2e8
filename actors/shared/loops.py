"""The service loops of a CommitLog's process: what is tried again, and what ends the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from raymq.store.errors import Bug, Corrupt, RayMQError, StorageFull, Unavailable
from raymq.store.files import SyncFailed

from .troubles import Troubles

log = logging.getLogger("raymq.commit_log")

#: from a refused operation (no descriptor, no memory, no room, a disk that does not answer) to the next try
RETRY_S = 0.1


def guarded(
    name: str,
    body: Callable[[], None],
    *,
    stopping: Callable[[], bool],
    troubles: Troubles,
    fail: Callable[[RayMQError], None],
) -> Callable[[], None]:
    """A service loop that is begun again after what may pass; `fail` gets all else. `body` clears the trouble."""
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
                troubles.note(name, error)
            except RayMQError as error:
                fail(error)
                return
            except Exception as error:
                log.exception("service loop died")
                fail(Unavailable(f"{name}: {error!r}", field="store"))
                return
            pause.wait(RETRY_S)
            if stopping():
                return

    return run


def may_pass(error: RayMQError, *, sync_failed: bool) -> bool:
    """Whether the next start of the process may do without this failure.

    Not after a failed sync, nor where stored bytes or our own reckoning are wrong: then the replica goes on serving
    what it can, and says why.
    """
    return not sync_failed and not isinstance(error, (Corrupt, Bug))
