"""Consumer groups for RocketMQ's tools: which there are, their progress, and resets of their offsets.

Source: AdminBrokerProcessor, Broker2Client#resetOffset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from raymq.client.group_admin import delete_group
from raymq.client.group_facts import list_groups, topics_with_offsets
from raymq.store.base.errors import Rejected, TopicMissing
from raymq.store.base.format import RETRY_PREFIX
from raymq.store.state.topics import RETRY_MAX_TIMES, retry_topic

from .admin_topics import NO_VERSION, queue_key
from .answers import Refused
from .client_table import ClientTable
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .consumer_offsets import OffsetStore
from .json_dialect import write_json
from .offset_resets import notify_reset
from .request_fields import RequestFields, json_body
from .send_message import queue_named, shard_named
from .shards import Shards
from .stored_record import all_stored_ms

#: the end of a queue, instead of a time
_END_MS = -1


class GroupAdminProcessor:
    """Answers what tools ask and do about groups."""

    CODES = (
        RequestCode.GET_CONSUME_STATS,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
        RequestCode.QUERY_TOPICS_BY_CONSUMER,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    )

    def __init__(self, shards: Shards, clients: ClientTable, offsets: OffsetStore) -> None:
        self._shards = shards
        self._clients = clients
        self._offsets = offsets
        self._processors = {
            RequestCode.GET_CONSUME_STATS: self._progress,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self._groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self._topics_of_group,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._configs,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._config,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._create,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
        }

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer one of these requests. Raises: Refused, RayMQError."""
        return await self._processors[RequestCode(request.code)](connection, request)

    # --- progress ---------------------------------------------------------------------------------

    async def _progress(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Of each queue on the broker: its end, the offset of the group, and the time of the newest message read."""
        fields = RequestFields(request)
        group = fields.text("consumerGroup")
        shard = shard_named(fields.text("bname", ""), connection)
        named = fields.text("topicList", "") or fields.text("topic", "")
        topics = [each for each in named.split(";") if each] or await self._read_topics(group)

        tables = await asyncio.gather(
            *(self._topic_progress(shard, group, each) for each in topics)
        )
        table = {key: value for each in tables for key, value in each.items()}
        body = {"consumeTps": 0.0, "offsetTable": table}
        return answer(request, ResponseCode.SUCCESS, body=write_json(body, standard=False))

    async def _topic_progress(self, shard: int, group: str, topic: str) -> dict[Any, Any]:
        """The rows of a topic, for a queue that the group has an offset of, or that a connected member may read."""
        try:
            queues = await self._shards.topic(topic)
        except TopicMissing:
            return {}
        own = queues.by_shard.get(shard, [])
        ranges = await self._shards.call(shard, "queue_ranges", {"topic": topic})
        offsets = await self._committed(shard, group, topic, own)
        if not offsets and self._clients.subscription(group, topic) is None:
            return {}
        last = {each: offsets.get(each, 0) - 1 for each in own}
        times_ms = await all_stored_ms(self._shards, shard, topic, last)

        # An offset that there is none of is shown as where the group will begin.
        lowest = {each: int(ranges.get(str(each), (0, 0))[0]) for each in own}
        shown = {each: offsets.get(each, lowest[each]) for each in own}
        return {
            queue_key(queues, shard, each): {
                "brokerOffset": int(ranges.get(str(each), (0, 0))[1]),
                "consumerOffset": shown[each],
                "lastTimestamp": times_ms[each],
                "pullOffset": shown[each],
            }
            for each in own
        }

    async def _committed(
        self, shard: int, group: str, topic: str, own: Iterable[int]
    ) -> dict[int, int]:
        """Queue -> offset of a group, with those that are not stored yet."""
        stored = await self._shards.call(shard, "offsets", {"group": group, "topic": topic})
        found = {int(queue_id): int(offset) for queue_id, offset in stored.items()}
        for queue_id in own:
            waiting = self._offsets.waiting(shard, group, topic, queue_id)
            if waiting is not None:
                found[queue_id] = waiting
        return found

    async def _read_topics(self, group: str) -> list[str]:
        """The topics that a group has offsets of, or whose messages its connected clients want."""
        known = await self._shards.topics()
        found = await self._shards.in_thread(topics_with_offsets, self._shards.handle, group)
        for member in self._clients.consumers(group):
            if member.facts is not None:
                found |= member.facts.subscriptions.keys()
        return sorted(found & known.keys())

    # --- which there are --------------------------------------------------------------------------

    async def _names(self) -> set[str]:
        """The groups with a retry topic, and those that are connected.

        Tools find the brokers of a group by its retry topic. They would show a lag of 0 for a group without one: groups
        of RayMQ's own consumers are left to `raymq group`.
        """
        topics = await self._shards.topics()
        retried = {
            each.removeprefix(RETRY_PREFIX) for each in topics if each.startswith(RETRY_PREFIX)
        }
        return {*retried, *self._clients.groups}

    async def _groups_of_topic(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """The groups that read a topic: those with offsets of it, and those that are connected."""
        topic = RequestFields(request).text("topic")
        handle = self._shards.handle
        found = {
            group
            for group in self._clients.groups
            if self._clients.subscription(group, topic) is not None
        }
        for group in await self._shards.in_thread(list_groups, handle):
            if topic in await self._shards.in_thread(topics_with_offsets, handle, group):
                found.add(group)
        body = write_json({"groupList": sorted(found)}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    async def _topics_of_group(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        topics = await self._read_topics(RequestFields(request).text("group"))
        shown = [each for each in topics if not each.startswith(RETRY_PREFIX)]
        body = write_json({"topicList": shown}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    async def _configs(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        table = {name: _shown(name) for name in await self._names()}
        body = {"dataVersion": NO_VERSION, "subscriptionGroupTable": table}
        return answer(request, ResponseCode.SUCCESS, body=write_json(body, standard=False))

    async def _config(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        group = RequestFields(request).text("group")
        if group not in await self._names():
            raise Refused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {group} does not exist"
            )
        return answer(request, ResponseCode.SUCCESS, body=write_json(_shown(group), standard=False))

    # --- changes ----------------------------------------------------------------------------------

    async def _create(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Make the retry topic of a group: it is listed then. Its other settings are fixed."""
        wanted = json_body(request)
        group = str(wanted.get("groupName") or "")
        fixed = {"consumeEnable": True, "retryMaxTimes": RETRY_MAX_TIMES}
        for name, value in fixed.items():
            if wanted.get(name, value) != value:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"{name} of a group is {value} and cannot be {wanted[name]}",
                )
        await self._shards.create_retry_topic(retry_topic(group))
        return answer(request, ResponseCode.SUCCESS)

    async def _delete(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Delete the offsets of a group, if that is wanted. Tools ask each broker, and delete the retry topic then."""
        fields = RequestFields(request)
        group = fields.text("groupName")
        if fields.flag("cleanOffset") and group in await self._stored():
            try:
                await self._shards.in_thread(delete_group, self._shards.handle, group)
            except Rejected:
                # Another broker's request was quicker.
                if group in await self._stored():
                    raise
        return answer(request, ResponseCode.SUCCESS)

    async def _stored(self) -> dict[str, Any]:
        return await self._shards.in_thread(list_groups, self._shards.handle)

    async def _reset(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Set the offsets of a group on this broker to a time, and notify its connected consumers."""
        fields = RequestFields(request)
        topic, group = fields.text("topic"), fields.text("group")
        shard = shard_named(fields.text("bname", ""), connection)
        queues = await self._shards.topic(topic)
        number = fields.integer("queueId", -1)
        own = queues.by_shard.get(shard, [])
        chosen = own if number < 0 else [queue_named(queues, shard, number)]
        offsets = await self._reset_offsets(shard, topic, chosen, fields)

        is_named = fields.integer("offset", -1) >= 0
        if not is_named and not fields.flag("isForce"):
            # Back only, as RocketMQ: a group that is before the time stays where it is.
            current = await self._committed(shard, group, topic, chosen)
            offsets = {
                each: min(offset, current.get(each, offset)) for each, offset in offsets.items()
            }
        await asyncio.gather(
            *(
                self._offsets.commit(shard, group, topic, each, offset, None)
                for each, offset in offsets.items()
            )
        )
        notify_reset(
            self._clients.consumers(group),
            group,
            queues,
            shard,
            offsets,
            time_text=request.fields.get("timestamp", str(_END_MS)),
            is_forced=request.fields.get("isForce", "false"),
        )
        table = {queue_key(queues, shard, each): offset for each, offset in offsets.items()}
        body = write_json({"offsetTable": table}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    async def _reset_offsets(
        self, shard: int, topic: str, chosen: list[int], fields: RequestFields
    ) -> dict[int, int]:
        """The offsets to which queues are set: the one that is named, the end, or those of a time."""
        named = fields.integer("offset", -1)
        if named >= 0 or not chosen:
            return dict.fromkeys(chosen, named)
        time_ms = fields.integer("timestamp")
        if time_ms < 0:
            if time_ms != _END_MS:
                raise Refused(
                    ResponseCode.SYSTEM_ERROR,
                    f"the time of a reset is {_END_MS} or later, not {time_ms}",
                )
            ranges = await self._shards.call(shard, "queue_ranges", {"topic": topic})
            return {queue_id: int(ranges.get(str(queue_id), (0, 0))[1]) for queue_id in chosen}
        asked = {
            "topic": topic,
            "times": {str(queue_id): time_ms for queue_id in chosen},
            "boundary": "first",
        }
        found = await self._shards.call(shard, "offsets_by_time", asked)
        return {queue_id: int(found[str(queue_id)]) for queue_id in chosen}


def _shown(name: str) -> dict[str, Any]:
    """The settings of a group, which are fixed."""
    return {
        "brokerId": 0,
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "groupName": name,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": RETRY_MAX_TIMES,
        "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
    }
