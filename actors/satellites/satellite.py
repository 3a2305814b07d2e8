"""The part that every satellite process (flushers, replication) shares: attach, be granted, beat, publish, leave.

A satellite takes its role's lock, says "I am here" in its record and works only under a grant of CommitLog
(see supervisor.py). One life of a satellite serves one grant: when the grant is gone or CommitLog begins anew,
it leaves and its process exits, and Ray starts a new one. That keeps every file descriptor, buffer and count of
a satellite to one log and one generation.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from raymq.actors.shared.control_block import (
    ANNOUNCED_US,
    COMMIT_LOG,
    COMMIT_REAL_TIME,
    POLL_US,
    ControlBlock,
    Registration,
    State,
    shared_file,
)
from raymq.actors.shared.heartbeat import PERIOD_MS, HeartbeatWatch
from raymq.actors.shared.latency import SyncTimer
from raymq.actors.shared.processes import boot_id_hash, new_incarnation, own_identity
from raymq.actors.shared.retry_throttle import RetryThrottle
from raymq.actors.shared.ring import LatePuts, ReplicationRings, Request
from raymq.actors.shared.wakeup import Wakeup
from raymq.store.clock import Clock
from raymq.store.errors import Unavailable, require
from raymq.store.files import Files

log = logging.getLogger("raymq.satellite")

#: how often an attached satellite looks without a wakeup while nothing happens
IDLE_WAIT_MS = 400
#: how often a long call beats
HEART_PERIOD_MS = PERIOD_MS
#: how often a satellite without lock or store directory tries again
ATTACH_RETRY_MS = 200


class Standing(Enum):
    """What CommitLog's words say to this satellite."""

    #: not granted yet: touch nothing
    WAITING = "waiting"
    GRANTED = "granted"
    #: granted once, not any more: leave at once, publish nothing
    FENCED = "fenced"
    #: CommitLog closed in order: finish and leave
    STOPPED = "stopped"
    #: this satellite was told to stop
    LEAVING = "leaving"


class LongCall:
    """Around a call that may take long (a sync on a slow disk): a thread beats meanwhile.

    A slow disk is not a hung satellite; a stopped process does not beat either way. No generator: it stands between a
    put and its sync.
    """

    def __init__(self, satellite: Satellite) -> None:
        self._satellite = satellite
        #: now
        self.active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *exc: object) -> None:
        self.active = False
        self._satellite.beat()


