"""A mirrored shard under load while its processes are killed and stopped: no promise is broken.

Replica 0 of two always leads. How three replicas replace their leader is in test_failover.py.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.cluster.deploy import process_tree
from raymq.store.base.errors import DeliveryUnknown
from raymq.store.base.files import Files
from raymq.store.config.promise import ACKS
from raymq.store.tools.inspect import verify
from tests.support.history import History, Load, LoadWithRefusals
from tests.support.replicated_shard import (
    ASIDE,
    PRODUCERS,
    QUEUES,
    TOPIC,
    ReplicatedShard,
    Target,
    check,
    pause,
    started_shard,
    wait_for_lease,
    wait_for_writes,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

LEADER, FOLLOWER = 0, 1
#: a topic whose messages need keys
REFUSALS = "refusals"
#: shorter than heartbeat.SILENT_MS, so that a CommitLog which stands still is not replaced
STOPPED_S = 3.0
SATELLITES = [
    pytest.param(LEADER, "group_commit", id="leader's GroupCommit"),
    pytest.param(LEADER, "replication", id="Replication"),
    pytest.param(FOLLOWER, "group_commit", id="follower's GroupCommit"),
]
VICTIMS = [
    pytest.param(LEADER, "commit_log", id="leader's CommitLog"),
    pytest.param(FOLLOWER, "commit_log", id="follower's CommitLog"),
    *SATELLITES,
]


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(2, "kill") as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with Load(
        shard.cluster, TOPIC, History(), producers=PRODUCERS, queues=QUEUES, acks=ACKS
    ) as running:
        until(lambda: len(running.history.acked()) == PRODUCERS * QUEUES, running.pause)
        yield running


@pytest.fixture(scope="module")
def refusals(shard: ReplicatedShard) -> Iterator[LoadWithRefusals]:
    """A producer of which the shard refuses a part of the messages, all the time."""
    shard.cluster.create_topic(REFUSALS, queues=QUEUES, compacted=True)
    running = LoadWithRefusals(shard.cluster, REFUSALS, History(), producers=1, queues=QUEUES)
    with running:
        until(lambda: running.refused, running.pause)
        yield running


@pytest.mark.parametrize(("replica", "role"), VICTIMS)
def test_writes_come_back_after_kill_9(
    shard: ReplicatedShard, load: Load, refusals: LoadWithRefusals, replica: int, role: str
) -> None:
    old = wait_for_lease(shard, load, replica, role)
    with Target(old) as target:
        target.send(signal.SIGKILL)
    wait_for_writes(load)
    wait_for_lease(shard, load, replica, role, but=old)


@pytest.mark.parametrize("replica", [LEADER, FOLLOWER], ids=["leader", "follower"])
def test_writes_come_back_after_a_commit_log_stood_still(
    shard: ReplicatedShard, load: Load, replica: int
) -> None:
    old = wait_for_lease(shard, load, replica, "commit_log")
    with Target(old) as target:
        target.send(signal.SIGSTOP)
        # Ends early only when a producer fails.
        load.ended.wait(STOPPED_S)
        target.send(signal.SIGCONT)
    wait_for_writes(load)
    # It goes on where it stood.
    assert wait_for_lease(shard, load, replica, "commit_log") == old


@pytest.mark.parametrize(("replica", "role"), SATELLITES)
def test_writes_come_back_after_a_satellite_hung(
    shard: ReplicatedShard, load: Load, replica: int, role: str
) -> None:
    old = wait_for_lease(shard, load, replica, role)
    with Target(old) as target:
        target.send(signal.SIGSTOP)
        # Only its CommitLog ends that: it takes the process for dead, kills it and grants the role to the next one.
        # How long that takes depends on the load, since a CommitLog that was late itself waits once more.
        until(target.ended, load.pause)
        wait_for_lease(shard, load, replica, role, but=old)
    wait_for_writes(load)


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


@contextlib.contextmanager
def standing_still(shard: ReplicatedShard, load: Load, replica: int) -> Iterator[None]:
    """A follower whose processes stand still."""
    # The satellite first: it would have its CommitLog replaced.
    roles = ("group_commit", "commit_log")
    with contextlib.ExitStack() as targets:
        for pid in [wait_for_lease(shard, load, replica, role) for role in roles]:
            targets.enter_context(Target(pid)).send(signal.SIGSTOP)
        yield


def test_without_the_follower_only_the_leaders_promise_is_kept(
    shard: ReplicatedShard, load: Load
) -> None:
    cluster, texts = shard.cluster, [b"leader", b"quorum"]
    before = cluster.describe_topic(ASIDE)["messages"]
    with (
        cluster.producer(acks="leader") as leader,
        cluster.producer(acks="quorum", delivery_timeout_ms=8_000) as quorum,
    ):
        with standing_still(shard, load, FOLLOWER):
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


@pytest.mark.parametrize(("replica", "role"), SATELLITES)
def test_a_satellite_that_ray_started_again_keeps_the_main_thread_asleep(
    shard: ReplicatedShard, load: Load, replica: int, role: str
) -> None:
    title = Path(f"/proc/{wait_for_lease(shard, load, replica, role)}/cmdline")
    # Ray's title of a process names the call in its main thread.
    until(lambda: b".occupy_main_thread" in title.read_bytes(), load.pause)


def test_every_acknowledged_message_survived_the_processes(
    shard: ReplicatedShard, load: Load
) -> None:
    assert check(shard, load.history) > 0


def test_each_refused_message_got_its_own_error_and_the_others_were_stored_once_in_order(
    shard: ReplicatedShard, refusals: LoadWithRefusals
) -> None:
    refusals.stop()
    assert refusals.refused > 0
    assert check(shard, refusals.history, topic=REFUSALS) == refusals.history.count()


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


def test_all_commit_logs_are_the_same_bytes_up_to_the_confirmed_end(
    shard: ReplicatedShard, load: Load
) -> None:
    load.stop()
    with shard.cluster.producer() as producer:
        # Several files, however slow the machine was.
        while shard.status(LEADER)["confirmed"] <= 3 << 20:
            producer.send(ASIDE, bytes(100_000)).result(30)
    confirmed = int(shard.status(LEADER)["confirmed"])
    until(lambda: shard.says(FOLLOWER, lambda facts: facts["synced"] >= confirmed), pause)
    leader = shard.commit_log(LEADER, confirmed)
    assert len(leader) == confirmed
    assert shard.commit_log(FOLLOWER, confirmed) == leader
    assert shard.command("stop", shard.paths.data_dir)["clean"]
    for replica in (LEADER, FOLLOWER):
        assert verify(shard.paths.replica(0, replica)) == []
