"""The brokers for RocketMQ's tools: where they are, their options, and how they do. And the rest of a name server.

Source: AdminBrokerProcessor#prepareRuntimeInfo, DefaultRequestProcessor of the name server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from raymq import __version__

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import VERSION, RemotingCommand, answer
from .connection import ClientConnection
from .json_dialect import write_json
from .request_fields import RequestFields
from .send_message import shard_named
from .shards import Shards
from .topology import LEADER_ID, BrokerTable, broker_name

#: of the last 10 s, minute and 10 minutes: tools read three numbers
_RATE_TIMES = ("10s", "60s", "600s")
#: what tools read and fail without. There is none of it here: no queues of threads, and one table of timers
_ZEROS = (
    *(
        f"{kind}ThreadPoolQueue{fact}"
        for kind in ("send", "pull", "litePull", "query", "ack")
        for fact in ("Size", "HeadWaitTimeMills")
    ),
    "pageCacheLockTimeMills",
    "timerReadBehind",
    "timerOffsetBehind",
    "timerCongestNum",
    "timerEnqueueTps",
    "timerDequeueTps",
    "msgPutTotalYesterdayMorning",
    "msgPutTotalTodayMorning",
    "msgGetTotalYesterdayMorning",
    "msgGetTotalTodayMorning",
)
#: of the key-value settings of a name server: which queues an ordered topic has. Here the route says it
_ORDERED_TOPICS = "ORDER_TOPIC_CONFIG"


class ClusterAdminProcessor:
    """Answers what tools ask about brokers."""

    CODES = (
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_BROKER_CONFIG,
        RequestCode.GET_BROKER_RUNTIME_INFO,
    )

    def __init__(self, shards: Shards, brokers: BrokerTable) -> None:
        self._shards = shards
        self._known = brokers

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer one of these requests. Raises: Refused, RayMQError."""
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return answer(
                request, ResponseCode.SUCCESS, body=write_json(self._brokers(), standard=False)
            )
        shard = shard_named(RequestFields(request).text("bname", ""), connection)
        if request.code == RequestCode.GET_BROKER_CONFIG:
            options = await self._options(shard)
            text = "".join(f"{name}={value}\n" for name, value in sorted(options.items()))
            return answer(request, ResponseCode.SUCCESS, body=text.encode())
        table = runtime_facts(await self._shards.call(shard, "status", {}))
        body = write_json({"table": table}, standard=False)
        return answer(request, ResponseCode.SUCCESS, body=body)

    def _brokers(self) -> dict[str, Any]:
        # As in routes: a broker without an address would make tools fail.
        names = {broker_name(shard): shard for shard in self._known.shards()}
        table = {
            name: {
                "brokerAddrs": {
                    number: str(address)
                    for number, address in sorted(self._known.of(shard).items())
                },
                "brokerName": name,
                "cluster": self._shards.name,
                "enableActingMaster": False,
            }
            for name, shard in names.items()
        }
        return {
            "brokerAddrTable": table,
            "clusterAddrTable": {self._shards.name: list(names)},
        }

    async def _options(self, shard: int) -> dict[str, str]:
        """The options of a broker that tools read, and those of the cluster under RayMQ's names."""
        facts = await self._shards.call(shard, "config", {})
        own = {name: _text(option["value"]) for name, option in facts["options"].items()}
        address = self._known.leader(shard)
        place = (
            {} if address is None else {"brokerIP1": address.host, "listenPort": str(address.port)}
        )
        return {
            **own,
            **place,
            "autoCreateSubscriptionGroup": "true",
            "autoCreateTopicEnable": "false",
            "brokerClusterName": self._shards.name,
            "brokerId": str(LEADER_ID),
            "brokerName": broker_name(shard),
        }


