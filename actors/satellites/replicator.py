"""The Replication role on the leader's side: sends log bytes to the follower, and combines futures.

A satellite like the flushers: it works under CommitLog's grant, follows the chain and reads the log. `MirrorLeader`
says how far the follower is. `PutCombiner` combines that with the leader's own ends into the outcomes of the puts that
wait for replicas. Its acknowledged end is the position that Replication publishes. CommitLog acknowledges these puts by
it and shows records to readers up to it, because both are one row of store/config/promise.py. Late puts are reported as
entries. Nothing here must survive: a new process finds the match again, and CommitLog answers the puts that a dead one
left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raymq.actors.shared.control_block import FLUSHERS
from raymq.actors.shared.failures import FailureFile
from raymq.replication import mirror
from raymq.replication.combiner import PutCombiner
from raymq.replication.wire import ReplicaProcess, cluster_key, encode
from raymq.store.base.errors import Corrupt
from raymq.store.config.promise import PROMISES, Ends
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainReader

from .follower_connection import FollowerConnection, FollowerTransport
from .log_reader import LogReader
from .satellite import IDLE_WAIT_MS, GrantStatus
from .service import BUSY_WAIT_MS, EXIT_CODES, Service

logger = logging.getLogger("raymq.replication")


class Replicator(Service):
    """The role for one grant. Callers: as of `Service`; `status` by any thread."""

    def __init__(
        self,
        replica_dir: str | Path,
        config: StoreConfig,
        *,
        cluster_id: str,
        shard: int,
        replica: int,
        follower: int,
        transport: FollowerTransport,
        peer_endpoint: Callable[[], str | None],
        limits: mirror.MirrorLimits | None = None,
    ) -> None:
        """Args: `follower`: its replica id. `peer_endpoint`: its endpoint now; None: unknown."""
        super().__init__(replica_dir, "replication", config)
        root, size, files = Path(replica_dir), config.segment_size_bytes, self._files
        self._cluster = cluster_key(cluster_id)
        self._shard = shard
        self._replica = replica
        self._follower = follower
        self._limits = limits

        self._log = LogReader(root / "commitlog", size, files=files)
        self._chain = ChainReader(root / "raymq" / "chain", size, files=files)
        self._connection = FollowerConnection(
            transport, peer_endpoint, log_start=self._log.start, wake=self._satellite.wake
        )
        for part in (self._log, self._chain, self._connection):
            self._undo.callback(part.close)
        self._failure_file = FailureFile(root, files=files, clock=self._clock)

        self._machine: mirror.MirrorLeader | None = None
        self._synced = 0
        self._frames = 0

    def status(self) -> dict[str, Any]:
        """For status displays."""
        machine = self._machine
        return {
            "role": "replication",
            "phase": machine.phase.value if machine else "waiting for the grant",
            "matched_end": machine.matched_end if machine else 0,
            "replicated_end": machine.replicated_end if machine else 0,
            "confirmed": machine.confirmed if machine else 0,
            "error": (machine.stall_reason or None) if machine else None,
            "dropped_frames": machine.dropped if machine else 0,
            "frames_sent": self._frames,
        }

    def _work(self) -> int:
        machine = self._machine = self._make_machine()
        combiner = self._make_combiner()
        satellite = self._satellite

        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            for request in satellite.rings.requests.take_all():
                combiner.add(*request)
            self._combine(machine, combiner)
            for event in self._connection.take_events():
                self._step(event, machine, combiner)

            # After the answers of the follower, which may have moved the confirmed end: the next frame carries it.
            self._step(
                mirror.LeaderProgress(satellite.committed, combiner.acknowledged), machine, combiner
            )
            self._step(mirror.ClockTick(), machine, combiner)

            self._failure_file.write(machine.stall_reason)
            limit_ms = BUSY_WAIT_MS if combiner.waiting else IDLE_WAIT_MS
            satellite.wait(min(limit_ms, machine.wait_ms(self._clock.monotonic_ms())))
        return EXIT_CODES[status]

    def _make_machine(self) -> mirror.MirrorLeader:
        return mirror.MirrorLeader(
            cluster=self._cluster,
            shard=self._shard,
            me=ReplicaProcess(self._replica, self._satellite.incarnation),
            follower_id=self._follower,
            chain=self._chain,
            segment_size_bytes=self._config.segment_size_bytes,
            epoch=self._satellite.epoch,
            log_start=self._log.start(),
            confirmed=self._satellite.base,
            limits=self._limits,
        )

    def _make_combiner(self) -> PutCombiner:
        return PutCombiner(
            PROMISES[self._config.flush, True, "quorum"],
            flush_timeout_ms=self._config.sync_flush_timeout_ms,
            replica_timeout_ms=self._config.slave_timeout_ms,
            acknowledged=self._satellite.base,
        )

    def _ends(self, machine: mirror.MirrorLeader) -> Ends:
        """An end is read after the ends that rely on it: replicated or synced bytes were committed before."""
        satellite, flusher = self._satellite, FLUSHERS[self._config.flush]
        self._synced = max(self._synced, satellite.end_of(flusher))
        committed = satellite.committed
        return Ends(satellite.appended, committed, self._synced, machine.replicated_end)

    def _combine(self, machine: mirror.MirrorLeader, combiner: PutCombiner) -> None:
        """Publish the outcomes of the puts: first the acknowledged end, then the late puts."""
        satellite = self._satellite
        acknowledged = combiner.acknowledged
        late = combiner.combine(self._ends(machine), self._clock.monotonic_ms())
        if combiner.acknowledged > acknowledged:
            satellite.publish_position(combiner.acknowledged)
        for number, end, status in late:
            satellite.rings.late.push((number, end, status.code))
        if late:
            satellite.wake_others()

    def _step(
        self, event: mirror.MirrorEvent, machine: mirror.MirrorLeader, combiner: PutCombiner
    ) -> None:
        """Give the machine an event and perform its effects."""
        for effect in machine.step(event, self._clock.monotonic_ms()):
            if isinstance(effect, mirror.Send):
                try:
                    self._send(effect)
                except Corrupt as error:
                    # Neither the damaged bytes nor any after them are sent.
                    self._step(mirror.Damaged(str(error)), machine, combiner)
                    return
            elif isinstance(effect, mirror.Replicated):
                # Before the frames that the same answer makes space for: puts wait for it.
                self._combine(machine, combiner)
            elif isinstance(effect, mirror.Connect):
                self._connection.connect()
            elif isinstance(effect, mirror.Disconnect):
                self._connection.disconnect()
            elif isinstance(effect, mirror.Halt):
                logger.error("shard %s is not replicated: %s", self._shard, effect.reason)

    def _send(self, effect: mirror.Send) -> None:
        """Send a frame. Raises: Corrupt when the log's bytes are not those that were stored."""
        body = self._log.read(effect.start, effect.stop, effect.message)
        self._connection.send(encode(effect.header, effect.message), body)
        self._frames += 1
        self._satellite.publish_count(self._frames)
