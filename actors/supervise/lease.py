"""The lease of one role as CommitLog sees it: vacant, granted to a live process, or revoked until that process ends."""

from __future__ import annotations

from typing import Any, NamedTuple

from raymq.actors.shared.control_block import FLUSHERS, RoleRecord
from raymq.actors.shared.processes import ProcessHandle, SilentTime
from raymq.store.base.files import Files

#: the roles whose position is the synced end
FLUSH_ROLES = tuple(FLUSHERS.values())


#: between two looks whether a process has left its role
WAIT_STEP_MS = 5


class Candidate(NamedTuple):
    """A live process that asks for a role."""

    incarnation: int
    handle: ProcessHandle


class Lease:
    """The lease of one role. Callers: Supervisor, under its lock; `position` and `sync_started` also without."""

    def __init__(self, record: RoleRecord, *, files: Files) -> None:
        self.role = record.role
        self.record = record
        self._files = files
        #: the fencing token of the grant; 0: not granted. Fields with another token count as 0
        self.fencing_token = 0
        #: the role is not granted while this is True
        self.suspended = False
        self._handle: ProcessHandle | None = None
        self._granted_at_ms = 0
        self._grants = 0
        self._last_stop_reason = ""
        self._silent_time = SilentTime(files=files)

    @property
    def vacant(self) -> bool:
        """Whether no process that was granted is alive."""
        return not self.fencing_token and self._handle is None

    @property
    def position(self) -> int:
        """The end published under the present grant, or 0 without one."""
        token = self.fencing_token
        return self.record.position(token) if token else 0

    @property
    def sync_started(self) -> int:
        """The end of the sync that was begun last under the present grant, or 0 without one."""
        token, end = self.record.sync_started
        return end if self.fencing_token and token == self.fencing_token else 0

    def find_candidate(self) -> Candidate | None:
        """The live process that asks for the lease, if it is vacant. The caller grants it or closes its handle."""
        registration = self.record.registration()
        if not self.vacant or self.suspended or registration is None:
            return None
        # Granted before means revoked or ended: wait for its successor.
        if registration.incarnation == self.record.last_granted:
            return None
        handle = ProcessHandle.open(registration.process, files=self._files)
        return None if handle is None else Candidate(registration.incarnation, handle)

    def grant(self, candidate: Candidate, base: int, now_ms: int) -> None:
        """Let the candidate work from `base` on."""
        self._handle = candidate.handle
        self._granted_at_ms = now_ms
        self._grants += 1
        self.fencing_token = self.record.give_grant(candidate.incarnation, base)

    def silent_ms(self, now_ms: int, watched_from_ms: int) -> float:
        """How long the granted process has been without heartbeat since `watched_from_ms`, or 0 if none is granted.

        Time in which it was busy counts a quarter. Callers: each tick.
        """
        if not self.fencing_token or self._handle is None:
            return 0
        silent_ms = now_ms - max(self.record.heartbeat_ms, self._granted_at_ms, watched_from_ms)
        return self._silent_time.count(self._handle.identity.pid, silent_ms, now_ms)

    def check_exit(self) -> None:
        """Make the lease vacant if its process has ended."""
        if self._handle is not None and self._handle.exited():
            self.revoke("ended")
            self.close()

    def fence(self, reason: str) -> None:
        """Revoke the grant. The process notices that, and leaves the role."""
        if not self.fencing_token:
            return
        self.record.revoke_grant()
        self.fencing_token = 0
        self._last_stop_reason = reason

    def revoke(self, reason: str) -> None:
        """Revoke the grant, then kill the process. The lease is vacant when the process has ended."""
        if self.fencing_token:
            self.fence(reason)
            self.kill()

    def kill(self) -> None:
        """Kill the process of a grant that is revoked."""
        if self._handle is not None:
            self._handle.kill()

    def wait_vacant(self, timeout_ms: int) -> bool:
        """Wait until a process whose grant was revoked has ended, or asks for a new one. Returns: False at the timeout.

        A process works for one grant at a time. It registers again only after its work for the old one has ended.
        """
        for _ in range(0, max(1, timeout_ms), WAIT_STEP_MS):
            if self._handle is None:
                return True
            if self._asks_again() or self._handle.wait_exit(min(WAIT_STEP_MS, timeout_ms)):
                self.close()
        return self._handle is None

    def _asks_again(self) -> bool:
        """Whether the process of the last grant has registered for another one."""
        registration = self.record.registration()
        return (
            self._handle is not None
            and registration is not None
            and registration.process == self._handle.identity
            and registration.incarnation != self.record.last_granted
        )

    def describe(self, now_ms: int) -> dict[str, Any]:
        """For status displays."""
        registration = self.record.registration()
        return {
            "granted": bool(self.fencing_token),
            "fencing_token": self.fencing_token,
            "pid": registration.process.pid if registration else None,
            "position": self.position,
            "heartbeat_age_ms": now_ms - self.record.heartbeat_ms if registration else None,
            "syncs": self.record.count,
            "slow_syncs": self.record.slow_count,
            "grants": self._grants,
            "last_stop_reason": self._last_stop_reason or None,
        }

    def close(self) -> None:
        """Release the handle. The process continues."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
