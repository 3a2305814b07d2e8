"""A shard of several replicas in a Ray of its own, whose processes a test kills and stops under load."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import raymq
from raymq.actors.ray.replica_files import read_endpoint
from raymq.client.consume.range_reader import read_range
from raymq.client.messages.columns import message_batch
from raymq.client.transport.flight_client import ShardConnection
from raymq.cluster.deploy import owned_ray, ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.base.files import Files
from raymq.store.tools.inspect import verify
from tests.support.history import History, Load, Read, Reader, faults
from tests.support.lean_ray import LEAN
from tests.support.leftovers import disk_root
from tests.support.waiting import until

TOPIC, ASIDE = "load", "aside"
PRODUCERS, QUEUES = 2, 3
#: of each file of the commit log
FILE_BYTES = 1 << 20
#: of each replica of three
ROLES = ("commit_log", "replication", "group_commit")


class ReplicatedShard:
    """One shard of several replicas in its own Ray, started as a user does, outside of this process."""

    def __init__(self, place: Path, replicas: int, variables: Mapping[str, str]) -> None:
        """Args: `variables`: of its Ray and its processes."""
        #: of which the other methods speak
        self.number = 0
        self.replicas = range(replicas)
        self.paths = ClusterPaths(place / "data")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY")},
            **LEAN,
            "RAYMQ_HOME": str(place / "home"),
            "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
            **variables,
        }
        self.cluster: raymq.Cluster

    def sibling(self, number: int) -> ReplicatedShard:
        """Another shard of the same cluster."""
        found = copy.copy(self)
        found.number = number
        return found

    def command(self, *words: str) -> dict[str, Any]:
        """Run `raymq` and take its answer."""
        done = subprocess.run(
            [sys.executable, "-m", "raymq", *words, "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=600,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def start(self, *options: str) -> None:
        """Create or resume it."""
        self.command("start", self.paths.data_dir, *options)

    def owned(self) -> ray_host.OwnedRay:
        """The Ray that `start` started."""
        owned = ray_host.load_owned(self.paths, Files())
        assert owned is not None
        return owned

    def status(self, replica: int) -> dict[str, Any]:
        """A replica's own word. Raises: RayMQError while it does not answer."""
        return self.call(replica, "status", {})

    def says(self, replica: int, holds: Callable[[dict[str, Any]], object]) -> bool:
        """Whether something holds by a replica's own word. False while it starts again and does not answer."""
        with contextlib.suppress(RayMQError, KeyError):
            return bool(holds(self.status(replica)))
        return False

    def call(self, replica: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Run an operation at one replica. Raises: RayMQError when it refuses or does not answer."""
        endpoint = read_endpoint(self.paths.replica(self.number, replica))
        if endpoint is None:
            raise Unavailable(f"replica {replica} has not said where it listens")
        cluster = self.cluster
        connection = ShardConnection(
            endpoint, cluster.token, cluster.cluster_id, shard=self.number, ca=cluster.ca
        )
        try:
            return connection.call(op, args, timeout=2.0)
        finally:
            connection.close()

    def leader(self) -> int | None:
        """The replica that leads and takes puts, of those that answer; None: none does."""
        epochs: dict[int, int] = {}
        for replica in self.replicas:
            with contextlib.suppress(RayMQError):
                facts = self.status(replica)
                if facts["mode"] == "leader" and facts.get("writable"):
                    epochs[replica] = facts["epoch"]
        return max(epochs, key=lambda each: epochs[each], default=None)

    def lease(self, replica: int, role: str) -> dict[str, Any]:
        """{"pid", "granted"} of the process that has a role now; {} while CommitLog does not answer."""
        try:
            facts = self.status(replica)
        except RayMQError:
            return {}
        if facts.get("state") != "RUNNING":
            return {}
        if role == "commit_log":
            return {"pid": facts["pid"], "granted": True}
        lease: dict[str, Any] = facts["supervisor"]["roles"][role]
        return lease if lease["granted"] else {}

    def log_file(self, replica: int, start: int) -> bytes:
        """The file of the replica's log that begins at a byte offset."""
        place = self.paths.replica(self.number, replica) / "commitlog"
        return (place / f"{start:020d}").read_bytes()

    def commit_log(self, replica: int, stop: int) -> bytes:
        """The replica's log, up to a byte offset."""
        files = sorted((self.paths.replica(self.number, replica) / "commitlog").iterdir())
        return b"".join(path.read_bytes() for path in files)[:stop]

    def read(self, topic: str) -> Iterator[Read]:
        """Every message that is visible now."""
        for facts in self.cluster.describe_topic(topic)["queues"]:
            queue, shard = facts["queue_id"], facts["shard"]
            low, high = facts["min_offset"], facts["max_offset"]
            for records in read_range(self.cluster, topic, queue, shard, low, high):
                rows = message_batch(shard, records)
                offsets = rows.column("offset").to_pylist()
                for offset, text in zip(offsets, rows.column("body").to_pylist(), strict=True):
                    yield Read(queue, offset, text)


class Target:
    """A process pinned by a descriptor: a signal never reaches another that got its pid."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor = os.pidfd_open(pid)

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        self.send(signal.SIGCONT)
        os.close(self._descriptor)

    def ended(self) -> bool:
        """Whether the process has ended."""
        # Not select(): it refuses a descriptor above 1,023.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def stands_still(self) -> bool:
        """Whether a SIGSTOP has reached all threads. One that is in a sync ends it before."""
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            tasks = list(Path(f"/proc/{self._pid}/task").glob("*/stat"))
            return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        return False

    def send(self, number: signal.Signals) -> None:
        """A signal; one that has ended needs none."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


class LongestGap:
    """The longest time in which no producer got a receipt, measured in a thread."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._clock = Clock()
        self._longest_ms = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the measurement. Returns: ms."""
        self._ended.set()
        self._thread.join()
        return self._longest_ms

    def _run(self) -> None:
        count, since_ms = 0, self._clock.monotonic_ms()
        while not self._ended.wait(Load.PACE_S):
            acked, now_ms = self._history.count(), self._clock.monotonic_ms()
            if acked > count:
                count, since_ms = acked, now_ms
            self._longest_ms = max(self._longest_ms, now_ms - since_ms)


@contextlib.contextmanager
def started_load(cluster: raymq.Cluster) -> Iterator[Load]:
    """Producers that write to TOPIC all the time, and have receipts from each queue."""
    with Load(cluster, TOPIC, History(), producers=PRODUCERS, queues=QUEUES) as running:
        until(lambda: len(running.history.acked()) == PRODUCERS * QUEUES, running.pause)
        yield running


@contextlib.contextmanager
def started_readers(cluster: raymq.Cluster) -> Iterator[list[Reader]]:
    """Consumers that see the same log all the time, whichever replica leads, and whichever they read."""
    with (
        Reader(cluster, TOPIC) as of_leader,
        Reader(cluster, TOPIC, read_from="nearest") as of_nearest,
    ):
        yield [of_leader, of_nearest]


def wait_for_writes(load: Load) -> None:
    """Both producers get receipts for what they send from now on."""
    sent = load.history.sent()
    until(lambda: load.history.acked_beyond(sent), load.pause)


def wait_for_lease(
    shard: ReplicatedShard, load: Load, replica: int, role: str, *, but: int = 0
) -> int:
    """The pid of the process that works in a role, once it is another than `but`."""
    lease: dict[str, Any] = {}

    def look() -> None:
        lease.clear()
        lease.update(shard.lease(replica, role))
        load.pause()

    until(lambda: bool(lease) and lease["pid"] != but, look)
    return int(lease["pid"])


def pause() -> None:
    """Wait for a moment."""
    threading.Event().wait(Load.PACE_S)


def wait_for_leader(shard: ReplicatedShard, *, but: int | None = None) -> int:
    """The replica that leads and takes puts, once it is another than `but`."""
    found: list[int] = []

    def look() -> None:
        leader = shard.leader()
        found[:] = [] if leader in (None, but) else [leader]
        if not found:
            pause()

    until(lambda: bool(found), look)
    return found[0]


def follower_of(shard: ReplicatedShard) -> int:
    """A replica that does not lead: the last one."""
    leader = wait_for_leader(shard)
    return max(each for each in shard.replicas if each != leader)


def pids_of(shard: ReplicatedShard, load: Load, replica: int) -> dict[str, int]:
    """Role -> pid of a replica whose roles all work."""
    return {role: wait_for_lease(shard, load, replica, role) for role in ROLES}


def kill(pids: Iterable[int]) -> None:
    """End processes at once, and wait for their ends."""
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(Target(pid)) for pid in pids]
        for target in targets:
            target.send(signal.SIGKILL)
        for target in targets:
            until(target.ended, pause)


