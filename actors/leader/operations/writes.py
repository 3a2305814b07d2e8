"""Operations on staged writes: which rows a write consists of, and their publication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymq.actors.api import call_arguments
from raymq.actors.api.operations import integer, operation, optional, unnamed
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.records.requests import AppendedRows
from raymq.store.records.staged_range import StagedRange
from raymq.store.services import staged_rows, stream_batches, write_decisions
from raymq.store.services.stream_batches import StreamBatch

from .scope import LeaderScope, check_queue, topic_of

#: how long one call publishes staged rows
PUBLISH_MS = 500


def decide_write(
    leader: LeaderScope, decision: dict[str, Any], complete: int | None = None
) -> dict[str, object]:
    """Decide which staged rows a write consists of, unless that is decided.

    Args: `complete`: of a stream, the newest batch whose rows are known to be published.
    Returns: the decision that counts, and of a batch whether its rows are published. Or the `previous` decision,
    whose rows must be published first, and nothing is decided.
    """
    leader.check_serving()
    store = leader.store
    batch = StreamBatch.of(decision)
    if batch is None or write_decisions.is_decided(store, decision["write_id"]):
        return {"decision": _decide_alone(leader, decision)}

    leader.await_dispatch()
    if not stream_batches.has_room(decision) and not write_decisions.has_decided(store, batch):
        return {"decision": _decide_alone(leader, decision)}
    while True:
        found = write_decisions.decide_batch(store, batch, decision, complete)
        if found is not None:
            leader.await_promise(AppendedRows.up_to(found.end_offset))
            if found.decision["batch"][1] != batch.number:
                return {"previous": found.decision}
            return {"decision": found.decision, "is_published": found.is_published}
        leader.await_dispatch()


def _decide_alone(leader: LeaderScope, decision: Mapping[str, object]) -> dict[str, object]:
    """The decision on a write with producers of its own."""
    own = {name: value for name, value in decision.items() if name != "batch"}
    appended = write_decisions.decide(leader.store, own)
    leader.await_promise(appended)
    leader.await_dispatch()
    return write_decisions.first_decision(leader.store, appended)


def publish_rows(
    leader: LeaderScope,
    write_id: str,
    topic: str,
    queue_id: int,
    ranges: list[StagedRange],
    batch: StreamBatch | None = None,
) -> dict[str, object]:
    """Publish staged rows of a decided write in a queue of this shard, or in its timers, for about `PUBLISH_MS`.

    Args: `batch`: of the decision on a batch of a stream.
    Returns: how many rows of the write are published there, and whether those are all.
    """
    leader.check_serving()
    if topic == TIMER_TOPIC:
        call_arguments.check_integer("queue_id", queue_id, 0, 0)
    else:
        check_queue(leader, topic_of(leader, topic), queue_id)
    producer_id, first_sequence = write_decisions.rows_producer_id(write_id), 0
    if batch is not None:
        producer_id, first_sequence = batch.rows_producer_id, batch.first_sequence
    leader.await_dispatch()

    store = leader.store
    until_ms = store.clock.monotonic_ms() + PUBLISH_MS
    found = staged_rows.publish(
        store,
        topic,
        queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        ranges=ranges,
        is_over=lambda: store.clock.monotonic_ms() >= until_ms,
    )

    # Rows that an earlier call has stored may not be confirmed yet.
    leader.await_promise(found.appended or AppendedRows.up_to(store.log.end))
    return {"rows": found.rows, "is_complete": found.is_complete}


OPERATIONS = {
    "decide_write": operation(
        decide_write,
        decision=unnamed(call_arguments.check_decision),
        complete=optional(integer()),
    ),
    "publish_rows": operation(
        publish_rows,
        write_id=call_arguments.check_name,
        topic=call_arguments.check_name,
        queue_id=integer(),
        ranges=unnamed(call_arguments.check_ranges),
        batch=optional(unnamed(call_arguments.check_batch)),
    ),
}
