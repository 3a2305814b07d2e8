"""`Workers`: processes of a group share the messages of topics, and settle each message alone."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, TypeVar

from typing_extensions import Unpack

from raymq.client import forks
from raymq.client.arguments import check_choice, check_number, takes_options_of, wait_s
from raymq.client.consume.wanted_topics import WantedTopics
from raymq.client.handle import ClusterHandle
from raymq.client.messages.topic_values import TopicValues
from raymq.client.topics.retry_topics import create_retry_topic
from raymq.client.transport.routes import Routes
from raymq.client.unclosed import OpenClient, warn_unclosed
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.groups.leases.options import LEASE_OFFSETS_MAX
from raymq.store.state.topics import dlq_topic, retry_topic

from .held import HeldPart
from .leased import LeasedBatch, LeasedMessage, leased_messages
from .shard_session import ShardSession
from .worker_state import WorkerState
from .workers_config import WorkersConfig, WorkersOptions

#: how often a call that waits looks whether a shard is away for too long
LOOK_S = 1.0
#: how long `close` waits for settlements under way
CLOSE_TIMEOUT_S = 5.0

SettleMode = Literal["wait", "pipelined"]

_Found = TypeVar("_Found")


class Workers(OpenClient):
    """Leases messages of topics to this process, one by one or in batches. `Cluster.workers` makes one.

    All workers of a group share the messages of all queues: each message goes to one of them, which *holds* it for
    `lease_s`, and settles it. A message that is not settled in time, because its process died for example, goes to
    another worker. Threads may share an object: each call gets other messages. It does not pickle or survive a fork:
    pickle the Cluster instead. Close it, or use it as a context manager.

    Example:
        ```python
        import raymq

        with raymq.connect() as cluster:
            cluster.create_topic("emails", queues=4)
            with cluster.producer() as producer:
                producer.send("emails", b"welcome alice").result(timeout=30)
            with cluster.workers("emails", group="mailers") as workers:
                for message in workers:
                    with message:
                        print(message.body)
                    break
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
            After more, something that all messages need is probably down. The group is paused there: its workers get
            nothing, as from an empty queue, and log a warning, until `Cluster.resume_group`.
        start: where the group begins with a queue of which it has settled nothing: "earliest" (default) or "latest".
        auto_extend: whether a thread renews the leases of this process at a third of `lease_s` (default True), so that
            long work loses no message.
        unavailable_timeout_ms: milliseconds for which a shard may be unreachable before a call raises Unavailable
            (default 30,000).
        clock: the source of time, for tests.

    Guarantees:
        Each message is settled once, durably: acknowledged, dead, or passed over by the filter. Until then it is
        delivered again, and what was acknowledged is not, also after a failure of any process. Attempts are exact. Two
        workers do not hold one message at the same time, if clocks run at rates that differ by less than a tenth. A
        message may be worked on twice: when its worker loses the lease, `ack` raises Fenced.

    Raises:
        Rejected: an unknown topic, a bad option, or options that other workers of the group do not have.
        Corrupt: a stored message is damaged. It is settled, and the next call goes on.
        Unavailable: a shard is unreachable for longer than `unavailable_timeout_ms`.
    """

    made_as = ("worker", "workers")
    #: what `get` returns
    _message_class: type[LeasedMessage] = LeasedMessage
    _batch_class: type[LeasedBatch] = LeasedBatch

    @takes_options_of(WorkersConfig)
    def __init__(
        self,
        cluster: ClusterHandle,
        topics: str | Sequence[str],
        *,
        clock: Clock | None = None,
        **options: Unpack[WorkersOptions],
    ) -> None:
        """Find the topics. Messages are leased from the first call on that wants some."""
        config = WorkersConfig(**options)
        config.check_values()
        wanted = WantedTopics(topics)
        if wanted.pattern:
            raise Rejected(
                "workers have no pattern; give the name of a topic, or a list of names",
                field="topics",
                limit="a name or a list of names",
            )
        self.group = config.group
        #: how warnings call this object
        self.name = type(self).__name__
        self._topics = wanted.names
        self._config = config
        self._clock = clock or Clock()
        self._forks = forks.count
        self._state = WorkerState(config.prefetch, config.max_in_flight)
        self._sessions: dict[int, ShardSession] = {}
        #: topic -> how its messages are typed, as it was when this object was made
        self._values: dict[str, TopicValues] = {}

        self._routes = Routes.of(cluster, keeps_connections=True)
        try:
            for name in wanted.names:
                self._values[name] = self._routes.topics.find(name).values
            for name in (retry_topic(config.group), dlq_topic(config.group)):
                create_retry_topic(cluster, name)
            self._add_shards()
        except BaseException:
            self._end()
            self._routes.close()
            raise
        self._state.look_for_queues = _looks_for_queues(self)

    @property
    def settle_mode(self) -> SettleMode:
        """What settlements return: "wait" (default): nothing, when they are durable. "pipelined": a future, at once.

        Settlements that wait together make one call. Raises: Rejected for another value.
        """
        return "pipelined" if self._state.settle_mode == "pipelined" else "wait"

    @settle_mode.setter
    def settle_mode(self, mode: SettleMode) -> None:
        check_choice("settle_mode", mode, ("wait", "pipelined"))
        self._state.settle_mode = mode

    # --- messages ---------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> LeasedMessage | None:
        """Lease a message. Wait up to `timeout` seconds while there is none; None (default): without limit.

        Returns: the message; None when the time is up.

        Raises:
            Rejected: options that other workers of the group do not have; or these workers are closed.
            Corrupt: a stored message is damaged. It is settled, and the next call goes on.
            Unavailable: a shard is unreachable for longer than `unavailable_timeout_ms`.
        """
        return self._await(1, self.take_message, timeout)

    def get_batch(self, max_records: int = 500, timeout: float | None = None) -> LeasedBatch:
        """Lease up to `max_records` messages of one queue (default 500, 1 to 65,536), as Arrow columns.

        Wait up to `timeout` seconds while there is none; None (default): without limit. The batch is empty when the
        time is up. It may have fewer messages than there are: a call takes 4 MiB at most.

        Raises: as `get`.
        """
        check_number("max_records", max_records, 1, LEASE_OFFSETS_MAX)
        return (
            self._await(max_records, lambda: self.take_batch(max_records), timeout)
            or self.empty_batch()
        )

    def __iter__(self) -> Iterator[LeasedMessage]:
        """Iterate over messages, each as `get` returns it, until these workers are closed. Raises: as `get`."""
        while not self._state.closed:
            try:
                message = self.get(LOOK_S)
            except Rejected:
                if self._state.closed:
                    return
                raise
            if message is not None:
                yield message

    def _await(
        self, most: int, take: Callable[[], _Found | None], timeout: float | None
    ) -> _Found | None:
        """What `take` finds, once there is something; None: the time is up."""
        self._check_process()
        limit_s = wait_s(timeout)
        deadline_s = None if limit_s is None else self._clock.monotonic() + limit_s
        state = self._state

        is_wanted = False
        try:
            while True:
                with state.lock:
                    if not is_wanted:
                        state.want(most)
                        is_wanted = True
                    found = take()
                    left_s = LOOK_S
                    if deadline_s is not None:
                        left_s = min(LOOK_S, deadline_s - self._clock.monotonic())
                    if found is not None or left_s <= 0:
                        state.want_no_more(most)
                        is_wanted = False
                        break
                    wakeup = state.blocked.block()
                state.blocked.sleep(wakeup, left_s)
        finally:
            if is_wanted:
                with state.lock:
                    state.want_no_more(most)
        state.share()
        return found

    # --- what asynchronous workers use, too -------------------------------------------------------

    def take_message(self) -> LeasedMessage | None:
        """A message that is here; None: there is none. Raises: as `get`."""
        state = self._state
        with state.lock:
            part = self._first_part()
            if part is None:
                return None
            if part.messages is None:
                part.messages = leased_messages(part, self._message_class)
            return part.messages[state.take_one(part)]

    def take_batch(self, max_records: int) -> LeasedBatch | None:
        """A batch of messages that are here; None: there are none. Raises: as `get`."""
        with self._state.lock:
            part = self._first_part()
            if part is None:
                return None
            taken = self._state.take_many(part, max_records)
        return self._batch_class(taken, self._values_of(taken.key[0]))

    def empty_batch(self) -> LeasedBatch:
        """A batch without messages."""
        return self._batch_class(None, self._values_of(self._topics[0]))

    @contextlib.contextmanager
    def waiting(self, most: int) -> Iterator[None]:
        """So many messages are wanted during the block."""
        self._check_process()
        with self._state.lock:
            self._state.want(most)
        try:
            yield
        finally:
            with self._state.lock:
                self._state.want_no_more(most)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have a function called when messages arrive, on any thread. It must not block."""
        with self._state.lock:
            self._state.listener = listener

    def _first_part(self) -> HeldPart | None:
        """The first messages that wait. Needs the lock. Raises: why there are none, if that does not pass by itself."""
        part = None
        if not self._state.closed:
            part = self._state.first_held(self._clock.monotonic_ms())
        if part is None:
            self._check_failures()
        return part

    def _check_failures(self) -> None:
        """Raises: why there is no message. Needs the lock."""
        state = self._state
        if state.closed:
            raise Rejected("the workers are closed", field="workers", limit="open")
        if state.faults:
            raise state.faults.popleft()
        if state.fatal_error is not None:
            raise state.fatal_error
        limit_ms = self._config.unavailable_timeout_ms
        for shard, (since_ms, error) in state.down.items():
            if self._clock.monotonic_ms() - since_ms > limit_ms:
                raise Unavailable(
                    f"shard {shard} has been unreachable for more than {limit_ms:g} ms: {error}",
                    shard=shard,
                ) from error

    def _values_of(self, topic: str) -> TopicValues:
        # The group's retry topic has messages of all topics, so that their bodies are bytes.
        return self._values.get(topic, TopicValues(""))

    # --- shards -----------------------------------------------------------------------------------

    def _add_shards(self) -> None:
        """Lease from all shards that have a queue of the topics, as far as is known. Callers: any thread."""
        found = {shard for name in self._topics for shard in self._routes.topics.find(name).shards}
        state = self._state
        for shard in sorted(found - self._sessions.keys()):
            session = ShardSession(
                self._routes, shard, self._topics, self._config, state, self._clock
            )
            with state.lock:
                self._sessions[shard] = session
                if state.closed:
                    session.restart()

    def _check_process(self) -> None:
        if forks.count != self._forks:
            raise Rejected(
                "these workers were made in another process; make others after the fork",
                field="fork",
                limit="one process",
            )

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what the program did not get, and wait for settlements under way, up to 5 s.

        Messages that the program has got and not settled are delivered again when their leases end. In a forked child
        it does nothing.
        """
        if forks.count != self._forks or self._state.closed:
            return
        unread = self._end()
        deadline_s = self._clock.monotonic() + CLOSE_TIMEOUT_S
        for session in list(self._sessions.values()):
            session.close(unread, max(0.0, deadline_s - self._clock.monotonic()))
        self._routes.close()

    def _end(self) -> list[HeldPart]:
        """Let nothing more be leased. Returns: what the program did not get."""
        state = self._state
        with state.lock:
            state.closed = True
            unread, state.ready_count = list(state.ready), 0
            state.ready.clear()
            for session in self._sessions.values():
                session.restart()
            state.report(is_over=True)
        return unread

    def __del__(self) -> None:
        state: WorkerState | None = self.__dict__.get("_state")
        # None: the program ends, and Python has cleared this module.
        if state is None or state.closed or forks is None or forks.count != self._forks:
            return
        if not sys.is_finalizing():
            # The collector may run on any thread, so it must not wait.
            self._end()
            for session in self._sessions.values():
                session.abandon()
        warn_unclosed(self, self.name, "use it in a with block, or call close()")

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _looks_for_queues(workers: Workers) -> Callable[[], None]:
    """A look for queues on further shards. It does not keep the workers alive: threads run until they are collected."""
    weak = weakref.ref(workers)

    def add() -> None:
        found = weak()
        if found is not None and not found._state.closed:
            found._add_shards()

    def look() -> None:
        found = weak()
        if found is not None:
            found._routes.topics.look_for_queues(add)

    return look
