"""Processes as (pid, start time), held by pidfd: a reused pid is never taken for the old process, nor killed.

A pid alone names the process that has it now. With the start time (field 22 of /proc/<pid>/stat, clock ticks since
boot) it names one process of one boot. A pidfd keeps naming that process while it is checked, killed and awaited.
"""

from __future__ import annotations

import os
import select
import signal
from typing import NamedTuple

from raymq.store.base.files import Files

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
