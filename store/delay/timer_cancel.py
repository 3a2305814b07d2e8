"""Cancelling a timer: the record that names its unique key, in the second in which it is due.

A cancellation is a record of the timer topic, and counts once it is loaded. A leader loads all records of its log
before it delivers anything.
Source: RecallMessageProcessor, RocketMQ 5.3.3, which answers without knowing whether the timer is delivered.
"""

from __future__ import annotations

from typing import NamedTuple

from raymq.store.base.errors import Rejected
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.log.commit_log import CommitLog
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.keys import UNIQ_KEY
from raymq.store.records.properties import REAL_QUEUE, REAL_TOPIC, decode
from raymq.store.records.record_walk import WalkStop
from raymq.store.records.requests import AppendedRows

from .delayed_record import waiting_rows
from .delivery_time import DELIVER_MS
from .timer_rule import DELETE_KEY, OUT_MS, PRECISION_MS
from .timer_topic import TimerTopic

#: the body of RocketMQ's cancellations
_BODY = b"0"
_NEEDED = (REAL_TOPIC, REAL_QUEUE, UNIQ_KEY, OUT_MS)


class CancelledTimer(NamedTuple):
    """The outcome of a cancellation."""

    unique_key: str
    #: the record that cancels: the timer is not delivered if it is confirmed. None: too late, nothing was put
    appended: AppendedRows | None


class UnloadedCancellation(NamedTuple):
    """A cancellation that was put, and that the wheel does not know yet."""

    #: in the timer topic
    offset: int
    #: the second in which its timer is due, ms: nothing of it is delivered before the cancellation is loaded
    second_ms: int


class SentTimer(NamedTuple):
    """A record of the timer topic that can be cancelled."""

    properties: dict[str, str]

    @property
    def unique_key(self) -> str:
        """What tells the timer from all others of its topic, also after it was put again on its way."""
        return self.properties[UNIQ_KEY]

    @property
    def second_ms(self) -> int:
        """The second in which it is delivered, ms."""
        out_ms = int(self.properties[OUT_MS])
        return out_ms - out_ms % PRECISION_MS

    def cancellation(self, now_ms: int) -> InnerMessage:
        """The record that cancels it."""
        kept = {
            name: self.properties[name]
            for name in (*_NEEDED, DELIVER_MS)
            if name in self.properties
        }
        properties = {**kept, DELETE_KEY: delete_key(self.properties)}
        return InnerMessage(TIMER_TOPIC, 0, _BODY, properties, born_time_ms=now_ms)


def delete_key(properties: dict[str, str]) -> str:
    """The key by which a cancellation names its target. Source: TimerMessageStore#buildDeleteKey."""
    return f"{properties.get(REAL_TOPIC)}+{properties.get(UNIQ_KEY)}"


def find_timer(log: CommitLog, topic: TimerTopic, offset: int) -> SentTimer:
    """The timer whose record is at an offset of the timer topic.

    Raises: Rejected if there is none, or one without a unique key; Corrupt for a damaged one.
    """
    rows = topic.read(offset, 1) if offset < topic.end else None
    if rows is None or not len(rows.offsets) or int(rows.offsets[0]) != offset:
        raise Rejected(
            f"no timer is at offset {offset} of {TIMER_TOPIC}, or the log has deleted its record",
            field="offset",
            limit="the offset of a receipt",
            found=offset,
        )

    found, _ = waiting_rows(log, rows.positions, rows.sizes)
    if not found:
        raise log.reads.damage(int(rows.positions[0]), WalkStop.BAD_CRC.value)
    properties = decode(found[0].properties)
    is_timer = DELETE_KEY not in properties and properties.get(OUT_MS, "").isdecimal()
    if not is_timer or any(name not in properties for name in _NEEDED):
        raise Rejected(
            f"the message at offset {offset} of {TIMER_TOPIC} has no unique key by which it could be cancelled: rows "
            "of columns have none",
            field="offset",
            limit="a message of send(deliver_at_ms=...)",
            found=offset,
        )
    return SentTimer(properties)
