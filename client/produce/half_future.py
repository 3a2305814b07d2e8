"""The future of a half message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING, Any

from raymq.client.arguments import wait_s
from raymq.store.base.errors import RayMQError

from .callbacks import Callbacks, guarded, in_callback
from .send_future import SendFailure

if TYPE_CHECKING:
    from .half_message import HalfMessage


class HalfFuture(Future["HalfMessage"]):
    """The result of `Producer.send_half`."""

    #: messages without an outcome
    rows = 1
    #: set before the future fails
    failure: SendFailure | None = None

    def __init__(self, size: int, callbacks: Callbacks) -> None:
        """Args: `size`: bytes that it holds of the byte limit. `callbacks`: those of its producer."""
        super().__init__()
        self.size = size
        self._producer_callbacks = callbacks
        # It cannot be taken back: a caller that gives up waiting must not cancel it for others.
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[HalfMessage]], Any]) -> None:
        """Like `Future.add_done_callback`. What `fn` raises ends no thread of the producer."""
        super().add_done_callback(partial(guarded, fn))

    def result(self, timeout: float | None = None) -> HalfMessage:
        """Wait up to `timeout` seconds for the half message; None: as long as the delivery may take.

        Raises: the send's error, which then counts as seen; TimeoutError when the time is up: the send goes on.
        """
        timeout = wait_s(timeout)
        self._check_may_wait(timeout)
        try:
            return super().result(timeout)
        except FutureTimeoutError:
            # In Python 3.10 it is not the builtin TimeoutError.
            raise TimeoutError("no receipt yet; the send goes on, ask again") from None
        except RayMQError:
            self.note_seen()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like `Future.exception`. Raises: Rejected in a done callback of its own producer."""
        timeout = wait_s(timeout)
        self._check_may_wait(timeout)
        return super().exception(timeout)

    def note_seen(self) -> None:
        """Count the failure as seen: `flush` and `close` do not raise it."""
        if self.failure is not None:
            self.failure.observed = True

    def finish(self, outcome: HalfMessage | RayMQError) -> None:
        """Set the outcome. A second call, by an interrupted thread, changes nothing."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, RayMQError):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)

    def _check_may_wait(self, timeout: float | None) -> None:
        """Raises: Rejected if a thread that delivers outcomes would wait for one."""
        is_waiting = not self.done() and (timeout is None or timeout > 0)
        if is_waiting and in_callback():
            self._producer_callbacks.check_may_wait("result()")
