"""Processes as (pid, start time), held by pidfd: a reused pid is never taken for the old process, nor killed.

A pid alone names the process that has it now. With the start time (field 22 of /proc/<pid>/stat, clock ticks since
boot) it names one process of one boot. A pidfd keeps naming that process while it is checked, killed and awaited.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import NamedTuple

from raymq.store.base.files import Files

#: threads of a process that `active_ms` asks
THREADS_MAX = 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: below that a process is not silent: satellites publish a heartbeat every 800 ms
SILENT_MIN_MS = 1_000
#: a process that runs, or waits for a core, for this share of a time is busy. The threads of an idle one need 1 %
BUSY_SHARE = 0.1
#: between two looks at its activity, which the kernel counts in steps of 10 ms
LOOK_MS = 250
#: what a silent time counts in which the process was busy
BUSY_WEIGHT = 0.25
#: an incarnation and a 15-bit fencing token fit into one field, see control_block.py
INCARNATION_BITS = 48


class ProcessIdentity(NamedTuple):
    """One process of this boot."""

    pid: int
    #: clock ticks since boot
    start_time: int


def identify(pid: int, *, files: Files) -> ProcessIdentity | None:
    """The identity of the process that has this pid now, or None if there is none."""
    try:
        stat = files.read_file(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2 is the command in parentheses and may itself hold spaces and parentheses: count from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return ProcessIdentity(pid, int(fields[19]))


def own_identity(*, files: Files) -> ProcessIdentity:
    """The identity of the calling process."""
    identity = identify(os.getpid(), files=files)
    if identity is None:
        raise FileNotFoundError(f"/proc/{os.getpid()}/stat (is /proc mounted?)")
    return identity


def new_incarnation() -> int:
    """A random name for one process in one role: 48 bits, never 0."""
    return int.from_bytes(os.urandom(INCARNATION_BITS // 8), "big") or 1


def active_ms(pid: int, *, files: Files) -> tuple[float, float]:
    """How long the threads of a process have run, and waited for a core, since their begin; (0, 0) if it has ended.

    A process that is stopped, or whose threads all wait for something else, adds nothing. Of many threads only some are
    asked how long they waited.
    """
    try:
        stat = files.read_file(f"/proc/{pid}/stat")
        threads = files.list(f"/proc/{pid}/task")[:THREADS_MAX]
    except OSError:
        return 0.0, 0.0
    fields = stat[stat.rindex(b")") + 2 :].split()
    ran_ms = (int(fields[11]) + int(fields[12])) * 1000 / _TICKS_PER_S

    waited_ns = 0
    for thread in threads:
        # The thread may have ended, and not every kernel has these figures.
        with contextlib.suppress(OSError, IndexError):
            waited_ns += int(files.read_file(f"/proc/{pid}/task/{thread}/schedstat").split()[1])
    return ran_ms, waited_ns / 1e6


class SilentTime:
    """How long a process gives no sign of life although it could: time in which it was busy counts a quarter.

    A process that hangs does nothing. One that is short of processors, or has thousands of requests at once, is late,
    and its end would make it later. It is not spared for good: it may be busy with an endless loop.
    Callers: one thread.
    """

    def __init__(self, *, files: Files) -> None:
        self._files = files
        #: pid, time, `silent_ms` and `active_ms` of the last look; None: the process was not silent then
        self._last: tuple[int, int, int, tuple[float, float]] | None = None
        self._excused_ms = 0.0

    def count(self, pid: int, silent_ms: int, now_ms: int) -> float:
        """What counts of the time since the last sign of life. Callers: every 500 ms or more often.

        Args: `silent_ms`: that time.
        """
        last, self._last = self._last, None
        if silent_ms < SILENT_MIN_MS:
            self._excused_ms = 0.0
            return silent_ms

        is_same = last is not None and last[0] == pid and silent_ms >= last[2]
        if last is not None and is_same and now_ms - last[1] < LOOK_MS:
            # What came after that look counts whole until the next one.
            self._last = last
            return silent_ms - self._excused_ms

        ran_ms, waited_ms = active_ms(pid, files=self._files)
        self._last = (pid, now_ms, silent_ms, (ran_ms, waited_ms))
        if last is None or not is_same:
            self._excused_ms = 0.0
            return silent_ms

        _, then_ms, silent_then_ms, (ran_then_ms, waited_then_ms) = last
        # Threads that have ended take away what they had waited.
        active = ran_ms - ran_then_ms + max(0.0, waited_ms - waited_then_ms)
        if active >= BUSY_SHARE * (now_ms - then_ms):
            # Not more than was counted as silent.
            self._excused_ms += (silent_ms - silent_then_ms) * (1 - BUSY_WEIGHT)
        return silent_ms - self._excused_ms


class ProcessHandle:
    """One process held by pidfd: it stays the same process whatever happens to its pid."""

    def __init__(self, identity: ProcessIdentity, pidfd: int) -> None:
        #: which process
        self.identity = identity
        #: readable once the process has ended
        self.pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    @classmethod
    def open(cls, identity: ProcessIdentity, *, files: Files) -> ProcessHandle | None:
        """A handle on exactly this process, or None if it has ended (even if another process has its pid now)."""
        if identity.pid <= 0:
            return None
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return None
        # Checked after the pidfd is open: the identity is older than both, so a match proves that the pidfd is it.
        if identify(identity.pid, files=files) != identity:
            os.close(pidfd)
            return None
        return cls(identity, pidfd)

    def exited(self) -> bool:
        """Whether it has ended (a zombie has)."""
        return self.wait_exit(0)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal. SIGKILL works on stopped processes too. This returns before the process has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def wait_exit(self, timeout_ms: int) -> bool:
        """Wait until it has ended. Returns: False at the timeout (a process inside a disk call dies only after it)."""
        return bool(self._poll.poll(timeout_ms))

    def close(self) -> None:
        """Release the handle. The process continues."""
        if self.pidfd >= 0:
            self._poll.unregister(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
