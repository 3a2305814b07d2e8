"""Operations on producers and their epochs."""

from __future__ import annotations

from raymq.actors.api import call_arguments
from raymq.actors.api.operations import integer, operation, unnamed
from raymq.store.records.producer_stamp import EPOCH_MAX, PRODUCER_MAX
from raymq.store.records.requests import AppendedRows

from .scope import LeaderScope, shard_of, topic_of


def known_producers(leader: LeaderScope, producer_ids: list[int]) -> dict[str, object]:
    """Find those of these producer ids that this shard knows, in their order."""
    leader.await_check()
    return {"producer_ids": leader.store.known_producers(producer_ids)}


def fence_producer(
    leader: LeaderScope, producer_id: int, epoch: int, topic: str
) -> dict[str, object]:
    """Refuse puts of a producer with a lower epoch. Returns: the next sequence of each queue of this shard."""
    leader.check_serving()
    info = topic_of(leader, topic)
    store, shard = leader.store, shard_of(leader)
    appended = store.inner_put.fence_producer(producer_id, epoch)
    # An earlier call may have appended the record without learning whether it is confirmed. Until it is, another
    # replica may lead, and have rows that this one lacks.
    leader.await_promise(appended or AppendedRows.up_to(store.log.end))

    own = [each for each in range(info.queues) if info.shard_of(each) == shard]
    entries = {each: store.state.producers.get((producer_id, topic, each)) for each in own}
    known = {str(each): entry.next_sequence for each, entry in entries.items() if entry}
    return {"sequences": known}


def init_producer(leader: LeaderScope, producer_id: int) -> dict[str, object]:
    """Begin the next epoch of a producer, which fences the one before."""
    leader.check_serving()
    epoch, appended = leader.store.inner_put.init_producer(producer_id)
    leader.await_promise(appended)
    return {"epoch": epoch}


_PRODUCER_ID = integer(0, PRODUCER_MAX)

OPERATIONS = {
    "init_producer": operation(init_producer, producer_id=_PRODUCER_ID),
    "known_producers": operation(
        known_producers, producer_ids=unnamed(call_arguments.check_producer_ids)
    ),
    "fence_producer": operation(
        fence_producer,
        producer_id=_PRODUCER_ID,
        epoch=integer(0, EPOCH_MAX),
        topic=call_arguments.check_name,
    ),
}
