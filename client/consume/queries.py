"""Single messages, and messages by key or time, of all shards of a topic."""

from __future__ import annotations

import heapq
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from raymq.client.arguments import OFFSET_MAX, check_number, check_text, plain_int
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.client.times import Time, check_time
from raymq.client.transport.flight_client import CALL_TIMEOUT_S
from raymq.client.transport.routes import Routes
from raymq.client.transport.topic_routes import TopicRoute
from raymq.store.base.errors import (
    Corrupt,
    DeliveryUnknown,
    OffsetOutOfRange,
    Rejected,
    Unavailable,
)
from raymq.store.base.format import parse_message_id
from raymq.store.queues.raw_records import fault_of
from raymq.store.records.requests import FetchSlice

from .offsets_by_time import ask_offsets
from .range_reader import RangeReader

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: later than any store time
TIME_MAX_MS = 2**63 - 1
#: messages that a query without a key returns at most
RECORDS_MAX = 1024
#: messages of a queue that are read at a time
READ_RECORDS, READ_BYTES = 1024, 4 << 20
#: how long a shard is asked for what another one has, too
OTHERS_TIMEOUT_S = 2.0
#: how long one message is waited for
READ_TIMEOUT_S = 30.0


class _Queue(NamedTuple):
    topic: str
    queue_id: int
    shard: int


def query(
    cluster: ClusterHandle,
    topic: str,
    *,
    key: str | None,
    unique_key: str | None,
    between: tuple[Time | None, Time | None] | None,
    max_records: int,
) -> list[ReceivedMessage]:
    """See `Cluster.query`."""
    if key is not None and unique_key is not None:
        raise Rejected("give key or unique_key, not both", field="unique_key", limit="without key")
    if key is None and unique_key is None and between is None:
        raise Rejected(
            "give a key, a unique_key or between=(from, to): a consumer reads all of a topic",
            field="key",
            limit="key, unique_key or between",
        )
    begin_ms, end_ms = _span(between)
    check_number("max_records", max_records, 1)
    max_records = plain_int(max_records)

    route = _route_of(cluster, topic)
    word = key if unique_key is None else unique_key
    if word is None:
        check_number("max_records", max_records, 1, RECORDS_MAX)
        found = _between(cluster, route, begin_ms, end_ms, max_records)
    else:
        field = "key" if unique_key is None else "unique_key"
        _check_key(field, word)
        arguments = {
            "topic": topic,
            "key": word,
            "is_unique": unique_key is not None,
            "begin_ms": begin_ms,
            "end_ms": end_ms,
            "max_records": max_records,
        }
        found = _by_key(cluster, route, arguments, max_records)
    return sorted(found, key=_order)


def message(cluster: ClusterHandle, topic: str, queue_id: int, offset: int) -> ReceivedMessage:
    """See `Cluster.message`."""
    check_number("offset", offset, 0, OFFSET_MAX)
    route = _route_of(cluster, topic)
    queue_id, offset = plain_int(queue_id), plain_int(offset)
    queue = _Queue(topic, queue_id, route.shard_of(queue_id))

    # A fetch at the end of a queue would wait for the next message.
    ranges = cluster.call(queue.shard, "queue_ranges", {"topic": topic})
    low, high = ranges[str(queue_id)]
    found = None
    if low <= offset < high:
        with closing(_reader(cluster, queue)) as reader:
            found = _read_one(reader, queue, offset)
    if found is None:
        why = "it was compacted" if low <= offset < high else f"the queue holds [{low}, {high})"
        raise OffsetOutOfRange(
            f"queue {queue_id} of {topic} has no message at {offset}: {why}",
            min=low,
            max=high,
            offset=offset,
            queue_id=queue_id,
        )
    return found


