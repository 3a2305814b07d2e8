"""The consumer for asyncio: the methods of `Consumer`, awaited. It never blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sized
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from typing_extensions import Unpack

from raymq.client.arguments import takes_options_of, wait_s
from raymq.client.event_wait import set_within
from raymq.client.handle import ClusterHandle
from raymq.client.hooks import check_hooks
from raymq.client.messages.received import ReceivedMessage
from raymq.client.times import Time
from raymq.client.unclosed import OpenClient
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected

from .consumer import Consumer
from .consumer_config import ConsumerConfig, ConsumerOptions, QueuesCallback
from .selector import selector_of
from .transaction_offsets import OffsetsToCommit
from .wanted_topics import TopicChoice, WantedTopics

_Found = TypeVar("_Found", bound=Sized)

#: interval at which a wait checks whether a shard has been unreachable for too long
RECHECK_S = 1.0


class AsyncConsumer(OpenClient):
    """Reads a topic, or several, in one event loop, with the methods and options of `raymq.Consumer`, awaited.

    It opens with `async with`, or with its first call. One thread per shard reads ahead. A call only takes messages
    that are fetched already, so a cancelled `poll` loses no message and moves no position. One task at a time may use
    it. It does not pickle or survive a fork.

    Example:
        ```python
        import asyncio

        import raymq

        async def main() -> None:
            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                async with cluster.async_consumer("orders", start="earliest") as consumer:
                    for message in await consumer.poll(max_records=100, timeout=0.2):
                        print(message.queue_id, message.offset, message.body)

        asyncio.run(main())
        ```

    Args:
        cluster: the cluster to read from.
        topic: an existing topic; a list of up to 1,000; or `raymq.matching("orders-*")` for all with such names, also
            those that are made later. With a list or a pattern, queues are named (topic, queue_id) in all arguments and
            results, instead of queue_id.
        group: the name under which `commit` stores offsets, at most 248 characters; None (default) means that nothing
            can be committed. Consumers with the same group share the topic: each queue is read by one of them, its
            *member*. A member that ends or falls silent loses its queues to the others. To read every message in each
            of several programs, give them different groups, or none.
        start: where queues without a committed offset begin: "earliest", "latest", an offset for every queue,
            {queue_id: offset}, or a datetime with a time zone: at the first message that was stored then or later, else
            at the end. A number is an offset, so `raymq.at_ms(ms)` says a time in milliseconds. None (default) is
            refused if some queue has no committed offset.
        queues: the queues to read; None (default) reads all, or with a group those that the group gives to this
            member; also those that the topic gets later: from their first message, at most 30 s later. A group that
            was away begins those at their first message, too. A consumer with `queues` does not join its group: it
            shares nothing, and its commit is refused while a member has the queue.
        fetch_bytes: bytes per fetch (default 4 MiB). Up to one fetch per shard is held in memory.
        fetch_records: messages per fetch (default 10,000).
        unavailable_timeout_ms: milliseconds for which a shard may be unreachable before a read raises Unavailable
            (default 30,000).
        read_from: "leader" (default) reads each shard from its leader. "nearest" reads from a replica on this machine,
            and prefers a follower there. Without one it reads from any other follower, or else from the leader. A
            follower learns up to 0.2 s later what is confirmed. The consumer leaves it when it lags by more than a
            second.
        instance_id: of a member, a name that outlives its process, at most 255 characters; None (default): none. A
            newer process with that name takes the place of the older one, whose calls raise Fenced.
        session_timeout_s: of a member, seconds without a heartbeat after which others get its queues (default 15, 1 to
            1,800). A thread sends heartbeats, so long work between two polls costs no membership.
        revoke_timeout_s: of a member, seconds that it may keep a queue which it has to give to another one (default
            10). It gives queues up in `poll` and iteration. One that takes longer is removed after its session.
        max_poll_interval_s: of a member, seconds without a call of `poll` or iteration after which it leaves the group
            (2 to 86,400), so that a program that hangs keeps no queues. Its next poll lets it join again. None
            (default): it stays while its process lives.
        on_assigned: of a member, called with [(topic, queue_id)...] that it reads from now on, during `poll`. It may be
            a coroutine function.
        on_revoked: of a member, called with [(topic, queue_id)...] that it has to give up. It may be a coroutine
            function, and commit.
        tags: only messages with one of these tags, as in "new || paid"; None (default): all. The shard looks at the
            others, and sends nothing of them.
        sql: only messages for whose properties this SQL92 expression is true, such as "price > 5 AND region IN
            ('eu')"; None (default): all. Either `tags` or `sql`.
        hooks: objects that see each message of `poll` and iteration; default: none. A hook may have the methods
            `before_consume(messages)` and `after_consume(messages, error)`. The first is called before the program gets
            messages, the second when it asks for the next ones, commits or closes. All are called in
            the event loop, and must not block it. What a hook raises is logged and counted.
        clock: the source of time, for tests.

    Guarantees:
        Those of `raymq.Consumer`.

    Raises:
        Rejected: an unknown topic or queue, a bad option, or `start` is missing; raised when the consumer opens.
            For a wrong `tags` or `sql` it has the position of the fault, and is raised when the consumer is made.
        OffsetOutOfRange: a queue does not hold the offset to read. `min` and `max` are its range.
        Corrupt: a stored message is damaged. `seek` after it to continue.
        Unavailable: a shard is unreachable for longer than `unavailable_timeout_ms`.
        Fenced: a newer process with the same `instance_id` has joined; from `commit`: another member has some queues.
    """

    made_as = ("consumer", "async_consumer")

    @takes_options_of(ConsumerConfig)
    def __init__(
        self,
        cluster: ClusterHandle,
        topic: TopicChoice,
        *,
        clock: Clock | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Note the options. The cluster is first asked by `open`."""
        self._topics = topic
        #: the topic; with several, their names or the pattern
        self.topic = str(WantedTopics(topic))
        config = ConsumerConfig(**options)
        selector_of(config.tags, config.sql)
        check_hooks(config.hooks)
        self.group = config.group
        self._cluster = cluster
        self._clock = clock
        self._options = options

        #: the event loop of the first call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[Consumer] | None = None
        self._consumer: Consumer | None = None
        #: the same, also when the loop ended while it was made
        self._made: Consumer | None = None
        #: set after a fetch, a failure or the end, and when a wait is over
        self._changed = asyncio.Event()
        self._closed = self._keeps_place = False
        self._stepping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the first offset of each queue and start to read ahead. Later calls do nothing.

        Raises: Rejected for an unknown topic or queue, or when `start` is missing.
        """
        await self._open()

    async def _open(self) -> Consumer:
        if self._closed:
            raise Rejected("the consumer is closed", field="consumer", limit="open")
        if self._is_elsewhere():
            raise Rejected(
                "this consumer is used in another event loop; make one in each, and close this one",
                field="loop",
                limit="one event loop",
            )

        self._loop = asyncio.get_running_loop()
        if self._consumer is not None:
            return self._consumer
        if self._opening is None:
            self._opening = asyncio.create_task(self._make())
        try:
            # A cancelled caller does not cancel the opening: the next call uses it.
            return await asyncio.shield(self._opening)
        except BaseException:
            if self._opening is not None and self._opening.done():
                self._opening = None
            raise

    def _is_elsewhere(self) -> bool:
        """Whether another event loop used it first."""
        return self._loop not in (None, asyncio.get_running_loop())

    async def _make(self) -> Consumer:
        consumer = await asyncio.to_thread(self._make_in_thread)
        consumer.name = type(self).__name__
        loop, changed = asyncio.get_running_loop(), self._changed

        def notify() -> None:
            # A closed loop has no waiting task.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        consumer.on_change(notify)
        self._consumer = consumer
        return consumer

    def _make_in_thread(self) -> Consumer:
        options = self._options.copy()
        on_assigned, on_revoked = options.get("on_assigned"), options.get("on_revoked")
        if on_assigned is not None:
            options["on_assigned"] = partial(self._call_in_loop, on_assigned)
        if on_revoked is not None:
            options["on_revoked"] = partial(self._call_in_loop, on_revoked)
        made = self._made = Consumer(self._cluster, self._topics, clock=self._clock, **options)
        # Its calls must not block the loop.
        made.steps_by_itself = False
        if self._closed:
            # The loop that waited for it has ended.
            made.close()
        return made

    def _call_in_loop(self, callback: QueuesCallback, queues: list[tuple[str, int]]) -> None:
        """Run a callback, which may be a coroutine function, in the loop. Callers: a thread that may wait."""

        async def call() -> None:
            result = callback(queues)
            if inspect.isawaitable(result):
                await result

        if self._loop is not None and self._loop.is_running():
            # Not after the end of the loop that used the consumer: `close` may be called in another one.
            asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    # --- reading ----------------------------------------------------------------------------------

    async def poll(
        self, max_records: int = 500, timeout: float | None = 1.0
    ) -> list[ReceivedMessage]:
        """Return up to `max_records` messages. Wait up to `timeout` seconds while there are none; None: without limit.

        Raises: as `Consumer.poll`.
        """
        consumer = await self._open()
        return await self._wait(consumer, lambda: consumer.poll(max_records, 0), timeout)

    async def poll_batch(
        self, max_records: int = 10_000, timeout: float | None = 1.0
    ) -> pa.RecordBatch:
        """Like `poll`, but Arrow columns of one queue, as `Consumer.poll_batch` returns them."""
        consumer = await self._open()
        return await self._wait(consumer, lambda: consumer.poll_batch(max_records, 0), timeout)

    async def _step(self, consumer: Consumer) -> None:
        """Do what the membership asks for, in a thread. One at a time: a cancelled call leaves it running."""
        if self._stepping is None:
            self._stepping = asyncio.create_task(asyncio.to_thread(consumer.step))
        stepping = self._stepping
        try:
            await asyncio.shield(stepping)
        finally:
            if stepping.done():
                self._stepping = None

    async def _wait(
        self, consumer: Consumer, poll: Callable[[], _Found], timeout: float | None
    ) -> _Found:
        """The result of `poll`, once it is not empty or the time is up."""
        loop = asyncio.get_running_loop()
        limit_s = wait_s(timeout)
        deadline_s = loop.time() + (math.inf if limit_s is None else limit_s)
        while True:
            self._changed.clear()
            if consumer.has_news or self._stepping is not None:
                await self._step(consumer)
            found = poll()
            left = deadline_s - loop.time()
            if len(found) or left <= 0:
                return found
            await set_within(self._changed, min(left, RECHECK_S))

    async def batches(self, max_records: int = 500) -> AsyncIterator[list[ReceivedMessage]]:
        """`async for messages in consumer.batches()`: `poll(max_records)` without an end, without the empty ones.

        Raises: as `poll`.
        """
        while True:
            messages = await self.poll(max_records, timeout=5.0)
            if messages:
                yield messages

    def __aiter__(self) -> AsyncConsumer:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """Iterate over messages without an end. `position` and `commit` follow the messages returned so far."""
        consumer = await self._open()
        while True:
            self._changed.clear()
            if consumer.has_news or self._stepping is not None:
                await self._step(consumer)
            message = consumer.next_message(0)
            if message is not None:
                return message
            await set_within(self._changed, RECHECK_S)

    # --- positions --------------------------------------------------------------------------------

    def position(self, queue_id: int | tuple[str, int]) -> int:
        """The offset of the next message of a queue. Raises: Rejected before the consumer is open."""
        return self._opened().position(queue_id)

    def positions(self) -> dict[Any, int]:
        """queue_id -> offset of the next message. Raises: Rejected before the consumer is open."""
        return self._opened().positions()

    def _opened(self) -> Consumer:
        if self._consumer is None:
            raise Rejected(
                "the consumer is not open yet: use `async with`, or await open()",
                field="consumer",
                limit="open",
            )
        return self._consumer

    def assignment(self) -> dict[tuple[str, int], int]:
        """(topic, queue id) -> number of the grant: `Consumer.assignment`. Raises: Rejected before it is open."""
        return self._opened().assignment()

    def offsets_to_commit(self, offsets: Mapping[Any, int] | None = None) -> OffsetsToCommit:
        """As `Consumer.offsets_to_commit`. Raises: as that does; Rejected before the consumer is open."""
        return self._opened().offsets_to_commit(offsets)

    async def seek(self, queue_id: int | tuple[str, int], offset: int | str) -> None:
        """Continue from `offset`, "earliest" or "latest". An offset that the queue does not hold fails in `poll`."""
        consumer = await self._open()
        await asyncio.to_thread(consumer.seek, queue_id, offset)

    async def seek_time(self, time: Time) -> dict[Any, int]:
        """Continue each queue from the first message that was stored at a time or later, as `Consumer.seek_time`."""
        consumer = await self._open()
        return await asyncio.to_thread(consumer.seek_time, time)

    async def pause(self, queues: Iterable[int | tuple[str, int]] | None = None) -> None:
        """Return no messages of some queues until `resume`, as `Consumer.pause`."""
        (await self._open()).pause(queues)

    async def resume(self, queues: Iterable[int | tuple[str, int]] | None = None) -> None:
        """Return messages of paused queues again, as `Consumer.resume`."""
        (await self._open()).resume(queues)

    def paused(self) -> list[tuple[str, int]]:
        """The queues that are paused, as (topic, queue id). Raises: Rejected before the consumer is open."""
        return self._opened().paused()

    async def commit(self, offsets: Mapping[Any, int] | None = None) -> None:
        """Commit the offsets at which the group continues: the NEXT offsets, by default after all returned messages.

        Cancelling the wait does not cancel the commit. Durable: as an acknowledged message.
        Raises: as `Consumer.commit`.
        """
        # `on_revoked` may commit while `close` goes on.
        is_closing = self._closed and self._consumer is not None
        consumer = self._opened() if is_closing else await self._open()
        # Messages that are returned during the call are not committed.
        wanted = consumer.uncommitted() if offsets is None else dict(offsets)
        # In the event loop, as all calls of hooks.
        consumer.end_consumed()
        await asyncio.to_thread(consumer.commit, wanted)

    async def send_back(self, message: ReceivedMessage, *, delay_level: int = 0) -> str:
        """Send a message that could not be processed back, as `Consumer.send_back` does.

        Cancelling the wait does not cancel the call.
        """
        consumer = await self._open()
        return await asyncio.to_thread(consumer.send_back, message, delay_level=delay_level)

    async def committed(self) -> dict[Any, int]:
        """queue_id -> committed offset of the group. Queues without one are missing."""
        consumer = await self._open()
        return await asyncio.to_thread(consumer.committed)

    # --- end --------------------------------------------------------------------------------------

    async def close(self, *, keep_place: bool = False) -> None:
        """Stop reading, and leave the group, after `on_revoked`. No offset is committed.

        A second call does nothing. A cancelled call closes it, too. Any event loop may call it.
        Args: `keep_place`: as of `Consumer.close`.
        """
        self._closed, self._keeps_place = True, keep_place
        if self._is_elsewhere():
            # The tasks of the other loop may never end: it may be closed.
            if self._made is not None:
                await asyncio.to_thread(self._made.close)
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            await asyncio.wait({self._opening})
        if self._consumer is not None:
            self._consumer.end_consumed()
            await asyncio.to_thread(self._consumer.close, keep_place=self._keeps_place)

    async def __aenter__(self) -> AsyncConsumer:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *exc: object
    ) -> None:
        if self._consumer is not None and not self._is_elsewhere():
            self._consumer.end_consumed(error)
        await self.close()

    @property
    def hook_failures(self) -> int:
        """How many calls of `hooks` raised. The first one of each kind was logged."""
        return 0 if self._consumer is None else self._consumer.hook_failures
