"""One shard as a client meets it: a real leader with a real Flight server, its flusher in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from raymq.actors.replica import open_replica
from raymq.actors.server.flight.flight_server import Server, serve
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.cluster.cluster import Cluster
from raymq.store.config.store_config import StoreConfig
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_ID = "5e" * 16
TOKEN = "t0ken"
SEGMENT_BYTES = 256 * 1024
#: nothing is late
PATIENT = StoreConfig(
    segment_size_bytes=SEGMENT_BYTES, prewrite_window_bytes=64 * 1024, sync_flush_timeout_ms=20_000
)
#: a put that waits for an absent satellite is answered soon
HASTY = StoreConfig(
    segment_size_bytes=SEGMENT_BYTES,
    prewrite_window_bytes=64 * 1024,
    sync_flush_timeout_ms=200,
    slave_timeout_ms=200,
)

FLUSHER = """
import sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig

FlushService(sys.argv[1], "group_commit", StoreConfig(segment_size_bytes=int(sys.argv[2]))).run()
"""


class ServedShard:
    """Made with `mirror` its follower is away: no process replicates."""

    def __init__(
        self,
        root: Path,
        config: StoreConfig = PATIENT,
        *,
        mirror: bool = False,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.root = root
        self.shard, self._shards = shard, shards
        self._roles = ("group_commit", "replication") if mirror else ("group_commit",)
        self._config = config
        self._flushers: list[subprocess.Popen[bytes]] = []
        self._server: Server | None = None
        self.host: ReplicaHost
        self.endpoints: dict[int, str] = {}

        self.cluster = Cluster(
            name="served",
            cluster_id=CLUSTER_ID,
            shards=1,
            token=TOKEN,
            endpoints={shard: "127.0.0.1:1"},
            resolver=lambda: dict(self.endpoints),
        )

    def up(self) -> None:
        """Open the store and serve it."""
        identity = {
            "cluster_id": CLUSTER_ID,
            "shard": self.shard,
            "shards": self._shards,
            "name": "served",
        }
        self.host = open_replica(self.root, self._config, identity=identity, roles=self._roles)
        self._server = serve(
            self.host,
            host="127.0.0.1",
            port=0,
            token=TOKEN,
            on_bound=lambda port: self.host.set_store_host("127.0.0.1", port),
        )
        self.endpoints = {self.shard: f"127.0.0.1:{self._server.port}"}
        self.host.addresses.set_routes({str(self.shard): self.endpoints[self.shard]})
        self.cluster.refresh()
        if self._flushers:
            # A leader that starts ends the flusher before it.
            self.start_flusher()

    def down(self) -> None:
        """Stop serving. The store is closed in order."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self.host.close(1.0)

    def start_flusher(self) -> None:
        """GroupCommit, also of every later opening."""
        arguments = [sys.executable, "-c", FLUSHER, str(self.root)]
        arguments.append(str(self._config.segment_size_bytes))
        self._flushers.append(
            subprocess.Popen(arguments, cwd=ROOT, env=dict(os.environ), stderr=subprocess.DEVNULL)
        )

    def stop_flusher(self) -> None:
        """End GroupCommit."""
        while self._flushers:
            flusher = self._flushers.pop()
            flusher.kill()
            flusher.wait()

    def expire(self, topic: str) -> int:
        """Delete all files but the last ones, of a store with file_reserved_hours=0. Returns: the first offset left."""

        def first() -> int:
            (held,) = self.cluster.describe_topic(topic)["queues"]
            return int(held["min_offset"])

        def ask() -> None:
            self.cluster.call(0, "delete_expired_files", {})
            threading.Event().wait(0.05)

        until(lambda: first() > 1, ask)
        return first()

    def __enter__(self) -> ServedShard:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cluster.close()
        self.down()
        self.stop_flusher()


class ServedCluster:
    """A cluster of several such shards."""

    def __init__(self, root: Path, shards: int = 2) -> None:
        self.shards = [
            ServedShard(root / str(shard), shard=shard, shards=shards) for shard in range(shards)
        ]
        self.cluster = Cluster(
            name="served",
            cluster_id=CLUSTER_ID,
            shards=shards,
            token=TOKEN,
            endpoints={},
            resolver=lambda: {
                shard: there for each in self.shards for shard, there in each.endpoints.items()
            },
        )

    def __enter__(self) -> ServedCluster:
        for shard in self.shards:
            shard.up()
            shard.start_flusher()
        self.cluster.refresh()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cluster.close()
        for shard in self.shards:
            shard.__exit__(None, None, None)
