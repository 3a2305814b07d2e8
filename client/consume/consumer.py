"""The consumer: reads queues of topics in order, from given or committed offsets."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from typing_extensions import Unpack

from raymq.client import forks
from raymq.client.arguments import (
    check_choice,
    check_number,
    check_offset,
    plain_int,
    takes_options_of,
    wait_s,
)
from raymq.client.handle import ClusterHandle
from raymq.client.hooks import Hooks
from raymq.client.messages.columns import message_batch, value_batch, value_schema
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.client.messages.topic_values import TopicValues
from raymq.client.times import Time, check_time
from raymq.client.topics.retry_topics import create_retry_topic
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.client.unclosed import OpenClient, warn_unclosed
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, TopicMissing, Unavailable
from raymq.store.base.format import check_group_name
from raymq.store.state.topics import QueueKey, dlq_topic, retry_topic

from .assigned_queues import AssignedQueues
from .consumer_config import ConsumerConfig, ConsumerOptions, Start
from .member_queues import MemberQueues
from .offsets_by_time import ask_offsets
from .selector import selector_of
from .shard_reader import FetchedRecords, ReadState
from .start_offsets import StartOffsets
from .transaction_offsets import OffsetsToCommit
from .wanted_topics import TopicChoice, WantedTopics

#: messages that iteration takes at a time
ITERATED_TOGETHER = 500
#: how often to look whether there is another topic with the name of a deleted one: at first, and later
DELETED_AGAIN_S, DELETED_AGAIN_S_MAX = 1.0, 30.0


class Consumer(OpenClient):
    """Reads a topic or several, all queues or some, in offset order per queue. `Cluster.consumer` makes one.

    Each queue is read from the group's committed offset, else from `start`. One thread per shard reads ahead, at most
    one fetch. `poll` and iteration return messages, `poll_batch` Arrow columns. Offsets are committed only by
    `commit`. One thread may use a consumer at a time. It does not pickle or survive a fork: pickle the Cluster
    instead. Close it, or use it as a context manager.

    Example:
        ```python
        import raymq

        with raymq.connect() as cluster:
            cluster.create_topic("orders", queues=4)
            with cluster.consumer("orders", group="billing", start="earliest") as consumer:
                for message in consumer.poll(max_records=100, timeout=0.2):
                    print(message.queue_id, message.offset, message.body)
                consumer.commit()
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
        on_assigned: of a member, called with [(topic, queue_id)...] that it reads from now on, in the thread of `poll`.
        on_revoked: of a member, called with [(topic, queue_id)...] that it has to give up. It may commit.
        tags: only messages with one of these tags, as in "new || paid"; None (default): all. The shard looks at the
            others, and sends nothing of them.
        sql: only messages for whose properties this SQL92 expression is true, such as "price > 5 AND region IN
            ('eu')"; None (default): all. Either `tags` or `sql`.
        hooks: objects that see each message of `poll` and iteration; default: none. A hook may have the methods
            `before_consume(messages)` and `after_consume(messages, error)`. The first is called before the program gets
            messages, the second when it asks for the next ones, commits or closes. What a hook raises is logged and
            counted, and the program gets its messages.
        clock: the source of time, for tests.

    Guarantees:
        Every message that is returned was compared with its CRC. Messages of one queue come in offset order without
        gaps, except in a compacted topic and with a filter. `position`, and so `commit`, also moves on over messages
        that the filter does not want. An offset that a queue does not hold raises OffsetOutOfRange until `seek`: a
        consumer never jumps.

    Raises:
        Rejected: an unknown topic or queue, a bad option, or `start` is missing. For a wrong `tags` or `sql` it has the
            position of the fault.
        OffsetOutOfRange: a queue does not hold the offset to read. `min` and `max` are its range.
        Corrupt: a stored message is damaged. `seek` after it to continue.
        Unavailable: a shard is unreachable for longer than `unavailable_timeout_ms`.
        Fenced: a newer process with the same `instance_id` has joined; from `commit`: another member has some queues.
    """

    made_as = ("consumer", "consumer")

    @takes_options_of(ConsumerConfig)
    def __init__(
        self,
        cluster: ClusterHandle,
        topic: TopicChoice,
        *,
        clock: Clock | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Find the first offset of each queue and start to read ahead."""
        config = ConsumerConfig(**options)
        config.check_values()
        if config.group is not None:
            check_group_name(config.group)

        self._wanted = WantedTopics(topic)
        #: the topic; with several, their names or the pattern
        self.topic = str(self._wanted)
        self.group = config.group
        self._hooks = Hooks.of(config.hooks)
        #: messages that the program got, and for which the hooks wait to be called again
        self._consumed: Sequence[ReceivedMessage] = ()
        #: how warnings call this consumer
        self.name = type(self).__name__
        self._clock = clock or Clock()
        self._forks = forks.count
        self._cluster = cluster
        #: the shards on which the group's topics for `send_back` have queues
        self._retry_shards: set[int] = set()

        self._routes = Routes.of(cluster, keeps_connections=True)
        #: for topics that come later
        self._start = config.start
        self._look_again_s, self._look_again_pause_s = 0.0, DELETED_AGAIN_S
        self._starts = StartOffsets(self._routes, config.group)
        #: topic -> its queues that are read, if that are all
        self._queue_counts: dict[str, int] = {}
        #: topic -> how its messages are typed. The columns of `poll_batch` stay as they are
        self._values: dict[str, TopicValues] = {}
        if self._wanted.single is not None:
            self._values_of(self._wanted.single)
        state = ReadState(config.fetch_bytes, config.fetch_records, config.unavailable_timeout_ms)
        state.selector = selector_of(config.tags, config.sql)
        state.passes_over_deleted = bool(self._wanted.pattern)
        self._assigned = AssignedQueues(
            self._routes,
            state,
            self._clock,
            read_from=config.read_from,
            unavailable_timeout_ms=config.unavailable_timeout_ms,
        )
        #: None: the consumer has joined no group
        self._member: MemberQueues | None = None
        #: the asynchronous consumer lets its own loop do what the membership asks for
        self.steps_by_itself = True
        try:
            if config.is_member:
                self._join(config, clock)
            else:
                self._read_fixed(config)
        except BaseException:
            self._assigned.end()
            raise

    def _read_fixed(self, config: ConsumerConfig) -> None:
        """Read the queues that the caller names, or all."""
        topics = self._routes.topics
        wanted = self._wanted
        names = topics.matching(wanted.has) if wanted.pattern else wanted.names
        routes = [topics.find(name) for name in names]
        if config.queues is None:
            self._queue_counts = {route.name: route.queues for route in routes}
            keys = [(route.name, each) for route in routes for each in range(route.queues)]
        else:
            # The wire takes no other integers, such as numpy's.
            keys = [(key[0], plain_int(key[1])) for key in map(self._key_of, config.queues)]
            if not keys:
                raise Rejected(
                    "queues is empty; name some, or leave it out", field="queues", limit="1"
                )

        begins = self._begin(keys, config.start)
        if config.queues is None:
            look = partial(topics.look_for_queues, self._weakly())
            self._assigned.state.look_for_queues = look
        self._assigned.add(begins, self._shard_of)

    def _join(self, config: ConsumerConfig, clock: Clock | None) -> None:
        """Become a member of the group, and wait for its first queues."""
        for name in self._wanted.names:
            # The group would wait for a topic that does not exist.
            self._routes.topics.find(name)

        # A strong reference would keep a dropped consumer, and its queues.
        weak = weakref.WeakMethod(self._begin)

        def begin(keys: list[QueueKey]) -> dict[QueueKey, int]:
            begin_claimed = weak()
            return {} if begin_claimed is None else begin_claimed(keys, config.start)

        subscription = self._wanted.subscription()
        self._member = MemberQueues(
            self._routes, subscription, self._assigned, config, clock, begin
        )
        try:
            self._member.await_first(config.unavailable_timeout_ms)
        except BaseException:
            self._member.leave(keeps_place=False)
            raise

    # --- topics and queues ------------------------------------------------------------------------

    def _begin(self, keys: Iterable[QueueKey], start: Start) -> dict[QueueKey, int]:
        """Where queues begin, the committed offsets first. Raises: Rejected, Unavailable."""
        begins: dict[QueueKey, int] = {}
        topics: dict[str, list[int]] = {}
        for topic, queue_id in keys:
            topics.setdefault(topic, []).append(queue_id)
        for topic, queues in topics.items():
            route = self._routes.topics.find(topic)
            found = self._starts.begin(route, queues, start)
            begins.update({(topic, each): offset for each, offset in found.offsets.items()})
            self._assigned.state.chosen.update((topic, each) for each in found.chosen)
        return {key: begins[key] for key in keys}

    def _shard_of(self, key: QueueKey) -> int:
        return self._routes.topics.find(key[0]).shard_of(key[1])

    def _key_of(self, queue: int | QueueKey) -> QueueKey:
        """The queue that a caller names by its id, or with several topics by (topic, id). Raises: Rejected."""
        if isinstance(queue, tuple):
            return queue
        if self._wanted.single is None:
            raise Rejected(
                f"this consumer reads {self.topic}: name a queue as (topic, queue_id), not {queue!r}",
                field="queue_id",
                limit="(topic, queue_id)",
            )
        return self._wanted.single, queue

    def _named(self, values: Mapping[QueueKey, int]) -> dict[Any, int]:
        """The same with the queues' ids as keys, unless there may be several topics."""
        if self._wanted.single is None:
            return dict(values)
        # Another thread may add queues.
        return {queue_id: value for (_, queue_id), value in dict(values).items()}

    def _weakly(self) -> Callable[[], None]:
        """A call of `_read_added` that does not keep this consumer alive: readers run until it is collected."""
        weak = weakref.WeakMethod(self._read_added)

        def call() -> None:
            read_added = weak()
            if read_added is not None:
                read_added()

        return call

    def _read_added(self) -> None:
        """Read the queues that topics have got since, from their first message or where the group was.

        Callers: a thread of the routes. Raises: RayMQError; it is called again.
        """
        if forks.count != self._forks:
            return
        for route in self._routes.topics.known():
            first = self._queue_counts.get(route.name, 0)
            if route.queues > first and self._wanted.has(route.name):
                self._read_added_to(route, first)

    def _read_added_to(self, route: TopicRoute, first: int) -> None:
        """Read the queues of one topic from number `first` on, which it has got since."""
        added = list(range(first, route.queues))
        committed: dict[int, int] = {}
        if self.group is not None:
            committed = self._starts.committed(route.name, map(route.shard_of, added))
        if route.generation:
            # An earlier topic of this name had the offsets before.
            committed = self._starts.first_offsets(route, added) | committed
        begins = {(route.name, queue_id): committed.get(queue_id, 0) for queue_id in added}

        state = self._assigned.state
        with state.changed:
            if state.closed or self._queue_counts.get(route.name, 0) != first:
                return
            self._assigned.add(begins, lambda key: route.shard_of(key[1]))
            self._queue_counts[route.name] = route.queues

    # --- reading ----------------------------------------------------------------------------------

    def poll(self, max_records: int = 500, timeout: float | None = 1.0) -> list[ReceivedMessage]:
        """Return up to `max_records` messages. Wait up to `timeout` seconds while there are none; None: without limit.

        Raises:
            OffsetOutOfRange: a queue does not hold the offset to read.
            Corrupt: a stored message is damaged.
            Unavailable: a shard is unreachable for longer than `unavailable_timeout_ms`.
            Rejected: the shard refuses to serve reads.
        """
        found: list[ReceivedMessage] = []
        taken: list[FetchedRecords] = []
        self.end_consumed()
        try:
            fetched = self._take(taken, max_records, timeout)
            while fetched is not None:
                found += received_messages(fetched.shard, fetched.records)
                left = max_records - len(found)
                fetched = self._take(taken, left, 0.0, ready_only=True) if left > 0 else None
            self._begin_consumed(found)
            return found
        except BaseException:
            # Ctrl-C: the caller gets none of them.
            self._assigned.put_back(taken)
            raise

    def poll_batch(self, max_records: int = 10_000, timeout: float | None = 1.0) -> pa.RecordBatch:
        """Like `poll`, but returns Arrow columns of one queue.

        The columns are topic, shard, queue_id, offset, times, key, tag, body and properties. If the topic had a schema
        when the consumer was made, its columns take the place of body. The batch is empty after the timeout. `body` is
        null for a null value. `properties` are encoded. `raymq.store.decode_properties` reads them.

        Raises: as `poll`. Corrupt: also for a body that is not a row of the schema. The position stays there; `poll`
        returns it as bytes.
        """
        taken: list[FetchedRecords] = []
        self.end_consumed()
        try:
            fetched = self._take(taken, max_records, timeout)
            if fetched is None:
                single = self._wanted.single
                values = TopicValues("") if single is None else self._values_of(single)
                return pa.RecordBatch.from_pylist([], schema=value_schema(values))
            values = self._values_of(fetched.key[0])
            return value_batch(message_batch(fetched.shard, fetched.records), values)
        except BaseException:
            # Corrupt, or Ctrl-C.
            self._assigned.put_back(taken)
            raise

    def _values_of(self, topic: str) -> TopicValues:
        """How a topic's messages are typed, as it was when this consumer first asked."""
        if topic not in self._values:
            try:
                self._values[topic] = self._routes.topics.find(topic).values
            except TopicMissing:
                if topic == self._wanted.single:
                    raise
                # It was deleted, and what was read ahead is left.
                return TopicValues("")
        return self._values[topic]

    def batches(self, max_records: int = 500) -> Iterator[list[ReceivedMessage]]:
        """Iterate over `poll(max_records)` without an end, without the empty ones. Raises: as `poll`."""
        while True:
            messages = self.poll(max_records, timeout=5.0)
            if messages:
                yield messages

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Iterate over messages without an end. `position` and `commit` follow the messages returned so far."""
        while True:
            message = self.next_message(5.0)
            if message is not None:
                yield message

    def next_message(self, timeout: float | None = 1.0) -> ReceivedMessage | None:
        """The next message, or None when there is none within `timeout` seconds. Raises: as `poll`."""
        self._check_process()
        timeout_s = wait_s(timeout)
        if self._hooks is None:
            return self._next_message(timeout_s)

        self.end_consumed()
        message = self._next_message(timeout_s)
        if message is not None:
            try:
                self._begin_consumed([message])
            except BaseException:
                # Ctrl-C: the caller does not get it.
                self._seek((message.topic, message.queue_id), message.offset, is_chosen=True)
                raise
        return message

    def _next_message(self, timeout_s: float | None) -> ReceivedMessage | None:
        if self._wanted.pattern and self._assigned.iterated_queue is None:
            self._look_for_topics()
        if self._member is None:
            return self._assigned.next_message(ITERATED_TOGETHER, timeout_s)
        if not self._member.membership.must_poll:
            return self._next_of_member(self._member, timeout_s)
        with self._member.membership.polling():
            return self._next_of_member(self._member, timeout_s)

    def _next_of_member(
        self, member: MemberQueues, timeout_s: float | None
    ) -> ReceivedMessage | None:
        key = self._assigned.iterated_queue
        if key is None or member.has_news or not member.may_return(key):
            taken: list[FetchedRecords] = []
            try:
                if self._take_as_member(member, taken, ITERATED_TOGETHER, timeout_s) is None:
                    return None
            finally:
                self._assigned.put_back(taken)
            timeout_s = 0.0
        return self._assigned.next_message(ITERATED_TOGETHER, timeout_s)

    # --- hooks ------------------------------------------------------------------------------------

    def _begin_consumed(self, messages: Sequence[ReceivedMessage]) -> None:
        """Call the hooks before the program gets messages."""
        if self._hooks is not None and messages:
            self._hooks.before_consume(messages)
            self._consumed = messages

    def end_consumed(self, error: BaseException | None = None) -> None:
        """Call the hooks after the program is done with the messages that it got. Args: `error`: by which it ended."""
        if self._hooks is not None and self._consumed:
            messages, self._consumed = self._consumed, ()
            self._hooks.after_consume(messages, error)

    @property
    def hook_failures(self) -> int:
        """How many calls of `hooks` raised. The first one of each kind was logged."""
        return 0 if self._hooks is None else self._hooks.failures.count

    def _take(
        self,
        taken: list[FetchedRecords],
        max_records: int,
        timeout: float | None,
        *,
        ready_only: bool = False,
    ) -> FetchedRecords | None:
        """See `AssignedQueues.take`."""
        check_number("max_records", max_records, 1)
        timeout_s = wait_s(timeout)
        self._check_process()
        if self._wanted.pattern:
            self._look_for_topics()
        member = self._member
        if member is None:
            return self._assigned.take(taken, max_records, timeout_s, ready_only=ready_only)
        if not member.membership.must_poll:
            return self._take_as_member(
                member, taken, max_records, timeout_s, ready_only=ready_only
            )
        with member.membership.polling():
            return self._take_as_member(
                member, taken, max_records, timeout_s, ready_only=ready_only
            )

    def _take_as_member(
        self,
        member: MemberQueues,
        taken: list[FetchedRecords],
        max_records: int,
        timeout_s: float | None,
        *,
        ready_only: bool = False,
    ) -> FetchedRecords | None:
        """See `_take`. Queues come and go meanwhile, and nothing is returned of those that another member may have."""
        deadline_s = math.inf if timeout_s is None else self._clock.monotonic() + timeout_s
        while True:
            if ready_only and member.has_news:
                # Messages that were taken already must be returned before their queue is given up.
                return None
            if self.steps_by_itself and not ready_only:
                member.step()

            left_s = max(0.0, deadline_s - self._clock.monotonic())
            wait = None if left_s == math.inf else left_s
            fetched = self._assigned.take(
                taken, max_records, wait, ready_only=ready_only, is_over=lambda: member.has_news
            )

            if fetched is not None:
                if member.may_return(fetched.key):
                    return fetched
                self._assigned.put_back([taken.pop()])
            if ready_only or not left_s or not self.steps_by_itself:
                return None
            if fetched is not None:
                member.wait_until_certain(wait)

    def assignment(self) -> dict[tuple[str, int], int]:
        """(topic, queue id) -> number of the grant, of a member's queues. Empty while it cannot know them.

        The number is never used again. A consumer without membership has 0 for each queue.
        """
        if self._member is None:
            return dict.fromkeys(self._assigned.positions, 0)
        return self._member.membership.assignment()

    @property
    def has_news(self) -> bool:
        """Whether `step` has something to do."""
        if self._member is not None and self._member.has_news:
            return True
        return bool(self._assigned.state.deleted) and self._clock.monotonic() >= self._look_again_s

    def step(self) -> None:
        """Do what the membership asks for, as `poll` does by itself. Raises: as `poll`."""
        if self._assigned.state.deleted:
            self._begin_deleted_again()
        if self._member is not None:
            self._member.step()

    def _look_for_topics(self) -> None:
        """Look for topics of the pattern that were made, or made again, now and then. Raises: RayMQError."""
        if self._assigned.state.deleted and self.steps_by_itself:
            self._begin_deleted_again()
        if self.steps_by_itself or self._routes.transport != "ray":
            # Without any topic there is no reader that does it.
            self._assigned.state.look_for_queues()

    def _begin_deleted_again(self) -> None:
        """Read topics that were made with the names of deleted ones, from their beginning. Raises: RayMQError."""
        if self._clock.monotonic() < self._look_again_s:
            return
        with self._assigned.state.changed:
            deleted = sorted(self._assigned.state.deleted)
        for topic in {topic for topic, _ in deleted}:
            try:
                route = self._routes.topics.find(topic)
                keys = [key for key in deleted if key[0] == topic and key[1] < route.queues]
                begins = self._begin(keys, self._start)
            except (TopicMissing, Unavailable):
                # There is none yet, or not everywhere. A group takes the queues back meanwhile.
                continue
            self._assigned.begin_again(topic, begins)
            self._values.pop(topic, None)
            self._look_again_pause_s = DELETED_AGAIN_S
        self._look_again_s = self._clock.monotonic() + self._look_again_pause_s
        self._look_again_pause_s = min(2 * self._look_again_pause_s, DELETED_AGAIN_S_MAX)

    def on_change(self, call: Callable[[], None]) -> None:
        """Register a listener that any thread calls after a fetch, a failure or the end. It must not block."""
        self._assigned.state.listener = call

    # --- positions --------------------------------------------------------------------------------

    def position(self, queue_id: int | tuple[str, int]) -> int:
        """The offset of the next message of a queue."""
        key = self._key_of(queue_id)
        self._assigned.shard_of(key)
        return self._assigned.positions[key]

    def positions(self) -> dict[Any, int]:
        """queue_id -> offset of the next message. With several topics, here and below, (topic, queue_id) -> offset."""
        return self._named(self._assigned.positions)

    def uncommitted(self) -> dict[Any, int]:
        """queue_id -> offset that `commit` stores. In `on_revoked`, the queues that are given up are among them."""
        return self._named(self._uncommitted())

    def _uncommitted(self) -> Mapping[QueueKey, int]:
        return self._assigned.positions if self._member is None else self._member.positions()

    def seek(self, queue_id: int | tuple[str, int], offset: int | str) -> None:
        """Continue from `offset`, "earliest" or "latest". An offset that the queue does not hold fails in `poll`.

        Args: `queue_id`: with several topics (topic, queue id).
        """
        self._assigned.check_open()
        key = self._key_of(queue_id)
        shard = self._assigned.shard_of(key)
        is_chosen = not isinstance(offset, str)

        if isinstance(offset, str):
            check_choice("offset", offset, ("earliest", "latest"))
            earliest, latest = self._starts.ranges(key[0], [shard])[key[1]]
            offset = latest if offset == "latest" else earliest
        check_offset(key[1], offset)
        self._seek(key, int(offset), is_chosen=is_chosen)

    def _seek(self, key: QueueKey, offset: int, *, is_chosen: bool) -> None:
        with self._assigned.state.changed:
            self._assigned.check_open()
            self._assigned.seek(key, offset, is_chosen=is_chosen)
        if self._member is not None:
            self._member.note_seek(key)

    def seek_time(self, time: Time) -> dict[Any, int]:
        """Continue each queue from the first message that was stored at a time or later, or else from its end.

        Example:
            ```python
            import raymq

            with raymq.connect() as cluster:
                cluster.create_topic("orders", queues=4)
                with cluster.producer() as producer:
                    receipt = producer.send("orders", b"one espresso").result(timeout=30)
                with cluster.consumer("orders", start="latest") as consumer:
                    consumer.seek_time(receipt.store_time_ms)
                    print(consumer.poll(timeout=1))
            ```

        Args:
            time: milliseconds since 1970, or a datetime with a time zone. Store times are those of the shards' clocks.

        Returns: queue_id -> the offset from which that queue continues.

        Raises:
            Rejected: no time, or one before 2001.
            Unavailable: a shard does not answer. No queue has moved.
        """
        time_ms = check_time("time", time)
        self._check_process()
        self._assigned.check_open()
        assigned = self._assigned
        topics: dict[str, dict[int, int]] = {}
        for topic, queue_id in list(assigned.positions):
            topics.setdefault(topic, {})[queue_id] = time_ms
        found: dict[QueueKey, int] = {}
        for topic, times in topics.items():
            route = self._routes.topics.find(topic)
            offsets = ask_offsets(self._routes.call, topic, route.shard_of, times)
            found.update({(topic, queue_id): offset for queue_id, offset in offsets.items()})

        with assigned.state.changed:
            assigned.check_open()
            # Queues may go while the shards are asked.
            found = {key: found[key] for key in found if key in assigned.positions}
            for key, offset in found.items():
                assigned.seek(key, offset, is_chosen=False)
        if self._member is not None:
            for key in found:
                self._member.note_seek(key)
        return self._named(found)

    def pause(self, queues: Iterable[int | tuple[str, int]] | None = None) -> None:
        """Return no messages of some queues until `resume`. The others go on, and a member keeps its queues.

        What was read ahead of them is read again later: a pause costs one fetch.

        Args:
            queues: queue ids, with several topics (topic, queue id) pairs; None (default): all that are read now. A
                queue that the group gives to this member later is not paused.

        Raises: Rejected for a queue that this consumer does not read. None is paused then.
        """
        self._check_process()
        self._assigned.pause(self._keys_of(queues))

    def resume(self, queues: Iterable[int | tuple[str, int]] | None = None) -> None:
        """Return messages of paused queues again, from where they were. None (default): of all.

        Raises: Rejected for a queue that this consumer does not read. None is resumed then.
        """
        self._check_process()
        self._assigned.resume(self._keys_of(queues))

    def paused(self) -> list[tuple[str, int]]:
        """The queues that are paused, as (topic, queue id), ascending."""
        with self._assigned.state.changed:
            return sorted(self._assigned.state.paused)

    def _keys_of(self, queues: Iterable[int | tuple[str, int]] | None) -> list[QueueKey]:
        if queues is None:
            return list(self._assigned.positions)
        return list(map(self._key_of, queues))

    def commit(self, offsets: Mapping[Any, int] | None = None) -> None:
        """Commit the offsets at which the group continues: the NEXT offsets, by default after all returned messages.

        Durable: as an acknowledged message.

        Args: `offsets`: queue_id -> offset, with several topics (topic, queue_id) -> offset.

        Raises:
            Rejected: the consumer has no group; or it has named `queues`, and a member has one of them.
            Fenced: another member has some of the queues now. The offsets of the others are stored.
            OffsetOutOfRange: a queue does not hold its offset. None of that topic's offsets on the shard is stored
                then.
            Unavailable: a shard does not answer.
        """
        wanted = self._to_commit(offsets)
        if self._member is not None:
            self._member.commit(wanted)
            return

        calls: dict[tuple[int, str], dict[str, int]] = {}
        for key, offset in wanted.items():
            own = calls.setdefault((self._assigned.shard_of(key), key[0]), {})
            own[str(key[1])] = int(offset)
        for (shard, topic), own in sorted(calls.items(), key=lambda call: call[0]):
            arguments = {"group": self.group, "topic": topic, "offsets": own}
            try:
                self._routes.call(shard, "commit_offsets", arguments)
            except RayMQError as error:
                if not self._assigned.passes_over(error, topic):
                    raise

    def _to_commit(self, offsets: Mapping[Any, int] | None) -> dict[QueueKey, int]:
        """What a commit stores. Raises: Rejected without a group, when closed, and for what is no offset."""
        self._check_group("cannot commit")
        self._check_process()
        self._assigned.check_open()
        self.end_consumed()
        if offsets is None:
            wanted = dict(self._uncommitted())
            for key in list(self._assigned.state.deleted):
                wanted.pop(key, None)
        else:
            wanted = {self._key_of(queue): offset for queue, offset in offsets.items()}
        for (_, queue_id), offset in wanted.items():
            check_offset(queue_id, offset)
        return wanted

    def offsets_to_commit(self, offsets: Mapping[Any, int] | None = None) -> OffsetsToCommit:
        """What `Transaction.commit_offsets` takes of this consumer. Nothing is stored.

        Args: `offsets`: as of `commit`. Raises: Rejected unless the consumer is a member of a group; Fenced: another
        member has some of the queues.
        """
        wanted = self._to_commit(offsets)
        if self._member is None:
            raise Rejected(
                f"the consumer reads fixed queues for group {self.group}, and is no member of it: a transaction could "
                "not see that another program commits there. Leave out `queues`",
                field="consumer",
                limit="a member of a group",
            )
        return self._member.to_commit(wanted)

    def send_back(self, message: ReceivedMessage, *, delay_level: int = 0) -> str:
        """Send a message that could not be processed back: it comes again in topic %RETRY%<group>, after a delay.

        The delay grows with each time: 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h. After 16 times, or with a
        negative `delay_level`, the message goes to %DLQ%<group> instead. A level of 1 to 18 is one of RocketMQ's delay
        levels. Both are ordinary topics. The call commits no offset. After an error with an unknown outcome the message
        may be in the topic.

        Returns: the topic. Durable: as an acknowledged message.

        Raises:
            Rejected: the consumer has no group, or the message is deleted.
            Unavailable: the shard does not answer. Nothing was stored.
            DeliveryUnknown: the message may be in the topic.
        """
        group = self._check_group("cannot send back")
        self._check_process()
        self._assigned.check_open()

        if message.shard not in self._retry_shards:
            for name in (retry_topic(group), dlq_topic(group)):
                self._create_retry_topic(name, message.shard)
            self._retry_shards.update(range(self._cluster.shards))

        arguments = {
            "group": group,
            "topic": message.topic,
            "queue_id": message.queue_id,
            "offset": message.offset,
            "delay_level": delay_level,
        }
        answer = self._routes.call(message.shard, "send_back", arguments)
        return str(answer["topic"])

    def _create_retry_topic(self, name: str, shard: int) -> None:
        """Make a topic with a queue on each shard. Args: `shard`: one that must have one."""
        cluster = self._cluster
        if shard >= cluster.shards:
            # It was added after the handle was made.
            cluster.learn_shards(shard + 1)
        create_retry_topic(cluster, name)

    def committed(self) -> dict[Any, int]:
        """queue_id -> committed offset of the group. Queues without one are missing."""
        self._check_group("has no offsets")
        self._assigned.check_open()
        topics = self._routes.topics
        wanted = self._wanted
        names = topics.matching(wanted.has) if wanted.pattern else wanted.names
        found: dict[QueueKey, int] = {}
        for topic in names:
            shards: Iterable[int] = topics.find(topic).shards
            if self._member is None:
                shards = {
                    self._assigned.shard_of(key)
                    for key in list(self._assigned.positions)
                    if key[0] == topic
                }
            offsets = self._starts.committed(topic, shards)
            found.update({(topic, queue_id): offset for queue_id, offset in offsets.items()})
        return self._named(found)

    def _check_group(self, lack: str) -> str:
        if self.group is None:
            why = f"a consumer without group= {lack}"
            raise Rejected(why, field="group", limit="a group's name")
        return self.group

    def _check_process(self) -> None:
        if forks.count != self._forks:
            raise Rejected(
                "this consumer was made before a fork; make one in a process that is started by spawn or "
                "forkserver",
                field="fork",
            )

    # --- end --------------------------------------------------------------------------------------

    def close(self, *, keep_place: bool = False) -> None:
        """Stop reading, and leave the group, after `on_revoked`. No offset is committed.

        Args: `keep_place`: of a member with `instance_id`: its queues wait for the next process of the instance, for
        one session timeout (default False: other members get them at once).
        Raises: Rejected for `keep_place` without `instance_id`.
        """
        if forks.count != self._forks:
            return
        member = None if self._assigned.state.closed else self._member
        if member is not None:
            member.check_keeps_place(keep_place)
        self.end_consumed()
        try:
            if member is not None:
                member.revoke_all()
        finally:
            self._assigned.end()
            self._assigned.join()
            if member is not None:
                member.leave(keeps_place=keep_place)
            self._routes.close()

    def __del__(self) -> None:
        if "_assigned" not in self.__dict__ or self._assigned.state.closed:
            return
        # None: the program ends, and Python has cleared this module.
        if forks is None or forks.count != self._forks:
            return
        if not sys.is_finalizing():
            # The collector may run on any thread, so it must not wait.
            if self._member is not None:
                self._member.membership.abandon()
            self._assigned.end()
        warn_unclosed(self, self.name, "use it in a with block, or call close()")

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *exc: object
    ) -> None:
        if forks.count == self._forks:
            self.end_consumed(error)
        self.close()