def kill_leader(shard: ReplicatedShard) -> None:
    """End the CommitLog that leads now by SIGKILL."""
    leader = wait_for_leader(shard)
    lease: dict[str, Any] = {}

    def look() -> None:
        lease.update(shard.lease(leader, "commit_log"))
        pause()

    until(lambda: bool(lease), look)
    with Target(lease["pid"]) as target:
        target.send(signal.SIGKILL)


@contextlib.contextmanager
def standing_still(shard: ReplicatedShard, load: Load, replica: int) -> Iterator[None]:
    """All processes of a replica stand still."""
    pids = pids_of(shard, load, replica)
    with contextlib.ExitStack() as targets:
        # Its satellites first: they would end a CommitLog that is silent for too long.
        for role in reversed(ROLES):
            targets.enter_context(Target(pids[role])).send(signal.SIGSTOP)
        yield


def is_complete(facts: dict[str, Any]) -> bool:
    """Whether a replica counts for receipts, by its status."""
    return bool(facts["is_complete"])


def wait_until_complete(shard: ReplicatedShard, replica: int) -> None:
    """A replica follows, counts, and has everything durably that its leader has now."""
    end = shard.status(wait_for_leader(shard))["appended"]

    def is_there(facts: dict[str, Any]) -> bool:
        return bool(facts["mode"] == "follower" and facts["is_complete"] and facts["synced"] >= end)

    until(lambda: shard.says(replica, is_there), pause)


