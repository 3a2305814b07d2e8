"""A leader's files and words without its process, a follower's real CommitLog, a wire of memory.

The test plays CommitLog and GroupCommit of the leader.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path
from typing import Any

from raymq.actors.follower.session import FollowerSession
from raymq.actors.satellites.replicator import Replicator
from raymq.actors.shared.control_block import ControlBlock, Leadership, shared_file
from raymq.actors.shared.processes import own_identity
from raymq.actors.shared.ring import ReplicationRings
from raymq.actors.shared.wakeup import Wakeup
from raymq.actors.supervise.elections import Elections
from raymq.replication.log_receiver import LogTail
from raymq.replication.wire import ReplicaProcess
from raymq.store.base.checksum import crc32c
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files
from raymq.store.base.running_flags import RunningFlags
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import Chain, ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.recovery.log_recovery import recover
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.put.put_lock import PutLock

CLUSTER_ID = "pair"
TIMEOUT_S = 20.0


def new_session(
    port: CommitLogPort, identity: dict[str, Any], generations: tuple[int, ...] = ()
) -> FollowerSession:
    """The streams of a new follower process, with the ballot that earlier ones left."""
    me = ReplicaProcess(identity["replica"], identity["incarnation"])
    elections = Elections(
        port.log,
        me,
        members=(0, 1, 2),
        candidates=(0,),
        clock=Clock(),
        put_lock=PutLock(Clock()),
        flags=RunningFlags(),
        generations=generations,
    )
    return FollowerSession(port, identity, elections)


def wait_until(holds, what: str) -> None:
    """Poll until it holds. Fails with `what` after a while."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {what}"
        time.sleep(0.002)


class Leader:
    """The leader's side as Replication sees it: segments, chain, words, rings."""

    def __init__(self, root: Path, *, segment_size_bytes: int, base: int = 0) -> None:
        self.root = root
        self.size = segment_size_bytes
        self.files = Files()
        for name in ("raymq", "raymq/chain", "commitlog"):
            (root / name).mkdir(parents=True, exist_ok=True)

        self.segments = MappedFileQueue(root / "commitlog", segment_size_bytes, files=self.files)
        self.segments.load()
        self.chain = Chain(root / "raymq" / "chain", segment_size_bytes, files=self.files)
        self.chain.load()
        self.end = self.chain.last.end if self.chain.last else 0

        self.wakeup = Wakeup(str(root), "commit_log", files=self.files)
        self.control = ControlBlock.open(shared_file(str(root), "control"), files=self.files)
        self.rings = ReplicationRings.open(
            shared_file(str(root), "ring-replication"), files=self.files
        )

        self.control.format(self.files.boot_id_hash())
        self.control.begin(7, own_identity(files=self.files), self.end, 0)
        self.control.publish_leadership(Leadership(epoch=1, begun_end=0, incarnation=7))
        self.flusher = self.control.roles["group_commit"]
        self.flusher_token = self.flusher.give_grant(5, 0)

        self.record = self.control.roles["replication"]
        self.fencing_token = 0
        self.number = 0

    def grant(self, replicator: Replicator, confirmed: int) -> None:
        """Let this life work, when it has said that it is here."""
        incarnation = replicator._satellite.incarnation
        wait_until(
            lambda: (found := self.record.registration()) and found.incarnation == incarnation,
            "Replication says that it is here",
        )
        self.record.clear(base=confirmed)
        self.fencing_token = self.record.give_grant(incarnation, confirmed)
        self.wakeup.wake("replication")

    def write(self, *sizes: int, fill: int = 1) -> int:
        """AppendEntries units and publish, as CommitLog does. Returns: the end."""
        for size in sizes:
            room = self.size - self.end % self.size
            if room < size:
                self._unit(bytes(room))
            self._unit(bytes([fill]) * size)
        self.control.publish_appended(self.end)
        self.wakeup.wake("replication")
        return self.end

    def _unit(self, data: bytes) -> None:
        if not self.segments.files or self.end >= self.segments.files[-1].start + self.size:
            self.segments.create_next()
        file = self.segments.files[-1]
        file.pwrite(data, self.end - file.start)
        stop = self.end + len(data)
        self.chain.append([ChainUnit(self.end, stop, 0, crc32c(data), self.chain.value)])
        self.end = stop

    def sync(self) -> None:
        """Publish the end as synced, as GroupCommit does."""
        self.flusher.publish_position(self.flusher_token, self.end)
        self.wakeup.wake("replication")

    def submit(self) -> int:
        """Hand over a put that ends at the log's end. Returns: its number."""
        self.number += 1
        assert self.rings.requests.push((self.number, self.end, Clock().monotonic_ms()))
        self.wakeup.wake("replication")
        return self.number

    @property
    def confirmed(self) -> int:
        return self.record.position(self.fencing_token)

    def bytes(self, stop: int) -> bytes:
        return read_log(self.segments, stop)

    def close(self) -> None:
        self.rings.close()
        self.control.close()
        self.wakeup.close()
        self.chain.close()
        self.segments.close()


