"""The Replication role on the leader's side: sends log bytes to the follower, and combines futures.

A satellite like the flushers: it works under CommitLog's grant, follows the chain and reads the log. `MirrorLeader`
says how far the follower is. `PutCombiner` combines that with the leader's own ends into the outcomes of the puts that
wait for replicas. Its acknowledged end is the position that Replication publishes. CommitLog acknowledges these puts by
it and shows records to readers up to it, because both are one row of store/promise.py. Late puts are reported as
entries. Nothing here must survive: a new process finds the match again, and CommitLog answers the puts that a dead one
left.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raymq.actors.shared.control_block import FLUSHERS
from raymq.actors.shared.failures import FailureFile
from raymq.actors.shared.ring import LateEntry
from raymq.replication.combiner import PutCombiner
from raymq.replication.mirror import (
    ClockTick,
    Connect,
    Connected,
    Damaged,
    Disconnect,
    Disconnected,
    Event,
    FrameReceived,
    Halt,
    LeaderProgress,
    MirrorLeader,
    MirrorLimits,
    Replicated,
    Send,
)
from raymq.replication.wire import ReplicaProcess, cluster_key, decode, encode
from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import Corrupt, Rejected
from raymq.store.files import Files
from raymq.store.log.chain import ChainReader
from raymq.store.promise import PROMISES, Ends

from .flush_service import BUSY_WAIT_MS, EXIT_CODES, run_and_exit
from .follower_connection import Down, FollowerConnection, FollowerTransport, Frame, Up
from .log_reader import LogReader
from .satellite import IDLE_WAIT_MS, GrantStatus, Satellite

logger = logging.getLogger("raymq.replication")


class Replicator:
    """The role for one grant. Callers: `run` or `serve` by one thread; `stop` and `status` by any."""

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
        limits: MirrorLimits | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Args: follower: replica id of the follower; peer_endpoint: where it listens now, None while unknown."""
        root = Path(replica_dir)
        files = files or Files()
        self._cluster = cluster_key(cluster_id)
        self._shard = shard
        self._replica = replica
        self._follower = follower
        self._config = config
        self._limits = limits
        self._clock = clock or Clock()
        self._satellite = Satellite(root, "replication", clock=self._clock, files=files)
        self._connection = FollowerConnection(transport, peer_endpoint, wake=self._satellite.wake)
        self._log = LogReader(root / "commitlog", config.segment_size_bytes, files=files)
        self._chain = ChainReader(root / "raymq" / "chain", config.segment_size_bytes, files=files)
        self._failure_file = FailureFile(root, files=files, clock=self._clock)
        self._machine: MirrorLeader | None = None
        self._synced = 0
        self._frames = 0

    @classmethod
    def from_spec(
        cls, spec: dict[str, Any], config: StoreConfig, *, peer_endpoint: Callable[[], str | None]
    ) -> Replicator:
        """From an actor's spec. `spec["transport"]` is "module:name", called with cluster_id, shard and token."""
        module, _, name = spec["transport"].partition(":")
        make_transport = getattr(importlib.import_module(module), name)
        return cls(
            spec["data_dir"],
            config,
            cluster_id=spec["cluster_id"],
            shard=spec["shard"],
            replica=spec["replica"],
            follower=spec["replica"] + 1,
            transport=make_transport(
                cluster_id=spec["cluster_id"], shard=spec["shard"], token=spec["token"]
            ),
            peer_endpoint=peer_endpoint,
        )

    def run(self) -> None:
        """Serve, then end the process, whatever else runs in it. Returns: only after `stop`."""
        run_and_exit(self.serve)

    def serve(self) -> int:
        """Wait for the grant and replicate under it. Returns: an EXIT_* code, when the grant is over."""
        satellite = self._satellite
        try:
            status = satellite.await_grant()
            if status is GrantStatus.GRANTED:
                status = self._replicate()
            return EXIT_CODES[status]
        finally:
            self._connection.close()
            satellite.close()
            self._chain.close()
            self._log.close()

    def stop(self) -> None:
        """End the service soon. Callers: any thread."""
        self._satellite.stop()

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

    def _replicate(self) -> GrantStatus:
        """Work under the grant. Returns: why it is over."""
        machine = self._machine = self._make_machine()
        combiner = self._make_combiner()
        satellite = self._satellite
        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            for request in satellite.take_requests():
                combiner.add(*request)
            self._combine(machine, combiner)
            for event in self._take_events():
                self._step(event, machine, combiner)
            # After the answers of the follower, which may have moved the confirmed end: the next frame carries it.
            self._step(
                LeaderProgress(satellite.committed, combiner.acknowledged), machine, combiner
            )
            self._step(ClockTick(), machine, combiner)
            self._failure_file.write(machine.stall_reason)
            limit_ms = BUSY_WAIT_MS if combiner.waiting else IDLE_WAIT_MS
            satellite.wait(min(limit_ms, machine.wait_ms(self._clock.monotonic_ms())))
        return status

    def _make_machine(self) -> MirrorLeader:
        return MirrorLeader(
            cluster=self._cluster,
            shard=self._shard,
            me=ReplicaProcess(self._replica, self._satellite.incarnation),
            follower_id=self._follower,
            chain=self._chain,
            segment_size_bytes=self._config.segment_size_bytes,
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

    def _ends(self, machine: MirrorLeader) -> Ends:
        """An end is read after the ends that rely on it: replicated or synced bytes were committed before."""
        satellite, flusher = self._satellite, FLUSHERS[self._config.flush]
        synced = max(satellite.base_of(flusher), satellite.position_of(flusher))
        self._synced = max(self._synced, synced)
        committed = satellite.committed
        return Ends(satellite.appended, committed, self._synced, machine.replicated_end)

    def _combine(self, machine: MirrorLeader, combiner: PutCombiner) -> None:
        """Publish the outcomes of the puts: first the acknowledged end, then the late puts."""
        satellite = self._satellite
        acknowledged = combiner.acknowledged
        late = combiner.combine(self._ends(machine), self._clock.monotonic_ms())
        if combiner.acknowledged > acknowledged:
            satellite.publish_position(combiner.acknowledged)
        for number, end, status in late:
            satellite.report_late(LateEntry(number, end, status.code))
        if late:
            satellite.wake_others()

    def _take_events(self) -> list[Event]:
        return [
            Connected(self._log.start()) if isinstance(item, Up) else _to_event(item)
            for item in self._connection.take_events()
        ]

    def _step(self, event: Event, machine: MirrorLeader, combiner: PutCombiner) -> None:
        """Give the machine an event and perform its effects."""
        for effect in machine.step(event, self._clock.monotonic_ms()):
            if isinstance(effect, Send):
                try:
                    self._send(effect)
                except Corrupt as error:
                    # Neither the damaged bytes nor any after them are sent.
                    self._step(Damaged(str(error)), machine, combiner)
                    return
            elif isinstance(effect, Replicated):
                # Before the frames that the same answer makes space for: puts wait for it.
                self._combine(machine, combiner)
            elif isinstance(effect, Connect):
                self._connection.connect()
            elif isinstance(effect, Disconnect):
                self._connection.disconnect()
            elif isinstance(effect, Halt):
                logger.error("shard %s is not replicated: %s", self._shard, effect.reason)

    def _send(self, effect: Send) -> None:
        """Raises: Corrupt when the log's bytes are not those that were stored."""
        body = self._log.read(effect.start, effect.stop, effect.message)
        self._connection.send(encode(effect.header, effect.message), body)
        self._frames += 1
        self._satellite.publish_count(self._frames)


def _to_event(item: Down | Frame) -> Event:
    if isinstance(item, Down):
        return Disconnected(item.reason)
    try:
        return FrameReceived(*decode(item.data))
    except Rejected as error:
        # A peer that speaks another version, or a broken transport: a new connection is the remedy.
        return Disconnected(error.message)