def message_by_id(cluster: ClusterHandle, message_id: str) -> ReceivedMessage:
    """See `Cluster.message_by_id`."""
    check_text("message_id", message_id)
    host, _ = parse_message_id(message_id)
    # The shard that served at that address when the message was stored probably still does.
    shards = sorted(
        range(cluster.shards), key=lambda each: host not in cluster.endpoints.get(each, "")
    )
    places: list[tuple[int, dict[str, Any]]] = []
    failed: Unavailable | DeliveryUnknown | Corrupt | None = None
    arguments = {"message_id": message_id}
    for shard in shards:
        # Another shard hardly has such a message, too: a silent one is not waited for.
        timeout_s = OTHERS_TIMEOUT_S if places else CALL_TIMEOUT_S
        try:
            place = cluster.call(shard, "place_of_message", arguments, timeout_s=timeout_s)
        except (Unavailable, DeliveryUnknown, Corrupt) as error:
            failed = error
            continue
        if place:
            places.append((shard, place))

    if len(places) > 1:
        shown = ", ".join(
            f"cluster.message({place['topic']!r}, {place['queue_id']}, {place['offset']})"
            for _, place in places
        )
        raise Rejected(
            f"message id {message_id} names messages of {len(places)} shards, one of which had the port of another "
            f"one before: {shown}",
            field="message_id",
            limit="an id of one message",
        )
    if not places:
        known = cluster.shards
        cluster.refresh()
        if cluster.shards > known:
            # Shards were added since the handle was made.
            return message_by_id(cluster, message_id)
        if failed is not None:
            raise failed

    for shard, place in places:
        queue = _Queue(place["topic"], place["queue_id"], shard)
        with closing(_reader(cluster, queue)) as reader:
            found = _read_one(reader, queue, place["offset"])
        if found is not None and found.message_id == message_id.upper():
            return found
    raise Rejected(
        f"the cluster has no message with id {message_id}: it is deleted, or of another cluster",
        field="message_id",
        limit="of a message of this cluster",
    )


# --- arguments ------------------------------------------------------------------------------------


def _span(between: tuple[Time | None, Time | None] | None) -> tuple[int, int]:
    """The first and the last store time, in ms. Raises: Rejected."""
    if between is None:
        return 0, TIME_MAX_MS
    limit = "(first time, last time), each of which may be None"
    if not isinstance(between, (tuple, list)) or len(between) != 2:
        raise Rejected(f"between is {between!r}; give {limit}", field="between", limit=limit)
    begin, end = between
    begin_ms = 0 if begin is None else check_time("between", begin)
    end_ms = TIME_MAX_MS if end is None else check_time("between", end)
    if begin_ms > end_ms:
        raise Rejected(
            f"between begins at {begin_ms} ms and ends before that, at {end_ms} ms",
            field="between",
            limit=limit,
        )
    return begin_ms, end_ms


def _check_key(field: str, key: str) -> None:
    """Raises: Rejected for a text that no message can have as a key."""
    check_text(field, key)
    if not key or any(each in key for each in "\x01\x02 "):
        raise Rejected(
            f"{field} is {key!r}: keys are not empty, and have no space, \\x01 or \\x02",
            field=field,
            limit="one word",
        )


def _route_of(cluster: ClusterHandle, topic: str) -> TopicRoute:
    """The queues of a topic. Raises: Rejected when it does not exist."""
    topics = Routes.of(cluster).topics
    # Over the handle's own connection: another one would take longer than the query. `find` asks the other shards.
    with suppress(Unavailable, DeliveryUnknown):
        topics.note(cluster.call(0, "topics", {}, timeout_s=OTHERS_TIMEOUT_S))
    route = topics.find(topic)
    # The handle may be older than some shards.
    cluster.learn_shards(1 + max(route.shards))
    return route


# --- reading --------------------------------------------------------------------------------------


def _order(found: ReceivedMessage) -> tuple[int, int, int, int]:
    """By store time. Messages of one shard and time are in the order of its log, which the id ends with."""
    return found.store_time_ms, found.shard, int(found.message_id[-16:], 16), found.offset


def _reader(cluster: ClusterHandle, queue: _Queue) -> RangeReader:
    return RangeReader(Routes.of(cluster), *queue)


