"""Messages that a client puts into the retry topic of its group by itself, with how often it has got them.

Clients do so when sending a message back has failed, and for a message of an orderly consumer that failed too often.
Source: DefaultMQPushConsumerImpl#sendMessageBackAsNormalMessage, SendMessageProcessor#handleRetryAndDLQ.
"""

from __future__ import annotations

from base64 import b64encode

from raymq.store.base.format import RETRY_PREFIX, format_host
from raymq.store.records.producer_stamp import STAMP_NAME
from raymq.store.records.properties import WAIT, decode

from .message_row import MessageRow
from .request_fields import RequestFields
from .send_lanes import StoredSend
from .shards import Shards


class RetrySender:
    """Puts such messages. They are few: each is a call of its shard."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def put(
        self, shard: int, topic: str, row: MessageRow, text: bytes, fields: RequestFields
    ) -> StoredSend:
        """Put a message. Args: `text`: its properties. `fields`: of the request. Raises: RayMQError."""
        properties = decode(text)
        for name in (WAIT, STAMP_NAME):
            # The answer waits for the promise in any case. A stamp is that of the message which the client has got.
            properties.pop(name, None)

        arguments: dict[str, object] = {
            "group": topic.removeprefix(RETRY_PREFIX),
            "body": b64encode(row.body).decode(),
            "properties": properties,
            "born_time_ms": max(0, row.born_time_ms),
            "reconsume_times": fields.integer("reconsumeTimes"),
            "flag": row.flag,
            "sys_flag": row.sys_flag,
            "born_host": format_host(row.born_host),
        }
        most = fields.integer("maxReconsumeTimes", -1)
        if most >= 0:
            arguments["max_reconsume_times"] = most

        # A client waits no longer.
        found = await self._shards.call_transaction(shard, "put_retry", arguments)
        return StoredSend(shard, int(found["offset"]), [int(found["physical_offset"])])
