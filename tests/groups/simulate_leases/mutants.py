"""The machine of leases with one rule removed, for each rule: (rule, owner, name, what takes its place)."""

from __future__ import annotations

from typing import Any

import numpy as np

from raymq.store.groups.leases import group_leases, lease_machine, lease_times
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.lease_machine import AppendGroup
from raymq.store.groups.leases.packing import pack
from raymq.store.groups.leases.queue_columns import (
    FREE,
    NEVER,
    OPEN,
    SETTLED,
    WAITING,
    QueueColumns,
)

from . import world
from .world import GROUP, World


def answer_at_once(self: World, message):
    self.send(message)


def restarts_nothing(times, number, lease_ms, now_ms):
    deadline = times.deadline(number)
    is_left = deadline is not None and deadline.at_ms > now_ms
    return lease_ms if is_left else 0


def never(*arguments):
    return False


def always(*arguments):
    return True


def at_once(duration_ms):
    return 0


def held_by_session(machine, columns, item):
    """Whatever lease of the session has it."""
    places = columns.at(item.offsets)
    leases = machine._group.leases
    own = leases[item.number].session if item.number in leases else b"?"
    numbers = [number for number, each in leases.items() if each.session == own]
    is_open = columns.status[places] == OPEN
    return columns.inside(item.offsets) & is_open & np.isin(columns.number[places], numbers)


def held_in_time(machine, columns, item):
    """Only while its lease has time."""
    is_held = is_held_by(machine, columns, item)
    return is_held & (columns.due_ms[columns.at(item.offsets)] == NEVER)


is_held_by = lease_machine.is_held_by


def ends_at_its_first_deadline(deadline, now_ms):
    return now_ms


def does_nothing(*arguments):
    return None


def no_attempts(columns, offsets):
    """Attempts are those that this leader has seen."""
    return np.zeros(len(offsets), dtype=np.uint16)


def two_records(self: World, group: AppendGroup) -> None:
    """Copies and settlement are in the log one after the other."""
    if group.copies:
        self.write(pack(GROUP, []), tuple(group.copies))
    self.write(pack(GROUP, group.entries), ())


def count_from_the_answer(sent_ms, now_ms):
    return now_ms


def low_follows_the_highest(self: QueueColumns) -> None:
    offsets = np.arange(self.low, self.next)
    settled = offsets[self.status[self.at(offsets)] == SETTLED]
    if len(settled):
        passed = np.arange(self.low, int(settled[-1]) + 1)
        self.status[self.at(passed)] = FREE
        self.low = int(settled[-1]) + 1


def refusals_are_not_stored(session, groups):
    return any(each.outcome != SettleOutcome.REFUSED for each in groups)


def whole_belief(lease_ms):
    return lease_ms


def no_key_blocks():
    return False


def permits_everything(self: QueueColumns, offsets, now_ms):
    status = self.status[self.at(offsets)]
    return self.inside(offsets) & ((status == OPEN) | (status == WAITING))


#: found by random walks
BY_WALKS: list[tuple[str, Any, str, Any]] = [
    ("L3 confirm before the answer", World, "answer", answer_at_once),
    ("L5 the same lease again", lease_machine, "is_repeated", never),
    ("L7 whole leases for a new leader", lease_times, "activation_length_ms", at_once),
    ("L7 whole delays for a new leader", lease_times, "activation_delay_ms", at_once),
    ("L6 one deadline", lease_times, "ended_at_ms", ends_at_its_first_deadline),
    ("L2 a lease ends the wait", lease_machine, "hold", does_nothing),
    ("L8 the first answer again", lease_machine, "is_settled_before", never),
    ("L6 an extension is checked", world, "deposed_is_checked", never),
    ("L8 an old request is dropped", lease_machine, "is_old", never),
    ("L9 attempts of the log", lease_machine, "attempts_of", no_attempts),
    ("L10 one append group", World, "append_group", two_records),
    ("L6 counted from the sending", world, "counted_from", count_from_the_answer),
    ("L1 the low mark waits", QueueColumns, "advance", low_follows_the_highest),
    ("L4 the number of the lease", lease_machine, "is_held_by", held_by_session),
    ("L12 a key blocks", lease_machine, "blocks_keys", no_key_blocks),
    ("L12 settled in order", lease_machine, "orders_settlements", never),
    ("L12 a return takes the later ones along", lease_machine, "returns_later_ones", never),
    ("L12 also those that came too early", lease_machine._Settling, "name_items", does_nothing),
    ("L14 so many copies in one step", lease_machine._Settling, "postpone", never),
    ("dead letters count", group_leases, "counts_as_dead", never),
    ("a pause comes before the next lease", lease_machine.LeaseMachine, "_dies_too_fast", never),
    ("only what is permitted", QueueColumns, "permitted", permits_everything),
    ("clocks differ by a tenth", world, "believed_ms", whole_belief),
]

#: found by a schedule that random walks seldom meet: what changes, and the name of that schedule
BY_SCHEDULES: list[tuple[str, list[tuple[Any, str, Any]], str]] = [
    (
        # Alone it only lets work be done again, since a refusal is a record.
        "L4 however late, and L8",
        [
            (lease_machine, "is_held_by", held_in_time),
            (lease_machine, "records_settlement", refusals_are_not_stored),
        ],
        "settlement_that_comes_late_and_again_after_a_crash",
    ),
    (
        "L5 a repeated request restarts",
        [(lease_machine, "restarted_ms", restarts_nothing)],
        "request_for_a_lease_that_comes_again_late",
    ),
    (
        "L6 an extension is checked",
        [(world, "deposed_is_checked", never)],
        "extension_by_a_deposed_leader",
    ),
    (
        "L8 a refusal is a record",
        [(lease_machine, "records_settlement", refusals_are_not_stored)],
        "refusal_by_an_order_that_changes",
    ),
    (
        "a longer time is a record",
        [(lease_machine, "needs_record", never)],
        "longer_time_of_one_message_and_a_new_leader",
    ),
]

#: what no invariant misses: without this rule, messages wait longer than they must
HARMLESS: list[tuple[str, Any, str, Any]] = [
    ("L12 later keys pass those that wait", lease_machine, "passes_blocked_ones", never),
]
