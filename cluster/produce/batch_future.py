"""The receipt of one batch, on its way."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from raymq.store.errors import RayMQError

from .queue_sequence import BatchReceipt, UnknownBatch

if TYPE_CHECKING:
    from .message_batcher import MessageBatcher
    from .open_batch import OpenBatch
    from .shard_sender import ShardSender


class Failure:
    """Why a batch failed, and whether a caller has seen that. Does not keep the batch's messages."""

    __slots__ = ("error", "observed")

    def __init__(self, error: RayMQError) -> None:
        self.error = error
        self.observed = False


class BatchFuture(Future[BatchReceipt]):
    """The receipt of a batch. A caller that blocks on it may read the shard's acks itself meanwhile."""

    #: the batch, while messages are still added to it
    open_batch: OpenBatch | None = None
    #: delivers the batch, until it is answered
    sender: ShardSender | None = None
    #: the producer, which must not be collected before the batch is answered
    owner: MessageBatcher | None = None
    #: set before the future fails
    failure: Failure | None = None
    #: set before it fails with DeliveryUnknown: what `resend` takes
    unknown: UnknownBatch | None = None
    #: the receipt of the resend
    resent: BatchFuture | None = None
    #: shared by all tasks of one event loop that await the batch
    loop_answer: asyncio.Future[BatchReceipt] | None = None

    def __init__(self, rows: int = 0, size: int = 0, closed: float = 0.0) -> None:
        super().__init__()
        self.rows = rows
        #: bytes that it holds of the byte limit
        self.size = size
        #: when the first message came and when the batch was closed, seconds of the monotonic clock
        self.begun = self.closed = closed
        # A batch cannot be taken back: a caller that gives up waiting must not cancel it for others.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> BatchReceipt:
        """Wait up to `timeout` seconds. A failure that it raises counts as seen.

        Raises: what the batch failed with; TimeoutError when the time is up: the send goes on.
        """
        sender = self.sender
        try:
            if sender is not None:
                timeout = sender.read_while_waiting(self, timeout)
            return super().result(timeout)
        except FutureTimeoutError:
            # In Python 3.10 it is not the builtin TimeoutError.
            raise TimeoutError("no receipt yet; the send goes on, ask again") from None
        except RayMQError:
            if self.failure is not None:
                self.failure.observed = True
            raise

    def finish(self, outcome: BatchReceipt | RayMQError) -> None:
        """Wake the callers. Does nothing when it is done: an interrupted thread may report an outcome twice."""
        self.sender = self.owner = None
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, RayMQError):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
