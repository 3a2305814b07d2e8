"""Checks of arguments that came over the network, before any of them is used: a client may send anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from raymq.store.base.errors import Rejected, TopicMissing
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.records.producer_stamp import PRODUCER_MAX
from raymq.store.records.requests import FetchRequest, MessageSelector
from raymq.store.records.staged_range import StagedRange
from raymq.store.services.stream_batches import StreamBatch
from raymq.store.state.topics import QUEUES_MAX

#: numbers of RocketMQ are signed 64-bit ones
NUMBER_MAX = 2**63 - 1
#: limits of a fetch. Larger values are cut to them
_ANY = 2**128
#: bytes that one fetch may return
FETCH_BYTES_MAX = 64 << 20
#: characters of a filter
EXPRESSION_CHARS_MAX = 4096
#: topics of one fetch
FETCH_TOPICS_MAX = 1_000
#: shards of a cluster at most
SHARDS_MAX = 256
#: producers that one call may ask for
PRODUCER_IDS_MAX = 1 << 14
#: characters of a wrong value that the error repeats
SHOWN_CHARS = 60


def shown(value: object) -> str:
    """Any value, shortened for an error's message."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > SHOWN_CHARS:
        return f"a {type(value).__name__} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def wrong_value(field: str, value: object, advice: str, limit: object) -> Rejected:
    """The error of a wrong value, with the value and the advice."""
    return Rejected(
        f"{field} is {shown(value)}; {advice}", field=field, limit=limit, found=shown(value)
    )


