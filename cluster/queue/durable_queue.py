"""`raymq.Queue`: what `ray.util.queue.Queue` does, on a durable log (design D9, D11)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.queue import Empty, Full

from raymq.cluster.arguments import check_number, check_text
from raymq.cluster.messages import codecs
from raymq.cluster.paths import NAMESPACE, actor_name, coordinator_name
from raymq.store.clock import Clock
from raymq.store.errors import Corrupt, OffsetOutOfRange, RayMQError, Rejected, Unavailable

from .coordinator import CoordinatorActor
from .items import Items
from .local_socket import WAIT_S as DOOR_WAIT_S
from .local_socket import NotLocal, door_of
from .log import make_topics
from .queue_client import PATIENCE_S, QueueClient, attach, end_quietly, not_in_this_ray

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: calls of the keeper at a time: each getter and putter that waits is one
_CALLS_MAX = 10_000
#: a getter or putter that waits asks anew after so long: what one that died leaves behind is gone then
WAIT_S = 5.0
RETRY_MS = 100
#: what an error is about that has no keeper to tell it
_KEEPER = "keeper"
#: what an error is about that a damaged item causes
_ITEM = "item"


@dataclass
class _Ask:
    """A request for items: asked again with its number it gets the same ones."""

    request: int
    count: int


class Queue:
    """A first-in, first-out queue that survives what `ray.util.queue.Queue` does not.

    Same methods, arguments and exceptions (`ray.util.queue.Empty` and `Full`), for drivers, tasks and
    actors; a handle pickles into them. Items are messages of topic `name`: they survive the creator,
    every process of the queue and of the cluster, and Ray itself. A queue of that name in the same
    cluster, opened by anybody at any time, goes on where it stood.

    What differs from the original:

    - An item is what the codec takes: by default msgpack (None, bool, int, float, str, bytes, lists
      and dicts of them; tuples come back as lists). Anything else raises Rejected at `put`. Nothing that is
      stored is ever unpickled by RayMQ; a codec of your own, an object with `name`, `encode` and
      `decode`, may do what it likes with the bytes. Items of other codecs are refused unless `accept` names them.
    - `put` returns when the item is stored as the cluster promises. It raises what a send raises:
      DeliveryUnknown means that the item may be there. With `linger_ms` it returns at once, and items
      travel in batches: what is under way dies with the process, and a failure is raised by a later
      `put`, by `flush` or by `shutdown`.
    - `get` removes an item when it was given to this call, durably, before it returns. Each item is given to
      one call. If the keeper (one small actor a queue) or the cluster dies on the way, the call goes on with
      the same request number and gets the same item: none is lost, none is given twice. A get that
      raises or is cancelled leaves its number with this handle, and its next get of as many items brings
      what was given. Only an item that was given to a process that died before or while using it is gone
      from the queue, as in the original; a waiting `get` that dies can take one with it up to 5 s later.
      It is still in the topic, until its file is deleted: a Consumer of `name` reads items that were taken, too.
    - Items are deleted like all messages, taken or not: 72 hours after they were put, or as `raymq start
      --file-reserved-hours` says, when their file is full. `get` goes on behind them.
    - `maxsize` belongs to the handle and its copies: their puts raise Full, or wait, when the queue
      holds so many, and then `linger_ms` is not used. It may be exceeded by what is on its way while
      the keeper restarts; the room of a putter that died is free after 150 s.
    - `shutdown` ends the keeper, not the data; any handle's next call starts one again.
    - Every item is synced to disk, and that it was given as well: a get takes at least as long as a put, and batches
      of some thousands are slower than the original's, which keeps them in memory; benchmarks/queue.py measures both.
    - Calls that need not wait go to the keeper by a Unix socket where it is on the same host, else by Ray.
    - A batch is stored in parts, of about 1 MiB, or 4 MiB with `linger_ms`: one that fails may be there in part.
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
        """Open the queue, made if there is none.

        Args: `name` is that of its topic. `cluster`: None means `raymq.connect()`. `maxsize`: items,
        0 for no limit. `codec`: bytes, json, msgpack, arrow-ipc, or an object as above. `accept`: names of further
        codecs whose items `get` decodes; of others it raises Rejected. Plain bytes are always taken. `linger_ms`: 0
        makes each `put` wait until its item is stored. `actor_options`: of the keeper, if this call
        starts it.
        Raises: Rejected for a bad name or option, or a topic that has several queues; Unavailable.
        """
        check_text("name", name)
        check_number("maxsize", maxsize, 0)
        check_number("linger_ms", linger_ms, 0, whole=False)
        accept = tuple(accept)
        for each in accept:
            codecs.codec(each)
        own = cluster is None
        if cluster is None:
            from raymq.cluster.start import connect

            cluster = connect()
        self.name = name
        self.maxsize = maxsize
        self._cluster = cluster
        self._given_codec = codec
        self._accept = accept
        self._linger_ms = linger_ms
        self._actor_options = dict(actor_options or {})
        self._begin()
        self._shard = make_topics(cluster, name)
        if own:
            # Nothing else is asked of the handle here.
            cluster.close()
        # Started now: its process takes a second.
        _ = self.actor

    def _begin(self) -> None:
        """What a copy in another process has not."""
        given = self._given_codec
        self._codec = codecs.codec(given) if isinstance(given, str) else given
        #: of each item
        self._properties = {codecs.CONTENT_TYPE: self._codec.name}
        self._lock = threading.Lock()
        self._link_made: QueueClient | None = None
        self._door = door_of(self._cluster, self.name)
        self._actor: Any = None
        #: numbers of gets that did not end
        self._owed: list[_Ask] = []
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "name",
            "maxsize",
            "_cluster",
            "_given_codec",
            "_accept",
            "_linger_ms",
            "_actor_options",
            "_shard",
        )
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<Queue {self.name!r} of {self._cluster!r}>"

    # --- connections ----------------------------------------------------------------------------

    @property
    def actor(self) -> Any:
        """The handle of the queue's keeper, started if it does not run."""
        self._check_open()
        attach(self._cluster)
        with self._lock:
            if self._actor is None:
                self._actor = self._start_keeper()
            return self._actor

    def _start_keeper(self) -> Any:
        self._check_running()
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": _CALLS_MAX,
            "lifetime": "detached",
            "enable_task_events": False,
            **self._actor_options,
            # A call is asked again by its number, here.
            "max_task_retries": 0,
            "name": coordinator_name(self._cluster.name, self.name),
            "namespace": NAMESPACE,
            "get_if_exists": True,
        }
        keeper = ray.remote(CoordinatorActor).options(**options)
        return keeper.remote(self._cluster, self.name, self._shard)

    def _check_running(self) -> None:
        """A cluster that was stopped gets no keeper, which nobody would end.

        Raises: Unavailable. Of a cluster that was found by raymq:// nobody knows in which Ray it runs.
        """
        if self._cluster.data_dir is None and self._cluster.transport != "ray":
            return
        leader = actor_name(self._cluster.name, self._shard, 0, "commit_log")
        try:
            ray.get_actor(leader, namespace=NAMESPACE)
        except ValueError as error:
            raise Unavailable(
                f"queue {self.name!r}: {not_in_this_ray(self._cluster)}", field=_KEEPER
            ) from error

    def _lost_keeper(self, error: Exception, until: float) -> None:
        """It died or cannot be reached: look it up again, or give up."""
        if isinstance(error, Unavailable) and error.fields.get("field") != _KEEPER:
            # It answers: its shard does not.
            raise error
        with self._lock:
            self._actor = None
        if Clock().monotonic() > until:
            raise Unavailable(
                f"queue {self.name!r}: its keeper does not answer for {PATIENCE_S:g} s: {error}",
                field=_KEEPER,
            ) from error

    def _submit(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """A call of the keeper, sent."""
        known = self._actor
        try:
            return getattr(self.actor, method).remote(*arguments)
        except RayMQError:
            raise
        except Exception:
            # This process left the Ray in which it was looked up, perhaps for another one.
            if known is None:
                raise
        with self._lock:
            self._actor = None
        return getattr(self.actor, method).remote(*arguments)

    def _call(self, method: str, *arguments: Any, wait_s: float | None = None) -> Any:
        """Ask the keeper; `wait_s` is the last argument of what may wait."""
        self._check_open()
        if wait_s is not None:
            arguments = (*arguments, wait_s)
        if wait_s is None or wait_s <= DOOR_WAIT_S:
            with contextlib.suppress(NotLocal):
                return self._door.call(method, *arguments)
        until = Clock().monotonic() + PATIENCE_S
        while True:
            try:
                return ray.get(self._submit(method, arguments))
            except (ray.exceptions.RayActorError, Unavailable) as error:
                self._lost_keeper(error, until)
            Clock().sleep_ms(RETRY_MS)

    async def _call_async(self, method: str, *arguments: Any) -> Any:
        until = Clock().monotonic() + PATIENCE_S
        while True:
            try:
                return await self._submit(method, arguments)
            except (ray.exceptions.RayActorError, Unavailable) as error:
                self._lost_keeper(error, until)
            await asyncio.sleep(RETRY_MS / 1000)

    def _link(self) -> QueueClient:
        self._check_open()
        with self._lock:
            link = self._link_made
            if link is None or link.process != os.getpid():
                link = QueueClient(
                    self._cluster, self.name, self._shard, self._linger_ms, self._codec.name
                )
                self._link_made = link
                # Also at the end of the program: what lingers is sent.
                weakref.finalize(self, end_quietly, link)
            return link

    def _check_open(self) -> None:
        if self._closed:
            raise Rejected(
                f"this handle of queue {self.name!r} was shut down; make another Queue",
                field="queue",
                limit="open",
            )

    # --- size -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.size()

    def size(self) -> int:
        """The items in the queue."""
        found: int = self._call("size")
        return found

    def qsize(self) -> int:
        """The items in the queue."""
        return self.size()

    def empty(self) -> bool:
        """Whether the queue is empty."""
        return self.size() == 0

    def full(self) -> bool:
        """Whether the queue holds `maxsize` items or more; never without one."""
        return self.maxsize > 0 and self.size() >= self.maxsize

    # --- put ------------------------------------------------------------------------------------

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item. `block` and `timeout` (seconds) are for a full queue, not for the disk.

        Raises: Full; ValueError for a negative timeout; Rejected; what a send raises.
        """
        body = self._codec.encode(item)
        self._put([body], self._reserve(1, _waits(block, timeout)))

    async def put_async(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """As `put`. A cancelled wait for the receipt takes nothing back."""
        body, properties = self._codec.encode(item), self._properties
        request = await self._reserve_async(1, _waits(block, timeout, WAIT_S))
        link = await self._link_async()
        producer = link.producer
        end = 0
        try:
            out = producer.encode(self.name, body, properties=properties, queue_id=0)
            if producer.take_nowait(out):
                future, _ = producer.collect(out, may_block=False)
            else:
                future = await asyncio.to_thread(
                    producer.send, self.name, body, properties=properties, queue_id=0
                )
            if request is None and self._linger_ms:
                producer.raise_failure()
                return
            end = (await future).offset + 1
        finally:
            self._release(request, end)

    async def _link_async(self) -> QueueClient:
        if self._link_made is not None:
            return self._link()
        return await asyncio.to_thread(self._link)

    def put_nowait(self, item: Any) -> None:
        """As put(item, block=False)."""
        self.put(item, block=False)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Add items in order, all or, when they do not fit, none.

        Raises: Full; TypeError when `items` is not iterable; Rejected; what a send raises.
        """
        if not isinstance(items, Iterable):
            raise TypeError("Argument 'items' must be an Iterable")
        bodies = codecs.encode_all(self._codec, items)
        if bodies:
            self._put(bodies, self._reserve(len(bodies), _waits(False, None)))

    def _put(self, bodies: list[bytes], request: int | None) -> None:
        end = 0
        try:
            link = self._link()
            producer = link.producer
            lingers = request is None and bool(self._linger_ms)
            if len(bodies) == 1:
                sent = producer.send(self.name, bodies[0], properties=self._properties, queue_id=0)
                if not lingers:
                    end = sent.result().offset + 1
            elif lingers:
                link.send_lingering(bodies)
            else:
                parts = link.send_parts(bodies)
                end = [part.result() for part in parts][-1].last_offset + 1
            if lingers:
                producer.raise_failure()
        finally:
            self._release(request, end, near=True)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything put by this handle, with `linger_ms`, is stored; seconds.

        Raises: the first failure that no caller has seen; TimeoutError when the time is up.
        """
        if self._link_made is not None:
            self._link().producer.flush(timeout)

    # --- room -----------------------------------------------------------------------------------

    def _reserve(self, count: int, waits: Iterator[float]) -> int | None:
        """ByteLimiter for `count` items; None when there is no limit. Raises: Full."""
        if self.maxsize <= 0:
            return None
        request = _number()
        self._check_fits(count)
        for wait_s in waits:
            if self._call("reserve", request, count, self.maxsize, wait_s=wait_s):
                return request
        raise Full(f"queue {self.name!r} has no room for {count} of its {self.maxsize} items")

    async def _reserve_async(self, count: int, waits: Iterator[float]) -> int | None:
        if self.maxsize <= 0:
            return None
        request = _number()
        for wait_s in waits:
            if await self._call_async("reserve", request, count, self.maxsize, wait_s):
                return request
        raise Full(f"queue {self.name!r} has no room for {count} of its {self.maxsize} items")

    def _check_fits(self, count: int) -> None:
        if count > self.maxsize:
            raise Full(f"{count} items never fit into queue {self.name!r} of {self.maxsize}")

    def _release(self, request: int | None, end: int, *, near: bool = False) -> None:
        """Give room back, through the door where one may wait for a moment."""
        if request is None:
            return
        # A failure is not the put's, which may have stored its items: the room comes free by itself at last.
        with contextlib.suppress(Exception):
            if near:
                with contextlib.suppress(NotLocal):
                    self._door.call("release", request, end)
                    return
            self._submit("release", (request, end))

    # --- get ------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the next item; `timeout` in seconds, None for ever.

        Raises: Empty; ValueError for a negative timeout; Unavailable when keeper or shard cannot be
        reached for long; Rejected for an item of a codec that is not known here; Corrupt, once, for a damaged item.
        """
        return self._take(1, _waits(block, timeout))[0]

    async def get_async(self, block: bool = True, timeout: float | None = None) -> Any:
        """As `get`. What is given to a cancelled call is given to the next one of this handle."""
        ask = self._next_ask(1)
        try:
            for wait_s in _waits(block, timeout, WAIT_S):
                found = await self._call_async("take", ask.request, 1, wait_s)
                if found is not None:
                    link = await self._link_async()
                    return self._decode(await asyncio.to_thread(self._read, link, *found))[0]
        except BaseException as error:
            self._keep(ask, error)
            raise
        raise Empty

    def get_nowait(self) -> Any:
        """As get(block=False)."""
        return self.get(block=False)

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take exactly `num_items` items.

        Raises: Empty when there are fewer; TypeError; ValueError when it is negative; as `get`.
        """
        if not isinstance(num_items, int):
            raise TypeError("Argument 'num_items' must be an int")
        if num_items < 0:
            raise ValueError("'num_items' must be nonnegative")
        return self._take(num_items, _waits(False, None)) if num_items else []

    def _take(self, count: int, waits: Iterator[float]) -> list[Any]:
        ask = self._next_ask(count)
        try:
            for wait_s in waits:
                found = self._call("take", ask.request, count, wait_s=wait_s)
                if found is not None:
                    return self._decode(self._read(self._link(), *found))
        except BaseException as error:
            self._keep(ask, error)
            raise
        raise Empty(f"queue {self.name!r} has not {count} items")

    def _next_ask(self, count: int) -> _Ask:
        with self._lock:
            for ask in self._owed:
                if ask.count == count:
                    self._owed.remove(ask)
                    return ask
        return _Ask(_number(), count)

    def _keep(self, ask: _Ask, error: BaseException) -> None:
        """A get did not end: what was given to it is not lost to this handle."""
        if isinstance(error, RayMQError) and error.fields.get("field") in ("codec", _ITEM):
            return
        if isinstance(error, OffsetOutOfRange):
            # They were deleted before they were read: there is nothing to ask for again.
            return
        with self._lock:
            self._owed.append(ask)
        if isinstance(error, asyncio.CancelledError):
            # Nothing more need be given to it.
            with contextlib.suppress(Exception):
                self._submit("forget", (ask.request,))

    def _read(self, link: QueueClient, first: int, count: int) -> list[Items]:
        """Items that were given. Raises: Corrupt when one is damaged; as `QueueClient.read`."""
        try:
            return link.read(first, count)
        except Corrupt as error:
            raise Corrupt(
                f"{error.message}. The item was taken from queue {self.name!r}, with those that were asked for with "
                "it, and is still in the topic",
                **{**error.fields, "field": _ITEM},
            ) from error

    def _decode(self, pieces: list[Items]) -> list[Any]:
        """Items by the codec that each names. Raises: Rejected when one cannot be decoded here."""
        items: list[Any] = []
        for piece in pieces:
            row = 0
            try:
                # Neighbours share a codec as a rule.
                for name, run in itertools.groupby(piece.codecs):
                    decode = self._codec_of(name).decode
                    for _ in run:
                        items.append(decode(piece.bodies[row]))
                        row += 1
            except Exception as error:
                # Of a codec that is the user's own, anything.
                offset = piece.first + row
                raise Rejected(
                    f"the item at offset {offset} of {self.name!r} cannot be decoded: {error}. It was taken from the "
                    "queue, with those that were asked for with it, and is still in the topic",
                    field="codec",
                    limit=self._codec.name,
                    offset=offset,
                ) from error
        return items

    def _codec_of(self, name: str | None) -> codecs.Codec:
        """The codec that an item names, if this handle takes it: any producer may name any. Raises: Rejected."""
        if name == self._codec.name:
            return self._codec
        plain = codecs.BytesCodec.name
        if name is None or name == plain or name in self._accept:
            return codecs.codec(name or plain)
        allowed = ", ".join(dict.fromkeys((self._codec.name, *self._accept, plain)))
        raise Rejected(
            f"it names codec {name!r}, and this handle takes {allowed}; open the queue with accept=[{name!r}]",
            field="codec",
            limit=allowed,
        )

    # --- end ------------------------------------------------------------------------------------

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """Send what lingers, then end the keeper; items stay in the log. Twice does nothing.

        `force`: at once, and what lingers is dropped. The keeper has nothing to lose in either case.
        Raises: the first failure of a put that nobody was told yet.
        """
        if self._closed:
            return
        self._closed = True
        self._door.close()
        link, self._link_made = self._link_made, None
        try:
            if link is not None:
                link.close(0 if force else None)
        except RayMQError:
            if not force:
                raise
        finally:
            self._end_keeper(None if force else grace_period_s)

    def _end_keeper(self, grace_s: float | None) -> None:
        """End it, if it runs: none is started to be ended."""
        try:
            attach(self._cluster)
            keeper = ray.get_actor(
                coordinator_name(self._cluster.name, self.name), namespace=NAMESPACE
            )
        except (RayMQError, ValueError):
            return
        if grace_s is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(keeper.close.remote(), timeout=grace_s)
        ray.kill(keeper, no_restart=True)


def _waits(block: bool, timeout: float | None, first_s: float = DOOR_WAIT_S) -> Iterator[float]:
    """How long to wait at the keeper, call by call, `first_s` first, until the time is up.

    Raises: ValueError, at once, for a negative timeout.
    """
    if not block:
        return iter((0.0,))
    if timeout is not None and timeout < 0:
        raise ValueError("'timeout' must be a non-negative number")
    return _slices(timeout, first_s)


def _slices(timeout: float | None, first_s: float) -> Iterator[float]:
    if timeout is None:
        yield first_s
        while True:
            yield WAIT_S
    until = Clock().monotonic() + timeout
    yield min(timeout, first_s)
    while (left := until - Clock().monotonic()) > 0:
        yield min(left, WAIT_S)


def _number() -> int:
    return secrets.randbits(63)
