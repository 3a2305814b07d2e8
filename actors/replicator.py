"""The Replication role on the leader's side: moves bytes, tracks the match, combines futures
(design D4, D5).

A satellite like the flushers: it works under CommitLog's grant and publishes C as its position. It
tails the chain and reads the log; what is replicated is decided by `MirrorLeader`, who is
answered by `PutCombiner`. It holds nothing that must survive: a new life relearns the match.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from raymq.replication.combiner import Answer, PutCombiner
from raymq.replication.mirror import (
    Connect,
    Connected,
    Damaged,
    Disconnect,
    Disconnected,
    Effect,
    Event,
    Halt,
    MirrorLeader,
    MirrorLimits,
    Progress,
    Publish,
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
from raymq.store.status import PutStatus

from .flush_service import (
    BUSY_WAIT_MS,
    EXIT_BUG,
    EXIT_FENCED,
    EXIT_STOPPED,
    EXIT_STOPPED_BY_COMMIT_LOG,
)
from .log_reader import LogReader
from .replica_link import Down, Frame, ReplicaLink, Transport, Up
from .ring import FLAG_FLUSH, FLAG_REPLICA
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
        self._flush_role = "group_commit" if config.flush == "sync" else None
        self._config = config
        self._limits = limits
        self._clock = clock or Clock()
        self._files = files or Files()
        self._satellite = Satellite(self._root, "replication", clock=self._clock, files=self._files)
        self._link = ReplicaLink(transport, peer_endpoint, wake=self._satellite.wake)
        self._log = LogReader(
            self._root / "commitlog", config.segment_size_bytes, files=self._files
        )
        self._chain = ChainReader(
            self._root / "raymq" / "chain", config.segment_size_bytes, files=self._files
        )
        self._machine: MirrorLeader | None = None
        self._requests = 0
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
        combiner = PutCombiner(flushed=self._durable(), replicated=satellite.base)
        while (standing := satellite.standing()) is Standing.GRANTED:
            self._take_requests(combiner)
            progress = Progress(satellite.committed, self._durable())
            self._answer(combiner.on_flushed(progress.durable))
            for event in (progress, *self._link_events(), Tick()):
                effects = machine.step(event, clock.monotonic_ms())
                self._perform(effects, combiner, machine)
            self._answer(combiner.on_tick(clock.monotonic_ms()))
            limit = BUSY_WAIT_MS if len(combiner) else IDLE_WAIT_MS
            satellite.wait(min(limit, machine.wait_ms(clock.monotonic_ms())))
        return standing

    def _durable(self) -> int:
        """What the leader's flush mode calls durable: synced by GroupCommit, else in the files."""
        role = self._flush_role
        if role is None:
            return self._satellite.committed
        return max(self._satellite.base_of(role), self._satellite.position_of(role))

    def _take_requests(self, combiner: PutCombiner) -> None:
        requests = self._satellite.take_requests()
        allowance_ms = max(self._config.sync_flush_timeout_ms, self._config.slave_timeout_ms)
        for request in requests:
            if not request.deadline_ms:
                # Its promise was kept already: nobody waits.
                continue
            put_ms = request.deadline_ms - allowance_ms
            answers = combiner.add(
                request.sequence,
                request.end_offset,
                wants_flush=bool(request.flags & FLAG_FLUSH),
                wants_replica=bool(request.flags & FLAG_REPLICA),
                deadline_flush_ms=put_ms + self._config.sync_flush_timeout_ms,
                deadline_replica_ms=put_ms + self._config.slave_timeout_ms,
            )
            self._answer(answers)
        if requests:
            self._requests += len(requests)
            self._satellite.publish_counts(self._frames, self._requests)

    def _answer(self, answers: Iterable[Answer]) -> None:
        """Exceptions by entry; success is told by the watermark (D4)."""
        rings = False
        for answer in answers:
            if answer.status is not PutStatus.PUT_OK:
                self._satellite.answer(answer.sequence, answer.status.code)
                rings = True
        if rings:
            self._satellite.ring()

    def _link_events(self) -> list[Event]:
        return [
            Connected(self._log.start()) if isinstance(item, Up) else _to_event(item)
            for item in self._link.take_events()
        ]

    def _perform(self, effects: list[Effect], combiner: PutCombiner, machine: MirrorLeader) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                try:
                    body = self._log.read(effect.start, effect.stop, effect.message)
                except Corrupt as error:
                    # What rotted here is not sent, and nothing behind it.
                    damage = Damaged(str(error))
                    self._perform(
                        machine.step(damage, self._clock.monotonic_ms()), combiner, machine
                    )
                    return
                self._link.send(encode(effect.header, effect.message), body)
                self._frames += 1
            elif isinstance(effect, Publish):
                self._satellite.publish_position(effect.confirmed)
            elif isinstance(effect, Replicated):
                self._answer(combiner.on_replicated(effect.end))
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
