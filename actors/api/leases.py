"""Leases of messages as a worker and a shard exchange them, whatever carries them. Offsets travel as packed columns.

request  {"group", "topics": [names], "session": 32 hexadecimal digits, "request", "max_records", "max_bytes",
         "wait_ms", "start": earliest or latest, "options": {field of LeaseOptions: value}}; with "wanted": [kind,
         expression] only these messages. With "max_records" 0 the session ends: what an earlier call of this number got
         is answered, and nothing else is leased
answer   {"request", "number", "lease_ms", "queues": [{"topic", "queue", "offsets", "attempts"; "missing", offsets
         without a message; "damaged": {offset: error}}]}, and the records of all "offsets", in this order. While the
         group is paused: number 0, and "paused", why
settle, extend_leases  with the "options" and "wanted" of the session's requests: a new leader may hear of them first
         here
settle   items [lease, topic, queue, verdict, delay in ms or null, offsets]; the same of what was refused, without
         verdict and delay
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.base.errors import RayMQError, Rejected, from_wire, to_wire
from raymq.store.base.format import check_group_name
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.offsets import (
    OffsetColumn,
    pack_column,
    pack_offsets,
    read_column,
    read_offsets,
)
from raymq.store.groups.leases.options import (
    ATTEMPTS_MAX,
    BACKOFF_MAX,
    DEAD_RATE_MAX,
    DELAY_MS_MAX,
    IN_FLIGHT_MAX,
    LEASE_MS,
    LEASE_OFFSETS_MAX,
    MAX_LEASE_MS_MAX,
    LeaseOptions,
)
from raymq.store.groups.leases.reader import PackedReader
from raymq.store.groups.leases.requests import RefusedOffsets, SettleItem
from raymq.store.groups.members import TOPICS_MAX
from raymq.store.records.requests import MessageSelector
from raymq.store.state.topics import QUEUES_MAX, QueueKey

from .call_arguments import check_integer, check_name, check_selector, wrong_value

#: what a worker says of messages -> the verdict
VERDICTS = {
    "ack": SettleOutcome.ACKED,
    "nack": SettleOutcome.NACKED,
    "reject": SettleOutcome.REJECTED,
    "release": SettleOutcome.RETURNED,
}
_VERDICT_NAMES = {verdict: name for name, verdict in VERDICTS.items()}
#: items of one call of settle
ITEMS_MAX = 10_000
#: bytes of the records of one answer, about
ANSWER_BYTES_MAX = 4 << 20
ORDERS = ("", "key", "queue")
STARTS = ("earliest", "latest")

_SESSION = re.compile(r"[0-9a-f]{32}\Z")
_OPTIONS = (
    "lease_ms",
    "max_lease_ms",
    "max_in_flight",
    "max_attempts",
    "backoff_ms",
    "order",
    "has_dead_letters",
)
#: those that earlier versions do not know: only values that are not their defaults travel
_LATER_OPTIONS = ("dead_rate",)
_DEFAULTS = LeaseOptions()


class LeaseCall(NamedTuple):
    """A worker asks a shard for messages."""

    group: str
    topics: tuple[str, ...]
    session: bytes
    #: of the session at this shard; a repeated call has the same number, and gets the same lease
    request: int
    #: messages at most; 0: the session ends
    max_records: int
    max_bytes: int
    wait_ms: int
    start: str
    options: LeaseOptions
    selector: MessageSelector | None = None


class LeasedQueue(NamedTuple):
    """What a call got of one queue. All columns ascend."""

    key: QueueKey
    #: of the messages whose records are in the answer
    offsets: OffsetColumn
    #: how often each of these was delivered, with this time
    attempts: OffsetColumn
    #: leased offsets without a message
    missing: OffsetColumn
    #: leased offset -> why its message cannot be read
    damaged: Mapping[int, RayMQError]


@dataclass(frozen=True)
class LeasedMessages:
    """The answer to a `LeaseCall`."""

    request: int
    #: of the lease; 0: there is no message for the worker
    number: int = 0
    #: the worker holds the messages for so long, counted from the sending of its call, less a tenth
    lease_ms: int = 0
    queues: Sequence[LeasedQueue] = field(default_factory=tuple)
    #: raw records, those of each queue one after the other; None: there are none
    records: pa.Array | None = None
    #: why the group leases nothing; empty: it does
    paused: str = ""


# --- columns --------------------------------------------------------------------------------------


def packed_offsets(offsets: OffsetColumn) -> str:
    """Ascending offsets as text."""
    return b64encode(pack_offsets(offsets)).decode()


def check_packed_offsets(name: str, value: object) -> OffsetColumn:
    """The inverse of `packed_offsets`. Raises: Rejected for another text."""
    if type(value) is str:
        try:
            reader = PackedReader(b64decode(value, validate=True))
            found = read_offsets(reader)
            if reader.is_done:
                return found
        except (ValueError, binascii.Error):
            pass
    raise wrong_value(name, value, "give packed offsets", "store/groups/leases/offsets.py")


def _packed_column(numbers: npt.NDArray[Any]) -> str:
    return b64encode(pack_column(numbers)).decode()


def _read_column(text: str, count: int) -> OffsetColumn:
    return read_column(PackedReader(b64decode(text)), count)


# --- calls and answers ----------------------------------------------------------------------------


def pack_call(call: LeaseCall) -> dict[str, object]:
    """A call as JSON takes it."""
    fields = {
        **call._asdict(),
        "topics": list(call.topics),
        "session": call.session.hex(),
        **pack_options(call.options, call.selector),
    }
    del fields["selector"]
    return fields


def pack_options(options: LeaseOptions, selector: MessageSelector | None) -> dict[str, object]:
    """What all workers of a group have in common, as JSON takes it: `options` and perhaps `wanted`."""
    values = asdict(options)
    shown = {name: values[name] for name in _OPTIONS}
    shown |= {
        name: values[name] for name in _LATER_OPTIONS if values[name] != getattr(_DEFAULTS, name)
    }
    fields: dict[str, object] = {"options": shown}
    return fields if selector is None else {**fields, "wanted": list(selector)}


def unpack_call(fields: Mapping[str, Any], *, wait_limit_ms: int) -> LeaseCall:
    """The inverse of `pack_call`. Other fields are not looked at.

    Args: `wait_limit_ms`: longer waits are cut. Raises: Rejected for wrong values; KeyError for a missing field.
    """
    check_group_name(fields["group"])
    topics = fields["topics"]
    if type(topics) is not list or len(topics) > TOPICS_MAX:
        raise wrong_value("topics", topics, f"give a list of at most {TOPICS_MAX}", TOPICS_MAX)
    start = fields["start"]
    if start not in STARTS:
        raise wrong_value("start", start, f"use {' or '.join(STARTS)}", ", ".join(STARTS))
    wanted = fields.get("wanted")

    return LeaseCall(
        fields["group"],
        tuple(check_name("topics", each) for each in topics),
        check_session("session", fields["session"]),
        check_integer("request", fields["request"], 1),
        check_integer("max_records", fields["max_records"], 0, LEASE_OFFSETS_MAX),
        min(check_integer("max_bytes", fields["max_bytes"], 1), ANSWER_BYTES_MAX),
        min(check_integer("wait_ms", fields["wait_ms"]), wait_limit_ms),
        start,
        check_options("options", fields["options"]),
        None if wanted is None else check_selector(wanted),
    )


def check_session(name: str, value: object) -> bytes:
    """The id of a session of a worker. Raises: Rejected unless it is 32 hexadecimal digits."""
    if type(value) is not str or not _SESSION.match(value):
        advice = "give 32 hexadecimal digits, random ones for each session"
        raise wrong_value(name, value, advice, "32 hexadecimal digits")
    return bytes.fromhex(value)


def check_options(name: str, value: Any) -> LeaseOptions:
    """The options of a group. Raises: Rejected for others than `pack_options` makes."""
    if type(value) is not dict or set(value) - set(_LATER_OPTIONS) != set(_OPTIONS):
        names = ", ".join(_OPTIONS)
        raise wrong_value(name, value, f"give an object with {names}", names)
    most = value["max_attempts"]
    delays, rate = value["backoff_ms"], value.get("dead_rate", _DEFAULTS.dead_rate)
    if type(delays) not in (list, tuple) or not 1 <= len(delays) <= BACKOFF_MAX:
        raise wrong_value("backoff_ms", delays, f"give 1 to {BACKOFF_MAX} delays", BACKOFF_MAX)
    if value["order"] not in ORDERS:
        raise wrong_value("order", value["order"], f"use one of {ORDERS}", ", ".join(ORDERS))
    if type(value["has_dead_letters"]) is not bool:
        raise wrong_value(
            "has_dead_letters", value["has_dead_letters"], "use true or false", "bool"
        )

    lease_ms = check_integer("lease_ms", value["lease_ms"], *LEASE_MS)
    return LeaseOptions(
        lease_ms=lease_ms,
        max_lease_ms=check_integer(
            "max_lease_ms", value["max_lease_ms"], lease_ms, MAX_LEASE_MS_MAX
        ),
        max_in_flight=check_integer("max_in_flight", value["max_in_flight"], 1, IN_FLIGHT_MAX),
        max_attempts=None if most is None else check_integer("max_attempts", most, 1, ATTEMPTS_MAX),
        backoff_ms=tuple(check_integer("backoff_ms", each, 0, DELAY_MS_MAX) for each in delays),
        order=value["order"],
        has_dead_letters=value["has_dead_letters"],
        dead_rate=None if rate is None else check_integer("dead_rate", rate, 1, DEAD_RATE_MAX),
    )


def pack_leased(found: LeasedMessages) -> tuple[dict[str, object], pa.Array | None]:
    """The head of an answer, and its records or None."""
    head: dict[str, object] = {"request": found.request, "number": found.number}
    if not found.number:
        return {**head, "paused": found.paused} if found.paused else head, None
    head["lease_ms"] = found.lease_ms
    head["queues"] = [_packed_queue(each) for each in found.queues]
    return head, found.records


def _packed_queue(queue: LeasedQueue) -> dict[str, object]:
    topic, queue_id = queue.key
    packed: dict[str, object] = {
        "topic": topic,
        "queue": queue_id,
        "offsets": packed_offsets(queue.offsets),
        "attempts": _packed_column(queue.attempts),
    }
    if len(queue.missing):
        packed["missing"] = packed_offsets(queue.missing)
    if queue.damaged:
        packed["damaged"] = {str(each): to_wire(error) for each, error in queue.damaged.items()}
    return packed


def unpack_leased(head: Mapping[str, Any], records: pa.Array | None) -> LeasedMessages:
    """The inverse of `pack_leased`. Raises: KeyError, TypeError, ValueError for another head."""
    if not head["number"]:
        return LeasedMessages(int(head["request"]), paused=str(head.get("paused", "")))
    queues = [_unpacked_queue(each) for each in head["queues"]]
    count = sum(len(each.offsets) for each in queues)
    if count != (0 if records is None else len(records)):
        raise ValueError(f"an answer of {count} leased messages with other records")
    return LeasedMessages(
        int(head["request"]), int(head["number"]), int(head["lease_ms"]), queues, records
    )


def _unpacked_queue(packed: Mapping[str, Any]) -> LeasedQueue:
    offsets = check_packed_offsets("offsets", packed["offsets"])
    missing = packed.get("missing")
    return LeasedQueue(
        (str(packed["topic"]), int(packed["queue"])),
        offsets,
        _read_column(packed["attempts"], len(offsets)),
        np.zeros(0, np.int64) if missing is None else check_packed_offsets("missing", missing),
        {int(each): from_wire(error) for each, error in packed.get("damaged", {}).items()},
    )


# --- settlements ----------------------------------------------------------------------------------


def pack_items(items: Sequence[SettleItem]) -> list[list[object]]:
    """Items of a settle call as JSON takes them."""
    return [
        [
            each.number,
            *each.key,
            _VERDICT_NAMES[each.verdict],
            each.delay_ms,
            packed_offsets(each.offsets),
        ]
        for each in items
    ]


def check_items(name: str, value: object) -> list[SettleItem]:
    """The inverse of `pack_items`. Raises: Rejected for malformed ones."""
    if type(value) is not list or not 1 <= len(value) <= ITEMS_MAX:
        advice = f"give a list of 1 to {ITEMS_MAX} items"
        raise wrong_value(name, value, advice, ITEMS_MAX)
    items = [_check_item(name, each) for each in value]
    count = sum(len(each.offsets) for each in items)
    if count > LEASE_OFFSETS_MAX:
        raise Rejected(
            f"{name} has {count} offsets; one call settles at most {LEASE_OFFSETS_MAX}",
            field=name,
            limit=LEASE_OFFSETS_MAX,
            found=count,
        )
    return items


def _check_item(name: str, item: Any) -> SettleItem:
    if type(item) is not list or len(item) != 6 or item[3] not in VERDICTS:
        advice = f"an item is [lease, topic, queue, {' | '.join(VERDICTS)}, delay in ms or null, offsets]"
        raise wrong_value(name, item, advice, "6 values")
    number, topic, queue_id, verdict, delay_ms, offsets = item
    return SettleItem(
        check_integer(name, number, 1),
        (check_name(name, topic), check_integer(name, queue_id, 0, QUEUES_MAX - 1)),
        check_packed_offsets(name, offsets),
        VERDICTS[verdict],
        None if delay_ms is None else check_integer("delay_ms", delay_ms, 0, DELAY_MS_MAX),
    )


def pack_refused(refused: Sequence[RefusedOffsets]) -> list[list[object]]:
    """What was refused, as JSON takes it."""
    return [[each.number, *each.key, packed_offsets(each.offsets)] for each in refused]


def unpack_refused(packed: Sequence[Any]) -> list[RefusedOffsets]:
    """The inverse of `pack_refused`."""
    return [
        RefusedOffsets(
            int(number), (str(topic), int(queue_id)), check_packed_offsets("refused", offsets)
        )
        for number, topic, queue_id, offsets in packed
    ]


def check_message(name: str, value: Any) -> tuple[int, QueueKey, int]:
    """One leased message: lease, queue and offset. Raises: Rejected for other values."""
    if type(value) is not list or len(value) != 4:
        raise wrong_value(name, value, "give [lease, topic, queue, offset]", "4 values")
    number, topic, queue_id, offset = value
    key = check_name(name, topic), check_integer(name, queue_id, 0, QUEUES_MAX - 1)
    return check_integer(name, number, 1), key, check_integer(name, offset)


def check_numbers(name: str, value: Any) -> list[int]:
    """Numbers of leases. Raises: Rejected for other values."""
    if type(value) is not list or len(value) > ITEMS_MAX:
        advice = f"give a list of at most {ITEMS_MAX} numbers"
        raise wrong_value(name, value, advice, ITEMS_MAX)
    return [check_integer(name, each, 1) for each in value]
