"""The CommitLog role of a follower: stores the leader's units, has them synced, and acknowledges them.

It serves no reads and takes no puts; mirror mode has no failover.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.shared.failures import ActiveFailures
from raymq.actors.shared.heartbeat import Heartbeat
from raymq.actors.shared.loops import restart_may_help, retrying
from raymq.actors.shared.maintenance import Maintenance
from raymq.actors.supervise.supervisor import Supervisor
from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import Corrupt, RayMQError, Rejected, StorageFull, Unavailable
from raymq.store.files import Files
from raymq.store.log.chain import ChainUnit
from raymq.store.log.clean import CleanService
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.scrub import scrub_of_log
from raymq.store.promise import own_durable
from raymq.store.requests import FetchRequest, FetchSlice, PutRequest
from raymq.store.running_flags import RunningFlags
from raymq.store.status import PutStatus

from .follower import FollowerSession

logger = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps while all is synced, and while it is not: a wakeup ends the sleep
IDLE_WAIT_MS = 200
BUSY_WAIT_MS = 10

#: a follower does not know which messages are delayed; a leader keeps them, as a rule for two days at most
RESERVED_HOURS_MIN = 72


class FollowerHost:
    """The follower of a shard: the log that `follower.FollowerSession` writes, and a `shard_api.ShardBackend`.

    One stream of the leader at a time holds the writer lock; the ack loop wakes it after each sync.
    """

    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        *,
        identity: dict[str, Any],
        roles: tuple[str, ...],
        files: Files | None = None,
        clock: Clock | None = None,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        """Args: give_up: as of `LeaderHost`."""
        files = files or Files()
        self.identity_facts = identity
        self.config = config
        self.clock = clock or Clock()
        #: why this follower has stopped writing; None: it has not
        self.failed: RayMQError | None = None
        #: operations that fail at present and are tried again
        self.failures = ActiveFailures()
        self._give_up = give_up
        self._stopping = False
        self._writer = threading.RLock()
        self._changed = threading.Condition()
        self.supervisor = Supervisor(
            root, roles, clock=self.clock, files=files, witness_sync=self._witness_sync
        )
        self._heartbeat = Heartbeat(self.supervisor.control, files=files)
        try:
            self.log = self._open_log(root, identity, files)
        except BaseException:
            self._heartbeat.stop()
            self.supervisor.close()
            raise
        # A constructor that fails is called again later. It must find the log released.
        with contextlib.ExitStack() as undo:
            undo.callback(self.log.abandon)
            undo.callback(self.supervisor.close)
            undo.callback(self._heartbeat.stop)
            self._make_parts(identity)
            undo.callback(self._end_threads)
            for thread in self._threads:
                thread.start()
            undo.pop_all()

    def _make_parts(self, identity: dict[str, Any]) -> None:
        """Everything that works on the open log. The threads are not started yet."""
        config = self.config
        self.log.on_poisoned = self.supervisor.poison
        self._session = FollowerSession(self, identity)
        self._maintenance = Maintenance(
            CleanService(
                self.log, self, flags=RunningFlags(), reserved_hours_min=RESERVED_HOURS_MIN
            ),
            clock=self.clock,
            interval_ms=config.clean_resource_interval_ms,
        )
        # Damage that the scrub finds is logged and counted; the follower continues.
        self.scrub = scrub_of_log(self.log, on_fault=lambda fault: logger.error("%s", fault))
        self._threads = self._make_threads()

    def _make_threads(self) -> list[threading.Thread]:
        def stopping() -> bool:
            return self._stopping

        bodies: dict[str, Callable[[], None]] = {
            "acks": retrying(
                "acks", self._run_acks, stopping=stopping, failures=self.failures, fail=self._fail
            ),
            "allocate": lambda: self.log.allocate_ahead().run(stopping),
            "maintenance": lambda: self._maintenance.run(stopping),
        }
        if self.config.scrub_bytes_per_s:
            bodies["scrub"] = lambda: self.scrub.run(stopping)
        return [
            threading.Thread(target=body, name=f"raymq-{name}", daemon=True)
            for name, body in bodies.items()
        ]

    def _open_log(self, root: Path, identity: dict[str, Any], files: Files) -> CommitLog:
        """Take over from the process before, recover, begin."""
        log = CommitLog(
            root,
            self.config,
            files=files,
            clock=self.clock,
            identity={
                "cluster_id": identity["cluster_id"],
                "shard": identity["shard"],
                "replica": identity.get("replica", 1),
            },
        )
        try:
            fenced = self.supervisor.fence_old()
            self._heartbeat.start()
            if fenced.failed_sync_errno:
                raise Corrupt(
                    f"a sync of {root} failed (errno {fenced.failed_sync_errno}) before the restart; "
                    "rebuild this replica",
                    path=str(root),
                    rule="poisoned",
                )
            last = log.queue.files[-1].start if log.queue.files else 0
            synced = log.synced - log.synced % self.config.segment_size_bytes
            log.recover(max(log.start, min(last, synced)))
            if fenced.unfinished_sync is not None:
                log.rewrite(fenced.unfinished_sync[0])
            log.sync()
            self.supervisor.begin(log.end, log.synced, log.confirmed)
        except BaseException:
            log.abandon()
            raise
        return log

    # --- FollowerLog, as FollowerSession uses it ------------------------------------------------------------

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Append units verbatim and wake the flush service."""
        self._check_serving()
        with self._writer, self._writing():
            self.log.append_units(units, data)
            self.supervisor.appends.publish(self.log.end)
            self.supervisor.appends.wake_for_append()

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Replace the chain by the leader's units, whose bytes are the same."""
        self._check_serving()
        with self._writer, self._writing():
            self.log.adopt_units(units, data)
            self.supervisor.appends.publish(self.log.end)
            self.supervisor.appends.wake_for_append()

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        """Where the bytes first differ from this log's."""
        return self.log.same_until(units, data)

    def truncate(self, offset: int) -> None:
        """Cut the log. The flush service is stopped before and granted again after."""
        self._check_serving()
        with self._writer, self._writing(), self._heartbeat.blocking_call():
            for role in self.supervisor.roles:
                self.supervisor.revoke(role)
            self.log.truncate(offset)
            self.supervisor.begin(self.log.end, self.log.synced, self.log.confirmed)

    def end(self) -> tuple[int, int, int]:
        """(appended end, last chain value, last epoch)."""
        last = self.log.chain.last
        if last is not None and last.end != self.log.end:
            # An adoption was interrupted.
            self.log.complete_chain()
            last = self.log.chain.last
        return self.log.end, self.log.chain.value, 0 if last is None else last.epoch

    def chain_at(self, offset: int) -> tuple[int, int] | None:
        """(chain value, epoch) of the unit that ends at `offset`; None where no unit ends there."""
        return self.log.chain.value_at(offset)

    def synced(self) -> int:
        """Everything below is held here as durably as the flush mode asks."""
        return own_durable(self.config.flush, self.log.ends)

    def confirmed(self) -> int:
        """The confirmed end, as far as this follower knows."""
        return self.log.confirmed

    def advance_confirmed(self, confirmed: int) -> None:
        """Note the leader's confirmed end, as far as this log reaches."""
        self.log.note_confirmed(min(confirmed, self.log.end))

    def wait_synced(self, offset: int, timeout_ms: int) -> int:
        """Wait until `synced() >= offset` or the time is up. Returns: the synced end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.synced() >= offset or self._stopping, timeout_ms / 1000
            )
        return self.synced()

    # --- for CleanService -------------------------------------------------------------------------------------

    def deletable_end(self) -> int:
        """The confirmed end: the leader sends nothing below it again."""
        return self.log.confirmed

    def forget_before(self, start: int) -> None:
        """A follower has no readers."""

    def delete_derived(self, start: int) -> None:
        """Delete the chain below `start`. There are no consume queues."""
        with self._writer:
            self.log.chain.delete_before(start)

    # --- ShardBackend ---------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Cluster id, shard and this process's incarnation."""
        return dict(self.identity_facts)

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """Serve one leader stream until it ends."""
        self._session.run(frames, send)

    def put(
        self, request: PutRequest, notify: Callable[[], None] | None = None, *, alone: bool = False
    ) -> PutTicket:
        """A follower takes no puts."""
        raise Unavailable(
            "this replica is a follower; send to the leader",
            field="mode",
            status=PutStatus.SERVICE_NOT_AVAILABLE.value,
        )

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """A mirror's follower serves no reads."""
        raise Unavailable("this replica is a follower; read from the leader", field="mode")

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """describe and status only."""
        if op == "describe":
            return dict(self.identity_facts)
        if op == "status":
            return self.status()
        raise Rejected(f"a follower does not answer {op!r}", field="op", limit="describe, status")

    # --- loops ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Around a change of the log: status shows the error that refused the last one."""
        try:
            yield
        except (OSError, StorageFull) as error:
            self.failures.note("append", error)
            raise
        self.failures.clear("append")

    def _run_acks(self) -> None:
        iterations = 0
        try:
            while not self._stopping:
                self._heartbeat.note_iteration()
                self.supervisor.wait(
                    BUSY_WAIT_MS if self.log.synced < self.log.end else IDLE_WAIT_MS
                )
                self.supervisor.tick()
                if self.supervisor.poisoned is not None:
                    self.log.poison(self.supervisor.poisoned)
                if self.log.poisoned is not None:
                    # Where no sync has failed, the next start cuts off a failed append that could not be undone.
                    raise Unavailable(self.log.poisoned, field="store", status="poisoned")
                self._note_synced()
                iterations += 1
                if iterations > 1:
                    self.failures.clear("acks")
        finally:
            self._heartbeat.loop_ended()

    def _note_synced(self) -> None:
        """Wake the stream that acknowledges syncs, if the synced end has moved."""
        synced = self.supervisor.progress().ends.synced
        if synced > self.log.synced:
            with self._changed:
                self.log.note_synced(synced)
                self._changed.notify_all()

    def _fail(self, error: RayMQError) -> None:
        """A part of the process is dead, as in `LeaderHost._fail`."""
        if self._stopping or self.failed is not None:
            return
        self.failed = error
        logger.error("the follower stops writing: %s", error)
        sync_failed = self.log.sync_failed or self.supervisor.poisoned is not None
        if self._give_up is not None and restart_may_help(error, sync_failed=sync_failed):
            self._give_up(str(error))

    def _witness_sync(self) -> int:
        with self._heartbeat.blocking_call():
            return self.log.sync()

    def _check_serving(self) -> None:
        if self.failed is not None or self._stopping:
            raise Unavailable(
                f"the follower stopped writing: {self.failed or 'stopping'}", field="shard"
            )

    @property
    def state(self) -> str:
        """RUNNING, or READ_ONLY when the leader's units are refused."""
        return "RUNNING" if self.failed is None and self.log.poisoned is None else "READ_ONLY"

    @property
    def cause(self) -> str | None:
        """Why units are refused, or which operations fail at present; None: none."""
        if self.failed is not None:
            return str(self.failed)
        return "; ".join(filter(None, (self.log.poisoned or "", str(self.failures)))) or None

    def status(self) -> dict[str, Any]:
        """Ends and satellites, for status displays."""
        recovered = self.log.recovered
        return {
            **self.identity_facts,
            "mode": "follower",
            "state": self.state,
            "error": self.cause,
            "failures": self.failures.as_status(),
            "appended": self.log.end,
            "synced": self.log.synced,
            "confirmed": self.log.confirmed,
            "recovery": None if recovered is None else {"row": recovered.row, "end": recovered.end},
            "scrub": self.scrub.status(),
            "roles": self.supervisor.describe(),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop. `abort` stays, so that a MessageStore that opens this store builds the consume queues."""
        self._end_threads()
        self._heartbeat.stop()
        self.supervisor.close()
        with contextlib.suppress(OSError, Corrupt), self._writer:
            self.log.close(clean=False)

    def _end_threads(self) -> None:
        """Stop the service loops that were started, and the streams that wait for a sync."""
        self._stopping = True
        self._maintenance.wake()
        self.scrub.wake()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)
