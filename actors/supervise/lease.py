"""One role as CommitLog sees it: vacant, granted to a live process, or waiting for the expelled one to end."""

from __future__ import annotations

from typing import Any, NamedTuple

from raymq.actors.shared.control_block import FLUSHERS, RoleRecord
from raymq.actors.shared.latency import Latencies
from raymq.actors.shared.processes import ProcessHandle
from raymq.store.files import Files

#: the roles whose position is `flushed`
FLUSH_ROLES = tuple(FLUSHERS.values())


class Newcomer(NamedTuple):
    """A live process that asks for a role."""

    incarnation: int
    handle: ProcessHandle


class Lease:
    """The place of one role. Callers: Supervisor, under its lock; `position` also without."""

    def __init__(self, record: RoleRecord, *, files: Files) -> None:
        self.role = record.role
        self.record = record
        self._files = files
        #: the generation whose words count; 0: nobody's
        self.generation = 0
        #: nobody is granted until this is False again
        self.held = False
        self._handle: ProcessHandle | None = None
        self._granted_at_ms = 0
        self._grants = 0
        self._last_end = ""

    @property
    def vacant(self) -> bool:
        """Whether no process of ours is alive here."""
        return not self.generation and self._handle is None

    @property
    def position(self) -> int:
        """The end published under the present grant; 0 without one."""
        generation = self.generation
        return self.record.position(generation) if generation else 0

    @property
    def sync_started(self) -> int:
        """The end of the sync that was begun last under the present grant; 0 without one."""
        generation, end = self.record.sync_started
        return end if self.generation and generation == self.generation else 0

    def find_newcomer(self) -> Newcomer | None:
        """The live process that asks for the lease if it is free; the caller grants it or closes its handle."""
        registration = self.record.registration()
        if not self.vacant or self.held or registration is None:
            return None
        # Granted before means expelled or ended: wait for its successor.
        if registration.incarnation == self.record.last_granted:
            return None
        handle = ProcessHandle.open(registration.process, files=self._files)
        return None if handle is None else Newcomer(registration.incarnation, handle)

    def grant(self, newcomer: Newcomer, base: int, now_ms: int) -> None:
        """Let the newcomer work from `base` on."""
        self._handle = newcomer.handle
        self._granted_at_ms = now_ms
        self._grants += 1
        self.generation = self.record.give_grant(newcomer.incarnation, base)

    def silent_ms(self, now_ms: int, watched_from_ms: int) -> int:
        """How long the granted one has not beaten while we were watching; 0 if nobody is granted."""
        if not self.generation:
            return 0
        return now_ms - max(self.record.heartbeat_ms, self._granted_at_ms, watched_from_ms)

    def watch(self) -> None:
        """Notice the end of the process, granted or expelled."""
        if self._handle is not None and self._handle.exited():
            self.expel("ended")
            self._drop_handle()

    def expel(self, reason: str) -> None:
        """Take the grant back, then kill; the lease is vacant when the process has ended."""
        if not self.generation:
            return
        self.record.take_grant_back()
        self.generation = 0
        self._last_end = reason
        if self._handle is not None:
            self._handle.kill()

    def wait_vacant(self, timeout_ms: int) -> bool:
        """Wait for the end of the expelled one. Returns: False at the timeout."""
        if self._handle is not None:
            if not self._handle.wait_exit(timeout_ms):
                return False
            self._drop_handle()
        return True

    def describe(self, now_ms: int) -> dict[str, Any]:
        """For status displays."""
        registration = self.record.registration()
        return {
            "granted": bool(self.generation),
            "generation": self.generation,
            "pid": registration.process.pid if registration else None,
            "position": self.position,
            "heartbeat_age_ms": now_ms - self.record.heartbeat_ms if registration else None,
            "syncs": self.record.count,
            "grants": self._grants,
            "last_end": self._last_end or None,
        }

    @property
    def sync_latencies(self) -> Latencies:
        """How long the syncs took, those of ended processes included."""
        return self.record.sync_latencies

    def close(self) -> None:
        """Let go; processes live on."""
        self._drop_handle()

    def _drop_handle(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None
