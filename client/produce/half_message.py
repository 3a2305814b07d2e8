"""Half messages as programs see them: that of a send, which is committed or rolled back, and that of a check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import pyarrow as pa

from raymq.client.messages.compressed_body import inflate_or_keep
from raymq.client.messages.fields import INDEX_KEYS, NULL_VALUE
from raymq.client.messages.keys import key_of
from raymq.client.messages.message import INDEX_KEY_SEPARATOR, SYSTEM_PROPERTIES, Message
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SYS_OF_SENDER
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.keys import UNIQ_KEY
from raymq.store.records.properties import (
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    TAGS,
    decode,
)

from .half_id import CLUSTER_DIGITS, HalfId

#: ends the half message with an id: "commit" or "rollback"
EndHalf = Callable[[str, str], bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class HalfMessage:
    """A stored half message, the result of `Producer.send_half`. No consumer sees it before its commit.

    It does not pickle. Its `id` is a text: another process, or a later one, calls `producer.end_half(half.id, ...)`.
    """

    #: names it in the whole cluster, at any time
    id: str
    #: where the commit puts the message
    topic: str
    queue_id: int
    #: RocketMQ's transaction id, which a check names as well
    transaction_id: str
    _end: EndHalf = field(repr=False)

    def commit(self) -> bool:
        """Put the message into its topic, for consumers to see. It waits as `Producer.end_half` does.

        Returns, raises: as `Producer.end_half`.
        """
        return self._end(self.id, "commit")

    def rollback(self) -> bool:
        """Drop the message. It waits as `Producer.end_half` does.

        Returns, raises: as `Producer.end_half`.
        """
        return self._end(self.id, "rollback")

    def __reduce__(self) -> NoReturn:
        raise _does_not_pickle()


@dataclass(frozen=True, kw_only=True, eq=False)
class AsyncHalfMessage:
    """The result of `AsyncProducer.send_half`: a `HalfMessage` for asyncio."""

    #: names it in the whole cluster, at any time
    id: str
    #: where the commit puts the message
    topic: str
    queue_id: int
    #: RocketMQ's transaction id, which a check names as well
    transaction_id: str
    _end: EndHalf = field(repr=False)

    @classmethod
    def of(cls, half: HalfMessage) -> AsyncHalfMessage:
        """The same half message for asyncio."""
        return cls(
            id=half.id,
            topic=half.topic,
            queue_id=half.queue_id,
            transaction_id=half.transaction_id,
            _end=half._end,
        )

    async def commit(self) -> bool:
        """Put the message into its topic, as `HalfMessage.commit`. Cancelling the wait does not cancel the call."""
        return await asyncio.to_thread(self._end, self.id, "commit")

    async def rollback(self) -> bool:
        """Drop the message, as `HalfMessage.rollback`. Cancelling the wait does not cancel the call."""
        return await asyncio.to_thread(self._end, self.id, "rollback")

    def __reduce__(self) -> NoReturn:
        raise _does_not_pickle()


@dataclass(frozen=True, kw_only=True)
class CheckedHalf(Message):
    """A half message whose producers are asked what has become of it. The callback of `Producer.check` gets it.

    Its fields are those of the message that was sent, by RayMQ's or RocketMQ's clients.
    """

    #: names it for `Producer.end_half`
    id: str
    #: the producer group that has prepared it
    group: str
    #: where the commit puts the message
    queue_id: int
    #: RocketMQ's transaction id
    transaction_id: str
    #: how often it was asked about, this time included. After 15 times it is given up
    checks: int
    #: when the producer made it, by the producer's clock
    born_time_ms: int
    #: when the shard stored it
    store_time_ms: int
    #: whether the value is null, and not empty bytes
    is_null: bool = False

    @property
    def value(self) -> object:
        """As of a `Message`; None for a null value."""
        return None if self.is_null else super().value


def checked_half(cluster_id: str, shard: int, record: bytes, checks: int) -> CheckedHalf:
    """The half message of a record that a shard has named."""
    (row,) = decode_records(pa.array([record], pa.binary())).to_pylist()
    properties = decode(row["properties"])
    body, bits = inflate_or_keep(row["body"], row["sys_flag"])
    group = properties.get(PRODUCER_GROUP, "")
    queue = properties.get(REAL_QUEUE, "")
    place = HalfId(
        cluster_id[:CLUSTER_DIGITS], shard, row["queue_offset"], row["physical_offset"], group
    )

    return CheckedHalf(
        topic=properties.get(REAL_TOPIC, ""),
        body=body,
        key=key_of(properties),
        tag=properties.get(TAGS),
        index_keys=tuple(filter(None, properties.get(INDEX_KEYS, "").split(INDEX_KEY_SEPARATOR))),
        properties={n: value for n, value in properties.items() if n not in SYSTEM_PROPERTIES},
        flag=row["flag"],
        sys_flag=bits & SYS_OF_SENDER,
        born_host=row["born_host"],
        id=place.text,
        group=group,
        queue_id=int(queue) if queue.isdecimal() else -1,
        transaction_id=properties.get(UNIQ_KEY, ""),
        checks=checks,
        born_time_ms=row["born_time_ms"],
        store_time_ms=row["store_time_ms"],
        is_null=NULL_VALUE in properties and not body,
    )


def _does_not_pickle() -> Rejected:
    return Rejected(
        "a half message has the connections of its producer and does not pickle: pickle its id, and call "
        "producer.end_half(id, ...) where it is ended",
        field="pickle",
    )
