"""What the processors need of the shards: puts, fetches and calls, for an event loop.

All three go through `client/`, which follows the leaders. Where this server runs is a matter of wiring.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from raymq.client.client_thread import ClientThread
from raymq.client.handle import ClusterHandle
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.queue_sequence import BatchReceipt
from raymq.client.produce.send_future import BatchFuture
from raymq.client.produce.shard_sender import ShardSender
from raymq.client.topics.retry_topics import create_retry_topic
from raymq.client.transport.connection import FetchStream
from raymq.client.transport.flight_client import CALL_TIMEOUT_S
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.errors import (
    Bug,
    RayMQError,
    Rejected,
    TopicDeleted,
    TopicMissing,
    Unavailable,
)
from raymq.store.records.record import SmallBatch, batch_bytes
from raymq.store.records.requests import FetchRequest, FetchSlice

from .fetch_turns import FetchTurns
from .queue_read_ahead import QueueReadAhead
from .topology import BrokerQueues

Found = TypeVar("Found")

logger = logging.getLogger("raymq.rocketmq")

#: threads for calls of shards
CALL_THREADS = 16
#: threads for those that tools ask for: a shard that is slow must not let them take the threads of clients
TOOL_THREADS = 4
#: threads for calls about half messages, which wait for a durable put
TRANSACTION_THREADS = 16
#: streams to each shard, which answer one fetch at a time each
FETCH_STREAMS = 4
#: how often topics are looked up again that others may have changed. Clients ask for a route every 30 s
LOOK_AGAIN_S = 5.0
#: a client waits 3 s for the answer to a send, all its tries together
SEND_TIMEOUT_MS = 2_500


class Shards:
    """The shards of a cluster. Callers: one event loop, but for `close`."""

    def __init__(self, handle: ClusterHandle, loop: asyncio.AbstractEventLoop) -> None:
        self.handle = handle
        self._loop = loop
        self._routes = Routes.of(handle, keeps_connections=True)
        self._sender = BatchSender(
            self._routes,
            request_timeout_ms=SEND_TIMEOUT_MS,
            delivery_timeout_ms=SEND_TIMEOUT_MS,
            max_block_ms=0,
        )
        self._calls = ThreadPoolExecutor(CALL_THREADS, "raymq-rocketmq-call")
        self._tool_calls = ThreadPoolExecutor(TOOL_THREADS, "raymq-rocketmq-tool")
        self._transactions = ThreadPoolExecutor(TRANSACTION_THREADS, "raymq-rocketmq-transaction")

        self._fetches: dict[int, _FetchPool] = {}
        self._tool_fetches: dict[int, _FetchPool] = {}
        self._reads: dict[int, _Reads] = {}
        #: also those of `for_tools`
        self._all_reads = [self._reads]
        self._topics: dict[str, BrokerQueues] = {}
        self._look_ups: dict[str, asyncio.Task[TopicRoute]] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._looked_s = loop.time()
        #: a write may block while its shard is slow, and must not hold up those of others
        self._writers: dict[ShardSender, _Writer] = {}

    def for_tools(self) -> Shards:
        """The same shards, for what tools ask: their calls have threads of their own. Close the first one only."""
        shared = copy.copy(self)
        shared._calls = self._tool_calls
        # A tool may read each queue of a topic. Pulls do not wait for that.
        shared._fetches, shared._reads = self._tool_fetches, {}
        self._all_reads.append(shared._reads)
        return shared

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self.handle.name

    @property
    def count(self) -> int:
        """How many shards there are."""
        return self.handle.shards

    @property
    def delay_levels(self) -> int:
        """How many delay levels there are."""
        return self.handle.delay_levels

    # --- topics -----------------------------------------------------------------------------------

    async def topic(self, name: str) -> BrokerQueues:
        """The queues of a topic. Raises: TopicMissing; Unavailable."""
        self._look_again()
        route = self._routes.topics.cached(name)
        if route is None:
            # One question for all that wait, which go on in their order.
            asked = self._look_ups.get(name)
            if asked is None:
                asked = self._look_ups[name] = self._loop.create_task(
                    self.in_thread(self._routes.topics.find, name)
                )
                asked.add_done_callback(lambda _: self._look_ups.pop(name, None))
            route = await asyncio.shield(asked)
        known = self._topics.get(name)
        if known is None or known.route is not route:
            known = self._topics[name] = BrokerQueues(route)
        return known

    def _look_again(self) -> None:
        """Look all topics up in the background, if that was not done lately: others add queues, and delete topics."""
        now_s = self._loop.time()
        if not self._looks and now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s = now_s
            look = self._loop.create_task(self._look_at_all())
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def _look_at_all(self) -> None:
        try:
            await self.in_thread(self._routes.topics.matching, _no_topic)
        except RayMQError as error:
            # The routes that are known stay. Those who need another one meet the error.
            logger.info("topics could not be looked up again: %s", error)

    async def stop(self) -> None:
        """End what `topic` and `read` do in the background. Callers: before `close`, when no request is left."""
        looks = list(self._looks)
        for look in looks:
            look.cancel()
        await asyncio.gather(
            *looks, *(each.turns.stop() for each in self._reads.values()), return_exceptions=True
        )

    async def topics(self) -> dict[str, dict[str, Any]]:
        """All topics that users see, as `ClusterHandle.topics`. Raises: Unavailable."""
        return await self.in_thread(self.handle.topics)

    def forget_topic(self, name: str) -> None:
        """Look a topic up again when it is needed next: it has changed, or has gone."""
        self._routes.topics.forget([name])
        for reads in self._all_reads:
            for each in reads.values():
                each.ahead.forget_topic(name)

    async def create_retry_topic(self, name: str) -> None:
        """Make a topic with a queue on each shard, unless there is one. Raises: RayMQError."""
        await self.in_thread(create_retry_topic, self.handle, name)

    # --- calls ------------------------------------------------------------------------------------

    async def call(
        self, shard: int, op: str, args: Mapping[str, object], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Call an operation of a shard's leader. Raises: RayMQError."""
        self._check(shard)
        return await self.in_thread(self._routes.call, shard, op, args, timeout_s)

    async def call_transaction(
        self, shard: int, op: str, args: Mapping[str, object]
    ) -> dict[str, Any]:
        """Do as `call`, of operations on half messages: others do not wait for their puts. Raises: RayMQError."""
        self._check(shard)
        call = partial(self._routes.call, shard, op, args, SEND_TIMEOUT_MS / 1000)
        return await self._loop.run_in_executor(self._transactions, call)

    def _check(self, shard: int) -> None:
        """Refuse a shard that does not exist: a call of one would look for its leader until its time is up."""
        if not 0 <= shard < self.count:
            raise Rejected(
                f"the cluster has the shards 0 to {self.count - 1}, not {shard}: ask for the route again",
                field="brokerName",
                limit=self.count - 1,
                found=shard,
            )

    async def in_thread(self, work: Callable[..., Found], *args: object) -> Found:
        """Do something that blocks."""
        return await self._loop.run_in_executor(self._calls, partial(work, *args))

    # --- puts -------------------------------------------------------------------------------------

    def put(
        self,
        topic: str,
        queue_id: int,
        batch: SmallBatch,
        on_done: Callable[[BatchReceipt | RayMQError], None],
    ) -> None:
        """Put a batch of one queue. `on_done` is called in the event loop, once.

        Raises: Rejected for a batch that cannot be stored; Unavailable when too much waits for answers.
        """
        size = batch_bytes(batch)
        if not self._sender.limiter.acquire_nowait(size):
            raise Unavailable("too many bytes wait for their shard; send again a little later")
        with self._sender.limiter.released_on_error(size):
            future = BatchFuture(batch.num_rows, size)
            future.add_done_callback(
                lambda _: self._loop.call_soon_threadsafe(on_done, _outcome(future))
            )
            shard_sender = self._sender.enqueue(topic, queue_id, batch, future=future)
        writer = self._writers.get(shard_sender)
        if writer is None:
            writer = self._writers[shard_sender] = _Writer(shard_sender)
        writer.wake()

    # --- fetches ----------------------------------------------------------------------------------

    async def read(self, shard: int, request: FetchRequest) -> FetchSlice | None:
        """Read one queue of a shard, together with others. Returns: None: nothing is there. Raises: RayMQError."""
        reads = self._reads.get(shard)
        if reads is None:
            turns = FetchTurns(partial(self.fetch, shard), self._loop)
            reads = self._reads[shard] = _Reads(turns, QueueReadAhead(turns.read, self._loop))
        return await reads.ahead.read(request)

    async def fetch(self, shard: int, request: FetchRequest) -> list[FetchSlice]:
        """Read queues of a shard. Raises: RayMQError."""
        self._check(shard)
        # Of a name whose topics were deleted, the shard must know which one is read.
        generations = self._routes.topics.generations([request.topic])
        request = request._replace(generations=generations)
        pool = self._fetches.get(shard)
        if pool is None:
            pool = self._fetches[shard] = _FetchPool(self._routes, shard)
        parts = await self._loop.run_in_executor(pool.threads, pool.fetch, request)
        if any(isinstance(part.error, (TopicDeleted, TopicMissing)) for part in parts):
            # The next request looks for another topic of its name.
            self.forget_topic(request.topic)
        return parts

    def close(self) -> None:
        """End all. What was put and has no answer fails."""
        self._sender.close()
        for writer in self._writers.values():
            writer.end()
        for pool in (*self._fetches.values(), *self._tool_fetches.values()):
            pool.close()
        for threads in (self._calls, self._tool_calls, self._transactions):
            threads.shutdown(wait=False, cancel_futures=True)
        self._routes.close()


