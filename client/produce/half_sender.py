"""Sends half messages, and ends them: each by a call of its shard's leader, repeated until it is answered."""

from __future__ import annotations

import random
import threading
import uuid
from base64 import b64encode
from functools import partial
from typing import Any

from raymq.client.arguments import check_choice
from raymq.client.handle import ClusterHandle
from raymq.client.messages.message import Message
from raymq.client.messages.partitioner import queue_of
from raymq.client.transport.ask import may_have_run, search_pauses
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, DeliveryUnknown, RayMQError, Rejected, Unavailable
from raymq.store.base.format import check_group_name, format_host
from raymq.store.base.status import PutStatus
from raymq.store.records.keys import UNIQ_KEY
from raymq.store.records.properties import TAGS, decode

from .call_threads import CallThreads
from .half_future import HalfFuture
from .half_id import CLUSTER_DIGITS, HalfId
from .half_message import HalfMessage
from .message_batcher import MessageBatcher
from .message_encoder import EncodedMessage
from .producer_config import closed_error

#: half messages of one producer that are under way at the same time. Further ones wait
THREADS_MAX = 16
#: the same by calls of actors, which have four threads for all operations of all clients
RAY_THREADS_MAX = 2
DECISIONS = ("commit", "rollback")


class HalfSender:
    """The half messages of a producer. Threads: any."""

    def __init__(self, cluster: ClusterHandle, batcher: MessageBatcher, clock: Clock) -> None:
        """Args: `batcher`: of the same producer, which has its limits, its topics and its outcomes."""
        self.cluster_id = cluster.cluster_id
        self._cluster = cluster
        self._batcher = batcher
        self._clock = clock
        self._lock = threading.Lock()
        self._made_routes: Routes | None = None
        threads = RAY_THREADS_MAX if cluster.transport == "ray" else THREADS_MAX
        self._threads = CallThreads(threads, "raymq-half-messages")
        #: future -> whether its call has begun, in the order of the sends
        self._unanswered: dict[HalfFuture, bool] = {}
        #: topic -> queue of the next message without a key
        self._next_queue: dict[str, int] = {}
        #: no call is repeated any more
        self._ending = threading.Event()

    @property
    def routes(self) -> Routes:
        """The ways to the leaders, with connections that stay open. Raises: Rejected when the producer is closed."""
        self.check_open()
        with self._lock:
            if self._made_routes is None:
                self._made_routes = Routes.of(self._cluster, keeps_connections=True)
            return self._made_routes

    def check_open(self) -> None:
        """Raises: Rejected when the producer is closed, and in a forked child."""
        self._batcher.batch_sender.check_process()
        if self._batcher.closed or self._ending.is_set():
            raise closed_error()

    @property
    def in_own_process(self) -> bool:
        """Whether this is not a forked child."""
        return self._batcher.batch_sender.in_own_process

    # --- sending ----------------------------------------------------------------------------------

    def send(
        self,
        topic: str | Message,
        body: object,
        *,
        group: str,
        queue_id: int | None,
        **fields: Any,
    ) -> HalfFuture:
        """See `Producer.send_half`. Args: `fields`: of the message, as `MessageEncoder.encode` takes them."""
        check_group_name(group)
        self.check_open()
        check_may_be_half(topic)
        message = self._batcher.encoder.encode(topic, body, queue_id=queue_id, **fields)
        route, queue_id = self._place(message)
        request = self._request(message, queue_id, group)

        self._batcher.acquire(message.size)
        with self._batcher.limiter.released_on_error(message.size):
            future = HalfFuture(message.size, self._batcher.callbacks)
            self._batcher.batch_sender.expect(future)
        with self._lock:
            self._unanswered[future] = False
        try:
            self._threads.run(partial(self._send, future, route.shard_of(queue_id), request))
        except RayMQError as error:
            self._settle(future, error)
            future.note_seen()
            raise
        return future

    def _place(self, message: EncodedMessage) -> tuple[TopicRoute, int]:
        """The topic of a message, and its queue. Raises: Rejected; Unavailable."""
        route = self._batcher.batch_sender.topic(message.topic)
        if route.is_compacted:
            raise Rejected(
                f"topic {route.name} is compacted, and a half message has no place among its keys: send it to another "
                "topic, or by send once the transaction has ended",
                field="topic",
                limit="a topic that is not compacted",
                found=route.name,
            )
        if message.is_null or route.values.schema is not None:
            route.values.check_body(message.body, is_null=message.is_null)

        queue_id = message.queue_id
        if queue_id is not None:
            route.shard_of(queue_id)
            # The wire takes no other integers, such as numpy's.
            return route, int(queue_id)
        if message.key is not None:
            return route, queue_of(message.key, route.queues)
        with self._lock:
            queue_id = self._next_queue.get(route.name, random.randrange(route.queues))
            self._next_queue[route.name] = (queue_id + 1) % route.queues
        return route, queue_id % route.queues

    def _request(self, message: EncodedMessage, queue_id: int, group: str) -> dict[str, object]:
        """The arguments of `prepare_half`."""
        properties = decode(message.properties or b"")
        if message.tag is not None:
            properties[TAGS] = message.tag
        # By its key the shard knows a request that comes again.
        properties[UNIQ_KEY] = uuid.uuid4().hex.upper()
        request: dict[str, object] = {
            "topic": message.topic,
            "queue_id": queue_id,
            "group": group,
            "body": b64encode(message.body).decode(),
            "properties": properties,
            "born_time_ms": self._clock.now_ms(),
        }

        if message.head is not None:
            flag, sys_flag, born_host = message.head
            request |= {"flag": flag, "sys_flag": sys_flag}
            if born_host is not None:
                request["born_host"] = format_host(born_host)
        return request

    def _send(self, future: HalfFuture, shard: int, request: dict[str, object]) -> None:
        """Send a half message. Callers: a thread of its own."""
        with self._lock:
            if self._ending.is_set():
                return
            self._unanswered[future] = True
        try:
            outcome: HalfMessage | RayMQError = self._prepare(shard, request)
        except RayMQError as error:
            outcome = error
        except BaseException as error:
            # Without an outcome its caller would wait for ever.
            outcome = Bug(f"a half message: {error!r}")
        self._settle(future, outcome)

    def _settle(self, future: HalfFuture, outcome: HalfMessage | RayMQError) -> None:
        with self._lock:
            self._unanswered.pop(future, None)
        self._batcher.batch_sender.settle(future, outcome)

    def _prepare(self, shard: int, request: dict[str, object]) -> HalfMessage:
        """Store a half message. Raises: DeliveryUnknown if it may be stored; otherwise the error of the last try."""
        tries = _Tries()
        try:
            stored = self._repeat(shard, "prepare_half", request, tries)
        except RayMQError as error:
            if not tries.may_have_run:
                raise
            raise DeliveryUnknown(
                f"the half message may or may not be stored ({error}): if it is, the producers of group "
                f"{request['group']} are asked about it",
                status=error.fields.get("status", PutStatus.UNKNOWN_ERROR.value),
                append=None,
                topic=request["topic"],
                queue_id=request["queue_id"],
                shard=shard,
            ) from error

        place = HalfId(
            self.cluster_id[:CLUSTER_DIGITS],
            shard,
            int(stored["offset"]),
            int(stored["physical_offset"]),
            str(request["group"]),
        )
        return HalfMessage(
            id=place.text,
            topic=str(stored["topic"]),
            queue_id=int(stored["queue_id"]),
            transaction_id=str(stored["transaction_id"]),
            _end=self.end,
        )

    # --- ending -----------------------------------------------------------------------------------

    def end(self, half_id: str, decision: str, limit_s: float | None = None) -> bool:
        """See `Producer.end_half`. Args: `limit_s`: how long to repeat it; None: `delivery_timeout_ms`."""
        self.check_open()
        half = HalfId.of(half_id, self.cluster_id)
        check_choice("decision", decision, DECISIONS)
        self._check_shard(half)
        end = {
            "offset": half.offset,
            "group": half.group,
            "decision": decision,
            "physical_offset": half.physical_offset,
        }

        tries = _Tries()
        try:
            answer = self._repeat(half.shard, "end_half", end, tries, limit_s)
        except Unavailable as error:
            if not tries.may_have_run:
                raise
            raise DeliveryUnknown(
                f"the {decision} of half message {half_id} may or may not be stored ({error}): the same call again "
                "says whether it is",
                status=PutStatus.UNKNOWN_ERROR.value,
                append=None,
            ) from error
        return not answer["is_repeated"]

    def _check_shard(self, half: HalfId) -> None:
        """Raises: Rejected for a shard that the cluster does not have: it would be looked for until the time is up."""
        routes = self.routes
        if half.shard not in routes.known_shards():
            # It may have been added since.
            routes.learn_shards([half.shard])
        if half.shard not in routes.known_shards():
            raise Rejected(
                f"half message {half.text} is on shard {half.shard}, which this cluster does not have",
                field="half_id",
                limit=max(routes.known_shards(), default=-1),
                found=half.shard,
            )

    def _repeat(
        self,
        shard: int,
        op: str,
        args: dict[str, object],
        tries: _Tries,
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """Call an operation until it is answered, or the time is up. Raises: as the last try."""
        config, routes = self._batcher.config, self.routes
        limit_s = config.delivery_timeout_ms / 1000 if limit_s is None else limit_s
        until_s = self._clock.monotonic() + limit_s
        pauses = search_pauses()
        while True:
            left_s = max(0.1, until_s - self._clock.monotonic())
            timeout_s = min(config.request_timeout_ms / 1000, left_s)
            pause_s = next(pauses) / 1000
            try:
                return routes.call(shard, op, args, timeout_s, on_failed=tries.note)
            except (Unavailable, DeliveryUnknown) as error:
                tries.note(error)
                is_late = self._clock.monotonic() + pause_s >= until_s
                if is_late or self._ending.wait(pause_s):
                    raise

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail what is under way: `flush` before, to have its outcome. A second call changes nothing."""
        with self._lock:
            self._ending.set()
            left, routes = list(self._unanswered.items()), self._made_routes
        for future, has_begun in left:
            self._settle(future, _not_answered(has_begun=has_begun))

        # A process that leaves Ray during a call of these threads would die.
        self._threads.close(joins=self._cluster.transport == "ray")
        if routes is not None:
            routes.close()


def _not_answered(*, has_begun: bool) -> RayMQError:
    """The error of a half message that is under way when the producer is closed."""
    if not has_begun:
        return Unavailable(
            "the producer was closed before the half message was sent; nothing was stored"
        )
    return DeliveryUnknown(
        "the producer was closed before the half message had an answer; it may or may not be stored",
        status=PutStatus.UNKNOWN_ERROR.value,
        append=None,
    )


class _Tries:
    """Whether a call without a good answer may have run. Threads: any."""

    def __init__(self) -> None:
        self.may_have_run = False

    def note(self, error: RayMQError) -> None:
        """Take note of a try that failed."""
        if may_have_run(error):
            self.may_have_run = True


def check_may_be_half(topic: str | Message) -> None:
    """Raises: Rejected for a Message with fields that a half message cannot have."""
    if not isinstance(topic, Message):
        return
    for name, default, advice in (
        ("deliver_at_ms", None, "commit it when its time has come"),
        ("delay_level", 0, "commit it when its time has come"),
        ("wait_store_ok", True, "its receipt always waits"),
    ):
        found = getattr(topic, name)
        if found != default:
            raise Rejected(
                f"the message has {name} {found!r}, and a half message is neither delayed nor answered early: leave it "
                f"out; {advice}",
                field=name,
                limit=repr(default),
                found=found,
            )
