"""The future of a batch's receipt, and the result of `send`, a light reference to one message of the batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from raymq.client.arguments import wait_s
from raymq.client.messages.message import Receipt
from raymq.client.transport.chained_future import ChainedFuture
from raymq.store.base.errors import RayMQError

from .callbacks import Callbacks, guarded, in_callback
from .queue_sequence import BatchReceipt, UnknownBatch

#: what an awaitable gives
Result = TypeVar("Result")


class SendFailure:
    """Why a batch failed, and whether a caller has seen that. Does not keep the batch's messages."""

    __slots__ = ("error", "observed", "rows")

    def __init__(self, error: RayMQError, rows: int) -> None:
        """Args: `rows`: number of messages that failed by it."""
        self.error = error
        self.rows = rows
        self.observed = False


class Waker(Protocol):
    """A batch that still takes messages, as its future sees it: a caller that waits may have it written."""

    @property
    def may_be_sent(self) -> bool:
        """Whether nothing is under way that it waits for."""

    @property
    def callbacks(self) -> Callbacks:
        """Those of its producer."""

    def write_for_caller(self) -> None:
        """Write it on the calling thread, which blocks on its receipt, unless it must wait for others."""

    def request_write_for_caller(self) -> None:
        """Have another thread do the same, for a caller that must not block."""


class AckReader(Protocol):
    """What delivers a batch, as its future sees it: a caller that waits may read the shard's acks."""

    callbacks: Callbacks

    def read_while_waiting(self, future: BatchFuture, timeout: float | None) -> float | None:
        """Read acks on the caller's thread until `future` is done. Returns: the seconds of `timeout` that are left."""


class BatchFuture(ChainedFuture[BatchReceipt]):
    """The receipt of a batch. A caller that blocks on it may read the shard's acks itself while it waits."""

    #: the batch, while messages are still added to it
    open_batch: Waker | None = None
    #: delivers the batch, until it is answered
    shard_sender: AckReader | None = None
    #: the producer, which must not be collected before the batch is answered
    owner: object | None = None
    #: set before the future fails
    failure: SendFailure | None = None
    #: set before the future fails with DeliveryUnknown, for `resend`
    unknown_batch: UnknownBatch | None = None
    #: row -> why the shard refused this message alone; None: it refused none
    refused: dict[int, SendFailure] | None = None
    #: its messages came while earlier batches were under way, so its callers do not read the shard's acks
    gathered = False
    #: the receipt of the resend
    resent: BatchFuture | None = None
    #: shared by all tasks of one event loop that await the batch
    loop_answer: asyncio.Future[BatchReceipt] | None = None

    def __init__(self, rows: int = 0, size: int = 0, closed_s: float = 0.0) -> None:
        super().__init__()
        #: those that the shard did not refuse alone
        self.rows = rows
        #: bytes that it holds of the byte limit
        self.size = size
        #: when the first message came and when the batch was closed, seconds of the monotonic clock
        self.begun_s = self.closed_s = closed_s

    def add_done_callback(self, fn: Callable[[Future[BatchReceipt]], Any]) -> None:
        """Like `Future.add_done_callback`. What `fn` raises ends no thread that delivers outcomes."""
        super().add_done_callback(partial(guarded, fn))

    def result(self, timeout: float | None = None, row: int | None = None) -> BatchReceipt:
        """Wait up to `timeout` seconds. A failure that it raises counts as seen.

        Args: `row`: raise what this row was refused for, whatever becomes of the others.
        Raises: the batch's error; TimeoutError when the time is up: the send goes on. Rejected in a done callback that
        would wait for its own producer.
        """
        if timeout is not None:
            timeout = wait_s(timeout)
        self._check_may_wait(timeout)
        shard_sender = self.shard_sender
        try:
            if shard_sender is not None:
                timeout = shard_sender.read_while_waiting(self, timeout)
            if not self.done():
                self.await_end(timeout)
            return super().result(0)
        except FutureTimeoutError:
            # In Python 3.10 it is not the builtin TimeoutError.
            raise TimeoutError("no receipt yet; the send goes on, ask again") from None
        except RayMQError:
            if self.refused is not None and row is not None:
                self.row_or_refusal(row)
            if self.failure is not None:
                self.failure.observed = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Like `Future.exception`. Raises: Rejected in a done callback that would wait for its own producer."""
        timeout = wait_s(timeout)
        self._check_may_wait(timeout)
        return super().exception(timeout)

    def _check_may_wait(self, timeout: float | None) -> None:
        """Raises: Rejected if the thread that would deliver the outcome would wait for it."""
        if not in_callback() or self.done() or (timeout is not None and timeout <= 0):
            return
        shard_sender, open_batch = self.shard_sender, self.open_batch
        if shard_sender is not None:
            shard_sender.callbacks.check_may_wait("result()")
        elif open_batch is not None:
            open_batch.callbacks.check_may_wait("result()")

    def refuse(self, failures: Mapping[int, SendFailure]) -> None:
        """Note that the shard refused some rows. The others get the outcome of the batch."""
        self.refused = {**(self.refused or {}), **failures}
        self.rows -= len(failures)

    def row_or_refusal(self, row: int) -> int:
        """The number of a row among those that were not refused. Raises: why it was refused; that counts as seen."""
        refused = self.refused or {}
        failure = refused.get(row)
        if failure is None:
            return row - sum(each < row for each in refused)
        failure.observed = True
        raise failure.error

    def finish(self, outcome: BatchReceipt | RayMQError) -> None:
        """Set the outcome; `wake_callers` comes next. A second call, by an interrupted thread, changes nothing."""
        self.shard_sender = self.owner = None
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, RayMQError):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)


class SendFuture:
    """The receipt of one message: await it, or call `result`.

    After DeliveryUnknown the producer has given up, and `Producer.resend` takes the future.
    A hundred thousand futures may be open at once. Each therefore has only two fields, and its batch holds the rest.
    """

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: BatchFuture, row: int) -> None:
        self._batch = batch
        self._row = row

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait up to `timeout` seconds for the receipt; None: as long as the delivery may take.

        A message that waits for others of its batch leaves when the shard has answered the batches under way.
        Raises: the send's error; TimeoutError when the time is up: the send goes on, ask again.
        """
        open_batch = self._batch.open_batch
        # Most callers wait for other batches: those need no lock. The answer of these sends their batch.
        if open_batch is not None and open_batch.may_be_sent:
            open_batch.write_for_caller()
        return self._receipt(self._batch.result(timeout, self._row))

    def _receipt(self, batch: BatchReceipt) -> Receipt:
        row = self._row
        if self._batch.refused is not None:
            row = self._batch.row_or_refusal(row)
        return Receipt(
            batch.topic,
            batch.queue_id,
            batch.shard,
            batch.offset(row),
            batch.store_time_ms,
            row < batch.duplicates,
        )

    def peek(self) -> Receipt | RayMQError:
        """The outcome, once it is there. A failure that it returns does not count as seen."""
        failure = (self._batch.refused or {}).get(self._row)
        if failure is not None:
            return failure.error
        error = self._batch.exception(0)
        if isinstance(error, RayMQError):
            return error
        return self._receipt(self._batch.result(0))

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._batch.done()

    def add_done_callback(self, callback: Callable[[SendFuture], object]) -> None:
        """Call `callback(self)` when it is done.

        The call comes at once, from a sender's thread, or from a thread that blocks on a receipt. It must not wait for
        the same producer: `result` and `flush` raise Rejected there. An exception of the callback is logged.
        """
        self._batch.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, Receipt]:
        batch = self._batch
        if not batch.done():
            loop = asyncio.get_running_loop()
            open_batch = batch.open_batch
            if open_batch is not None:
                # Sends made in the same event-loop iteration join this batch. Another thread writes it.
                loop.call_soon(open_batch.request_write_for_caller)
            # A cancelled task must not cancel the wait of others.
            answer = asyncio.shield(_loop_answer(batch, loop))
            with contextlib.suppress(RayMQError):
                yield from answer.__await__()
        return self._receipt(batch.result(None, self._row))


