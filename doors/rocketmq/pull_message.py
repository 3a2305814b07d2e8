"""Pulls: messages of a queue, at once or when there are any. The body of the answer is what the shard sent.

Source: PullMessageProcessor, PullMessageRequestHeader, PullRequestHoldService.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.errors import OffsetOutOfRange
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector

from .answers import Refused
from .arrivals import Arrivals
from .client_table import ClientTable
from .codes import MQVersion, RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .consumer_offsets import OffsetStore
from .named_queue import named_queue
from .request_fields import RequestFields
from .shards import Shards
from .shared_groups import SharedGroups
from .topology import BrokerQueues

#: bits of a pull's sysFlag
_COMMIT, _SUSPEND, _SUBSCRIPTION = 1, 2, 4
#: bytes of one answer. A frame may have 16 MiB. Source: maxTransferBytesOnMessageInMemory
ANSWER_BYTES = 256 << 10
#: messages of one answer. Source: maxTransferCountOnMessageInMemory
ANSWER_MESSAGES_MAX = 1_024
#: longest wait of one pull. Clients ask for 15 s, and give up after 30
SUSPEND_MS_MAX = 20_000
#: how often a waiting pull looks by itself. Sends of this server wake it at once
LOOK_AGAIN_S = 1.0
#: how long a message that has arrived may take until it is in its queue
ARRIVED_MS = 50
#: how often a client that takes its answers slowly is looked at
SLOW_PAUSE_S = 0.05
#: the broker id that clients ask next: the leader
_BROKER_ID = "0"


class PullMessageProcessor:
    """Answers PULL_MESSAGE and LITE_PULL_MESSAGE."""

    CODES = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)

    def __init__(
        self,
        shards: Shards,
        clients: ClientTable,
        offsets: OffsetStore,
        shared: SharedGroups,
        arrivals: Arrivals,
    ) -> None:
        self._shards = shards
        self._clients = clients
        self._offsets = offsets
        self._shared = shared
        self._arrivals = arrivals

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Read a queue. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        topic, group = fields.text("topic"), fields.text("consumerGroup")
        queues, shard, queue_id = await named_queue(self._shards, connection, fields)
        flags = fields.integer("sysFlag", 0)

        if flags & _COMMIT:
            offset = fields.integer("commitOffset", 0)
            client = self._clients.client_id(connection)
            self._offsets.commit_soon(shard, group, topic, queue_id, offset, client)
        await self._shared.check(group, connection)
        wanted = FetchRequest(
            topic,
            {queue_id: fields.integer("queueOffset")},
            max_bytes=min(fields.integer("maxMsgBytes", ANSWER_BYTES), ANSWER_BYTES)
            if fields.integer("maxMsgBytes", 0) > 0
            else ANSWER_BYTES,
            max_records=max(1, min(fields.integer("maxMsgNums", 32), ANSWER_MESSAGES_MAX)),
            wait_ms=0,
            wanted=self._selector(fields, flags, group, topic),
        )
        wait_ms = fields.integer("suspendTimeoutMillis", 0) if flags & _SUSPEND else 0

        def check() -> None:
            self._shared.check_now(group, connection)

        return await self._pull(connection, request, queues, shard, wanted, wait_ms, check)

    def _selector(
        self, fields: RequestFields, flags: int, group: str, topic: str
    ) -> MessageSelector | None:
        """The filter of a pull. Raises: Refused when it is that of a heartbeat which has not come."""
        if flags & _SUBSCRIPTION or fields.text("subscription", ""):
            expression = fields.text("subscription", "*")
            kind = fields.text("expressionType", "TAG")
        else:
            found = self._clients.subscription(group, topic)
            if found is None:
                raise Refused(
                    ResponseCode.SUBSCRIPTION_NOT_EXIST,
                    f"no consumer of group {group} has subscribed to {topic}",
                )
            if found.version < fields.integer("subVersion", 0):
                raise Refused(
                    ResponseCode.SUBSCRIPTION_NOT_LATEST,
                    f"the heartbeat with the subscription of group {group} has not come yet",
                )
            expression, kind = found.expression, found.kind
        if kind == "TAG" and expression.strip() in ("", "*"):
            return None
        return MessageSelector(kind, expression)

    async def _pull(
        self,
        connection: ClientConnection,
        request: RemotingCommand,
        queues: BrokerQueues,
        shard: int,
        wanted: FetchRequest,
        wait_ms: int,
        check: Callable[[], None],
    ) -> RemotingCommand:
        """Fetch until there is something to say, or the wait is over. Args: `check`: raises Refused."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(wait_ms, SUSPEND_MS_MAX) / 1000
        ((queue_id, asked),) = wanted.offsets.items()
        offset, ends = asked, None
        fetch_ms, arrived_s = 0, 0.0
        while True:
            check()
            # Before the fetch: what arrives during it wakes this pull.
            arrival = self._arrivals.next(wanted.topic, queue_id)
            try:
                part = await _read(
                    connection,
                    shard,
                    wanted._replace(offsets={queue_id: offset}, wait_ms=fetch_ms),
                    self._shards,
                )
                if part is not None and part.error is not None:
                    raise part.error
            except OffsetOutOfRange as error:
                return _moved(request, error, asked)

            if part is not None:
                offset, ends = max(offset, part.next_offset), (part.min_offset, part.max_offset)
                if part.records is not None and len(part.records):
                    is_renumbered = queues.is_renumbered and request.version < MQVersion.V5_0_0
                    number = queues.number(queue_id) if is_renumbered else None
                    body = _body(part.records, number)
                    return _answered(request, ResponseCode.SUCCESS, offset, ends, body)
            left_s = until_s - loop.time()
            if left_s <= 0 or connection.is_closed:
                # A filtered stretch moves the client on. Otherwise it would look at it again and again.
                is_moved = offset > asked
                code = (
                    ResponseCode.PULL_RETRY_IMMEDIATELY if is_moved else ResponseCode.PULL_NOT_FOUND
                )
                if ends is None:
                    found = await self._shards.call(shard, "queue_ranges", {"topic": wanted.topic})
                    low, high = found.get(str(queue_id), (0, 0))
                    ends = int(low), int(high)
                return _answered(request, code, offset, ends)
            if part is not None and offset < part.max_offset:
                continue
            if loop.time() < arrived_s + ARRIVED_MS / 1000:
                # That of another queue has ended the fetch. This queue's is in the log, and not in the queue yet.
                continue
            has_arrived = await arrival.within(min(left_s, LOOK_AGAIN_S))
            fetch_ms, arrived_s = (ARRIVED_MS, loop.time()) if has_arrived else (0, 0.0)


