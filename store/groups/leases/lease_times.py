"""Deadlines of leases and delays of messages, on the monotonic clock of the leader. No record has them.

Time alone ends no lease: it only permits another one. A new leader gives every lease its whole length again, and every
message that waits its whole delay.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raymq.store.state.topics import QueueKey

from .entries import waited_ms
from .group_leases import GroupLeases
from .offsets import NO_OFFSETS, OffsetColumn
from .options import LeaseOptions
from .queue_columns import NEVER, OPEN, WAITING, QueueColumns

#: leases and waits at which one step looks at most: puts wait meanwhile. The next step goes on
LOOKS_MAX, WAITS_MAX = 500, 10_000
#: times are pruned when they have doubled since, and are so many more
_PRUNED_MIN = 100


@dataclass(slots=True)
class Deadline:
    """When the time of a lease is over."""

    at_ms: int
    #: when its messages were delivered
    began_ms: int
    #: offsets with a deadline of their own
    own: dict[tuple[QueueKey, int], int] = field(default_factory=dict)
    #: its time was over: others may have what it holds
    is_over: bool = False


class LeaseTimes:
    """What a leader knows of a group's leases beside their records. Callers: one thread, with the put lock."""

    def __init__(self, group: GroupLeases, options: LeaseOptions) -> None:
        self._group = group
        self.options = options
        #: by the number of the lease
        self._deadlines: dict[int, Deadline] = {}
        #: (when to look at a lease, its number, whether for offsets of their own). It may have a later deadline by then
        self._looks: list[tuple[int, int, bool]] = []
        #: the looks or deadlines at which those of settled leases are dropped
        self._pruned_at = _PRUNED_MIN
        #: (when offsets may be leased again, a count, their queue, the offsets)
        self._waits: list[tuple[int, int, QueueKey, OffsetColumn]] = []
        self._count = itertools.count()
        #: queue -> offsets that may have been permitted, ascending
        self._ready: dict[QueueKey, OffsetColumn] = {}

    def is_of(self, group: GroupLeases | None) -> bool:
        """Whether these are the times of this state of the group."""
        return self._group is group

    def activate(self, now_ms: int) -> None:
        """Begin to lead: every lease and every delay begins again."""
        for number, lease in self._group.leases.items():
            self.begin(number, activation_length_ms(lease.lease_ms), now_ms)
        for key, columns in self._group.queues.items():
            left = columns.unsettled()
            places = columns.at(left)
            columns.due_ms[places[columns.status[places] == OPEN]] = NEVER
            waiting = left[columns.status[places] == WAITING]
            delays_ms = columns.delay_ms[columns.at(waiting)]
            for delay_ms in np.unique(delays_ms).tolist():
                found = waiting[delays_ms == delay_ms]
                self.wait(key, found, now_ms + activation_delay_ms(waited_ms(delay_ms)))

    # --- leases -----------------------------------------------------------------------------------

    def begin(self, number: int, lease_ms: int, now_ms: int) -> None:
        """Start the time of a lease."""
        self._deadlines[number] = Deadline(now_ms + lease_ms, now_ms)
        self._look_at(now_ms + lease_ms, number, is_own=False)

    def _look_at(self, at_ms: int, number: int, *, is_own: bool) -> None:
        heapq.heappush(self._looks, (at_ms, number, is_own))
        if max(len(self._looks), len(self._deadlines)) > self._pruned_at:
            self._prune()

    def _prune(self) -> None:
        """Drop the times of leases that are settled."""
        leases = self._group.leases
        self._deadlines = {
            number: known for number, known in self._deadlines.items() if number in leases
        }
        looks = []
        for number, known in self._deadlines.items():
            if not known.is_over:
                looks.append((known.at_ms, number, False))
            looks += [(at_ms, number, True) for at_ms in set(known.own.values())]
        heapq.heapify(looks)
        self._looks = looks
        self._pruned_at = 2 * max(len(looks), len(self._deadlines)) + _PRUNED_MIN

    def deadline(self, number: int) -> Deadline | None:
        """The deadline of a lease; None: there is no such lease."""
        return self._deadlines.get(number) if number in self._group.leases else None

    def prolong(self, number: int, lease_ms: int, now_ms: int) -> int:
        """Give a lease more time. A lease has one deadline, the latest.

        Returns: for how long its worker may hold it from now on: less than asked at the end of `max_lease_ms`, and 0 if
        its time is over.
        """
        self.advance(now_ms)
        known = self.deadline(number)
        if known is None or known.is_over or known.at_ms <= now_ms:
            return 0
        most_ms = known.began_ms + self.options.max_lease_ms - now_ms
        granted_ms = min(lease_ms, most_ms)
        if granted_ms <= 0:
            return 0
        known.at_ms = max(known.at_ms, now_ms + granted_ms)
        return granted_ms

    def set_own(
        self, number: int, key: QueueKey, offset: int, length_ms: int, now_ms: int, *, ends: bool
    ) -> int:
        """Give one offset of a lease a deadline of its own.

        Args: `ends`: its worker gives it up then. Otherwise it only moves to a later time.
        Returns: as `prolong`.
        """
        known = self.deadline(number)
        if known is None or not self.has_time(key, offset, now_ms):
            return 0
        if known.own.get((key, offset), known.at_ms) <= now_ms:
            return 0
        granted_ms = min(length_ms, known.began_ms + self.options.max_lease_ms - now_ms)
        if granted_ms <= 0:
            return 0
        at_ms = now_ms + granted_ms
        if not ends:
            at_ms = max(at_ms, known.own.get((key, offset), known.at_ms))
        known.own[key, offset] = at_ms
        self._look_at(at_ms, number, is_own=True)
        return granted_ms

    def held_by_lease(self, number: int, key: QueueKey, offsets: OffsetColumn) -> OffsetColumn:
        """Those of the offsets that a lease holds which have no time of their own."""
        columns = self._group.queues[key]
        left = offsets[columns.due_ms[columns.at(offsets)] == NEVER]
        known = self._deadlines[number]
        own = [offset for each, offset in known.own if each == key]
        return np.asarray(left[np.isin(left, np.array(own), invert=True)]) if own else left

    def has_time(self, key: QueueKey, offset: int, now_ms: int) -> bool:
        """Whether the end of an offset's time, which a lease holds, was not found yet."""
        self.advance(now_ms)
        columns = self._group.queues[key]
        return bool(columns.due_ms[columns.at(np.array([offset]))][0] == NEVER)

    # --- offsets that wait ------------------------------------------------------------------------

    def hold(self, columns: QueueColumns, offsets: OffsetColumn) -> None:
        """Account for leased offsets: they wait for no time any more."""
        columns.due_ms[columns.at(offsets)] = NEVER

    def wait(self, key: QueueKey, offsets: OffsetColumn, due_ms: int) -> None:
        """Let offsets be leased again from a time on."""
        if len(offsets):
            columns = self._group.queues[key]
            columns.due_ms[columns.at(offsets)] = due_ms
            heapq.heappush(self._waits, (due_ms, next(self._count), key, offsets))

    def ready(self, key: QueueKey, count: int, now_ms: int) -> OffsetColumn:
        """Offsets of a queue that may be leased again, the first ones, at most `count`."""
        self.advance(now_ms)
        columns = self._group.queues.get(key)
        offsets = self._ready.get(key, NO_OFFSETS)
        if columns is None or not len(offsets):
            return NO_OFFSETS

        looked = 4 * count
        while True:
            is_permitted = columns.permitted(offsets[:looked], now_ms)
            if looked >= len(offsets) or np.count_nonzero(is_permitted) >= count:
                break
            looked *= 2
        found = offsets[:looked][is_permitted]
        # The leading ones were leased or settled since.
        gone = int(is_permitted.argmax()) if len(found) else len(is_permitted)
        self._ready[key] = offsets[gone:]
        return found[:count]

    def advance(self, now_ms: int) -> None:
        """Account for the time: leases whose time is over, and delays that are; so many as one step may."""
        for _ in range(LOOKS_MAX):
            if not self._looks or self._looks[0][0] > now_ms:
                break
            _, number, is_own = heapq.heappop(self._looks)
            self._look(number, now_ms, is_own=is_own)

        due: dict[QueueKey, list[OffsetColumn]] = {}
        for _ in range(WAITS_MAX):
            if not self._waits or self._waits[0][0] > now_ms:
                break
            _, _, key, offsets = heapq.heappop(self._waits)
            due.setdefault(key, []).append(offsets)
        for key, found in due.items():
            known = self._ready.get(key, NO_OFFSETS)
            self._ready[key] = joined([known, *found] if len(known) else found)

    def next_ms(self) -> int | None:
        """When `advance` may find something; None: never."""
        times = [each[0][0] for each in (self._looks, self._waits) if each]
        return min(times, default=None)

    def _look(self, number: int, now_ms: int, *, is_own: bool) -> None:
        """Permit others what a lease holds, where its time is over."""
        known = self.deadline(number)
        if known is None:
            self._deadlines.pop(number, None)
            return
        if is_own:
            self._end_own(number, known, now_ms)
            return

        ended_ms = ended_at_ms(known, now_ms)
        if ended_ms > now_ms:
            heapq.heappush(self._looks, (ended_ms, number, False))
        elif not known.is_over:
            known.is_over = True
            self._end(number, known, ended_ms)

    def _end_own(self, number: int, known: Deadline, now_ms: int) -> None:
        for (key, offset), at_ms in list(known.own.items()):
            if at_ms <= now_ms:
                del known.own[key, offset]
                if key in self._group.queues:
                    columns = self._group.queues[key]
                    self._permit(key, columns.open_under(number, np.array([offset])), at_ms)

    def _end(self, number: int, known: Deadline, ended_ms: int) -> None:
        for key, left in self._group.open_of(number):
            columns = self._group.queues[key]
            own = [offset for each, offset in known.own if each == key]
            # Those with a time of their own are not over; others were permitted before.
            is_held = columns.due_ms[columns.at(left)] == NEVER
            if own:
                is_held &= np.isin(left, np.array(own), invert=True)
            self._permit(key, left[is_held], ended_ms)

    def _permit(self, key: QueueKey, offsets: OffsetColumn, ended_ms: int) -> None:
        """Let expired offsets be leased again, each after the delay for its attempts."""
        columns = self._group.queues[key]
        attempts = columns.attempts[columns.at(offsets)]
        for each in np.unique(attempts).tolist():
            delay_ms = self.options.backoff_of(each)
            self.wait(key, offsets[attempts == each], ended_ms + delay_ms)


def joined(columns: Sequence[OffsetColumn]) -> OffsetColumn:
    """The offsets of some columns, ascending, each of them once."""
    return columns[0] if len(columns) == 1 else np.unique(np.concatenate(columns))


# --- parts that a mutant removes ------------------------------------------------------------------


def activation_length_ms(lease_ms: int) -> int:
    """A new leader gives a lease its whole length again: its worker may count from the last moment of the old one."""
    return lease_ms


def activation_delay_ms(delay_ms: int) -> int:
    """A new leader lets a message wait for its whole delay."""
    return delay_ms


def ended_at_ms(known: Deadline, now_ms: int) -> int:
    """When the time of a lease ends. A deadline from before it was prolonged does not count any more."""
    return known.at_ms
