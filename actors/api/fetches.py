"""A fetch and its answer as a client and a shard exchange them, whatever carries them.

    request  {"topic", "offsets": {queue: offset}, "max_bytes", "max_records", "wait_ms"}; with "seen_epoch" any replica
             may answer, with "wanted": [kind, expression] it looks only for these messages. "others": {topic: offsets}
             reads further topics, "generations": {topic: how often one of its name was deleted} says which are meant
    answer   per queue {"queue", "first_offset", "next_offset", "min_offset", "max_offset"} and the records, or
             {"queue", "error"}. After "seen_epoch" also "epoch", for a further topic also "topic"

A new field of a fetch is added here, to `FetchRequest` and to `fetch_request`, which checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from raymq.store.base.errors import Bug, from_wire, to_wire
from raymq.store.records.requests import FetchRequest, FetchSlice

from .call_arguments import fetch_request

#: fields of a FetchSlice in the head that goes with its records
_ENDS = ("first_offset", "next_offset", "min_offset", "max_offset")
#: fields that are left out if they say nothing
_OPTIONAL = tuple(FetchRequest._field_defaults)


def pack_request(request: FetchRequest) -> dict[str, object]:
    """A request as JSON takes it."""
    fields = request._asdict()
    fields["offsets"] = _offsets_value(request.offsets)
    if request.others is not None:
        fields["others"] = {topic: _offsets_value(own) for topic, own in request.others.items()}
    if request.wanted is not None:
        fields["wanted"] = list(request.wanted)
    for name in _OPTIONAL:
        if fields[name] is None:
            del fields[name]
    return fields


def _offsets_value(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(queue): offset for queue, offset in offsets.items()}


def unpack_request(fields: Mapping[str, object], *, wait_limit_ms: int) -> FetchRequest:
    """The inverse of `pack_request`. Other fields are not looked at.

    Args: `wait_limit_ms`: longer waits are cut. Raises: Rejected for wrong values; KeyError for a missing field.
    """
    given = {name: fields[name] for name in FetchRequest._fields if name not in _OPTIONAL}
    given |= {name: fields[name] for name in _OPTIONAL if name in fields}
    return fetch_request(**given, wait_limit_ms=wait_limit_ms)


def pack_slice(part: FetchSlice) -> tuple[dict[str, object], pa.Array | None]:
    """The head of a queue's answer, and its records or None."""
    head: dict[str, Any] = {"queue": part.queue_id}
    if part.topic:
        head["topic"] = part.topic
    if part.error is not None or part.records is None:
        error = part.error or Bug("a slice has neither records nor an error")
        return {**head, "error": to_wire(error)}, None
    head |= {name: getattr(part, name) for name in _ENDS}
    if part.epoch:
        head["epoch"] = part.epoch
    return head, part.records


def unpack_slice(head: dict[str, Any], records: pa.Array | None) -> FetchSlice:
    """The inverse of `pack_slice`. Raises: KeyError, TypeError, ValueError for another head."""
    queue_id, topic = int(head["queue"]), str(head.get("topic", ""))
    if "error" in head:
        error = from_wire(head["error"])
        return FetchSlice(queue_id, -1, -1, -1, -1, None, error, topic=topic)
    ends = {name: head[name] for name in _ENDS}
    return FetchSlice(
        queue_id, **ends, records=records, error=None, epoch=int(head.get("epoch", 0)), topic=topic
    )