async def _read(
    connection: ClientConnection, shard: int, wanted: FetchRequest, shards: Shards
) -> FetchSlice | None:
    """Read a queue, once the client has taken most of what it was sent. Raises: RayMQError."""
    async with connection.fetches:
        while connection.is_slow and not connection.is_closed:
            await asyncio.sleep(SLOW_PAUSE_S)
        return await shards.read(shard, wanted)


def _body(records: pa.Array, number: int | None) -> bytes | memoryview:
    """The records as they are, one after the other. Args: `number`: a queue id to write into them; None: as stored."""
    offsets = np.frombuffer(records.buffers()[1], dtype=np.int32)
    offsets = offsets[records.offset : records.offset + len(records) + 1]
    data = memoryview(records.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
    if number is None:
        return data
    # Clients before 5.0 take the queue id from the record.
    changed = np.frombuffer(data, dtype=np.uint8).copy()
    at = (offsets[:-1] - offsets[0])[:, None] + np.arange(fmt.QUEUE_ID_AT, fmt.QUEUE_ID_AT + 4)
    changed[at] = np.frombuffer(number.to_bytes(4, "big"), dtype=np.uint8)
    return changed.tobytes()


def _answered(
    request: RemotingCommand,
    code: ResponseCode,
    next_offset: int,
    ends: tuple[int, int],
    body: bytes | memoryview = b"",
) -> RemotingCommand:
    fields = _ends(next_offset, *ends)
    remark = None if code == ResponseCode.SUCCESS else code.name
    return answer(request, code, fields, body, remark)


def _moved(request: RemotingCommand, error: OffsetOutOfRange, asked: int) -> RemotingCommand:
    """The answer to a pull from an offset that the queue does not have: where to go on."""
    low, high = int(error.fields["min"]), int(error.fields["max"])
    corrected = low if asked < low else high
    fields = _ends(corrected, low, high)
    return answer(request, ResponseCode.PULL_OFFSET_MOVED, fields, remark=str(error))


def _ends(next_offset: int, low: int, high: int) -> dict[str, str]:
    return {
        "nextBeginOffset": str(next_offset),
        "minOffset": str(low),
        "maxOffset": str(high),
        "suggestWhichBrokerId": _BROKER_ID,
    }
