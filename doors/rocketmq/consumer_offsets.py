"""Offsets of groups, and those of queues.

Source: ConsumerManageProcessor, AdminBrokerProcessor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

from raymq.store.base.errors import RayMQError

from .answers import Refused
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .named_queue import named_queue
from .request_fields import RequestFields
from .shards import Shards
from .stored_record import stored_ms

logger = logging.getLogger("raymq.rocketmq")

#: commits of one group and topic within this time are one call
COMMIT_AFTER_S = 0.05


class OffsetStore:
    """Commits of clients, gathered. Callers: one event loop."""

    def __init__(self, shards: Shards, loop: asyncio.AbstractEventLoop) -> None:
        self._shards = shards
        self._loop = loop
        #: (shard, group, topic) -> queue -> offset
        self._waiting: defaultdict[tuple[int, str, str], dict[int, int]] = defaultdict(dict)
        self._commits: dict[tuple[int, str, str], asyncio.Task[None]] = {}
        #: commits that take no more offsets
        self._under_way: set[asyncio.Task[None]] = set()

    def commit_soon(self, shard: int, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit an offset together with others. A failure is logged: the client commits again after 5 s."""
        self._add(shard, group, topic, queue_id, offset)

    async def commit(self, shard: int, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit an offset together with others. Raises: RayMQError."""
        await asyncio.shield(self._add(shard, group, topic, queue_id, offset))

    def _add(
        self, shard: int, group: str, topic: str, queue_id: int, offset: int
    ) -> asyncio.Task[None]:
        key = shard, group, topic
        self._waiting[key][queue_id] = offset
        task = self._commits.get(key)
        if task is None:
            task = self._commits[key] = self._loop.create_task(self._commit(key))
            task.add_done_callback(_log_failure)
        return task

    async def _commit(self, key: tuple[int, str, str]) -> None:
        await asyncio.sleep(COMMIT_AFTER_S)
        task = self._commits.pop(key)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        shard, group, topic = key
        offsets = {str(queue_id): offset for queue_id, offset in self._waiting.pop(key).items()}
        arguments = {"group": group, "topic": topic, "offsets": offsets}
        await self._shards.call(shard, "commit_offsets", arguments)

    async def flush(self) -> None:
        """Wait until what was committed is stored, or could not be."""
        await asyncio.gather(*self._commits.values(), *self._under_way, return_exceptions=True)

    def waiting(self, shard: int, group: str, topic: str, queue_id: int) -> int | None:
        """An offset that was committed, and is not stored yet."""
        return self._waiting.get((shard, group, topic), {}).get(queue_id)


def _log_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, RayMQError):
        logger.info("a commit was not stored: %s", error)
    elif error is not None:
        logger.error("a commit", exc_info=error)


class ConsumerOffsetProcessor:
    """Answers QUERY_CONSUMER_OFFSET and UPDATE_CONSUMER_OFFSET."""

    CODES = (RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET)

    def __init__(self, shards: Shards, offsets: OffsetStore) -> None:
        self._shards = shards
        self._offsets = offsets

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Read or store the offset of one queue. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        group, topic = fields.text("consumerGroup"), fields.text("topic")
        _, shard, queue_id = await named_queue(self._shards, connection, fields)

        if request.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            committed = fields.integer("commitOffset")
            await self._offsets.commit(shard, group, topic, queue_id, committed)
            return answer(request, ResponseCode.SUCCESS)

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
