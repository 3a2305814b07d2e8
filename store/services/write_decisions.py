"""Decisions: which staged rows a write consists of. The first one of a write counts, and answers every later one.

A decision is one record of the decisions topic, the row with sequence 0 of a producer whose id the write's name makes.
So the shard recognises every later decision on the same write as a duplicate, and answers with the first one.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.format import DECISIONS_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.small_batch import SmallBatch
from raymq.store.state.shard_state import TopicInfo

from .stored_message import read_one

if TYPE_CHECKING:
    from raymq.store.engine.message_store import MessageStore

#: staged rows may be decided for so long, and never longer than a third of the retention: what is decided must be
#: published before its files are deleted
DECIDE_WITHIN_HOURS = 24.0

#: of the JSON of a decision: its record holds less, compressed
DECISION_TEXT_BYTES_MAX = 64 << 20


def decision_producer_id(write_id: str) -> int:
    """The producer id of the decision on a write."""
    return _hash(f"{write_id}/decision")


def rows_producer_id(write_id: str) -> int:
    """The producer id of the published rows of a write."""
    return _hash(f"{write_id}/rows")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


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
            expected = decision_producer_id(_write_id_of(batch.column("body")[0].as_py()))
        where = (request.queue_id, request.epoch, request.first_sequence)
        if where != (0, 0, 0) or request.producer_id != expected:
            raise Rejected(
                "the decisions topic takes the one decision of a write; use a staged write",
                field="topic",
                limit="one decision",
            )


def _write_id_of(body: bytes) -> str:
    try:
        return str(decision_of(body)["write_id"])
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise Rejected(
            "a decision is JSON with the field write_id, compressed by zlib",
            field="body",
            limit="JSON, compressed by zlib",
        ) from error


def body_of(decision: Mapping[str, Any]) -> bytes:
    """A decision as the body of its record. Its ranges have much in common, and take an eighth of their JSON."""
    return zlib.compress(json.dumps(decision, separators=(",", ":")).encode())


def decision_of(body: bytes) -> dict[str, Any]:
    """The decision that a record's body holds. Raises: ValueError; zlib.error."""
    text = body
    # The first decisions were not compressed.
    if not body.startswith(b"{"):
        inflater = zlib.decompressobj()
        text = inflater.decompress(body, DECISION_TEXT_BYTES_MAX)
        if inflater.unconsumed_tail:
            raise ValueError(f"a decision has more than {DECISION_TEXT_BYTES_MAX} bytes")
    found: dict[str, Any] = json.loads(text)
    return found


def decide(store: MessageStore, decision: Mapping[str, Any]) -> AppendedRows:
    """Store the decision on a write, unless there is one. `first_decision` then reads the one that counts.

    Args: `decision`: JSON values, among them `write_id`, and `staged_ms`: the store time of the first of its rows.
    Durable: nothing, as `MessageStore.put`.
    Raises: Rejected for a decision that comes too late, or is too large; as `MessageStore.put`.
    """
    write_id = str(decision["write_id"])
    producer_id = decision_producer_id(write_id)
    if store.state.producers.get((producer_id, DECISIONS_TOPIC, 0)) is None:
        _check_age(store, write_id, int(decision["staged_ms"]))

    columns = [
        pa.array([body_of(decision)], pa.binary()),
        pa.array([None], pa.string()),
        pa.array([None], pa.binary()),
        pa.array(np.array([store.clock.now_ms()])),
    ]
    batch = pa.record_batch(columns, schema=PUT_SCHEMA)
    return store.put(PutRequest(DECISIONS_TOPIC, 0, batch, producer_id, 0, 0, "quorum"))


def _check_age(store: MessageStore, write_id: str, staged_ms: int) -> None:
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


def first_decision(store: MessageStore, appended: AppendedRows) -> dict[str, Any]:
    """The decision that counts. Args: `appended`: the answer of `decide`, confirmed and dispatched.

    Raises: Rejected if it was deleted with its commit log file; Unavailable while it cannot be read; Corrupt.
    """
    offset = appended.first_offset
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
