"""The producer for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyarrow as pa
from typing_extensions import Unpack

from raymq.client.arguments import takes_options_of, wait_s
from raymq.client.event_wait import set_within
from raymq.client.handle import ClusterHandle
from raymq.client.hooks import Hooks
from raymq.client.messages.message import Message, Receipt
from raymq.client.unclosed import OpenClient, report_unreceipted
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, RayMQError, Rejected
from raymq.store.config.promise import Acks

from .cancel_timer import cancel_timer
from .half_checks import CheckCallback, HalfChecks
from .half_message import AsyncHalfMessage, CheckedHalf
from .half_sender import HalfSender
from .hooked_sends import HookedSends
from .message_batcher import MessageBatcher
from .message_encoder import EncodedMessage
from .producer import FAILED_EXIT_S
from .producer_config import ProducerConfig, ProducerOptions, closed_error
from .queue_sequence import BatchReceipt
from .send_future import AsyncSendFuture, SendFuture, TaskSteps
from .transaction import AsyncTransaction, Transaction
from .transaction_calls import TransactionCalls

#: how often a check that waits for its callback looks whether the event loop has ended
LOOP_CHECK_S = 0.5


@dataclass(eq=False)
class DeferredSend(TaskSteps[Receipt]):
    """The receipt of a message that waits for room in the buffer, or for the look-up of its topic."""

    message: EncodedMessage
    #: when its wait for room ends, seconds of the loop's clock
    until_s: float
    accepted: asyncio.Future[AsyncSendFuture]
    #: a caller has seen that it was not accepted
    observed: bool = False

    def done(self) -> bool:
        """Whether the receipt is there, or the reason why there is none."""
        accepted = self.accepted
        if not accepted.done():
            return False
        return accepted.exception() is not None or accepted.result().done()

    def __await__(self) -> Generator[object, None, Receipt]:
        try:
            # A cancelled task stops waiting. The message is still sent.
            future = yield from asyncio.shield(self.accepted).__await__()
        except RayMQError:
            self.observed = True
            raise
        return (yield from future.__await__())

    def fail(self, error: RayMQError) -> None:
        """Finish with the reason why the message is not sent."""
        # No task waits in a closed loop.
        with contextlib.suppress(RuntimeError):
            self.accepted.set_exception(error)
        # Read here, or asyncio would log the error. `flush` raises it when no task awaits the message.
        self.accepted.exception()


class ManySends(TaskSteps[list[Receipt]]):
    """The result of `AsyncProducer.send_many`."""

    __slots__ = ("_sends", "_steps")

    def __init__(self, sends: Sequence[SendFuture | DeferredSend]) -> None:
        self._sends = sends

    def __await__(self) -> Generator[object, None, list[Receipt]]:
        receipts: list[Receipt] = []
        failed: RayMQError | None = None
        for send in self._sends:
            try:
                receipts.append((yield from send.__await__()))
            except RayMQError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return receipts


class CheckAnswers:
    """Calls the callbacks of checks in the event loop, for the thread that asks."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        #: for which it calls them
        self.checks: HalfChecks | None = None
        self._task: asyncio.Task[Any] | None = None

    def ask(self, callback: CheckCallback, half: CheckedHalf) -> object:
        """What a callback says of a half message. Callers: the thread of the checks."""
        loop, checks = self.loop, self.checks
        if loop is None or checks is None or loop.is_closed():
            return None
        answer = asyncio.run_coroutine_threadsafe(self._call(callback, half), loop)
        while not wait([answer], LOOP_CHECK_S).done:
            if checks.is_ending and not loop.is_running():
                answer.cancel()
                return None
        return None if answer.cancelled() else answer.result()

    async def _call(self, callback: CheckCallback, half: CheckedHalf) -> object:
        self._task = asyncio.current_task()
        try:
            found = callback(half)
            return await found if inspect.isawaitable(found) else found
        finally:
            self._task = None

    def is_running_here(self) -> bool:
        """Whether the running code is a callback."""
        return self._task is not None and self._task is asyncio.current_task()


