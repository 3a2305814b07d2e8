"""What `Producer.send` returns: a light reference to a row of a batch that may not be made yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from raymq.store.errors import DeliveryUnknown

from .message import Receipt
from .shard_sender import BatchReceipt


class Pending:
    """The messages of one queue that share a batch, until it is answered."""

    __slots__ = (
        "bodies",
        "born",
        "due",
        "future",
        "hurry",
        "observed",
        "properties",
        "sealed",
        "size",
        "tags",
        "where",
    )

    def __init__(
        self, where: tuple[str, int], due: float, hurry: Callable[[Pending], None]
    ) -> None:
        #: topic and queue
        self.where = where
        self.bodies: list[bytes] = []
        self.tags: list[str | None] = []
        self.properties: list[bytes | None] = []
        self.born: list[int] = []
        self.size = 0
        #: when its linger time is over, on the monotonic clock
        self.due = due
        #: sends the batch now: somebody waits for it
        self.hurry = hurry
        #: the batch is made: nothing is added any more
        self.sealed = False
        #: of the whole batch
        self.future: Future[BatchReceipt] = Future()
        #: somebody was told how it ended
        self.observed = False


class SendFuture:
    """The receipt of one message: await it, or ask `result`.

    A hundred thousand may be open at once, so it is two words; its batch holds the rest.
    """

    __slots__ = ("_pending", "_row")

    def __init__(self, pending: Pending, row: int) -> None:
        self._pending = pending
        self._row = row

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait up to `timeout` seconds for the receipt; None: as long as the delivery may take.

        Waiting ends the linger time: nothing is gained by it any more.
        Raises: what the send failed with; DeliveryUnknown when the time is up: the send goes on.
        """
        pending = self._pending
        if not pending.sealed:
            pending.hurry(pending)
        try:
            receipt = pending.future.result(timeout)
        except FutureTimeoutError:
            raise DeliveryUnknown(
                f"no receipt within {timeout:g} s; the send goes on, ask again",
                status="UNKNOWN_ERROR",
            ) from None
        finally:
            pending.observed = pending.observed or pending.future.done()
        return self._receipt(receipt)

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
        """Call `callback(self)` when it is done, at once or in another thread."""
        self._pending.future.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, Receipt]:
        pending = self._pending
        if not pending.sealed:
            # A write may wait for the network: not in the event loop's thread.
            asyncio.get_running_loop().run_in_executor(None, pending.hurry, pending)
        batch = yield from asyncio.wrap_future(_shared(pending.future)).__await__()
        pending.observed = True
        return self._receipt(batch)


def _shared(future: Future[BatchReceipt]) -> Future[BatchReceipt]:
    """A future that follows another: cancelling one awaiter must not cancel the batch."""
    follower: Future[BatchReceipt] = Future()

    def copy(done: Future[BatchReceipt]) -> None:
        if not follower.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            follower.set_result(done.result())
        else:
            follower.set_exception(error)

    future.add_done_callback(copy)
    return follower
