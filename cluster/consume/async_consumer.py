"""The consumer for asyncio: the verbs of `Consumer`, awaited; it never blocks the event loop (design D11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from raymq.cluster.messages.message import ReceivedMessage
from raymq.store.clock import Clock
from raymq.store.errors import Rejected

from .consumer import Consumer, Start

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.cluster.cluster import Cluster

_Found = TypeVar("_Found", bound=Sized)

#: how long a wait lasts before it looks whether a shard has been unreachable for too long
LOOK_S = 1.0


class AsyncConsumer:
    """Reads a topic in one event loop, as `Consumer` does. One task at a time.

    It opens with `async with`, or with its first call. The threads that read ahead, one a shard, are
    its only ones; what they have is taken without waiting, so a cancelled `poll` has taken nothing:
    no message is lost and no position moves. It neither pickles nor survives a fork.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        group: str | None = None,
        start: Start = None,
        queues: Sequence[int] | None = None,
        fetch_bytes: int = 4 << 20,
        fetch_records: int = 10_000,
        unavailable_timeout_ms: int = 30_000,
        clock: Clock | None = None,
    ) -> None:
        """Args: as `Consumer`. Nothing is asked of the cluster yet."""
        self.topic = topic
        self.group = group
        self._cluster = cluster
        self._options: dict[str, Any] = {
            "group": group,
            "start": start,
            "queues": queues,
            "fetch_bytes": fetch_bytes,
            "fetch_records": fetch_records,
            "unavailable_timeout_ms": unavailable_timeout_ms,
            "clock": clock,
        }
        self._opening: asyncio.Task[Consumer] | None = None
        self._consumer: Consumer | None = None
        #: something came, failed or ended
        self._changed = asyncio.Event()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def __reduce__(self) -> NoReturn:
        raise Rejected(
            "a consumer has open connections and does not pickle: pickle the Cluster and call "
            "cluster.async_consumer() where it is used",
            field="pickle",
        )

    async def open(self) -> None:
        """Find where to begin and start to read ahead; later calls do nothing.

        Raises: Rejected for an unknown topic or queue, or when nothing says where to begin.
        """
        await self._open()

    async def _open(self) -> Consumer:
        if self._closed:
            raise Rejected("the consumer is closed", field="consumer", limit="open")
        if self._consumer is not None:
            return self._consumer
        if self._opening is None:
            self._opening = asyncio.create_task(self._make())
        try:
            # One who is cancelled does not cancel it: the next call finds it open.
            return await asyncio.shield(self._opening)
        except BaseException:
            if self._opening is not None and self._opening.done():
                self._opening = None
            raise

    async def _make(self) -> Consumer:
        consumer = await asyncio.to_thread(Consumer, self._cluster, self.topic, **self._options)
        consumer.name = type(self).__name__
        loop, changed = asyncio.get_running_loop(), self._changed

        def tell() -> None:
            # A loop that was closed meanwhile has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        consumer.on_change(tell)
        self._consumer = consumer
        return consumer

    # --- reading --------------------------------------------------------------------------------

    async def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[ReceivedMessage]:
        """Up to `max_records` messages; waits up to `timeout` seconds while there is none.

        Raises: OffsetOutOfRange; Unavailable when a shard stays unreachable; what the cluster
        refuses reading with.
        """
        consumer = await self._open()
        return await self._wait(lambda: consumer.poll(max_records, 0), timeout)

    async def poll_batch(self, max_records: int = 10_000, timeout: float = 1.0) -> pa.RecordBatch:
        """As `poll`, but columns (columns.MESSAGE_SCHEMA) of one queue; may have no rows."""
        consumer = await self._open()
        return await self._wait(lambda: consumer.poll_batch(max_records, 0), timeout)

    async def _wait(self, look: Callable[[], _Found], timeout: float) -> _Found:
        """What `look` finds, once it is not empty or the time is up."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            self._changed.clear()
            found = look()
            left = until - loop.time()
            if len(found) or left <= 0:
                return found
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, LOOK_S))

    def __aiter__(self) -> AsyncConsumer:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """Message by message for ever; `position` and `commit` follow what was handed out."""
        consumer = await self._open()
        while True:
            self._changed.clear()
            message = consumer.next_message(0)
            if message is not None:
                return message
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)

    # --- positions ------------------------------------------------------------------------------

    def position(self, queue_id: int) -> int:
        """The offset of the next message of a queue. Raises: Rejected before it is open."""
        return self._opened().position(queue_id)

    def positions(self) -> dict[int, int]:
        """queue -> offset of the next message. Raises: Rejected before it is open."""
        return self._opened().positions()

    def _opened(self) -> Consumer:
        if self._consumer is None:
            raise Rejected(
                "the consumer is not open yet: use `async with`, or await open()",
                field="consumer",
                limit="open",
            )
        return self._consumer

    async def seek(self, queue_id: int, offset: int | str) -> None:
        """Go on from `offset`, "earliest" or "latest". Whether the queue holds it, `poll` tells."""
        consumer = await self._open()
        await asyncio.to_thread(consumer.seek, queue_id, offset)

    async def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        """Store where the group goes on: the NEXT offsets; by default of all handed out so far.

        A cancelled wait does not take it back. Durable: as an acknowledged message. Raises: Rejected
        without a group; Unavailable.
        """
        consumer = await self._open()
        # What is handed out while it is under way is not meant.
        wanted = consumer.positions() if offsets is None else dict(offsets)
        await asyncio.to_thread(consumer.commit, wanted)

    async def send_back(self, message: ReceivedMessage, *, delay_level: int = 0) -> str:
        """Have a message that could not be handled come again later, as `Consumer.send_back` says.

        A cancelled wait does not take it back.
        """
        consumer = await self._open()
        return await asyncio.to_thread(consumer.send_back, message, delay_level=delay_level)

    async def committed(self) -> dict[int, int]:
        """queue -> next offset as the group stored it last; queues without one are missing."""
        consumer = await self._open()
        return await asyncio.to_thread(consumer.committed)

    # --- end ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop reading; nothing is committed. Twice does nothing; a cancelled wait does not keep it open."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            await asyncio.wait({self._opening})
        if self._consumer is not None:
            await asyncio.to_thread(self._consumer.close)

    async def __aenter__(self) -> AsyncConsumer:
        await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
