"""Transactions of one shard as a client and a shard exchange them, whatever carries them. Rows travel as Arrow columns.

name     {"session": 32 hexadecimal digits, "number"}: the same in a repeated call, which gets the first answer
parts    [topic, queue, rows] of each queue, once; `rows` has the rows of all of them, one queue after the other
rows     [metadata, columns] of protocol/column_puts.py, in base64; null: there are none
offsets  {"group", "topic", "offsets": {queue: offset}, "numbers": {queue: number of the grant}, "seeks": [queues]} of
         each group and topic, once
acks     {"group", "session", "items"; perhaps "options" and "wanted"} of each group, once, as of `settle` in leases.py.
         All items are acks
answer   {"decision": committed, refused or aborted, "is_repeated"}; with "first_offsets" of the parts and
         "store_time_ms", or with "fenced": [group, topic, queue, number, member] and "lost": [group, lease, topic,
         queue, packed offsets]
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from raymq.actors.protocol import column_puts
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC, check_group_name
from raymq.store.groups.claims import Commit
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import SettleItem
from raymq.store.groups.transaction_requests import (
    GroupAcks,
    OffsetCommit,
    TransactionOutcome,
)
from raymq.store.records.requests import MessageSelector, PutRequest
from raymq.store.state.topics import QUEUES_MAX

from .call_arguments import (
    check_integer,
    check_name,
    check_offsets,
    check_selector,
    shown,
    wrong_value,
)
from .leases import check_items, check_options, check_session, pack_items

#: rows, queues, and pairs of group and topic of one transaction
ROWS_MAX = 100_000
PARTS_MAX = 10_000
OFFSETS_MAX = 1_000
#: characters of the rows of one call. A shard appends much less at once
ROWS_TEXT_MAX = 32 << 20
#: groups of workers
ACKS_MAX = 100
#: topics of the store itself that take rows of a transaction: they are delivered later
WAITING_TOPICS = (TIMER_TOPIC, SCHEDULE_TOPIC)


class RowsPart(NamedTuple):
    """How many rows a transaction has for a queue."""

    topic: str
    queue_id: int
    rows: int


class WorkerAcks(NamedTuple):
    """Acks of a group, and the options of its workers."""

    acks: GroupAcks
    session: bytes
    #: None: the shard knows them
    options: LeaseOptions | None = None
    selector: MessageSelector | None = None


# --- rows -----------------------------------------------------------------------------------------


def pack_rows(batch: pa.RecordBatch | None) -> list[str] | None:
    """Columns of PUT_SCHEMA, perhaps with some of MORE_SCHEMA, as JSON takes them."""
    if batch is None:
        return None
    metadata, columns = column_puts.pack_put({}, batch)
    texts = (bytes(metadata), columns.serialize().to_pybytes())
    return [b64encode(each).decode() for each in texts]


def check_rows(field: str, value: Any) -> pa.RecordBatch:
    """The inverse of `pack_rows`. Raises: Rejected for malformed columns."""
    size = sum(map(len, value)) if _are_texts(value) else 0
    if size > ROWS_TEXT_MAX:
        raise Rejected(
            f"{field} have {size} characters; one call takes {ROWS_TEXT_MAX}",
            field=field,
            limit=ROWS_TEXT_MAX,
            found=size,
        )
    try:
        metadata, columns = (b64decode(each, validate=True) for each in value)
        meta, rest = column_puts.unpack_meta(metadata)
        return column_puts.unpack_columns(meta, pa.py_buffer(columns), rest)
    except (ValueError, TypeError, KeyError, binascii.Error, pa.ArrowException) as error:
        raise Rejected(
            f"{field} are no columns of rows: {shown(value)} ({error})",
            field=field,
            limit="[metadata, columns]",
            found=shown(value),
        ) from error


def _are_texts(value: Any) -> bool:
    return type(value) is list and all(type(each) is str for each in value)


def check_parts(field: str, value: Any) -> list[RowsPart]:
    """The queues of rows. Raises: Rejected for malformed ones, or a queue that comes twice."""
    if type(value) is not list or len(value) > PARTS_MAX:
        raise wrong_value(field, value, f"give a list of at most {PARTS_MAX} queues", PARTS_MAX)
    parts = [_check_part(field, each) for each in value]
    _check_once(field, [part[:2] for part in parts])
    rows = sum(part.rows for part in parts)
    if rows > ROWS_MAX:
        raise Rejected(
            f"a transaction of {rows} rows; the limit is {ROWS_MAX}",
            field=field,
            limit=ROWS_MAX,
            found=rows,
        )
    return parts


def _check_part(field: str, part: Any) -> RowsPart:
    if type(part) is not list or len(part) != 3:
        raise wrong_value(field, part, "give [topic, queue, rows]", "3 values")
    topic, queue_id, rows = part
    return RowsPart(
        check_name(field, topic),
        check_integer(field, queue_id, 0, QUEUES_MAX - 1),
        check_integer(field, rows, 1, ROWS_MAX),
    )


def puts_of(parts: Sequence[RowsPart], rows: pa.RecordBatch | None) -> list[PutRequest]:
    """The rows of each queue, not copied. Raises: Rejected unless there are as many as the parts say."""
    count = sum(part.rows for part in parts)
    found = 0 if rows is None else rows.num_rows
    if count != found:
        raise Rejected(
            f"the parts of the transaction have {count} rows, and there are {found}",
            field="rows",
            limit=count,
            found=found,
        )
    puts: list[PutRequest] = []
    if rows is None:
        return puts
    at = 0
    for part in parts:
        batch = rows.slice(at, part.rows)
        puts.append(PutRequest(part.topic, part.queue_id, batch, None, 0, 0, "quorum"))
        at += part.rows
    return puts


# --- offsets and acks -----------------------------------------------------------------------------


def pack_offset_commit(commit: OffsetCommit) -> dict[str, object]:
    """Offsets of a member as JSON takes them."""
    commits = commit.commits
    return {
        "group": commit.group,
        "topic": commit.topic,
        "offsets": {str(queue): each.offset for queue, each in commits.items()},
        "numbers": {str(queue): each.number for queue, each in commits.items()},
        "seeks": sorted(queue for queue, each in commits.items() if each.is_seek),
    }


def check_offset_commits(field: str, value: Any) -> list[OffsetCommit]:
    """The inverse of `pack_offset_commit`, of each. Raises: Rejected for malformed ones."""
    if type(value) is not list or len(value) > OFFSETS_MAX:
        raise wrong_value(field, value, f"give a list of at most {OFFSETS_MAX}", OFFSETS_MAX)
    found = [_check_offset_commit(field, each) for each in value]
    _check_once(field, [each[:2] for each in found])
    return found


def _check_offset_commit(field: str, value: Any) -> OffsetCommit:
    names = ("group", "topic", "offsets", "numbers", "seeks")
    _check_object(field, value, names, names)
    check_group_name(value["group"])
    offsets = check_offsets(value["offsets"])
    numbers = check_offsets(value["numbers"], 1, field="numbers")
    seeks = value["seeks"]
    if type(seeks) is not list or offsets.keys() != numbers.keys():
        raise wrong_value(field, value, "give the number of each queue's grant", "a number of each")
    commits = {
        queue: Commit(numbers[queue], offset, queue in seeks) for queue, offset in offsets.items()
    }
    return OffsetCommit(value["group"], check_name(field, value["topic"]), commits)


def pack_acks(items: Sequence[SettleItem], named: Mapping[str, object]) -> dict[str, object]:
    """Acks of a group as JSON takes them. Args: `named`: group, session, and perhaps `leases.pack_options`."""
    return {**named, "items": pack_items(items)}


def check_acks(field: str, value: Any) -> list[WorkerAcks]:
    """The inverse of `pack_acks`, of each. Raises: Rejected for malformed ones, and for other verdicts than acks."""
    if type(value) is not list or len(value) > ACKS_MAX:
        raise wrong_value(field, value, f"give a list of at most {ACKS_MAX}", ACKS_MAX)
    found = [_check_worker_acks(field, each) for each in value]
    _check_once(field, [(each.acks.group,) for each in found])
    return found


def _check_worker_acks(field: str, value: Any) -> WorkerAcks:
    needed = ("group", "session", "items")
    _check_object(field, value, needed, (*needed, "options", "wanted"))
    check_group_name(value["group"])
    items = check_items(field, value["items"])
    if any(each.verdict != SettleOutcome.ACKED for each in items):
        raise Rejected(
            "a transaction has acks alone", field=field, limit="ack", found="another verdict"
        )
    options, wanted = value.get("options"), value.get("wanted")
    return WorkerAcks(
        GroupAcks(value["group"], items),
        check_session("session", value["session"]),
        None if options is None else check_options("options", options),
        None if wanted is None else check_selector(wanted),
    )


def _check_object(field: str, value: Any, needed: Sequence[str], known: Sequence[str]) -> None:
    if type(value) is not dict or not set(needed) <= set(value) <= set(known):
        raise wrong_value(field, value, f"give objects with {', '.join(known)}", ", ".join(known))


def _check_once(field: str, keys: Sequence[tuple[object, ...]]) -> None:
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Rejected(
            f"{field} has {twice} twice; each comes once", field=field, limit="once", found="twice"
        )


# --- answers --------------------------------------------------------------------------------------


def pack_outcome(outcome: TransactionOutcome) -> dict[str, object]:
    """The answer of a shard as JSON takes it."""
    return {
        "decision": outcome.decision,
        "is_repeated": outcome.is_repeated,
        "first_offsets": list(outcome.first_offsets),
        "store_time_ms": outcome.store_time_ms,
        "fenced": list(outcome.fenced),
        "lost": list(outcome.lost),
    }


def unpack_outcome(answer: Mapping[str, Any]) -> TransactionOutcome:
    """The inverse of `pack_outcome`."""
    return TransactionOutcome(
        str(answer["decision"]),
        [int(each) for each in answer["first_offsets"]],
        int(answer["store_time_ms"]),
        answer["fenced"],
        answer["lost"],
        is_repeated=bool(answer["is_repeated"]),
    )
