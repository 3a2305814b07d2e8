"""The controller of a running cluster: killed, doubled, locked out, and without a leader to watch. Writes go on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.actors.leader.metrics import Instrument
from raymq.client.transport.actor_names import NAMESPACE, actor_name, controller_name
from raymq.cluster.controller.cluster_watch import Move
from raymq.cluster.controller.controller import Controller
from raymq.cluster.deploy import actor_states, ray_host
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.paths import directory_lock
from raymq.store.base.files import Files
from tests.support.history import Load
from tests.support.replicated_shard import (
    ReplicatedShard,
    Target,
    check,
    follower_of,
    is_complete,
    pause,
    standing_still,
    started_load,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
)
from tests.support.waiting import until

NAME = "watched"


def no_instrument(is_counter: bool, name: str, help_: str, tags: tuple[str, ...]) -> Instrument:
    return lambda value, given: None


class Driver:
    """This process in the Ray of the cluster, with a second controller that works when a test says so."""

    def __init__(self, ray: Any, shard: ReplicatedShard) -> None:
        self.ray = ray
        self.shard = shard
        self.second = Controller(ray, shard.paths.data_dir, make_instrument=no_instrument)

    @property
    def record(self) -> ClusterRecord:
        record = cluster_record.load_record(self.shard.paths, Files())
        assert record is not None
        return record

    def first(self) -> dict[str, Any]:
        """What the controller that `start` made says of itself."""
        handle = self.ray.get_actor(controller_name(NAME), namespace=NAMESPACE)
        with contextlib.suppress(self.ray.exceptions.RayError):
            status: dict[str, Any] = self.ray.get(handle.status.remote(), timeout=10)
            return status
        return {"pid": None, "rounds": 0}

    def wait_rounds(self, count: int) -> dict[str, Any]:
        """Until the first controller has made so many whole rounds more."""
        # The round that is under way began before.
        end = self.first()["rounds"] + count + 1
        until(lambda: self.first()["rounds"] >= end, pause)
        return self.first()

    def names(self) -> list[str]:
        return actor_states.actor_names(self.ray)

    def forget(self, replica: int) -> str:
        """End the actor of a CommitLog, as a command does that is interrupted after that."""
        name = actor_name(NAME, 0, replica, "commit_log")
        self.ray.kill(self.ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        until(lambda: name not in self.names(), pause)
        return name


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, NAME) as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module")
def driver(shard: ReplicatedShard, load: Load) -> Iterator[Driver]:
    with ray_host.session(
        ray_host.RayTarget(address=shard.owned().address, owned=shard.owned())
    ) as ray:
        yield Driver(ray, shard)


def test_ray_starts_another_controller_after_kill_9_and_writes_do_not_notice(
    shard: ReplicatedShard, load: Load, driver: Driver
) -> None:
    before = driver.wait_rounds(1)
    leader, epoch = wait_for_leader(shard), shard.status(wait_for_leader(shard))["epoch"]
    with Target(before["pid"]) as target:
        target.send(signal.SIGKILL)
    wait_for_writes(load)
    until(lambda: driver.first()["rounds"] > 0, pause)
    after = driver.first()
    assert after["pid"] != before["pid"]
    assert after["errors"] == {}
    assert shard.status(leader)["epoch"] == epoch
    assert driver.names().count(controller_name(NAME)) == 1


@pytest.mark.thorough
def test_a_forgotten_actor_is_made_again_once_but_not_while_a_command_has_the_directory(
    shard: ReplicatedShard, load: Load, driver: Driver
) -> None:
    replica = follower_of(shard)
    old = wait_for_lease(shard, load, replica, "commit_log")
    with directory_lock(shard.paths, Files()):
        name = driver.forget(replica)
        driver.wait_rounds(1)
        assert name not in driver.names()

    # Two controllers at once.
    until(lambda: name in driver.names(), driver.second.round)
    assert driver.second.status()["errors"] == {}
    wait_for_lease(shard, load, replica, "commit_log", but=old)
    until(lambda: shard.says(replica, is_complete), pause)
    assert driver.names().count(name) == 1
    made = [
        each["metrics"]["raymq_controller_restarts_total"]
        for each in (driver.first(), driver.second.status())
    ]
    assert sum(made) == 1
    wait_for_writes(load)


@pytest.mark.thorough
def test_two_controllers_ask_for_a_move_and_the_leader_is_moved_once(
    shard: ReplicatedShard, load: Load, driver: Driver
) -> None:
    leader = wait_for_leader(shard)
    successor = follower_of(shard)
    wait_for_lease(shard, load, successor, "replication")
    move = Move(0, successor, leader)
    driver.second.ask_to_hand_over(driver.record, move)
    assert wait_for_leader(shard, but=leader) == successor
    # A stale controller asks again. The replica does not lead any more, and refuses.
    with pytest.raises(driver.ray.exceptions.RayTaskError, match="does not lead"):
        driver.second.ask_to_hand_over(driver.record, move)
    wait_for_writes(load)
    assert shard.leader() == successor


@pytest.mark.thorough
def test_a_shard_without_a_leader_is_seen_and_seen_again_when_it_has_one(
    shard: ReplicatedShard, load: Load, driver: Driver
) -> None:
    leader = wait_for_leader(shard)
    stopped = [each for each in shard.replicas if each != leader]
    with contextlib.ExitStack() as targets:
        for each in stopped:
            targets.enter_context(standing_still(shard, load, each))

        def seen() -> dict[str, Any]:
            return dict(driver.first()["metrics"])

        def counts() -> tuple[int, int, int]:
            metrics = seen()
            return (
                metrics["raymq_shards_without_leader"],
                metrics["raymq_down_replicas"],
                metrics["raymq_under_replicated_shards"],
            )

        # The last round may be one that was made while the test before handed the leadership over.
        until(lambda: counts() == (1, 2, 1), pause)
        until(lambda: seen()["raymq_shard_without_leader_seconds"]["0"] >= 2, pause)

    until(lambda: seen()["raymq_shards_without_leader"] == 0, pause)
    wait_for_writes(load)
    until(lambda: seen()["raymq_under_replicated_shards"] == 0, pause)
    assert seen()["raymq_shard_without_leader_seconds"] == {"0": 0}
    load.stop()
    assert check(shard, load.history) > 0
