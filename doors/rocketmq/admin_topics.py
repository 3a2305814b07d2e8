"""Topics for RocketMQ's tools: lists, statistics, creation and deletion.

Source: AdminBrokerProcessor, DefaultRequestProcessor of the name server.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raymq.client.handle import ClusterHandle
from raymq.client.topics.add_queues import add_queues
from raymq.client.topics.delete_topic import delete_topic
from raymq.client.topics.new_topic import create_topic
from raymq.store.base.errors import Rejected
from raymq.store.state.shard_state import CLEANUP_POLICY, COMPACTION, DELETE

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .json_dialect import JsonKey, write_json
from .request_fields import RequestFields
from .route_info import READ_WRITE
from .send_message import shard_named
from .shards import Shards
from .stored_record import all_stored_ms
from .topology import BrokerQueues, broker_name

#: an attribute that says what users mean to send: any topic takes all kinds
_MESSAGE_TYPE = "message.type"
#: changes are not counted: tools read a list anew each time
NO_VERSION = {"counter": 0, "stateVersion": 0, "timestamp": 0}


class TopicAdminProcessor:
    """Answers what tools ask and do about topics."""

    CODES = (
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
    )

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._processors = {
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._names,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._names,
            # RayMQ's own topics are not shown to any client.
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: _no_names,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _no_names,
            RequestCode.GET_ALL_TOPIC_CONFIG: self._configs,
            RequestCode.GET_TOPIC_CONFIG: self._config,
            RequestCode.GET_TOPIC_STATS_INFO: self._statistics,
            RequestCode.UPDATE_AND_CREATE_TOPIC: self._create,
            RequestCode.DELETE_TOPIC_IN_BROKER: self._delete,
            # The name server has no topics of its own here.
            RequestCode.DELETE_TOPIC_IN_NAMESRV: _nothing,
        }

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer one of these requests. Raises: Refused, RayMQError."""
        return await self._processors[RequestCode(request.code)](connection, request)

    # --- what there is ----------------------------------------------------------------------------

    async def _names(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        cluster = RequestFields(request).text("cluster", self._shards.name)
        names = sorted(await self._shards.topics()) if cluster == self._shards.name else []
        body = write_json({"topicList": names}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    async def _configs(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        shard = shard_named(RequestFields(request).text("bname", ""), connection)
        table = {}
        for name, facts in (await self._shards.topics()).items():
            shown = _shown(name, facts, shard)
            if shown is not None:
                table[name] = shown
        body = write_json({"dataVersion": NO_VERSION, "topicConfigTable": table}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    async def _config(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        fields = RequestFields(request)
        topic, shard = fields.text("topic"), shard_named(fields.text("bname", ""), connection)
        facts = (await self._shards.topics()).get(topic)
        shown = None if facts is None else _shown(topic, facts, shard)
        if shown is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic} has no queue on {broker_name(shard)}"
            )
        return answer(request, ResponseCode.SUCCESS, body=write_json(shown, standard=False))

    async def _statistics(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Of each queue on the broker: its ends, and when the last message was stored."""
        fields = RequestFields(request)
        topic, shard = fields.text("topic"), shard_named(fields.text("bname", ""), connection)
        queues = await self._shards.topic(topic)
        ranges = await self._shards.call(shard, "queue_ranges", {"topic": topic})
        ends = {each: ranges.get(str(each), (0, 0)) for each in queues.by_shard.get(shard, ())}
        last = {each: high - 1 if high > low else -1 for each, (low, high) in ends.items()}
        times_ms = await all_stored_ms(self._shards, shard, topic, last)
        table = {
            queue_key(queues, shard, each): {
                "lastUpdateTimestamp": times_ms[each],
                "maxOffset": high,
                "minOffset": low,
            }
            for each, (low, high) in ends.items()
        }
        body = write_json({"offsetTable": table}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    # --- changes ----------------------------------------------------------------------------------

    async def _create(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Make a topic. Tools ask each broker for so many queues, with the same number."""
        fields = RequestFields(request)
        topic = fields.text("topic")
        wanted = max(fields.integer("readQueueNums"), fields.integer("writeQueueNums"))
        if fields.integer("perm", READ_WRITE) != READ_WRITE:
            raise Refused(ResponseCode.SYSTEM_ERROR, "a topic can be read and written: use perm 6")
        is_compacted = _is_compacted(fields.text("attributes", ""))

        handle = self._shards.handle
        made = partial(_make, handle, topic, wanted * handle.shards, is_compacted=is_compacted)
        await self._shards.in_thread(made)
        self._shards.forget_topic(topic)
        return answer(request, ResponseCode.SUCCESS)

    async def _delete(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Delete a topic on every shard. Tools ask each broker: the second one finds nothing."""
        topic = RequestFields(request).text("topic")
        try:
            # Also if the first shard does not have it: a deletion may have ended between two shards.
            await self._shards.in_thread(delete_topic, self._shards.handle, topic)
        except Rejected:
            if topic in await self._shards.topics():
                raise
        self._shards.forget_topic(topic)
        return answer(request, ResponseCode.SUCCESS)


def _make(handle: ClusterHandle, topic: str, queues: int, *, is_compacted: bool) -> None:
    """Make a topic, or give it more queues. Raises: Refused, RayMQError."""
    known = [handle.call(shard, "topics", {}) for shard in range(handle.shards)]
    # The first shard decides. What others have of a topic that it has not is the rest of a deletion.
    facts: dict[str, Any] = known[0].get(topic, {})
    if facts and is_compacted and not facts.get("compacted"):
        raise Refused(
            ResponseCode.SYSTEM_ERROR, f"topic {topic} exists, and cannot be compacted any more"
        )
    present = int(facts.get("queues", 0))
    if present > queues:
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"topic {topic} has {present} queues, and none of them can be taken away: "
            f"ask for {present // handle.shards} per broker or more",
        )

    if not all(topic in each for each in known):
        # A new one, or one of which an earlier request has ended between two shards.
        compacted = bool(facts.get("compacted", is_compacted))
        create_topic(handle, topic, queues=present or queues, compacted=compacted)
    if present:
        add_queues(handle, topic, queues, break_key_order=True)


async def _nothing(connection: ClientConnection, request: RemotingCommand) -> RemotingCommand:
    return answer(request, ResponseCode.SUCCESS)


async def _no_names(connection: ClientConnection, request: RemotingCommand) -> RemotingCommand:
    body = write_json({"topicList": []}, standard=False)
    return answer(request, ResponseCode.SUCCESS, body=body)


def queue_key(queues: BrokerQueues, shard: int, queue_id: int) -> JsonKey:
    """A queue as RocketMQ's tables name it."""
    return JsonKey.of(
        {
            "brokerName": broker_name(shard),
            "queueId": queues.number(queue_id),
            "topic": queues.route.name,
        }
    )


def _is_compacted(attributes: str) -> bool:
    """Whether a topic shall be compacted. Args: `attributes`: `+name=value,...`. Raises: Refused for others."""
    is_compacted = False
    for each in filter(None, attributes.split(",")):
        name, _, value = each.partition("=")
        name, value = name.strip().lstrip("+"), value.strip()
        if name == CLEANUP_POLICY and value.upper() in (COMPACTION, DELETE):
            is_compacted = value.upper() == COMPACTION
        elif name != _MESSAGE_TYPE:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"topics do not have the attribute {each!r}: {_MESSAGE_TYPE} and {CLEANUP_POLICY} are taken",
            )
    return is_compacted


def _shown(name: str, facts: dict[str, Any], shard: int) -> dict[str, Any] | None:
    """The settings of a topic on one broker; None: it has no queue there. Args: `facts`: see `ClusterHandle.topics`."""
    shards = facts["shards"]
    queues = sum(shards[each % len(shards)] == shard for each in range(facts["queues"]))
    if not queues:
        return None
    return {
        "attributes": {CLEANUP_POLICY: COMPACTION} if facts.get("compacted") else {},
        "order": False,
        "perm": READ_WRITE,
        "readQueueNums": queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": name,
        "topicSysFlag": 0,
        "writeQueueNums": queues,
    }
