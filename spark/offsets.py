"""Offsets of a read, as Spark's Kafka connector writes them, and how many messages of each queue a batch takes.

Pure: no Spark, no network.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from raymq.client.arguments import OFFSET_MAX
from raymq.client.consume.queue_ranges import QueueRange
from raymq.store.base.errors import OffsetOutOfRange, Rejected

logger = logging.getLogger("raymq")

#: Kafka's numbers for the first offset of a queue, and for the offset after its last message
EARLIEST, LATEST = -2, -1

OFFSETS_EXAMPLE = '{"orders": {"0": 23, "1": -2}}'
TIMES_EXAMPLE = '{"orders": {"0": 1767225600000}}'


class TopicQueue(NamedTuple):
    """A queue of a topic."""

    topic: str
    queue_id: int


class HeldOffsets(NamedTuple):
    """The queue holds the offsets [first, end)."""

    shard: int
    first: int
    end: int


Offsets: TypeAlias = dict[TopicQueue, int]


class Position(NamedTuple):
    """Where a read begins or ends."""

    #: the option that says so
    option: str
    kind: Literal["offset", "time"]
    #: an offset (or EARLIEST, LATEST) or a time in ms since 1970: of all queues, or of each
    value: int | Offsets

    def holds(self, offset: int) -> bool:
        """Whether this position is `offset` for any queue."""
        if self.kind == "time":
            return False
        values = self.value.values() if isinstance(self.value, dict) else (self.value,)
        return offset in values


# --- as JSON --------------------------------------------------------------------------------------


def to_json(offsets: Mapping[TopicQueue, int]) -> dict[str, dict[str, int]]:
    """Offsets as the Kafka connector keeps them in a checkpoint: {"topic": {"0": 42}}."""
    found: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    return found


def from_json(found: Mapping[str, Mapping[str, int]]) -> Offsets:
    """The inverse of `to_json`."""
    return {
        TopicQueue(topic, int(queue_id)): int(offset)
        for topic, queues in found.items()
        for queue_id, offset in queues.items()
    }


def parse_offsets(option: str, text: str, *, minimum: int, example: str) -> Offsets:
    """Parse {"topic": {"queue": number}}. Raises: Rejected unless each number is `minimum` or more."""
    found: Offsets = {}
    for topic, queues in _parse_object(option, text, example).items():
        if not isinstance(queues, dict):
            raise _malformed(option, f"topic {topic!r} has {queues!r}", example, text)
        for queue_id, offset in queues.items():
            if not queue_id.isdecimal():
                raise _malformed(option, f"topic {topic!r} has a queue {queue_id!r}", example, text)
            if type(offset) is not int or not minimum <= offset <= OFFSET_MAX:
                raise Rejected(
                    f"{option}: topic {topic} queue {queue_id} has {offset!r}; use a whole number, {minimum} or more",
                    field=option,
                    limit=f"{minimum} or more",
                    found=offset,
                )
            found[TopicQueue(topic, int(queue_id))] = offset
    return found


def parse_assignment(option: str, text: str) -> tuple[TopicQueue, ...]:
    """Parse {"topic": [0, 1]}. Raises: Rejected."""
    example = '{"orders": [0, 1]}'
    found: list[TopicQueue] = []
    for topic, queues in _parse_object(option, text, example).items():
        if not isinstance(queues, list) or not queues:
            raise _malformed(option, f"topic {topic!r} has {queues!r}", example, text)
        for queue_id in queues:
            if type(queue_id) is not int or queue_id < 0:
                raise _malformed(option, f"topic {topic!r} has a queue {queue_id!r}", example, text)
            found.append(TopicQueue(topic, queue_id))
    return tuple(sorted(set(found)))


def _parse_object(option: str, text: str, example: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(option, f"it is not JSON ({error})", example, text) from None
    if not isinstance(found, dict) or not found:
        raise _malformed(option, "it is not a JSON object with a topic", example, text)
    return found


def _malformed(option: str, what: str, example: str, text: str) -> Rejected:
    message = f"{option} is {text!r}: {what}; write it like {example}"
    return Rejected(message, field=option, limit=example, found=text)


# --- positions ------------------------------------------------------------------------------------


def resolve(
    position: Position,
    queues: Mapping[TopicQueue, HeldOffsets],
    offset_at: Callable[[TopicQueue, int], int | None],
    *,
    without_match: Literal["error", "latest"],
) -> Offsets:
    """The offset that a position means for each queue. Offsets given as numbers are not compared with the ends.

    Args: `offset_at`: finds the first message of a queue that was stored at a time or later; None if there is none.
    `without_match`: what the position is then.
    Raises: Rejected when the position names other queues than these, or finds no message.
    """
    if isinstance(position.value, dict):
        _check_same_queues(position.option, position.value, queues)
        values = position.value
    else:
        values = dict.fromkeys(queues, position.value)

    found: Offsets = {}
    for queue, value in values.items():
        ends = queues[queue]
        if position.kind == "offset":
            found[queue] = {EARLIEST: ends.first, LATEST: ends.end}.get(value, value)
            continue

        offset = offset_at(queue, value)
        if offset is None and without_match == "error":
            raise Rejected(
                f"{position.option}: topic {queue.topic} queue {queue.queue_id} has no message stored at {value} ms or "
                "later; startingOffsetsByTimestampStrategy=latest begins at its end then",
                field=position.option,
                limit="the time of a message or an earlier one",
                found=value,
            )
        found[queue] = ends.end if offset is None else offset
    return found


def check_order(starting: Position, first: Offsets, ending: Position, last: Offsets) -> None:
    """Refuse a batch that ends before it begins, which would have no row. Raises: Rejected.

    An offset and a time are not compared: a batch of what came after an offset until a time may well be empty.
    """
    if starting.kind != ending.kind:
        return
    for queue, offset in first.items():
        if last[queue] < offset:
            raise Rejected(
                f"{ending.option}: topic {queue.topic} queue {queue.queue_id} ends at {last[queue]}, before "
                f"{starting.option}, which is {offset} there; give an end at the start or after it",
                field=ending.option,
                limit=offset,
                found=last[queue],
            )


def _check_same_queues(
    option: str, given: Mapping[TopicQueue, int], queues: Mapping[TopicQueue, HeldOffsets]
) -> None:
    """Raises: Rejected, as in the Kafka connector, unless the option names every queue of the read and no other one."""
    for what, some, others in (
        ("does not name", queues, given),
        ("names", given, queues),
    ):
        different = sorted(set(some) - set(others))
        if different:
            first = different[0]
            rest = f" and {len(different) - 1} more" if len(different) > 1 else ""
            advice = (
                "give it an offset (-2 earliest, -1 latest) or a time"
                if what == "does not name"
                else "it is not a queue of this read"
            )
            raise Rejected(
                f"{option} {what} topic {first.topic} queue {first.queue_id}{rest}: {advice}",
                field=option,
                limit="each queue of the read",
                found=json.dumps(to_json(given)),
            )


def check_ends(
    offsets: Offsets,
    queues: Mapping[TopicQueue, HeldOffsets],
    *,
    option: str,
    fail_on_data_loss: bool,
) -> Offsets:
    """Offsets that their queues hold: others are moved to the nearest end, with a warning.

    Raises: OffsetOutOfRange if `fail_on_data_loss`.
    """
    found: Offsets = {}
    for queue, offset in offsets.items():
        ends = queues[queue]
        found[queue] = min(max(offset, ends.first), ends.end)
        if found[queue] == offset:
            continue

        outside = (
            f"{option}: topic {queue.topic} queue {queue.queue_id} holds the offsets {ends.first} to {ends.end}, "
            f"not {offset}"
        )
        if fail_on_data_loss:
            raise OffsetOutOfRange(
                f"{outside}; failOnDataLoss=false takes the nearest",
                field=option,
                min=ends.first,
                max=ends.end,
                offset=offset,
                queue_id=queue.queue_id,
            )
        logger.warning("%s; failOnDataLoss=false takes %d", outside, found[queue])
    return found


def report_loss(lost: QueueRange, *, fail: bool) -> None:
    """Report that messages cannot be read any more: as a warning, or else as an error.

    Raises: OffsetOutOfRange if `fail`.
    """
    message = (
        f"topic {lost.topic} queue {lost.queue_id}: the messages of the offsets {lost.first} to {lost.last - 1} "
        "expired before they were read"
    )
    if not fail:
        logger.warning("%s; failOnDataLoss=false reads on without them", message)
        return
    raise OffsetOutOfRange(
        f"{message}; failOnDataLoss=false reads on without them",
        field="failOnDataLoss",
        topic=lost.topic,
        queue_id=lost.queue_id,
        offset=lost.first,
        min=lost.last,
    )
