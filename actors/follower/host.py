"""The CommitLog role of a follower: stores the leader's units, has them synced, and acknowledges them.

A follower serves no reads and takes no puts, because its leader is fixed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.replication.log_receiver import LogTail
from raymq.store.base.errors import RayMQError, Rejected, StorageFull, Unavailable, broken
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import own_durable
from raymq.store.engine.followed_log import FollowedLog
from raymq.store.log.chain import ChainUnit
from raymq.store.log.clean import CleanService
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest

from .follower import FollowerSession

logger = logging.getLogger("raymq.commit_log")

#: how long the ack loop sleeps while all is synced, and while it is not: a wakeup ends the sleep
IDLE_WAIT_MS = 200
BUSY_WAIT_MS = 10

#: a follower delivers no delayed messages. A leader keeps their records, as a rule for two days at most
RESERVED_HOURS_MIN = 72


class FollowerHost(ReplicaHost):
    """The follower of a shard: the log that `follower.FollowerSession` writes, and a `shard_api.ShardBackend`.

    One stream of the leader at a time holds the write lock. The ack loop wakes it after each sync.
    """

    mode = display_name = "follower"
    follows = True

    # Made by `_make_role_parts`:
    _followed: FollowedLog
    _session: FollowerSession

    def _elect(self) -> None:
        self.elections = self._make_elections()

    def _make_role_parts(self, undo: contextlib.ExitStack) -> None:
        followed = self.store.followed
        if followed is None:
            raise broken("a follower's store follows")
        self._followed = followed
        self._write_lock = threading.RLock()
        #: notified when the synced end has moved
        self._changed = threading.Condition()
        self._session = FollowerSession(self, self.identity_facts, self.elections)

    def _make_cleaner(self) -> CleanService:
        # No service that delivers delayed messages runs here to say which records it needs.
        return CleanService(
            self.log, self.store, flags=self.store.flags, reserved_hours_min=RESERVED_HOURS_MIN
        )

    # --- FollowerLog, as FollowerSession uses it --------------------------------------------------

    def append_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Append units verbatim and wake the flush service. Raises: Corrupt when a CRC differs."""
        with self._writing():
            self._followed.append_units(units, data)
            self._publish()

    def adopt_units(self, units: list[ChainUnit], data: memoryview) -> None:
        """Replace the chain from `units[0].start` on, and write the bytes after the log's end. Raises: Corrupt."""
        with self._writing():
            self._followed.adopt_units(units, data)
            self._publish()

    def same_until(self, units: list[ChainUnit], data: memoryview) -> int:
        """The first offset at which the bytes differ from this log's."""
        return self.log.same_until(units, data)

    def truncate(self, offset: int) -> None:
        """Cut the log, durably. The flush service is stopped before and granted again after. Raises: Corrupt."""
        with self._writing(), self._heartbeat.blocking_call():
            for role in self.supervisor.roles:
                self.supervisor.revoke(role)
            self._followed.truncate(offset)
            self._begin_satellites()

    def tail(self) -> LogTail:
        """The appended end, and the last unit's facts."""
        last = self.log.chain.last
        if last is not None and last.end != self.log.end:
            # An adoption was interrupted.
            self.log.complete_chain()
            last = self.log.chain.last
        return LogTail(self.log.end, self.log.chain.value, 0 if last is None else last.epoch)

    def chain_value_at(self, offset: int) -> int | None:
        """The chain value after the unit that ends at `offset`, or None if no unit ends there."""
        return self.log.chain.value_at(offset)

    def durable(self) -> int:
        """The durable end: everything below it is held here as durably as the flush mode asks."""
        return own_durable(self.config.flush, self.log.ends)

    def confirmed(self) -> int:
        """The confirmed end, as far as this follower knows."""
        return self.log.confirmed

    def advance_confirmed(self, confirmed: int) -> None:
        """Note the leader's confirmed end, as far as this log reaches."""
        if self.log.note_confirmed(min(confirmed, self.log.end)):
            self._dispatcher.wake()

    def wait_durable(self, offset: int, timeout_ms: int) -> int:
        """Wait until `durable() >= offset` or the time is up. Returns: the durable end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.durable() >= offset or self._stopping, timeout_ms / 1000
            )
        return self.durable()

    # --- ShardBackend -----------------------------------------------------------------------------

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """Serve one leader stream until it ends."""
        self._session.run(frames, send)

    def put(
        self,
        request: PutRequest,
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> PutTicket:
        """A follower takes no puts."""
        raise _takes_no_puts()

    def put_many(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """A follower takes no puts."""
        return [_takes_no_puts() for _ in requests]

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """A follower serves no reads."""
        raise Unavailable("this replica is a follower; read from the leader", field="mode")

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """describe and status only."""
        if op == "describe":
            return dict(self.identity_facts)
        if op == "status":
            return self.status()
        raise Rejected(f"a follower does not answer {op!r}", field="op", limit="describe, status")

    # --- loops ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Around a change of the log: status shows the error that refused the last one."""
        self.check_serving()
        with self._write_lock:
            try:
                yield
            except (OSError, StorageFull) as error:
                self.failures.note("append", error)
                raise
            self.failures.clear("append")

    def _publish(self) -> None:
        self.supervisor.appends.publish(self.log.end)
        self.supervisor.appends.wake_for_append()

    def _ack_step(self) -> None:
        self.supervisor.wait(BUSY_WAIT_MS if self.log.synced < self.log.end else IDLE_WAIT_MS)
        self.supervisor.tick()
        self._check_poisoned()
        synced = self.supervisor.progress().ends.synced
        if synced > self.log.synced:
            # Wake the stream that acknowledges syncs.
            with self._changed:
                self.log.note_synced(synced)
                self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> None:
        """Orderly stop: what is confirmed is dispatched, and everything is synced."""
        self._stop()
        with self._write_lock:
            try:
                self.store.close()
            except (OSError, RayMQError) as error:
                # As a crash leaves it: the next start recovers.
                logger.warning("the follower did not stop in order: %s", error)
                self.store.abandon()

    def _wake_threads(self) -> None:
        super()._wake_threads()
        with self._changed:
            self._changed.notify_all()


def _takes_no_puts() -> Unavailable:
    return Unavailable(
        "this replica is a follower; send to the leader",
        field="mode",
        status=PutStatus.SERVICE_NOT_AVAILABLE.value,
    )
