"""Options of the stores change under load on three replicas, and outlive leaders, absences and restarts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.store.base.errors import RayMQError
from raymq.store.config.store_config import WHILE_RUNNING
from tests.support.history import Load
from tests.support.replicated_shard import (
    ReplicatedShard,
    Target,
    kill_leader,
    pause,
    started_load,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
)
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

#: another value of each option, with which puts go on
VALUES: dict[str, Any] = {
    "sync_flush_timeout_ms": 6_000,
    "slave_timeout_ms": 4_000,
    "flush_commit_log_timed": False,
    "flush_interval_ms": 200,
    "flush_least_pages": 1,
    "flush_thorough_interval_ms": 2_000,
    "commit_interval_ms": 100,
    "commit_least_pages": 1,
    "commit_thorough_interval_ms": 100,
    "max_message_bytes": 12 << 20,
    "snapshot_interval_bytes": 1 << 20,
    "catch_up_bytes_per_s": 50_000_000,
    "timer_wheel_enabled": False,
    "timer_max_delay_s": 3_600,
    "timer_congest_num_each_slot": 1_000,
    "os_page_cache_busy_timeout_ms": 2_000,
    "allocate_timeout_ms": 6_000,
    "delete_when": "05;17",
    "file_reserved_hours": 48,
    "disk_max_used_space_ratio": 80,
    "disk_space_clean_forcibly_ratio": 86,
    "disk_space_warning_level_ratio": 95,
    "clean_file_forcibly": True,
    "delete_file_batch_max": 5,
    "warm_mapped_file": True,
    "delete_files_interval_ms": 50,
    "producer_expiry_hours": 24,
    "group_expiry_hours": 240,
}


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, "config") as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


def values_of(shard: ReplicatedShard, replica: int) -> dict[str, Any]:
    """The options that a replica works with, by its own word."""
    options = shard.call(replica, "config", {})["options"]
    return {name: options[name]["value"] for name in WHILE_RUNNING}


def await_values(shard: ReplicatedShard, wanted: dict[str, Any]) -> None:
    """Wait until each replica works with these options."""

    def agree() -> bool:
        # One that was killed or stopped may not answer yet.
        with contextlib.suppress(RayMQError):
            found = [values_of(shard, replica) for replica in shard.replicas]
            return all(wanted.items() <= each.items() for each in found)
        return False

    until(agree, pause)


def test_each_option_changes_under_load_on_every_replica(
    shard: ReplicatedShard, load: Load
) -> None:
    assert set(VALUES) == set(WHILE_RUNNING)
    for name, value in VALUES.items():
        facts = shard.cluster.set_config({name: value})  # type: ignore[misc]
        assert facts[name]["before"] == WHILE_RUNNING[name].default
        wait_for_writes(load)
    await_values(shard, VALUES)


def test_the_next_leader_has_the_options_and_takes_others(
    shard: ReplicatedShard, load: Load
) -> None:
    old = wait_for_leader(shard)
    kill_leader(shard)
    leader = wait_for_leader(shard, but=old)
    assert values_of(shard, leader) == VALUES
    answer = shard.command(
        "config", "set", "flush_interval_ms=250", "delete_when=06", "-c", shard.paths.data_dir
    )
    assert answer["flush_interval_ms"]["before"] == 200
    wait_for_lease(shard, load, old, "commit_log")
    await_values(shard, {**VALUES, "flush_interval_ms": 250, "delete_when": "06"})


def test_a_replica_that_was_away_gets_what_was_set_meanwhile(
    shard: ReplicatedShard, load: Load
) -> None:
    leader = wait_for_leader(shard)
    away = max(each for each in shard.replicas if each != leader)
    with Target(wait_for_lease(shard, load, away, "commit_log")) as target:
        target.send(signal.SIGSTOP)
        shard.cluster.set_config({"flush_interval_ms": 300})
        target.send(signal.SIGCONT)
    await_values(shard, {"flush_interval_ms": 300})
    wait_for_writes(load)


def test_a_start_keeps_what_was_set_and_changes_what_it_names(
    shard: ReplicatedShard, load: Load
) -> None:
    load.stop()
    directory = shard.paths.data_dir
    shard.command("stop", directory)
    shard.start("--config", "flush_least_pages=3", "--file-reserved-hours", "50")
    found = shard.command("config", "list", "--changed", "-c", directory)
    assert found["flush_interval_ms"]["value"] == 300
    assert found["flush_least_pages"]["value"] == 3
    assert found["file_reserved_hours"]["value"] == 50
    await_values(shard, {"flush_least_pages": 3, "file_reserved_hours": 50})
