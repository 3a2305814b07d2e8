"""The Replication role: while its replica leads, it sends log bytes to the followers, and combines futures.

A satellite like the flushers: it works under CommitLog's grant, follows the chain and reads the log. CommitLog
publishes the epoch that it leads in the control block. Without one, Replication is idle. A `FollowerStream` says how
far its follower is. The bytes that enough followers hold are replicated (replication/quorum.py). `PutCombiner` combines
that end with the leader's own ends into the outcomes of the puts that wait for replicas. Its acknowledged end is the
position that Replication publishes. CommitLog acknowledges these puts by it and shows records to readers up to it,
because both are one row of store/config/promise.py. Nothing below the end of the EPOCH record is published, because
records of earlier epochs are not safe by the number of their copies (R6 and R11 of docs/design.md). Late puts are
reported as entries. Nothing here must survive: a new process finds the matches again, and CommitLog answers the puts
that a dead one left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from raymq.actors.shared.control_block import FLUSHERS, FollowerProgress, Leadership
from raymq.actors.shared.failures import FailureFile
from raymq.actors.supervise.ballot import read_generations
from raymq.replication.combiner import PutCombiner
from raymq.replication.election_events import Ballot
from raymq.replication.log_sender import LogSender, SenderLimits
from raymq.replication.quorum import majority, prompt_followers, published_end
from raymq.replication.wire import ReplicaProcess, cluster_key
from raymq.store.config.promise import PROMISES, Ends, own_durable
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainReader

from .follower_connection import FollowerConnection, FollowerTransport
from .follower_stream import FollowerStream
from .log_reader import LogReader
from .satellite import IDLE_WAIT_MS, GrantStatus
from .service import BUSY_WAIT_MS, EXIT_CODES, Service

#: sessions of one epoch and process
SESSION_BITS = 20


class Replicator(Service):
    """The role for one grant. Callers: as of `Service`; `status` by any thread.

    Threads: the service's own, and one for each follower, which takes the follower's answers as they arrive. To wake
    the service's thread for each would cost as much as the work.
    A third kind, the sending thread of each connection, reads the bytes that may not be in the page cache. It holds no
    lock meanwhile, so that a slow disk delays one follower alone.
    """

    def __init__(
        self,
        replica_dir: str | Path,
        config: StoreConfig,
        *,
        cluster_id: str,
        shard: int,
        replica: int,
        followers: Sequence[int],
        voters: Sequence[int],
        transport: FollowerTransport,
        peer_endpoint: Callable[[int], str | None],
        limits: SenderLimits | None = None,
    ) -> None:
        """Args: `followers`: their replica ids. `voters`: the replicas of which a majority confirms.

        `peer_endpoint`: a replica's endpoint now; None: unknown.
        """
        super().__init__(replica_dir, "replication", config)
        root, size, files = Path(replica_dir), config.segment_size_bytes, self._files
        self._root = root
        self._cluster = cluster_key(cluster_id)
        self._shard = shard
        self._replica = replica
        self._voters = frozenset(voters)
        self._limits = limits or SenderLimits(catch_up_bytes_per_s=config.catch_up_bytes_per_s)
        self._promise = PROMISES[config.flush, True, "quorum"]

        self._log = LogReader(
            root / "commitlog", size, files=files, open_max=2 * max(1, len(followers))
        )
        self._undo.callback(self._log.close)
        self._chains = {
            follower: ChainReader(root / "raymq" / "chain", size, files=files)
            for follower in followers
        }
        for chain in self._chains.values():
            self._undo.callback(chain.close)
        self._connections = {
            follower: FollowerConnection(
                transport,
                partial(peer_endpoint, follower),
                log_start=self._log.start,
                wake=self._satellite.wake,
                on_frame=partial(self._take_answer, follower),
            )
            for follower in followers
        }
        for connection in self._connections.values():
            self._undo.callback(connection.close)
        self._failure_file = FailureFile(root, files=files, clock=self._clock)

        #: guards all below, and the connections
        self._lock = threading.Lock()
        #: the epoch that is served; None: this replica follows, or the grant is over
        self._led: Leadership | None = None
        self._streams: list[FollowerStream] = []
        #: the followers that get each byte at once. The others may get the bytes of many puts together
        self._prompt: frozenset[int] = frozenset()
        self._may_linger = False
        #: what a follower's thread has met, for the service's thread to raise
        self._error: Exception | None = None
        #: frames of the streams of earlier epochs
        self._earlier_frames = 0
        self._combiner = self._make_combiner(0)
        self._synced = 0

    def status(self) -> dict[str, Any]:
        """How far its streams are, for tests. CommitLog reads the control block."""
        return {
            "role": "replication",
            "is_granted": bool(self._satellite.fencing_token),
            "epoch": 0 if self._led is None else self._led.epoch,
            "acknowledged": self._combiner.acknowledged,
            "frames_sent": self._frames,
            "followers": [stream.status() for stream in self._streams],
        }

    @property
    def _frames(self) -> int:
        return self._earlier_frames + sum(stream.frames for stream in self._streams)

    def _work(self) -> int:
        satellite = self._satellite
        # Only the grant says where this process begins.
        self._combiner = self._make_combiner(satellite.base)

        try:
            while (status := satellite.grant_status()) is GrantStatus.GRANTED:
                led = satellite.leadership
                with self._lock:
                    if self._follow_options():
                        self._keep_to_options()
                    if led != self._led:
                        self._serve_epoch(led)
                    if led is None:
                        # CommitLog has answered these puts, because it does not lead any more.
                        satellite.rings.requests.take_all()
                        wait_ms = IDLE_WAIT_MS
                    else:
                        wait_ms = self._run_round()
                satellite.wait(wait_ms)
            return EXIT_CODES[status]
        finally:
            with self._lock:
                # The answers that arrive from now on are not taken.
                self._led = None

    def _keep_to_options(self) -> None:
        """Use the options that have changed. Needs the lock."""
        config = self._config
        self._combiner.set_timeouts(config.sync_flush_timeout_ms, config.slave_timeout_ms)
        self._limits = replace(self._limits, catch_up_bytes_per_s=config.catch_up_bytes_per_s)
        for stream in self._streams:
            stream.set_limits(self._limits)

    def _serve_epoch(self, led: Leadership | None) -> None:
        """Begin the streams of an epoch, or end those of the epoch before."""
        self._earlier_frames = self._frames
        if self._streams and self._satellite.commit_log_ended():
            # The others need not wait until they miss its heartbeats.
            for stream in self._streams:
                stream.report_leader_ended()
        self._streams = []
        for connection in self._connections.values():
            connection.disconnect()
        self._failure_file.write("")

        self._led = led
        if led is not None:
            # Followers must not hear less than what earlier leaders acknowledged, as far as this replica knows that.
            acknowledged = max(self._combiner.acknowledged, led.confirmed)
            self._combiner = self._make_combiner(acknowledged)
            # CommitLog begins an epoch after it has noted these on disk.
            ballot = Ballot(generations=read_generations(self._root, self._files))
            self._streams = [
                self._make_stream(follower, led, ballot.generation(follower))
                for follower in self._connections
            ]

    def _run_round(self) -> int:
        """Combine, take the answers of all followers, and send what is new. Returns: when the next round is due, ms."""
        if self._error is not None:
            raise self._error
        self._take_requests()
        self._combine()

        now_ms = self._clock.monotonic_ms()
        for stream in self._streams:
            stream.take_answers(now_ms)
        self._choose_prompt(now_ms)
        # After the answers, which may have moved the confirmed end: the next frames carry it.
        for stream in self._streams:
            self._advance(stream, now_ms)
        self._note_stalls()

        limit_ms = BUSY_WAIT_MS if self._combiner.waiting else IDLE_WAIT_MS
        return min([limit_ms, *(stream.wait_ms(now_ms) for stream in self._streams)])

    def _take_answer(self, follower: int) -> None:
        """Take what has come from one follower. Callers: the thread of its connection."""
        with self._lock:
            if self._led is None or self._error is not None:
                return
            try:
                self._take_requests()
                stream = next(each for each in self._streams if each.follower == follower)
                now_ms = self._clock.monotonic_ms()
                stream.take_answers(now_ms)
                self._choose_prompt(now_ms)
                self._advance(stream, now_ms)
                if not stream.stall_reason:
                    return
            except Exception as error:
                # A bug, or the disk refused another call than a read: it ends the service.
                self._error = error
        self._satellite.wake()

    def _take_requests(self) -> None:
        for request in self._satellite.rings.requests.take_all():
            self._combiner.add(*request)

    def _choose_prompt(self, now_ms: int) -> None:
        """Find the followers that the puts wait for."""
        counted = [
            stream
            for stream in self._streams
            if stream.is_streaming and stream.is_complete and stream.follower in self._voters
        ]
        most = max((stream.durable_end for stream in counted), default=0)
        ack_ms = {
            stream.follower: stream.ack_ms(now_ms)
            for stream in counted
            # A follower that lacks more than that confirms nothing soon.
            if stream.durable_end >= most - self._limits.linger_bytes
        }
        members = len(self._voters)
        self._prompt = prompt_followers(members, ack_ms, self._prompt)
        # Without enough of them a put waits for each that is reached again.
        self._may_linger = len(self._prompt) == majority(members) - 1

    def _advance(self, stream: FollowerStream, now_ms: int) -> None:
        """Send a follower what is new, and report to CommitLog how far the follower is."""
        satellite = self._satellite
        stream.advance(
            satellite.committed,
            self._combiner.acknowledged,
            now_ms,
            may_linger=self._may_linger and stream.follower not in self._prompt,
        )
        satellite.publish_count(self._frames)
        satellite.publish_follower(stream.follower, self._progress_of(stream))

    def _note_stalls(self) -> None:
        """Say in a file why followers get nothing, if there is a reason."""
        stalled = {each.follower: each.stall_reason for each in self._streams if each.stall_reason}
        damaged = [each.damaged_at for each in self._streams if each.damaged_at is not None]
        self._failure_file.write(
            "; ".join(f"replica {follower}: {reason}" for follower, reason in stalled.items()),
            damaged_at=min(damaged, default=None),
        )

    def _progress_of(self, stream: FollowerStream) -> FollowerProgress:
        """How far a follower is, for CommitLog."""
        epoch = 0 if self._led is None else self._led.epoch
        return FollowerProgress(
            epoch,
            stream.durable_end,
            stream.heard_ms,
            is_complete=stream.is_complete,
            matched_end=stream.matched_end,
        )

    def _make_stream(self, follower: int, led: Leadership, generation: int) -> FollowerStream:
        """The stream of an epoch to a follower, from its first connection on."""
        sender = LogSender(
            cluster=self._cluster,
            shard=self._shard,
            me=ReplicaProcess(self._replica, led.incarnation),
            follower_id=follower,
            chain=self._chains[follower],
            segment_size_bytes=self._config.segment_size_bytes,
            epoch=led.epoch,
            log_start=self._log.start(),
            confirmed=self._combiner.acknowledged,
            # Earlier processes of this replica numbered theirs from an earlier time on.
            sessions_before=self._clock.monotonic_ms() << SESSION_BITS,
            generation=generation,
            limits=self._limits,
        )

        return FollowerStream(
            follower,
            sender,
            self._connections[follower],
            self._log,
            blocking_call=self._satellite.blocking_call,
            on_replicated=self._combine,
        )

    def _make_combiner(self, acknowledged: int) -> PutCombiner:
        return PutCombiner(
            self._promise,
            flush_timeout_ms=self._config.sync_flush_timeout_ms,
            replica_timeout_ms=self._config.slave_timeout_ms,
            acknowledged=acknowledged,
        )

    def _ends(self) -> Ends:
        """An end is read after the ends that rely on it: replicated or synced bytes were committed before."""
        satellite, flusher = self._satellite, FLUSHERS[self._config.flush]
        followers = [
            stream.replicated_end for stream in self._streams if stream.follower in self._voters
        ]
        self._synced = max(self._synced, satellite.end_of(flusher))
        committed = satellite.committed
        ends = Ends(satellite.appended, committed, self._synced, 0)
        if self._led is None:
            return ends
        own = own_durable(self._config.flush, ends)
        return ends._replace(replicated=published_end(self._led.begun_end, own, followers))

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
