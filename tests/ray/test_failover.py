"""A shard of three replicas under load while its leaders are killed, stopped and replaced: no promise is broken.

Every leader is lost in some way, and the producers go on: a receipt means that the message is there for good, in its
place, once. At the end all logs are the same bytes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from raymq.actors.ray.replica_files import read_last_end
from raymq.client.staged.committer import Committer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.records.record import PUT_SCHEMA
from tests.support import tier
from tests.support.history import Load, Reader
from tests.support.replicated_shard import (
    LongestGap,
    ReplicatedShard,
    Target,
    check,
    check_to_the_end,
    follower_of,
    is_complete,
    kill_leader,
    pause,
    standing_still,
    started_load,
    started_readers,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
)
from tests.support.waiting import until

pytestmark = pytest.mark.faults

#: kills of a leader's CommitLog
KILLS = tier.rounds("RAYMQ_FAILOVERS", thorough=6, quick=2)
#: longer than any timeout of elections: the others have a leader by then
STOPPED_S = 4.0
#: of a slow flusher. CommitLog ends one that is silent for two seconds
SYNC_S = 1.5
#: of the last synced records
DAMAGED_BYTES = 200


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, "failover") as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def readers(shard: ReplicatedShard, load: Load) -> Iterator[list[Reader]]:
    with started_readers(shard.cluster) as running:
        yield running


def test_another_replica_takes_puts_after_kill_9_of_each_leader(
    shard: ReplicatedShard, load: Load
) -> None:
    clock = Clock()
    gaps_ms, taken_over = [], 0
    while taken_over < KILLS:
        assert len(gaps_ms) < 3 * KILLS
        leader = wait_for_leader(shard)
        old = wait_for_lease(shard, load, leader, "commit_log")
        began_ms = clock.monotonic_ms()
        with Target(old) as target:
            target.send(signal.SIGKILL)
        wait_for_writes(load)
        gaps_ms.append(clock.monotonic_ms() - began_ms)
        # Replicas that have measured late messages wait longer for a leader. Ray may start its process again before
        # they elect, and then it leads again.
        taken_over += wait_for_leader(shard) != leader
        # Its process returns, and catches up.
        wait_for_lease(shard, load, leader, "commit_log", but=old)
    print(f"writes were back after {sorted(gaps_ms)} ms")


def test_a_leader_that_stood_still_confirms_nothing_when_it_goes_on(
    shard: ReplicatedShard, load: Load
) -> None:
    leader = wait_for_leader(shard)
    pid = wait_for_lease(shard, load, leader, "commit_log")
    # Its flusher first: a satellite would end a CommitLog that is silent for too long.
    flusher = wait_for_lease(shard, load, leader, "group_commit")
    with Target(flusher) as second, Target(pid) as first:
        second.send(signal.SIGSTOP)
        first.send(signal.SIGSTOP)
        successor = wait_for_leader(shard, but=leader)
        wait_for_writes(load)
        load.ended.wait(STOPPED_S)
    wait_for_writes(load)
    until(lambda: shard.leader() == successor, pause)


@pytest.mark.thorough
def test_a_leader_whose_syncs_take_seconds_lets_another_replica_lead(
    shard: ReplicatedShard, load: Load
) -> None:
    leader = wait_for_leader(shard)
    with Target(wait_for_lease(shard, load, leader, "group_commit")) as flusher:

        def sync_late() -> None:
            flusher.send(signal.SIGSTOP)
            load.ended.wait(SYNC_S)
            flusher.send(signal.SIGCONT)
            pause()

        until(lambda: shard.leader() not in (None, leader), sync_late)
    wait_for_writes(load)


@pytest.mark.parametrize("role", ["group_commit", "replication"])
def test_writes_come_back_after_kill_9_of_a_leaders_satellite(
    shard: ReplicatedShard, load: Load, role: str
) -> None:
    leader = wait_for_leader(shard)
    old = wait_for_lease(shard, load, leader, role)
    with Target(old) as target:
        target.send(signal.SIGKILL)
    wait_for_writes(load)
    wait_for_lease(shard, load, leader, role, but=old)


def test_without_one_follower_every_promise_is_kept(shard: ReplicatedShard, load: Load) -> None:
    leader = wait_for_leader(shard)
    with standing_still(shard, load, follower_of(shard)):
        wait_for_writes(load)
        assert shard.leader() == leader


def test_a_staged_write_is_published_once_although_leaders_are_killed(
    shard: ReplicatedShard, load: Load
) -> None:
    shard.cluster.create_topic("staged", queues=4)
    rows = pa.record_batch(
        [
            pa.array([b"%d" % row for row in range(5000)], pa.binary()),
            pa.nulls(5000, pa.string()),
            pa.nulls(5000, pa.binary()),
            pa.array(np.zeros(5000, dtype=np.int64)),
        ],
        schema=PUT_SCHEMA,
    )
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        for number in range(20):
            if number == 10:
                kill_leader(shard)
            writer.write("staged", number % 4, rows.slice(250 * number, 250))
        staged = writer.finish()

    killer = threading.Thread(target=kill_leader, args=(shard,))
    killer.start()
    committer = Committer(Routes.of(shard.cluster))
    results = [committer.commit("failover", staged) for _ in range(2)]
    killer.join()
    assert [result.rows for result in results] == [5000, 5000]
    found = []
    with shard.cluster.consumer("staged", start="earliest") as consumer:
        while len(found) < 5000:
            found += consumer.poll(timeout=60)
    assert sorted(int(each.body) for each in found) == list(range(5000))
    assert shard.cluster.describe_topic("staged")["messages"] == 5000
    wait_for_writes(load)


def test_a_leader_hands_over_on_request_and_writes_go_on(
    shard: ReplicatedShard, load: Load
) -> None:
    leader = wait_for_leader(shard)
    successor = follower_of(shard)
    wait_for_lease(shard, load, successor, "replication")
    shard.call(leader, "move_leader", {"replica": successor})
    wait_for_leader(shard, but=leader)
    wait_for_writes(load)


@pytest.mark.thorough
def test_all_processes_restart_one_replica_after_the_other_and_writes_go_on(
    shard: ReplicatedShard, load: Load
) -> None:
    before = {each: wait_for_lease(shard, load, each, "commit_log") for each in shard.replicas}
    longest = LongestGap(load.history)
    answer = shard.command("shard", "restart-all", "-c", shard.paths.data_dir)
    assert answer["shards"] == 1
    print(f"without a receipt for {longest.stop()} ms at most")
    for replica, old in before.items():
        assert wait_for_lease(shard, load, replica, "commit_log") != old
        assert shard.status(replica)["is_complete"]
    wait_for_writes(load)


@pytest.mark.thorough
def test_a_follower_that_is_replaced_under_load_gets_everything_and_counts(
    shard: ReplicatedShard, load: Load
) -> None:
    replica = follower_of(shard)
    old = wait_for_lease(shard, load, replica, "commit_log")
    place = ("-c", shard.paths.data_dir)
    answer = shard.command("shard", "replace-replica", "0", str(replica), *place)
    assert answer == {"shard": 0, "replica": replica, "is_complete": True}
    assert wait_for_lease(shard, load, replica, "commit_log") != old
    assert len(list(shard.paths.replica(0, replica).parent.glob("replaced-*"))) == 1
    rows = shard.command("shard", "describe", "0", *place)["replicas"]
    assert [row["generation"] for row in rows] == [int(each == replica) for each in shard.replicas]

    # Its satellites serve the new directory, too: it leads, and confirms what it takes.
    shard.command("shard", "move-leader", "0", "--to", str(replica), *place)
    wait_for_writes(load)


def test_a_follower_whose_log_is_damaged_begins_again_and_gets_everything(
    shard: ReplicatedShard, load: Load
) -> None:
    replica = follower_of(shard)
    until(lambda: all(shard.says(each, is_complete) for each in shard.replicas), pause)
    root = shard.paths.replica(0, replica)
    with Target(wait_for_lease(shard, load, replica, "commit_log")) as target:
        synced = int(shard.status(replica)["synced"])
        target.send(signal.SIGSTOP)
        path = max(each for each in (root / "commitlog").iterdir() if int(each.name) < synced)
        with path.open("r+b") as file:
            file.seek(synced - DAMAGED_BYTES - int(path.name))
            file.write(bytes(DAMAGED_BYTES))
        target.send(signal.SIGKILL)

    until(lambda: len(list(root.parent.glob("damaged-*"))) == 1, load.pause)
    wait_for_lease(shard, load, replica, "group_commit")
    until(lambda: shard.says(replica, is_complete), load.pause)
    assert "the damaged store is now" in read_last_end(root)["reason"]
    shard.command("shard", "move-leader", "0", "--to", str(replica), "-c", shard.paths.data_dir)
    wait_for_writes(load)


def test_every_acknowledged_message_survived_the_leaders(
    shard: ReplicatedShard, load: Load
) -> None:
    assert check(shard, load.history) > 0


def test_all_logs_are_the_same_bytes_up_to_the_confirmed_end(
    shard: ReplicatedShard, load: Load, readers: list[Reader]
) -> None:
    check_to_the_end(shard, load, readers)