def runtime_facts(status: Mapping[str, Any]) -> dict[str, str]:
    """How a broker does, in RocketMQ's words. Args: `status`: of its leader.

    Counts begin when the leader opened its store: those of the days before are 0.
    """
    stats, metrics = status["store_stats"], status["metrics"]
    began_s = float(metrics["start_time_seconds"])
    free = int(metrics["disk_free_bytes"])

    return {
        **dict.fromkeys(_ZEROS, "0"),
        "bootTimestamp": str(int(began_s * 1000)),
        "brokerActive": str(bool(status["writable"])).lower(),
        "brokerVersion": str(VERSION),
        "brokerVersionDesc": f"RayMQ_{__version__}",
        "commitLogDirCapacity": f"Total : {free + int(metrics['disk_used_bytes'])} B, Free : {free} B.",
        "commitLogDiskRatio": str(status["clean"]["disk_used_ratio"]),
        "commitLogMaxOffset": str(status["confirmed"]),
        "commitLogMinOffset": str(status["min_offset"]),
        "consumeQueueDiskRatio": str(status["clean"]["queue_disk_used_ratio"]),
        "dispatchBehindBytes": str(status["appended"] - status["dispatched"]),
        # Nothing says it of a whole log. Tools show 0 hours for it.
        "earliestMessageTimeStamp": "",
        # Dashboard reads this one: messages here, and not reads.
        "getTotalTps": _rates(stats["get_transferred_tps"]),
        # Tools of 4.x read the name with a letter less.
        "getTransferedTps": _rates(stats["get_transferred_tps"]),
        "getTransferredTps": _rates(stats["get_transferred_tps"]),
        "msgGetTotalTodayNow": str(stats["get_transferred"]),
        "msgPutTotalTodayNow": str(stats["puts"]),
        "putMessageEntireTimeMax": str(stats["put_max_ms"]),
        "putMessageTimesTotal": str(stats["puts"]),
        "putTps": _rates(stats["put_tps"]),
        "remainHowManyDataToFlush": f"{status['appended'] - status['synced']} B",
        "runtime": _duration(time.time() - began_s),
    }


def _text(value: object) -> str:
    """The value of an option, as files of properties have it."""
    return str(value).lower() if value is True or value is False else str(value)


def _rates(found: Mapping[str, int]) -> str:
    """Rates of three times. One that is not known yet is 0."""
    return " ".join(f"{float(found.get(each, 0))}" for each in _RATE_TIMES)


def _duration(seconds: float) -> str:
    """A time as RocketMQ writes it."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {rest} seconds ]"


class NameServerAdminProcessor:
    """Answers what tools ask a name server about settings that do not exist here."""

    CODES = (
        RequestCode.PUT_KV_CONFIG,
        RequestCode.GET_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.VIEW_BROKER_STATS_DATA,
        RequestCode.QUERY_DATA_VERSION,
    )

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Answer at once. Raises: Refused."""
        fields = RequestFields(request)
        if request.code == RequestCode.WIPE_WRITE_PERM_OF_BROKER:
            # No topic has lost a permission.
            return answer(request, ResponseCode.SUCCESS, {"wipeTopicCount": "0"})
        if request.code == RequestCode.ADD_WRITE_PERM_OF_BROKER:
            return answer(request, ResponseCode.SUCCESS, {"addTopicCount": "0"})
        if request.code == RequestCode.QUERY_DATA_VERSION:
            return answer(request, ResponseCode.SUCCESS, {"changed": "false"})
        if request.code == RequestCode.DELETE_KV_CONFIG:
            # Tools delete the setting of a topic together with it.
            return answer(request, ResponseCode.SUCCESS)
        if request.code == RequestCode.VIEW_BROKER_STATS_DATA:
            # As RocketMQ for a topic without messages: tools show 0 then.
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"there are no statistics {fields.text('statsName', '')} of {fields.text('statsKey', '')!r}",
            )

        namespace = fields.text("namespace")
        if request.code != RequestCode.PUT_KV_CONFIG:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"there are no settings in the namespace {namespace!r}",
            )
        if namespace != _ORDERED_TOPICS:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"settings in the namespace {namespace!r} are not kept: {_ORDERED_TOPICS} is taken",
            )
        return answer(request, ResponseCode.SUCCESS)
