"""Replicas of one shard in one process, with equal logs of several files, of which a test damages some.

No satellite runs: the test syncs, confirms and replicates. A call of another replica is a call of memory, through the
JSON that would travel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raymq.actors.protocol.log_units import unpack_sound_bytes
from raymq.actors.replica import open_replica
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainUnit
from raymq.store.log.mending.fitting import SoundBytes
from raymq.store.queues.raw_records import decode_records
from tests.support.batches import request
from tests.support.replica_pair import TIMEOUT_S, wait_until
from tests.support.roles import log_of

SEGMENT = 256 * 1024
#: the scrub runs when a test steps it
CONFIG = StoreConfig(
    segment_size_bytes=SEGMENT, prewrite_window_bytes=64 * 1024, scrub_bytes_per_s=0
)
BODIES = [b"pay %04d EUR " % number * 300 for number in range(200)]
ROWS_PER_PUT = 4


class Link:
    """Calls of one replica by another one: `PeerCalls`."""

    def __init__(self, shard: MendedShard, called: int) -> None:
        self._shard = shard
        self._called = called

    def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
        raise Unavailable("no elections here")

    def log_units(self, start: int, stop: int, timeout_s: float) -> SoundBytes:
        host = self._shard.hosts.get(self._called)
        if host is None:
            raise Unavailable("no answer")
        self._shard.asked.append(self._called)
        answer = host.call("log_units", {"start": start, "stop": stop})
        return unpack_sound_bytes(json.loads(json.dumps(answer)))

    def close(self) -> None:
        return


class MendedShard:
    """Replica 0 leads. All replicas hold BODIES in queue 0 of topic t, confirmed; the last file is not full."""

    def __init__(
        self,
        root: Path,
        replicas: int = 2,
        *,
        files: Callable[[], Files] = Files,
        connect: Callable[[int], Any] | None = None,
        config: StoreConfig = CONFIG,
    ) -> None:
        """Args: `files`: makes the disk of each replica. `connect`: instead of calls of memory."""
        self.root = root
        self.config = config
        self._replicas = replicas
        self._connect = connect or (lambda other: Link(self, other))
        self.disks: dict[int, Files] = {each: files() for each in range(replicas)}
        self.hosts: dict[int, ReplicaHost] = {}
        #: replicas that were asked for bytes
        self.asked: list[int] = []
        for replica in range(replicas):
            self.open(replica)
        self._fill()

    def open(self, replica: int) -> ReplicaHost:
        self.hosts[replica] = open_replica(
            self.root / str(replica),
            replace(self.config),
            identity={"cluster_id": "c" * 32, "shard": 0, "replica": replica, "incarnation": 1},
            roles=("group_commit", "replication") if self._replicas > 1 else ("group_commit",),
            # Replica 0 leads without votes, as that of a shard of two does.
            members=range(self._replicas if replica else min(2, self._replicas)),
            candidates=(0,),
            connect_peer=self._connect,
            files=self.disks[replica],
        )
        return self.hosts[replica]

    @property
    def leader(self) -> ReplicaHost:
        return self.hosts[0]

    def _fill(self) -> None:
        store = self.leader.store
        store.topics.create("t", 1, [0])
        self.put(BODIES)

    def put(self, bodies: list[bytes]) -> None:
        """Append messages, and have them on all replicas, confirmed and dispatched."""
        for at in range(0, len(bodies), ROWS_PER_PUT):
            self.leader.store.put(request(list(bodies[at : at + ROWS_PER_PUT])))
        self.replicate()
        self.await_dispatch()

    def replicate(self, *, is_told: bool = True) -> None:
        """Bring every follower to the leader's end, and confirm it everywhere; not `is_told`: at the leader only."""
        end = self.leader.log.end
        self.leader.log.sync()
        for replica, host in self.hosts.items():
            if replica:
                port = log_of(host)
                port.frame_epoch = lambda: self.leader.log.epoch
                for unit in self.leader.log.chain.units(host.log.end, end):
                    data = self.leader.log.reads.raw(unit.start, unit.end)
                    port.append_units([unit], memoryview(data))
                host.log.sync()
                if is_told:
                    port.advance_confirmed(end)
        self.leader.log.note_confirmed(end)
        for host in self.hosts.values():
            host.dispatcher.wake()

    def await_dispatch(self) -> None:
        """Wait until every replica has dispatched all."""
        end = self.leader.log.confirmed
        for host in self.hosts.values():
            # Asked for, a follower dispatches at once: else it lingers for half a second.
            host.dispatcher.await_dispatched(end, int(TIMEOUT_S * 1000))
            wait_until(lambda h=host: h.store.dispatched >= end, "all is dispatched")

    def units(self, replica: int = 0) -> list[ChainUnit]:
        log = self.hosts[replica].log
        return log.chain.units(0, log.end)

    def unit_of(self, row: int) -> ChainUnit:
        """The unit with a message of BODIES."""
        queue = self.leader.store.consume_queues.get("t", 0)
        position = int(queue.read(row, 1)["position"][0])
        return next(unit for unit in self.units() if unit.start <= position < unit.end)

    def segment(self, replica: int, offset: int) -> Path:
        return self.root / str(replica) / "commitlog" / f"{offset - offset % SEGMENT:020d}"

    def rot(self, replica: int, row: int) -> ChainUnit:
        """Change a byte in the body of a message on the disk of a replica. Returns: its unit."""
        queue = self.leader.store.consume_queues.get("t", 0)
        position = int(queue.read(row, 1)["position"][0]) + 200
        with self.segment(replica, position).open("r+b") as file:
            file.seek(position % SEGMENT)
            byte = file.read(1)[0]
            file.seek(position % SEGMENT)
            file.write(bytes([byte ^ 0x55]))
        return self.unit_of(row)

    def read_whole(self, replica: int = 0) -> list[bytes]:
        """Every body as the services of that replica read it. Raises: Corrupt."""
        store = self.hosts[replica].store
        found: list[bytes] = []
        while len(found) < len(BODIES):
            part = store.fetch_whole("t", 0, len(found), max_bytes=1 << 20, max_records=1000)
            found += decode_records(part.records, columns=("body",)).column(0).to_pylist()
        return found

    def close(self, replica: int | None = None) -> None:
        for each in list(self.hosts) if replica is None else [replica]:
            self.hosts.pop(each).close(0.0)
