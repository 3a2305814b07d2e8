"""Messages by key, by the client's id, and by their place in the log.

Source: QueryMessageProcessor.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any

from raymq.store.base import format as fmt
from raymq.store.base.errors import OffsetOutOfRange, Rejected

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .request_fields import RequestFields
from .send_message import shard_named
from .shards import Shards
from .stored_record import as_of_broker, read_record, store_host, with_store_host
from .topology import BrokerTable, broker_name

#: messages of one answer. Source: defaultQueryMaxNum is 32, and tools ask for 64
MESSAGES_MAX = 64
#: bytes of one answer, the newest messages. A client ends the connection for a frame beyond 16 MiB
ANSWER_BYTES = 12 << 20
#: what tools since 5.4 may ask for
_BY_TAG = "T"
#: of times, in ms
_TIME_MAX = (1 << 62) - 1


class RecordReader:
    """Reads records of a shard as its broker shows them."""

    def __init__(self, shards: Shards, brokers: BrokerTable) -> None:
        self._shards = shards
        self._brokers = brokers

    async def at(self, shard: int, physical_offset: int) -> bytes:
        """The record that begins at an offset of the log. Raises: Refused when none does; RayMQError."""
        asked = {"physical_offset": max(physical_offset, 0)}
        place = await self._shards.call(shard, "place_of_record", asked)
        record = None
        if place and physical_offset >= 0:
            record = await self.of(shard, place["topic"], place["queue_id"], place["offset"])
        if record is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"no message begins at {physical_offset} of the log of {broker_name(shard)}, or it was deleted",
            )
        return record

    async def by_id(self, shard: int, topic: str, message_id: str) -> bytes | None:
        """The record of a topic that a message id names by its place in the log; None: it is none of this shard.

        Raises: RayMQError.
        """
        try:
            _, offset = fmt.parse_message_id(message_id)
        except Rejected:
            return None
        asked = {"physical_offset": max(offset, 0)}
        place = await self._shards.call(shard, "place_of_record", asked)
        if not place or offset < 0 or place["topic"] != topic:
            return None
        stored = await read_record(self._shards, shard, topic, place["queue_id"], place["offset"])
        if stored is None:
            return None

        # The id is of the record as it was stored, or as this server has shown it.
        host = bytes.fromhex(message_id)[:-8]
        shown = await self.of(shard, topic, place["queue_id"], place["offset"], stored)
        if shown is None or host not in (store_host(stored), store_host(shown)):
            return None
        return with_store_host(shown, host)

    async def of(
        self, shard: int, topic: str, queue_id: int, offset: int, record: bytes | None = None
    ) -> bytes | None:
        """The record of a message; None: it is not there any more.

        Args: `record`: if it is known already. Raises: RayMQError.
        """
        if record is None:
            try:
                record = await read_record(self._shards, shard, topic, queue_id, offset)
            except OffsetOutOfRange:
                return None
        if record is None:
            return None
        queues = await self._shards.topic(topic)
        return as_of_broker(record, queues, queue_id, self._brokers.leader(shard))


class QueryMessageProcessor:
    """Answers QUERY_MESSAGE and VIEW_MESSAGE_BY_ID."""

    CODES = (RequestCode.QUERY_MESSAGE, RequestCode.VIEW_MESSAGE_BY_ID)

    def __init__(self, shards: Shards, records: RecordReader) -> None:
        self._shards = shards
        self._records = records

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Find messages of the shard that the client asks. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        shard = shard_named(fields.text("bname", ""), connection)
        if request.code == RequestCode.VIEW_MESSAGE_BY_ID:
            record = await self._records.at(shard, fields.integer("offset"))
            return answer(request, ResponseCode.SUCCESS, body=record)
        return await self._query(request, fields, shard)

    async def _query(
        self, request: RemotingCommand, fields: RequestFields, shard: int
    ) -> RemotingCommand:
        topic = fields.text("topic")
        if fields.text("indexType", "") == _BY_TAG or fields.text("lastKey", ""):
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                "messages are found by key, the newest ones: for others give an earlier end of the time, not a tag or "
                "the last key of a page",
            )
        await self._shards.topic(topic)
        asked = {
            "topic": topic,
            "key": fields.text("key"),
            "is_unique": fields.flag("_UNIQUE_KEY_QUERY"),
            "begin_ms": max(0, fields.integer("beginTimestamp")),
            "end_ms": min(_TIME_MAX, max(0, fields.integer("endTimestamp"))),
            "max_records": max(1, min(fields.integer("maxNum"), MESSAGES_MAX)),
        }
        found = (await self._shards.call(shard, "find_messages", asked))["found"]

        records: list[bytes] = []
        left_bytes = ANSWER_BYTES
        for each in reversed(found):
            record = await self._record(shard, topic, each)
            left_bytes -= len(record or b"")
            if record and (left_bytes >= 0 or not records):
                records.append(record)
        if not records and asked["is_unique"]:
            # Tools look for all ids so. Messages of RayMQ's producers have no other one than their place.
            by_id = await self._records.by_id(shard, topic, str(asked["key"]))
            records += [] if by_id is None else [by_id]
        if not records:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND, f"no message of {topic} has the key {asked['key']!r}"
            )
        ends = {
            "indexLastUpdateTimestamp": str(max(map(fmt.store_time_ms, records))),
            "indexLastUpdatePhyoffset": "0",
        }
        return answer(request, ResponseCode.SUCCESS, ends, b"".join(reversed(records)))

    async def _record(self, shard: int, topic: str, found: list[Any]) -> bytes | None:
        """The record of a message that was found; None: it was deleted meanwhile."""
        queue_id, offset, _, shown = found
        record = None if shown is None else b64decode(shown)
        return await self._records.of(shard, topic, queue_id, offset, record)
