"""Asks producers what has become of their half messages.

Source: AbstractTransactionalMessageCheckListener, Broker2Client, ProducerManager#getAvailableChannel.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode

import pyarrow as pa

from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.format import SYS_ANY_HOST_V6, check_group_name, host_of, offset_message_id
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.keys import UNIQ_KEY
from raymq.store.records.properties import PRODUCER_GROUP, REAL_QUEUE, REAL_TOPIC, decode, encode
from raymq.store.records.record_encode import encode_record

from .client_table import ClientTable
from .codes import RequestCode
from .shards import Shards
from .topology import BrokerTable, broker_name

logger = logging.getLogger("raymq.rocketmq")

#: how often a shard is asked for half messages: at least and at most
ASK_S, ASK_S_MIN = 5.0, 0.2
#: producer groups and half messages of one such call
GROUPS_MAX, HALVES_MAX = 1_000, 64


class TransactionCheckService:
    """Asks producers about half messages that are open for long. Callers: one event loop."""

    def __init__(self, shards: Shards, clients: ClientTable, brokers: BrokerTable) -> None:
        """Args: `brokers`: where clients dial each shard, a part of message ids."""
        self._shards = shards
        self._clients = clients
        self._brokers = brokers
        #: shards that did not answer the last time: one warning is enough
        self._failed: set[int] = set()

    async def run(self) -> None:
        """Ask until cancelled, each shard by itself."""
        tasks: list[asyncio.Task[None]] = []
        try:
            while True:
                # Shards may be added.
                for shard in range(len(tasks), self._shards.count):
                    tasks.append(asyncio.create_task(self._run(shard)))
                await asyncio.sleep(ASK_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, shard: int) -> None:
        while True:
            pause_s = ASK_S
            try:
                pause_s = await self._ask(shard)
                self._failed.discard(shard)
            except RayMQError as error:
                level = logging.DEBUG if shard in self._failed else logging.WARNING
                self._failed.add(shard)
                logger.log(level, "half messages of raymq-%d: %s", shard, error)
            except Exception:
                logger.exception("half messages of raymq-%d", shard)
            await asyncio.sleep(pause_s)

    async def _ask(self, shard: int) -> float:
        """Push the questions that are due. Returns: the pause until the next ones, in seconds."""
        groups = [each for each in self._clients.producer_groups() if _is_name(each)]
        pause_s = ASK_S
        for at in range(0, len(groups), GROUPS_MAX):
            some = groups[at : at + GROUPS_MAX]
            asked = {"groups": some, "max_records": HALVES_MAX}
            found = await self._shards.call_transaction(shard, "halves_to_check", asked)
            for half in found["halves"]:
                await self._push(shard, b64decode(half["record"]))
            if found["next_ms"] is not None:
                pause_s = min(pause_s, max(ASK_S_MIN, found["next_ms"] / 1000))
        return pause_s

    async def _push(self, shard: int, record: bytes) -> None:
        """Ask a producer of the group of a half message."""
        (row,) = decode_records(pa.array([record], pa.binary())).to_pylist()
        properties = decode(row["properties"])
        producer = self._clients.a_producer(properties.get(PRODUCER_GROUP, ""), shard)
        if producer is None:
            # It has gone since the shard was asked. The shard names the half message again, to any server.
            return
        topic, queue_id = properties.get(REAL_TOPIC, ""), int(properties.get(REAL_QUEUE, "0"))
        try:
            number = (await self._shards.topic(topic)).number(queue_id)
        except (RayMQError, KeyError):
            # The topic is gone. The producer may still roll back.
            number = queue_id

        address = self._brokers.leader(shard)
        if address is None:
            return
        key = properties.get(UNIQ_KEY, "")
        fields = {
            "topic": topic,
            "tranStateTableOffset": str(row["queue_offset"]),
            "commitLogOffset": str(row["physical_offset"]),
            "msgId": key,
            "transactionId": key,
            "offsetMsgId": offset_message_id(*address, row["physical_offset"]),
            "bname": broker_name(shard),
        }
        body = encode_record(
            topic=topic,
            queue_id=number,
            body=row["body"],
            properties=encode(properties),
            queue_offset=row["queue_offset"],
            physical_offset=row["physical_offset"],
            flag=row["flag"],
            sys_flag=row["sys_flag"] & ~SYS_ANY_HOST_V6,
            born_time_ms=row["born_time_ms"],
            born_host=host_of(row["born_host"]),
            store_time_ms=row["store_time_ms"],
            store_host=host_of(row["store_host"]),
            reconsume_times=row["reconsume_times"],
        )
        producer.push(RequestCode.CHECK_TRANSACTION_STATE, fields, body)


def _is_name(group: str) -> bool:
    try:
        check_group_name(group)
    except Rejected:
        return False
    return True
