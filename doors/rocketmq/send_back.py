"""Messages that a consumer could not handle: they come again later, finally in the dead letter topic.

Source: ConsumerManageProcessor, AbstractSendMessageProcessor#consumerSendMsgBack.
"""

from __future__ import annotations

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .request_fields import RequestFields
from .send_message import shard_named
from .shards import Shards


class SendBackProcessor:
    """Answers CONSUMER_SEND_MSG_BACK."""

    CODES = (RequestCode.CONSUMER_SEND_MSG_BACK,)

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Put a message into the retry topic of a group. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        group, offset = fields.text("group"), fields.integer("offset")
        shard = shard_named(fields.text("bname", ""), connection)
        place = await self._shards.call(shard, "place_of_record", {"physical_offset": offset})
        if not place:
            # The client sends the message to the retry topic itself then.
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"no message begins at {offset} of the log of raymq-{shard}",
            )
        back = {"group": group, "delay_level": fields.integer("delayLevel", 0), **place}
        most = fields.integer("maxReconsumeTimes", -1)
        if most >= 0:
            back["max_reconsume_times"] = most
        await self._shards.call(shard, "send_back", back)
        return answer(request, ResponseCode.SUCCESS)
