"""Requests as RocketMQ's clients make them, over a `RemotingClient`, and what the answers hold."""

from __future__ import annotations

import json
import struct
from typing import Any

from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.store.base import format as fmt

from .remoting_client import RemotingClient

#: bits of a pull's sysFlag
COMMIT, SUSPEND, SUBSCRIPTION = 1, 2, 4


def send_fields(topic: str, queue: int = 0, **more: object) -> dict[str, object]:
    """The header of a send. Args: `more`: properties."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in {"UNIQ_KEY": "u1", **more}.items())
    return {
        "a": "producers",
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": queue,
        "f": 0,
        "g": 1_700_000_000_000,
        "h": 7,
        "i": text,
        "j": 0,
        "k": False,
        "m": False,
    }


def send(
    client: RemotingClient, topic: str, body: bytes, queue: int = 0, **more: object
) -> dict[str, str]:
    """Send a message. Returns: the fields of the answer."""
    found = client.call(RequestCode.SEND_MESSAGE_V2, send_fields(topic, queue, **more), body)
    assert found.code == ResponseCode.SUCCESS, found.remark
    return found.fields


def pull_fields(topic: str, offset: int, queue: int = 0, **more: object) -> dict[str, object]:
    """The header of a pull. Args: `more`: fields that differ."""
    return {
        "consumerGroup": "readers",
        "topic": topic,
        "queueId": queue,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": SUBSCRIPTION,
        "commitOffset": 0,
        "suspendTimeoutMillis": 15_000,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
        **more,
    }


def pull(client: RemotingClient, topic: str, offset: int, queue: int = 0, **more: object) -> Any:
    """Pull from a queue. Returns: the answer."""
    return client.call(RequestCode.PULL_MESSAGE, pull_fields(topic, offset, queue, **more))


def bodies(records: list[bytes]) -> list[bytes]:
    """The bodies of records with IPv4 hosts."""
    found = []
    for record in records:
        (size,) = struct.unpack_from(">i", record, fmt.BODY_LENGTH_AT)
        found.append(record[fmt.HEADER_BYTES : fmt.HEADER_BYTES + size])
    return found


def beat(client: RemotingClient, client_id: str, group: str, topic: str = "t") -> None:
    """Send the heartbeat of a producer and a consumer."""
    subscription = {"topic": topic, "subString": "*", "expressionType": "TAG", "subVersion": 1}
    consumer = {"groupName": group, "subscriptionDataSet": [subscription]}
    fields = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [consumer],
    }
    found = client.call(RequestCode.HEART_BEAT, {}, json.dumps(fields).encode())
    assert found.code == ResponseCode.SUCCESS
    assert found.fields["IS_SUPPORT_HEART_BEAT_V2"] == "false"
