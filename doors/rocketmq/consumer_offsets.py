"""Offsets of groups, and those of queues.

Source: ConsumerManageProcessor, AdminBrokerProcessor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Any, TypeAlias

from raymq.store.base.errors import RayMQError
from raymq.store.groups.claims import Claim

from .answers import Refused
from .client_table import ClientTable
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .named_queue import named_queue
from .request_fields import RequestFields
from .shards import Shards
from .shared_groups import SharedGroups
from .stored_record import stored_ms

logger = logging.getLogger("raymq.rocketmq")

#: commits of one group and topic within this time are one call
COMMIT_AFTER_S = 0.05


#: shard, group and topic
_Key: TypeAlias = "tuple[int, str, str]"


class _Batch:
    """Offsets that are committed by one call."""

    def __init__(self) -> None:
        #: queue -> offset
        self.offsets: dict[int, int] = {}
        #: queue -> the client that commits it; None: an operator
        self.clients: dict[int, str | None] = {}
        #: ends with the queues that are refused
        self.task: asyncio.Task[dict[str, Any]]


class OffsetStore:
    """Commits of clients, gathered. Callers: one event loop."""

    def __init__(self, shards: Shards, loop: asyncio.AbstractEventLoop) -> None:
        self._shards = shards
        self._loop = loop
        #: those that take offsets
        self._open: dict[_Key, _Batch] = {}
        #: all that are not stored yet, each after those before it
        self._unstored: defaultdict[_Key, list[_Batch]] = defaultdict(list)

    def commit_soon(
        self, shard: int, group: str, topic: str, queue_id: int, offset: int, client: str | None
    ) -> None:
        """Commit an offset together with others. A failure is logged: the client commits again after 5 s.

        Args: `client`: the id of the client; empty: it is not known; None: an operator, whom no lock keeps away.
        """
        self._add((shard, group, topic), queue_id, offset, client)

    async def commit(
        self, shard: int, group: str, topic: str, queue_id: int, offset: int, client: str | None
    ) -> None:
        """Commit an offset together with others. Raises: Refused when another client has the queue; RayMQError."""
        batch = self._add((shard, group, topic), queue_id, offset, client)
        refused = await asyncio.shield(batch.task)
        claim = refused.get(str(queue_id))
        if claim is not None:
            owner = Claim(*claim)
            which = (
                f"client {owner.client}" if owner.is_lock else f"RayMQ's member {owner.member_id}"
            )
            raise Refused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{which} has queue {queue_id} of {topic} for group {group}, and alone commits its offset, until it is "
                "closed",
            )

    def _add(self, key: _Key, queue_id: int, offset: int, client: str | None) -> _Batch:
        batch = self._open.get(key)
        if batch is not None and client != batch.clients.get(queue_id, client):
            # The shard decides on the commits of both, in their order.
            del self._open[key]
            batch = None
        if batch is None:
            batch = self._open[key] = _Batch()
            before = self._unstored[key][-1].task if self._unstored[key] else None
            self._unstored[key].append(batch)
            batch.task = self._loop.create_task(self._commit(key, batch, before))
            batch.task.add_done_callback(_log_failure)
        batch.offsets[queue_id], batch.clients[queue_id] = offset, client
        return batch

    async def _commit(
        self, key: _Key, batch: _Batch, before: asyncio.Task[dict[str, Any]] | None
    ) -> dict[str, Any]:
        try:
            await asyncio.sleep(COMMIT_AFTER_S)
            if before is not None:
                await asyncio.wait([before])
            if self._open.get(key) is batch:
                del self._open[key]

            shard, group, topic = key
            arguments = {
                "group": group,
                "topic": topic,
                "offsets": {str(queue_id): offset for queue_id, offset in batch.offsets.items()},
                "clients": {str(queue_id): client for queue_id, client in batch.clients.items()},
            }
            found = await self._shards.call(shard, "commit_offsets", arguments)
        finally:
            if self._open.get(key) is batch:
                del self._open[key]
            self._unstored[key].remove(batch)
            if not self._unstored[key]:
                del self._unstored[key]

        refused: dict[str, Any] = found["fenced"]
        for queue_id, (_, member) in refused.items():
            logger.info(
                "group %s: offset %d of queue %s of %s by client %s is not stored: %s has the queue",
                group,
                batch.offsets[int(queue_id)],
                queue_id,
                topic,
                batch.clients[int(queue_id)] or "unknown",
                member,
            )
        return refused

    async def flush(self) -> None:
        """Wait until what was committed is stored, or could not be."""
        tasks = [each.task for batches in self._unstored.values() for each in batches]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self, shard: int, group: str, topic: str) -> None:
        """Do as `flush`, of one topic of a group on one shard."""
        tasks = [each.task for each in self._unstored.get((shard, group, topic), ())]
        await asyncio.gather(*tasks, return_exceptions=True)

    def waiting(self, shard: int, group: str, topic: str, queue_id: int) -> int | None:
        """An offset that was committed, and is not stored yet."""
        for batch in reversed(self._unstored.get((shard, group, topic), ())):
            if queue_id in batch.offsets:
                return batch.offsets[queue_id]
        return None


def _log_failure(task: asyncio.Task[dict[str, Any]]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, RayMQError):
        logger.info("a commit was not stored: %s", error)
    elif error is not None:
        logger.error("a commit", exc_info=error)


class ConsumerOffsetProcessor:
    """Answers QUERY_CONSUMER_OFFSET and UPDATE_CONSUMER_OFFSET."""

    CODES = (RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET)

    def __init__(
        self, shards: Shards, clients: ClientTable, offsets: OffsetStore, shared: SharedGroups
    ) -> None:
        self._shards = shards
        self._clients = clients
        self._offsets = offsets
        self._shared = shared

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Read or store the offset of one queue. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        group, topic = fields.text("consumerGroup"), fields.text("topic")
        _, shard, queue_id = await named_queue(self._shards, connection, fields)

        if request.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            committed = fields.integer("commitOffset")
            client = self._clients.client_id(connection)
            await self._offsets.commit(shard, group, topic, queue_id, committed, client)
            return answer(request, ResponseCode.SUCCESS)

        # A consumer does not take a queue of which it does not hear the offset, and asks again later.
        await self._shared.check(group, connection)
        waiting = self._offsets.waiting(shard, group, topic, queue_id)
        if waiting is not None:
            return answer(request, ResponseCode.SUCCESS, {"offset": str(waiting)})
        # An error here is none of "not found", by which a client would begin at another offset.
        found = await self._shards.call(shard, "offsets", {"group": group, "topic": topic})
        offset = found.get(str(queue_id))
        if offset is None and fields.text("setZeroIfNotFound", "true").lower() != "false":
            ranges = await self._shards.call(shard, "queue_ranges", {"topic": topic})
            if ranges.get(str(queue_id), [0, 0])[0] == 0:
                # Nothing was ever deleted: a new group reads it all, as from RocketMQ.
                offset = 0
        if offset is None:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND, f"group {group} has no offset of queue {queue_id}"
            )
        return answer(request, ResponseCode.SUCCESS, {"offset": str(offset)})


class QueueOffsetProcessor:
    """Answers GET_MAX_OFFSET, GET_MIN_OFFSET, GET_EARLIEST_MSG_STORETIME and SEARCH_OFFSET_BY_TIMESTAMP."""

    CODES = (
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    )

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """An offset or time of one queue. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        topic = fields.text("topic")
        _, shard, queue_id = await named_queue(self._shards, connection, fields)

        if request.code == RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
            is_upper = fields.text("boundaryType", "LOWER").upper() == "UPPER"
            asked = {
                "topic": topic,
                "times": {str(queue_id): fields.integer("timestamp")},
                "boundary": "last" if is_upper else "first",
            }
            found = await self._shards.call(shard, "offsets_by_time", asked)
            return answer(request, ResponseCode.SUCCESS, {"offset": str(found[str(queue_id)])})
        ranges = await self._shards.call(shard, "queue_ranges", {"topic": topic})
        low, high = ranges.get(str(queue_id), [0, 0])
        if request.code == RequestCode.GET_EARLIEST_MSG_STORETIME:
            time_ms = (
                await stored_ms(self._shards, shard, topic, queue_id, low) if high > low else 0
            )
            return answer(request, ResponseCode.SUCCESS, {"timestamp": str(time_ms or -1)})
        offset = high if request.code == RequestCode.GET_MAX_OFFSET else low
        return answer(request, ResponseCode.SUCCESS, {"offset": str(offset)})
