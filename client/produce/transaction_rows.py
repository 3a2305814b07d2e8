"""The messages of a transaction, until it is committed: which queue gets each, and their columns for one shard."""

from __future__ import annotations

import random
from typing import NamedTuple

import pyarrow as pa

from raymq.actors.api.transactions import ROWS_MAX, RowsPart
from raymq.client.messages.message import Receipt
from raymq.client.messages.partitioner import queue_of
from raymq.client.messages.record_head import Head
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.groups.transaction_requests import TransactionOutcome

from .batch_sender import SHARD_TOPICS, shard_place, waiting_queue
from .message_batcher import MessageBatcher
from .message_encoder import EncodedMessage, waiting_properties
from .open_batch import batch_of

#: bytes of the messages of one transaction, as the producer's buffer counts them. Other puts wait while they are
#: appended
BYTES_MAX = 4 << 20


class _Row(NamedTuple):
    message: EncodedMessage
    route: TopicRoute
    #: None: any queue
    queue_id: int | None
    born_time_ms: int


class PlacedRows:
    """The messages of a transaction on one shard, as columns."""

    def __init__(self, shard: int, rows: list[_Row], chosen: dict[str, int]) -> None:
        """Args: `chosen`: topic -> the queue of its messages without one. Raises: Rejected."""
        self._shard = shard
        #: topic and queue as receipts name them -> the rows
        queues: dict[tuple[str, int], list[tuple[_Row, bytes | None]]] = {}
        #: of each message, in the order of the sends: the number of its part, and its row there
        self._places: list[tuple[int, int]] = []
        numbers: dict[tuple[str, int], int] = {}
        for row in rows:
            key, properties = _target(shard, row, chosen)
            own = queues.setdefault(key, [])
            self._places.append((numbers.setdefault(key, len(numbers)), len(own)))
            own.append((row, properties))

        self._keys = list(queues)
        self.parts = [
            RowsPart(topic, _queue_there(topic, queue_id), len(own))
            for (topic, queue_id), own in queues.items()
        ]
        self.batch = _batch([each for own in queues.values() for each in own])

    def receipts(self, outcome: TransactionOutcome) -> list[Receipt]:
        """The receipts of the messages, in the order of the sends. Args: `outcome`: of the commit."""
        found = []
        for part, row in self._places:
            topic, queue_id = self._keys[part]
            offset = int(outcome.first_offsets[part]) + row
            found.append(
                Receipt(
                    *(topic, queue_id, self._shard, offset, outcome.store_time_ms),
                    duplicate=False,
                )
            )
        return found


class TransactionRows:
    """Gathers messages. Threads: one at a time."""

    def __init__(self, batcher: MessageBatcher, clock: Clock) -> None:
        self._batcher = batcher
        self._clock = clock
        self._rows: list[_Row] = []
        self._bytes = 0

    def add(self, message: EncodedMessage) -> int:
        """Keep a message. Returns: its number. Raises: Rejected for an unknown topic or queue, and beyond the limits;
        Unavailable, when no shard answers the first look-up of its topic.
        """
        route = self._batcher.batch_sender.topic(message.topic)
        if message.is_null or route.values.schema is not None:
            route.values.check_body(message.body, is_null=message.is_null)

        queue_id = message.queue_id
        if queue_id is not None:
            route.shard_of(queue_id)
            queue_id = int(queue_id)
        elif message.key is not None:
            queue_id = queue_of(message.key, route.queues)
        if message.later is not None:
            waiting_properties(message, route.queues - 1, message.later)

        self._check_room(message.size)
        self._bytes += message.size
        self._rows.append(_Row(message, route, queue_id, self._clock.now_ms()))
        return len(self._rows) - 1

    def _check_room(self, size: int) -> None:
        if self._bytes + size <= BYTES_MAX and len(self._rows) < ROWS_MAX:
            return
        raise Rejected(
            f"the transaction has {len(self._rows)} messages of {self._bytes} bytes, and this one {size}; a "
            f"transaction may have {ROWS_MAX} messages and {BYTES_MAX} bytes: commit more often",
            field="transaction",
            limit=BYTES_MAX,
        )

    @property
    def messages(self) -> list[EncodedMessage]:
        """In the order of the sends."""
        return [row.message for row in self._rows]

    def shards(self) -> dict[int, str]:
        """The shards of messages whose queue is given, by their key or number. Each with the first such queue."""
        found: dict[int, str] = {}
        for row in self._rows:
            if row.queue_id is not None:
                shard = row.route.shard_of(row.queue_id)
                found.setdefault(shard, f"messages for queue {row.queue_id} of {row.route.name}")
        return found

    def free_topics(self) -> dict[str, TopicRoute]:
        """The topics of messages that may be in any queue."""
        return {row.route.name: row.route for row in self._rows if row.queue_id is None}

    def place(self, shard: int) -> PlacedRows:
        """All messages as columns, those that may be in any queue in one of the shard. Callers: it has a queue of each
        of `free_topics`. Raises: Rejected.
        """
        free = self.free_topics()
        chosen = {name: random.choice(route.queues_of(shard)) for name, route in free.items()}
        return PlacedRows(shard, self._rows, chosen)


def _target(shard: int, row: _Row, chosen: dict[str, int]) -> tuple[tuple[str, int], bytes | None]:
    """Topic and queue of a message as its receipt names them, and its properties."""
    message = row.message
    queue_id = chosen[row.route.name] if row.queue_id is None else row.queue_id
    if message.later is None:
        return (message.topic, queue_id), message.properties
    waiting = waiting_queue(shard, message.delay_level)
    return waiting, waiting_properties(message, queue_id, message.later)


def _queue_there(topic: str, queue_id: int) -> int:
    """The queue id as the shard knows it."""
    return shard_place(topic, queue_id)[1] if topic in SHARD_TOPICS else queue_id


def _batch(rows: list[tuple[_Row, bytes | None]]) -> pa.RecordBatch | None:
    if not rows:
        return None
    heads: dict[int, Head] = {
        number: row.message.head
        for number, (row, _) in enumerate(rows)
        if row.message.head is not None
    }
    return batch_of(
        [row.message.body for row, _ in rows],
        [row.message.tag for row, _ in rows],
        [properties for _, properties in rows],
        [row.born_time_ms for row, _ in rows],
        heads,
    )
