"""A shard of one replica gets two more under load, and then outlives the loss of any of the three."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raymq.store.base.files import Files
from tests.support.history import Load, Reader
from tests.support.replicated_shard import (
    TOPIC,
    LongestGap,
    ReplicatedShard,
    Target,
    check_to_the_end,
    pause,
    started_load,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
)
from tests.support.waiting import until

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(1, "grown") as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def reader(shard: ReplicatedShard, load: Load) -> Iterator[Reader]:
    with Reader(shard.cluster, TOPIC) as running:
        yield running


@pytest.mark.parametrize("added_replicas", [2, 0])
def test_a_growth_that_is_killed_in_the_middle_changes_nothing_for_clients(
    shard: ReplicatedShard, load: Load, added_replicas: int
) -> None:
    wanted = {"replicas": 3, "added_replicas": added_replicas}

    def is_written() -> bool:
        return wanted.items() <= json.loads(Files().read_file(shard.paths.cluster)).items()

    begun = subprocess.Popen(
        [sys.executable, "-m", "raymq", "shard", "set-replicas", "3", "-c", shard.paths.data_dir],
        env=shard.environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(is_written, pause)
    finally:
        begun.send_signal(signal.SIGKILL)
        begun.wait()
    wait_for_writes(load)


def test_a_shard_of_one_replica_gets_two_more_while_producers_and_consumers_go_on(
    shard: ReplicatedShard, load: Load
) -> None:
    longest = LongestGap(load.history)
    answer = shard.command("shard", "set-replicas", "3", "-c", shard.paths.data_dir)
    assert answer == {"cluster": "grown", "replicas": 3, "placement": None}
    print(f"without a receipt for {longest.stop()} ms at most")
    wait_for_writes(load)

    shard.replicas = range(3)
    for replica in shard.replicas:
        facts = shard.status(replica)
        assert facts["is_complete"]
        assert facts["voters"] == [0, 1, 2]


def test_clients_from_before_follow_each_leader_that_is_killed_then(
    shard: ReplicatedShard, load: Load, reader: Reader
) -> None:
    for _ in range(2):
        leader = wait_for_leader(shard)
        old = wait_for_lease(shard, load, leader, "commit_log")
        with Target(old) as target:
            target.send(signal.SIGKILL)
        wait_for_writes(load)
        assert wait_for_leader(shard, but=leader) != leader
        wait_for_lease(shard, load, leader, "commit_log", but=old)
    check_to_the_end(shard, load, [reader])
