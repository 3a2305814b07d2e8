"""Sends: one message or a batch of one queue.

Source: SendMessageProcessor, SendMessageRequestHeaderV2, SendMessageResponseHeader.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from raymq.store.base.clock import Clock
from raymq.store.base.format import RETRY_PREFIX, pack_host
from raymq.store.records.producer_stamp import STAMP_NAME
from raymq.store.records.properties import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    WAIT,
    decode,
    encode,
)
from raymq.store.records.record import SmallBatch

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .delayed_sends import Lane, is_delayed, waiting_lane
from .half_sends import PREPARED, HalfMessageSender, is_half
from .message_batch import decode_batch
from .message_row import only_row
from .property_text import PutProperties, split
from .request_fields import RequestFields
from .retry_sends import RetrySender
from .send_lanes import SendLanes, StoredSend
from .shards import Shards
from .sys_flags import INNER_BATCH, TRANSACTION_MASK
from .topology import BrokerQueues, BrokerTable, packed, shard_of_broker

#: the short names of the second version of the header, which is the one of clients since 3.5
_V2 = {
    "producerGroup": "a",
    "topic": "b",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
    "reconsumeTimes": "j",
    "maxReconsumeTimes": "l",
    "batch": "m",
    "brokerName": "n",
}
_V1 = {**{name: name for name in _V2}, "brokerName": "bname"}

#: property with the id that the client gave its message
_UNIQUE_ID = b"UNIQ_KEY"
#: every answer and every message names a region, and says that it may be traced: without, consumers trace nothing.
#: Source: AbstractSendMessageProcessor#buildMsgContext
_REGION = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
_STORED_REGION = encode(_REGION)
#: in the properties of each half message, and perhaps of others
_PREPARED = PREPARED.encode() + NAME_VALUE_SEPARATOR
_WAITS_NOT = encode({WAIT: "false"})


class SendMessageProcessor:
    """Answers SEND_MESSAGE, SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE when the promise of the shard is kept."""

    CODES = (
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
    )

    def __init__(
        self,
        shards: Shards,
        lanes: SendLanes,
        halves: HalfMessageSender,
        brokers: BrokerTable,
    ) -> None:
        """Args: `brokers`: where clients dial each shard, a part of message ids."""
        self._shards = shards
        self._lanes = lanes
        self._halves = halves
        self._retries = RetrySender(shards)
        self._brokers = brokers

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Store the messages of a request. Raises: Refused, RayMQError."""
        names = _V1 if request.code == RequestCode.SEND_MESSAGE else _V2
        fields = RequestFields(request, names)
        topic = fields.text("topic")
        queues = await self._shards.topic(topic)
        shard = shard_named(fields.text("brokerName", ""), connection)
        queue_id = _queue_of(queues, shard, fields.integer("queueId"))

        is_batch = request.code == RequestCode.SEND_BATCH_MESSAGE or fields.flag("batch")
        texts, rows = self._rows(connection, request, fields, is_batch=is_batch)
        prepared = _half_properties(texts, fields, is_batch=is_batch)
        if prepared is not None:
            group = fields.text("producerGroup", "")
            stored, transaction = await self._halves.put(
                shard, topic, queue_id, only_row(rows), prepared, group
            )
            answered = self._fields(queues, queue_id, texts, stored)
            return answer(request, ResponseCode.SUCCESS, {**answered, "transactionId": transaction})

        if topic.startswith(RETRY_PREFIX) and not is_batch and fields.integer("reconsumeTimes", 0):
            stored = await self._retries.put(shard, topic, only_row(rows), texts[0], fields)
            return answer(
                request, ResponseCode.SUCCESS, self._fields(queues, queue_id, texts, stored)
            )

        lane = Lane(topic, queue_id, None)
        if is_delayed(b"".join(filter(None, rows.properties))):
            levels = self._shards.delay_levels
            lane, rows = _delayed(topic, queue_id, shard, rows, levels)
        stored = await self._lanes.put(shard, lane.topic, lane.queue, rows)
        return answer(request, ResponseCode.SUCCESS, self._fields(queues, queue_id, texts, stored))

    def _rows(
        self,
        connection: ClientConnection,
        request: RemotingCommand,
        fields: RequestFields,
        *,
        is_batch: bool,
    ) -> tuple[list[bytes], SmallBatch]:
        """The properties of each message as text, and the rows with all columns. Raises: Refused, Malformed."""
        born_ms, sys_flag = fields.integer("bornTimestamp"), fields.integer("sysFlag", 0)
        if sys_flag & INNER_BATCH:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "a batch inside of one message (sysFlag 128) is not supported: send it as a batch",
            )
        flag = fields.integer("flag", 0)
        if not -(2**31) <= flag < 2**31:
            raise Refused(ResponseCode.MESSAGE_ILLEGAL, f"the flag is {flag}; it has 32 bits")
        if is_batch:
            flags, bodies, texts = decode_batch(request.body)
        else:
            flags, bodies = [flag], [bytes(request.body)]
            texts = [fields.text("properties", "").encode()]

        if sys_flag & TRANSACTION_MASK and not _may_be_half(texts):
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "sysFlag has the bits of a transaction: a half message also has the property TRAN_MSG=true",
            )
        parts = [split(text) for text in texts]
        count = len(bodies)
        return texts, SmallBatch(
            bodies,
            [each.tag for each in parts],
            list(map(_stored_properties, parts)),
            [born_ms] * count,
            list(flags),
            [sys_flag & ~TRANSACTION_MASK] * count,
            [pack_host(*connection.peer)] * count,
        )

    def _fields(
        self,
        queues: BrokerQueues,
        queue_id: int,
        texts: Sequence[bytes],
        stored: StoredSend,
    ) -> dict[str, str]:
        return {
            "msgId": ",".join(self._message_ids(stored)),
            "queueId": str(queues.number(queue_id)),
            "queueOffset": str(stored.queue_offset),
            "transactionId": _property(texts[0], _UNIQUE_ID),
            **_REGION,
        }

    def _message_ids(self, stored: StoredSend) -> list[str]:
        """As RocketMQ: "" for a message whose place in the log is not known."""
        address = self._brokers.leader(stored.shard)
        if address is None:
            return [""] * len(stored.physical_offsets)
        host = packed(address)
        return [f"{host}{offset:016X}" if offset >= 0 else "" for offset in stored.physical_offsets]


