"""The service loops of a replica, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from raymq.actors.shared.failures import ActiveFailures
from raymq.store.base.errors import RayMQError, StorageFull, Unavailable
from raymq.store.base.files import SyncFailed

from .role import Body
from .serving import Serving

logger = logging.getLogger("raymq.commit_log")

#: from a refused operation (no descriptor, no memory, no space, a disk that does not answer) to the next try
RETRY_S = 0.1


def make_threads(bodies: dict[str, Body]) -> list[threading.Thread]:
    """One thread for each body. None of them is started."""
    return [
        threading.Thread(target=body, name=f"raymq-{name}", daemon=True)
        for name, body in bodies.items()
    ]


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait for each thread that was started: a start that lacks a thread ends those before it."""
    for thread in threads:
        if thread.is_alive():
            thread.join(timeout_s)


def run_retried(
    name: str,
    body: Body,
    *,
    serving: Serving,
    failures: ActiveFailures,
    ended: threading.Event | None = None,
) -> None:
    """Run a service loop, again after a transient error. Any other error stops the replica.

    Args: `ended`: set when the role of this loop has ended.

    `body` clears the failure from `failures` once it works again.
    """
    pause = ended or threading.Event()
    while True:
        try:
            body()
            return
        except SyncFailed as error:
            serving.fail(Unavailable(f"{name}: {error}", field="store"))
            return
        except (OSError, StorageFull) as error:
            failures.note(name, error)
        except RayMQError as error:
            serving.fail(error)
            return
        except Exception as error:
            logger.exception("service loop died")
            serving.fail(Unavailable(f"{name}: {error!r}", field="store"))
            return

        if pause.wait(RETRY_S) or serving.is_stopping():
            return
