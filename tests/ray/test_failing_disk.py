"""The disk of a leader is full, or hangs: another replica leads soon, and no promise is broken.

Replica 0 has a small disk of its own. A user without root cannot mount it and does not collect this test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raymq
from tests.support.history import History, Load
from tests.support.loop_disk import LoopDisk
from tests.support.replicated_shard import (
    PRODUCERS,
    QUEUES,
    TOPIC,
    ReplicatedShard,
    check,
    pause,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.loop_disk, pytest.mark.background]


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, "disk") as world:
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
    with (
        raymq.connect(shard.paths.data_dir) as cluster,
        Load(cluster, TOPIC, History(), producers=PRODUCERS, queues=QUEUES) as running,
    ):
        until(lambda: len(running.history.acked()) == PRODUCERS * QUEUES, running.pause)
        yield running


@pytest.fixture
def leading(shard: ReplicatedShard, load: Load) -> None:
    """Replica 0 leads."""
    if wait_for_leader(shard) != 0:
        wait_for_lease(shard, load, 0, "replication")
        until(lambda: shard.status(0)["is_complete"], pause)
        shard.call(wait_for_leader(shard), "move_leader", {"replica": 0})
        until(lambda: shard.leader() == 0, pause)


@pytest.mark.slow
def test_a_leader_whose_disk_is_full_hands_over_and_follows_when_there_is_room(
    shard: ReplicatedShard, load: Load, leading: None, disk: LoopDisk
) -> None:
    with disk.full():
        wait_for_leader(shard, but=0)
        wait_for_writes(load)
    end = shard.status(wait_for_leader(shard))["appended"]
    until(lambda: shard.status(0)["synced"] >= end, load.pause)


@pytest.mark.slow
def test_another_replica_leads_while_the_disk_of_the_leader_hangs(
    shard: ReplicatedShard, load: Load, leading: None, disk: LoopDisk
) -> None:
    disk.freeze()
    wait_for_leader(shard, but=0)
    wait_for_writes(load)
    disk.thaw()
    end = shard.status(wait_for_leader(shard))["appended"]
    until(lambda: shard.status(0)["synced"] >= end, load.pause)


@pytest.mark.slow
def test_every_acknowledged_message_survived_the_disk(shard: ReplicatedShard, load: Load) -> None:
    assert check(shard, load.history) > 0
