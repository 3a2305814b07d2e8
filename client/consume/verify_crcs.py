"""Compares every fetched record with its CRC before the program sees it.

The comparison covers the disk, the shard's memory and the network. After a mismatch the leader is asked whether its own
copy is damaged, and in which file. A follower is asked to check and mend its copy, and another replica is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.format import PHYSICAL_OFFSET_AT, QUEUE_OFFSET_AT
from raymq.store.queues.raw_records import fault_of, records_before
from raymq.store.records.record_walk import RecordFault
from raymq.store.records.requests import FetchRequest, FetchSlice

if TYPE_CHECKING:
    from raymq.client.transport.nearest import NearestReplicas
    from raymq.client.transport.routes import Routes


def verify_slices(
    found: list[FetchSlice],
    routes: Routes,
    request: FetchRequest,
    shard: int,
    nearest: NearestReplicas | None = None,
) -> list[FetchSlice]:
    """The answer of a fetch, per queue: the records before the first damaged one, or the error.

    Args: `nearest`: the replicas from which the answer came; None: the leader.
    Raises: Unavailable when the shard does not answer, or when its copy is intact: the same fetch may succeed then.
    Unavailable, too, if a follower has answered: another replica answers the same fetch.
    """
    return [_verify_slice(part, routes, request.key_of(part)[0], shard, nearest) for part in found]


def _verify_slice(
    part: FetchSlice, routes: Routes, topic: str, shard: int, nearest: NearestReplicas | None
) -> FetchSlice:
    if part.records is None:
        if isinstance(part.error, Corrupt):
            return part._replace(error=_of_shard(part.error, shard))
        return part
    fault = fault_of(part)
    if fault is None:
        return part
    if fault.row:
        return records_before(part, fault.row)
    if nearest is not None and nearest.reject_answer(topic, part.queue_id, part.first_offset):
        raise Unavailable(
            f"message {part.first_offset} of queue {part.queue_id} of {topic} arrived damaged ({fault.rule}) from a "
            f"follower of shard {shard}, which checks its copy now",
            shard=shard,
        )
    return part._replace(records=None, error=_ask_the_shard(part, routes, topic, shard, fault))


def _ask_the_shard(
    part: FetchSlice, routes: Routes, topic: str, shard: int, fault: RecordFault
) -> Corrupt:
    """The error of a record that is damaged in the shard, too. Raises: Unavailable when the shard's copy is intact."""
    records: Any = part.records
    first = records[0].as_py()
    # Of the record: what the shard looked at in vain comes before it.
    offset = _offset_of(first, part)
    arguments = {"topic": topic, "queue_id": part.queue_id, "offset": offset}

    try:
        routes.call(shard, "check_record", arguments)
    except Corrupt as error:
        return _of_shard(error, shard)
    except Rejected:
        # A shard that does not know the operation.
        at = first[PHYSICAL_OFFSET_AT : PHYSICAL_OFFSET_AT + 8]
        return Corrupt(
            f"shard {shard}: message {offset} of queue {part.queue_id} of {topic} is damaged ({fault.rule}); "
            "`raymq store verify` names the file",
            shard=shard,
            offset=int.from_bytes(at, "big"),
            rule=fault.rule,
        )

    raise Unavailable(
        f"message {offset} of queue {part.queue_id} of {topic} arrived damaged ({fault.rule}) from shard {shard}, "
        "whose own copy is intact now: another replica has mended it, as its log says then. Otherwise suspect faulty "
        "memory or network; test the RAM of both machines",
        shard=shard,
    )


def _offset_of(record: bytes, part: FetchSlice) -> int:
    """The queue offset of a damaged record, whose own one may be what is damaged."""
    offset = int.from_bytes(record[QUEUE_OFFSET_AT : QUEUE_OFFSET_AT + 8], "big", signed=True)
    return offset if part.first_offset <= offset < part.next_offset else part.first_offset


def _of_shard(error: Corrupt, shard: int) -> Corrupt:
    return Corrupt(f"shard {shard}: {error.message}", **{**error.fields, "shard": shard})
