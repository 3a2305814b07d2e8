"""The log of a replica as the streams of its leader change it: the `FollowerLog` of `session.FollowerSession`.

It exists as long as the process does, because a leader learns from a stream that another replica leads now. It changes
nothing before this replica follows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.replication.log_receiver import LogTail
from raymq.store.base.errors import RayMQError, StorageFull, Unavailable
from raymq.store.config.promise import own_durable
from raymq.store.engine.followed_log import FollowedLog
from raymq.store.log.chain import ChainUnit

from .heard_ends import HeardEnds

logger = logging.getLogger("raymq.commit_log")

#: how long a change of the log waits until a leadership of this replica has ended
FOLLOW_WAIT_S = 3.0


class FollowerLogPort:
    """The log of one replica. Callers: one stream at a time changes it, the ack loop notes syncs, any thread reads."""

    def __init__(self, parts: ReplicaParts) -> None:
        self._log = parts.log
        self._store = parts.store
        self._guard = parts.log_guard
        self._supervisor = parts.supervisor
        self._heartbeat = parts.heartbeat
        self._dispatcher = parts.dispatcher
        self._serving = parts.serving
        self._failures = parts.failures
        self._clock = parts.clock
        self._flush = parts.config.flush
        #: the epoch of the frame that is being served
        self.frame_epoch: Callable[[], int] = int
        #: notified when the synced end has moved
        self._changed = threading.Condition()
        #: acknowledges a synced end at once, on the calling thread. Returns: whether it did
        self.acknowledge_synced: Callable[[], bool] = lambda: False
        #: the confirmed ends that the leader named
        self.heard = HeardEnds(self._begins_below)

    # --- changes ----------------------------------------------------------------------------------

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Append units verbatim and wake the flush service. Raises: Corrupt when a CRC differs."""
        with self._writing() as followed:
            followed.append_units(units, data, epoch=self.frame_epoch())
            self._publish()

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Replace the chain from `units[0].start` on, and write the bytes after the log's end. Raises: Corrupt."""
        with self._writing() as followed:
            followed.adopt_units(units, data, epoch=self.frame_epoch())
            self._publish()

    def truncate(self, offset: int) -> None:
        """Cut the log, durably. Raises: Corrupt."""
        with self._writing() as followed, self._guard.satellites_paused():
            followed.truncate(offset, epoch=self.frame_epoch())

    def begin_at(self, start: int, chain_value: int) -> None:
        """Let the empty log begin where the leader's does. Durable."""
        with self._writing(), self._guard.satellites_paused(), self._dispatcher.paused():
            self._store.begin_at(start, chain_value, epoch=self.frame_epoch())

    def advance_confirmed(self, confirmed: int) -> None:
        """Note the leader's confirmed end, as far as this log reaches."""
        if self._log.note_confirmed(min(confirmed, self._log.end)):
            self._dispatcher.wake()

    def note_heard(self, confirmed: int, epoch: int) -> None:
        """Note the confirmed end that the leader of an epoch named just now."""
        self.heard.note(confirmed, epoch, self._clock.monotonic_ms())

    def _begins_below(self, end: int, epoch: int) -> bool:
        """Whether an epoch begins in this log, below an end. Args: `epoch`: the newest one that this replica heard."""
        log = self._log
        if end >= log.end:
            return log.last_epoch == epoch
        # No unit has bytes of two epochs.
        unit = log.chain.unit_at(end - 1)
        return unit is not None and unit.epoch == epoch

    @contextlib.contextmanager
    def _writing(self) -> Iterator[FollowedLog]:
        """Around a change of the log: status shows the error that refused the last one."""
        self._serving.check()
        self._guard.await_follower(FOLLOW_WAIT_S)
        with self._guard.lock:
            followed = self._store.followed
            if followed is None or followed.ended:
                # Only a later epoch than this frame's can have been begun meanwhile.
                raise Unavailable("this replica leads a later epoch", field="role")
            try:
                yield followed
            except (OSError, StorageFull) as error:
                self._failures.note("append", error)
                raise
            self._failures.clear("append")

    def _publish(self) -> None:
        self._supervisor.appends.publish(self._log.end)
        self._supervisor.appends.wake_for_append()

    # --- reads ------------------------------------------------------------------------------------

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        """The first offset at which the bytes differ from this log's."""
        return self._log.same_until(units, data)

    def tail(self) -> LogTail:
        """The appended end, and the last unit's facts."""
        log = self._log
        # A leadership that begins meanwhile appends to the chain.
        with self._guard.lock:
            last = log.chain.last
            is_followed = self._store.followed is not None
            if is_followed and last is not None and last.end != log.end:
                # An adoption was interrupted.
                log.complete_chain()
                last = log.chain.last
            return LogTail(log.end, log.chain.value, 0 if last is None else last.epoch)

    def chain_value_at(self, offset: int) -> int | None:
        """The chain value after the unit that ends at `offset`, or None if no unit ends there."""
        return self._log.chain.value_at(offset)

    def is_empty(self) -> bool:
        """Whether the log has no byte, wherever it begins."""
        return self._log.is_empty

    def durable(self) -> int:
        """The durable end: everything below it is held here as durably as the flush mode asks."""
        return own_durable(self._flush, self._log.ends)

    def confirmed(self) -> int:
        """The confirmed end, as far as this follower knows."""
        return self._log.confirmed

    # --- syncs ------------------------------------------------------------------------------------

    def note_progress(self) -> bool:
        """Note how far the log is synced, and acknowledge that, or wake the thread that does. Callers: the ack loop.

        Returns: whether the synced end has moved.
        """
        lock = self._guard.lock
        # An end that was read before a truncation must not be noted after it.
        if not lock.acquire(blocking=False):
            # A stream may hold it while it writes to a slow disk.
            with self._heartbeat.blocking_call:
                lock.acquire()
        try:
            synced = self._supervisor.progress().ends.synced
            if synced <= self._log.synced:
                return False
            self._log.note_synced(synced)
        finally:
            lock.release()
        if not self.acknowledge_synced():
            with self._changed:
                self._changed.notify_all()
        return True

    def wait_durable(self, offset: int, timeout_ms: int) -> int:
        """Wait until `durable() >= offset`, the log is stopping, or the time is up. Returns: the durable end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.durable() >= offset or self._serving.is_stopping(), timeout_ms / 1000
            )
        return self.durable()

    def is_stopping(self) -> bool:
        """Whether the process is ending."""
        return self._serving.is_stopping()

    def wake(self) -> None:
        """Let the streams check whether the process is ending."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the store in order, after the change that is under way."""
        store = self._store
        with self._guard.lock:
            try:
                store.close()
            except (OSError, RayMQError) as error:
                # As a crash leaves it: the next start recovers.
                logger.warning("the follower did not stop in order: %s", error)
                store.abandon()
