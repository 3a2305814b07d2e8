"""Wakeups between an append and its acknowledgement, and the rules by which most of them are left out.

Waking a process costs about as much as syncing a small put. Without these rules each process would sleep, be woken,
work a little and wake the next one. So a process that will be needed in a moment polls for that moment instead of
sleeping, and says so in the control block. Every rule below is a hint: when one misfires, a sync starts later, at the
latest after the timeout of the satellite's wait. No promise depends on any of them.

    rule                    who acts     when, and for how long
    announce                CommitLog    wakes the first worker before it encodes a small put that no other put precedes
    await the announced     GroupCommit, after a wakeup, polls the appended end for ANNOUNCED_US
                            CommitRealTime
    publish early           CommitLog    publishes that put's end before accounting for it (PutAcks.publish_early)
    wake for an append      CommitLog    after publishing, unless `_group_commit_is_awake`. Replication only while its
                                         replica leads
    await the sync          CommitLog    the thread that brought a put that waits alone sleeps for half of a usual
                                         sync, polls the synced end for the rest, WATCH_US in all, and answers the put

The last one is tried less and less often while it does not help (RetryThrottle). A polling loop yields its core at
each step. No process polls between two puts: it would keep a core busy while a producer sends one put after the
other. Nothing is announced, and no sync is awaited, while no core has time to spare (IdleCores): a put costs a fifth
less CPU without them then, and takes a fifth less time.

The first worker is GroupCommit. With a transient pool it is CommitRealTime, which wakes GroupCommit after
each commit. FlushRealTime works by its period. Only if the option `flush_commit_log_timed` is off it is woken for
appends, or with a transient pool for commits, as in RocketMQ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from raymq.store.base.clock import Clock

from .control_block import COMMIT_REAL_TIME, FLUSH_REAL_TIME, ControlBlock
from .idle_cores import IdleCores

ANNOUNCED_US = 500
#: a few syncs of a good disk
WATCH_US = 800
#: the share of a usual sync that CommitLog sleeps through: a tenth of the CPU time of one message, at the same latency.
#: A longer sleep ends too late
SLEPT_SHARE = 0.5
#: a shorter sleep is not worth its two system calls
SLEEP_US_MIN = 30
#: the weight of the newest sync in the time of a usual one
_NEWEST = 0.1


class FlusherView(Protocol):
    """A flusher's lease as CommitLog sees it."""

    @property
    def position(self) -> int:
        """The synced end."""

    @property
    def sync_started(self) -> int:
        """The end of the sync that was begun last."""


def wake_none(_role: str) -> None:
    """The wakeup of a CommitLog without a socket."""


