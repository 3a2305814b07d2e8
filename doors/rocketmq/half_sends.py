"""Half messages: which messages are some, and how they are put.

Source: SendMessageProcessor#sendMessage, TransactionalMessageBridge#parseHalfMessageInner.
"""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import Mapping

from raymq.store.base.errors import Unavailable
from raymq.store.base.format import format_host
from raymq.store.delay.delivery_time import delay_level
from raymq.store.records.keys import UNIQ_KEY
from raymq.store.records.properties import PRODUCER_GROUP

from .message_row import MessageRow
from .send_lanes import WAITING_BYTES_MAX, StoredSend
from .shards import Shards

#: property of a half message
PREPARED = "TRAN_MSG"


def is_half(properties: Mapping[str, str], reconsume_times: int) -> bool:
    """Whether a message with such properties is a half message.

    Consumers that send a committed message back leave the property in it.
    """
    is_prepared = properties.get(PREPARED, "").lower() == "true"
    return is_prepared and not (reconsume_times > 0 and delay_level(properties) > 0)


class HalfMessageSender:
    """Puts half messages."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._waiting_bytes = 0

    async def put(
        self,
        shard: int,
        topic: str,
        queue_id: int,
        row: MessageRow,
        properties: Mapping[str, str],
        group: str,
    ) -> tuple[StoredSend, str]:
        """Put a half message. Returns: its place, and its transaction id. Raises: RayMQError.

        Args: `properties`: all of the message. `group`: the producer group, if these name none.
        """
        size = len(row.body)
        if self._waiting_bytes and self._waiting_bytes + size > WAITING_BYTES_MAX:
            raise Unavailable("too many half messages wait for their shard; send again later")

        self._waiting_bytes += size
        try:
            half = await self._shards.call_transaction(
                shard,
                "prepare_half",
                {
                    "topic": topic,
                    "queue_id": queue_id,
                    "group": properties.get(PRODUCER_GROUP) or group,
                    "body": b64encode(row.body).decode(),
                    # By its key the shard knows a request that comes again.
                    "properties": {UNIQ_KEY: uuid.uuid4().hex.upper(), **properties},
                    "born_time_ms": max(0, row.born_time_ms),
                    "flag": row.flag,
                    "sys_flag": row.sys_flag,
                    "born_host": format_host(row.born_host),
                },
            )
        finally:
            self._waiting_bytes -= size
        place = StoredSend(shard, int(half["offset"]), [int(half["physical_offset"])])
        return place, str(half["transaction_id"])
