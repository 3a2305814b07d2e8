"""The workers for asyncio: the methods of `Workers`, awaited. They never block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar, cast

from typing_extensions import Unpack

from raymq.client.arguments import check_number, takes_options_of, wait_s
from raymq.client.event_wait import set_within
from raymq.client.handle import ClusterHandle
from raymq.client.unclosed import OpenClient
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.options import LEASE_OFFSETS_MAX

from .leased import AsyncLeasedBatch, AsyncLeasedMessage
from .workers import LOOK_S, Workers
from .workers_config import WorkersConfig, WorkersOptions

_Found = TypeVar("_Found")


class _InnerWorkers(Workers):
    """Those that the event loop uses."""

    _message_class = AsyncLeasedMessage
    _batch_class = AsyncLeasedBatch


class AsyncWorkers(OpenClient):
    """Leases messages of topics in one event loop, with the methods and options of `raymq.Workers`, awaited.

    It opens with `async with`, or with its first call. Its messages are settled with `await`, or by `async with
    message`. Many tasks may use it. A cancelled `get` loses no message: the next one returns it. It does not pickle or
    survive a fork.

    Example:
        ```python
        import asyncio

        import raymq

        async def main() -> None:
            with raymq.connect() as cluster:
                cluster.create_topic("emails", queues=4)
                with cluster.producer() as producer:
                    producer.send("emails", b"welcome alice").result(timeout=30)
                async with cluster.async_workers("emails", group="mailers") as workers:
                    async for message in workers:
                        async with message:
                            print(message.body)
                        break

        asyncio.run(main())
        ```

    Args:
        cluster: the cluster whose messages are leased.
        topics: an existing topic, or a list of up to 1,000. A compacted topic has no workers.
        group: the name of the group, at most 248 characters. A group reads a topic either by workers or by consumers.
        lease_s: seconds without renewal after which others may get a message (default 60, 1 to 3,600).
        max_lease_s: seconds after its delivery beyond which a message is not held (default 43,200: 12 hours). It frees
            messages of a program that hangs.
        prefetch: takes ahead of the program (default 1, 0 to 1,000): for each message that `get` takes, or for each
            batch of `get_batch`, so many more are leased before the next call; for each thread, if several call at the
            same time. Each shard may lease as many. They are renewed as well.
        max_in_flight: messages of the group that are leased and not settled, on each shard (default 10,000, 1 to
            1,000,000). Then only such are delivered that were delivered before.
        max_attempts: deliveries of a message, before it is a dead letter (default 16, 1 to 1,000); None: no limit.
        backoff: seconds until a message is delivered again after a failure, by its attempts so far; the last one
            counts for all more (default 1, 2, 5, 10, 30, 60). It may have up to 100 delays of up to 7,200 s. After a
            delay of more than a minute the message comes from the group's retry topic.
        order: "key": messages of one key are leased one after the other, in their order; "queue": those of each queue;
            None (default): no order.
        tags: only messages with one of these tags, as in "new || paid"; None (default): all. The group settles the
            others without delivering them.
        sql: only messages for whose properties this SQL92 expression is true; None (default): all. Either `tags` or
            `sql`.
        dlq: whether a dead message is copied to the group's dead letter topic, %DLQ%GROUP (default True). Otherwise it
            is dropped.
        dlq_rate: messages that may die within a minute on each shard (default 1,000, 1 to 1,000,000); None: no limit.
            After more the group is paused there, as with `Workers`.
        start: where the group begins with a queue of which it has settled nothing: "earliest" (default) or "latest".
        auto_extend: whether a thread renews the leases of this process at a third of `lease_s` (default True), so that
            long work loses no message.
        unavailable_timeout_ms: milliseconds for which a shard may be unreachable before a call raises Unavailable
            (default 30,000).
        clock: the source of time, for tests.

    Guarantees:
        Those of `raymq.Workers`.

    Raises:
        Rejected: an unknown topic, a bad option, or options that other workers of the group do not have.
        Corrupt: a stored message is damaged. It is settled, and the next call goes on.
        Unavailable: a shard is unreachable for longer than `unavailable_timeout_ms`.
    """

    made_as = ("worker", "async_workers")

    @takes_options_of(WorkersConfig)
    def __init__(
        self,
        cluster: ClusterHandle,
        topics: str | Sequence[str],
        *,
        clock: Clock | None = None,
        **options: Unpack[WorkersOptions],
    ) -> None:
        """Note the options. The cluster is first asked by `open`."""
        config = WorkersConfig(**options)
        config.check_values()
        self.group = config.group
        self._cluster = cluster
        self._topics = topics
        self._clock = clock
        self._options = options
        #: the event loop of the first call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[_InnerWorkers] | None = None
        self._made: _InnerWorkers | None = None
        #: set when messages arrive, after a failure or the end, and when a wait is over
        self._changed = asyncio.Event()
        self._closed = False

    async def open(self) -> None:
        """Find the topics. Later calls do nothing. Raises: Rejected for an unknown topic; Unavailable."""
        await self._open()

    async def _open(self) -> _InnerWorkers:
        if self._closed:
            raise Rejected("the workers are closed", field="workers", limit="open")
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise Rejected(
                "these workers are used in another event loop; make some in each, and close these",
                field="loop",
                limit="one event loop",
            )

        self._loop = loop
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._make, loop))
        try:
            # A cancelled caller does not cancel the opening: the next call uses it.
            return await asyncio.shield(self._opening)
        except BaseException:
            if self._opening is not None and self._opening.done():
                self._opening = None
            raise

    def _make(self, loop: asyncio.AbstractEventLoop) -> _InnerWorkers:
        made = _InnerWorkers(self._cluster, self._topics, clock=self._clock, **self._options)
        made.name = type(self).__name__
        changed = self._changed

        def notify() -> None:
            # A closed loop has no waiting task.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        made.on_change(notify)
        self._made = made
        if self._closed:
            # The loop that waited for it has ended.
            made.close()
        return made

    async def get(self, timeout: float | None = None) -> AsyncLeasedMessage | None:
        """As `Workers.get`."""
        workers = await self._open()
        found = await self._wait(workers, 1, workers.take_message, timeout)
        return cast("AsyncLeasedMessage | None", found)

    async def get_batch(
        self, max_records: int = 500, timeout: float | None = None
    ) -> AsyncLeasedBatch:
        """As `Workers.get_batch`."""
        check_number("max_records", max_records, 1, LEASE_OFFSETS_MAX)
        workers = await self._open()
        take = partial(workers.take_batch, max_records)
        found = await self._wait(workers, max_records, take, timeout)
        return cast("AsyncLeasedBatch", workers.empty_batch() if found is None else found)

    async def _wait(
        self,
        workers: _InnerWorkers,
        most: int,
        take: Callable[[], _Found | None],
        timeout: float | None,
    ) -> _Found | None:
        """What `take` finds, once there is something; None: the time is up."""
        loop = asyncio.get_running_loop()
        limit_s = wait_s(timeout)
        deadline_s = math.inf if limit_s is None else loop.time() + limit_s
        with workers.waiting(most):
            while True:
                self._changed.clear()
                found = take()
                left_s = deadline_s - loop.time()
                if found is not None or left_s <= 0:
                    return found
                await set_within(self._changed, min(left_s, LOOK_S))

    def __aiter__(self) -> AsyncWorkers:
        return self

    async def __anext__(self) -> AsyncLeasedMessage:
        """Iterate over messages, each as `get` returns it, without an end. Raises: as `get`."""
        while True:
            message = await self.get(LOOK_S)
            if message is not None:
                return message

    async def close(self) -> None:
        """As `Workers.close`."""
        self._closed = True
        self._changed.set()
        opening = self._opening
        if opening is not None and not opening.done() and self._loop is asyncio.get_running_loop():
            with contextlib.suppress(Exception):
                await asyncio.shield(opening)
        if self._made is not None:
            await asyncio.shield(asyncio.create_task(asyncio.to_thread(self._made.close)))

    async def __aenter__(self) -> AsyncWorkers:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
