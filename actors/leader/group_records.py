"""What records about consumer groups have in common: their leader, their time and their encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from raymq.store.engine.message_store import MessageStore
from raymq.store.records.requests import AppendedRows
from raymq.store.state.features import GROUPS_LEVEL, feature_level


class GroupHost(Protocol):
    """What the services of groups need of their leader: see `scope.LeaderScope`."""

    store: MessageStore

    def check_serving(self) -> None: ...

    def await_check(self) -> None: ...

    def publish(self, appended: AppendedRows) -> None: ...

    def await_promise(self, appended: AppendedRows) -> None: ...


def note_level(leader: GroupHost) -> None:
    """Write the level of the log before its first record of groups. Raises: as `MessageStore.put_inner`."""
    if feature_level(leader.store.state.progress) < GROUPS_LEVEL:
        leader.check_serving()
        leader.store.note_feature_level(GROUPS_LEVEL)


def record_time_ms(store: MessageStore) -> int:
    """The time that a record gets, as far as it is believed: never before the newest message."""
    return max(believed_ms(store), store.state.store_time_ms)


def believed_ms(store: MessageStore) -> int:
    """The newest look at the wall clock, without a jump ahead that is not a day old: see `BelievedClock`."""
    look = store.log.marks.clock_look
    return look.wall_ms - look.jumped_ms


#: one encoder for all records
_encode = json.JSONEncoder(separators=(",", ":")).encode


def encoded(value: Mapping[str, Any]) -> bytes:
    """The body of a record."""
    return _encode(value).encode()
