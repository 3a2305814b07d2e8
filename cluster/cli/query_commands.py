"""`raymq topic query`, `tail` and `browse`: messages found by key, time, place and id."""

from __future__ import annotations

import argparse
import heapq
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import OffsetOutOfRange, Rejected

from .console import EXIT_OK, Console, cluster_of
from .message_commands import print_message
from .time_text import shown_time

if TYPE_CHECKING:
    from raymq.client.messages.received import ReceivedMessage

_POLL_TIMEOUT_S = 1.0
#: characters of a body in a line
_BODY_CHARACTERS = 80


def query(options: argparse.Namespace, console: Console) -> int:
    """raymq topic query TOPIC"""
    between = None
    if options.begin is not None or options.end is not None:
        between = (options.begin, options.end)
    with cluster_of(options, console) as cluster:
        found = cluster.query(
            options.topic,
            key=options.key,
            unique_key=options.unique_key,
            between=between,
            max_records=options.max,
        )
    _show(found, options, console)
    return EXIT_OK


def tail(options: argparse.Namespace, console: Console) -> int:
    """raymq topic tail TOPIC"""
    with cluster_of(options, console) as cluster:
        # Before the messages: each message that comes from now on is printed once, here or below.
        queues = cluster.describe_topic(options.topic)["queues"]
        found = cluster.query(options.topic, between=(None, None), max_records=options.max)
        _show(found, options, console)
        if not options.follow:
            return EXIT_OK

        console.flush()
        shown = {(each.queue_id, each.offset) for each in found}
        ends = {queue["queue_id"]: queue["max_offset"] for queue in queues}
        with cluster.consumer(options.topic, start=ends) as consumer:
            while True:
                come = consumer.poll(timeout=_POLL_TIMEOUT_S)
                new = [each for each in come if (each.queue_id, each.offset) not in shown]
                _show(new, options, console)
                console.flush()


def browse(options: argparse.Namespace, console: Console) -> int:
    """raymq topic browse TOPIC"""
    _check_place(options)
    with cluster_of(options, console) as cluster:
        if options.id is not None:
            found = [cluster.message_by_id(options.id)]
            if found[0].topic != options.topic:
                raise Rejected(
                    f"the message with id {options.id} is of topic {found[0].topic}",
                    field="topic",
                    limit=found[0].topic,
                )
        else:
            found = _from_place(cluster, options)
    _show(found, options, console)
    return EXIT_OK


def _check_place(options: argparse.Namespace) -> None:
    """Raises: Rejected for options that exclude each other."""
    if options.id is not None and not (options.begin is options.queue_id is options.offset is None):
        fault = "--id names one message: give neither --from nor --queue-id nor --offset with it"
        raise Rejected(fault, field="id", limit="alone")
    if options.offset is not None and options.queue_id is None:
        fault = "--offset is of one queue: name it with --queue-id"
        raise Rejected(fault, field="offset", limit="with --queue-id")
    if options.offset is not None and options.begin is not None:
        fault = "--offset and --from both say where to begin; give one of them"
        raise Rejected(fault, field="offset", limit="without --from")


def _from_place(cluster: Any, options: argparse.Namespace) -> list[ReceivedMessage]:
    """The oldest messages from a time or an offset on, at most `--max`, in the order of their store times."""
    queues = {
        queue["queue_id"]: (queue["min_offset"], queue["max_offset"])
        for queue in cluster.describe_topic(options.topic)["queues"]
    }
    if options.queue_id is not None:
        if options.queue_id not in queues:
            raise Rejected(
                f"{options.topic} has the queues 0 to {len(queues) - 1}, not {options.queue_id}",
                field="queue_id",
                limit=len(queues) - 1,
            )
        queues = {options.queue_id: queues[options.queue_id]}

    begins = {queue_id: low for queue_id, (low, _) in queues.items()}
    if options.begin is not None:
        begins = cluster.offsets_for_times(
            options.topic, dict.fromkeys(queues, options.begin), "first"
        )
    elif options.offset is not None:
        low, high = queues[options.queue_id]
        if not low <= options.offset <= high:
            raise OffsetOutOfRange(
                f"queue {options.queue_id} of {options.topic} holds [{low}, {high}), not {options.offset}",
                min=low,
                max=high,
                offset=options.offset,
            )
        begins = {options.queue_id: options.offset}

    found: list[ReceivedMessage] = []
    for queue_id, begin in begins.items():
        end = queues[queue_id][1]
        found += _of_queue(cluster, options.topic, queue_id, begin, end, options.max)
        found = heapq.nsmallest(options.max, found, key=_order)
    return found


def _of_queue(
    cluster: Any, topic: str, queue_id: int, begin: int, end: int, most: int
) -> list[ReceivedMessage]:
    """The first messages of [begin, end) of a queue."""
    found: list[ReceivedMessage] = []
    if begin >= end:
        return found
    with cluster.consumer(topic, start={queue_id: begin}, queues=[queue_id]) as consumer:
        while len(found) < most and consumer.position(queue_id) < end:
            found += consumer.poll(most - len(found), timeout=_POLL_TIMEOUT_S)
    return [each for each in found if each.offset < end]


def _order(message: ReceivedMessage) -> tuple[int, int, int]:
    return message.store_time_ms, message.queue_id, message.offset


def _show(found: list[ReceivedMessage], options: argparse.Namespace, console: Console) -> None:
    output = "json" if options.json else options.output
    for message in found:
        if output == "line":
            console.line(_line(message))
        else:
            print_message(message, output, console)


def _line(message: ReceivedMessage) -> str:
    """Store time, queue and offset, id, keys, and the begin of the body."""
    words = [
        shown_time(message.store_time_ms),
        f"{message.queue_id}/{message.offset}",
        message.message_id,
    ]
    if message.index_keys:
        words.append(f"keys={','.join(message.index_keys)}")
    if message.key is not None:
        words.append(f"key={text_of(message.key)}")
    if message.tag is not None:
        words.append(f"tag={message.tag}")
    words.append("null" if message.is_null else text_of(message.body))
    return "  ".join(words)


def text_of(value: bytes) -> str:
    """Bytes on one line: text as it is, without control characters, else as Python writes bytes. The begin only."""
    begin = value[: 4 * _BODY_CHARACTERS]
    try:
        text = begin.decode(errors="strict" if begin == value else "ignore")
    except UnicodeDecodeError:
        text = repr(begin)
    if not text.isprintable():
        text = repr(text)[1:-1]
    is_cut = len(text) > _BODY_CHARACTERS or begin != value
    return text[:_BODY_CHARACTERS] + ("..." if is_cut else "")
