"""Grants leases to the satellites of one replica, combines their progress, and fences the dead.

Runs in CommitLog's process, with no thread of its own. A satellite registers, and `tick` grants it the role with a new
fencing token. Only fields with that token count. One 8-byte store revokes a grant: it changes the token. The old
process then leaves the role, or is killed by pidfd, and the next grant comes only afterwards.

A flusher is granted only after a *witness sync*: CommitLog syncs the log through descriptors that it opened when each
segment was made. A flusher may have received a write error and died before it could report it. The kernel reports an
error once to each open descriptor, so the witness receives it too. A new flusher's new descriptor would sync
"successfully" bytes that the disk has dropped.

Callers: one thread at a time appends (`appends`, `submit`), one reads (`progress`), one waits (`wait`), one supervises
(`fence_old`, `begin`, `tick`, `revoke`, `close`). They may be different threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raymq.actors.shared import control_block
from raymq.actors.shared.append_wakeups import AppendNotifier, wake_none
from raymq.actors.shared.idle_cores import IdleCores
from raymq.actors.shared.latency import NO_LATENCIES, Latencies
from raymq.actors.shared.processes import ProcessHandle, new_incarnation, own_identity
from raymq.actors.shared.ring import ReplicationRings
from raymq.actors.shared.wakeup import Wakeup
from raymq.replication.combiner import LatePuts
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable, broken, require
from raymq.store.base.files import Files
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import Ends

from .lease import FLUSH_ROLES, Candidate, Lease

#: a satellite without a heartbeat for this long is killed (Ray starts a new one)
STALE_MS = 2_000
#: how long the death of a killed process may take. Inside a disk call it takes as long as the call
KILL_TIMEOUT_MS = 10_000


#: how long a satellite has to leave its role when its grant is revoked: a sync may be under way
LEAVE_TIMEOUT_MS = 1_000


class FenceReport(NamedTuple):
    """The state that the satellites of the previous CommitLog left."""

    #: "role pid" of each process killed
    killed: list[str]
    #: errno of a failed sync that the previous CommitLog may not have seen; 0: none
    failed_sync_errno: int
    #: [start, stop) of a sync that was begun and not finished. Its error, if any, died with both processes, so these
    #: bytes must be written again before a sync of them means anything. None: none was under way. Start is 0 when
    #: unknown: the synced end is then the better bound.
    unfinished_sync: tuple[int, int] | None


class SatelliteProgress(NamedTuple):
    """The progress of the satellites."""

    #: committed is CommitRealTime's end, or without it the appended end. synced is the flusher's end. replicated is
    #: the end below which Replication has acknowledged puts, or without it the committed end
    ends: Ends
    #: puts that missed their deadline, as Replication reports them
    late: list[LatePuts]


class Supervisor:
    """Grants the leases of one replica's satellites, and combines the ends that they publish."""

    def __init__(
        self,
        replica_dir: str | Path,
        roles: Sequence[str],
        *,
        clock: Clock,
        files: Files,
        witness_sync: Callable[[], int],
        commit_least_bytes: int = 0,
        wakes_flush_real_time: bool = False,
    ) -> None:
        """Maps the shared files and changes nothing in them: another CommitLog may still be alive.

        Args: `roles`: the satellites of this replica's mode, see control_block.ROLES. `witness_sync`: syncs the log
        through the witness descriptors, returns the synced end, raises OSError. `commit_least_bytes`,
        `wakes_flush_real_time`: as of AppendNotifier.
        """
        for role in roles:
            if role not in control_block.ROLES:
                raise Rejected(
                    f"{role!r} is not a satellite role",
                    field="roles",
                    limit=tuple(control_block.ROLES),
                )

        self._clock = clock
        self._files = files
        self._witness_sync = witness_sync
        self._replica_dir = str(replica_dir)
        self._wakeup: Wakeup | None = None
        #: the satellites of this replica's mode
        self.roles = tuple(roles)
        files.make_dirs(f"{replica_dir}/raymq")

        #: the fields that CommitLog and its satellites share
        self.control = control_block.ControlBlock.open(
            control_block.shared_file(str(replica_dir), "control"), files=files
        )
        self._leases = {role: Lease(self.control.roles[role], files=files) for role in roles}

        self._rings: ReplicationRings | None = None
        if "replication" in roles:
            self._rings = ReplicationRings.open(
                control_block.shared_file(str(replica_dir), "ring-replication"), files=files
            )

        #: its position is the synced end
        self._flusher = next((self._leases[role] for role in FLUSH_ROLES if role in roles), None)
        #: the transient pool is on
        self._pooled = control_block.COMMIT_REAL_TIME in roles
        #: publishes appends and wakes the satellites for them
        self.appends = AppendNotifier(
            self.control,
            roles,
            self._flusher,
            clock=clock,
            cores=IdleCores(clock=clock, files=files),
            commit_least_bytes=commit_least_bytes,
            wakes_flush_real_time=wakes_flush_real_time,
        )

        self._boot = files.boot_id_hash()
        self._process = own_identity(files=files)
        #: of this CommitLog, new at each `begin`
        self.incarnation = 0
        #: why no role is granted any more; None: roles are granted
        self.poisoned: str | None = None

        self._synced = 0
        #: the end that Replication has published, or that was confirmed when the led epoch began: the next Replication
        #: begins there
        self._replicated = 0
        self._last_tick_ms = 0
        self._watch_from_ms = 0

        #: guards leases and grants. It is not held during a witness sync
        self._lock = threading.RLock()
        #: guards the ends. It is never held during a call that may take long
        self._ends_lock = threading.Lock()

    # --- supervising ------------------------------------------------------------------------------

    def fence_old(self, timeout_ms: int = KILL_TIMEOUT_MS) -> FenceReport:
        """Take over: kill every satellite that the previous CommitLog may have granted, and wait for its end.

        Callers: with the store's lock held, before recovery. A process that was never granted may live: it touches
        nothing until it is granted.
        Raises: Unavailable if one does not end in time. Nothing may be recovered then.
        """
        with self._lock:
            if self._wakeup is None:
                self._wakeup = Wakeup(
                    self._replica_dir, control_block.COMMIT_LOG, files=self._files
                )
                self.appends.wake = self._wakeup.wake

            if not self.control.valid(self._boot):
                # Another boot, or another layout: no live process was granted on this page.
                self.control.format(self._boot)
                return FenceReport([], 0, None)

            failed_sync_errno = 0
            unfinished: tuple[int, int] | None = None
            killed = []
            for role in control_block.ROLES:
                role_record = self.control.roles[role]
                role_record.revoke_grant()
                registration = role_record.registration()
                if registration and registration.incarnation == role_record.last_granted:
                    handle = ProcessHandle.open(registration.process, files=self._files)
                    if handle is not None:
                        _kill_and_wait(handle, role, timeout_ms)
                        killed.append(f"{role} {registration.process.pid}")

                # After its death: it may have begun a sync, or failed, in its last moment.
                failed_sync_errno = role_record.failure.value or failed_sync_errno
                token, started = role_record.sync_started
                synced = role_record.position(token)
                if started > synced:
                    start, stop = unfinished or (synced, started)
                    unfinished = (min(start, synced), max(stop, started))
                role_record.clear_counts()

            return FenceReport(killed, failed_sync_errno, unfinished)

    def begin(self, *, appended: int, synced: int, confirmed: int) -> None:
        """Start after recovery or a truncation: all progress counts from these three ends on.

        All that is appended must be in the files. No role may be granted: call `fence_old` or `revoke_all` before.
        """
        with self._lock:
            require(self._wakeup is not None, "begin before fence_old")
            for lease in self._leases.values():
                require(lease.vacant, "begin while a satellite is granted", role=lease.role)
                lease.suspended = False
            if self._rings is not None:
                self._rings.reset()

            bases = {"synced": synced, "committed": appended, "replicated": confirmed}
            for role, role_record in self.control.roles.items():
                role_record.clear(base=bases[control_block.ROLES[role].base])

            self.incarnation = new_incarnation()
            now_ms = self._clock.monotonic_ms()
            self._last_tick_ms = self._watch_from_ms = now_ms

            with self._ends_lock:
                self._synced, self._replicated = synced, confirmed
                self.control.begin(
                    self.incarnation,
                    self._process,
                    appended,
                    now_ms,
                    pooled=self._pooled,
                )
                self.appends.begin(appended)
            self.wake_all()

    def tick(self) -> None:
        """Supervise once: publish a heartbeat, poison after a failed sync, revoke stale leases, grant vacant ones.

        Callers: at each wakeup not about acks, and at least every 500 ms. May take as long as a witness sync, but
        never waits for a death. It holds no lock during that sync: a truncation may come in between.
        """
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            self.control.heartbeat_ms = now_ms
            if now_ms - self._last_tick_ms > STALE_MS // 2:
                # This process did not run for a while (machine paused or overloaded), so perhaps no other did.
                self._watch_from_ms = now_ms
            self._last_tick_ms = now_ms
            self._check_failures()
            for lease in self._leases.values():
                if lease.silent_ms(now_ms, self._watch_from_ms) > STALE_MS:
                    lease.revoke("stale")
                lease.check_exit()
        for lease in self._leases.values():
            self._grant_candidate(lease)

    def revoke(self, role: str, timeout_ms: int = KILL_TIMEOUT_MS) -> None:
        """Revoke the role's lease, and wait until its process has left it. The role is not granted until `begin`.

        A process that does not leave within LEAVE_TIMEOUT_MS is killed. So Ray, which would start the next one, is
        needed only then.

        For a truncation: `revoke_all`, cut, zero, sync, begin.
        Raises: Unavailable if the process does not end in time. The grant is revoked in any case.
        """
        with self._lock:
            lease = self._leases[role]
            lease.suspended = True
            lease.fence("revoked")
            self.appends.wake(role)
            if lease.wait_vacant(min(LEAVE_TIMEOUT_MS, timeout_ms)):
                return
            lease.kill()
            if not lease.wait_vacant(timeout_ms):
                raise Unavailable(
                    f"{role} did not end within {timeout_ms} ms of its kill; is the disk hanging?",
                    role=role,
                    timeout_ms=timeout_ms,
                )

    def revoke_all(self) -> None:
        """Revoke the lease of every role, for a truncation. Raises: Unavailable.

        After an error nothing may be cut, and the roles are granted again from the ends that are known.
        """
        try:
            for role in self.roles:
                self.revoke(role)
        except BaseException:
            with self._lock:
                for lease in self._leases.values():
                    lease.suspended = False
            raise

    def poison(self, reason: str) -> None:
        """Grant no role from now on. Bytes that the witness has not synced stay unacknowledged. Callers: any thread."""
        with self._lock:
            if self.poisoned is None:
                self.poisoned = reason
                self.control.state = control_block.State.POISONED
                for lease in self._leases.values():
                    lease.revoke("poisoned")
                # Wake the thread that waits for progress.
                self.appends.wake(control_block.COMMIT_LOG)

    def close(self) -> None:
        """Have the satellites finish and exit, and release the shared memory. No other thread may be calling."""
        with self._lock:
            # Before `begin` the page is another CommitLog's.
            if self.incarnation and self.poisoned is None:
                self.control.state = control_block.State.STOPPED
            self.wake_all()
            if self._wakeup is not None:
                self.appends.wake = wake_none
                self._wakeup.close()
                self._wakeup = None
            for lease in self._leases.values():
                lease.close()
            if self._rings is not None:
                self._rings.close()
            self.control.close()

    def publish_leadership(self, led: control_block.Leadership | None) -> None:
        """Let Replication serve an epoch, from its EPOCH record on; None: this replica follows. Callers: any thread."""
        if led is not None:
            with self._ends_lock:
                # While this replica followed, no Replication moved this end.
                self._replicated = max(self._replicated, led.confirmed)
        self.control.publish_leadership(led)
        if "replication" in self._leases:
            self.appends.wake("replication")

    def wake_commit_log(self) -> None:
        """End the wait of this process's own loop. Callers: any thread."""
        self.appends.wake(control_block.COMMIT_LOG)

    def wake_all(self) -> None:
        """Wake every role: the grant or the state has changed."""
        for role in self._leases:
            self.appends.wake(role)

    # --- puts and progress ------------------------------------------------------------------------

    def submit(self, number: int, end_offset: int, since_ms: int) -> bool:
        """Report puts that wait for replicas to Replication, after `appends.publish`. See ring.py.

        Returns: False if the ring is full. Report again later: each entry covers all puts before it.
        """
        if self._rings is None:
            raise broken("puts that wait for replicas, without Replication")
        return self._rings.requests.push((number, end_offset, since_ms))

    def wait(self, timeout_ms: int) -> bool:
        """Wait until a satellite wakes this process. Returns: whether one did. Check `progress` either way."""
        return self._wakeup is not None and self._wakeup.wait(timeout_ms)

    def progress(self) -> SatelliteProgress:
        """The progress of the satellites. No end ever falls between two `begin`s."""
        late: list[LatePuts] = []
        with self._ends_lock:
            # Each end is read after those that rely on it. Late puts were reported after the acknowledged end moved.
            # Acknowledged bytes were synced before, and synced bytes committed.
            if self._rings is not None:
                late = [
                    LatePuts(number, end, PutStatus.of_code(code))
                    for number, end, code in self._rings.late.take_all()
                ]
                self._replicated = max(self._replicated, self._leases["replication"].position)
            if self._flusher is not None:
                self._synced = max(self._synced, self._flusher.position)

            committed = self._read_committed()
            if not self._synced <= committed <= self.appends.appended:
                raise broken(
                    "synced beyond the committed end, or committed beyond the appended end",
                    synced=self._synced,
                    committed=committed,
                    appended=self.appends.appended,
                )

            return SatelliteProgress(self._ends(committed), late)

    def committed(self) -> int:
        """Everything below is in the log's files."""
        with self._ends_lock:
            return self._read_committed()

    def describe(self) -> dict[str, Any]:
        """Everything an operator may ask, as plain values."""
        with self._lock:
            appends = self.appends
            return {
                "incarnation": self.incarnation,
                "state": control_block.State(self.control.state).name,
                "poisoned": self.poisoned,
                **self._ends(appends.committed if self._pooled else appends.appended)._asdict(),
                "roles": {
                    role: lease.describe(self._clock.monotonic_ms())
                    for role, lease in self._leases.items()
                },
            }

    def works(self, role: str) -> bool:
        """Whether a process works in a role of this replica, as `tick` saw it last. Takes no lock."""
        lease = self._leases.get(role)
        return lease is not None and lease.fencing_token != 0

    def missing_roles(self) -> list[str]:
        """The roles without a process that works in them."""
        with self._lock:
            return [role for role, lease in self._leases.items() if not lease.fencing_token]

    def sync_latencies(self) -> Latencies:
        """How long the syncs of all flushers took since `fence_old`; empty without the role."""
        with self._lock:
            return (
                NO_LATENCIES if self._flusher is None else self._flusher.record.sync_latency.read()
            )

    # --- inside -----------------------------------------------------------------------------------

    def _ends(self, committed: int) -> Ends:
        """The ends as far as known. Without Replication the committed end counts as replicated, too."""
        replicated = committed if self._rings is None else self._replicated
        return Ends(self.appends.appended, committed, self._synced, replicated)

    def _read_committed(self) -> int:
        """The committed end as CommitRealTime last published it. Needs `_ends_lock`."""
        appends = self.appends
        if not self._pooled:
            return appends.appended
        committed = self._leases[control_block.COMMIT_REAL_TIME].record.committed
        appends.committed = max(appends.committed, committed)
        return appends.committed

    def _check_failures(self) -> None:
        for role in FLUSH_ROLES:
            errno = self.control.roles[role].failure.value
            if errno:
                self.poison(f"{role} could not sync the log (errno {errno})")

    def _grant_candidate(self, lease: Lease) -> None:
        """Grant the lease to the process that asks for it, if it may have it."""
        with self._lock:
            incarnation = self.incarnation
            candidate = lease.find_candidate() if incarnation and self.poisoned is None else None
        if candidate is None:
            return

        witnessed = 0
        if lease.role in FLUSH_ROLES:
            try:
                witnessed = self._witness_sync()
            except OSError as error:
                candidate.handle.close()
                self.poison(f"the witness sync before a new {lease.role} failed: {error}")
                return

        with self._lock:
            # The predecessor may have published a failure just before its end, after the check of this tick.
            self._check_failures()
            if incarnation != self.incarnation or lease.suspended or self.poisoned is not None:
                # The log was replaced, or soon will be: the witness sync says nothing about the new one.
                candidate.handle.close()
                return
            self._grant(lease, candidate, witnessed)

    def _grant(self, lease: Lease, candidate: Candidate, witnessed: int) -> None:
        """Grant a lease to a candidate. Needs `_lock`.

        Args: `witnessed`: for a flusher, the end that the witness has synced.
        """
        with self._ends_lock:
            # A predecessor has ended, so it publishes nothing more.
            committed = self._read_committed()
            if lease.role in FLUSH_ROLES:
                # The witness may have synced an append that is not published yet.
                self._synced = max(self._synced, min(witnessed, committed))
            ends = self._ends(committed)
        base = getattr(ends, control_block.ROLES[lease.role].base)
        lease.grant(candidate, base, self._clock.monotonic_ms())
        self.appends.wake(lease.role)


def _kill_and_wait(handle: ProcessHandle, role: str, timeout_ms: int) -> None:
    with contextlib.closing(handle):
        handle.kill()
        if not handle.wait_exit(timeout_ms):
            raise Unavailable(
                f"old {role} (pid {handle.identity.pid}) did not end within {timeout_ms} ms of its kill; "
                "is the disk hanging?",
                role=role,
                pid=handle.identity.pid,
            )
