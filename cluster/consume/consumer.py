"""The consumer of one topic: reads queues in order from where it was told (design D10, D11)."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from raymq.cluster.arguments import check_choice, check_number, check_offsets
from raymq.cluster.messages.columns import MESSAGE_SCHEMA, message_batch, messages
from raymq.cluster.messages.message import ReceivedMessage, queue_offsets
from raymq.cluster.transport.routes import Routes
from raymq.cluster.unclosed import warn_unclosed
from raymq.store.clock import Clock
from raymq.store.errors import Rejected, Unavailable
from raymq.store.format import check_group_name
from raymq.store.services.retry import dlq_topic, retry_topic

from .shard_reader import Piece, ReadState, ShardReader

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

Start = str | int | Mapping[int, int] | None

_START_HELP = "start='earliest', 'latest', an offset, or {queue: offset}"


class Consumer:
    """Reads a topic, all queues or some. One thread at a time; no pickling, no forking.

    Each queue is read in order, from the group's committed offset, else from `start`. Nothing is
    committed unasked, and a position that a queue does not hold raises OffsetOutOfRange until
    `seek` says where to go on: it never jumps.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        group: str | None = None,
        start: Start = None,
        queues: Sequence[int] | None = None,
        fetch_bytes: int = 4 << 20,
        fetch_records: int = 10_000,
        unavailable_timeout_ms: int = 30_000,
        clock: Clock | None = None,
    ) -> None:
        """Find where to begin and start to read ahead.

        Args: `start` is "earliest", "latest", an offset for every queue, or {queue: offset}; it
        serves queues without a committed offset. `queues` are all by default.
        `unavailable_timeout_ms`: an unreachable shard is waited for so long before `poll` raises.
        Raises: Rejected for an unknown topic or queue, or when nothing says where to begin.
        """
        check_number("fetch_bytes", fetch_bytes, 1)
        check_number("fetch_records", fetch_records, 1)
        check_number("unavailable_timeout_ms", unavailable_timeout_ms, 0, whole=False)
        if group is not None:
            check_group_name(group)
        self.topic = topic
        self.group = group
        #: what a program calls it
        self.name = type(self).__name__
        self._unavailable_timeout_ms = unavailable_timeout_ms
        self._clock = clock or Clock()
        self._process = os.getpid()
        self._cluster = cluster
        #: the group's topics for messages that are sent back exist
        self._retry_topics = False
        self._routes = Routes.of(cluster)
        self._route = self._routes.topic(topic)
        wanted = list(range(self._route.queues)) if queues is None else list(queues)
        if not wanted:
            raise Rejected("queues is empty; name some, or leave it out", field="queues", limit="1")
        shards = sorted({self._route.shard_of(queue) for queue in wanted})
        # A shard takes no other whole numbers, such as numpy's.
        wanted = list(map(int, wanted))
        #: queue -> offset of the next message that `poll` returns
        self._positions = self._begin(wanted, shards, start)
        self._state = ReadState(topic, fetch_bytes=fetch_bytes, fetch_records=fetch_records)
        self._state.fetch_from = dict(self._positions)
        #: of one piece, in order: taken to be handed out one by one
        self._handing: deque[ReceivedMessage] = deque()
        self._handing_of: Piece
        self._readers = {
            shard: ShardReader(
                self._routes,
                shard,
                [queue for queue in wanted if self._route.shard_of(queue) == shard],
                self._state,
                self._clock,
            )
            for shard in shards
        }

    def __reduce__(self) -> NoReturn:
        raise Rejected(
            "a consumer has open connections and does not pickle: pickle the Cluster and call "
            "cluster.consumer() where it is used",
            field="pickle",
        )

    # --- where to begin -------------------------------------------------------------------------

    def _begin(self, queues: list[int], shards: list[int], start: Start) -> dict[int, int]:
        committed = self._committed(shards) if self.group is not None else {}
        found = {queue: committed[queue] for queue in queues if queue in committed}
        missing = [queue for queue in queues if queue not in found]
        if not missing:
            return found
        if start in ("earliest", "latest"):
            ranges = self._ranges(sorted({self._route.shard_of(queue) for queue in missing}))
            side = 0 if start == "earliest" else 1
            return found | {queue: ranges[queue][side] for queue in missing}
        if isinstance(start, int):
            check_offsets(dict.fromkeys(missing, start))
            return found | dict.fromkeys(missing, start)
        if isinstance(start, Mapping) and all(queue in start for queue in missing):
            check_offsets({queue: start[queue] for queue in missing})
            return found | {queue: int(start[queue]) for queue in missing}
        who = "there is no group" if self.group is None else f"group {self.group!r} has no offset"
        raise Rejected(
            f"{who} for the queues {missing} of {self.topic}, and start is {start!r}: "
            f"say {_START_HELP}",
            field="start",
            limit=_START_HELP,
        )

    def _ranges(self, shards: list[int]) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for shard in shards:
            answer = self._routes.call(shard, "queue_ranges", {"topic": self.topic})
            found.update({int(queue): (low, high) for queue, (low, high) in answer.items()})
        return found

    # --- reading --------------------------------------------------------------------------------

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[ReceivedMessage]:
        """Up to `max_records` messages; waits up to `timeout` seconds while there is none.

        Raises: OffsetOutOfRange; Unavailable when a shard stays unreachable; what the cluster
        refuses reading with.
        """
        found: list[ReceivedMessage] = []
        piece = self._next(max_records, timeout)
        while piece is not None:
            found += messages(message_batch(piece.shard, piece.records))
            left = max_records - len(found)
            piece = self._next(left, 0.0, ready_only=True) if left > 0 else None
        return found

    def poll_batch(self, max_records: int = 10_000, timeout: float = 1.0) -> pa.RecordBatch:
        """As `poll`, but columns (columns.MESSAGE_SCHEMA) of one queue; may have no rows."""
        piece = self._next(max_records, timeout)
        if piece is None:
            return pa.RecordBatch.from_pylist([], schema=MESSAGE_SCHEMA)
        return message_batch(piece.shard, piece.records)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Message by message for ever; `position` and `commit` follow what was handed out."""
        while True:
            message = self.next_message(5.0)
            if message is not None:
                yield message

    def next_message(self, timeout: float = 1.0) -> ReceivedMessage | None:
        """The next message; None when none came within `timeout` seconds. Raises: as `poll`."""
        if not self._handing:
            piece = self._next(500, timeout)
            if piece is None:
                return None
            # Only what was handed out counts: the rest of the piece is put back by the next other call.
            self._positions[piece.queue_id] = piece.first_offset
            self._handing.extend(messages(message_batch(piece.shard, piece.records)))
            self._handing_of = piece
        self._check_open()
        message = self._handing.popleft()
        self._positions[message.queue_id] = message.offset + 1
        return message

    def on_change(self, call: Callable[[], None]) -> None:
        """Call it, from any thread, when something was read, failed or ended; it must not block."""
        self._state.changed.told = call

    def _next(self, max_records: int, timeout: float, *, ready_only: bool = False) -> Piece | None:
        """The next records of one queue; its position moves behind them."""
        check_number("max_records", max_records, 1)
        self._check_process()
        state = self._state
        with state.changed:
            self._check_open()
            self._put_back()
            if not ready_only:
                state.changed.wait_for(
                    lambda: state.pieces or state.failed or state.fatal or state.closed, timeout
                )
                self._check_open()
                self._raise_failure()
            if not state.pieces:
                return None
            piece = state.pieces.popleft()
            if len(piece.records) > max_records:
                rest = piece.records.slice(max_records)
                middle = int(queue_offsets(rest.slice(0, 1))[0])
                state.pieces.appendleft(piece._replace(first_offset=middle, records=rest))
                records = piece.records.slice(0, max_records)
                piece = piece._replace(next_offset=middle, records=records)
            else:
                self._took(piece.shard)
            self._positions[piece.queue_id] = piece.next_offset
            return piece

    def _took(self, shard: int) -> None:
        """A piece left the buffer. Needs the lock."""
        self._state.ahead[shard] -= 1
        if not self._state.ahead[shard]:
            self._state.changed.notify_all()

    def _put_back(self) -> None:
        """What was taken to be handed out one by one, and was not. Needs the lock."""
        if not self._handing:
            return
        state, piece = self._state, self._handing_of
        offset = self._handing[0].offset
        rest = piece.records.slice(len(piece.records) - len(self._handing))
        self._handing.clear()
        state.pieces.appendleft(piece._replace(first_offset=offset, records=rest))
        state.ahead[piece.shard] += 1

    def _raise_failure(self) -> None:
        """Needs the lock."""
        state = self._state
        if state.fatal is not None:
            raise state.fatal
        for queue in sorted(state.failed):
            # What was read before the failure comes first.
            if not any(piece.queue_id == queue for piece in state.pieces):
                raise state.failed[queue]
        if state.pieces:
            return
        now = self._clock.monotonic_ms()
        for shard, (since, error) in state.down.items():
            if now - since >= self._unavailable_timeout_ms:
                raise Unavailable(
                    f"shard {shard} cannot be reached since {now - since} ms: {error}", shard=shard
                )

    # --- positions ------------------------------------------------------------------------------

    def position(self, queue_id: int) -> int:
        """The offset of the next message of a queue."""
        return self._positions[self._own(queue_id)]

    def positions(self) -> dict[int, int]:
        """queue -> offset of the next message."""
        return dict(self._positions)

    def seek(self, queue_id: int, offset: int | str) -> None:
        """Go on from `offset`, "earliest" or "latest". Whether the queue holds it, `poll` tells."""
        self._check_open()
        shard = self._route.shard_of(self._own(queue_id))
        if isinstance(offset, str):
            check_choice("offset", offset, ("earliest", "latest"))
            offset = self._ranges([shard])[queue_id][offset == "latest"]
        check_offsets({queue_id: offset})
        offset = int(offset)
        state = self._state
        with state.changed:
            self._check_open()
            self._put_back()
            kept = deque(piece for piece in state.pieces if piece.queue_id != queue_id)
            state.ahead[shard] = sum(piece.shard == shard for piece in kept)
            state.pieces = kept
            state.failed.pop(queue_id, None)
            state.fetch_from[queue_id] = offset
            self._positions[queue_id] = offset
            self._readers[shard].restart()
            state.changed.notify_all()

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        """Store where the group goes on: the NEXT offsets; by default of all handed out so far.

        Durable: as an acknowledged message. Raises: Rejected without a group; OffsetOutOfRange for an offset that
        its queue does not hold, of which nothing is stored; Unavailable.
        """
        if self.group is None:
            raise Rejected(
                "a consumer without group= cannot commit", field="group", limit="a group's name"
            )
        self._check_process()
        self._check_open()
        wanted = self.positions() if offsets is None else dict(offsets)
        check_offsets(wanted)
        for shard in self._readers:
            own = {
                str(queue): int(offset)
                for queue, offset in wanted.items()
                if self._route.shard_of(self._own(queue)) == shard
            }
            if own:
                arguments = {"group": self.group, "topic": self.topic, "offsets": own}
                self._routes.call(shard, "commit_offsets", arguments)

    def send_back(self, message: ReceivedMessage, *, delay_level: int = 0) -> str:
        """Have a message that could not be handled come again, in topic %RETRY%<group>, after a while.

        Each time it comes later: after 10 s, 30 s, 1 to 10 min, 20 min, 30 min, 1 h, 2 h. After 16 times, or with a
        `delay_level` below 0, it goes to %DLQ%<group> instead; a level of 1 to 18 is that of RocketMQ's delays. It says
        nothing of what the group has consumed: `commit` does. A call whose outcome is unknown may have put it.
        Returns: the topic where it will be. Durable: as an acknowledged message.
        Raises: Rejected without a group, or when the message is gone; Unavailable; DeliveryUnknown.
        """
        if self.group is None:
            raise Rejected(
                "a consumer without group= cannot send back", field="group", limit="a group's name"
            )
        self._check_process()
        self._check_open()
        if not self._retry_topics:
            for name in (retry_topic(self.group), dlq_topic(self.group)):
                self._cluster.create_topic(name, queues=self._cluster.shards)
            self._retry_topics = True
        arguments = {
            "group": self.group,
            "topic": message.topic,
            "queue_id": message.queue_id,
            "offset": message.offset,
            "delay_level": delay_level,
        }
        answer = self._routes.call(message.shard, "send_back", arguments)
        return str(answer["topic"])

    def committed(self) -> dict[int, int]:
        """queue -> next offset as the group stored it last; queues without one are missing."""
        if self.group is None:
            raise Rejected(
                "a consumer without group= has no offsets", field="group", limit="a group's name"
            )
        self._check_open()
        return self._committed(list(self._readers))

    def _committed(self, shards: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        arguments: dict[str, Any] = {"group": self.group, "topic": self.topic}
        for shard in shards:
            table = self._routes.call(shard, "offsets", arguments)
            found.update({int(queue): int(offset) for queue, offset in table.items()})
        return found

    def _own(self, queue_id: int) -> int:
        if queue_id not in self._positions:
            raise Rejected(
                f"this consumer reads the queues {sorted(self._positions)}, not {queue_id}",
                field="queue_id",
                limit=str(sorted(self._positions)),
            )
        return queue_id

    def _check_open(self) -> None:
        if self._state.closed:
            raise Rejected(
                "the consumer is closed; make another one", field="consumer", limit="open"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Rejected(
                "this consumer was made before a fork; make one in the child process", field="fork"
            )

    # --- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop reading; nothing is committed."""
        if os.getpid() != self._process:
            return
        self._end_readers()
        for reader in self._readers.values():
            reader.join()

    def _end_readers(self) -> None:
        with self._state.changed:
            self._state.closed = True
            for reader in self._readers.values():
                reader.restart()
            self._state.changed.notify_all()

    def __del__(self) -> None:
        if "_readers" not in self.__dict__ or self._state.closed or os.getpid() != self._process:
            return
        if not sys.is_finalizing():
            # Not waited for: the collector runs anywhere.
            self._end_readers()
        warn_unclosed(self, self.name, "use it in a with block, or call close()")

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