class Satellite:
    """One life of one role. Callers: one thread; `stop` may come from any."""

    def __init__(self, replica_dir: str | Path, role: str, *, clock: Clock, files: Files) -> None:
        self._replica_dir = str(replica_dir)
        self._clock = clock
        self._files = files
        #: which role
        self.role = role
        #: this life
        self.incarnation = new_incarnation()
        #: the generation granted; 0 before
        self.generation = 0
        #: what was flushed (confirmed) when the grant was given
        self.base = 0
        #: what the lives before have counted
        self._count = 0
        self._commit_log_incarnation = 0
        self._boot = boot_id_hash(files=files)
        self._stopping = threading.Event()
        self._attached = False
        #: `with` it around a call that may take long
        self.long_call = LongCall(self)
        self._heart_stop = threading.Event()
        #: in vain where no put follows soon
        self._polls = RetryThrottle()

    def run_until_granted(self) -> Standing:
        """Attach and wait, however long, for the grant. Returns: GRANTED or LEAVING."""
        while not self._stopping.is_set():
            if not self._attached:
                try:
                    self.attach()
                except Unavailable:
                    # The store directory is not there yet, or the role's last process has not ended yet.
                    self._stopping.wait(ATTACH_RETRY_MS / 1000)
                    continue
            standing = self.standing()
            if standing is not Standing.WAITING:
                return standing
            self.wait(IDLE_WAIT_MS)
        return Standing.LEAVING

    def attach(self) -> None:
        """Take the lock, say "I am here", ring CommitLog. Raises: Unavailable: no store yet, or the lock is held."""
        if not self._files.exists(f"{self._replica_dir}/raymq"):
            raise Unavailable(f"{self._replica_dir} is not a store (yet)", path=self._replica_dir)
        with ExitStack() as undo:
            lock_fd = self._files.open_file(
                shared_file(self._replica_dir, f"{self.role}.lock"), create=True
            )
            undo.callback(self._files.close, lock_fd)
            self._files.lock(lock_fd)
            self._wakeup = Wakeup(self._replica_dir, self.role, files=self._files)
            undo.callback(self._wakeup.close)
            self._control = ControlBlock.open(
                shared_file(self._replica_dir, "control"), files=self._files
            )
            undo.callback(self._control.close)
            if self.role == "group_commit":
                # The one before us may have been killed while it looked: nobody would ring for us.
                self._control.polling = False
            if self.role == "replication":
                self._rings = ReplicationRings.open(
                    shared_file(self._replica_dir, "ring-replication"), files=self._files
                )
                undo.callback(self._rings.close)
            self._undo = undo.pop_all()
        self._record = self._control.roles[self.role]
        self._watch = HeartbeatWatch(self._control, files=self._files)
        registration = Registration(self.incarnation, own_identity(files=self._files))
        self._record.register(registration, self._clock.monotonic_ms())
        self._heartbeat = threading.Thread(target=self._run_heart, name="heartbeat", daemon=True)
        self._heartbeat.start()
        self._attached = True
        self._wakeup.wake(COMMIT_LOG)

    def standing(self) -> Standing:
        """What holds now; the first GRANTED also sets `generation` and `base`."""
        if self._stopping.is_set():
            return Standing.LEAVING
        generation, incarnation = self._record.grant
        granted = incarnation == self.incarnation and self._control.valid(self._boot)
        if not self.generation:
            if not granted:
                return Standing.WAITING
            self._commit_log_incarnation = self._control.incarnation
            self.base = self._record.base
            self._count = self._record.count
            # Read again: had the grant gone in between, these would be of another life.
            if self._record.grant != (generation, incarnation):
                return Standing.FENCED
            self.generation = generation
        if (
            not granted
            or generation != self.generation
            or self._control.incarnation != self._commit_log_incarnation
        ):
            return Standing.FENCED
        return Standing.STOPPED if self._control.state == State.STOPPED else Standing.GRANTED

    def wait(self, timeout_ms: int) -> bool:
        """Beat, then wait for the wakeup. Returns: whether it rang."""
        self.beat()
        return self._wakeup.wait(timeout_ms)

    def beat(self) -> None:
        """Say "I live"."""
        self._record.beat(self._clock.monotonic_ms())

    def pause(self, ms: int) -> None:
        """Let time pass, whatever rings. A stop ends it."""
        with self.long_call:
            self._stopping.wait(ms / 1000)

    @property
    def commit_log_incarnation(self) -> int:
        """The CommitLog that has granted this satellite."""
        self._require_granted()
        return self._commit_log_incarnation

    @property
    def appended(self) -> int:
        """Every byte below is in the log: in its files, or in the transient pool."""
        return self._control.appended

    @property
    def committed(self) -> int:
        """Every byte below is in the log's files."""
        return self._control.committed

    def await_append(self, flushed: int) -> None:
        """Look, without sleeping, for the bytes behind `flushed` that are announced, for ANNOUNCED_US at most.

        Callers: whoever comes first after an append: the flusher, or with the pool CommitRealTime (`flushed` is
        then what it has committed).
        """
        deadline = self._clock.monotonic() + ANNOUNCED_US / 1e6
        control = self._control
        while control.appending and control.appended <= flushed:
            os.sched_yield()
            if self._clock.monotonic() > deadline:
                return

    def poll_append(self, flushed: int) -> None:
        """Look, without sleeping, for the next append while its producer sends one put behind the other.

        Callers: GroupCommit, once after each sync; it must look once more before it sleeps. (A lost wakeup even
        so delays as any other.) For POLL_US at most: a core that sleeps in between wakes up slowly, here and for
        everybody else on it. Each look offers the core to whoever waits for it.
        """
        control = self._control
        if not control.announced or not self._polls.should_try():
            return
        deadline = self._clock.monotonic() + POLL_US / 1e6
        control.polling = True
        while control.appended <= flushed and self._clock.monotonic() <= deadline:
            os.sched_yield()
        control.polling = False
        self._polls.record(worked=control.appended > flushed)

    def position_of(self, role: str) -> int:
        """The end that another role has published under its present grant; 0 if it has none."""
        record = self._control.roles[role]
        generation, incarnation = record.grant
        return record.position(generation) if incarnation else 0

    def base_of(self, role: str) -> int:
        """The end that was flushed (confirmed) when another role was granted last."""
        return self._control.roles[role].base

    def take_requests(self) -> list[Request]:
        """The puts that CommitLog handed over since the last call. Callers: Replication."""
        if not self.generation:
            self._require_granted()
        return self._rings.take_requests()

    def report_late(self, late: LatePuts) -> bool:
        """Report puts that missed their deadline. Returns: False if the ring is full. Callers: Replication."""
        self._require_granted()
        return self._rings.report(late)

    def publish_sync_started(self, end_offset: int) -> None:
        """Before each sync."""
        if not self.generation:
            self._require_granted()
        self._record.publish_sync_started(self.generation, end_offset)

    def publish_position(self, end_offset: int) -> None:
        """After success, then ring CommitLog and, from a flusher, Replication, which combines."""
        if not self.generation:
            self._require_granted()
        self._record.publish_position(self.generation, end_offset)
        # It stops to watch before it looks the last time; a wakeup that is lost all the same only delays.
        self.wake_others(commit_log=not self._control.watching)

    def publish_failure(self, errno: int) -> None:
        """A sync failed: CommitLog must poison the replica."""
        self._require_granted()
        self._record.publish_failure(self.generation, errno)
        self.wake_others()

    def publish_count(self, syncs: int) -> None:
        """The total of this life, for metrics and status displays."""
        self._record.publish_count(self._count + syncs)

    def sync_timer(self) -> SyncTimer:
        """`publish_sync_started` and `publish_position` for a flusher, with the time between them counted."""
        return SyncTimer(
            self._record.sync_latency,
            self._clock,
            on_sync_started=self.publish_sync_started,
            on_flushed=self.publish_position,
        )

    def wake_others(self, *, commit_log: bool = True) -> None:
        """Ring CommitLog (after `report_late`), Replication unless we are it, and after a commit GroupCommit."""
        if self.role == COMMIT_REAL_TIME:
            self._wakeup.wake("group_commit")
        if commit_log:
            self._wakeup.wake(COMMIT_LOG)
        if self.role != "replication" and self._control.roles["replication"].granted:
            self._wakeup.wake("replication")

    def stop(self) -> None:
        """Make `standing` LEAVING and end the wait. Callers: any thread."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """End the wait: another thread of this process has something for it. Callers: any thread."""
        if self._attached:
            self._wakeup.wake_own()

    def close(self) -> None:
        """Let go of everything, the lock last."""
        if not self._attached:
            return
        self._attached = False
        self._heart_stop.set()
        self._heartbeat.join()
        self._undo.close()

    def _require_granted(self) -> None:
        require(self.generation != 0, "a satellite works without a grant", role=self.role)

    def _run_heart(self) -> None:
        while not self._heart_stop.wait(HEART_PERIOD_MS / 1000):
            if self.long_call.active:
                self.beat()
            try:
                self._watch.look(self._clock.monotonic_ms())
            except OSError as error:
                # No descriptor is free, for example: the next look tries again.
                log.warning("CommitLog could not be looked at: %s", error)
