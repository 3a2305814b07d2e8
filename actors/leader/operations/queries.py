"""Operations that look for messages: by time, by key, by id."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from raymq.actors.api import call_arguments
from raymq.actors.api.operations import choice, flag, integer, operation, unnamed
from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected
from raymq.store.index.query import Boundary
from raymq.store.records.keys import KEY_SEPARATOR, KEYS, UNIQ_KEY
from raymq.store.records.properties import decode
from raymq.store.records.record_decode import decode_column
from raymq.store.state.topics import is_system_topic

from .scope import LeaderScope, check_queue, topic_of

#: what a caller says -> the boundary
BOUNDARIES = {"first": Boundary.LOWER, "last": Boundary.UPPER}
#: bytes of records in one answer, the newest ones. The caller fetches the others
ANSWER_BYTES = 1 << 20


def offsets_by_time(
    leader: LeaderScope, topic: str, times: dict[int, int], boundary: str
) -> dict[str, object]:
    """The offset that a store time is mapped to, of each of these queues of this shard."""
    info = topic_of(leader, topic)
    for queue_id in times:
        check_queue(leader, info, queue_id)
    # The queues of a newer leader may end later.
    leader.await_check()
    leader.await_dispatch()
    return {
        str(queue_id): leader.store.offset_by_time(topic, queue_id, time_ms, BOUNDARIES[boundary])
        for queue_id, time_ms in times.items()
    }


def find_messages(
    leader: LeaderScope,
    topic: str,
    key: str,
    is_unique: bool,
    begin_ms: int,
    end_ms: int,
    max_records: int,
) -> dict[str, object]:
    """The newest messages of this shard with a key, stored from `begin_ms` to `end_ms`.

    Args: `is_unique`: the key is RocketMQ's unique key, and not one of the index keys.
    Returns: of each its queue, its offset, its store time and its record, in the order of the log. The record may be
    missing: a fetch at that offset gives it, unless it was compacted.
    """
    store = leader.store
    info = topic_of(leader, topic)
    if not store.config.message_index:
        raise Rejected(
            "the cluster was started with message_index=False: its messages are not found by keys",
            field="message_index",
            limit=True,
            found=False,
        )
    limit = store.config.max_msgs_num_batch
    if max_records > limit:
        raise Rejected(
            f"max_records is {max_records}; a query by key finds at most {limit} messages (max_msgs_num_batch)",
            field="max_records",
            limit=limit,
            found=max_records,
        )

    # A newer leader may have newer ones.
    leader.await_check()
    leader.await_dispatch()
    leader.await_index()

    find = partial(
        store.query.by_keys,
        topic,
        [key],
        max_num=max_records,
        begin_ms=begin_ms,
        end_ms=end_ms,
        exact=True,
    )
    try:
        records = store.log.reads.mending(find).records
    except Corrupt as error:
        store.log.reads.note_damage(error)
        raise

    found: list[list[object]] = []
    left = ANSWER_BYTES
    raw, rows = records.to_pylist(), decode_column(records).to_pylist()
    for record, row in zip(reversed(raw), reversed(rows), strict=True):
        properties = decode(row["properties"])
        name = UNIQ_KEY if is_unique else KEYS
        if key not in properties.get(name, "").split(KEY_SEPARATOR):
            continue
        if row["queue_offset"] < store.state.first_offset(topic, row["queue_id"]):
            # Of a deleted topic of this name.
            continue
        shown = None
        # Of a compacted topic the record may be one that no reader gets any more.
        if len(record) <= left and not info.compacted:
            left -= len(record)
            shown = b64encode(record).decode()
        found.append([row["queue_id"], row["queue_offset"], row["store_time_ms"], shown])
    return {"found": found[::-1]}


def place_of_message(leader: LeaderScope, message_id: str) -> dict[str, object]:
    """Topic, queue and offset of the message with an offset message id; nothing if this shard does not have it."""
    return _place(leader, lambda: leader.store.query.by_id(message_id))


def place_of_record(leader: LeaderScope, physical_offset: int) -> dict[str, object]:
    """Topic, queue and offset of the record that begins at an offset of the log; nothing if none does."""
    return _place(leader, lambda: leader.store.query.by_offset(physical_offset))


def _place(leader: LeaderScope, find: Callable[[], pa.RecordBatch]) -> dict[str, object]:
    leader.await_check()
    leader.await_dispatch()
    try:
        batch = find()
    except (OffsetOutOfRange, Rejected):
        # Another shard's id leads to any bytes here.
        return {}
    except Corrupt as error:
        leader.store.log.reads.note_damage(error)
        raise

    row = batch.select(["topic", "queue_id", "queue_offset"]).to_pylist()[0]
    state = leader.store.state
    if is_system_topic(row["topic"]) or row["topic"] not in state.topics:
        return {}
    if row["queue_offset"] < state.first_offset(row["topic"], row["queue_id"]):
        return {}
    return {"topic": row["topic"], "queue_id": row["queue_id"], "offset": row["queue_offset"]}


def _message_id(field: str, value: object) -> str:
    """A message id in hex. Raises: Rejected."""
    message_id = call_arguments.check_name(field, value)
    try:
        fmt.parse_message_id(message_id)
    except Rejected as error:
        # A long text is not repeated.
        advice = "give the id of a stored message"
        raise call_arguments.wrong_value(field, value, advice, error.limit) from None
    return message_id


OPERATIONS = {
    "offsets_by_time": operation(
        offsets_by_time,
        topic=call_arguments.check_name,
        times=unnamed(partial(call_arguments.check_offsets, field="times")),
        boundary=choice(*BOUNDARIES),
    ),
    "find_messages": operation(
        find_messages,
        topic=call_arguments.check_name,
        key=call_arguments.check_name,
        is_unique=flag,
        begin_ms=integer(),
        end_ms=integer(),
        max_records=integer(1),
    ),
    "place_of_message": operation(place_of_message, message_id=_message_id),
    "place_of_record": operation(place_of_record, physical_offset=integer()),
}
