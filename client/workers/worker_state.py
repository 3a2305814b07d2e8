"""What the program and the threads of one `Workers` share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raymq.client.transport.chained_future import BlockedCallers
from raymq.store.base.errors import RayMQError
from raymq.store.groups.leases.options import LEASE_OFFSETS_MAX

from .held import HeldPart

#: after so many calls of the program, what is leased ahead for calls at the same time begins to follow those of late
CALLS_FOLLOWED = 16


@dataclass
class WorkerState:
    """`lock` guards all of it. `changed` wakes the threads and has this lock; `blocked` are calls of the program."""

    prefetch: int
    max_in_flight: int
    #: "wait": a settlement returns when it is durable. "pipelined": it returns a future
    settle_mode: str = "wait"
    #: the collector may end workers in a thread that has it
    lock: Any = field(default_factory=threading.RLock)
    #: leased messages that wait for the program, in the order of their arrival
    ready: deque[HeldPart] = field(default_factory=deque)
    #: how many messages they are
    ready_count: int = 0
    #: messages that calls of the program wait for
    awaited: int = 0
    #: messages to lease ahead of the program
    ahead: int = 0
    #: the most messages that calls of late wanted at the same time, and how many calls there were
    awaited_of_late: int = 0
    calls: int = 0
    #: thread -> what its last call wanted, of threads that called lately, and of those before
    takers: dict[int, int] = field(default_factory=dict)
    takers_before: dict[int, int] = field(default_factory=dict)
    calls_counted: int = 0
    #: what the program has to hear of once: messages that cannot be read
    faults: deque[RayMQError] = field(default_factory=deque)
    #: shard -> (when it became unreachable, in ms; why)
    down: dict[int, tuple[int, RayMQError]] = field(default_factory=dict)
    #: why nothing can be leased at all
    fatal_error: RayMQError | None = None
    closed: bool = False
    #: also called when messages arrive, on any thread. It must not block
    listener: Callable[[], None] | None = None
    #: called by threads now and then, to look for queues on further shards. It must not block
    look_for_queues: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.blocked = BlockedCallers()

    def want(self, most: int) -> None:
        """A call of the program wants so many messages. Needs the lock."""
        self.awaited += most
        self.calls += 1
        if not self.calls % CALLS_FOLLOWED:
            # Tasks of late may have ended.
            self.awaited_of_late -= self.awaited_of_late // 64 + 1
        self.awaited_of_late = max(self.awaited_of_late, self.awaited)
        self.ahead = min(self.prefetch * self._together(most), LEASE_OFFSETS_MAX)
        if self.missing:
            self.changed.notify_all()

    def _together(self, most: int) -> int:
        """How many messages are worked on at the same time: what each thread wants, or tasks of one thread want."""
        takers = self.takers
        takers[threading.get_ident()] = most
        if self.calls >= self.calls_counted + CALLS_FOLLOWED * len(takers):
            # Threads of late may have ended.
            self.takers_before, self.takers = takers, {}
            self.calls_counted = self.calls
        wanted = max(sum(takers.values()), sum(self.takers_before.values()))
        return max(wanted, self.awaited_of_late)

    def want_no_more(self, most: int) -> None:
        """A call of the program has ended. Needs the lock."""
        self.awaited -= most

    def take_one(self, part: HeldPart) -> int:
        """Let the program have the first message of the first part. Needs the lock. Returns: its place in the part."""
        row = part.at
        part.at += 1
        self._note_taken(part, 1)
        return row

    def take_many(self, part: HeldPart, most: int) -> HeldPart:
        """Let the program have the first messages of the first part. Needs the lock."""
        taken = part.split(min(most, part.count))
        self._note_taken(part, len(taken.offsets))
        return taken

    def _note_taken(self, part: HeldPart, count: int) -> None:
        self.ready_count -= count
        if not part.count:
            self.ready.popleft()
        if self.missing:
            self.changed.notify_all()

    def first_held(self, now_ms: int) -> HeldPart | None:
        """The first messages that are still held; None: there are none. Needs the lock."""
        while self.ready:
            part = self.ready[0]
            if not part.lease.is_lost and now_ms < part.lease.until_ms:
                return part
            # Others may have them.
            self.ready.popleft()
            self.ready_count -= part.count
            if not part.lease.is_lost:
                # If the shard has been away for so long, they are held still, and would be renewed for ever.
                part.give_back()
            self.changed.notify_all()
        return None

    @property
    def missing(self) -> int:
        """How many more messages to lease. Needs the lock.

        Those ahead of the program are leased when half of them are gone: a call for each would cost much more.
        """
        if self.awaited <= self.ready_count and self.ready_count > self.ahead // 2:
            return 0
        wanted = min(self.awaited + self.ahead, self.max_in_flight, LEASE_OFFSETS_MAX)
        return max(0, wanted - self.ready_count)

    def add(self, part: HeldPart) -> None:
        """Let the program have messages. Needs the lock."""
        self.ready.append(part)
        self.ready_count += part.count
        # It wakes the next one, when it has got its messages.
        self.blocked.wake_next()
        self._call_listener()

    def share(self) -> None:
        """A call of the program has got its messages: the next one that waits gets what is left."""
        if self.ready:
            self.blocked.wake_next()

    def report(self, *, is_over: bool = False) -> None:
        """Let all calls of the program look again. Needs the lock. Args: `is_over`: the threads, too."""
        self.blocked.wake_all()
        if is_over:
            self.changed.notify_all()
        self._call_listener()

    def _call_listener(self) -> None:
        if self.listener is not None:
            self.listener()