def check_logs(shard: ReplicatedShard) -> int:
    """The logs of all replicas are the same bytes up to the confirmed end. Returns: that end."""
    confirmed = int(shard.status(wait_for_leader(shard))["confirmed"])
    for replica in shard.replicas:
        # One that a test killed may still be starting.
        until(
            lambda each=replica: shard.says(each, lambda facts: facts["synced"] >= confirmed),
            pause,
        )
    for start in range(0, confirmed, FILE_BYTES):
        # File by file: together they may be more than the memory has room for.
        logs = [shard.log_file(each, start)[: confirmed - start] for each in shard.replicas]
        assert len(logs[0]) == min(FILE_BYTES, confirmed - start)
        for replica, log in enumerate(logs):
            assert log == logs[0], (
                f"replica {replica} differs from replica 0 in the file at {start}"
            )
    return confirmed


@contextlib.contextmanager
def started_shard(
    replicas: int,
    name: str,
    variables: Mapping[str, str] | None = None,
    *,
    shards: int = 1,
    options: Sequence[str] = (),
) -> Iterator[ReplicatedShard]:
    """The first shard of a cluster with the topics TOPIC and ASIDE.

    Args: `variables`: of its Ray and its processes; None: none. `options`: further ones of `raymq start`.
    """
    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=disk_root()))
    world = ReplicatedShard(place, replicas, variables or {})
    try:
        world.start(
            *("--name", name, "--shards", str(shards), "--replicas", str(replicas)),
            *("--segment-size-bytes", str(FILE_BYTES), *options),
        )
        world.cluster = raymq.connect(world.paths.data_dir)
        world.cluster.create_topic(TOPIC, queues=QUEUES)
        world.cluster.create_topic(ASIDE, queues=1)
        with world.cluster:
            yield world
    finally:
        owned_ray.stop_owned(world.paths, files=Files(), clock=Clock())
        shutil.rmtree(place)


def check(
    shard: ReplicatedShard, history: History, seen: Sequence[list[Read]] = (), *, topic: str = TOPIC
) -> int:
    """Every acknowledged message is there once and in order. Returns: how many are there.

    Args: `seen`: what each consumer got meanwhile. `topic`: of the history.
    """
    acked = history.acked()
    # Messages that only the leader acknowledged become visible when the follower has them.
    leader = wait_for_leader(shard)
    end = shard.status(leader)["appended"]
    until(lambda: shard.says(leader, lambda facts: facts["confirmed"] >= end), pause)
    reads = list(shard.read(topic))
    found = faults(acked, reads, history.sent(), seen)
    assert not found, f"{len(found)} faults, such as {found[:5]}"
    return len(reads)


def check_to_the_end(shard: ReplicatedShard, load: Load, readers: Sequence[Reader]) -> None:
    """All logs are the same bytes, each reader got every message, and all stores are sound. The shard is stopped."""
    load.stop()
    check_logs(shard)
    count = check(shard, load.history)
    until(lambda: all(len(each.got) >= count or each.failed for each in readers), pause)
    for each in readers:
        each.stop()
    assert check(shard, load.history, seen=[each.got for each in readers]) == count > 0
    assert shard.command("stop", shard.paths.data_dir)["clean"]
    for replica in shard.replicas:
        assert verify(shard.paths.replica(0, replica)) == []
