"""Decisions: which staged rows a write consists of. The first one of a write counts, and answers every later one.

A decision is one record of the decisions topic, the row with sequence 0 of a producer whose id the write's name makes.
So the shard recognises every later decision on the same write as a duplicate, and answers with the first one.

The batches of a stream share producers (stream_batches.py). A decision on one names the record of the decision before,
so that those of earlier batches are found from the last one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.format import DECISIONS_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.put.service_host import ServiceHost
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.small_batch import SmallBatch
from raymq.store.state.producer_table import UNKNOWN_OFFSET
from raymq.store.state.shard_state import TopicInfo

from .decision_body import body_of, decision_of
from .producer_ids import hashed
from .stored_message import read_one
from .stream_batches import StreamBatch

#: staged rows may be decided for so long, and never longer than a third of the retention: what is decided must be
#: published before its files are deleted
DECIDE_WITHIN_HOURS = 24.0


def decision_producer_id(write_id: str) -> int:
    """The producer id of the decision on a write."""
    return hashed(f"{write_id}/decision")


def rows_producer_id(write_id: str) -> int:
    """The producer id of the published rows of a write."""
    return hashed(f"{write_id}/rows")


class DecisionGuard:
    """Opens the decisions topic to single decisions (`TopicGuard`)."""

    def __init__(self, config: StoreConfig) -> None:
        self.record_bytes_max = config.record_bytes_max

    def check_batch(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> None:
        """Refuse all but the one decision of a write. Raises: Rejected; then nothing is stored."""
        batch = request.batch
        if isinstance(batch, SmallBatch):
            batch = batch.to_batch()
        expected = None
        if batch.num_rows == 1:
            expected = _place_of(_checked_decision(batch.column("body")[0].as_py()))
        place = (request.producer_id, request.first_sequence)
        if (request.queue_id, request.epoch) != (0, 0) or place != expected:
            raise Rejected(
                "the decisions topic takes the one decision of a write; use a staged write",
                field="topic",
                limit="one decision",
            )


def _checked_decision(body: bytes) -> dict[str, object]:
    """A decision that names its write. Raises: Rejected."""
    try:
        found = decision_of(body)
        _place_of(found)
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        raise Rejected(
            "a decision is JSON with the field write_id, compressed by zlib",
            field="body",
            limit="JSON, compressed by zlib",
        ) from error
    return found


def _place_of(decision: Mapping[str, object]) -> tuple[int, int]:
    """The producer id and the sequence of a decision."""
    batch = StreamBatch.of(decision)
    if batch is None:
        return decision_producer_id(str(decision["write_id"])), 0
    return batch.decisions_producer_id, batch.place


class BatchDecision(NamedTuple):
    """What a shard knows of a batch of a stream."""

    #: the decision that counts; or, of a batch that is not decided, that on the last one before
    decision: dict[str, Any]
    #: everything below must be confirmed before it counts
    end_offset: int
    #: a later batch is decided, so all rows of this one are published
    is_published: bool = False


def is_decided(store: ServiceHost, write_id: str) -> bool:
    """Whether a write with producers of its own is decided."""
    return (
        store.state.producers.get((decision_producer_id(write_id), DECISIONS_TOPIC, 0)) is not None
    )


def has_decided(store: ServiceHost, batch: StreamBatch) -> bool:
    """Whether a batch of a stream, or a later one of its producer, is decided."""
    entry = store.state.producers.get((batch.decisions_producer_id, DECISIONS_TOPIC, 0))
    return entry is not None and entry.next_sequence > batch.place


def decide(store: ServiceHost, decision: Mapping[str, object]) -> AppendedRows:
    """Store the decision on a write, unless there is one. `first_decision` then reads the one that counts.

    Args: `decision`: JSON values, among them `write_id`, and `staged_ms`: the store time of the first of its rows.
    Durable: nothing, as `MessageStore.put`.
    Raises: Rejected for a decision that comes too late, or is too large; as `MessageStore.put`.
    """
    if not is_decided(store, str(decision["write_id"])):
        _check_age(store, decision)
    return _put(store, decision)


def _put(store: ServiceHost, decision: Mapping[str, object]) -> AppendedRows:
    columns = [
        pa.array([body_of(decision)], pa.binary()),
        pa.array([None], pa.string()),
        pa.array([None], pa.binary()),
        pa.array(np.array([store.clock.now_ms()])),
    ]
    batch = pa.record_batch(columns, schema=PUT_SCHEMA)
    producer_id, sequence = _place_of(decision)
    return store.put(
        PutRequest(
            DECISIONS_TOPIC, 0, batch, producer_id, 0, sequence, "quorum", may_skip=sequence > 0
        )
    )


def decide_batch(
    store: ServiceHost, batch: StreamBatch, decision: Mapping[str, object], complete: int | None
) -> BatchDecision | None:
    """Store the decision on a batch of a stream, or read the first one. Callers: everything decided is dispatched.

    Args: `complete`: the batch whose rows are published, as far as the caller knows.
    Returns: the decision on the last batch before, if that is another one than `complete`: then nothing is decided.
    None, if another decision came meanwhile: call again. Durable: nothing, as `MessageStore.put`.
    Raises: as `decide`, and as `first_decision`; Rejected for a batch that was passed over.
    """
    entry = store.state.producers.get((batch.decisions_producer_id, DECISIONS_TOPIC, 0))
    previous = -1
    if entry is not None:
        last = batch.at(entry.next_sequence - 1)
        previous = entry.offset_of(last.place)
        if last.number >= batch.number:
            found = _earlier(store, batch, previous)
            return BatchDecision(found, entry.end_offset, last.number > batch.number)
        # What is deleted names rows that are deleted, too.
        is_kept = previous >= store.queue_range(DECISIONS_TOPIC, 0)[0]
        if is_kept and last.number != complete:
            return BatchDecision(_read_decision(store, previous), entry.end_offset)

    _check_age(store, decision)
    # What a client says of it does not count.
    own = {**decision, "previous": previous}
    appended = _put(store, own)
    return None if appended.duplicates else BatchDecision(own, appended.end_offset)


def _earlier(store: ServiceHost, batch: StreamBatch, offset: int) -> dict[str, Any]:
    """The decision on a batch. Args: `offset`: of that on the last one. Raises: as `decide_batch`."""
    found = _read_decision(store, offset)
    while _number_of(found) > batch.number:
        # A record of the network may name any offset: each step goes back, so that the walk ends.
        offset = min(int(found.get("previous", UNKNOWN_OFFSET)), offset - 1)
        if offset < 0:
            break
        found = _read_decision(store, offset)
    if _number_of(found) != batch.number:
        raise Rejected(
            f"batch {batch.number} of {batch.query} was passed over: a later one is decided, and these rows would come "
            "after its rows. Use another name, or another checkpoint",
            field="write_id",
            limit="a batch after the last one",
            found=batch.number,
        )
    return found


def _number_of(decision: Mapping[str, Any]) -> int:
    return int(decision["batch"][1])


def _check_age(store: ServiceHost, decision: Mapping[str, Any]) -> None:
    write_id, staged_ms = decision["write_id"], int(decision["staged_ms"])
    hours = min(DECIDE_WITHIN_HOURS, store.config.file_reserved_hours / 3)
    age_hours = (store.clock.now_ms() - staged_ms) / 3_600_000
    if age_hours > hours:
        raise Rejected(
            f"the rows of write {write_id} were staged {age_hours:.1f} hours ago and have expired after {hours:g}; "
            "write them again",
            field="write_id",
            limit=hours,
            found=age_hours,
        )


def first_decision(store: ServiceHost, appended: AppendedRows) -> dict[str, object]:
    """The decision that counts. Args: `appended`: the answer of `decide`, confirmed and dispatched.

    Raises: Rejected if it was deleted with its commit log file; Unavailable while it cannot be read; Corrupt.
    """
    return _read_decision(store, appended.first_offset)


def _read_decision(store: ServiceHost, offset: int) -> dict[str, Any]:
    """The decision at a queue offset. Raises: as `first_decision`."""
    if offset < 0 or offset < store.queue_range(DECISIONS_TOPIC, 0)[0]:
        raise Rejected(
            "this write was decided so long ago that its decision is deleted (file_reserved_time_hours); use another "
            "write id",
            field="write_id",
            limit="a write of the retention time",
        )

    found = read_one(store, DECISIONS_TOPIC, 0, offset)
    if found is None:
        raise Unavailable("the decision cannot be read yet; decide again", field="write_id")

    try:
        return decision_of(found.body)
    except (ValueError, zlib.error) as error:
        raise Corrupt(
            f"the decision at offset {offset} of {DECISIONS_TOPIC} is not JSON, compressed by zlib: {error}",
            topic=DECISIONS_TOPIC,
            offset=offset,
            rule="a decision is JSON",
        ) from error
