"""What RocketMQ's timers left, taken over once: which rolls are still to be made.

A record further away than the roll window waits in RocketMQ's wheel for a second that depends on when it was read, so
the record does not tell whether it was rolled. Its successor in the timer topic does.
Source: TimerMessageStore#doEnqueue, #convert, RocketMQ 5.3.3.
"""

from __future__ import annotations

from raymq.store.log.commit_log import CommitLog
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.properties import decode

from .delay_levels import TIMER_TOPIC
from .delayed_record import Waiting, waiting
from .timer_rule import MAGIC_ROLL, ROLL_TIMES
from .timer_topic import TimerTopic

SLICE_ROWS = 4096


def pending_rolls(log: CommitLog, topic: TimerTopic, end: int) -> list[InnerMessage]:
    """The rolls below offset `end` that were not made, to be put again as they are."""
    rolls: list[tuple[tuple[str, str, int], Waiting]] = []
    made: set[tuple[str, str, int]] = set()
    offset = 0
    while offset < topic.end:
        rows = topic.read(offset, SLICE_ROWS)
        offset = max(rows.next_offset, offset + 1)
        is_roll = rows.due.magic & MAGIC_ROLL != 0
        for found, roll in zip(
            waiting(log, rows.positions, rows.sizes), is_roll.tolist(), strict=True
        ):
            properties = decode(found.properties)
            turns = properties.get(ROLL_TIMES, "0")
            turn = int(turns) if turns.isdecimal() else 0
            key = (properties.get("REAL_TOPIC", ""), properties.get("UNIQ_KEY", ""))
            made.add((*key, turn))
            if roll and found.queue_offset < end:
                rolls.append(((*key, turn + 1), found))
    return [
        found.moved(TIMER_TOPIC, 0, found.properties) for after, found in rolls if after not in made
    ]
