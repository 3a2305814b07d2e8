"""What a program gets from `Workers`, and settles: one message, or the columns of many."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.client.arguments import check_number
from raymq.client.messages.columns import message_batch, value_batch, value_schema
from raymq.client.messages.received import ReceivedMessage
from raymq.client.messages.topic_values import TopicValues
from raymq.client.transport.chained_future import ChainedFuture
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.options import DELAY_MS_MAX, LEASE_MS
from raymq.store.groups.leases.requests import SettleItem

from .held import HeldAcks, HeldPart
from .workers_config import ms_of


class LeasedMessage(ReceivedMessage):
    """A message that a worker holds until it settles it. `Workers.get` and iteration return such messages.

    Its fields are those of a message that a consumer returns. It pickles without its lease: only the process that got
    it settles it. A `with` block settles it: by `ack` at its end, by `nack` at an exception, unless the block has done
    so.

    Example:
        ```python
        import raymq

        with raymq.connect() as cluster:
            cluster.create_topic("thumbnails", queues=4)
            with cluster.producer() as producer:
                producer.send("thumbnails", b"cat.png").result(timeout=30)
            with cluster.workers("thumbnails", group="resize") as workers:
                message = workers.get(timeout=10)
                if message is not None:
                    with message:
                        print(message.body, message.attempts)
        ```
    """

    @property
    def attempts(self) -> int:
        """How often the message was delivered, with this time."""
        part, row = self._held()
        return int(part.attempts[row])

    def expires_in(self) -> float:
        """Seconds for which this process surely holds the message; 0: another worker may have it."""
        part, row = self._held()
        lease = part.lease
        left_ms = lease.until_of(part.key, int(part.offsets[row])) - lease.owner.now_ms()
        return max(0, left_ms) / 1000

    def ack(self) -> Future[None] | None:
        """Settle the message: it is done, and is not delivered again.

        Returns: None, when that is durable; with `settle_mode` "pipelined" a future at once.

        Raises:
            Fenced: the lease is over, and another worker may have the message. `offsets` names it.
            Rejected: the message is settled already, or its workers are closed.
            Unavailable: the shard did not answer within `unavailable_timeout_ms`. The call is repeated until it does.
        """
        return self._result(SettleOutcome.ACKED)

    def nack(self, delay_s: float | None = None) -> Future[None] | None:
        """Give the message back: it failed, and is delivered again later, or is a dead letter after its last attempt.

        Args:
            delay_s: seconds until then, up to 7,200; None (default): what `backoff` says for the number of attempts.

        Returns, Raises: as `ack`.
        """
        return self._result(SettleOutcome.NACKED, _delay_ms(delay_s))

    def reject(self) -> Future[None] | None:
        """Settle the message: it can never be done. It is a dead letter at once. Returns, Raises: as `ack`."""
        return self._result(SettleOutcome.REJECTED)

    def release(self) -> Future[None] | None:
        """Give the message back unworked: the attempt does not count. Returns, Raises: as `ack`."""
        return self._result(SettleOutcome.RETURNED)

    def extend(self, lease_s: float) -> None:
        """Hold the message for at least so many seconds from now on, 1 to 3,600, but not beyond `max_lease_s`.

        It is needed only with auto_extend=False, or for a longer time than `lease_s` without a word of this process.

        Raises: Fenced: the lease is over. Unavailable: the shard does not answer.
        """
        check_number("lease_s", lease_s, LEASE_MS[0] / 1000, LEASE_MS[1] / 1000, whole=False)
        part, row = self._held()
        part.lease.owner.extend(part.lease, part.key, int(part.offsets[row]), ms_of(lease_s))

    def __enter__(self) -> LeasedMessage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        part, row = self._held()
        if part.is_settled[row]:
            return
        if error is None:
            self.ack()
        else:
            # The program hears of its own error.
            with contextlib.suppress(RayMQError):
                self.nack()

    def _held(self) -> tuple[HeldPart, int]:
        found: tuple[HeldPart, int] | None = self.__dict__.get("_lease")
        if found is None:
            raise Rejected(
                "this is a copy of a leased message: the process that got the message settles it",
                field="message",
                limit="the message that the workers have returned",
            )
        return found

    def hold_acks(self) -> HeldAcks:
        """What `Transaction.ack` takes of this message, which counts as settled then. Raises: as `ack`."""
        part, row = self._unsettled()
        return HeldAcks(part, np.array([row]))

    def _unsettled(self) -> tuple[HeldPart, int]:
        part, row = self._held()
        if part.is_settled[row]:
            raise Rejected(
                f"message {int(part.offsets[row])} of queue {part.key[1]} of {part.key[0]} is settled already",
                field="message",
                limit="one settlement",
            )
        return part, row

    def _begin(
        self, verdict: SettleOutcome, delay_ms: int | None = None, *, is_awaited: bool = False
    ) -> ChainedFuture[None]:
        """Settle the message. Returns: a future that ends when that is durable. Args: as of `LeaseOwner.settle`."""
        part, row = self._unsettled()
        offset = part.offsets[row : row + 1]
        item = SettleItem(part.lease.number, part.key, offset, verdict, delay_ms)
        future = part.lease.owner.settle([item], part.lease, is_awaited=is_awaited)
        part.is_settled[row] = True
        return future

    def _result(self, verdict: SettleOutcome, delay_ms: int | None = None) -> Future[None] | None:
        owner = self._held()[0].lease.owner
        return owner.result_of(self._begin(verdict, delay_ms, is_awaited=True))


class AsyncLeasedMessage(LeasedMessage):
    """A message of `AsyncWorkers`: the methods of `LeasedMessage`, awaited; its block is `async with`.

    A cancelled call goes on: what it settles stays settled.
    """

    async def ack(self) -> None:  # type: ignore[override]
        """As `LeasedMessage.ack`."""
        await self._awaited(SettleOutcome.ACKED)

    async def nack(self, delay_s: float | None = None) -> None:  # type: ignore[override]
        """As `LeasedMessage.nack`."""
        await self._awaited(SettleOutcome.NACKED, _delay_ms(delay_s))

    async def reject(self) -> None:  # type: ignore[override]
        """As `LeasedMessage.reject`."""
        await self._awaited(SettleOutcome.REJECTED)

    async def release(self) -> None:  # type: ignore[override]
        """As `LeasedMessage.release`."""
        await self._awaited(SettleOutcome.RETURNED)

    async def extend(self, lease_s: float) -> None:  # type: ignore[override]
        """As `LeasedMessage.extend`."""
        await asyncio.to_thread(super().extend, lease_s)

    async def __aenter__(self) -> AsyncLeasedMessage:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        part, row = self._held()
        if part.is_settled[row]:
            return
        if error is None:
            await self.ack()
        else:
            # The program hears of its own error.
            with contextlib.suppress(RayMQError):
                await self.nack()

    async def _awaited(self, verdict: SettleOutcome, delay_ms: int | None = None) -> None:
        await asyncio.wrap_future(self._begin(verdict, delay_ms))


class LeasedBatch:
    """Messages of one queue that a worker holds, as Arrow columns. `Workers.get_batch` returns one.

    Example:
        ```python
        import raymq

        with raymq.connect() as cluster:
            cluster.create_topic("readings", queues=4)
            with cluster.producer() as producer:
                producer.send("readings", b"21.5").result(timeout=30)
            with cluster.workers("readings", group="sums") as workers:
                batch = workers.get_batch(500, timeout=10)
                print(sum(map(float, batch.columns.column("body").to_pylist())))
                batch.ack()
        ```
    """

    def __init__(self, part: HeldPart | None, values: TopicValues) -> None:
        """Args: `part`: None: there are no messages. `values`: how those of the topic are typed."""
        self._part = part
        self._values = values
        self._columns: pa.RecordBatch | None = None

    def __len__(self) -> int:
        return 0 if self._part is None else len(self._part.offsets)

    @property
    def columns(self) -> pa.RecordBatch:
        """The messages, with the columns of `Consumer.poll_batch`. Raises: Corrupt for a body that its schema lacks."""
        if self._columns is None:
            part = self._part
            if part is None:
                return pa.RecordBatch.from_pylist([], schema=value_schema(self._values))
            rows = message_batch(part.lease.owner.shard, part.records)
            self._columns = value_batch(rows, self._values)
        return self._columns

    def raw(self) -> tuple[int, pa.Array]:
        """The shard, and the messages as its records. Not for programs."""
        part = self._part
        return (
            (0, pa.array([], pa.binary()))
            if part is None
            else (part.lease.owner.shard, part.records)
        )

    @property
    def attempts(self) -> npt.NDArray[np.int64]:
        """How often each message was delivered, with this time."""
        return np.zeros(0, np.int64) if self._part is None else self._part.attempts

    def expires_in(self) -> float:
        """Seconds for which this process surely holds the messages; 0: others may have them."""
        if self._part is None:
            return 0.0
        lease = self._part.lease
        until_ms = 0 if lease.is_lost else lease.until_ms
        return max(0, until_ms - lease.owner.now_ms()) / 1000

    def ack(self, mask: Any = None) -> Future[None] | None:
        """Settle messages: they are done.

        Args:
            mask: True for each message to settle, as many as the batch has: a list, a NumPy or an Arrow array of
                booleans. None (default): all that this batch has not settled yet.

        Returns: None, when that is durable; with `settle_mode` "pipelined" a future at once.

        Raises:
            Fenced: the leases of some messages are over. `offsets` names them; all others are settled.
            Rejected: a wrong mask, or one of messages that are settled already. Nothing was settled.
            Unavailable: as `LeasedMessage.ack`.
        """
        return self._result(SettleOutcome.ACKED, mask)

    def nack(self, mask: Any = None, delay_s: float | None = None) -> Future[None] | None:
        """Give messages back: they failed, and are delivered again later.

        Args:
            mask: as of `ack`.
            delay_s: as of `LeasedMessage.nack`.

        Returns, Raises: as `ack`.
        """
        return self._result(SettleOutcome.NACKED, mask, _delay_ms(delay_s))

    def release(self, mask: Any = None) -> Future[None] | None:
        """Give messages back unworked: the attempt does not count. Args, Returns, Raises: as `ack`."""
        return self._result(SettleOutcome.RETURNED, mask)

    def hold_acks(self, mask: Any = None) -> HeldAcks | None:
        """What `Transaction.ack` takes of this batch, which counts as settled then; None: there is nothing left.

        Args: `mask`: as of `ack`. Raises: as `ack`.
        """
        part = self._part
        if part is None:
            return None
        rows = np.flatnonzero(_checked(mask, part.is_settled))
        return HeldAcks(part, rows) if len(rows) else None

    def _result(
        self, verdict: SettleOutcome, mask: Any, delay_ms: int | None = None
    ) -> Future[None] | None:
        future = self._begin(verdict, mask, delay_ms, is_awaited=True)
        if future is None or self._part is None:
            return None
        return self._part.lease.owner.result_of(future)

    def _begin(
        self, verdict: SettleOutcome, mask: Any, delay_ms: int | None, *, is_awaited: bool = False
    ) -> ChainedFuture[None] | None:
        """Settle messages. Returns: a future that ends when that is durable; None: there are none."""
        part = self._part
        if part is None:
            return None
        rows = np.flatnonzero(_checked(mask, part.is_settled))
        if not len(rows):
            return None
        lease = part.lease
        item = SettleItem(lease.number, part.key, part.offsets[rows], verdict, delay_ms)
        future = lease.owner.settle([item], lease, is_awaited=is_awaited)
        part.is_settled[rows] = True
        return future


class AsyncLeasedBatch(LeasedBatch):
    """A batch of `AsyncWorkers`: the methods of `LeasedBatch`, awaited."""

    async def ack(self, mask: Any = None) -> None:  # type: ignore[override]
        """As `LeasedBatch.ack`."""
        await self._awaited(SettleOutcome.ACKED, mask)

    async def nack(self, mask: Any = None, delay_s: float | None = None) -> None:  # type: ignore[override]
        """As `LeasedBatch.nack`."""
        await self._awaited(SettleOutcome.NACKED, mask, _delay_ms(delay_s))

    async def release(self, mask: Any = None) -> None:  # type: ignore[override]
        """As `LeasedBatch.release`."""
        await self._awaited(SettleOutcome.RETURNED, mask)

    async def _awaited(
        self, verdict: SettleOutcome, mask: Any, delay_ms: int | None = None
    ) -> None:
        future = self._begin(verdict, mask, delay_ms)
        if future is not None:
            await asyncio.wrap_future(future)


def leased_messages(
    part: HeldPart, kind: type[LeasedMessage] = LeasedMessage
) -> list[LeasedMessage]:
    """The messages of a part."""
    new = object.__new__
    found = []
    for row, record in enumerate(part.records.to_pylist()):
        message = new(kind)
        # A frozen dataclass sets each field by a call of its own.
        values = message.__dict__
        values["shard"] = part.lease.owner.shard
        values["_record"] = record
        values["_lease"] = part, row
        found.append(message)
    return found


def _delay_ms(delay_s: float | None) -> int | None:
    if delay_s is None:
        return None
    check_number("delay_s", delay_s, 0, DELAY_MS_MAX / 1000, whole=False)
    return ms_of(delay_s)


def _checked(mask: Any, is_settled: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which messages of a batch to settle. Raises: Rejected."""
    if mask is None:
        return ~is_settled
    is_arrow = isinstance(mask, pa.Array)
    given = mask.to_numpy(zero_copy_only=False) if is_arrow else np.asarray(mask)
    if given.dtype != np.bool_ or given.shape != is_settled.shape:
        raise Rejected(
            f"mask has the type {given.dtype} and the shape {given.shape}; give one boolean for each of the "
            f"{len(is_settled)} messages",
            field="mask",
            limit=len(is_settled),
        )
    again = np.flatnonzero(given & is_settled)
    if len(again):
        raise Rejected(
            f"{len(again)} of the messages are settled already, such as row {int(again[0])}",
            field="mask",
            limit="one settlement",
        )
    return np.asarray(given)
