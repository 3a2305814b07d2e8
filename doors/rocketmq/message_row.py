"""One message of a send, for what is done with one message at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from raymq.store.records.record import SmallBatch


class MessageRow(NamedTuple):
    """One message as it is put."""

    body: bytes
    tag: str | None
    #: encoded, without the tag
    properties: bytes | None
    born_time_ms: int
    flag: int
    sys_flag: int
    #: host field of the record
    born_host: bytes


def only_row(rows: SmallBatch) -> MessageRow:
    """The message of a batch with all columns that has one."""
    columns: Sequence[Sequence[Any]] = [column or () for column in rows]
    return MessageRow(*(column[0] for column in columns))