class AppendNotifier:
    """CommitLog's side: publishes appends and wakes the satellites that work on them.

    Callers: the writer. `await_synced`: one other thread at a time.
    """

    def __init__(
        self,
        control: ControlBlock,
        roles: Sequence[str],
        flusher: FlusherView | None,
        *,
        clock: Clock,
        cores: IdleCores,
        commit_least_bytes: int,
        wakes_flush_real_time: bool = False,
    ) -> None:
        """Args: `commit_least_bytes`: CommitRealTime is woken for this many uncommitted bytes.

        `wakes_flush_real_time`: it flushes at wakeups, too.
        """
        self._control = control
        self._flusher = flusher
        self._clock = clock
        self._cores = cores
        #: wakes one role. It is set when this CommitLog has its own wakeup socket
        self.wake: Callable[[str], None] = wake_none

        self._roles = tuple(roles)
        self.set_rules(
            commit_least_bytes=commit_least_bytes, wakes_flush_real_time=wakes_flush_real_time
        )
        #: works first on an announced append; empty: appends are not announced
        self._announced_to = "group_commit" if "group_commit" in roles else ""
        if COMMIT_REAL_TIME in roles:
            self._announced_to = self._announced_to and COMMIT_REAL_TIME

        #: when the last announcement woke an idle worker, and the end of the last announced append
        self._announced_s = -math.inf
        self._announced_end = -1

        #: how long `await_synced` usually takes, in seconds
        self._usual_sync_s = 0.0
        #: every byte below is in the log
        self.appended = 0
        #: every byte below is in the files, as far as known here
        self.committed = 0
        #: the appended end in the control block
        self._published = 0

    def set_rules(self, *, commit_least_bytes: int, wakes_flush_real_time: bool) -> None:
        """Say which roles are woken for appends. Callers: any thread. Args: as of the constructor."""
        pooled = COMMIT_REAL_TIME in self._roles
        #: uncommitted bytes below which no role is woken
        self._least_bytes = commit_least_bytes if pooled else 0
        if pooled:
            self._woken: tuple[str, ...] = (COMMIT_REAL_TIME,)
            return
        # Replication first, whose way is the longest.
        woken = sorted(self._roles, key=lambda role: role != "replication")
        #: woken for appends
        self._woken = tuple(
            role for role in woken if role != FLUSH_REAL_TIME or wakes_flush_real_time
        )

    def begin(self, appended: int) -> None:
        """Begin a new log, which ends here and is in the files."""
        self.appended = self.committed = self._published = appended

    def announce(self) -> None:
        """Announce a small put: the first worker wakes up while the put is encoded."""
        if not self._cores.are_idle():
            return
        self._control.appending = 1
        if self._announced_to:
            # A busy flusher takes this wakeup for one about earlier work, and sleeps after that work.
            idle = self._flusher is not None and self._flusher.position >= self.appended
            self._announced_s = self._clock.monotonic() if idle else -math.inf
            self.wake(self._announced_to)

    def publish(self, end_offset: int) -> None:
        """Publish the appended end: every byte below is in the log. Callers: before `wake_for_append`."""
        announced = bool(self._control.appending)
        if end_offset == self._published and not announced:
            # `publish_early` has published this end.
            return
        # First: no satellite may report an end beyond it.
        self.appended = end_offset
        self._control.publish_appended(end_offset)
        self._published = end_offset
        if announced:
            self._announced_end = end_offset

    def wake_for_append(self) -> None:
        """Wake the roles that work on each append and do not see it by themselves."""
        if self.appended - self.committed < self._least_bytes:
            return
        for role in self._woken:
            if role == "replication":
                # It is idle while its replica follows.
                needs_wakeup = self._control.leads
            else:
                needs_wakeup = role != "group_commit" or not self._group_commit_is_awake()
            if needs_wakeup:
                self.wake(role)

    def _group_commit_is_awake(self) -> bool:
        """Whether GroupCommit will see the newest append without being woken. A wrong True only delays the sync."""
        if self._flusher is not None and self._flusher.sync_started >= self.appended:
            # The running sync covers the append, and GroupCommit checks again after each sync.
            return True
        # The announcement woke it, and it waits for the announced append for ANNOUNCED_US.
        announced_us = (self._clock.monotonic() - self._announced_s) * 1e6
        return self._announced_end == self.appended and announced_us < ANNOUNCED_US

    def wake_now(self) -> None:
        """Wake the roles that work on each append, busy or not: a writer waits for space in the pool."""
        for role in self._woken:
            self.wake(role)

    def may_await_synced(self) -> bool:
        """Whether a thread that polls takes no time from another one."""
        return self._flusher is not None and self._cores.are_idle()

    def await_synced(self, end_offset: int, wanted: Callable[[], bool]) -> bool:
        """Sleep, then poll until everything below is synced, for WATCH_US at most, while it is `wanted`.

        Callers: one thread at a time, for a put that waits for nothing else. It must look at the satellites' progress
        afterwards. Returns: False when the time was up.
        """
        flusher = self._flusher
        if flusher is None:
            return False

        began = self._clock.monotonic()
        deadline_s = began + WATCH_US / 1e6
        self._control.commit_log_polls = 1
        try:
            sleep_s = self._usual_sync_s * SLEPT_SHARE
            if sleep_s * 1e6 >= SLEEP_US_MIN and flusher.position < end_offset:
                self._clock.nap(sleep_s)
            while flusher.position < end_offset and wanted():
                # The kernel may have put the flusher on this core.
                os.sched_yield()
                if self._clock.monotonic() > deadline_s:
                    return False
            took_s = self._clock.monotonic() - began
            self._usual_sync_s += (took_s - self._usual_sync_s) * _NEWEST
            return True
        finally:
            self._control.commit_log_polls = 0


class AppendWaiter:
    """A satellite's side. Callers: the satellite's thread."""

    def __init__(self, control: ControlBlock, *, clock: Clock) -> None:
        self._control = control
        self._clock = clock

    def await_announced(self, done: int) -> None:
        """Poll, after a wakeup, for the announced append that ends after `done`, for ANNOUNCED_US at most."""
        deadline_s = self._clock.monotonic() + ANNOUNCED_US / 1e6
        control = self._control
        while control.appending and control.appended <= done:
            os.sched_yield()
            if self._clock.monotonic() > deadline_s:
                return