class _Reads(NamedTuple):
    """The reads of one shard."""

    turns: FetchTurns
    ahead: QueueReadAhead


class _Writer:
    """A thread that writes the batches of one shard."""

    def __init__(self, shard_sender: ShardSender) -> None:
        self._shard_sender = shard_sender
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        ClientThread(self._run, "raymq-rocketmq-send").start()

    def wake(self) -> None:
        """There is something to write."""
        self._wakeups.put(True)

    def end(self) -> None:
        """End the thread."""
        self._wakeups.put(False)

    def _run(self) -> None:
        while self._wakeups.get():
            try:
                self._shard_sender.write_ready()
            except Exception:
                # Without this thread no send to the shard would ever be answered.
                logger.exception("the sends to a shard")


class _FetchPool:
    """Threads that fetch from one shard, each over a stream of its own."""

    def __init__(self, routes: Routes, shard: int) -> None:
        self._routes = routes
        self._shard = shard
        self.threads = ThreadPoolExecutor(FETCH_STREAMS, f"raymq-rocketmq-fetch-{shard}")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._streams: set[FetchStream] = set()
        self._is_closed = False

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Fetch once, and once more over a new stream if that of before has ended. Raises: RayMQError."""
        stream = getattr(self._own, "stream", None)
        if stream is not None:
            try:
                return stream.fetch(request)  # type: ignore[no-any-return]
            except RayMQError:
                self._drop(stream)
        stream = self._open()
        try:
            return stream.fetch(request)
        except BaseException:
            self._drop(stream)
            raise

    def _open(self) -> FetchStream:
        stream = self._routes.fetch_stream(self._shard)
        with self._lock:
            self._streams.add(stream)
            self._own.stream = stream
            if not self._is_closed:
                return stream
        self._drop(stream)
        raise Unavailable("the server is closed")

    def _drop(self, stream: FetchStream) -> None:
        self._own.stream = None
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            streams, self._streams = self._streams, set()
        for stream in streams:
            stream.abort()
        self.threads.shutdown(wait=False, cancel_futures=True)


def _no_topic(name: str) -> bool:
    return False


def _outcome(future: BatchFuture) -> BatchReceipt | RayMQError:
    error = future.exception()
    if error is None:
        return future.result()
    if future.failure is not None:
        # It is answered to the client that sent it.
        future.failure.observed = True
    return error if isinstance(error, RayMQError) else Bug(f"a put: {error!r}")
