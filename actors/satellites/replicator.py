"""The Replication role on the leader's side: sends log bytes to the followers, and combines futures.

A satellite like the flushers: it works under CommitLog's grant, follows the chain and reads the log. A `FollowerStream`
says how far its follower is. The bytes that enough followers hold are replicated (replication/quorum.py). `PutCombiner`
combines that end with the leader's own ends into the outcomes of the puts that wait for replicas. Its acknowledged end
is the position that Replication publishes. CommitLog acknowledges these puts by it and shows records to readers up to
it, because both are one row of store/config/promise.py. Late puts are reported as entries. Nothing here must survive: a
new process finds the matches again, and CommitLog answers the puts that a dead one left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raymq.actors.shared.control_block import FLUSHERS
from raymq.actors.shared.failures import FailureFile
from raymq.replication.combiner import PutCombiner
from raymq.replication.log_sender import LogSender, SenderLimits
from raymq.replication.quorum import replicated_end
from raymq.replication.wire import ReplicaProcess, cluster_key
from raymq.store.config.promise import PROMISES, Ends
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainReader

from .follower_connection import FollowerConnection, FollowerTransport
from .follower_stream import FollowerStream
from .log_reader import LogReader
from .satellite import IDLE_WAIT_MS, GrantStatus
from .service import BUSY_WAIT_MS, EXIT_CODES, Service


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
        followers: Sequence[int],
        transport: FollowerTransport,
        peer_endpoint: Callable[[int], str | None],
        limits: SenderLimits | None = None,
    ) -> None:
        """Args: `followers`: their replica ids. `peer_endpoint`: a replica's endpoint now; None: unknown."""
        super().__init__(replica_dir, "replication", config)
        root, size, files = Path(replica_dir), config.segment_size_bytes, self._files
        self._root = root
        self._cluster = cluster_key(cluster_id)
        self._shard = shard
        self._replica = replica
        self._limits = limits

        self._log = LogReader(
            root / "commitlog", size, files=files, open_max=2 * max(1, len(followers))
        )
        self._undo.callback(self._log.close)
        self._connections = {
            follower: FollowerConnection(
                transport,
                partial(peer_endpoint, follower),
                log_start=self._log.start,
                wake=self._satellite.wake,
            )
            for follower in followers
        }
        for connection in self._connections.values():
            self._undo.callback(connection.close)
        self._failure_file = FailureFile(root, files=files, clock=self._clock)

        self._streams: list[FollowerStream] = []
        self._combiner = self._make_combiner()
        self._synced = 0

    def status(self) -> dict[str, Any]:
        """For status displays."""
        return {
            "role": "replication",
            "is_granted": bool(self._streams),
            "acknowledged": self._combiner.acknowledged,
            "frames_sent": self._frames,
            "followers": [stream.status() for stream in self._streams],
        }

    @property
    def _frames(self) -> int:
        return sum(stream.frames for stream in self._streams)

    def _work(self) -> int:
        # Only the grant says where this process begins.
        self._combiner = self._make_combiner()
        self._streams = [self._make_stream(follower) for follower in self._connections]
        satellite = self._satellite

        while (status := satellite.grant_status()) is GrantStatus.GRANTED:
            self._run_round()
            now_ms = self._clock.monotonic_ms()
            limit_ms = BUSY_WAIT_MS if self._combiner.waiting else IDLE_WAIT_MS
            satellite.wait(min([limit_ms, *(each.wait_ms(now_ms) for each in self._streams)]))
        return EXIT_CODES[status]

    def _run_round(self) -> None:
        """Combine, take the answers of all followers, and send what is new."""
        satellite, combiner, now_ms = self._satellite, self._combiner, self._clock.monotonic_ms()
        for request in satellite.rings.requests.take_all():
            combiner.add(*request)
        self._combine()

        for stream in self._streams:
            stream.take_answers(now_ms)
        # After the answers, which may have moved the confirmed end: the next frames carry it.
        for stream in self._streams:
            stream.advance(satellite.committed, combiner.acknowledged, now_ms)
        satellite.publish_count(self._frames)

        stalled = {each.follower: each.stall_reason for each in self._streams if each.stall_reason}
        self._failure_file.write(
            "; ".join(f"replica {follower}: {reason}" for follower, reason in stalled.items())
        )

    def _make_stream(self, follower: int) -> FollowerStream:
        """The stream to a follower, from its first connection on."""
        size = self._config.segment_size_bytes
        chain = ChainReader(self._root / "raymq" / "chain", size, files=self._files)
        self._undo.callback(chain.close)
        sender = LogSender(
            cluster=self._cluster,
            shard=self._shard,
            me=ReplicaProcess(self._replica, self._satellite.incarnation),
            follower_id=follower,
            chain=chain,
            segment_size_bytes=size,
            epoch=self._satellite.epoch,
            log_start=self._log.start(),
            confirmed=self._satellite.base,
            limits=self._limits,
        )
        connection = self._connections[follower]
        return FollowerStream(follower, sender, connection, self._log, on_replicated=self._combine)

    def _make_combiner(self) -> PutCombiner:
        return PutCombiner(
            PROMISES[self._config.flush, True, "quorum"],
            flush_timeout_ms=self._config.sync_flush_timeout_ms,
            replica_timeout_ms=self._config.slave_timeout_ms,
            acknowledged=self._satellite.base,
        )

    def _ends(self) -> Ends:
        """An end is read after the ends that rely on it: replicated or synced bytes were committed before."""
        satellite, flusher = self._satellite, FLUSHERS[self._config.flush]
        replicated = replicated_end([stream.replicated_end for stream in self._streams])
        self._synced = max(self._synced, satellite.end_of(flusher))
        committed = satellite.committed
        return Ends(satellite.appended, committed, self._synced, replicated)

    def _combine(self) -> None:
        """Publish the outcomes of the puts: first the acknowledged end, then the late puts."""
        satellite, combiner = self._satellite, self._combiner
        acknowledged = combiner.acknowledged
        late = combiner.combine(self._ends(), self._clock.monotonic_ms())
        if combiner.acknowledged > acknowledged:
            satellite.publish_position(combiner.acknowledged)
        for number, end, status in late:
            satellite.rings.late.push((number, end, status.code))
        if late:
            satellite.wake_others()
