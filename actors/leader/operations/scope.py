"""What the operations of a leader work on, and what several of them check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from raymq.actors.api import call_arguments
from raymq.actors.leader.group_service import GroupService
from raymq.actors.leader.queue_claims import QueueClaims
from raymq.actors.leader.transaction_commits import LeaderCommits
from raymq.actors.leader.transactions import Transactions
from raymq.actors.leader.worker_leases import WorkerLeases
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.delay.timer_cancel import CancelledTimer
from raymq.store.engine.message_store import MessageStore
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import SHARDS, TopicInfo


class LeaderScope(Protocol):
    """The part of `leader.Leader` that the operations use."""

    parts: ReplicaParts
    store: MessageStore
    groups: GroupService
    claims: QueueClaims
    leases: WorkerLeases
    commits: LeaderCommits
    transactions: Transactions

    def check_serving(self) -> None:
        """Raises: Unavailable, when the shard takes no writes."""

    @property
    def visible_end(self) -> int:
        """The physical offset below which readers see topics and offsets."""

    def await_check(self) -> None:
        """Wait until a majority says that no other replica led at this call. Raises: Unavailable."""

    def await_dispatch(self) -> None:
        """Wait until readers see all messages confirmed by now. Raises: Unavailable."""

    def await_index(self) -> None:
        """Wait until the index has all messages that readers see by now. Raises: Unavailable."""

    def cancel_timer(self, offset: int) -> CancelledTimer:
        """Cancel a timer, unless its second is over. The caller awaits the promise. Raises: as `Delays.cancel`."""

    def publish(self, appended: AppendedRows) -> None:
        """Let the satellites work on an append, without waiting for them."""

    def await_promise(self, appended: AppendedRows) -> None:
        """Wait until the promise of this append is kept. Raises: DeliveryUnknown."""


def shard_of(leader: LeaderScope) -> int:
    """The number of this shard."""
    return leader.parts.identity.shard


def joined_shards(leader: LeaderScope) -> int:
    """How many shards know every topic."""
    return int(leader.parts.identity.facts().get("shards", 1))


def created_shards(leader: LeaderScope) -> int:
    """How many shards the cluster had when it was created, as far as the log of this shard says."""
    noted = leader.store.state.progress.get(SHARDS, {})
    return int(noted.get("created", 0)) or joined_shards(leader)


def known_shards(leader: LeaderScope) -> int:
    """How many shards a topic may name."""
    shards = int(leader.parts.identity.facts().get("shards", call_arguments.SHARDS_MAX))
    return max(shards, int(leader.store.state.progress.get(SHARDS, {}).get("known", 0)))


def topic_of(leader: LeaderScope, name: str) -> TopicInfo:
    """The facts of a topic. Raises: Rejected when it does not exist."""
    topics = leader.store.state.topics
    return topics[call_arguments.check_known(name, topics)]


def check_queue(leader: LeaderScope, info: TopicInfo, queue_id: int) -> None:
    """Raises: Rejected for a queue of another shard."""
    call_arguments.check_integer("queue_id", queue_id, 0, info.queues - 1)
    shard = shard_of(leader)
    if info.shard_of(queue_id) != shard:
        raise Rejected(
            f"queue {queue_id} of {info.name} is on shard {info.shard_of(queue_id)}, this is shard {shard}",
            field="queue_id",
            limit=f"the queues of shard {shard}",
            found=queue_id,
        )


def check_commit(leader: LeaderScope, info: TopicInfo, offsets: Mapping[int, int]) -> None:
    """Raises: as `check_queue` and `check_offset`, for queues and their offsets."""
    shard = shard_of(leader)
    is_own = [each == shard for each in info.shards]
    for queue_id, offset in offsets.items():
        if not (0 <= queue_id < info.queues and is_own[queue_id % len(is_own)]):
            check_queue(leader, info, queue_id)
        check_offset(leader, info, queue_id, offset)


def check_offset(leader: LeaderScope, info: TopicInfo, queue_id: int, offset: int) -> None:
    """Raises: OffsetOutOfRange for an offset that a fetch would refuse as well; as `await_check`."""
    store = leader.store
    low, high = store.queue_range(info.name, queue_id)
    if info.compacted:
        # A fetch may begin at offsets that were compacted away.
        low = 0
    # After a start, the dispatched end may still be below the confirmed end.
    high = max(high, store.state.next_offsets.get((info.name, queue_id), 0))

    if not low <= offset <= high:
        # The queue of a newer leader may end later.
        leader.await_check()
        raise OffsetOutOfRange(
            f"offset {offset} of queue {queue_id} of {info.name} cannot be committed: the queue holds "
            f"{low} to {high}. Nothing was committed",
            min=low,
            max=high,
            offset=offset,
            queue_id=queue_id,
            field="offsets",
            limit=f"{low}..{high}",
        )
