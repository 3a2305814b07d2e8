"""The Replication role on the leader's side: moves bytes, tracks the match, combines futures
(design D4, D5).

A satellite like the flushers: it works under CommitLog's grant. It tails the chain and reads the
log. `MirrorLeader` says how far the follower is; `PutCombiner` makes of that and of the leader's
own ends the outcomes of the puts that wait for replicas. Its watermark is the position that is
published, by which CommitLog acknowledges these puts and shows records to readers: the table of
promises has one row for both. Late puts go back as entries. It holds nothing that must survive: a
new life relearns the match, and CommitLog answers for puts that a dead one left.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raymq.actors.shared.control_block import FLUSHERS
from raymq.actors.shared.ring import LatePuts
from raymq.actors.shared.troubles import TroubleNote
from raymq.replication.combiner import PutCombiner
from raymq.replication.mirror import (
    Connect,
    Connected,
    Damaged,
    Disconnect,
    Disconnected,
    Event,
    Halt,
    MirrorLeader,
    MirrorLimits,
    Progress,
    Received,
    Replicated,
    Send,
    Tick,
)
from raymq.replication.wire import Member, cluster_key, decode, encode
from raymq.store.clock import Clock
from raymq.store.config import StoreConfig
from raymq.store.errors import Corrupt, Rejected
from raymq.store.files import Files
from raymq.store.log.chain import ChainReader
from raymq.store.promise import PROMISES, Ends

from .flush_service import (
    BUSY_WAIT_MS,
    EXIT_BUG,
    EXIT_FENCED,
    EXIT_STOPPED,
    EXIT_STOPPED_BY_COMMIT_LOG,
)
from .follower_connection import Down, FollowerConnection, Frame, Transport, Up
from .log_reader import LogReader
from .satellite import IDLE_WAIT_MS, Satellite, Standing

log = logging.getLogger("raymq.replication")


class Replicator:
    """One life of the role. Callers: `run` or `serve` by one thread; `stop` and `status` by any."""

    def __init__(
        self,
        replica_dir: str | Path,
        config: StoreConfig,
        *,
        cluster_id: str,
        shard: int,
        replica: int,
        follower: int,
        transport: Transport,
        peer_endpoint: Callable[[], str | None],
        limits: MirrorLimits | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
    ) -> None:
        """Args: follower: replica id of the follower."""
        self._root = Path(replica_dir)
        self._cluster = cluster_key(cluster_id)
        self._shard = shard
        self._replica = replica
        self._follower = follower
        self._flusher = FLUSHERS[config.flush]
        self._config = config
        self._limits = limits
        self._clock = clock or Clock()
        self._files = files or Files()
        self._satellite = Satellite(self._root, "replication", clock=self._clock, files=self._files)
        self._link = FollowerConnection(transport, peer_endpoint, wake=self._satellite.wake)
        self._log = LogReader(
            self._root / "commitlog", config.segment_size_bytes, files=self._files
        )
        self._chain = ChainReader(
            self._root / "raymq" / "chain", config.segment_size_bytes, files=self._files
        )
        self._trouble = TroubleNote(self._root, files=self._files, clock=self._clock)
        self._machine: MirrorLeader | None = None
        self._synced = 0
        self._frames = 0

    @classmethod
    def from_spec(
        cls, spec: dict[str, Any], config: StoreConfig, *, peer_endpoint: Callable[[], str | None]
    ) -> Replicator:
        """From an actor's spec.

        `spec["transport"]` is "module:name", called with cluster_id, shard and token.
        """
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
        """Serve, and end the process with the life, whatever else runs in it.

        Returns: only after `stop`.
        """
        code = EXIT_BUG
        try:
            code = self.serve()
        except Exception:
            # The host of this thread would only log it, and then limp on without replication.
            traceback.print_exc()
            sys.stderr.flush()
        if code != EXIT_STOPPED:
            os._exit(code)

    def serve(self) -> int:
        """One life: wait for the grant, replicate under it.

        Returns: an EXIT_* code, when it is over.
        """
        satellite = self._satellite
        try:
            standing = satellite.run_until_granted()
            if standing is Standing.GRANTED:
                standing = self._replicate()
            if standing is Standing.LEAVING:
                return EXIT_STOPPED
            return EXIT_STOPPED_BY_COMMIT_LOG if standing is Standing.STOPPED else EXIT_FENCED
        finally:
            self._link.close()
            satellite.close()
            self._chain.close()
            self._log.close()

    def stop(self) -> None:
        """End the life soon. Callers: any thread."""
        self._satellite.stop()

    def status(self) -> dict[str, Any]:
        """For people."""
        machine = self._machine
        return {
            "role": "replication",
            "phase": machine.phase.value if machine else "waiting for the grant",
            "matched_end": machine.matched_end if machine else 0,
            "replicated_end": machine.replicated_end if machine else 0,
            "confirmed": machine.confirmed if machine else 0,
            "trouble": (machine.trouble or None) if machine else None,
            "dropped_frames": machine.dropped if machine else 0,
            "frames_sent": self._frames,
        }

    def _replicate(self) -> Standing:
        satellite, clock = self._satellite, self._clock
        machine = self._machine = MirrorLeader(
            cluster=self._cluster,
            shard=self._shard,
            me=Member(self._replica, satellite.incarnation),
            follower_id=self._follower,
            chain=self._chain,
            segment_size_bytes=self._config.segment_size_bytes,
            log_start=self._log.start(),
            confirmed=satellite.base,
            limits=self._limits,
        )
        combiner = PutCombiner(
            PROMISES[self._config.flush, True, "quorum"],
            flush_timeout_ms=self._config.sync_flush_timeout_ms,
            replica_timeout_ms=self._config.slave_timeout_ms,
            acknowledged=satellite.base,
        )
        while (standing := satellite.standing()) is Standing.GRANTED:
            for request in satellite.take_requests():
                combiner.add(*request)
            self._combine(machine, combiner)
            for event in self._link_events():
                self._step(event, machine, combiner)
            # After them: C goes to the follower, and its answers may have moved it.
            self._step(Progress(satellite.committed, combiner.acknowledged), machine, combiner)
            self._step(Tick(), machine, combiner)
            self._trouble.tell(machine.trouble)
            limit = BUSY_WAIT_MS if combiner.waiting else IDLE_WAIT_MS
            satellite.wait(min(limit, machine.wait_ms(clock.monotonic_ms())))
        return standing

    def _ends(self, machine: MirrorLeader) -> Ends:
        """Each after those that rely on it: what is replicated or synced was committed before."""
        satellite, role = self._satellite, self._flusher
        synced = max(satellite.base_of(role), satellite.position_of(role))
        self._synced = max(self._synced, synced)
        committed = satellite.committed
        return Ends(satellite.appended, committed, self._synced, machine.replicated_end)

    def _combine(self, machine: MirrorLeader, combiner: PutCombiner) -> None:
        """Publish what the puts have come to: first how far they are kept, then those that are late."""
        satellite = self._satellite
        acknowledged = combiner.acknowledged
        late = combiner.combine(self._ends(machine), self._clock.monotonic_ms())
        if combiner.acknowledged > acknowledged:
            satellite.publish_position(combiner.acknowledged)
        for number, end, status in late:
            satellite.report_late(LatePuts(number, end, status.code))
        if late:
            satellite.wake_others()

    def _link_events(self) -> list[Event]:
        return [
            Connected(self._log.start()) if isinstance(item, Up) else _to_event(item)
            for item in self._link.take_events()
        ]

    def _step(self, event: Event, machine: MirrorLeader, combiner: PutCombiner) -> None:
        for effect in machine.step(event, self._clock.monotonic_ms()):
            if isinstance(effect, Send):
                try:
                    body = self._log.read(effect.start, effect.stop, effect.message)
                except Corrupt as error:
                    # Bytes that rotted here are not sent, nor any after them.
                    self._step(Damaged(str(error)), machine, combiner)
                    return
                self._link.send(encode(effect.header, effect.message), body)
                self._frames += 1
                self._satellite.publish_count(self._frames)
            elif isinstance(effect, Replicated):
                # Before the frames that the same answer makes room for: puts wait for it.
                self._combine(machine, combiner)
            elif isinstance(effect, Connect):
                self._link.connect()
            elif isinstance(effect, Disconnect):
                self._link.disconnect()
            elif isinstance(effect, Halt):
                log.error("shard %s is not replicated: %s", self._shard, effect.reason)


def _to_event(item: Down | Frame) -> Event:
    if isinstance(item, Down):
        return Disconnected(item.reason)
    try:
        return Received(*decode(item.data))
    except Rejected as error:
        # A peer that speaks another version, or a broken transport: a new connection is the remedy.
        return Disconnected(error.message)
