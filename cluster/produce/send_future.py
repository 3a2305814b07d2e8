"""What `Producer.send` returns: a light reference to a row of a batch that may not be made yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any

from raymq.cluster.messages.message import Receipt
from raymq.store.errors import RayMQError
from raymq.store.promise import Acks

from .queue_sequence import AnswerFuture, BatchReceipt
from .shard_sender import BatchFuture


class Failure:
    """How a batch failed, and whether a caller has seen that. It does not keep the batch's messages."""

    __slots__ = ("error", "observed")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.observed = False


class PendingFuture(AnswerFuture):
    """The receipt of a batch of a Producer."""

    #: set before it fails
    failure: Failure | None = None
    #: the batch that was sent again in its place
    again: Pending | None = None

    def result(self, timeout: float | None = None) -> BatchReceipt:
        """As of an AnswerFuture; a failure that it raises counts as seen."""
        try:
            return super().result(timeout)
        except RayMQError:
            if self.failure is not None:
                self.failure.observed = True
            raise


class Pending:
    """The messages of one queue that share a batch, until it is answered."""

    __slots__ = (
        "acks",
        "answer",
        "begun",
        "bodies",
        "born",
        "due",
        "future",
        "hurry",
        "hurry_soon",
        "properties",
        "rows",
        "sealed",
        "sealed_at",
        "sent",
        "size",
        "tags",
        "where",
    )

    def __init__(
        self,
        where: tuple[str, int],
        acks: Acks,
        begun: float,
        due: float,
        hurry: Callable[[Pending], None],
        hurry_soon: Callable[[Pending], None],
    ) -> None:
        #: topic and queue
        self.where = where
        self.acks: Acks = acks
        #: when its first message came, on the monotonic clock, seconds
        self.begun = begun
        self.bodies: list[bytes] = []
        self.tags: list[str | None] = []
        self.properties: list[bytes | None] = []
        self.born: list[int] = []
        self.size = 0
        #: when its linger time is over, on the monotonic clock; 0: at once
        self.due = due
        #: sends the batch now: somebody waits for it
        self.hurry = hurry
        #: the same for who must not block
        self.hurry_soon = hurry_soon
        #: the batch is made: nothing is added any more
        self.sealed = False
        #: when, and with how many messages
        self.sealed_at = 0.0
        self.rows = 0
        #: the batch on its way, whose answer who waits may read
        self.sent: BatchFuture | None = None
        #: of the whole batch
        self.future = PendingFuture()
        # What is sent cannot be called back: a waiter who gives up must not cancel it.
        self.future.set_running_or_notify_cancel()
        #: the same for all who await it in one event loop
        self.answer: asyncio.Future[BatchReceipt] | None = None


class SendFuture:
    """The receipt of one message: await it, or ask `result`.

    With DeliveryUnknown the producer gave up: `Producer.resend` takes the future.
    A hundred thousand may be open at once, so it is two words; its batch holds the rest.
    """

    __slots__ = ("_pending", "_row")

    def __init__(self, pending: Pending, row: int) -> None:
        self._pending = pending
        self._row = row

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait up to `timeout` seconds for the receipt; None: as long as the delivery may take.

        Waiting ends the linger time: nothing is gained by it any more.
        Raises: what the send failed with; TimeoutError when the time is up: the send goes on, ask again.
        """
        pending = self._pending
        if not pending.sealed:
            pending.hurry(pending)
        sent = pending.sent
        left = timeout if sent is None else sent.help(timeout)
        return self._receipt(pending.future.result(left))

    def _receipt(self, batch: BatchReceipt) -> Receipt:
        row = self._row
        return Receipt(
            batch.topic,
            batch.queue_id,
            batch.shard,
            batch.offset(row),
            batch.store_time_ms,
            row < batch.duplicates,
        )

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._pending.future.done()

    def add_done_callback(self, callback: Callable[[SendFuture], Any]) -> None:
        """Call `callback(self)` when it is done, at once, in another thread, or in one that waits for a receipt."""
        self._pending.future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, Receipt]:
        pending = self._pending
        if not pending.future.done():
            loop = asyncio.get_running_loop()
            if not pending.sealed:
                # Whoever sends in this turn of the loop comes along. Another thread writes.
                loop.call_soon(pending.hurry_soon, pending)
            # One who is cancelled must not cancel the batch, or the wait of others.
            answer = asyncio.shield(_answer(pending, loop))
            with contextlib.suppress(RayMQError):
                yield from answer.__await__()
        return self._receipt(pending.future.result())


class TaskSteps:
    """Makes an awaitable a coroutine, so that `asyncio.create_task` takes it. Subclasses have the slot `_steps`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Receipt]:
        raise NotImplementedError

    def send(self, value: None) -> Any:
        """One step of the task."""
        return self._generator().send(value)

    def throw(self, *error: Any) -> Any:
        """As of a coroutine: cancels the wait, not the message."""
        return self._generator().throw(*error)

    def close(self) -> None:
        """As of a coroutine; the message goes on."""
        self._generator().close()

    def _generator(self) -> Generator[Any, None, Receipt]:
        steps: Generator[Any, None, Receipt] | None = getattr(self, "_steps", None)
        if steps is None:
            steps = self.__await__()
            object.__setattr__(self, "_steps", steps)
        return steps


class AsyncSendFuture(TaskSteps, SendFuture):
    """What `AsyncProducer.send` returns."""

    __slots__ = ("_steps",)

    __await__ = SendFuture.__await__


def _answer(pending: Pending, loop: asyncio.AbstractEventLoop) -> asyncio.Future[BatchReceipt]:
    """The batch's future in this loop: made once, so that a batch wakes the loop once."""
    answer = pending.answer
    if answer is None or answer.get_loop() is not loop:
        answer = loop.create_future()
        pending.answer = answer
        pending.future.add_done_callback(partial(_wake, loop, answer))
    return answer


def _wake(
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[BatchReceipt],
    done: Future[BatchReceipt],
) -> None:
    # A loop that was closed meanwhile has nobody who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_copy, answer, done)


def _copy(answer: asyncio.Future[BatchReceipt], done: Future[BatchReceipt]) -> None:
    if answer.done():
        return
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
        return
    answer.set_exception(error)
    # Read here: nobody may be left who waits, and whoever asks later asks the batch.
    answer.exception()
