"""The producer for asyncio: the verbs of `Producer`, awaited; it never blocks the event loop (design D11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn, cast

from raymq.cluster.messages.message import Message, Receipt
from raymq.store.clock import Clock
from raymq.store.errors import Bug, RayMQError, Rejected, Unavailable
from raymq.store.promise import Acks

from .producer import FAILED_EXIT_S, EncodedMessage, Producer
from .producer_config import ProducerConfig
from .queue_sequence import closed_error
from .send_future import AsyncSendFuture, TaskSteps

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.cluster.cluster import Cluster

    from .queue_sequence import BatchReceipt


class DeferredSend(TaskSteps):
    """The receipt of a message that waits for room in the buffer, or for its topic to be looked up."""

    __slots__ = ("_steps", "accepted", "observed", "out", "until")

    def __init__(self, out: EncodedMessage, until: float, loop: asyncio.AbstractEventLoop) -> None:
        self.out = out
        #: when it has waited too long for room, seconds of the loop's clock
        self.until = until
        self.accepted: asyncio.Future[AsyncSendFuture] = loop.create_future()
        #: a caller has seen that it was not accepted
        self.observed = False

    def done(self) -> bool:
        """Whether the receipt is there, or why there is none."""
        accepted = self.accepted
        if not accepted.done():
            return False
        return accepted.exception() is not None or accepted.result().done()

    def __await__(self) -> Generator[Any, None, Receipt]:
        try:
            # Who is cancelled stops to wait; the message goes on.
            future = yield from asyncio.shield(self.accepted).__await__()
        except RayMQError:
            self.observed = True
            raise
        return (yield from future.__await__())

    def fail(self, error: RayMQError) -> None:
        """It will never be sent."""
        self.accepted.set_exception(error)
        # Read here: `flush` tells it, if nobody awaits it.
        self.accepted.exception()


class AsyncProducer:
    """Sends messages from one event loop. Order holds per queue, in the order of the calls.

    One helper thread makes and writes batches, one a shard reads receipts: none a call. It neither pickles
    nor survives a fork. As an asynchronous context manager it flushes at the end and raises the first failure
    that no caller has seen; after an exception in the block it waits at most FAILED_EXIT_S for receipts.
    Errors come when they come of a Producer; `resend` takes what `send` returned.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig | None = None,
        *,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        """Args: `options` are the fields of ProducerConfig."""
        self._producer = Producer(cluster, config, clock=clock, **options)
        self._producer.future_type = AsyncSendFuture
        self._producer.name = type(self).__name__
        self.config = self._producer.config
        self._loop: asyncio.AbstractEventLoop | None = None
        #: topics that need no look-up
        self._known: set[str] = set()
        #: in the order of the calls; while there is one, everything goes behind it
        self._deferred: deque[DeferredSend] = deque()
        self._failed: deque[DeferredSend] = deque(maxlen=1000)
        self._drainer: asyncio.Task[None] | None = None
        self._freed = asyncio.Event()
        self._closed = False
        #: what is deferred now is not sent any more
        self._ending = False

    def __reduce__(self) -> NoReturn:
        raise Rejected(
            "a producer has open connections and does not pickle: pickle the Cluster and call "
            "cluster.async_producer() where it is used",
            field="pickle",
        )

    def send(
        self,
        topic: str | Message,
        body: Any = None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        index_keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        deliver_at_ms: int | None = None,
        queue_id: int | None = None,
        acks: Acks | None = None,
    ) -> Coroutine[Any, Any, Receipt]:
        """Send one message, as `Producer.send`; `await` what it returns for the receipt, or make a task of it.

        It is sent whether it is awaited or not; a wait that is cancelled cancels nothing. Awaiting
        ends the linger time, once everything that is ready in this turn of the loop has been sent:
        `await producer.send(...)` in many tasks makes common batches. With a full buffer the
        message waits its turn for `max_block_ms`, then its await raises Unavailable.
        Raises: Rejected at once for what cannot be stored, or when the producer is closed.
        """
        loop = self._bind()
        out = self._producer.encode(
            topic,
            body,
            key=key,
            tag=tag,
            index_keys=index_keys,
            properties=properties,
            deliver_at_ms=deliver_at_ms,
            queue_id=queue_id,
            acks=acks,
        )
        if not self._deferred and out.topic in self._known and self._producer.take_nowait(out):
            return self._collect(out)
        deferred = DeferredSend(out, loop.time() + self.config.max_block_ms / 1000, loop)
        self._deferred.append(deferred)
        self._start_drain(loop)
        return deferred

    def _collect(self, out: EncodedMessage) -> AsyncSendFuture:
        return cast(AsyncSendFuture, self._producer.collect(out, may_block=False)[0])

    async def resend(self, sent: Coroutine[Any, Any, Receipt]) -> Receipt:
        """Send a message again that raised DeliveryUnknown, with the same sequence number: see `Producer.resend`.

        Args: `sent` is what `send` returned. A cancelled wait does not take it back.
        """
        self._bind()
        if isinstance(sent, DeferredSend) and sent.done():
            sent = sent.accepted.result()
        if not isinstance(sent, AsyncSendFuture):
            raise Rejected("this is not what send returned", field="sent", limit="a send's result")
        return await (await asyncio.to_thread(self._producer.resend, sent))

    def _start_drain(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
        """The task that sends what is deferred; None: nothing is. One that somebody cancelled is replaced."""
        if self._drainer is not None and self._drainer.done():
            self._drainer = None
        if self._drainer is None and self._deferred:
            self._drainer = loop.create_task(self._drain())
        return self._drainer

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise closed_error()
        if self._loop is None:
            self._loop = loop
            freed = self._freed
            self._producer.on_room(lambda: _call_soon(loop, freed.set))
        elif self._loop is not loop:
            raise Rejected(
                "this producer is used in another event loop; make one in each", field="loop"
            )
        return loop

    async def _drain(self) -> None:
        """Send what was deferred, in order."""
        try:
            while self._deferred and not self._ending:
                deferred = self._deferred[0]
                try:
                    deferred.accepted.set_result(await self._accept(deferred))
                except RayMQError as error:
                    deferred.fail(error)
                    self._failed.append(deferred)
                except Exception as error:
                    # Those behind it must not wait for ever.
                    deferred.fail(Bug(f"send: {error!r}"))
                    self._failed.append(deferred)
                self._deferred.popleft()
        finally:
            self._drainer = None

    async def _accept(self, deferred: DeferredSend) -> AsyncSendFuture:
        out = deferred.out
        if out.topic not in self._known:
            # Asks a shard, the first time.
            await asyncio.to_thread(self._producer.look_up, out.topic)
            self._known.add(out.topic)
        while True:
            self._freed.clear()
            if self._ending:
                raise closed_error()
            if self._producer.take_nowait(out):
                return self._collect(out)
            # What lingers must go, or nothing would ever make room.
            self._producer.ship_open_soon()
            left = deferred.until - asyncio.get_running_loop().time()
            if left <= 0:
                raise Unavailable(
                    f"the buffer of {self.config.buffer_bytes} bytes stays full: the cluster is "
                    "slower than this producer; await receipts, or raise buffer_bytes or "
                    "max_block_ms",
                    field="buffer_bytes",
                    limit=self.config.buffer_bytes,
                )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._freed.wait(), left)

    async def send_batch(
        self, topic: str, data: pa.RecordBatch | pa.Table, *, queue_id: int | None = None
    ) -> list[BatchReceipt]:
        """Send columns of messages, as `Producer.send_batch`, and wait for the receipts, one a batch.

        A wait that is cancelled cancels nothing. Raises: as the sends fail.
        """
        loop = self._bind()
        # Behind what was sent before; how that ends is told to those who sent it.
        await self._drained(loop, None)
        futures = await asyncio.to_thread(self._producer.send_batch, topic, data, queue_id=queue_id)
        waits = [asyncio.wrap_future(future) for future in futures]
        return list(await asyncio.shield(asyncio.gather(*waits)))

    def statistics(self) -> dict[str, int | float]:
        """As `Producer.statistics`, and `deferred_messages`: those that wait for room now."""
        return {**self._producer.statistics(), "deferred_messages": len(self._deferred)}

    async def flush(self, timeout: float | None = None) -> None:
        """Send what lingers and wait until every send so far is answered; seconds.

        Raises: the first failure that no caller has seen; TimeoutError when the time is up.
        """
        self._bind()
        await self._await_answers(timeout)
        self._raise_failure()

    async def _await_answers(self, timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + timeout
        if not await self._drained(loop, until):
            raise TimeoutError(
                f"{len(self._deferred)} messages wait for room after {timeout} s; they still do: flush again"
            )
        left = None if until is None else max(0.0, until - loop.time())
        await asyncio.to_thread(self._producer.await_answers, left)

    def _raise_failure(self) -> None:
        """In the loop, not in the thread: a wait that is cancelled has shown nothing."""
        failed = [deferred for deferred in self._failed if not deferred.observed]
        self._failed.clear()
        self._producer.raise_failure()
        for deferred in failed[:1]:
            deferred.accepted.result()

    async def _drained(self, loop: asyncio.AbstractEventLoop, until: float | None) -> bool:
        """Wait until nothing is deferred, up to a time of the loop's clock. Returns: whether that is so."""
        while (drainer := self._start_drain(loop)) is not None:
            left = None if until is None else max(0.0, until - loop.time())
            _, late = await asyncio.wait({drainer}, timeout=left)
            if late:
                return False
        return True

    async def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds, then close; twice does nothing. What has no receipt then fails.

        Raises: the first failure that no caller has seen; it is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(TimeoutError):
                await self._await_answers(timeout)
        finally:
            # Waited for: what it accepts meanwhile is sent, and must not be called unsent.
            self._ending = True
            self._producer.stop_look_ups()
            drainer = self._drainer
            if drainer is not None:
                drainer.cancel()
                await asyncio.wait({drainer})
            for deferred in self._deferred:
                if not deferred.accepted.done():
                    deferred.fail(closed_error())
                    self._failed.append(deferred)
            self._deferred.clear()
            await asyncio.to_thread(self._producer.end, 0)
        self._raise_failure()

    async def __aenter__(self) -> AsyncProducer:
        self._bind()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            await self.close(None if kind is None else FAILED_EXIT_S)
        except RayMQError:
            # A failure of the block itself must not be hidden by one that came of it.
            if kind is None:
                raise


def _call_soon(loop: asyncio.AbstractEventLoop, call: Any) -> None:
    # A loop that was closed meanwhile has nobody who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