def _read_one(reader: RangeReader, queue: _Queue, offset: int) -> ReceivedMessage | None:
    """The message at an offset below the end of a queue; None when it was deleted or compacted meanwhile."""
    try:
        records, _ = reader.fetch(
            offset, offset + 1, max_bytes=1, max_records=1, timeout_s=READ_TIMEOUT_S
        )
    except OffsetOutOfRange:
        return None
    for found in received_messages(queue.shard, records):
        if found.offset == offset:
            return found
    return None


def _by_key(
    cluster: ClusterHandle, route: TopicRoute, arguments: dict[str, object], max_records: int
) -> list[ReceivedMessage]:
    """The newest messages of all shards with a key."""
    hits: list[tuple[int, int, list[Any]]] = []
    for shard in sorted(set(route.shards)):
        answer = cluster.call(shard, "find_messages", arguments)
        # `add_queues` does not show all queues from the beginning.
        shown = [hit for hit in answer["found"] if hit[0] < route.queues]
        hits += [(hit[2], shard, hit) for hit in shown]
    hits.sort(key=lambda each: each[0])

    found = []
    with ExitStack() as stack:
        readers: dict[_Queue, RangeReader] = {}
        for _, shard, (queue_id, offset, _, record) in hits[-max_records:]:
            made = None if record is None else _of_answer(shard, queue_id, b64decode(record))
            if made is None:
                queue = _Queue(route.name, queue_id, shard)
                if queue not in readers:
                    readers[queue] = stack.enter_context(closing(_reader(cluster, queue)))
                made = _read_one(readers[queue], queue, offset)
            if made is not None:
                found.append(made)
    return found


def _of_answer(shard: int, queue_id: int, record: bytes) -> ReceivedMessage | None:
    """The message of a record that came with an answer; None when it arrived damaged: a fetch says more."""
    records = pa.array([record], pa.binary())
    if fault_of(FetchSlice(queue_id, 0, 1, 0, 1, records, None)) is not None:
        return None
    (found,) = received_messages(shard, records)
    return found


def _between(
    cluster: ClusterHandle, route: TopicRoute, begin_ms: int, end_ms: int, max_records: int
) -> list[ReceivedMessage]:
    """The newest messages that were stored from `begin_ms` to `end_ms`."""
    queues = range(route.queues)
    first = ask_offsets(cluster.call, route.name, route.shard_of, dict.fromkeys(queues, begin_ms))
    after_ms = min(end_ms + 1, TIME_MAX_MS)
    after = ask_offsets(cluster.call, route.name, route.shard_of, dict.fromkeys(queues, after_ms))

    newest: list[ReceivedMessage] = []
    for queue_id in queues:
        queue = _Queue(route.name, queue_id, route.shard_of(queue_id))
        part = _newest_of(cluster, queue, first[queue_id], after[queue_id], max_records)
        newest = heapq.nlargest(max_records, [*newest, *part], key=_order)
    return newest


def _newest_of(
    cluster: ClusterHandle, queue: _Queue, first: int, after: int, max_records: int
) -> list[ReceivedMessage]:
    """The newest messages of the offsets [first, after) of a queue."""
    found: list[ReceivedMessage] = []
    step, end = max_records, after
    with closing(_reader(cluster, queue)) as reader:
        while first < end and len(found) < max_records:
            begin = max(first, end - step)
            part = [
                each
                for records in _pieces(reader, begin, end)
                for each in received_messages(queue.shard, records)
                if each.offset < end
            ]
            found = [*part, *found]
            # A compacted topic has gaps.
            step, end = 2 * step, begin
    return found[-max_records:]


def _pieces(reader: RangeReader, begin: int, end: int) -> Iterator[pa.Array]:
    """The records of [begin, end) that are left, in pieces, perhaps with some after them."""
    while begin < end:
        try:
            records, begin = reader.fetch(
                begin,
                end,
                max_bytes=READ_BYTES,
                max_records=min(READ_RECORDS, end - begin),
                timeout_s=READ_TIMEOUT_S,
            )
        except OffsetOutOfRange as error:
            # Files of the log were deleted meanwhile.
            lowest = int(error.fields.get("min", begin))
            if lowest <= begin:
                raise
            begin = lowest
            continue
        yield records
