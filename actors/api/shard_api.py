"""What a shard offers to whatever serves it to the network."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pyarrow as pa

from raymq.store.errors import DeliveryUnknown, RayMQError, Rejected
from raymq.store.promise import ACKS
from raymq.store.record import Row
from raymq.store.requests import FetchRequest, FetchSlice, PutOutcome, PutRequest

from .call_arguments import check_name, check_whole, shown

log = logging.getLogger("raymq.commit_log")


class PutTicket:
    """A put under way: completed or failed once, waited for by one thread.

    A bare lock is the cheapest hand-over between two threads that Python has.
    """

    __slots__ = ("_done", "_error", "_outcome", "began", "notify")

    def __init__(self, notify: Callable[[], None] | None = None, began: float = 0.0) -> None:
        """Args: `notify` is called, by any thread, when the put has ended; it must not block or raise.

        `began`: when the put came, seconds of the monotonic clock; 0: its latency is nobody's business.
        """
        self.notify = notify
        self.began = began
        self._outcome: PutOutcome | None = None
        self._error: RayMQError | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def complete(self, outcome: PutOutcome) -> None:
        """The promise was kept."""
        self.settle(outcome)
        self.tell()

    def fail(self, error: RayMQError) -> None:
        """It was not, or nobody knows."""
        self.settle(error)
        self.tell()

    def settle(self, result: PutOutcome | RayMQError) -> None:
        """The put has ended; `tell` must follow, perhaps once for many puts of one stream."""
        if isinstance(result, RayMQError):
            self._error = result
        else:
            self._outcome = result
        self._done.release()

    def tell(self) -> None:
        """Call `notify`."""
        if self.notify is not None:
            self.notify()

    def wait(self, timeout_s: float = -1) -> PutOutcome:
        """Wait for the end of the put; -1 waits for ever.

        Raises: what the put failed with; DeliveryUnknown when the time is up.
        """
        if not self._done.acquire(timeout=timeout_s):
            raise DeliveryUnknown(
                f"no answer within {timeout_s:g} s: the batch may or may not be stored; "
                "a retry with the same sequence is safe",
                status="UNKNOWN_ERROR",
            )
        self._done.release()
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise DeliveryUnknown("the put ended without an answer", status="UNKNOWN_ERROR")
        return self._outcome

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._done.locked()


class ShardBackend(Protocol):
    """One replica of a shard as its server sees it. Every method may be called by many threads."""

    def identity(self) -> dict[str, Any]:
        """cluster_id, shard, incarnation and what `describe` tells."""

    def put(
        self, request: PutRequest, notify: Callable[[], None] | None = None, *, alone: bool = False
    ) -> PutTicket:
        """Append a batch; `notify` as for PutTicket. Puts of one thread are appended in the order of the calls.

        `alone`: the producer seems to send nothing before the answer, so that this thread may wait for it.
        Raises: Rejected, Unavailable at once, with nothing stored; the ticket may fail so later.
        """

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """The queues asked for that have something; blocks up to `wait_ms` while none has."""

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """An administrative operation: describe, routes, topics, create_topic, queue_ranges, ..."""

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """Serve one stream of the leader's Replication role until `frames` ends."""


def put_request(meta: dict[str, Any], batch: pa.RecordBatch | Row) -> PutRequest:
    """A put as it came over the wire. Args: `meta` as in cluster/transport/protocol.py.

    Raises: Rejected; KeyError, TypeError, ValueError where `meta` is something else.
    """
    if isinstance(batch, Row):
        # The words of `unpack_row` have their types.
        return PutRequest(
            meta["topic"],
            meta["queue"],
            batch,
            meta["pid"],
            meta["epoch"],
            meta["seq"],
            meta["acks"],
        )
    acks = meta.get("acks", "quorum")
    if acks not in ACKS:
        raise Rejected(
            f"acks is {shown(acks)}; use {' or '.join(map(repr, ACKS))}",
            field="acks",
            limit=", ".join(ACKS),
        )
    producer_id, epoch, sequence = meta.get("pid"), meta.get("epoch", 0), meta.get("seq", 0)
    # What must be in a range is compared with it where the batch is checked.
    for field, value in (("queue_id", meta["queue"]), ("epoch", epoch), ("seq", sequence)):
        if type(value) is not int:
            check_whole(field, value)
    if producer_id is not None and type(producer_id) is not int:
        check_whole("pid", producer_id)
    return PutRequest(
        check_name("topic", meta["topic"]),
        meta["queue"],
        batch,
        producer_id,
        epoch,
        sequence,
        acks,
    )


def tell_all(tickets: Iterable[PutTicket]) -> None:
    """Call every `notify` of settled tickets once. The trouble of one stream is not another's."""
    for notify in dict.fromkeys(ticket.notify for ticket in tickets):
        if notify is not None:
            try:
                notify()
            except Exception:
                log.exception("telling of a put")