class CommitLogPort:
    """A follower's store port over a real CommitLog. The test syncs it."""

    def __init__(self, root: Path, *, segment_size_bytes: int) -> None:
        config = StoreConfig(segment_size_bytes=segment_size_bytes)
        self.log = CommitLog(root, config, files=Files(), clock=Clock())
        recover(self.log, 0)
        self.changed = threading.Condition()
        self.full: Exception | None = None
        #: (confirmed end, epoch) that leaders named
        self.heard: list[tuple[int, int]] = []

    def append_units(self, units, data) -> None:
        if self.full is not None:
            raise self.full
        self.log.append_units(units, data)

    def adopt_units(self, units, data) -> None:
        self.log.adopt_units(units, data)

    def same_until(self, units, data) -> int:
        return self.log.same_until(units, data)

    def truncate(self, offset) -> None:
        self.log.truncate(offset)

    def is_empty(self) -> bool:
        return self.log.is_empty

    def begin_at(self, start, chain_value) -> None:
        self.log.begin_at(start, chain_value)

    def tail(self):
        last = self.log.chain.last
        return LogTail(self.log.end, self.log.chain.value, 0 if last is None else last.epoch)

    def chain_value_at(self, offset):
        return self.log.chain.value_at(offset)

    def durable(self) -> int:
        return self.log.synced

    def confirmed(self) -> int:
        return self.log.confirmed

    def advance_confirmed(self, confirmed) -> None:
        self.log.note_confirmed(min(confirmed, self.log.end))

    def note_heard(self, confirmed, epoch) -> None:
        self.heard.append((confirmed, epoch))

    def is_stopping(self) -> bool:
        return False

    def wait_durable(self, offset, timeout_ms) -> int:
        with self.changed:
            self.changed.wait_for(lambda: self.log.synced >= offset, timeout_ms / 1000)
        return self.log.synced

    def sync(self) -> None:
        self.log.sync()
        with self.changed:
            self.changed.notify_all()

    def bytes(self, stop: int) -> bytes:
        return read_log(self.log.segments, stop)

    def close(self) -> None:
        self.log.close(clean=False)


def read_log(log_queue: MappedFileQueue, stop: int) -> bytes:
    found = b""
    for file in log_queue.files:
        found += bytes(file.read_view()[: max(0, stop - file.start)])
    return found


class MemoryStream:
    """The leader's end of a stream whose other end a FollowerSession serves in a thread."""

    def __init__(self, session: FollowerSession) -> None:
        self._to_follower: queue.Queue = queue.Queue()
        self._to_leader: queue.Queue = queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(session,), daemon=True)
        self._thread.start()

    def _serve(self, session: FollowerSession) -> None:
        try:
            # The leader may hang up in the middle of an answer.
            with contextlib.suppress(Unavailable):
                session.run(iter(self._to_follower.get, None), self._answer)
        finally:
            self._closed.set()
            self._to_leader.put(None)

    def _answer(self, frame: bytes, body) -> None:
        if self._closed.is_set():
            raise Unavailable("the leader hung up")
        self._to_leader.put((frame, body))

    def send(self, header: bytes, body) -> None:
        if self._closed.is_set():
            raise Unavailable("the follower hung up")
        self._to_follower.put((header, body))

    def receive(self):
        frame = self._to_leader.get()
        if frame is None:
            raise Unavailable("the follower hung up")
        return frame

    def abort(self) -> None:
        self._closed.set()
        self._to_follower.put(None)
        self._to_leader.put(None)

    def close(self) -> None:
        self.abort()


