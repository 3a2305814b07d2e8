"""Locks of queues, which consumers with a MessageListenerOrderly have. A lock is a claim of the queue at its shard.

Source: AdminBrokerProcessor, RebalanceLockManager, LockBatchRequestBody, LockBatchResponseBody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from raymq.store.base.errors import Rejected, TopicDeleted, TopicMissing

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .consumer_offsets import OffsetStore
from .json_dialect import write_json
from .request_fields import json_body
from .send_message import shard_named
from .shards import Shards
from .shared_groups import SharedGroups

logger = logging.getLogger("raymq.rocketmq")

#: shard and topic
_Place = tuple[int, str]


class MessageQueue(NamedTuple):
    """A queue as clients name it."""

    topic: str
    broker: str
    #: at its broker
    number: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> MessageQueue:
        """Of a body. Raises: KeyError, TypeError, ValueError."""
        return cls(str(fields["topic"]), str(fields["brokerName"]), int(fields["queueId"]))

    def fields(self) -> dict[str, Any]:
        """For a body."""
        return {"topic": self.topic, "brokerName": self.broker, "queueId": self.number}


class _Asked(NamedTuple):
    """What a request is about."""

    group: str
    client: str
    #: shard and topic -> queue id -> the queue as the client names it; without those that do not exist
    queues: dict[_Place, dict[int, MessageQueue]]


class QueueLockProcessor:
    """Answers LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    CODES = (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ)

    def __init__(self, shards: Shards, offsets: OffsetStore, shared: SharedGroups) -> None:
        self._shards = shards
        self._offsets = offsets
        self._shared = shared

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Lock or unlock queues. Raises: Refused, RayMQError."""
        asked = await self._asked(connection, request)
        if request.code == RequestCode.UNLOCK_BATCH_MQ:
            await asyncio.gather(*(self._unlock(asked, place) for place in asked.queues))
            return answer(request, ResponseCode.SUCCESS)

        await self._shared.check(asked.group, connection)
        locked = [each.fields() for each in await self._lock(asked)]
        body = write_json({"lockOKMQSet": locked}, standard=True)
        return answer(request, ResponseCode.SUCCESS, body=body)

    async def _asked(self, connection: ClientConnection, request: RemotingCommand) -> _Asked:
        fields = json_body(request)
        try:
            group, client = str(fields["consumerGroup"]), str(fields["clientId"])
            wanted = [MessageQueue.of(each) for each in fields.get("mqSet") or ()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"a request for locks without {error!r}"
            raise Refused(ResponseCode.SYSTEM_ERROR, text) from error

        queues: dict[_Place, dict[int, MessageQueue]] = {}
        for each in wanted:
            shard = shard_named(each.broker, connection)
            try:
                queue_id = (await self._shards.topic(each.topic)).queue_id(shard, each.number)
            except (TopicMissing, TopicDeleted):
                # The client asks again, with the queues that its route has then.
                continue
            if queue_id is not None:
                queues.setdefault((shard, each.topic), {})[queue_id] = each
        return _Asked(group, client, queues)

    async def _lock(self, asked: _Asked) -> list[MessageQueue]:
        """Renew or take locks. Returns: the queues that the client has now."""
        first = [self._call_lock(asked, place, list(asked.queues[place])) for place in asked.queues]
        answers = dict(zip(asked.queues, await asyncio.gather(*first), strict=True))
        locked = [(place, each) for place, found in answers.items() for each in found["locked"]]
        free = {place: found["free"] for place, found in answers.items() if found["free"]}
        if free:
            number = await self._take_number(asked.group, free)
            if number is not None:
                second = [self._call_lock(asked, place, free[place], number) for place in free]
                for place, found in zip(free, await asyncio.gather(*second), strict=True):
                    locked += [(place, each) for each in found["locked"]]
        return [asked.queues[place][queue_id] for place, queue_id in locked]

    async def _call_lock(
        self, asked: _Asked, place: _Place, queue_ids: list[int], number: int | None = None
    ) -> dict[str, Any]:
        shard, topic = place
        arguments: dict[str, object] = {
            "group": asked.group,
            "topic": topic,
            "client": asked.client,
            "queues": queue_ids,
        }
        if number is not None:
            arguments["number"] = number
        return await self._shards.call(shard, "lock_queues", arguments)

    async def _take_number(self, group: str, free: Mapping[_Place, list[int]]) -> int | None:
        """A new number of the group's coordinator; None: a member has one of these queues."""
        queues: dict[str, list[int]] = {}
        for (_, topic), queue_ids in free.items():
            queues.setdefault(topic, []).extend(queue_ids)
        coordinator = await self._shared.coordinator(group)
        try:
            found = await self._shards.call(
                coordinator, "take_group_number", {"group": group, "queues": queues, "force": False}
            )
        except Rejected as error:
            logger.info("queues are not locked: %s", error)
            return None
        return int(found["number"])

    async def _unlock(self, asked: _Asked, place: _Place) -> None:
        shard, topic = place
        # The client has committed them just before. The next owner begins where it has stopped.
        await self._offsets.settle(shard, asked.group, topic)
        arguments = {
            "group": asked.group,
            "topic": topic,
            "client": asked.client,
            "queues": list(asked.queues[place]),
        }
        await self._shards.call(shard, "unlock_queues", arguments)
