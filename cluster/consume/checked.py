"""Every record that arrives is compared with its CRC, before anybody sees it (design D16).

That covers the disk, the shard's memory and the way here. Whether the shard's own copy is damaged, and in which file,
the shard tells when it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raymq.store.errors import Corrupt, Rejected, Unavailable
from raymq.store.queues.raw_records import before, fault_of
from raymq.store.records.record_walk import RecordFault
from raymq.store.requests import FetchSlice

if TYPE_CHECKING:
    from raymq.cluster.transport.routes import Routes

#: where a record says at which offset of the log it stands
_PHYSICAL_OFFSET_AT = 28


def checked(found: list[FetchSlice], routes: Routes, topic: str, shard: int) -> list[FetchSlice]:
    """The answer of a fetch: each queue's records before the first that is damaged, else the error.

    Raises: Unavailable where the shard cannot be asked, or what it has is whole: the same fetch may go well then.
    """
    return [_checked(part, routes, topic, shard) for part in found]


def _checked(part: FetchSlice, routes: Routes, topic: str, shard: int) -> FetchSlice:
    if part.records is None:
        if isinstance(part.error, Corrupt):
            return part._replace(error=_of_shard(part.error, shard))
        return part
    fault = fault_of(part)
    if fault is None:
        return part
    if fault.row:
        return before(part, fault.row)
    return part._replace(records=None, error=_what_the_shard_has(part, routes, topic, shard, fault))


def _what_the_shard_has(
    part: FetchSlice, routes: Routes, topic: str, shard: int, fault: RecordFault
) -> Corrupt:
    offset = part.first_offset
    where = {"topic": topic, "queue_id": part.queue_id, "offset": offset}
    try:
        routes.call(shard, "check_record", where)
    except Corrupt as error:
        return _of_shard(error, shard)
    except Rejected:
        # One that does not know the question.
        records: Any = part.records
        at = records[0].as_py()[_PHYSICAL_OFFSET_AT : _PHYSICAL_OFFSET_AT + 8]
        return Corrupt(
            f"shard {shard}: message {offset} of queue {part.queue_id} of {topic} is damaged ({fault.rule}); "
            "`raymq store verify` names the place",
            shard=shard,
            offset=int.from_bytes(at, "big"),
            rule=fault.rule,
        )
    raise Unavailable(
        f"message {offset} of queue {part.queue_id} of {topic} came damaged ({fault.rule}) from shard {shard}, which "
        "has it whole: memory or network change bytes on the way",
        shard=shard,
    )


def _of_shard(error: Corrupt, shard: int) -> Corrupt:
    return Corrupt(f"shard {shard}: {error.message}", **{**error.fields, "shard": shard})