class TaskSteps(Generic[Result]):
    """Makes an awaitable a coroutine for `asyncio.create_task`, as often as wanted. Subclasses have the slot `_steps`:
    the steps of each task that awaits it.
    """

    __slots__ = ()

    def __await__(self) -> Generator[object, None, Result]:
        raise NotImplementedError

    def send(self, value: None) -> Any:
        """One step of the task."""
        return self._step("send", value)

    def throw(self, *error: object) -> object:
        """Like a coroutine's: cancels the wait, not the message."""
        return self._step("throw", *error)

    def close(self) -> None:
        """Like a coroutine's; the message is still sent."""
        steps = self._steps_of_tasks()
        while steps:
            steps.popitem()[1].close()

    def _step(self, method: str, *args: object) -> object:
        """Let the running task go on. Once its wait has ended, another task begins anew."""
        steps, task = self._steps_of_tasks(), asyncio.current_task()
        generator = steps.get(task)
        if generator is None:
            generator = steps[task] = self.__await__()
        try:
            return getattr(generator, method)(*args)
        except BaseException:
            steps.pop(task, None)
            raise

    def _steps_of_tasks(self) -> dict[object, Generator[object, None, Result]]:
        steps: dict[Any, Generator[Any, None, Result]] | None = getattr(self, "_steps", None)
        if steps is None:
            steps = {}
            object.__setattr__(self, "_steps", steps)
        return steps


class AsyncSendFuture(TaskSteps[Receipt], SendFuture):
    """The result of `AsyncProducer.send`."""

    __slots__ = ("_steps",)

    __await__ = SendFuture.__await__


def _loop_answer(
    batch: BatchFuture, loop: asyncio.AbstractEventLoop
) -> asyncio.Future[BatchReceipt]:
    """The batch's future in this loop. All awaiting tasks share it, so that a batch wakes the loop once."""
    answer = batch.loop_answer
    if answer is None or answer.get_loop() is not loop:
        answer = batch.loop_answer = loop.create_future()
        batch.add_done_callback(partial(_wake, loop, answer))
    return answer


def _wake(
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[BatchReceipt],
    done: Future[BatchReceipt],
) -> None:
    # No task waits in a closed loop.
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
    # Read here, or asyncio would log it when no task waits any more. A later call reads the batch's future.
    answer.exception()
