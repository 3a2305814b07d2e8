"""The queues that a consumer reads: how far, what was read ahead of them, and the threads that read.

Source: AssignedMessageQueue of the clients of RocketMQ 5.3.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from raymq.client.messages.message import queue_offsets
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    OffsetOutOfRange,
    QueueMissing,
    RayMQError,
    Rejected,
    TopicMissing,
    Unavailable,
)
from raymq.store.state.topics import QueueKey

from .consumer_config import ReadFrom
from .shard_reader import FetchedRecords, ReadState, ShardReader


class AssignedQueues:
    """Queues come by `add` and go by `revoke`. One thread at a time takes messages, and another one may add queues.

    `state.changed` guards all but `positions`, which the taking thread also changes without the lock.
    """

    def __init__(
        self,
        routes: Routes,
        state: ReadState,
        clock: Clock,
        *,
        read_from: ReadFrom,
        unavailable_timeout_ms: int,
    ) -> None:
        #: shared with the readers
        self.state = state
        #: queue -> offset of the next message that is taken
        self.positions: dict[QueueKey, int] = {}
        self._routes = routes
        self._clock = clock
        self._read_from = read_from
        self._unavailable_timeout_ms = unavailable_timeout_ms
        #: queue -> shard
        self._shards: dict[QueueKey, int] = {}
        #: shard -> the thread that reads its queues
        self._readers: dict[int, ShardReader] = {}
        #: messages of `_iterating_fetched` that `next_message` has not returned yet, in order
        self._iterating: deque[ReceivedMessage] = deque()
        self._iterating_fetched: FetchedRecords

    # --- queues -----------------------------------------------------------------------------------

    @property
    def shards(self) -> list[int]:
        """The shards that have some of the queues, or had."""
        return list(self._readers)

    def shard_of(self, key: QueueKey) -> int:
        """The shard of one of the queues. Raises: Rejected for a queue of another consumer."""
        if key not in self._shards:
            shown = _shown(self._shards)
            raise Rejected(
                f"this consumer reads {shown}, not queue {key[1]} of {key[0]}",
                field="queue_id",
                limit=shown,
            )
        return self._shards[key]

    def add(self, begins: Mapping[QueueKey, int], shard_of: Callable[[QueueKey], int]) -> None:
        """Read further queues. Args: `begins`: queue -> offset. `shard_of`: the shard of a queue."""
        state, topics = self.state, {topic for topic, _ in begins}
        with state.changed:
            # Of a topic that is read already, the generation stays.
            new = topics - {topic for topic, _ in self._shards}
            for topic in new:
                state.generations.pop(topic, None)
            state.generations |= self._routes.topics.generations(new) or {}

            # First: a thread that commits without the lock asks for the shard of each position.
            self._shards.update({key: shard_of(key) for key in begins})
            # In place: the thread that takes messages writes other positions without the lock.
            self.positions.update(begins)
            state.fetch_from.update(begins)
            readers = dict(self._readers)
            for shard in sorted(set(map(shard_of, begins))):
                queues = [key for key in begins if shard_of(key) == shard]
                if shard in readers:
                    readers[shard].queues += queues
                    readers[shard].restart()
                else:
                    readers[shard] = ShardReader(
                        self._routes, shard, queues, state, self._clock, read_from=self._read_from
                    )
            self._readers = readers
            state.notify()

    def revoke(self, queues: Iterable[QueueKey]) -> dict[QueueKey, int]:
        """Read some queues no longer, and forget what was read ahead of them.

        Returns: queue -> offset after the last message that was taken. Raises: Rejected, and all stay.
        """
        state = self.state
        with state.changed:
            shards = {key: self.shard_of(key) for key in queues}
            self._give_back()
            left: dict[QueueKey, int] = {}
            for key, shard in shards.items():
                self._forget(key, shard)
                state.fetch_from.pop(key, None)
                state.chosen.discard(key)
                state.paused.discard(key)
                state.deleted.discard(key)
                self._readers[shard].queues.remove(key)
                left[key] = self.positions.pop(key)
                del self._shards[key]

            for shard in set(shards.values()):
                # What it asks for now may wait for these queues alone.
                self._readers[shard].restart()
                if not self._readers[shard].queues:
                    # This consumer does not need it any more.
                    state.down.pop(shard, None)
            state.notify()
        return left

    def pause(self, queues: Iterable[QueueKey]) -> None:
        """Return no messages of some queues until `resume`, and forget what was read ahead of them.

        Raises: Rejected for a queue of another consumer, and none is paused.
        """
        state = self.state
        with state.changed:
            self.check_open()
            shards = {key: self.shard_of(key) for key in queues if key not in state.paused}
            self._give_back()
            for key, shard in shards.items():
                # A failure is met again after the pause.
                self._forget(key, shard)
                state.fetch_from[key] = self.positions[key]
                state.paused.add(key)

            for shard in set(shards.values()):
                # What it asks for now may bring messages of these queues.
                self._readers[shard].restart()
                if state.paused.issuperset(self._readers[shard].queues):
                    state.down.pop(shard, None)
            state.notify()

    def resume(self, queues: Iterable[QueueKey]) -> None:
        """Read paused queues again. Raises: Rejected for a queue of another consumer, and none is read."""
        state = self.state
        with state.changed:
            self.check_open()
            shards = {key: self.shard_of(key) for key in queues}
            state.paused -= shards.keys()
            for shard in set(shards.values()):
                # Its fetch may wait for other queues.
                self._readers[shard].restart()
            state.notify()

    def seek(self, key: QueueKey, offset: int, *, is_chosen: bool) -> None:
        """Go on at another offset. Args: `is_chosen`: by the caller; no shard has said that the queue holds it."""
        state = self.state
        with state.changed:
            shard = self.shard_of(key)
            self._give_back()
            self._forget(key, shard)
            if is_chosen:
                state.chosen.add(key)
            state.fetch_from[key] = offset
            self.positions[key] = offset
            self._readers[shard].restart()
            state.notify()

    def begin_again(self, topic: str, begins: Mapping[QueueKey, int]) -> None:
        """Read queues of another topic that has the name of one that was deleted. Others that have gone are left out.

        Args: `begins`: queue -> offset.
        """
        state = self.state
        with state.changed:
            state.generations |= self._routes.topics.generations([topic]) or {}
            for key, offset in begins.items():
                state.deleted.discard(key)
                if key in self._shards:
                    self.seek(key, offset, is_chosen=False)

    def passes_over(self, error: RayMQError, topic: str) -> bool:
        """Whether a commit failed because its topic was deleted, and this consumer goes on without that topic.

        The topic may have been made again: then it has other offsets, and perhaps fewer queues.
        """
        if not self.state.passes_over_deleted:
            return False
        if isinstance(error, TopicMissing):
            return True
        if not isinstance(error, (OffsetOutOfRange, Rejected, QueueMissing)):
            return False
        topics = self._routes.topics
        topics.look_again([topic])
        newest = (topics.generations([topic]) or {}).get(topic, 0)
        return newest > self.state.generations.get(topic, 0)

    def _forget(self, key: QueueKey, shard: int) -> None:
        """Drop what was read ahead of a queue, and its failure. Needs the lock."""
        state = self.state
        kept = deque(fetched for fetched in state.unread if fetched.key != key)
        state.ahead[shard] = sum(fetched.shard == shard for fetched in kept)
        state.unread = kept
        state.queue_errors.pop(key, None)
        state.behind_since_ms.pop(key, None)

    # --- messages ---------------------------------------------------------------------------------

    def take(
        self,
        taken: list[FetchedRecords],
        max_records: int,
        timeout_s: float | None,
        *,
        ready_only: bool = False,
        is_over: Callable[[], bool] = bool,
    ) -> FetchedRecords | None:
        """Take the next records of one queue and move its position after them. None: there are none in time.

        Args: `taken`: a list to which they are added. An interrupt may prevent the return. `ready_only`: do not wait,
        and raise no failure of a shard. `is_over`: ends the wait early; called with the lock, after each change.
        Raises: Rejected once it is closed; the failure of a queue or a shard.
        """
        state = self.state
        with state.changed:
            self.check_open()
            self._give_back()
            if not ready_only:
                state.changed.wait_for(
                    lambda: (
                        self._has_unread()
                        or state.queue_errors
                        or state.fatal_error
                        or state.closed
                        or is_over()
                    ),
                    timeout_s,
                )
                self.check_open()
                self._raise_failure()

            if not self._has_unread():
                return None
            fetched, rest = state.unread[0], None
            if len(fetched.records) > max_records:
                after = fetched.records.slice(max_records)
                middle = int(queue_offsets(after.slice(0, 1))[0])
                rest = fetched._replace(first_offset=middle, records=after)
                records = fetched.records.slice(0, max_records)
                fetched = fetched._replace(next_offset=middle, records=records)

            # Without a call: a signal handler, such as that of Ctrl-C, runs after calls.
            if rest is not None:
                state.unread[0] = rest
            else:
                del state.unread[0]
                state.ahead[fetched.shard] -= 1
            self.positions[fetched.key] = fetched.next_offset
            taken += (fetched,)
            if rest is not None and self._is_only(rest):
                # Queues take turns: a busy one does not keep the messages of others back.
                state.unread.rotate(-1)

            if not state.ahead[fetched.shard]:
                state.notify()
            return fetched

    def put_back(self, taken: list[FetchedRecords]) -> None:
        """Undo calls of `take`."""
        state = self.state
        with state.changed:
            for fetched in reversed(taken):
                if fetched.key not in self._shards:
                    # It was given up meanwhile.
                    continue
                state.unread.appendleft(fetched)
                state.ahead[fetched.shard] += 1
                self.positions[fetched.key] = fetched.first_offset

    def next_message(
        self, max_records: int, timeout_s: float | None, *, is_over: Callable[[], bool] = bool
    ) -> ReceivedMessage | None:
        """Take one message. Any other call gives the rest of those that were taken with it back first.

        Args: `max_records`: that are taken together. `is_over`: as of `take`. Raises: as `take`.
        """
        if not self._iterating and not self._begin_iterating(max_records, timeout_s, is_over):
            return None
        self.check_open()
        message, is_last = self._iterating[0], len(self._iterating) == 1
        # After the last one also over what a filter did not want.
        after = self._iterating_fetched.next_offset if is_last else message.offset + 1
        self.positions[self._iterating_fetched.key] = after
        # Without a call: an interrupt after it would lose the message.
        del self._iterating[0]
        return message

    def _begin_iterating(
        self, max_records: int, timeout_s: float | None, is_over: Callable[[], bool]
    ) -> bool:
        """Take the next messages for iteration. Returns: whether there are any."""
        taken: list[FetchedRecords] = []
        try:
            fetched = self.take(taken, max_records, timeout_s, is_over=is_over)
            if fetched is None:
                return False
            messages = deque(received_messages(fetched.shard, fetched.records))
            # Only returned messages count.
            self.positions[fetched.key] = fetched.first_offset
            self._iterating_fetched, self._iterating = fetched, messages
            return True
        except BaseException:
            self.put_back(taken)
            raise

    @property
    def iterated_queue(self) -> QueueKey | None:
        """The queue whose messages `next_message` returns without a further `take`; None: there are none."""
        return self._iterating_fetched.key if self._iterating else None

    def _give_back(self) -> None:
        """Return the messages that iteration took and did not hand out to `unread`. Needs the lock."""
        if not self._iterating:
            return
        state, fetched = self.state, self._iterating_fetched
        offset = self._iterating[0].offset
        rest = fetched.records.slice(len(fetched.records) - len(self._iterating))
        self._iterating.clear()
        state.unread.appendleft(fetched._replace(first_offset=offset, records=rest))
        state.ahead[fetched.shard] += 1

    def _has_unread(self) -> bool:
        """Whether there are messages to take. Positions move after what was looked at in vain. Needs the lock."""
        state = self.state
        while state.unread and not len(state.unread[0].records):
            looked = state.unread[0]
            # Without a call, as in `take`.
            self.positions[looked.key] = looked.next_offset
            del state.unread[0]
            state.ahead[looked.shard] -= 1
            if not state.ahead[looked.shard]:
                state.notify()
        return bool(state.unread)

    def _is_only(self, fetched: FetchedRecords) -> bool:
        """Whether these are all that is unread of their queue. Needs the lock."""
        return sum(each.key == fetched.key for each in self.state.unread) == 1

    def _raise_failure(self) -> None:
        """Raise the failure that this read must report, if there is one. Needs the lock."""
        state = self.state
        if state.fatal_error is not None:
            raise state.fatal_error

        for key in sorted(state.queue_errors):
            # Records fetched before the failure come first.
            if not any(fetched.key == key for fetched in state.unread):
                raise state.queue_errors[key]

        now_ms = self._clock.monotonic_ms()
        for shard, (since_ms, error) in state.down.items():
            away_ms = now_ms - since_ms
            # Messages of other shards must not hide it: a busy topic always has some.
            if away_ms >= self._unavailable_timeout_ms and not state.ahead[shard]:
                message = f"shard {shard} has been unreachable for {away_ms} ms: {error}"
                raise Unavailable(message, shard=shard)

    # --- end --------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises: Rejected once it is closed."""
        if self.state.closed:
            raise Rejected(
                "the consumer is closed; make another one", field="consumer", limit="open"
            )

    def end(self) -> None:
        """Let the readers end, without waiting for them."""
        with self.state.changed:
            self.state.closed = True
            for reader in self._readers.values():
                reader.restart()
            self.state.notify()

    def join(self) -> None:
        """Wait for the readers, after `end`."""
        for reader in self._readers.values():
            reader.join()


def _shown(queues: Iterable[QueueKey]) -> str:
    """Queues for people."""
    topics: dict[str, list[int]] = {}
    for topic, queue_id in sorted(queues):
        topics.setdefault(topic, []).append(queue_id)
    return "; ".join(f"the queues {ids} of {topic}" for topic, ids in topics.items()) or "no queue"