def _may_be_half(texts: Sequence[bytes]) -> bool:
    """Whether one of the messages may be a half message."""
    return _PREPARED in PROPERTY_SEPARATOR.join(texts)


def _half_properties(
    texts: Sequence[bytes], fields: RequestFields, *, is_batch: bool
) -> dict[str, str] | None:
    """The properties of a half message; None: it is none. Raises: Refused for a batch."""
    if not _may_be_half(texts):
        return None
    for text in texts:
        named = decode(text)
        if not is_half(named, 0 if is_batch else fields.integer("reconsumeTimes", 0)):
            continue
        if is_batch:
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                "messages of a batch cannot be half messages of transactions: send them alone",
            )
        # The answer waits for the promise in any case. A stamp is that of a message which the client has received.
        for name in (WAIT, STAMP_NAME):
            named.pop(name, None)
        return {**named, **_REGION}
    return None


def _stored_properties(parts: PutProperties) -> bytes:
    """The properties of a message in its record."""
    found = parts.properties or b""
    # A client that sends a message again which it has received sends them, too.
    if _STORED_REGION not in found:
        found += _STORED_REGION
    return found if parts.wait_store_ok else found + _WAITS_NOT


def _delayed(
    topic: str, queue_id: int, shard: int, rows: SmallBatch, levels: int
) -> tuple[Lane, SmallBatch]:
    """Where a message waits, and its row there. Raises: Refused for a batch; Rejected."""
    if rows.num_rows > 1:
        raise Refused(
            ResponseCode.MESSAGE_ILLEGAL, "messages of a batch cannot be delayed: send them alone"
        )
    (properties,) = rows.properties
    lane = waiting_lane(
        topic,
        queue_id,
        shard,
        properties or b"",
        now_ms=Clock().now_ms(),
        levels=levels,
    )
    return lane, rows._replace(properties=[lane.properties])


def shard_named(broker: str, connection: ClientConnection) -> int:
    """The shard that a request means: its broker's, or that of the port. Raises: Refused when neither is known."""
    if broker:
        shard = shard_of_broker(broker)
        if shard is not None:
            return shard
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"the broker {broker!r} is not one of this cluster: take its names from the route",
        )
    if connection.shard is None:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            "the request names no broker, and this port is for all of them: use the addresses of the route",
        )
    return connection.shard


def queue_named(queues: BrokerQueues, shard: int, number: int) -> int:
    """The queue that a client means. Raises: Refused for one that the broker does not have."""
    queue_id = queues.queue_id(shard, number)
    if queue_id is None:
        count = len(queues.by_shard.get(shard, ()))
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"queueId {number} of topic {queues.route.name} is not one of the {count} queues of raymq-{shard}",
        )
    return queue_id


def _queue_of(queues: BrokerQueues, shard: int, number: int) -> int:
    """The queue of a send. Any queue of the shard if the client names none."""
    own = queues.by_shard.get(shard)
    if number < 0 and own:
        return random.choice(own)
    return queue_named(queues, shard, number)


def _property(text: bytes, name: bytes) -> str:
    """The value of a property; "" without it."""
    mark = name + NAME_VALUE_SEPARATOR
    if not text.startswith(mark):
        mark = PROPERTY_SEPARATOR + mark
    _, _, rest = text.partition(mark)
    return str(rest.partition(PROPERTY_SEPARATOR)[0], "utf-8", "replace")
