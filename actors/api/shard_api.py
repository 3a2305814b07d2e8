"""The interface between a shard and the servers in front of it: `ShardBackend`, and `PutTicket` for a put under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from raymq.store.base.errors import DeliveryUnknown, RayMQError
from raymq.store.base.status import PutStatus
from raymq.store.records.requests import FetchRequest, FetchSlice, PutOutcome, PutRequest
from raymq.store.state.topics import QueueKey

if TYPE_CHECKING:
    from .leases import LeaseCall, LeasedMessages

#: frames of a log stream as they arrive: header and log bytes
Frames = Iterator[tuple[bytes, Any]]
SendFrame = Callable[[bytes, Any], None]

logger = logging.getLogger("raymq.commit_log")


class PutTicket:
    """A put under way: finished once, awaited by one thread.

    A bare lock is Python's cheapest way to wake another thread.
    """

    __slots__ = ("_done_lock", "_result", "began", "notify")

    def __init__(self, notify: Callable[[], None] | None = None, began: float = 0.0) -> None:
        """Args: `notify`: called by any thread when the put is finished. It must not block or raise.

        `began`: the monotonic time at which the put came, in seconds; 0: its latency is not counted.
        """
        self.notify = notify
        self.began = began
        self._result: PutOutcome | RayMQError
        self._done_lock = threading.Lock()
        self._done_lock.acquire()

    def finish(self, result: PutOutcome | RayMQError) -> None:
        """Set the result. The caller must call `notify` after that, perhaps once for many puts of one stream."""
        self._result = result
        self._done_lock.release()

    def wait(self, timeout_s: float = -1) -> PutOutcome:
        """Wait until the put is finished. With -1 there is no limit.

        Raises: the put's error; DeliveryUnknown when the time is up.
        """
        if not self._done_lock.acquire(timeout=timeout_s):
            raise DeliveryUnknown(
                f"no answer within {timeout_s:g} s: the batch may or may not be stored; "
                "a retry with the same sequence is safe",
                status=PutStatus.UNKNOWN_ERROR.value,
            )
        self._done_lock.release()
        if isinstance(self._result, RayMQError):
            raise self._result
        return self._result

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._done_lock.locked()


class ShardBackend(Protocol):
    """One replica of a shard as its server sees it. Every method may be called by many threads."""

    def identity(self) -> dict[str, object]:
        """cluster_id, shard, incarnation and the other facts of the operation describe."""

    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """Append batches in their order, and those of one thread in the order of its calls. Small ones go together.

        Args: `notify`: as for PutTicket. `producer_waits`: the producer seems to send nothing before the answer, so
        that this thread may wait for it.
        Returns: the ticket of each, or its refusal with nothing stored. A ticket may fail with one later, too.
        Raises: nothing.
        """

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """The requested queues that have records or an error, and those that were looked at in vain.

        Blocks up to `wait_ms` while there are neither records nor errors.
        """

    def hold(self, queues: Iterable[QueueKey], notify: Callable[[], None]) -> Callable[[], None]:
        """Have `notify` called when one of the queues may have got a message, and when the replica changes its role.

        Returns: a function that ends this. Args: `notify`: called on any thread, perhaps in vain. It must not block.
        """

    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """Lease messages to a worker. Blocks up to `wait_ms` while there are none.

        Args: `is_left`: whether the worker has left: then nothing more is leased to it.
        """

    def call(self, op: str, args: Mapping[str, object]) -> dict[str, Any]:
        """Run an administrative operation. actors/protocol lists them."""

    def replicate(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream of the leader's Replication until `frames` ends."""


def notify_all_done(tickets: Iterable[PutTicket]) -> None:
    """Call every `notify` of finished tickets once. An error of one stream does not affect the others."""
    for notify in dict.fromkeys(ticket.notify for ticket in tickets):
        if notify is not None:
            try:
                notify()
            except Exception:
                logger.exception("notifying a stream of its puts")
