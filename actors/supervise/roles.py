"""The roles of one replica: which one it has, and how it changes from one to the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from raymq.actors.api.shard_api import Frames, SendFrame
from raymq.actors.shared.control_block import Leadership
from raymq.replication.election_events import CopyLog
from raymq.replication.wire import AppendEntries

from .led_epoch import LedEpoch
from .replica_parts import ReplicaParts
from .role import ReplicaRole
from .service_threads import join_all, make_threads, run_retried

logger = logging.getLogger("raymq.commit_log")

#: how long the end of a role waits for its threads
ROLE_END_S = 2.0


class LeaderStreams(Protocol):
    """The follower's side of replication: `follower.session.FollowerSession`."""

    def run(self, frames: Frames, send: SendFrame) -> None:
        """Serve one stream of a leader until it ends."""

    def take_copied(self, offer: CopyLog, message: AppendEntries, data: memoryview) -> None:
        """Take bytes of a log that cannot lead. Raises: RayMQError, OSError when they may not, or cannot, be taken."""

    def matched(self) -> tuple[int, int]:
        """Up to where the log equals that of a leader, and the epoch of that leader."""


class LeaderMaker(Protocol):
    """Makes the role of a leader."""

    def __call__(
        self, parts: ReplicaParts, led: Leadership | None, *, led_from_nothing: bool
    ) -> ReplicaRole:
        """Make the role.

        Args: `led`: the epoch; None: the disk delays that of a sole candidate.
        `led_from_nothing`: the log was empty when it began.
        """


class RoleClasses(NamedTuple):
    """What the roles of a replica are made of. They are in packages above this one."""

    leader: LeaderMaker
    follower: Callable[[ReplicaParts], ReplicaRole]
    streams: Callable[[ReplicaParts], LeaderStreams]


class Roles:
    """The role of one replica. Callers: the ack loop changes it; any thread reads."""

    def __init__(self, parts: ReplicaParts, epoch: LedEpoch, classes: RoleClasses) -> None:
        """Begin the first role, without its threads."""
        self._parts = parts
        self._epoch = epoch
        self._classes = classes
        #: the threads of `role`
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

        # Only the disk may delay the epoch of a sole candidate. Until then it serves reads, as a leader.
        leads = epoch.led is not None or parts.options.is_sole_candidate
        self.role: ReplicaRole = self._make_leader() if leads else self._make_follower()
        parts.dispatcher.linger_s = self.role.dispatch_linger_s
        parts.maintenance.cleaner = self.role.make_cleaner()

    @property
    def led(self) -> Leadership | None:
        """The epoch that this replica leads; None: it follows."""
        return self._epoch.led

    @property
    def mode(self) -> str:
        """ "leader" or "follower"."""
        return "follower" if self._epoch.is_over() else self.role.mode

    # --- changes ----------------------------------------------------------------------------------

    def adapt(self) -> None:
        """Lead or follow, as the elections have decided. Callers: the ack loop."""
        parts, epoch = self._parts, self._epoch
        if epoch.is_over():
            self._follow()
        if epoch.led is not None:
            return
        if parts.elections.elected_epoch is not None:
            self._lead()
            return
        # An epoch that could not begin is over now.
        epoch.forget()
        if parts.store.followed is not None and parts.store.followed.ended:
            with parts.dispatcher.paused():
                parts.store.follow()

    def _lead(self) -> None:
        """Begin the epoch that this replica was elected to lead, and take puts."""
        parts, epoch = self._parts, self._epoch
        if not epoch.may_try:
            return
        # All that was written for earlier leaders is in the log, and nothing more comes: `CommitLog.epoch_floor`.
        with parts.heartbeat.blocking_call, parts.log_guard.lock:
            with parts.dispatcher.paused(), parts.log_guard.satellites_paused_for_cut():
                epoch.begin()
            if epoch.led is None:
                return
            parts.supervisor.appends.publish(parts.log.end)
        parts.supervisor.wake_all()
        self._change(self._make_leader)
        epoch.publish()
        logger.info("this replica leads epoch %d", epoch.led.epoch)

    def _follow(self) -> None:
        """Let another replica write the log. The puts under way are unknown."""
        self._epoch.end()
        self._change(self._make_follower, before=self._parts.store.follow)
        logger.info("this replica follows; epoch %d", self._parts.elections.epoch)

    def _make_leader(self) -> ReplicaRole:
        epoch = self._epoch
        return self._classes.leader(self._parts, epoch.led, led_from_nothing=epoch.led_from_nothing)

    def _make_follower(self) -> ReplicaRole:
        return self._classes.follower(self._parts)

    def _change(
        self, make: Callable[[], ReplicaRole], before: Callable[[], None] | None = None
    ) -> None:
        """End the present role, and begin another one. Args: `before`: called between the two."""
        parts = self._parts
        self.role.stop()
        # Before the threads are awaited: no client needs to wait for them.
        self.role.answer_waiting()
        self.end_threads()
        for part in ("lead", "append"):
            parts.failures.clear(part)
        self.role.end()
        if before is not None:
            with parts.dispatcher.paused():
                before()
        self.role = make()
        parts.dispatcher.linger_s = self.role.dispatch_linger_s
        parts.log_guard.wake()
        parts.maintenance.cleaner = self.role.make_cleaner()
        self.start_threads()
        parts.dispatcher.wake_readers()

    # --- threads ----------------------------------------------------------------------------------

    def start_threads(self) -> None:
        """Start the service loops of the present role."""
        parts, self._ended = self._parts, threading.Event()
        self._threads = make_threads(
            {
                name: partial(
                    run_retried,
                    name,
                    body,
                    serving=parts.serving,
                    failures=parts.failures,
                    ended=self._ended,
                )
                for name, body in self.role.loops().items()
            }
        )
        for thread in self._threads:
            thread.start()

    def end_threads(self) -> None:
        """End the service loops of the present role."""
        self._ended.set()
        self.role.stop()
        join_all(self._threads, ROLE_END_S)