class AsyncProducer(OpenClient):
    """Sends messages in batches from one event loop, which it never blocks: `Producer` for asyncio.

    `send` returns an awaitable of the receipt, and the message is sent whether a task awaits it or not. A call starts
    no thread, because one thread builds and writes all batches and one thread per shard reads acks. While the buffer
    is full, a message waits for its turn.

    As an asynchronous context manager the producer flushes at the end, and raises the first failure that no caller has
    seen. After an exception in the block it waits at most 2 s for receipts. The producer neither pickles nor survives
    a fork.

    Example:
        ```python
        import asyncio

        import raymq

        async def main(cluster: raymq.Cluster) -> None:
            async with cluster.async_producer() as producer:
                sends = [producer.send("orders", b"order %d" % n) for n in range(100)]
                receipts = await asyncio.gather(*sends)
                print(receipts[0].offset)

        with raymq.start("raymq-data") as cluster:
            cluster.create_topic("orders", queues=4)
            asyncio.run(main(cluster))
        ```

    Args:
        cluster: the cluster to send to. `cluster.async_producer(...)` is the same call.
        acks: "quorum" (default) or "leader": which replicas have a message before its receipt. "leader" is quicker.
        linger_ms: milliseconds (default 5) that a message waits at most for others, while earlier batches are under way
            to its shard. 0 sets no such limit: it leaves with the answer to them, or when its batch is full. Tasks that
            send in one iteration of the event loop share batches.
        batch_bytes: bytes (default 1 MiB) at which a batch is sent at once.
        buffer_bytes: bytes (default 64 MiB) of messages without a receipt. With a full buffer, sends are deferred in
            order; deferred messages take memory beyond this limit.
        max_block_ms: milliseconds (default 60,000) that a deferred message waits for room, or a look-up for an answer.
            Then its await raises Unavailable.
        delivery_timeout_ms: milliseconds (default 120,000) from a batch's close until it fails without a receipt.
        request_timeout_ms: milliseconds (default 30,000) of silence after which a shard is connected to again.
        in_flight_bytes: bytes (default 16 MiB) under way to one shard.
        codec: makes bodies: "bytes" (default), "json", "msgpack" or "arrow-ipc". It runs in the event loop.
        max_message_bytes: bytes (default 4 MiB) of the largest body.
        hooks: objects that see each message of `send` and `send_many`, as those of `Producer`; default: none. All their
            methods are called in the event loop, and must not block it.
        clock: replaces the system's clock in tests.

    See `Producer` for the cost of each option.

    Guarantees:
        Those of `Producer`: order per queue, each message stored once, receipts that mean what `acks` promises.

        A cancelled await cancels nothing but the wait.

    Raises:
        Rejected: from `send`, at once, for a message that cannot be stored; from the await for an unknown topic.
        Unavailable, DeliveryUnknown, StorageFull: from the await, as from the futures of `Producer`.
    """

    made_as = ("producer", "async_producer")

    @takes_options_of(ProducerConfig)
    def __init__(
        self,
        cluster: ClusterHandle,
        *,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._cluster = cluster
        self._batcher = MessageBatcher(
            cluster, owner=type(self).__name__, future_type=AsyncSendFuture, clock=clock, **options
        )
        self.config = self._batcher.config
        self._encode = self._batcher.encoder.encode
        self._hooked: HookedSends | None = None
        hooks = Hooks.of(self.config.hooks)
        if hooks is not None:
            self._hooked = HookedSends(self._batcher.encoder, hooks)
            self._encode = self._hooked.encode

        self._acquire_nowait = self._batcher.limiter.acquire_nowait
        self._loop: asyncio.AbstractEventLoop | None = None
        #: topics that need no look-up
        self._known: set[str] = set()
        #: in the order of the calls; while there is one, every later message is deferred after it
        self._deferred: deque[DeferredSend] = deque()
        self._failed: deque[DeferredSend] = deque(maxlen=1000)
        self._drainer: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        self._closed = False
        #: deferred messages are not sent any more
        self._ending = False

        clock = clock or Clock()
        self._halves = HalfSender(cluster, self._batcher, clock)
        self._answers = CheckAnswers()
        self._checks = HalfChecks(self._halves, clock, cluster.transport, self._answers.ask)
        self._answers.checks = self._checks
        self._clock = clock
        self._commits = TransactionCalls(lambda: self._halves.routes, clock)
        # The thread of the checks must not outlive a producer that nothing refers to.
        weakref.finalize(self, self._checks.stop)

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The event loop, which is the same in every call. Raises: Rejected."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise closed_error()
        if self._loop is None:
            self._loop = loop
            released = self._released
            self._batcher.limiter.on_release = lambda: _call_soon(loop, released.set)
        elif self._loop is not loop:
            raise self._other_loop_error()
        return loop

    def _other_loop_error(self) -> Rejected:
        return Rejected(
            "this producer is used in another event loop; make one in each, and close each in its own",
            field="loop",
            limit="one event loop",
        )

    # --- sending ----------------------------------------------------------------------------------

    def send(
        self,
        topic: str | Message,
        body: object = None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        delay_level: int = 0,
        flag: int = 0,
        sys_flag: int = 0,
        born_host: str | None = None,
        wait_store_ok: bool = True,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> Coroutine[Any, Any, Receipt]:
        """Send one message; the arguments are those of `Producer.send`.

        The message is sent whether it is awaited or not, and a cancelled wait cancels nothing. With a full buffer the
        message is deferred for up to `max_block_ms`. Then its await raises Unavailable.

        Returns: an awaitable of the receipt, which `asyncio.create_task` takes as well.
        Raises: Rejected at once for a message that cannot be stored, or when the producer is closed.
        """
        loop = self._bind()
        message = self._encode(
            topic,
            body,
            key,
            tag,
            index_keys,
            properties,
            deliver_at_ms,
            delay_level,
            flag,
            sys_flag,
            born_host,
            wait_store_ok,
            queue_id,
            acks,
        )

        ready = not self._deferred and message.topic in self._known
        if ready and self._acquire_nowait(message.size):
            return self._add(message) if self._hooked is None else self._add_hooked(message, loop)
        return self._defer(message, loop)

    def _add_hooked(
        self, message: EncodedMessage, loop: asyncio.AbstractEventLoop
    ) -> AsyncSendFuture:
        """`_add` of a message whose outcome the hooks get, in the event loop. Raises: as `_add`."""
        hooked = self._hooked
        try:
            made = self._add(message)
        except RayMQError as error:
            if hooked is not None:
                hooked.after_send(message, error)
            raise
        if hooked is not None:
            hooked.watch(message, made, partial(_call_soon, loop))
        return made

    def _defer(self, message: EncodedMessage, loop: asyncio.AbstractEventLoop) -> DeferredSend:
        until_s = loop.time() + self.config.max_block_ms / 1000
        deferred = DeferredSend(message, until_s, loop.create_future())
        self._deferred.append(deferred)
        self._start_drainer(loop)
        return deferred

    async def cancel(self, receipt: Receipt) -> bool:
        """Cancel a message of `send(deliver_at_ms=...)` before it is delivered, as `Producer.cancel` does.

        Cancelling the wait does not cancel the call.
        """
        return await asyncio.to_thread(cancel_timer, self._cluster, receipt)

    def send_many(
        self, messages: Iterable[Message], *, queue_id: int | None = None, acks: Acks | None = None
    ) -> Coroutine[Any, Any, list[Receipt]]:
        """Send messages together, as `Producer.send_many`; one await waits for all of them.

        With a full buffer the messages without room are deferred, as by `send`.

        Returns: an awaitable of the receipts, in order. When all have an outcome, it raises the first failure. Before
        the first look-up of a topic, that may be Rejected for an unknown topic or queue, while the others are stored.
        Raises: Rejected at once for a message that cannot be stored; then none of them is sent.
        """
        loop = self._bind()
        if self._hooked is not None:
            encoded = self._hooked.encode_all(messages, queue_id=queue_id, acks=acks)
            # One at a time: a program with hooks looks at each message anyway.
            return ManySends([self._defer(each, loop) for each in encoded])
        encoded = [self._encode(each, queue_id=queue_id, acks=acks) for each in messages]
        known = {each.topic for each in encoded} <= self._known
        targets = self._batcher.targets(encoded) if known else []

        sends: list[SendFuture | DeferredSend] = []
        for part in self._batcher.parts_of(encoded):
            size = sum(each.size for each in encoded[part])
            if known and not self._deferred and self._acquire_nowait(size):
                sends += self._batcher.add_many(encoded[part], targets[part], may_block=False)[0]
            else:
                sends += [self._defer(each, loop) for each in encoded[part]]
        return ManySends(sends)

    def _add(self, message: EncodedMessage) -> AsyncSendFuture:
        return cast(AsyncSendFuture, self._batcher.add(message, may_block=False)[0])

    async def send_batch(
        self, topic: str, data: pa.RecordBatch | pa.Table, *, queue_id: int | None = None
    ) -> list[BatchReceipt]:
        """Send columns of messages, as `Producer.send_batch`, and wait for the receipts, one per batch.

        A cancelled wait cancels nothing. Raises: as the sends fail.
        """
        loop = self._bind()
        # The columns come after all earlier sends. Failures of these are raised to their own callers.
        await self._drained(loop, None)
        futures = await asyncio.to_thread(self._batcher.add_columns, topic, data, queue_id)
        waits = [asyncio.wrap_future(future) for future in futures]
        return list(await asyncio.shield(asyncio.gather(*waits)))

    async def resend(self, sent: Coroutine[object, object, Receipt]) -> Receipt:
        """Send again a message that raised DeliveryUnknown, with the same sequence number: see `Producer.resend`.

        Args: `sent`: the result of `send`. A cancelled wait does not take the message back.
        """
        self._bind()
        if isinstance(sent, DeferredSend) and sent.done():
            sent = sent.accepted.result()
        if not isinstance(sent, AsyncSendFuture):
            raise Rejected("this is not what send returned", field="sent", limit="a send's result")
        batch = await asyncio.to_thread(self._batcher.resend, sent._batch, sent._row)
        return await AsyncSendFuture(batch, sent._row)

    # --- transactions -----------------------------------------------------------------------------

    async def send_half(
        self,
        topic: str | Message,
        body: object = None,
        *,
        group: str,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        born_host: str | None = None,
        queue_id: int | None = None,
    ) -> AsyncHalfMessage:
        """Store a half message, which no consumer sees before its commit, as `Producer.send_half` does.

        A cancelled wait does not take it back. If it is stored, its producers are asked about it.
        Returns: the half message, when it is stored. Raises: as the call and the future of `Producer.send_half`.
        """
        self._bind()
        send = partial(
            self._halves.send,
            topic,
            body,
            group=group,
            key=key,
            tag=tag,
            index_keys=index_keys,
            properties=properties,
            flag=flag,
            sys_flag=sys_flag,
            born_host=born_host,
            queue_id=queue_id,
        )

        # It may have to wait for room in the buffer, and for the first look-up of the topic.
        future = await asyncio.to_thread(send)
        try:
            return AsyncHalfMessage.of(await asyncio.shield(asyncio.wrap_future(future)))
        except RayMQError:
            future.note_seen()
            raise

    def transaction(self, *, timeout_s: float = 60.0) -> AsyncTransaction:
        """Begin a transaction: `Producer.transaction` for asyncio. Use it with `async with`.

        Args: `timeout_s`: as there. Raises: Rejected for a wrong option, and when the producer is closed.
        """
        loop = self._bind()
        hooks = None if self._hooked is None else self._hooked.hooks

        def after_send(message: Message, outcome: Receipt | RayMQError) -> None:
            if hooks is not None:
                _call_soon(loop, partial(hooks.after_send, message, outcome))

        made = Transaction(
            *(self._batcher, self._encode, self._commits, self._clock),
            timeout_s=timeout_s,
            after_send=after_send,
        )
        return AsyncTransaction(made, self._batcher.batch_sender.topic)

    async def end_half(self, half_id: str, decision: str) -> bool:
        """Commit or roll back a half message by its id, as `Producer.end_half` does.

        Cancelling the wait does not cancel the call.
        """
        self._bind()
        return await asyncio.to_thread(self._halves.end, half_id, decision)

    def check(self, callback: CheckCallback, *, group: str) -> None:
        """Answer for half messages of a producer group, as `Producer.check` does.

        Args: `callback`: a function or a coroutine function. It runs in the event loop, one call at a time.
        """
        self._answers.loop = self._bind()
        self._checks.add(group, callback)

    # --- deferred sends ---------------------------------------------------------------------------

    def _start_drainer(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
        """The task that sends deferred messages; None: there are none. A cancelled task is replaced."""
        if self._drainer is not None and self._drainer.done():
            self._drainer = None
        if self._drainer is None and self._deferred:
            self._drainer = loop.create_task(self._drain())
        return self._drainer

    async def _drain(self) -> None:
        """Send deferred messages, in order."""
        try:
            while self._deferred and not self._ending:
                deferred = self._deferred[0]
                try:
                    deferred.accepted.set_result(await self._accept(deferred))
                except RayMQError as error:
                    self._fail(deferred, error)
                except Exception as error:
                    # Later messages must not wait without end.
                    self._fail(deferred, Bug(f"send: {error!r}"))
                self._deferred.popleft()
        finally:
            self._drainer = None

    async def _accept(self, deferred: DeferredSend) -> AsyncSendFuture:
        """Send a message when its topic is known and it fits. Raises: Rejected; Unavailable."""
        message = deferred.message
        if message.topic not in self._known:
            # The first time, the look-up asks a shard.
            await asyncio.to_thread(self._batcher.batch_sender.topic, message.topic)
            self._known.add(message.topic)

        while True:
            self._released.clear()
            if self._ending:
                raise closed_error()
            if self._acquire_nowait(message.size):
                made = self._add(message)
                if self._hooked is not None:
                    loop = asyncio.get_running_loop()
                    self._hooked.watch(message, made, partial(_call_soon, loop))
                return made

            # Open batches have to be sent, or no bytes would ever be answered.
            self._batcher.request_flush_open()
            left = deferred.until_s - asyncio.get_running_loop().time()
            if left <= 0:
                raise self._batcher.limiter.full_error()
            await set_within(self._released, left)

    async def _drained(self, loop: asyncio.AbstractEventLoop, until_s: float | None) -> bool:
        """Wait until no message is deferred, up to a time of the loop's clock. Returns: whether none is."""
        while (drainer := self._start_drainer(loop)) is not None:
            left = None if until_s is None else max(0.0, until_s - loop.time())
            _, late = await asyncio.wait({drainer}, timeout=left)
            if late:
                return False
        return True

    # --- end --------------------------------------------------------------------------------------

    def __del__(self) -> None:
        # The batcher cannot send these, because it has not got them.
        unsent = sum(not each.accepted.done() for each in self.__dict__.get("_deferred", ()))
        if unsent and not self._closed and self._batcher.batch_sender.in_own_process:
            report_unreceipted(type(self).__name__, unsent)

    @property
    def hook_failures(self) -> int:
        """How many calls of `hooks` raised. The first one of each kind was logged."""
        return 0 if self._hooked is None else self._hooked.hooks.failures.count

    def statistics(self) -> dict[str, int | float]:
        """Like `Producer.statistics`, with `deferred_messages`: those that wait for room now."""
        return {**self._batcher.statistics(), "deferred_messages": len(self._deferred)}

    async def flush(self, timeout: float | None = None) -> None:
        """Send all open batches and wait up to `timeout` seconds until every send so far has an outcome.

        Raises: the first failure that no caller has seen; TimeoutError when the time is up.
        """
        self._bind()
        await self._flush(timeout)
        self._raise_failure()

    async def _flush(self, timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        timeout = wait_s(timeout)
        until_s = None if timeout is None else loop.time() + timeout
        if not await self._drained(loop, until_s):
            raise TimeoutError(
                f"{len(self._deferred)} messages wait for room or for their topic's look-up after {timeout} s; "
                "they are not sent yet: flush again"
            )
        left = None if until_s is None else max(0.0, until_s - loop.time())
        await asyncio.to_thread(self._batcher.flush, left)

    def _raise_failure(self) -> None:
        """Raise the first failure that no caller has seen.

        Runs in the loop, not in a thread, because a cancelled wait has shown no failure to its caller.
        """
        failed = [deferred for deferred in self._failed if not deferred.observed]
        self._failed.clear()
        self._batcher.batch_sender.raise_failure()
        if failed:
            failed[0].accepted.result()

    async def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds, then close. Sends without a receipt fail. A second call does nothing.

        Another event loop may call it when the producer's own has ended. Messages that wait for room fail then.
        Raises: the first failure that no caller has seen; the producer is closed in any case. Rejected in another event
        loop while the producer's own runs.
        """
        timeout = wait_s(timeout)
        if self._closed:
            return
        if self._loop not in (None, asyncio.get_running_loop()):
            await self._close_elsewhere(timeout)
            return
        self._closed = True
        try:
            joins = not self._answers.is_running_here()
            await asyncio.to_thread(partial(self._checks.close, joins=joins))
            with contextlib.suppress(TimeoutError):
                await self._flush(timeout)
        finally:
            await self._end_drainer()
            self._fail_deferred()
            await asyncio.to_thread(self._close_batcher, 0)
        self._raise_failure()

    async def _close_elsewhere(self, timeout: float | None) -> None:
        """Close in another event loop than the producer's, which ran the task that hands deferred messages over."""
        if self._loop is not None and self._loop.is_running():
            raise self._other_loop_error()
        self._closed = self._ending = True
        self._batcher.batch_sender.stop_look_ups()
        self._fail_deferred()
        await asyncio.to_thread(self._checks.close)
        await asyncio.to_thread(self._close_batcher, timeout)
        self._raise_failure()

    def _close_batcher(self, timeout: float | None) -> None:
        """Close what sends. Callers: a thread, because it waits."""
        try:
            self._batcher.close(timeout)
        finally:
            self._halves.close()

    async def _end_drainer(self) -> None:
        """Wait for the drainer. A message that it accepts until then is sent, so it must not be failed as unsent."""
        self._ending = True
        self._batcher.batch_sender.stop_look_ups()
        drainer = self._drainer
        if drainer is not None:
            drainer.cancel()
            await asyncio.wait({drainer})

    def _fail_deferred(self) -> None:
        for deferred in self._deferred:
            if not deferred.accepted.done():
                self._fail(deferred, closed_error())
        self._deferred.clear()

    def _fail(self, deferred: DeferredSend, error: RayMQError) -> None:
        """Finish a deferred message with the reason why it is not sent."""
        deferred.fail(error)
        self._failed.append(deferred)
        if self._hooked is not None:
            self._hooked.after_send(deferred.message, error)

    async def __aenter__(self) -> AsyncProducer:
        self._bind()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            await self.close(None if kind is None else FAILED_EXIT_S)
        except RayMQError:
            # A failure of the block itself must not be hidden by a failure that the block caused.
            if kind is None:
                raise


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    # No task waits in a closed loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
