"""CommitLog's side of the shared state: who may work, what they have done, who must die.

Lives in CommitLog's process, with no thread of its own. A satellite registers; `tick` grants it the role under a
new generation; only words of the granted generation count. Taking a grant back is one move (the generation is
bumped); the old process is then killed by pidfd, and the next one is granted only after it has ended.

A flusher is granted only after a *witness sync*: CommitLog syncs the log through descriptors that it opened
when each segment was made. A flusher may have been told of a write error and died before it could say so; the
kernel tells each open descriptor once, so the witness hears of it too, while a new flusher's new descriptor would
sync "successfully" what the disk has dropped.

Callers: one thread at a time pushes (`publish_appended`, `submit`), one reads (`progress`), one waits (`wait`), one
supervises (`fence_old`, `begin`, `tick`, `revoke`, `close`); they may be three different ones.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raymq.actors.shared.control_block import (
    ANNOUNCED_US,
    COMMIT_LOG,
    COMMIT_REAL_TIME,
    ROLES,
    ControlBlock,
    State,
    shared_file,
)
from raymq.actors.shared.latency import NO_LATENCIES, Latencies
from raymq.actors.shared.processes import ProcessHandle, boot_id_hash, new_incarnation, own_identity
from raymq.actors.shared.ring import ReplicationRings, Request
from raymq.actors.shared.wakeup import Wakeup
from raymq.replication.combiner import Late
from raymq.store.clock import Clock
from raymq.store.errors import Rejected, Unavailable, broken, require
from raymq.store.files import Files
from raymq.store.promise import Ends
from raymq.store.status import PutStatus

from .lease import FLUSH_ROLES, Lease

#: a satellite that does not beat for so long is killed (Ray starts a new one)
STALE_MS = 2_000
#: how long the death of a killed process may take; inside a disk call it takes as long as the call
KILL_TIMEOUT_MS = 10_000
#: how long a put that is alone is looked after without sleeping: some syncs of a good disk
WATCH_US = 800


class FenceReport(NamedTuple):
    """What the satellites of the previous CommitLog left behind."""

    #: "role pid" of each one killed
    killed: list[str]
    #: errno of a sync that failed, of which the previous CommitLog may not have heard; 0: none
    failed_sync_errno: int
    #: [start, stop) of a sync that was begun and not finished: its error, if any, died with both processes, so these
    #: bytes must be written again before a sync of them means anything; None: nothing in flight. Start is 0 when
    #: unknown: the synced mark is then the better bound.
    unfinished_sync: tuple[int, int] | None


class Progress(NamedTuple):
    """How far the satellites are."""

    #: committed is CommitRealTime's word, without it what is appended; synced the flusher's; replicated Replication's,
    #: as far as it has combined it with the leader's own ends. Without Replication no end is lacking: it is committed.
    ends: Ends
    #: puts of which Replication says that they missed their deadline
    late: list[Late]


class Supervisor:
    """Grants, watches and combines the satellites of one replica."""

    def __init__(
        self,
        replica_dir: str | Path,
        roles: Sequence[str],
        *,
        clock: Clock,
        files: Files,
        witness_sync: Callable[[], int],
        commit_least_bytes: int = 0,
    ) -> None:
        """Maps the shared files and changes nothing in them: another CommitLog may still be alive.

        Args: roles: the satellites of this replica's mode, see control_block.ROLES; witness_sync: syncs the log
        through the witness descriptors, returns the synced end, raises OSError; commit_least_bytes: CommitRealTime is
        rung for so many waiting bytes.
        """
        for role in roles:
            if role not in ROLES:
                raise Rejected(f"{role!r} is not a satellite role", field="roles", limit=ROLES)
        self._clock = clock
        self._files = files
        self._witness_sync = witness_sync
        self._replica_dir = str(replica_dir)
        self._wakeup: Wakeup | None = None
        #: the satellites of this replica's mode
        self.roles = tuple(roles)
        files.make_dirs(f"{replica_dir}/raymq")
        self._control = ControlBlock.open(shared_file(str(replica_dir), "control"), files=files)
        self._leases = {role: Lease(self._control.roles[role], files=files) for role in roles}
        self._rings: ReplicationRings | None = None
        if "replication" in roles:
            self._rings = ReplicationRings.open(
                shared_file(str(replica_dir), "ring-replication"), files=files
            )
        #: whose position is `flushed`
        self._flusher = next((self._leases[role] for role in FLUSH_ROLES if role in roles), None)
        #: the transient pool is on
        self._pooled = COMMIT_REAL_TIME in roles
        #: rung at each put, when so many bytes wait; FlushRealTime works by its period, as in RocketMQ. With the pool
        #: CommitRealTime comes first and rings the others.
        self._bells = tuple(role for role in roles if role != "flush_real_time")
        self._ring_bytes = 0
        #: when an append was announced last, and the end of the last append that was
        self._announced_s = -math.inf
        self._announced_end = -1
        #: who works first on a put that somebody waits for; empty: nobody does
        self._announced_to = "group_commit" if "group_commit" in roles else ""
        if self._pooled:
            self._bells = (COMMIT_REAL_TIME,)
            self._announced_to = self._announced_to and COMMIT_REAL_TIME
            self._ring_bytes = commit_least_bytes
        self._boot = boot_id_hash(files=files)
        self._process = own_identity(files=files)
        #: this life of CommitLog, new at each `begin`
        self.incarnation = 0
        #: why nothing is granted any more; None: all is well
        self.poisoned: str | None = None
        self._appended = 0
        #: what the control block says is appended
        self._published = 0
        self._committed = 0
        self._flushed = 0
        #: as Replication has published; its successors begin there
        self._replicated = 0
        self._last_tick_ms = 0
        self._watch_from_ms = 0
        #: over leases and grants; not held during a witness sync
        self._lock = threading.RLock()
        #: over the three offsets; never held during a call that may take long
        self._offsets_lock = threading.Lock()

    # -- supervising -------------------------------------------------------------------------------------------

    @property
    def control(self) -> ControlBlock:
        """The words that CommitLog and its satellites share."""
        return self._control

    def fence_old(self, timeout_ms: int = KILL_TIMEOUT_MS) -> FenceReport:
        """Take over: kill every satellite that the previous CommitLog may have let in and wait for its end.

        Call it with the store's lock held and before recovery.
        One that was never granted may live: it touches nothing until we grant it.
        Raises: Unavailable if one does not end in time; nothing may be recovered then.
        """
        with self._lock:
            if self._wakeup is None:
                self._wakeup = Wakeup(self._replica_dir, COMMIT_LOG, files=self._files)
            if not self._control.valid(self._boot):
                # Another boot (or layout): whoever was recorded is gone, or never heard of this page.
                self._control.format(self._boot)
                return FenceReport([], 0, None)
            failed = 0
            unfinished: tuple[int, int] | None = None
            killed = []
            for role in ROLES:
                record = self._control.roles[role]
                record.take_grant_back()
                registration = record.registration()
                if registration and registration.incarnation == record.last_granted:
                    handle = ProcessHandle.open(registration.process, files=self._files)
                    if handle is not None:
                        _kill_and_wait(handle, role, timeout_ms)
                        killed.append(f"{role} {registration.process.pid}")
                # After its death: it may have begun a sync, or failed, in its last moment.
                failed = record.failure[1] or failed
                generation, started = record.sync_started
                flushed = record.position(generation)
                if started > flushed:
                    start, stop = unfinished or (flushed, started)
                    unfinished = (min(start, flushed), max(stop, started))
                record.clear_counts()
            return FenceReport(killed, failed, unfinished)

    def begin(self, appended: int, flushed: int, confirmed: int) -> None:
        """A new life, after recovery or a truncation: everything counts from these three ends on.

        All that is appended must be in the files.

        Nobody may be granted: call `fence_old` (or `revoke` for each role) before.
        """
        with self._lock:
            require(self._wakeup is not None, "begin before fence_old")
            for lease in self._leases.values():
                require(lease.vacant, "begin while a satellite is granted", role=lease.role)
                lease.held = False
            if self._rings is not None:
                self._rings.reset()
            bases = dict.fromkeys(FLUSH_ROLES, flushed) | {COMMIT_REAL_TIME: appended}
            for role, record in self._control.roles.items():
                record.clear(base=bases.get(role, confirmed))
            self.incarnation = new_incarnation()
            now_ms = self._clock.monotonic_ms()
            self._last_tick_ms = self._watch_from_ms = now_ms
            with self._offsets_lock:
                self._appended, self._flushed, self._replicated = appended, flushed, confirmed
                self._committed = appended
                self._control.begin(
                    self.incarnation, self._process, appended, now_ms, pooled=self._pooled
                )
                self._published = appended
            self.wake_all()

    def tick(self) -> None:
        """Beat; poison after a failed sync; expel the dead and the stale; grant newcomers.

        Call it at each wakeup and at least every 200 ms. May take as long as a witness sync, but never waits for a
        death, and holds no lock during that sync: a truncation may come in between.
        """
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            self._control.beat(now_ms)
            if now_ms - self._last_tick_ms > STALE_MS // 2:
                # We did not run for a while (machine paused or overloaded), so silence of others proves nothing yet.
                self._watch_from_ms = now_ms
            self._last_tick_ms = now_ms
            self._check_failures()
            for lease in self._leases.values():
                if lease.silent_ms(now_ms, self._watch_from_ms) > STALE_MS:
                    lease.expel("stale")
                lease.watch()
        for lease in self._leases.values():
            self._admit(lease)

    def revoke(self, role: str, timeout_ms: int = KILL_TIMEOUT_MS) -> None:
        """Take the role's grant back, kill its process, wait for its end; nobody gets the role until `begin`.

        For a truncation: revoke every role, cut, zero, sync, begin.
        Raises: Unavailable if the process does not end in time; the grant is gone all the same.
        """
        with self._lock:
            lease = self._leases[role]
            lease.held = True
            lease.expel("revoked")
            if not lease.wait_vacant(timeout_ms):
                raise Unavailable(
                    f"{role} did not end within {timeout_ms} ms of its kill; is the disk hanging?",
                    role=role,
                    timeout_ms=timeout_ms,
                )

    def poison(self, reason: str) -> None:
        """Grant nothing from now on; what has no witness is never acknowledged. Callers: any thread."""
        with self._lock:
            if self.poisoned is None:
                self.poisoned = reason
                self._control.state = State.POISONED
                for lease in self._leases.values():
                    lease.expel("poisoned")
                # Wake whoever waits for progress.
                self._wake(COMMIT_LOG)

    def close(self) -> None:
        """Tell the satellites to finish and leave, and let go of the shared memory. Nobody else may be calling."""
        with self._lock:
            # Without a life of our own the page is another CommitLog's.
            if self.incarnation and self.poisoned is None:
                self._control.state = State.STOPPED
            self.wake_all()
            if self._wakeup is not None:
                self._wakeup.close()
                self._wakeup = None
            for lease in self._leases.values():
                lease.close()
            if self._rings is not None:
                self._rings.close()
            self._control.close()

    # -- putting -----------------------------------------------------------------------------------------------

    def announce_append(self) -> None:
        """A small put has come: the flusher wakes while it is encoded. Only a hint: never needed, never trusted."""
        self._control.announce_append()
        if self._control.polling:
            self._announced_s = -math.inf
        elif self._announced_to and self._wakeup is not None:
            # Behind other work it would take this wakeup for that work's, and sleep.
            idle = self._flusher is not None and self._flusher.position >= self._appended
            self._announced_s = self._clock.monotonic() if idle else -math.inf
            self._wakeup.wake(self._announced_to)

    def await_flushed(self, end_offset: int, wanted: Callable[[], bool]) -> bool:
        """Look, without sleeping, until everything below is synced, for WATCH_US at most, while it is `wanted`.

        Returns: False when the time was up.
        Callers: one thread at a time, for a put that waits for nothing else. It must look at `progress` afterwards.
        """
        deadline = self._clock.monotonic() + WATCH_US / 1e6
        lease = self._leases["group_commit"]
        self._control.watching = True
        try:
            while lease.position < end_offset and wanted():
                # The flusher may have been put on our core.
                os.sched_yield()
                if self._clock.monotonic() > deadline:
                    return False
            return True
        finally:
            self._control.watching = False

    def publish_appended(self, end_offset: int) -> None:
        """Every byte below is in the file. Callers: the writer, after the bytes and before `submit`."""
        announced = self._control.appending
        if end_offset == self._published and not announced:
            # It was published early.
            return
        # First: what satellites tell of must not be beyond it.
        self._appended = end_offset
        self._control.publish_appended(
            end_offset, announced=announced and self._announced_to == "group_commit"
        )
        self._published = end_offset
        if announced:
            self._announced_end = end_offset

    def submit(self, number: int, end_offset: int, since_ms: int) -> bool:
        """Hand puts that wait for replicas to Replication, after `publish_appended`; see ring.Request.

        Returns: False if the ring is full; hand over again later: each entry covers all puts before it.
        """
        if self._rings is None:
            raise broken("puts that wait for replicas, without Replication")
        return self._rings.request(Request(number, end_offset, since_ms))

    def wake_for_append(self) -> None:
        """Wake the roles that work at each put, after `publish_appended` and `submit`."""
        if self._appended - self._committed < self._ring_bytes:
            return
        if self._bells == ("group_commit",):
            if self._leases["group_commit"].sync_started >= self._appended or self._control.polling:
                # It syncs all of that just now, and looks again as soon as it has; or it looks all the time, and once
                # more behind that.
                return
            told_us = (self._clock.monotonic() - self._announced_s) * 1e6
            if self._announced_end == self._appended and told_us < ANNOUNCED_US:
                # From the wakeup of the announcement on it looks for longer than that: it has seen it, or will.
                return
        self.wake_first()

    def wake_first(self) -> None:
        """Wake who works first after an append, now: somebody waits for room in the pool."""
        for role in self._bells:
            self._wake(role)

    def wake_all(self) -> None:
        """Wake every role: the grant or the state has changed."""
        for role in self._leases:
            self._wake(role)

    # -- reading -----------------------------------------------------------------------------------------------

    def wait(self, timeout_ms: int) -> bool:
        """Wait until a satellite rings. Returns: whether one did; look at `progress` either way."""
        return self._wakeup is not None and self._wakeup.wait(timeout_ms)

    def progress(self) -> Progress:
        """How far they are; none of the ends ever goes back between two `begin`s."""
        late: list[Late] = []
        with self._offsets_lock:
            # Each after those that rely on it: late puts are beyond what was acknowledged before their report, what is
            # acknowledged was flushed, what is flushed was committed.
            if self._rings is not None:
                late = [
                    Late(number, end, PutStatus.of_code(code))
                    for number, end, code in self._rings.take_late()
                ]
                self._replicated = max(self._replicated, self._leases["replication"].position)
            if self._flusher is not None:
                self._flushed = max(self._flushed, self._flusher.position)
            committed = self._look_committed()
            if not self._flushed <= committed <= self._appended:
                raise broken(
                    "flushed beyond what is committed, or that beyond the end of the log",
                    flushed=self._flushed,
                    committed=committed,
                    appended=self._appended,
                )
            return Progress(self._ends(committed), late)

    def committed(self) -> int:
        """Everything below is in the log's files."""
        with self._offsets_lock:
            return self._look_committed()

    def describe(self) -> dict[str, Any]:
        """Everything an operator may ask, as plain values."""
        with self._lock:
            return {
                "incarnation": self.incarnation,
                "state": self._control.state.name,
                "poisoned": self.poisoned,
                **self._ends(self._committed if self._pooled else self._appended)._asdict(),
                "roles": {
                    role: lease.describe(self._clock.monotonic_ms())
                    for role, lease in self._leases.items()
                },
            }

    def sync_latencies(self) -> Latencies:
        """How long the syncs of all flushers took since `fence_old`; nothing without the role."""
        with self._lock:
            return NO_LATENCIES if self._flusher is None else self._flusher.sync_latencies

    # -- inside ------------------------------------------------------------------------------------------------

    def _ends(self, committed: int) -> Ends:
        """As known; without Replication no end is lacking."""
        replicated = committed if self._rings is None else self._replicated
        return Ends(self._appended, committed, self._flushed, replicated)

    def _look_committed(self) -> int:
        """Needs `_offsets_lock`."""
        if not self._pooled:
            return self._appended
        self._committed = max(self._committed, self._leases[COMMIT_REAL_TIME].record.committed)
        return self._committed

    def _wake(self, role: str) -> None:
        if self._wakeup is not None:
            self._wakeup.wake(role)

    def _check_failures(self) -> None:
        for role in FLUSH_ROLES:
            errno = self._control.roles[role].failure[1]
            if errno:
                self.poison(f"{role} could not sync the log (errno {errno})")

    def _admit(self, lease: Lease) -> None:
        with self._lock:
            incarnation = self.incarnation
            newcomer = lease.find_newcomer() if incarnation and self.poisoned is None else None
        if newcomer is None:
            return
        base = 0
        if lease.role in FLUSH_ROLES:
            try:
                base = self._witness_sync()
            except OSError as error:
                newcomer.handle.close()
                self.poison(f"the witness sync before a new {lease.role} failed: {error}")
                return
        with self._lock:
            # The one before may have told of its failure just before its end, after our last look.
            self._check_failures()
            if incarnation != self.incarnation or lease.held or self.poisoned is not None:
                # Another log, or soon another: what was synced says nothing about it.
                newcomer.handle.close()
                return
            with self._offsets_lock:
                if lease.role in FLUSH_ROLES:
                    # The witness may have synced an append that is not published yet.
                    self._flushed = base = max(self._flushed, min(base, self._look_committed()))
                elif lease.role == COMMIT_REAL_TIME:
                    # The one before has ended, so this is all that it has told.
                    base = self._look_committed()
                else:
                    base = self._replicated
            lease.grant(newcomer, base, self._clock.monotonic_ms())
            self._wake(lease.role)


def _kill_and_wait(handle: ProcessHandle, role: str, timeout_ms: int) -> None:
    try:
        handle.kill()
        if not handle.wait_exit(timeout_ms):
            raise Unavailable(
                f"old {role} (pid {handle.identity.pid}) did not end within {timeout_ms} ms of its kill; "
                "is the disk hanging?",
                role=role,
                pid=handle.identity.pid,
            )
    finally:
        handle.close()
