"""The rule for the second in which a record of the timer topic is due: a function of the record alone.

So the wheel can be rebuilt from the timer topic, and a few numbers say which records were delivered.
RocketMQ counts a roll from the time it reads the record, RayMQ from the record's store time. The bytes allow both.
Source: TimerMessageStore#doEnqueue, RocketMQ 5.3.3.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int32s, Int64s

OUT_MS, ROLL_TIMES, DELETE_KEY = "TIMER_OUT_MS", "TIMER_ROLL_TIMES", "TIMER_DEL_UNIQKEY"
#: timerPrecisionMs: the width of a slot
PRECISION_MS = 1000
#: timerRollWindowSlot: a timer that is further away is put into the topic again on its way
ROLL_WINDOW_MS = 2 * 86_400 * PRECISION_MS
#: slots of the wheel: twice seven days (TIMER_WHEEL_TTL_DAY)
WHEEL_SLOTS = 2 * 7 * 86_400

MAGIC_DEFAULT, MAGIC_ROLL, MAGIC_DELETE = 1, 2, 4

# The first of a name counts here, because a record of the timer topic has each name once: DelayHook refuses doubles,
# and RocketMQ writes a map. The last separator of a record that RocketMQ wrote may be missing.
_OUT = r"(?:^|\x02)TIMER_OUT_MS\x01(?P<v>[0-9]{1,18})(?:\x02|$)"
_TOPIC = r"(?:^|\x02)REAL_TOPIC\x01(?P<v>[^\x02]+)"
_DELETE = r"(?:^|\x02)TIMER_DEL_UNIQKEY\x01"


class Due(NamedTuple):
    """When and how records are due: one value per record and column."""

    #: start of the second, ms; the record is due at its end
    slot_ms: Int64s
    #: MAGIC_* bits
    magic: Int32s
    #: the second in which it was stored, ms; RocketMQ's enqueue time
    enqueue_ms: Int64s
    #: Java's hash of the real topic, 0 without one
    topic_hash: Int32s


def due(batch: pa.RecordBatch) -> Due:
    """When and how each record of the timer topic is due.

    A record without a readable TIMER_OUT_MS is due at once. If the clock was set back, a second before the store time
    does not count as past: store times never go back.
    """
    properties = batch.column("properties")
    enqueue_ms = _floor(batch.column("store_time_ms").to_numpy())
    text = pc.struct_field(pc.extract_regex(properties, _OUT), 0)
    out_ms = text.cast(pa.string()).cast(pa.int64()).fill_null(0).to_numpy()

    beyond_ms = _floor(out_ms) - enqueue_ms - ROLL_WINDOW_MS
    is_roll = beyond_ms >= 0
    # Half the window if little would be left after a whole one: the next roll needs time.
    step_ms = np.where(beyond_ms < ROLL_WINDOW_MS // 3, ROLL_WINDOW_MS // 2, ROLL_WINDOW_MS)
    slot_ms = np.where(is_roll, enqueue_ms + step_ms, _floor(out_ms))

    magic = np.full(len(slot_ms), MAGIC_DEFAULT, dtype=np.int32)
    magic[is_roll] |= MAGIC_ROLL
    is_delete = pc.match_substring_regex(properties, _DELETE).to_numpy(zero_copy_only=False)
    magic[is_delete] |= MAGIC_DELETE

    topics = pc.struct_field(pc.extract_regex(properties, _TOPIC), 0).dictionary_encode()
    hashes = [fmt.java_hash(name.as_py().decode("utf-8", "replace")) for name in topics.dictionary]
    # A record without a topic takes the last item.
    hash_of_row = topics.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    topic_hashes = np.array([*hashes, 0], dtype=np.int32)[hash_of_row]
    return Due(slot_ms, magic, enqueue_ms, topic_hashes)


def _floor(times_ms: Int64s) -> Int64s:
    return times_ms - times_ms % PRECISION_MS


class EarlierProgress(NamedTuple):
    """Progress before the clock was set back.

    Records below `next_offset` were delivered if they come before (`second_ms`, `second_offset`).
    """

    next_offset: int
    second_ms: int
    second_offset: int


#: field of `TimerProgress` -> its key in records of progress, if that has another name
_KEYS = {"next_offset": "queue", "second_ms": "time", "second_offset": "at"}


@dataclass(frozen=True)
class TimerProgress:
    """The progress of timer deliveries, as the log has it with every bundle of deliveries.

    A record of the timer topic below `next_offset` is delivered if its second is before `second_ms`. In the second
    `second_ms` itself, records below `second_offset` are delivered. So are records that one of `past` names.
    """

    #: offset of the timer topic that is read next
    next_offset: int = 0
    #: the second that is delivered next, ms
    second_ms: int = 0
    #: offset of the timer topic up to which that second is delivered
    second_offset: int = 0
    past: tuple[EarlierProgress, ...] = ()
    #: rolls below this offset were imported from RocketMQ's files: they are done
    imported: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> TimerProgress:
        """From `ShardState.progress`."""
        keys = {each.name: _KEYS.get(each.name, each.name) for each in fields(cls)}
        known = {name: values[key] for name, key in keys.items() if key in values}
        known["past"] = tuple(EarlierProgress(*each) for each in values.get("past", ()))
        return cls(**known)

    def values(self) -> dict[str, Any]:
        """For a record of progress."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    def waits(self, slot_ms: int, offsets: Int64s) -> Bools:
        """A mask of the records of one second, all below `next_offset`, that are not delivered yet."""
        left = offsets >= (self.second_offset if slot_ms == self.second_ms else 0)
        if slot_ms < self.second_ms:
            left[:] = False
        for old in self.past:
            if slot_ms < old.second_ms:
                left &= offsets >= old.next_offset
            elif slot_ms == old.second_ms:
                left &= offsets >= min(old.second_offset, old.next_offset)
        return left

    def clock_set_back(self, time_ms: int) -> TimerProgress:
        """The progress after the clock was set back to the second `time_ms`."""
        past = (*self.past, EarlierProgress(self.next_offset, self.second_ms, self.second_offset))
        return replace(self, second_ms=time_ms, second_offset=0, past=past)

    def at_time(self, time_ms: int) -> TimerProgress:
        """The progress at a later time. Times of the past that are reached again are dropped."""
        past = tuple(old for old in self.past if old.second_ms >= time_ms)
        return replace(self, second_ms=time_ms, second_offset=0, past=past)