class MemoryTransport:
    """Connects to the session of an endpoint, while there is one."""

    def __init__(self) -> None:
        #: else a stream could begin that `cut` does not see
        self._lock = threading.Lock()
        self.sessions: dict[str, FollowerSession] = {}
        self.streams: dict[str, list[MemoryStream]] = {}

    def connect(self, endpoint: str) -> MemoryStream:
        with self._lock:
            if endpoint not in self.sessions:
                raise Unavailable(f"no process listens at {endpoint}")
            stream = MemoryStream(self.sessions[endpoint])
            self.streams.setdefault(endpoint, []).append(stream)
            return stream

    def cut(self, endpoint: str) -> None:
        """A follower's process is gone."""
        with self._lock:
            self.sessions.pop(endpoint, None)
            streams = self.streams.pop(endpoint, [])
        for stream in streams:
            stream.close()
            stream._thread.join(TIMEOUT_S)


class Pair:
    """A leader, its followers (as a rule one), and the present life of Replication."""

    def __init__(
        self,
        root: Path,
        *,
        segment_size_bytes: int = 65536,
        limits=None,
        slave_timeout_ms: int = 30_000,
        followers: int = 1,
        voters: tuple[int, ...] | None = None,
    ) -> None:
        """Args: `voters`: the replicas that count; None: all."""
        self.size = segment_size_bytes
        self.limits = limits
        self.slave_timeout_ms = slave_timeout_ms
        self.leader = Leader(root / "leader", segment_size_bytes=segment_size_bytes)
        self.transport = MemoryTransport()
        self.lives = 0
        self.followers = {
            replica: CommitLogPort(
                root / f"follower-{replica}", segment_size_bytes=segment_size_bytes
            )
            for replica in range(1, 1 + followers)
        }
        self.follower = self.followers[1]
        self.voters = (0, *self.followers) if voters is None else voters
        for replica in self.followers:
            self.start_follower(replica)
        self.start_replication(0)

    def start_follower(self, replica: int = 1) -> None:
        """A new process over the same log: its bytes are not records, so it could not recover."""
        self.lives += 1
        self.transport.sessions[f"replica-{replica}"] = new_session(
            self.followers[replica],
            {"cluster_id": CLUSTER_ID, "shard": 0, "replica": replica, "incarnation": self.lives},
        )

    def stop_follower(self, replica: int = 1) -> None:
        self.transport.cut(f"replica-{replica}")

    def start_replication(self, confirmed: int) -> None:
        self.replicator = Replicator(
            self.leader.root,
            StoreConfig(
                segment_size_bytes=self.size,
                slave_timeout_ms=self.slave_timeout_ms,
                sync_flush_timeout_ms=30_000,
            ),
            cluster_id=CLUSTER_ID,
            shard=0,
            replica=0,
            followers=tuple(self.followers),
            voters=self.voters,
            transport=self.transport,
            peer_endpoint=lambda replica: f"replica-{replica}",
            limits=self.limits,
        )

        self.exit_codes: list[int] = []
        self.thread = threading.Thread(
            target=lambda: self.exit_codes.append(self.replicator.serve()), daemon=True
        )
        self.thread.start()
        self.leader.grant(self.replicator, confirmed)

    def stop_replication(self) -> int:
        self.replicator.stop()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        return self.exit_codes[0]

    def stream(self, replica: int = 1) -> dict[str, Any]:
        """How far the stream to a follower is; empty before the grant."""
        found: list[dict[str, Any]] = self.replicator.status()["followers"]
        return next((each for each in found if each["replica"] == replica), {})

    def wait_matched(self, end: int, replica: int = 1) -> None:
        wait_until(lambda: self.stream(replica).get("matched_end") == end, f"matched up to {end}")

    def wait_complete(self, replica: int) -> None:
        wait_until(lambda: self.stream(replica).get("is_complete"), "its acks count")

    def wait_confirmed(self, end: int) -> None:
        wait_until(lambda: self.leader.confirmed == end, f"confirmed up to {end}")

    def close(self) -> None:
        if self.thread.is_alive():
            self.stop_replication()
        for replica, port in self.followers.items():
            self.stop_follower(replica)
            port.close()
        self.leader.close()
