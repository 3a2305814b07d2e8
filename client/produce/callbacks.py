"""The done callbacks of futures: what they raise, and what they may not wait for.

A callback runs on the thread that delivers the outcome: a thread of the producer, or a caller that is blocked on a
receipt. Neither may end by what a callback raises, and neither may wait in it for an outcome of the same producer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from raymq.client.client_thread import in_client_thread
from raymq.store.base.errors import Rejected

logger = logging.getLogger("raymq.producer")


class _ThisThread(threading.local):
    """The callbacks of one thread."""

    def __init__(self) -> None:
        #: the producers whose callbacks run, the innermost last
        self.running: list[Callbacks] = []
        #: SystemExit, KeyboardInterrupt and the like that a callback raised, until the outcomes are set
        self.raised: list[BaseException] = []


_this_thread = _ThisThread()


class Callbacks:
    """The done callbacks of one producer. Threads: any."""

    def run(self, finish: Callable[[], None]) -> None:
        """Call `finish`, which sets the outcome of a future and so runs its callbacks."""
        _this_thread.running.append(self)
        try:
            finish()
        finally:
            _this_thread.running.pop()

    @property
    def are_running(self) -> bool:
        """Whether the running code is a callback of this producer."""
        return self in _this_thread.running

    def check_may_wait(self, call: str) -> None:
        """Raises: Rejected in a callback of this producer. Args: `call`: the method that would wait."""
        if self.are_running:
            raise Rejected(
                f"{call} was called in a done callback, on the thread that delivers outcomes, and would wait for ever: "
                "leave the callback first. In a callback add a done callback to the other future instead",
                field="callback",
                limit="outside of done callbacks",
            )


def in_callback() -> bool:
    """Whether the running code is a callback of any producer. It costs less than to ask one of them."""
    return bool(_this_thread.running)


def guarded(callback: Callable[[Any], Any], future: Future[Any]) -> None:
    """Call a done callback. What it raises stops no other callback, and no thread that delivers outcomes."""
    try:
        callback(future)
    except Exception:
        logger.exception("a done callback")
    except BaseException as error:
        if in_client_thread():
            logger.exception(
                "a done callback raised %s on a thread of the producer, which cannot end the program: set an Event, "
                "for which the main thread waits",
                type(error).__name__,
            )
        elif _this_thread.running:
            # Ctrl-C, for example: the caller gets it when the other outcomes are set.
            _this_thread.raised.append(error)
        else:
            # `add_done_callback` of a future that was done: its caller gets it.
            raise


def raise_interrupt() -> None:
    """Raise what callbacks raised on this thread, unless one of them still runs."""
    if _this_thread.raised and not _this_thread.running:
        raised, _this_thread.raised = _this_thread.raised, []
        raise raised[0]
