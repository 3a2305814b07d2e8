"""Routes: which brokers have the queues of a topic, and where these brokers are.

Source: ClientRequestProcessor, TopicRouteData.
"""

from __future__ import annotations

from typing import Any

from raymq.store.base.errors import TopicMissing

from .answers import Refused
from .codes import MQVersion, RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .json_dialect import write_json
from .request_fields import RequestFields
from .shards import Shards
from .topology import BrokerQueues, BrokerTable, broker_name

#: a queue may be read and written
READ_WRITE = 6


class RouteInfoProcessor:
    """Answers GET_ROUTEINFO_BY_TOPIC."""

    CODES = (RequestCode.GET_ROUTEINFO_BY_TOPIC,)

    def __init__(self, shards: Shards, brokers: BrokerTable) -> None:
        self._shards = shards
        self._brokers = brokers

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """The route of a topic. Raises: Refused for one that does not exist; Unavailable."""
        fields = RequestFields(request)
        topic = fields.text("topic")
        try:
            queues = await self._shards.topic(topic)
        except TopicMissing as error:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, str(error)) from error
        is_standard = request.version >= MQVersion.V4_9_4 or fields.flag("acceptStandardJsonOnly")
        body = write_json(self._route(queues), standard=is_standard)
        return answer(request, ResponseCode.SUCCESS, body=body)

    def _route(self, queues: BrokerQueues) -> dict[str, Any]:
        # A broker without an address would hide all others from some clients.
        counts = {
            shard: len(own)
            for shard, own in queues.by_shard.items()
            if own and self._brokers.of(shard)
        }
        brokers = [
            {
                "brokerAddrs": {
                    number: str(address)
                    for number, address in sorted(self._brokers.of(shard).items())
                },
                "brokerName": broker_name(shard),
                "cluster": self._shards.name,
                "enableActingMaster": False,
            }
            for shard in counts
        ]

        queue_facts = [
            {
                "brokerName": broker_name(shard),
                "perm": READ_WRITE,
                "readQueueNums": count,
                "topicSysFlag": 0,
                "writeQueueNums": count,
            }
            for shard, count in counts.items()
        ]
        return {"brokerDatas": brokers, "filterServerTable": {}, "queueDatas": queue_facts}
