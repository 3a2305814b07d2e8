"""Operations on transactions whose rows, offsets and acks lie on this shard: commit, abort."""

from __future__ import annotations

import pyarrow as pa

from raymq.actors.api.leases import check_session
from raymq.actors.api.operations import integer, operation, optional
from raymq.actors.api.transactions import (
    WAITING_TOPICS,
    RowsPart,
    WorkerAcks,
    check_acks,
    check_offset_commits,
    check_parts,
    check_rows,
    pack_outcome,
    puts_of,
)
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC
from raymq.store.groups.transaction_requests import (
    OffsetCommit,
    TransactionCommit,
    TransactionName,
)

from .scope import LeaderScope, check_commit, check_queue, topic_of


def commit_transaction(
    leader: LeaderScope,
    session: bytes,
    number: int,
    parts: list[RowsPart],
    rows: pa.RecordBatch | None = None,
    offsets: list[OffsetCommit] | None = None,
    acks: list[WorkerAcks] | None = None,
) -> dict[str, object]:
    """Publish rows, commit offsets of members and settle messages of workers: all of it in one append, or nothing.

    Args: `session`, `number`: the name of the transaction, see `TransactionName`. A repeated call gets the first
    answer. `parts`: the queues of `rows`, in their order. `acks`: with the options of the groups.
    Returns: the decision, and what it rests on: `actors/api/transactions.py`.
    Raises: Rejected for a queue of another shard, and as puts do. Nothing is stored or decided then.
    """
    leader.check_serving()
    puts = puts_of(parts, rows)
    for part in parts:
        _check_target(leader, part)
    for each in offsets or ():
        commits = {queue_id: commit.offset for queue_id, commit in each.commits.items()}
        check_commit(leader, topic_of(leader, each.topic), commits)
    if not (puts or offsets or acks):
        raise Rejected(
            "the transaction is empty",
            field="parts",
            limit="rows, offsets or acks",
            found="nothing",
        )

    wanted = TransactionCommit(
        TransactionName(session, number), puts, offsets or (), [each.acks for each in acks or ()]
    )
    return pack_outcome(leader.commits.commit(wanted, acks or ()))


def abort_transaction(leader: LeaderScope, session: bytes, number: int) -> dict[str, object]:
    """Decide that a transaction is aborted, unless it is decided. A call of `commit_transaction` that is still on its
    way changes nothing then. Returns: the first decision, as `commit_transaction`.
    """
    leader.check_serving()
    return pack_outcome(leader.commits.abort(TransactionName(session, number)))


def _check_target(leader: LeaderScope, part: RowsPart) -> None:
    """Raises: Rejected for a queue that this shard does not have."""
    if part.topic in WAITING_TOPICS:
        levels = len(leader.store.config.delay_levels_ms)
        most = levels - 1 if part.topic == SCHEDULE_TOPIC else 0
        integer(0, most)("queue_id", part.queue_id)
        return
    check_queue(leader, topic_of(leader, part.topic), part.queue_id)


_NAME = {"session": check_session, "number": integer(1)}

OPERATIONS = {
    "commit_transaction": operation(
        commit_transaction,
        **_NAME,
        parts=check_parts,
        rows=optional(check_rows),
        offsets=optional(check_offset_commits),
        acks=optional(check_acks),
    ),
    "abort_transaction": operation(abort_transaction, **_NAME),
}
