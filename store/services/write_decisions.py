"""Decisions: which staged rows a write consists of. The first one of a write counts, and answers every later one.

A decision is one record of the decisions topic, the row with sequence 0 of a producer whose id the write's name makes.
So the shard recognises every later decision on the same write as a duplicate, and answers with the first one.

The batches of a stream share producers, so that a stream does not fill the table of producers. Its decisions are the
rows of one producer for BATCHES_SHARED batches. A decision names its batch, and says where the sequences of its rows
begin in each queue.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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

#: batches of a stream that share their producers. The rows of so many batches in one queue must have sequences
#: (36 bits), and their numbers must be epochs (20 bits)
BATCHES_SHARED = 4096
#: one decision is stored at a time: the next one follows from what is stored
_decide_lock = threading.Lock()


class StreamBatch(NamedTuple):
    """A batch of a stream, which is a write of its own."""

    #: the same for all batches, also after a restart
    stream: str
    #: batches are committed in the order of their numbers
    number: int

    @property
    def write_id(self) -> str:
        """The name of the write."""
        return f"{self.stream}/{self.number}"

    @property
    def epoch(self) -> int:
        """The epoch of its rows: that of a later batch is higher, and fences this one."""
        return self.number % BATCHES_SHARED + 1

    @property
    def rows_producer_id(self) -> int:
        """The producer id of its published rows."""
        return _hash(f"{self.stream}/rows-of-batches/{self.number // BATCHES_SHARED}")

    @property
    def decisions_producer_id(self) -> int:
        """The producer id of the decision on it."""
        return _hash(f"{self.stream}/decisions-on-batches/{self.number // BATCHES_SHARED}")


def decision_producer_id(write_id: str) -> int:
    """The producer id of the decision on a write that is no batch of a stream."""
    return _hash(f"{write_id}/decision")


def rows_producer_id(write_id: str) -> int:
    """The producer id of the published rows of such a write."""
    return _hash(f"{write_id}/rows")


def batch_of(decision: Mapping[str, Any]) -> StreamBatch | None:
    """The batch of a stream that a decision is on; None: another write. Raises: KeyError for half a batch."""
    if decision.get("stream") is None:
        return None
    return StreamBatch(str(decision["stream"]), int(decision["batch"]))


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
        is_decision = batch.num_rows == 1 and not request.queue_id
        if not is_decision or not _is_of_producer(request, batch.column("body")[0].as_py()):
            raise Rejected(
                "the decisions topic takes the one decision of a write; use a staged write",
                field="topic",
                limit="one decision",
            )


def _is_of_producer(request: PutRequest, body: bytes) -> bool:
    """Whether a request is of the producer of the decisions on its write."""
    try:
        decision = decision_of(body)
        batch, write_id = batch_of(decision), str(decision["write_id"])
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise Rejected(
            "a decision is JSON with the field write_id, compressed by zlib",
            field="body",
            limit="JSON, compressed by zlib",
        ) from error
    if batch is not None and request.producer_id == batch.decisions_producer_id:
        return request.epoch == batch.epoch
    expected = (decision_producer_id(write_id), 0, 0)
    return (request.producer_id, request.epoch, request.first_sequence) == expected


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

    Args: `decision`: JSON values, among them `write_id`, and `staged_ms`: the store time of the first of its rows. On a
    batch of a stream also `stream` and `batch`, its number.
    Durable: nothing, as `MessageStore.put`.
    Raises: Fenced for a batch of a stream of which a later one is decided; Rejected for a decision that comes too late,
    or is too large; as `MessageStore.put`.
    """
    write_id = str(decision["write_id"])
    batch = batch_of(decision)
    with _decide_lock:
        producer_id, epoch, sequence = decision_producer_id(write_id), 0, 0
        # Before batches shared their producers, they were decided as other writes are.
        if batch is not None and not _decisions(store, producer_id):
            producer_id, epoch = batch.decisions_producer_id, batch.epoch
            sequence = _decisions(store, producer_id)
            if sequence and store.producer_epoch(producer_id) == epoch:
                # The last decision is on this batch.
                sequence -= 1

        if sequence == _decisions(store, producer_id):
            _check_age(store, write_id, int(decision["staged_ms"]))
        columns = [
            pa.array([body_of(decision)], pa.binary()),
            pa.array([None], pa.string()),
            pa.array([None], pa.binary()),
            pa.array(np.array([store.clock.now_ms()])),
        ]
        rows = pa.record_batch(columns, schema=PUT_SCHEMA)
        return store.put(
            PutRequest(DECISIONS_TOPIC, 0, rows, producer_id, epoch, sequence, "quorum")
        )


def _decisions(store: MessageStore, producer_id: int) -> int:
    """How many decisions a producer has stored."""
    entry = store.state.producers.get((producer_id, DECISIONS_TOPIC, 0))
    return 0 if entry is None else entry.next_sequence


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
