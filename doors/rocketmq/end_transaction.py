"""Commits and rollbacks of half messages.

Source: EndTransactionProcessor, EndTransactionRequestHeader.
"""

from __future__ import annotations

import logging

from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.format import SYS_COMMITTED, SYS_ROLLBACK

from .arrivals import Arrivals
from .codes import RequestCode, ResponseCode
from .command import RemotingCommand, answer
from .connection import ClientConnection
from .request_fields import RequestFields
from .send_message import shard_named
from .shards import Shards

logger = logging.getLogger("raymq.rocketmq")

#: commitOrRollback -> what the producer says. Any other value says nothing
_DECISIONS = {SYS_COMMITTED: "commit", SYS_ROLLBACK: "rollback"}


class EndTransactionProcessor:
    """Answers END_TRANSACTION, which producers send one-way."""

    CODES = (RequestCode.END_TRANSACTION,)

    def __init__(self, shards: Shards, arrivals: Arrivals) -> None:
        """Args: `arrivals`: wakes the pulls of a queue that gets a message."""
        self._shards = shards
        self._arrivals = arrivals

    async def process(
        self, connection: ClientConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Commit or roll back a half message. Raises: Refused, RayMQError."""
        fields = RequestFields(request)
        shard = shard_named(fields.text("bname", ""), connection)
        decision = _DECISIONS.get(fields.integer("commitOrRollback"))
        group, offset = fields.text("producerGroup"), fields.integer("tranStateTableOffset")
        place = fields.integer("commitLogOffset")
        if decision is None:
            # The producer does not know yet. It is asked later.
            return answer(request, ResponseCode.SUCCESS)

        end = {
            "offset": offset,
            "group": group,
            "decision": decision,
            "physical_offset": place,
        }
        try:
            ended = await self._shards.call_transaction(shard, "end_half", end)
        except RayMQError as error:
            # One-way: nothing else says it. Unless it was refused, the producer is asked later.
            name = "refused" if isinstance(error, Rejected) else "failed"
            logger.warning("the %s of %r by %s %s: %s", decision, offset, group, name, error)
            raise

        if ended["topic"]:
            self._arrivals.note(str(ended["topic"]), int(ended["queue_id"]))
        return answer(request, ResponseCode.SUCCESS)
