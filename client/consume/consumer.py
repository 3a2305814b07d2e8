"""The consumer of one topic: reads queues in order, from given or committed offsets."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from numbers import Integral
from typing import Any

import pyarrow as pa
from typing_extensions import Unpack

from raymq.client import forks
from raymq.client.arguments import (
    check_choice,
    check_number,
    check_offsets,
    plain_int,
    takes_options_of,
    wait_s,
)
from raymq.client.handle import ClusterHandle
from raymq.client.hooks import Hooks
from raymq.client.messages.columns import message_batch, value_batch, value_schema
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.client.times import Time, check_time
from raymq.client.topics.add_queues import add_queues
from raymq.client.topics.new_topic import create_topic
from raymq.client.transport.routes import Routes
from raymq.client.unclosed import OpenClient, warn_unclosed
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, TopicWithOtherQueues
from raymq.store.base.format import check_group_name
from raymq.store.state.topics import dlq_topic, retry_topic

from .assigned_queues import AssignedQueues
from .consumer_config import ConsumerConfig, ConsumerOptions, Start
from .member_queues import MemberQueues
from .offsets_by_time import ask_offsets
from .selector import selector_of
from .shard_reader import FetchedRecords, ReadState

#: messages that iteration takes at a time
ITERATED_TOGETHER = 500
_START_HELP = "start='earliest', 'latest', a datetime, an offset, or {queue_id: offset}"


class Consumer(OpenClient):
    """Reads a topic, all queues or some, in offset order per queue. `Cluster.consumer` makes one.

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
        topic: an existing topic.
        group: the name under which `commit` stores offsets, at most 248 characters; None (default) means that nothing
            can be committed. Consumers with the same group share the topic: each queue is read by one of them, its
            *member*. A member that ends or falls silent loses its queues to the others. To read every message in each
            of several programs, give them different groups, or none.
        start: where queues without a committed offset begin: "earliest", "latest", an offset for every queue,
            {queue_id: offset}, or a datetime with a time zone: at the first message that was stored then or later, else
            at the end. A number is an offset, so `raymq.at_ms(ms)` says a time in milliseconds. None (default) is
            refused if some queue has no committed offset.
        queues: the queue ids to read; None (default) reads all, or with a group those that the group gives to this
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
        topic: str,
        *,
        clock: Clock | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Find the first offset of each queue and start to read ahead."""
        config = ConsumerConfig(**options)
        config.check_values()
        if config.group is not None:
            check_group_name(config.group)

        self.topic = topic
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

        self._routes = Routes.of(cluster)
        self._route = self._routes.topics.find(topic)
        #: the columns of `poll_batch` stay as they are
        self._values = self._route.values
        state = ReadState(
            topic, config.fetch_bytes, config.fetch_records, config.unavailable_timeout_ms
        )
        state.selector = selector_of(config.tags, config.sql)
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
        queues = range(self._route.queues) if config.queues is None else config.queues
        if not list(queues):
            raise Rejected("queues is empty; name some, or leave it out", field="queues", limit="1")
        shards = sorted({self._route.shard_of(queue_id) for queue_id in queues})
        # The wire takes no other integers, such as numpy's.
        wanted = list(map(int, queues))

        state = self._assigned.state
        begins = self._begin(wanted, shards, config.start, state.chosen)
        if config.queues is None:
            state.look_for_queues = partial(self._routes.topics.look_for_queues, self._weakly())
        self._assigned.add({each: begins[each] for each in wanted}, self._route.shard_of)

    def _join(self, config: ConsumerConfig, clock: Clock | None) -> None:
        """Become a member of the group, and wait for its first queues."""

        # A strong reference would keep a dropped consumer, and its queues.
        weak = weakref.WeakMethod(self._begin_claimed)

        def begin(queues: list[int]) -> dict[int, int]:
            begin_claimed = weak()
            return {} if begin_claimed is None else begin_claimed(queues, config.start)

        self._member = MemberQueues(self._routes, self.topic, self._assigned, config, clock, begin)
        try:
            self._member.await_first(config.unavailable_timeout_ms)
        except BaseException:
            self._member.leave(keeps_place=False)
            raise

    def _begin_claimed(self, queues: list[int], start: Start) -> dict[int, int]:
        """Where queues without a committed offset begin, which the group gave to this member."""
        self._route = self._routes.topics.find(self.topic)
        shards = sorted({self._route.shard_of(queue_id) for queue_id in queues})
        return self._begin(queues, shards, start, self._assigned.state.chosen)

    # --- where to begin ---------------------------------------------------------------------------

    def _begin(
        self, queues: list[int], shards: list[int], start: Start, chosen: set[int]
    ) -> dict[int, int]:
        """queue_id -> offset where each queue begins. Args: `chosen`: gets those whose offset the caller chose."""
        has_more = self._route.queues > self._route.first_queues
        asked = sorted(set(self._route.shards)) if has_more else shards
        committed = self._committed(asked) if self.group is not None else {}
        found = {queue_id: committed[queue_id] for queue_id in queues if queue_id in committed}
        if committed:
            # The group, if not this consumer of it, has read the topic before it got these queues.
            added = [each for each in queues if each >= self._route.first_queues]
            found = self._first_offsets(added) | found
        missing = [queue_id for queue_id in queues if queue_id not in found]
        if not missing:
            return found

        if start in ("earliest", "latest"):
            ranges = self._ranges(sorted({self._route.shard_of(queue_id) for queue_id in missing}))
            side = 0 if start == "earliest" else 1
            return found | {queue_id: ranges[queue_id][side] for queue_id in missing}
        if isinstance(start, datetime):
            times = dict.fromkeys(missing, check_time("start", start))
            return found | ask_offsets(self._routes.call, self.topic, self._route.shard_of, times)
        chosen.update(missing)
        start = plain_int(start)
        if isinstance(start, int):
            check_offsets(dict.fromkeys(missing, start))
            return found | dict.fromkeys(missing, start)
        if isinstance(start, Mapping) and all(queue_id in start for queue_id in missing):
            check_offsets({queue_id: start[queue_id] for queue_id in missing})
            return found | {queue_id: int(start[queue_id]) for queue_id in missing}

        if isinstance(start, Mapping):
            texts = [each for each in start if not isinstance(each, Integral)]
            fault = f"names the queues {sorted(start, key=str)}, and lacks some of {missing}"
            if texts:
                fault = (
                    f"has the key {texts[0]!r}, a {type(texts[0]).__name__}; queue ids are numbers"
                )
            raise Rejected(
                f"start {fault}: give {{queue_id: offset}} with each of {missing}, or 'earliest' or 'latest'",
                field="start",
                limit=_START_HELP,
            )
        why = "there is no group" if self.group is None else f"group {self.group!r} has no offset"
        raise Rejected(
            f"{why} for the queues {missing} of {self.topic}, and start is {start!r}: use {_START_HELP}",
            field="start",
            limit=_START_HELP,
        )

    def _ranges(self, shards: list[int]) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for shard in shards:
            answer = self._routes.call(shard, "queue_ranges", {"topic": self.topic})
            found.update({int(queue_id): (low, high) for queue_id, (low, high) in answer.items()})
        return found

    def _first_offsets(self, queues: list[int]) -> dict[int, int]:
        """queue_id -> offset of the first message of each of these queues."""
        if not queues:
            return {}
        ranges = self._ranges(sorted(set(map(self._route.shard_of, queues))))
        return {queue_id: ranges[queue_id][0] for queue_id in queues}

    def _weakly(self) -> Callable[[], None]:
        """A call of `_read_added` that does not keep this consumer alive: readers run until it is collected."""
        weak = weakref.WeakMethod(self._read_added)

        def call() -> None:
            read_added = weak()
            if read_added is not None:
                read_added()

        return call

    def _read_added(self) -> None:
        """Read the queues that were added to the topic, from their first message or where the group was.

        Callers: a thread of the routes. Raises: RayMQError; it is called again.
        """
        route = self._routes.topics.cached(self.topic)
        if route is None or route.queues == self._route.queues or forks.count != self._forks:
            return
        added = list(range(self._route.queues, route.queues))
        shards = sorted({route.shard_of(queue_id) for queue_id in added})
        committed = self._committed(shards) if self.group is not None else {}
        begins = {queue_id: committed.get(queue_id, 0) for queue_id in added}

        state = self._assigned.state
        with state.changed:
            if state.closed or route.queues == self._route.queues:
                return
            self._assigned.add(begins, route.shard_of)
            self._route = route

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
                return pa.RecordBatch.from_pylist([], schema=value_schema(self._values))
            return value_batch(message_batch(fetched.shard, fetched.records), self._values)
        except BaseException:
            # Corrupt, or Ctrl-C.
            self._assigned.put_back(taken)
            raise

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
                self.seek(message.queue_id, message.offset)
                raise
        return message

    def _next_message(self, timeout_s: float | None) -> ReceivedMessage | None:
        if self._member is None:
            return self._assigned.next_message(ITERATED_TOGETHER, timeout_s)

        queue_id = self._assigned.iterated_queue
        if queue_id is None or self._member.has_news or not self._member.may_return(queue_id):
            taken: list[FetchedRecords] = []
            try:
                if self._take_as_member(self._member, taken, ITERATED_TOGETHER, timeout_s) is None:
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
        if self._member is None:
            return self._assigned.take(taken, max_records, timeout_s, ready_only=ready_only)
        return self._take_as_member(
            self._member, taken, max_records, timeout_s, ready_only=ready_only
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
                if member.may_return(fetched.queue_id):
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
            return {(self.topic, queue_id): 0 for queue_id in self.positions()}
        return self._member.membership.assignment()

    @property
    def has_news(self) -> bool:
        """Whether `step` has something to do."""
        return self._member is not None and self._member.has_news

    def step(self) -> None:
        """Do what the membership asks for, as `poll` does by itself. Raises: as `poll`."""
        if self._member is not None:
            self._member.step()

    def on_change(self, call: Callable[[], None]) -> None:
        """Register a listener that any thread calls after a fetch, a failure or the end. It must not block."""
        self._assigned.state.listener = call

    # --- positions --------------------------------------------------------------------------------

    def position(self, queue_id: int) -> int:
        """The offset of the next message of a queue."""
        self._assigned.shard_of(queue_id)
        return self._assigned.positions[queue_id]

    def positions(self) -> dict[int, int]:
        """queue_id -> offset of the next message."""
        return dict(self._assigned.positions)

    def uncommitted(self) -> dict[int, int]:
        """queue_id -> offset that `commit` stores. In `on_revoked`, the queues that are given up are among them."""
        return self.positions() if self._member is None else self._member.positions()

    def seek(self, queue_id: int, offset: int | str) -> None:
        """Continue from `offset`, "earliest" or "latest". An offset that the queue does not hold fails in `poll`."""
        self._assigned.check_open()
        shard = self._assigned.shard_of(queue_id)
        is_chosen = not isinstance(offset, str)

        if isinstance(offset, str):
            check_choice("offset", offset, ("earliest", "latest"))
            earliest, latest = self._ranges([shard])[queue_id]
            offset = latest if offset == "latest" else earliest
        check_offsets({queue_id: offset})
        with self._assigned.state.changed:
            self._assigned.check_open()
            self._assigned.seek(queue_id, int(offset), is_chosen=is_chosen)
        if self._member is not None:
            self._member.note_seek(queue_id)

    def seek_time(self, time: Time) -> dict[int, int]:
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
        times = dict.fromkeys(self.positions(), time_ms)
        found = ask_offsets(self._routes.call, self.topic, self._route.shard_of, times)

        with assigned.state.changed:
            assigned.check_open()
            # Queues may go while the shards are asked.
            found = {each: found[each] for each in found if each in assigned.positions}
            for queue_id, offset in found.items():
                assigned.seek(queue_id, offset, is_chosen=False)
        if self._member is not None:
            for queue_id in found:
                self._member.note_seek(queue_id)
        return found

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        """Commit the offsets at which the group continues: the NEXT offsets, by default after all returned messages.

        Durable: as an acknowledged message.

        Raises:
            Rejected: the consumer has no group; or it has named `queues`, and a member has one of them.
            Fenced: another member has some of the queues now. The offsets of the others are stored.
            OffsetOutOfRange: a queue does not hold its offset. None of that shard's offsets is stored then.
            Unavailable: a shard does not answer.
        """
        self._check_group("cannot commit")
        self._check_process()
        self._assigned.check_open()
        self.end_consumed()
        wanted = self.uncommitted() if offsets is None else dict(offsets)
        check_offsets(wanted)
        if self._member is not None:
            self._member.commit({int(queue_id): wanted[queue_id] for queue_id in wanted})
            return

        shards = {queue_id: self._assigned.shard_of(queue_id) for queue_id in wanted}
        for shard in sorted(set(shards.values())):
            own = {str(each): int(wanted[each]) for each in wanted if shards[each] == shard}
            arguments = {"group": self.group, "topic": self.topic, "offsets": own}
            self._routes.call(shard, "commit_offsets", arguments)

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
        try:
            create_topic(cluster, name, queues=cluster.shards)
        except TopicWithOtherQueues:
            # It may be older than some shards. Its messages are read in any order.
            facts = cluster.topics()[name]
            missing = cluster.shards - len(set(facts["shards"]))
            queues = int(facts["queues"]) + missing
            add_queues(cluster, name, queues, break_key_order=True)

    def committed(self) -> dict[int, int]:
        """queue_id -> committed offset of the group. Queues without one are missing."""
        self._check_group("has no offsets")
        self._assigned.check_open()
        if self._member is None:
            return self._committed(self._assigned.shards)
        return self._committed(sorted(set(self._route.shards)))

    def _committed(self, shards: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        arguments: dict[str, Any] = {"group": self.group, "topic": self.topic}
        for shard in shards:
            table = self._routes.call(shard, "offsets", arguments)
            found.update({int(queue_id): int(offset) for queue_id, offset in table.items()})
        return found

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
