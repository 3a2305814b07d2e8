"""The common part of every satellite process: attach, wait for the grant, heartbeat, publish, exit.

A satellite takes its role's lock, registers in its record, and works only under a grant of CommitLog (see
supervise/supervisor.py). One `Satellite` serves one grant. When the grant is revoked or CommitLog begins again, it
ends, and another one takes its place: in the same process, or in one that Ray starts. So every file descriptor, buffer
and count belongs to one log and one grant.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from raymq.actors.shared import control_block
from raymq.actors.shared.append_wakeups import AppendWaiter
from raymq.actors.shared.heartbeat import PERIOD_MS, HeartbeatMonitor
from raymq.actors.shared.processes import ProcessHandle, new_incarnation, own_identity
from raymq.actors.shared.ring import ReplicationRings
from raymq.actors.shared.wakeup import Wakeup
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable, broken
from raymq.store.base.files import Files
from raymq.store.base.slow_calls import SLOW_S, SlowCalls

logger = logging.getLogger("raymq.satellite")

#: how often an attached satellite checks for work without a wakeup while there is none
IDLE_WAIT_MS = 800
#: how often the heartbeat thread runs
HEARTBEAT_PERIOD_MS = PERIOD_MS
#: how often a satellite without lock or store directory tries again
ATTACH_RETRY_MS = 200


class GrantStatus(Enum):
    """Whether this satellite may work, as the control block says."""

    #: not granted yet: touch nothing
    WAITING = "waiting"
    GRANTED = "granted"
    #: granted once, not any more: exit at once, publish nothing
    FENCED = "fenced"
    #: CommitLog closed in order: finish and exit
    STOPPED = "stopped"
    #: `stop` was called
    LEAVING = "leaving"


class BlockingCall:
    """Around a call that may block for long (a sync on a slow disk): a thread publishes heartbeats during the call.

    A slow disk is not a hung satellite. A stopped process has no heartbeat either way. This is not a generator,
    because it is on the path between a put and its sync. Callers: one thread at a time.
    """

    def __init__(self, satellite: Satellite) -> None:
        self._satellite = satellite
        #: whether a blocking call is under way
        self.active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *exc: object) -> None:
        self.active = False
        self._satellite.beat()


class Satellite:
    """One process in one role, for one grant. Callers: one thread; `stop` and `wake` may come from any."""

    # Made by `attach`:
    _wakeup: Wakeup
    _control: control_block.ControlBlock
    #: the role's fields in the control block
    _record: control_block.RoleRecord
    _monitor: HeartbeatMonitor
    _heartbeat: threading.Thread
    #: releases all of it
    _undo: ExitStack
    #: polls for appends instead of sleeping, if that pays
    appends: AppendWaiter
    #: the puts that wait for replicas; only of the role "replication"
    rings: ReplicationRings

    def __init__(self, replica_dir: str | Path, role: str, *, clock: Clock, files: Files) -> None:
        self._replica_dir = str(replica_dir)
        self._clock = clock
        self._files = files

        #: a key of control_block.ROLES
        self.role = role
        self.incarnation = new_incarnation()
        #: the fencing token of the grant, or 0 before it
        self.fencing_token = 0
        #: the synced (committed, acknowledged) end when the grant was given
        self.base = 0
        #: syncs (commits, frames) that earlier processes have counted
        self._count = 0
        #: the CommitLog that has granted this satellite, or 0 before
        self.commit_log_incarnation = 0

        self._boot = files.boot_id_hash()
        #: the process of CommitLog, while it leads
        self._commit_log: ProcessHandle | None = None
        self._sync_began_s = 0.0
        self._slow_syncs = SlowCalls("a sync", logger, clock)
        self._stopping = threading.Event()
        self._attached = False
        #: FlushRealTime flushes at wakeups, too
        self.wakes_flush_real_time = False
        #: of the options that `take_options` has returned last
        self._options_version = -1
        #: `with` it around a call that may block for long
        self.blocking_call = BlockingCall(self)
        self._heartbeat_stop = threading.Event()

    def await_grant(self) -> GrantStatus:
        """Attach and wait, however long, for the grant. Returns: GRANTED or LEAVING."""
        while not self._stopping.is_set():
            if not self._attached:
                try:
                    self.attach()
                except Unavailable:
                    # The store directory is not there yet, or the role's last process has not ended yet.
                    self._stopping.wait(ATTACH_RETRY_MS / 1000)
                    continue
            status = self.grant_status()
            if status is not GrantStatus.WAITING:
                return status
            self.wait(IDLE_WAIT_MS)
        return GrantStatus.LEAVING

    def attach(self) -> None:
        """Take the lock, register, wake CommitLog. Raises: Unavailable: no store yet, or the lock is held."""
        if not self._files.exists(f"{self._replica_dir}/raymq"):
            raise Unavailable(f"{self._replica_dir} is not a store (yet)", path=self._replica_dir)

        with ExitStack() as undo:
            lock_fd = self._files.open_file(
                control_block.shared_file(self._replica_dir, f"{self.role}.lock"), create=True
            )
            undo.callback(self._files.close, lock_fd)
            self._files.lock(lock_fd)

            self._wakeup = Wakeup(self._replica_dir, self.role, files=self._files)
            undo.callback(self._wakeup.close)
            self._control = control_block.ControlBlock.open(
                control_block.shared_file(self._replica_dir, "control"), files=self._files
            )
            undo.callback(self._control.close)

            if self.role == "replication":
                self.rings = ReplicationRings.open(
                    control_block.shared_file(self._replica_dir, "ring-replication"),
                    files=self._files,
                )
                undo.callback(self.rings.close)
            self._undo = undo.pop_all()

        self.appends = AppendWaiter(self._control, clock=self._clock)
        self._record = self._control.roles[self.role]
        self._monitor = HeartbeatMonitor(self._control, files=self._files)

        registration = control_block.Registration(self.incarnation, own_identity(files=self._files))
        self._record.register(registration, self._clock.monotonic_ms())
        self._heartbeat = threading.Thread(
            target=self._run_heartbeat, name="heartbeat", daemon=True
        )
        self._heartbeat.start()
        self._attached = True
        self._wakeup.wake(control_block.COMMIT_LOG)

    def grant_status(self) -> GrantStatus:
        """The present status. The first GRANTED also sets `fencing_token` and `base`."""
        if self._stopping.is_set():
            return GrantStatus.LEAVING

        token, incarnation = self._record.grant
        granted = incarnation == self.incarnation and self._control.valid(self._boot)
        if not self.fencing_token:
            if not granted:
                return GrantStatus.WAITING
            self.commit_log_incarnation = self._control.incarnation
            self.base = self._record.base
            self._count = self._record.count
            # Read again: if the grant has changed in between, these fields belong to another grant.
            if self._record.grant != (token, incarnation):
                return GrantStatus.FENCED
            self.fencing_token = token

        if (
            not granted
            or token != self.fencing_token
            or self._control.incarnation != self.commit_log_incarnation
        ):
            return GrantStatus.FENCED

        stopped = self._control.state == control_block.State.STOPPED
        return GrantStatus.STOPPED if stopped else GrantStatus.GRANTED

    def wait(self, timeout_ms: int) -> bool:
        """Publish a heartbeat, then wait for a wakeup. Returns: whether the wait ended before the timeout."""
        self.beat()
        return self._wakeup.wait(timeout_ms)

    def beat(self) -> None:
        """Publish a heartbeat."""
        self._record.heartbeat_ms = self._clock.monotonic_ms()

    def pause(self, ms: int) -> None:
        """Sleep through wakeups. A stop ends it."""
        with self.blocking_call:
            self._stopping.wait(ms / 1000)

    def take_options(self) -> dict[str, int] | None:
        """The options that were changed while the store was open; None: as at the last call."""
        version = self._control.options_version
        if version == self._options_version:
            return None
        self._options_version = version
        return self._control.changed_options()

    @property
    def appended(self) -> int:
        """Every byte below is in the log: in its files, or in the transient pool."""
        return self._control.appended

    @property
    def committed(self) -> int:
        """Every byte below is in the log's files."""
        return self._control.committed

    @property
    def leadership(self) -> control_block.Leadership | None:
        """The epoch that this replica leads; None: it follows, or the process that led has ended."""
        led = self._control.leadership
        if led is None:
            # A Replication that serves no epoch does not look at that process. If the process stayed watched, every
            # wait would end at once after its end.
            self._close_commit_log()
            return None
        return None if self.commit_log_ended() else led

    def commit_log_ended(self) -> bool:
        """Whether the process of the CommitLog that has granted this satellite is gone."""
        process = self._control.process
        if self._commit_log is None or self._commit_log.identity != process:
            self._close_commit_log()
            self._commit_log = ProcessHandle.open(process, files=self._files)
            if self._commit_log is not None:
                # The followers elect as soon as Replication reports its end.
                self._wakeup.watch(self._commit_log.pidfd)
        if self._commit_log is None:
            return True
        if not self._commit_log.exited():
            return False
        # If it stayed watched, every wait would end at once.
        self._close_commit_log()
        return True

    def _close_commit_log(self) -> None:
        if self._commit_log is not None:
            self._wakeup.unwatch(self._commit_log.pidfd)
            self._commit_log.close()
            self._commit_log = None

    def publish_follower(self, replica: int, progress: control_block.FollowerProgress) -> None:
        """Report how far a follower is. Callers: Replication."""
        self._control.followers[replica].write(progress)

    def end_of(self, role: str) -> int:
        """The end that another role has published under its present grant, else the base of its last grant."""
        record = self._control.roles[role]
        token, incarnation = record.grant
        return max(record.base, record.position(token) if incarnation else 0)

    def publish_sync_started(self, end_offset: int) -> None:
        """Publish the end of the sync that begins now. Callers: a flusher."""
        self._record.publish_sync_started(self.fencing_token, end_offset)
        self._sync_began_s = self._clock.monotonic()

    def publish_synced(self, end_offset: int) -> None:
        """Publish the synced end, then record how long the sync took."""
        took_s = self._clock.monotonic() - self._sync_began_s
        self.publish_position(end_offset)
        self._record.sync_latency.add(took_s)
        if took_s > SLOW_S:
            self._record.slow_count += 1
            self._slow_syncs.note(took_s, f"{self.role}, up to {end_offset}")
        logger.debug("%s: synced up to %d in %.1f ms", self.role, end_offset, took_s * 1000)

    def publish_position(self, end_offset: int) -> None:
        """Publish this role's end, then wake the processes that wait for it."""
        if not self.fencing_token:
            raise broken("a satellite works without a grant", role=self.role)
        self._record.publish_position(self.fencing_token, end_offset)
        # CommitLog stops polling before its last check. A wakeup lost in between only delays.
        self.wake_others(commit_log=not self._control.commit_log_polls)

    def publish_failure(self, errno: int) -> None:
        """A sync failed: CommitLog must poison the replica."""
        self._record.publish_failure(self.fencing_token, errno)
        self.wake_others()

    def publish_count(self, syncs: int) -> None:
        """The count of this process so far, for metrics and status displays."""
        self._record.count = self._count + syncs

    def wake_others(self, *, commit_log: bool = True) -> None:
        """Wake the running processes that wait for this one. Args: `commit_log`: whether CommitLog is one of them."""
        for role in control_block.ROLES[self.role].wakes:
            if role == control_block.COMMIT_LOG:
                needs_wakeup = commit_log
            elif role == "replication":
                # It is idle while its replica follows.
                needs_wakeup = self._control.leads
            elif role == control_block.FLUSH_REAL_TIME and not self.wakes_flush_real_time:
                needs_wakeup = False
            else:
                needs_wakeup = self._control.roles[role].granted
            if needs_wakeup:
                self._wakeup.wake(role)

    def stop(self) -> None:
        """Make the status LEAVING and end the wait. Callers: any thread."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """End the wait: another thread of this process has work for it. Callers: any thread."""
        if self._attached:
            self._wakeup.wake(self.role)

    def close(self) -> None:
        """Release everything, the lock last."""
        if not self._attached:
            return
        self._attached = False
        self._heartbeat_stop.set()
        self._heartbeat.join()
        self._close_commit_log()
        self._undo.close()

    def _run_heartbeat(self) -> None:
        while not self._heartbeat_stop.wait(HEARTBEAT_PERIOD_MS / 1000):
            if self.blocking_call.active:
                self.beat()
            try:
                self._monitor.check(self._clock.monotonic_ms())
            except OSError as error:
                # No descriptor is free, for example: the next check tries again.
                logger.warning("CommitLog's heartbeat could not be checked: %s", error)
