"""The disk of a replica is full, hangs, or fails: the others go on, and no promise is broken.

Replica 0 has a small disk of its own. A user without root cannot mount it and does not collect this test.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raymq
from raymq.actors.ray.replica_files import read_last_end
from tests.support.failing_calls import SYNC, WRITE, FailingCalls
from tests.support.history import Load
from tests.support.loop_disk import LoopDisk
from tests.support.replicated_shard import (
    FILE_BYTES,
    LongestGap,
    ReplicatedShard,
    check,
    check_logs,
    is_complete,
    kill,
    pause,
    started_load,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
    wait_until_complete,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.loop_disk, pytest.mark.thorough]

#: without a follower no receipt waits for a timeout; the rest is a busy machine
GAP_MS_MAX = 5_000


@pytest.fixture(scope="module")
def calls() -> Iterator[FailingCalls]:
    with tempfile.TemporaryDirectory() as place:
        yield FailingCalls(Path(place) / "calls")


@pytest.fixture(scope="module")
def shard(calls: FailingCalls) -> Iterator[ReplicatedShard]:
    with started_shard(3, "disk", calls.variables()) as world:
        yield world


@pytest.fixture(scope="module")
def disk(shard: ReplicatedShard) -> Iterator[LoopDisk]:
    """The disk of replica 0."""
    data_dir = shard.paths.data_dir
    shard.command("stop", data_dir)
    place = shard.paths.replica(0, 0)
    with LoopDisk(shard.paths.root.parent / "image", place, mib=64) as mounted:
        shard.start()
        try:
            yield mounted
        finally:
            mounted.thaw()
            shard.command("stop", data_dir)


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard, disk: LoopDisk) -> Iterator[Load]:
    with raymq.connect(shard.paths.data_dir) as cluster, started_load(cluster) as running:
        yield running


def move_leader(shard: ReplicatedShard, load: Load, replica: int) -> None:
    """Let a replica lead."""
    if wait_for_leader(shard) != replica:
        wait_for_lease(shard, load, replica, "replication")
        until(lambda: shard.says(replica, is_complete), pause)
        shard.call(wait_for_leader(shard), "move_leader", {"replica": replica})
        until(lambda: shard.leader() == replica, pause)


@pytest.fixture
def leading(shard: ReplicatedShard, load: Load) -> None:
    """Replica 0 leads."""
    move_leader(shard, load, 0)


@pytest.fixture
def following(shard: ReplicatedShard, load: Load) -> None:
    """Replica 0 follows replica 1, and all are complete."""
    move_leader(shard, load, 1)
    for replica in (0, 2):
        wait_until_complete(shard, replica)


def test_a_leader_whose_disk_is_full_hands_over_and_follows_when_there_is_room(
    shard: ReplicatedShard, load: Load, leading: None, disk: LoopDisk
) -> None:
    with disk.full():
        wait_for_leader(shard, but=0)
        wait_for_writes(load)
    end = shard.status(wait_for_leader(shard))["appended"]
    until(lambda: shard.says(0, lambda facts: facts["synced"] >= end), load.pause)


def test_another_replica_leads_while_the_disk_of_the_leader_hangs(
    shard: ReplicatedShard, load: Load, leading: None, disk: LoopDisk
) -> None:
    disk.freeze()
    wait_for_leader(shard, but=0)
    wait_for_writes(load)
    disk.thaw()
    end = shard.status(wait_for_leader(shard))["appended"]
    until(lambda: shard.says(0, lambda facts: facts["synced"] >= end), load.pause)


def test_writes_go_on_while_the_disk_of_a_follower_is_full_and_it_catches_up_when_there_is_room(
    shard: ReplicatedShard, load: Load, following: None, disk: LoopDisk
) -> None:
    epoch = shard.status(1)["epoch"]
    longest = LongestGap(load.history)
    with disk.full():
        # Blocks of the file that is being written, and of the next one, are reserved: both must be over.
        end = shard.status(1)["appended"] + 3 * FILE_BYTES
        until(lambda: shard.says(1, lambda facts: facts["confirmed"] >= end), load.pause)
        assert shard.status(0)["synced"] < end
    gap_ms = longest.stop()
    wait_until_complete(shard, 0)
    print(f"without a receipt for {gap_ms} ms at most")
    assert (shard.leader(), shard.status(1)["epoch"]) == (1, epoch)
    assert gap_ms < GAP_MS_MAX
    check_logs(shard)


def test_writes_go_on_while_the_disk_of_a_follower_refuses_them_and_it_catches_up_afterwards(
    shard: ReplicatedShard, load: Load, following: None, calls: FailingCalls
) -> None:
    epoch = shard.status(1)["epoch"]
    root = shard.paths.replica(0, 2)
    longest = LongestGap(load.history)
    with calls.failing(WRITE, root / "commitlog") as failed:
        until(lambda: failed() >= 3, load.pause)
        wait_for_writes(load)
    gap_ms = longest.stop()
    wait_until_complete(shard, 2)
    print(f"without a receipt for {gap_ms} ms at most")
    assert (shard.leader(), shard.status(1)["epoch"]) == (1, epoch)
    assert gap_ms < GAP_MS_MAX
    assert list(root.parent.glob("damaged-*")) == []
    check_logs(shard)


def test_a_follower_whose_sync_failed_begins_again_when_its_process_ends_and_gets_everything(
    shard: ReplicatedShard, load: Load, following: None, calls: FailingCalls
) -> None:
    epoch = shard.status(1)["epoch"]
    root = shard.paths.replica(0, 2)
    old = wait_for_lease(shard, load, 2, "commit_log")
    longest = LongestGap(load.history)
    with calls.failing(SYNC, root / "commitlog"):
        until(lambda: shard.says(2, lambda facts: facts["supervisor"]["poisoned"]), load.pause)
    # The sync would succeed now, and would prove nothing: it is not tried again.
    wait_for_writes(load)
    assert shard.status(2)["state"] == "READ_ONLY"
    assert list(root.parent.glob("damaged-*")) == []

    kill([old])
    until(lambda: len(list(root.parent.glob("damaged-*"))) == 1, load.pause)
    wait_for_lease(shard, load, 2, "commit_log", but=old)
    wait_until_complete(shard, 2)
    gap_ms = longest.stop()
    print(f"without a receipt for {gap_ms} ms at most")
    assert "the damaged store is now" in read_last_end(root)["reason"]
    assert (shard.leader(), shard.status(1)["epoch"]) == (1, epoch)
    assert gap_ms < GAP_MS_MAX
    check_logs(shard)

    # It counts: it leads, and confirms what it takes.
    move_leader(shard, load, 2)
    wait_for_writes(load)


def test_a_replica_that_lags_leads_after_the_syncs_of_both_others_failed_and_loses_nothing(
    shard: ReplicatedShard, load: Load, disk: LoopDisk, following: None, calls: FailingCalls
) -> None:
    with raymq.connect(shard.paths.data_dir) as cluster, cluster.producer(acks="leader") as alone:
        cluster.create_topic("alone", queues=1)
        # What is confirmed now is on the disks that are to fail.
        disk.freeze()
        wait_for_writes(load)
        fail_sync(shard, load, 1, calls)
        assert wait_for_leader(shard, but=1) == 2
        # The producers of the load wait for receipts. This message is one more to sync.
        fail_sync(shard, load, 2, calls, lambda: alone.send("alone", b"x"))
        synced = shard.status(1)["synced"]
        disk.thaw()
        assert wait_for_leader(shard, but=2) == 0
        assert shard.status(0)["synced"] > synced

    begin_again(shard, load, 1)
    wait_for_writes(load)
    # A second damaged store of replica 2 would stay where it is.
    for older in shard.paths.replica(0, 2).parent.glob("damaged-*-replica-2"):
        shutil.rmtree(older)
    begin_again(shard, load, 2)
    wait_for_writes(load)
    check_logs(shard)


def fail_sync(
    shard: ReplicatedShard,
    load: Load,
    replica: int,
    calls: FailingCalls,
    send: Callable[[], object] = lambda: None,
) -> None:
    """A sync of a replica fails. Args: `send`: sends something to sync, if the load does not."""
    with calls.failing(SYNC, shard.paths.replica(0, replica) / "commitlog"):
        send()
        until(
            lambda: shard.says(replica, lambda facts: facts["supervisor"]["poisoned"]), load.pause
        )


def begin_again(shard: ReplicatedShard, load: Load, replica: int) -> None:
    """End the process of a replica whose sync failed, and wait until the next one is complete."""
    old = int(shard.status(replica)["pid"])
    kill([old])
    place = shard.paths.replica(0, replica)
    until(lambda: len(list(place.parent.glob(f"damaged-*-{place.name}"))) == 1, pause)
    wait_until_complete(shard, replica)


def test_every_acknowledged_message_survived_the_disk(shard: ReplicatedShard, load: Load) -> None:
    load.stop()
    check_logs(shard)
    assert check(shard, load.history) > 0
