"""A shard of three replicas under load while its processes are killed and stopped: no promise is broken."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.actors.ray.replica_files import read_endpoint
from raymq.cluster.consume.range_reader import read_range
from raymq.cluster.deploy import owned_ray, process_tree, ray_host
from raymq.cluster.messages.columns import message_batch
from raymq.cluster.paths import ClusterPaths
from raymq.cluster.transport.flight_client import ShardConnection
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError
from raymq.store.base.files import Files
from raymq.store.config.promise import ACKS
from raymq.store.tools.inspect import verify
from tests.support.history import History, Load, Read, faults
from tests.support.lean_ray import LEAN
from tests.support.waiting import until

TOPIC, ASIDE = "load", "aside"
PRODUCERS, QUEUES = 2, 3
LEADER, FOLLOWERS = 0, (1, 2)
FOLLOWER = FOLLOWERS[0]
#: longer than supervisor.STALE_MS, so that satellites which stand still are replaced; shorter than heartbeat.SILENT_MS
STOPPED_S = 3.0
VICTIMS = [
    pytest.param(LEADER, "commit_log", id="leader's CommitLog"),
    pytest.param(LEADER, "group_commit", id="leader's GroupCommit"),
    pytest.param(LEADER, "replication", id="Replication"),
    pytest.param(FOLLOWER, "commit_log", id="follower's CommitLog"),
    pytest.param(FOLLOWER, "group_commit", id="follower's GroupCommit"),
]


class ReplicatedShard:
    """One shard of three replicas in its own Ray, started as a user does, outside of this process."""

    def __init__(self, place: Path) -> None:
        self.paths = ClusterPaths(place / "data")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY")},
            **LEAN,
            "RAYMQ_HOME": str(place / "home"),
            "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
        }
        self.cluster: raymq.Cluster

    def command(self, *words: str) -> dict[str, Any]:
        """Run `raymq` and take its answer."""
        done = subprocess.run(
            [sys.executable, "-m", "raymq", *words, "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=120,
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
        if replica == LEADER:
            facts: dict[str, Any] = self.cluster.status()["shards"][0]
            return facts
        endpoint = read_endpoint(self.paths.replica(0, replica))
        assert endpoint is not None
        connection = ShardConnection(endpoint, self.cluster.token, self.cluster.cluster_id, shard=0)
        try:
            return connection.call("status", timeout=2.0)
        finally:
            connection.close()

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

    def commit_log(self, replica: int, stop: int) -> bytes:
        """The replica's log, up to a byte offset."""
        files = sorted((self.paths.replica(0, replica) / "commitlog").iterdir())
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

    def send(self, number: signal.Signals) -> None:
        """A signal; one that has ended needs none."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=Path.home()))
    world = ReplicatedShard(place)
    try:
        world.start(
            *("--name", "kill", "--shards", "1", "--replicas", "3"),
            *("--segment-size-bytes", str(1 << 20)),
        )
        world.cluster = raymq.connect(world.paths.data_dir)
        world.cluster.create_topic(TOPIC, queues=QUEUES)
        world.cluster.create_topic(ASIDE, queues=1)
        with world.cluster:
            yield world
    finally:
        owned_ray.stop_owned(world.paths, files=Files(), clock=Clock())
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with Load(
        shard.cluster, TOPIC, History(), producers=PRODUCERS, queues=QUEUES, acks=ACKS
    ) as running:
        until(lambda: len(running.history.acked()) == PRODUCERS * QUEUES, running.pause)
        yield running


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


def check(shard: ReplicatedShard, history: History) -> int:
    """Every acknowledged message is there once and in order. Returns: how many are there."""
    acked = history.acked()
    # Messages that only the leader acknowledged become visible when the follower has them.
    end = shard.status(LEADER)["appended"]
    wait = threading.Event()
    until(lambda: shard.status(LEADER)["confirmed"] >= end, lambda: wait.wait(Load.PACE_S))
    reads = list(shard.read(TOPIC))
    found = faults(acked, reads, history.sent())
    assert not found, f"{len(found)} faults, such as {found[:5]}"
    return len(reads)


@pytest.mark.slow
@pytest.mark.parametrize(("replica", "role"), VICTIMS)
def test_writes_come_back_after_kill_9(
    shard: ReplicatedShard, load: Load, replica: int, role: str
) -> None:
    old = wait_for_lease(shard, load, replica, role)
    with Target(old) as target:
        target.send(signal.SIGKILL)
    wait_for_writes(load)
    wait_for_lease(shard, load, replica, role, but=old)


@pytest.mark.slow
@pytest.mark.parametrize(("replica", "role"), VICTIMS)
def test_writes_come_back_after_a_process_stood_still(
    shard: ReplicatedShard, load: Load, replica: int, role: str
) -> None:
    old = wait_for_lease(shard, load, replica, role)
    with Target(old) as target:
        target.send(signal.SIGSTOP)
        # Ends early only when a producer fails.
        load.ended.wait(STOPPED_S)
        target.send(signal.SIGCONT)
    wait_for_writes(load)
    # A CommitLog goes on where it stood; a satellite was taken for dead and replaced.
    if role == "commit_log":
        assert wait_for_lease(shard, load, replica, role) == old
    else:
        wait_for_lease(shard, load, replica, role, but=old)


@pytest.mark.slow
@pytest.mark.parametrize("replica", [LEADER, FOLLOWER], ids=["leader", "follower"])
def test_writes_come_back_after_a_commit_log_hung(
    shard: ReplicatedShard, load: Load, replica: int
) -> None:
    old = wait_for_lease(shard, load, replica, "commit_log")
    with Target(old) as target:
        target.send(signal.SIGSTOP)
        # Only a satellite ends that: it kills the process, and Ray starts the next one.
        until(target.ended, load.pause)
        wait_for_lease(shard, load, replica, "commit_log", but=old)
    wait_for_writes(load)


def status_error(shard: ReplicatedShard) -> str:
    return str(shard.cluster.status()["shards"][0].get("error"))


@contextlib.contextmanager
def standing_still(shard: ReplicatedShard, load: Load, replica: int) -> Iterator[None]:
    """A follower whose processes stand still."""
    # The satellite first: it would have its CommitLog replaced.
    roles = ("group_commit", "commit_log")
    with contextlib.ExitStack() as targets:
        for pid in [wait_for_lease(shard, load, replica, role) for role in roles]:
            targets.enter_context(Target(pid)).send(signal.SIGSTOP)
        yield


@pytest.mark.slow
def test_without_one_of_two_followers_every_promise_is_kept(
    shard: ReplicatedShard, load: Load
) -> None:
    cluster = shard.cluster
    for replica in FOLLOWERS:
        with standing_still(shard, load, replica), cluster.producer(acks="quorum") as quorum:
            receipt = quorum.send(ASIDE, b"majority").result(30)
            end = receipt.offset + 1
            until(lambda named=f"replica {replica}": named in status_error(shard), load.pause)
            until(lambda end=end: cluster.describe_topic(ASIDE)["messages"] >= end, load.pause)


@pytest.mark.slow
def test_without_followers_only_the_leaders_promise_is_kept(
    shard: ReplicatedShard, load: Load
) -> None:
    cluster, texts = shard.cluster, [b"leader", b"quorum"]
    before = cluster.describe_topic(ASIDE)["messages"]
    with (
        cluster.producer(acks="leader") as leader,
        cluster.producer(acks="quorum", delivery_timeout_ms=8_000) as quorum,
    ):
        with contextlib.ExitStack() as stopped:
            for replica in FOLLOWERS:
                stopped.enter_context(standing_still(shard, load, replica))
            leader.send(ASIDE, texts[0]).result(10)
            unknown = quorum.send(ASIDE, texts[1])
            with pytest.raises(DeliveryUnknown) as reported:
                unknown.result(60)
            assert reported.value.status == "FLUSH_SLAVE_TIMEOUT"
            assert cluster.describe_topic(ASIDE)["messages"] == before
        # The same message once more, in its place: it is stored once.
        again = quorum.resend(unknown).result(60)
        assert (again.offset, again.duplicate) == (before + 1, True)
        until(lambda: cluster.describe_topic(ASIDE)["messages"] >= before + 2, load.pause)
    assert [read.body for read in shard.read(ASIDE)][before:] == texts
    wait_for_writes(load)


@pytest.mark.slow
def test_every_acknowledged_message_survived_the_processes(
    shard: ReplicatedShard, load: Load
) -> None:
    assert check(shard, load.history) > 0


@pytest.mark.slow
def test_a_killed_ray_is_started_again_with_every_message(
    shard: ReplicatedShard, load: Load
) -> None:
    owned = shard.owned()
    with Target(owned.pid) as target:
        assert process_tree.leader_alive(owned.family, Files())
        target.send(signal.SIGKILL)
    shard.start()
    assert shard.owned().pid != owned.pid
    wait_for_writes(load)
    load.stop()
    total = check(shard, load.history)
    assert total >= sum(map(len, load.history.acked().values()))


@pytest.mark.slow
def test_all_commit_logs_are_the_same_bytes_up_to_the_confirmed_end(
    shard: ReplicatedShard, load: Load
) -> None:
    load.stop()
    with shard.cluster.producer() as producer:
        # Several files, however slow the machine was.
        while shard.status(LEADER)["confirmed"] <= 3 << 20:
            producer.send(ASIDE, bytes(100_000)).result(30)
    confirmed = int(shard.status(LEADER)["confirmed"])
    wait = threading.Event()
    for replica in FOLLOWERS:
        until(
            lambda follower=replica: shard.status(follower)["synced"] >= confirmed,
            lambda: wait.wait(Load.PACE_S),
        )
    leader = shard.commit_log(LEADER, confirmed)
    assert len(leader) == confirmed
    assert all(shard.commit_log(replica, confirmed) == leader for replica in FOLLOWERS)
    assert shard.command("stop", shard.paths.data_dir)["clean"]
    for replica in (LEADER, *FOLLOWERS):
        assert verify(shard.paths.replica(0, replica)) == []
