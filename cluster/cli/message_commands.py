"""`raymq produce` and `raymq consume`."""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raymq.store.base.errors import OffsetOutOfRange, Rejected

from .console import EXIT_OK, Console, cluster_of

if TYPE_CHECKING:
    from raymq.client.messages.received import ReceivedMessage

_POLL_TIMEOUT_S = 1.0
_POLL_RECORDS = 1000


def produce(options: argparse.Namespace, console: Console) -> int:
    """raymq produce [TOPIC]: returns when every line is acknowledged."""
    if options.input is not None:
        return _put_back(options, console)
    if options.topic is None:
        raise Rejected("name a TOPIC: only lines of --input may name their own", field="topic")
    if options.key_separator == "":
        raise Rejected("--key-separator is empty; give a text or bytes", field="key_separator")

    sent = 0
    with cluster_of(options, console) as cluster, cluster.producer() as producer:
        # The producer's end raises the first failure, so a line is never lost in silence.
        for number, line in enumerate(console.stdin, start=1):
            producer.send(options.topic, **_message(line.removesuffix(b"\n"), number, options))
            sent += 1

    if options.json:
        console.json({"sent": sent, "topics": {options.topic: sent}, "left_out": 0})
    else:
        console.note(f"{sent} messages stored in {options.topic}")
    return EXIT_OK


def _message(line: bytes, number: int, options: argparse.Namespace) -> dict[str, object]:
    """The fields of one input line. Raises: Rejected naming the line."""
    if options.key_separator is None:
        return {"body": line}
    # The bytes that the shell gave: they need not be text.
    key, found, body = line.partition(os.fsencode(options.key_separator))
    if not found:
        message = f"line {number} has no separator {options.key_separator!r}"
        raise Rejected(message, field="key", row=number)
    return {"key": key, "body": body}


def _put_back(options: argparse.Namespace, console: Console) -> int:
    """The lines of `raymq consume -o json`, of `raymq store dump`, or of another program."""
    from .put_back import Sender, of_line

    if options.key_separator is not None:
        fault = "--key-separator is for lines of text; a line of --input says its key itself"
        raise Rejected(fault, field="key_separator")

    with (
        _input(options.input, console) as lines,
        cluster_of(options, console) as cluster,
        cluster.producer() as producer,
    ):
        sender = Sender(cluster, producer)
        for number, line in enumerate(lines, start=1):
            message = of_line(line, number)
            if message is None:
                continue
            if options.topic is None and message.topic is None:
                fault = f"line {number} names no topic: name a TOPIC for all lines"
                raise Rejected(fault, field="topic", row=number)
            sender.send(message, topic=options.topic)

    if options.json:
        console.json(sender.facts())
    else:
        console.note(sender.summary())
    return EXIT_OK


@contextlib.contextmanager
def _input(name: str, console: Console) -> Iterator[IO[bytes]]:
    """The lines of a file, or of standard input for "-". Raises: Rejected."""
    if name == "-":
        yield console.stdin
        return
    try:
        file = Path(name).expanduser().open("rb")
    except OSError as error:
        raise Rejected(f"--input {name}: {error.strerror}", field="input", path=name) from error
    with file:
        yield file


def consume(options: argparse.Namespace, console: Console) -> int:
    """raymq consume TOPIC"""
    # Here, because Arrow would slow every command down.
    from raymq.client.consume.selector import selector_of

    output = "json" if options.json else options.output
    # First: a wrong filter is wrong also where there is nothing to print.
    selector_of(options.tags, options.sql)
    with cluster_of(options, console) as cluster:
        queues = cluster.describe_topic(options.topic)["queues"]
        _check_start(queues, options)
        if isinstance(options.start, datetime):
            options.start = cluster.offsets_for_times(options.topic, options.start)
        ends = _ends(queues, options)
        if ends is not None and not ends:
            return EXIT_OK

        printed = 0
        # Queues that have nothing to print are left out: the first offset may be beyond their end.
        chosen = None if ends is None else sorted(ends)
        with cluster.consumer(
            options.topic,
            start=options.start,
            queues=chosen,
            read_from=options.read_from,
            tags=options.tags,
            sql=options.sql,
        ) as consumer:
            for message in _until(consumer, ends):
                print_message(message, output, console)
                printed += 1
                if printed == options.max:
                    break
                if options.follow:
                    console.flush()

    return EXIT_OK


def _check_start(queues: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Raises: OffsetOutOfRange for a first offset that no queue has reached."""
    highest = max(queue["max_offset"] for queue in queues)
    if not isinstance(options.start, int) or options.start <= highest:
        return
    ranges = ", ".join(
        f"queue {each['queue_id']} holds [{each['min_offset']}, {each['max_offset']})"
        for each in queues
    )
    message = (
        f"--from {options.start} is beyond the end of every queue of {options.topic}: {ranges}"
    )
    raise OffsetOutOfRange(message, min=min(queue["min_offset"] for queue in queues), max=highest)


def _ends(queues: list[dict[str, Any]], options: argparse.Namespace) -> dict[int, int] | None:
    """Queue id -> the offset before which to end, of the queues that have anything to print; None: without an end."""
    if options.follow and options.stop is None:
        return None
    ends = {}
    for queue in queues:
        low, high = queue["min_offset"], queue["max_offset"]
        end = options.stop if isinstance(options.stop, int) else high
        if not options.follow:
            end = min(end, high)
        begin = options.start
        if isinstance(begin, dict):
            # Queues may have been added meanwhile.
            begin = begin.get(queue["queue_id"], low)
        elif isinstance(begin, str):
            begin = {"earliest": low, "latest": high}[begin]
        if begin < end:
            ends[queue["queue_id"]] = end
    return ends


def _until(consumer: Any, ends: dict[int, int] | None) -> Iterator[Any]:
    """Messages up to `ends`; None: without an end."""
    left = None if ends is None else dict(ends)
    while left is None or left:
        for message in consumer.poll(_POLL_RECORDS, _POLL_TIMEOUT_S):
            if ends is None or left is None:
                yield message
                continue
            end = ends.get(message.queue_id, 0)
            if message.offset < end:
                yield message
        if left is not None:
            # Not by the messages: a filter may not want the last ones.
            left = {
                queue_id: end for queue_id, end in left.items() if consumer.position(queue_id) < end
            }


def print_message(message: ReceivedMessage, output: str, console: Console) -> None:
    """One message: its body, raw or in hexadecimal, or all of it as a line of JSON."""
    if output == "raw":
        console.line(message.body)
    elif output == "hex":
        console.line(message.body.hex())
    else:
        # Here, because pyarrow would slow every command down.
        from raymq.client.messages.fields import printed_fields

        line: dict[str, Any] = {}
        for field in printed_fields():
            value = getattr(message, field.name)
            if field.name == "body" and message.is_null:
                value = None
            line |= (
                _text_or_base64(field.name, value)
                if isinstance(value, bytes)
                else {field.name: value}
            )
        console.json(line)


def _text_or_base64(name: str, value: bytes) -> dict[str, str]:
    """Text under its name, other bytes as base64 under NAME_base64: a reader can distinguish them."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
