"""Connected clients for RocketMQ's tools: who is connected, and what tools ask these clients through the server.

Source: AdminBrokerProcessor#callConsumer, Broker2Client.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from raymq.store.base.format import parse_message_id

from .answers import Refused
from .client_table import ClientTable, GroupClient, SubscriptionData
from .codes import Language, MQVersion, RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .json_dialect import JsonKey, object_key, read_json, write_json
from .malformed import Malformed
from .query_messages import RecordReader
from .request_fields import RequestFields
from .send_message import shard_named
from .signature import CREDENTIALS
from .topology import broker_name

logger = logging.getLogger("raymq.rocketmq")

#: how long a client may take for an answer. Source: Broker2Client#callClient
ANSWER_S = 10.0


class ClientAdminProcessor:
    """Answers what tools ask about connected clients."""

    CODES = (
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        RequestCode.GET_ALL_PRODUCER_INFO,
        RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER,
    )

    def __init__(self, clients: ClientTable) -> None:
        self._clients = clients

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer from memory. Raises: Refused."""
        fields = RequestFields(request)
        if request.code == RequestCode.GET_CONSUMER_CONNECTION_LIST:
            body = self._consumers(fields.text("consumerGroup"))
        elif request.code == RequestCode.GET_PRODUCER_CONNECTION_LIST:
            body = self._producers(fields.text("producerGroup"))
        elif request.code == RequestCode.GET_ALL_PRODUCER_INFO:
            body = self._all_producers()
        else:
            group, topic = fields.text("group"), fields.text("topic")
            found = self._clients.subscription(group, topic)
            shown = None if found is None else _subscription(found)
            body = {"group": group, "subscriptionData": shown, "topic": topic}
        return answer(request, ResponseCode.SUCCESS, body=write_json(body, standard=False))

    def _consumers(self, group: str) -> dict[str, Any]:
        members = self._clients.consumers(group)
        facts = next((each.facts for each in members if each.facts is not None), None)
        if facts is None:
            raise Refused(
                ResponseCode.CONSUMER_NOT_ONLINE, f"no consumer of group {group} is connected"
            )
        topics = {
            topic
            for member in members
            if member.facts is not None
            for topic in member.facts.subscriptions
        }

        newest = {topic: self._clients.subscription(group, topic) for topic in topics}
        return {
            "connectionSet": [_connection(each) for each in members],
            "consumeFromWhere": facts.consume_from,
            "consumeType": facts.consume_type,
            "messageModel": facts.message_model,
            "subscriptionTable": {
                topic: _subscription(each) for topic, each in newest.items() if each is not None
            },
        }

    def _producers(self, group: str) -> dict[str, Any]:
        members = self._clients.producers(group)
        if not members:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no producer of group {group} is connected")
        return {"connectionSet": [_connection(each) for each in members]}

    def _all_producers(self) -> dict[str, Any]:
        table = {}
        for group in self._clients.producer_groups():
            table[group] = [
                {
                    "clientId": each.client_id,
                    "language": _language(each),
                    "lastUpdateTimestamp": each.connection.heard_ms,
                    "remoteIP": repr(each.connection),
                    "version": _version(each),
                }
                for each in self._clients.producers(group)
            ]
        return {"data": table}


class ClientRelayProcessor:
    """Lets tools ask connected consumers: how they do, where they are, and to handle one message at once."""

    CODES = (
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
    )

    def __init__(self, clients: ClientTable, records: RecordReader) -> None:
        self._clients = clients
        self._records = records

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Ask a client, and pass its answer on. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        if request.code == RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS:
            return await self._status(request, fields)

        group, client_id = fields.text("consumerGroup"), fields.text("clientId", "")
        member = self._clients.consumer(group, client_id)
        if member is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"the consumer {client_id!r} of group {group} is not connected",
            )
        passed = {name: text for name, text in request.fields.items() if name not in CREDENTIALS}
        body = b""
        if request.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
            shard = shard_named(fields.text("bname", ""), connection)
            body = await self._records.at(shard, _offset_of(fields.text("msgId")))
            passed["brokerName"] = broker_name(shard)
        found = await _ask(member, request.code, passed, body)
        return answer(request, found.code, dict(found.fields), bytes(found.body), found.remark)

    async def _status(self, request: RemotingCommand, fields: RequestFields) -> RemotingCommand:
        """The offsets at which the consumers of a group are, as they say."""
        topic, group = fields.text("topic"), fields.text("group")
        wanted = fields.text("clientAddr", "")
        members = [
            each for each in self._clients.consumers(group) if wanted in ("", each.client_id)
        ]
        if not members:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"no consumer{f' {wanted!r}' if wanted else ''} of group {group} is connected",
            )

        asked = {"topic": topic, "group": group}
        code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        answers = await asyncio.gather(
            *(_ask(each, code, asked) for each in members), return_exceptions=True
        )
        table: dict[str, Any] = {}
        for member, found in zip(members, answers, strict=True):
            try:
                table[member.client_id] = _offsets_in(found)
            except (Refused, Malformed) as error:
                # The others have answered.
                logger.info("the consumer %s does not say its offsets: %s", member.client_id, error)
        body = write_json({"consumerTable": table}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)


def _offsets_in(found: RemotingCommand | BaseException) -> dict[JsonKey, Any]:
    """Queue -> offset, of the answer of a client. Raises: Refused, Malformed, or what was raised instead of it."""
    if isinstance(found, BaseException):
        raise found
    body = read_json(found.body) if found.code == ResponseCode.SUCCESS else None
    offsets = body.get("messageQueueTable") if isinstance(body, dict) else None
    if not isinstance(offsets, dict):
        raise Malformed(f"an answer with code {found.code} without a table of queues")
    return {object_key(key): offset for key, offset in offsets.items()}


async def _ask(
    member: GroupClient, code: int, fields: dict[str, str], body: bytes = b""
) -> RemotingCommand:
    """The answer of a client. Raises: Refused when none comes."""
    try:
        return await member.connection.ask(code, fields, body, timeout_s=ANSWER_S)
    except asyncio.TimeoutError as error:
        raise Refused(
            ResponseCode.CONSUME_MSG_TIMEOUT,
            f"the consumer {member.client_id!r} has not answered for {ANSWER_S:.0f} s",
        ) from error
    except ConnectionError as error:
        raise Refused(ResponseCode.SYSTEM_ERROR, str(error)) from error


def _offset_of(message_id: str) -> int:
    """Where the record of a message id begins. Raises: Rejected."""
    return int(parse_message_id(message_id)[-1])


def _connection(member: GroupClient) -> dict[str, Any]:
    return {
        "clientAddr": repr(member.connection),
        "clientId": member.client_id,
        "language": _language(member),
        "version": _version(member),
    }


def _language(member: GroupClient) -> str:
    """The name of a client's language. Java fails on one that it does not know."""
    name = member.connection.language
    return name if isinstance(name, str) and name in Language.__members__ else Language.OTHER.name


def _version(member: GroupClient) -> int:
    return member.connection.version or MQVersion.V5_3_3.value


def _subscription(found: SubscriptionData) -> dict[str, Any]:
    tags = [] if found.kind != "TAG" else found.expression.split("||")
    return {
        "classFilterMode": False,
        "codeSet": [],
        "expressionType": found.kind,
        "subString": found.expression,
        "subVersion": found.version,
        "tagsSet": sorted({each.strip() for each in tags} - {"", "*"}),
        "topic": found.topic,
    }
