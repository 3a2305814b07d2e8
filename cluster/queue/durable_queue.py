"""`raymq.Queue`: the calls of `ray.util.queue.Queue` on a durable log."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ray.util.queue import Empty, Full

from raymq.client.arguments import check_number, check_text
from raymq.client.messages import codecs
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError

from .assignment_log import make_topics
from .coordinator_calls import CoordinatorCalls
from .local_socket import WAIT_S as SOCKET_WAIT_S
from .local_socket import NotLocal
from .queue_client import QueueClient, end_quietly
from .taken_items import BadItem, TakenItems

#: longest wait of one call: the coordinator forgets the request of a dead process after it
WAIT_S = 5.0


@dataclass
class _Request:
    """A request for items. Repeated under the same number, it gets the same items."""

    number: int
    count: int


class Queue:
    """A first-in, first-out queue with the calls of `ray.util.queue.Queue`, whose items survive every process.

    Methods, arguments and exceptions (`ray.util.queue.Empty` and `Full`) are those of the original. Drivers, tasks and
    actors share a queue, because a handle pickles. A handle that is opened by name anywhere continues where the queue
    is. Items are messages of topic `name`, so they outlive their creator, the cluster's processes and Ray.

    Each queue has one small actor, its coordinator, which assigns items to gets. On the coordinator's own host, calls
    that need not wait reach it through a Unix socket. All other calls go through Ray.

    Example:
        ```python
        import raymq

        jobs = raymq.Queue("jobs")
        jobs.put({"page": 7})
        print(jobs.get(timeout=10))
        jobs.shutdown()
        ```

    Args:
        name: the queue's topic, created with one queue if it is missing.
        cluster: the cluster that stores the items; None (default) means `raymq.connect()`.
        maxsize: the queue is full with this many items; 0 (default) means no limit. A limit belongs to this handle and
            its copies, and costs one more call of the coordinator per put. Puts then ignore `linger_ms`.
        codec: how items become bytes: "msgpack" (default), "json", "bytes", "arrow-ipc", or an object with `name`,
            `encode` and `decode`. msgpack takes None, bool, int, float, str, bytes, and lists and dicts of them. Tuples
            come back as lists, in keys of dicts as tuples. RayMQ itself never unpickles stored bytes.
        accept: names of further codecs whose items `get` decodes. Plain bytes are always accepted.
        linger_ms: 0 (default) makes each `put` wait until its item is stored. Otherwise `put` returns at once and items
            travel in batches, at most this many milliseconds later. Items in flight are lost with the process, and a
            failure is raised by a later `put`, by `flush` or by `shutdown`.
        actor_options: Ray's options for the coordinator, used if this handle starts it.

    Guarantees:
        A put that returned (with `linger_ms=0`) is stored as the cluster promises.

        Each item is assigned to one get, durably, before that get returns, so that a get takes at least as long as a
        put. If the coordinator or the cluster dies before that, the call continues under the same request number and
        gets the same item. When a get raises or is cancelled, the next get of as many items by this handle returns its
        items. When one item of a batch is damaged or cannot be decoded, the next gets of this handle return the others.

        An item is lost from the queue only if the process that got it dies, as in the original. A waiting `get` whose
        process dies can take one item with it up to 5 s later. The item is still in the topic, and a Consumer of `name`
        reads it until its file is deleted. That happens 72 hours after the put, or as `start(file_reserved_hours=...)`
        says.

        A batch is stored in parts of about 1 MiB (4 MiB with `linger_ms`), so a batch that fails may be stored in part.

        `maxsize` may be exceeded by puts in flight while the coordinator restarts. The room of a put whose process died
        is free after 150 s.

    Raises:
        Rejected: a bad name or option, an item that the codec does not take (at `put`), or a topic with several queues.
        Unavailable: the cluster does not answer.
        DeliveryUnknown: a `put` whose item may or may not be stored.
    """

    def __init__(
        self,
        name: str,
        *,
        cluster: Cluster | None = None,
        maxsize: int = 0,
        codec: str | codecs.Codec = "msgpack",
        accept: Iterable[str] = (),
        linger_ms: float = 0,
        actor_options: dict[str, Any] | None = None,
    ) -> None:
        """Open the queue, and create its topics and its coordinator if they are missing."""
        check_text("name", name)
        check_number("maxsize", maxsize, 0)
        check_number("linger_ms", linger_ms, 0, whole=False)

        accept = tuple(accept)
        for each in accept:
            codecs.codec(each)

        own = cluster is None
        if cluster is None:
            from raymq.cluster.connect import connect

            cluster = connect()

        self.name = name
        self.maxsize = maxsize
        self._cluster = cluster
        self._codec_option = codec
        self._accept = accept
        self._linger_ms = linger_ms
        self._actor_options = dict(actor_options or {})

        self._begin()
        self._shard = make_topics(cluster, name)
        if own:
            # The handle needs no further answer from the cluster here.
            cluster.close()
        self._coordinator = self._make_coordinator()
        # The coordinator's process takes a second to start.
        _ = self.actor

    def _make_coordinator(self) -> CoordinatorCalls:
        return CoordinatorCalls(self._cluster, self.name, self._shard, self._actor_options)

    def _begin(self) -> None:
        """Create the attributes that are not pickled."""
        codec = self._codec_option
        self._codec = codecs.codec(codec) if isinstance(codec, str) else codec
        self._taken = TakenItems(self.name, self._codec, self._accept)
        #: properties of every item
        self._properties = {codecs.CONTENT_TYPE: self._codec.name}
        self._lock = threading.Lock()
        self._clock = Clock()
        self._known_client: QueueClient | None = None
        #: requests of gets that did not finish
        self._unfinished: list[_Request] = []
        #: the items that were taken together with one that could not be returned
        self._left: deque[Any | BadItem] = deque()

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "name",
            "maxsize",
            "_cluster",
            "_codec_option",
            "_accept",
            "_linger_ms",
            "_actor_options",
            "_shard",
        )
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
        self._coordinator = self._make_coordinator()

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} of {self._cluster!r}>"

    # --- connections ------------------------------------------------------------------------------

    @property
    def actor(self) -> Any:
        """The handle of the coordinator, which is started if it does not run."""
        return self._coordinator.actor

    def _client(self) -> QueueClient:
        self._coordinator.check_open()
        with self._lock:
            client = self._known_client
            if client is None or client.process != os.getpid():
                client = QueueClient(
                    self._cluster, self.name, self._shard, self._linger_ms, self._codec.name
                )
                self._known_client = client
                # Lingering items are sent at the end of the program too.
                weakref.finalize(self, end_quietly, client)
            return client

    def _wait_times(
        self, block: bool, timeout: float | None, first_s: float = SOCKET_WAIT_S
    ) -> Iterator[float]:
        """How long each call waits at the coordinator: `first_s` first, until the time is up.

        Raises: ValueError, at once, for a negative timeout, and for NaN.
        """
        if not block:
            return iter((0.0,))
        if timeout is not None and not timeout >= 0:
            raise ValueError("'timeout' must be a non-negative number")
        return self._wait_times_until(math.inf if timeout is None else timeout, first_s)

    def _wait_times_until(self, timeout: float, first_s: float) -> Iterator[float]:
        until_s = self._clock.monotonic() + timeout
        yield min(timeout, first_s)
        while (left := until_s - self._clock.monotonic()) > 0:
            yield min(left, WAIT_S)

    # --- size -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.size()

    def size(self) -> int:
        """Number of items in the queue."""
        size: int = self._coordinator.call("size")
        return size

    def qsize(self) -> int:
        """Number of items in the queue."""
        return self.size()

    def empty(self) -> bool:
        """Whether the queue is empty."""
        return self.size() == 0

    def full(self) -> bool:
        """Whether the queue holds `maxsize` items or more; False without a limit."""
        return self.maxsize > 0 and self.size() >= self.maxsize

    # --- put --------------------------------------------------------------------------------------

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item. `block` and `timeout` (seconds) are for a full queue, not for the disk.

        Raises:
            Full: the queue has no room in time.
            ValueError: the timeout is negative.
            Rejected: the item cannot be encoded or stored.
            RayMQError: as `raymq.Producer.send`.
        """
        body = self._codec.encode(item)
        self._put([body], self._reserve(1, self._wait_times(block, timeout)))

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Like `put`. Cancelling the wait for the receipt does not remove the item."""
        body, properties = self._codec.encode(item), self._properties
        request = await self._reserve_async(1, self._wait_times(block, timeout, WAIT_S))
        end = 0
        try:
            batcher = (await self._client_async()).batcher
            message = batcher.encoder.encode(self.name, body, properties=properties, queue_id=0)
            if batcher.limiter.acquire_nowait(message.size):
                future, _ = batcher.add(message, may_block=False)
            else:
                future = await asyncio.to_thread(batcher.send, message)

            if request is None and self._linger_ms:
                batcher.batch_sender.raise_failure()
                return
            end = (await future).offset + 1
        finally:
            self._release(request, end)

    async def _client_async(self) -> QueueClient:
        if self._known_client is not None:
            return self._client()
        return await asyncio.to_thread(self._client)

    def put_nowait(self, item: Any) -> None:
        """Like put(item, block=False)."""
        self.put(item, block=False)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Add items in order: all of them, or none when they do not fit.

        Raises:
            Full: the queue has no room for all of them.
            TypeError: `items` is not iterable.
            Rejected: an item cannot be encoded or stored.
            RayMQError: as `raymq.Producer.send`.
        """
        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        bodies = codecs.encode_all(self._codec, items)
        if bodies:
            self._put(bodies, self._reserve(len(bodies), self._wait_times(False, None)))

    def _put(self, bodies: list[bytes], request: int | None) -> None:
        end = 0
        try:
            client = self._client()
            batcher = client.batcher
            lingers = request is None and bool(self._linger_ms)

            if len(bodies) == 1:
                message = batcher.encoder.encode(
                    self.name, bodies[0], properties=self._properties, queue_id=0
                )
                sent = batcher.send(message)
                if not lingers:
                    end = sent.result().offset + 1
            elif lingers:
                client.send_lingering(bodies)
            else:
                receipts = [part.result() for part in client.send_parts(bodies)]
                end = receipts[-1].last_offset + 1

            if lingers:
                batcher.batch_sender.raise_failure()
        finally:
            self._release(request, end, near=True)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every item put by this handle with `linger_ms` is stored. `timeout` is in seconds.

        Raises: the first failure that no caller has seen, or TimeoutError when the time is up.
        """
        if self._known_client is not None:
            batcher = self._client().batcher
            batcher.flush(timeout)
            batcher.batch_sender.raise_failure()

    # --- room -------------------------------------------------------------------------------------

    def _reserve(self, count: int, waits: Iterator[float]) -> int | None:
        """Reserve room for `count` items; None when there is no limit. Raises: Full."""
        if self.maxsize <= 0:
            return None
        request = _new_number()
        self._check_fits(count)
        try:
            for wait_s in waits:
                if self._coordinator.call("reserve", request, count, self.maxsize, wait_s=wait_s):
                    return request
        except BaseException:
            # Ctrl-C or an alarm: the room would be kept for 150 s.
            self._release(request, 0)
            raise
        raise Full(f"queue {self.name!r} has no room for {count} of its {self.maxsize} items")

    async def _reserve_async(self, count: int, waits: Iterator[float]) -> int | None:
        if self.maxsize <= 0:
            return None
        request = _new_number()
        try:
            for wait_s in waits:
                options = (request, count, self.maxsize, wait_s)
                if await self._coordinator.call_async("reserve", *options):
                    return request
        except BaseException:
            # Cancelled: the room would be kept for 150 s.
            self._release(request, 0)
            raise
        raise Full(f"queue {self.name!r} has no room for {count} of its {self.maxsize} items")

    def _check_fits(self, count: int) -> None:
        if count > self.maxsize:
            raise Full(f"{count} items never fit into queue {self.name!r} of {self.maxsize}")

    def _release(self, request: int | None, end: int, *, near: bool = False) -> None:
        """Release reserved room, by the local socket if the caller may block for a moment."""
        if request is None:
            return
        # A failure says nothing about the put, which may have stored its items. The room is free after 150 s anyway.
        with contextlib.suppress(Exception):
            if near:
                with contextlib.suppress(NotLocal):
                    self._coordinator.call_nearby("release", request, end)
                    return
            self._coordinator.submit("release", request, end)

    # --- get --------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the next item. `timeout` is in seconds, None waits without limit.

        Raises:
            Empty: no item came in time.
            ValueError: the timeout is negative.
            Unavailable: the coordinator or the shard cannot be reached for 60 s.
            Rejected: the item has a codec that this handle does not accept, or cannot be decoded.
            Corrupt: the item is damaged. Either is raised once, and the next call takes the next item.
        """
        return self._take(1, self._wait_times(block, timeout))[0]

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """Like `get`. Items assigned to a cancelled call go to the next get of this handle."""
        left = self._take_left(1)
        if left:
            return left[0]

        request = self._next_request(1)
        try:
            for wait_s in self._wait_times(block, timeout, WAIT_S):
                taken = await self._coordinator.call_async("take", request.number, 1, wait_s)
                if taken is not None:
                    client = await self._client_async()
                    items = self._taken.decode(
                        await asyncio.to_thread(self._taken.pieces, client, *taken)
                    )
                    break
            else:
                raise Empty
        except BaseException as error:
            self._keep_request(request, error)
            raise
        return self._returned(items)[0]

    def get_nowait(self) -> Any:
        """Like get(block=False)."""
        return self.get(block=False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take exactly `num_items` items.

        Raises:
            Empty: the queue has fewer items.
            TypeError: `num_items` is not an int.
            ValueError: `num_items` is negative.
            RayMQError: as `get`.
        """
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        return self._take(num_items, self._wait_times(False, None)) if num_items else []

    def _take(self, count: int, waits: Iterator[float]) -> list[Any]:
        left = self._take_left(count)
        if len(left) == count:
            return left

        request = self._next_request(count - len(left))
        try:
            for wait_s in waits:
                taken = self._coordinator.call("take", request.number, request.count, wait_s=wait_s)
                if taken is not None:
                    items = self._taken.decode(self._taken.pieces(self._client(), *taken))
                    break
            else:
                raise Empty(f"queue {self.name!r} has fewer than {count} items")
        except BaseException as error:
            self._keep_request(request, error)
            self._leave(left)
            raise
        return self._returned([*left, *items] if left else items)

    def _take_left(self, count: int) -> list[Any]:
        """Up to `count` of the items that an earlier get left. Raises: the error of one of them; the others stay."""
        if not self._left:
            return []
        with self._lock:
            left = [self._left.popleft() for _ in range(min(count, len(self._left)))]
        return self._returned(left)

    def _leave(self, items: Iterable[Any]) -> None:
        """Keep items for the next gets of this handle."""
        with self._lock:
            self._left.extendleft(reversed(list(items)))

    def _returned(self, items: list[Any]) -> list[Any]:
        """The items. Raises: the first error among them; the others are left for the next gets."""
        for row, item in enumerate(items):
            if type(item) is BadItem:
                self._leave([*items[:row], *items[row + 1 :]])
                raise item.error
        return items

    def _next_request(self, count: int) -> _Request:
        with self._lock:
            for request in self._unfinished:
                if request.count == count:
                    self._unfinished.remove(request)
                    return request
        return _Request(_new_number(), count)

    def _keep_request(self, request: _Request, error: BaseException) -> None:
        """Keep the request of a get that did not finish: its items belong to this handle."""
        if isinstance(error, Empty):
            return
        may_repeat = True
        if not isinstance(error, RayMQError):
            # Cancelled, Ctrl-C or an alarm: an item that is put now must not wait for this handle's next get.
            with contextlib.suppress(Exception):
                if isinstance(error, asyncio.CancelledError):
                    # An event loop must not be blocked.
                    self._coordinator.submit("forget", request.number)
                else:
                    may_repeat = self._coordinator.give_up(request.number)
        if may_repeat:
            with self._lock:
                self._unfinished.append(request)

    # --- end --------------------------------------------------------------------------------------

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """Send lingering items, then end the coordinator. Items stay in the log. A second call does nothing.

        `force` drops lingering items and ends the coordinator at once. It has no state to lose. `grace_period_s` is the
        longest wait for its orderly end, in seconds.
        Raises: the first failure of a put that no caller has seen.
        """
        if self._coordinator.closed:
            return
        self._coordinator.close()
        client, self._known_client = self._known_client, None
        try:
            if client is not None:
                client.close(0 if force else None)
        except RayMQError:
            if not force:
                raise
        finally:
            self._coordinator.end(None if force else grace_period_s)


def _new_number() -> int:
    return secrets.randbits(63)