def check_integer(field: str, value: object, least: int = 0, most: int = NUMBER_MAX) -> int:
    """Raises: Rejected unless the value is an int (a bool is not) from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        advice = f"use a whole number, {least} to {most}"
        raise wrong_value(field, value, advice, f"{least}..{most}")
    return value


def check_name(field: str, value: object) -> str:
    """Raises: Rejected unless the value is text."""
    if type(value) is not str:
        raise wrong_value(field, value, f"give its name, not a {type(value).__name__}", "str")
    return value


def check_known(topic: object, known: Collection[str]) -> str:
    """Raises: TopicMissing for a topic that does not exist."""
    if type(topic) is not str or topic not in known:
        raise TopicMissing(
            f"topic {shown(topic)} does not exist",
            field="topic",
            limit="an existing topic",
            found=shown(topic),
        )
    return topic


def check_shards(shards: object, count: int) -> list[int]:
    """The shards of a topic: queue q is on `shards[q % len(shards)]`.

    Raises: Rejected for shards that a cluster of `count` shards does not have.
    """
    if type(shards) is not list or not 1 <= len(shards) <= QUEUES_MAX:
        advice = f"give a list of 1 to {QUEUES_MAX} of the cluster's shards"
        raise wrong_value("shards", shards, advice, QUEUES_MAX)
    return [check_integer("shards", shard, 0, count - 1) for shard in shards]


def check_decision(decision: object) -> dict[str, object]:
    """The decision on a staged write. Raises: Rejected without its name and time."""
    if type(decision) is not dict:
        raise wrong_value("decision", decision, "give an object", "{write_id, staged_ms, ...}")
    check_name("write_id", decision.get("write_id"))
    check_integer("staged_ms", decision.get("staged_ms"))
    check_batch(decision.get("batch"))
    checked: dict[str, Any] = decision
    return checked


def check_batch(batch: object) -> StreamBatch | None:
    """The name of a query and the number of its batch; None: none is given. Raises: Rejected."""
    if batch is None:
        return None
    if type(batch) is not list or len(batch) != len(StreamBatch._fields):
        advice = "give a list of the query's name and the batch's number"
        raise wrong_value("batch", batch, advice, len(StreamBatch._fields))
    return StreamBatch(check_name("batch", batch[0]), check_integer("batch", batch[1], 0))


def check_ranges(ranges: object) -> list[StagedRange]:
    """Ranges of staged rows: lists of producer id, first offset, last offset and rows. Raises: Rejected."""
    advice = "give lists of producer id, first offset, last offset and rows"
    if type(ranges) is not list:
        raise wrong_value("ranges", ranges, advice, "a list")
    found = []
    for each in ranges:
        if type(each) is not list or len(each) != len(StagedRange._fields):
            raise wrong_value("ranges", each, advice, len(StagedRange._fields))
        producer_id = check_integer("ranges", each[0], 0, PRODUCER_MAX)
        first = check_integer("ranges", each[1])
        last = check_integer("ranges", each[2], first)
        rows = check_integer("ranges", each[3], 1, last + 1 - first)
        found.append(StagedRange(producer_id, first, last, rows))
    return found


def check_producer_ids(producer_ids: object) -> list[int]:
    """Producer ids. Raises: Rejected unless they are a list of at most `PRODUCER_IDS_MAX`."""
    if type(producer_ids) is not list or len(producer_ids) > PRODUCER_IDS_MAX:
        advice, limit = "give a list of producer ids", f"a list of at most {PRODUCER_IDS_MAX}"
        raise wrong_value("producer_ids", producer_ids, advice, limit)
    return [check_integer("producer_ids", each, 0, PRODUCER_MAX) for each in producer_ids]


def check_attributes(attributes: Any, field: str = "attributes") -> dict[str, str] | None:
    """The attributes of a new topic, or other names and values. Raises: Rejected unless they map text to text."""
    if attributes is None:
        return None
    texts = [*attributes, *attributes.values()] if type(attributes) is dict else [None]
    if not all(type(text) is str for text in texts):
        advice = "give names and values, both text"
        raise wrong_value(field, attributes, advice, "{name: value}")
    checked: dict[str, str] = attributes
    return checked


def check_offsets(
    offsets: object, least: int = 0, most: int = NUMBER_MAX, *, field: str = "offsets"
) -> dict[int, int]:
    """queue_id -> offset. JSON has the queue ids as text. Raises: Rejected naming the field."""
    if type(offsets) is not dict or not 1 <= len(offsets) <= QUEUES_MAX:
        advice = f"give a number for each of 1 to {QUEUES_MAX} queues"
        raise wrong_value(field, offsets, advice, QUEUES_MAX)

    found: dict[int, int] = {}
    for queue, offset in offsets.items():
        number = queue
        if type(queue) is str and queue.isascii() and queue.isdigit() and len(queue) < 10:
            number = int(queue)
        if type(number) is not int or not 0 <= number < QUEUES_MAX:
            raise Rejected(
                f"{field} has the queue {shown(queue)}; queues are 0 to {QUEUES_MAX - 1}",
                field=field,
                limit=QUEUES_MAX - 1,
                found=shown(queue),
            )
        found[number] = check_integer(field, offset, least, most)

    return found


def check_selector(wanted: Any) -> MessageSelector:
    """The filter of a fetch. Raises: Rejected for a malformed one."""
    is_pair = type(wanted) in (list, tuple) and len(wanted) == len(MessageSelector._fields)
    if not is_pair or not all(type(text) is str for text in wanted):
        advice = "give a kind and an expression, both text"
        raise wrong_value("wanted", wanted, advice, "[TAG|SQL92, expression]")
    if len(wanted[1]) > EXPRESSION_CHARS_MAX:
        advice = f"give an expression of at most {EXPRESSION_CHARS_MAX} characters"
        raise wrong_value("wanted", wanted, advice, EXPRESSION_CHARS_MAX)
    expression_filter(*wanted)
    return MessageSelector(*wanted)


def fetch_request(
    topic: object,
    offsets: object,
    max_bytes: object,
    max_records: object,
    wait_ms: object,
    seen_epoch: object = None,
    wanted: object = None,
    others: object = None,
    generations: object = None,
    *,
    wait_limit_ms: int,
) -> FetchRequest:
    """A fetch as it came over the network. Values above the limits are cut. Raises: Rejected.

    An offset may be any number: the fetch answers OffsetOutOfRange for one that the queue does not hold.
    """
    return FetchRequest(
        check_name("topic", topic),
        check_offsets(offsets, -_ANY, _ANY),
        min(check_integer("max_bytes", max_bytes, 1, _ANY), FETCH_BYTES_MAX),
        min(check_integer("max_records", max_records, 1, _ANY), NUMBER_MAX),
        min(check_integer("wait_ms", wait_ms, 0, _ANY), wait_limit_ms),
        None if seen_epoch is None else check_integer("seen_epoch", seen_epoch),
        None if wanted is None else check_selector(wanted),
        None if others is None else _check_others(topic, others),
        None if generations is None else _check_generations(generations),
    )


def _check_generations(generations: object) -> dict[str, int]:
    """Which topics a fetch means. Raises: Rejected."""
    if type(generations) is not dict or len(generations) > FETCH_TOPICS_MAX:
        advice = "give {topic: how often it was deleted}"
        raise wrong_value("generations", generations, advice, FETCH_TOPICS_MAX)
    return {
        check_name("generations", name): check_integer("generations", number)
        for name, number in generations.items()
    }


def _check_others(topic: object, others: object) -> dict[str, dict[int, int]]:
    """The further topics of a fetch. Raises: Rejected."""
    if type(others) is not dict or len(others) >= FETCH_TOPICS_MAX or topic in others:
        advice = f"give {{topic: offsets}} of further topics, {FETCH_TOPICS_MAX} altogether"
        raise wrong_value("others", others, advice, FETCH_TOPICS_MAX)
    return {
        check_name("others", name): check_offsets(offsets, -_ANY, _ANY)
        for name, offsets in others.items()
    }
