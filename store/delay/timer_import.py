"""Imports the progress of RocketMQ's timers: how far they came, and the rolls that are still to be made.

A record further away than the roll window waits in RocketMQ's wheel for a second that depends on the time of its read.
So the record does not say whether it was rolled. Its successor in the timer topic does.
Source: TimerMessageStore#doEnqueue, #convert, RocketMQ 5.3.3.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raymq.store.base.format import TIMER_TOPIC
from raymq.store.log.commit_log import CommitLog
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records.properties import REAL_TOPIC, decode

from .delayed_record import SLICE_ROWS, WaitingMessage, waiting_rows
from .timer_cache import TimerCheckpoint
from .timer_rule import MAGIC_ROLL, OUT_MS, PRECISION_MS, ROLL_TIMES, TimerProgress
from .timer_topic import TimerTopic

#: real topic, unique key and number of a roll
RollKey = tuple[str, str, int]


def imported_progress(
    checkpoint: TimerCheckpoint, before: TimerProgress, topic_end: int
) -> TimerProgress:
    """The progress after RocketMQ's, which began at `before` (nothing at first) or a little earlier.

    Earlier deliveries of this store count, even if RocketMQ's time is earlier. If RocketMQ read less of the topic than
    this store had, nothing later than this store's time counts as delivered.
    """
    end = min(checkpoint.queue_offset, topic_end)
    second_ms = max(0, checkpoint.read_time_ms - checkpoint.read_time_ms % PRECISION_MS)
    if end < before.next_offset:
        end = before.next_offset
        second_ms = min(second_ms, before.second_ms)

    progress = before
    if second_ms < before.second_ms:
        progress = before.clock_set_back(second_ms)
    elif second_ms > before.second_ms:
        progress = before.at_time(second_ms)
    return replace(progress, next_offset=end, imported=end)


def pending_rolls(
    log: CommitLog, topic: TimerTopic, before: TimerProgress, now: TimerProgress
) -> list[InnerMessage]:
    """The rolls below `now.next_offset` that were not made, to be put again as they are.

    Those below `before.next_offset` waited in this store's files for the second of their record. Or RocketMQ read them
    itself, if a crash left its older files. Only RocketMQ's messages all have a unique key.
    """
    ours: list[WaitingMessage] = []
    rolls: list[tuple[RollKey, WaitingMessage]] = []
    made: set[RollKey] = set()

    offset = before.imported
    while offset < topic.end:
        rows = topic.read(offset, SLICE_ROWS)
        offset = max(rows.next_offset, offset + 1)
        is_roll = rows.due.magic & MAGIC_ROLL != 0
        messages, kept = waiting_rows(log, rows.positions, rows.sizes)
        columns = (is_roll[kept].tolist(), rows.due.slot_ms[kept].tolist())

        for waiting, roll, slot_ms in zip(messages, *columns, strict=True):
            properties = decode(waiting.properties)
            turn = _number(properties, ROLL_TIMES)
            key = (properties.get(REAL_TOPIC, ""), properties.get("UNIQ_KEY", ""))
            made.add((*key, turn))

            known = waiting.queue_offset < before.next_offset
            # RocketMQ has delivered the records due before its time, even those that it read too late for a roll.
            is_over = _number(properties, OUT_MS) < now.second_ms
            if not roll or is_over or waiting.queue_offset >= now.next_offset:
                continue

            if known and now.waits(slot_ms, np.array([waiting.queue_offset])).all():
                ours.append(waiting)
            elif not known or key[1]:
                rolls.append(((*key, turn + 1), waiting))

    not_made = [waiting for key, waiting in rolls if key not in made]
    return [waiting.moved(TIMER_TOPIC, 0, waiting.properties) for waiting in (*ours, *not_made)]


def _number(properties: dict[str, str], name: str) -> int:
    text = properties.get(name, "0")
    return int(text) if text.isdecimal() else 0
