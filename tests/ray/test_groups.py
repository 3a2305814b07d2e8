"""A consumer group on three replicas while members are killed and stopped, and while the coordinator's leader dies.

Each member is a process. Its history says what it read and committed, and under which number of a grant.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.group_members import MemberProcess, check_histories
from tests.support.history import Load
from tests.support.lean_ray import LEAN_WITH_CLIENT
from tests.support.replicated_shard import (
    QUEUES,
    TOPIC,
    ReplicatedShard,
    check,
    kill_leader,
    started_load,
    started_shard,
    wait_for_leader,
    wait_for_writes,
)
from tests.support.waiting import until

pytestmark = pytest.mark.faults

NAME, GROUP = "groups", "workers"


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, NAME, LEAN_WITH_CLIENT) as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module")
def members(shard: ReplicatedShard, load: Load, tmp_path_factory) -> Iterator[list[MemberProcess]]:
    place = tmp_path_factory.mktemp("members")
    wait_for_writes(load)
    url = str(shard.paths.data_dir)
    made = [MemberProcess(url, TOPIC, GROUP, place / f"member{number}") for number in range(2)]
    yield made
    for each in made:
        each.end()


def wait_for_commits(load: Load, *members: MemberProcess) -> None:
    """Wait until each of these members has committed something that is new."""
    before = [each.commits() for each in members]
    until(
        lambda: all(each.commits() > was for each, was in zip(members, before, strict=True)),
        lambda: wait_for_writes(load),
    )


def wait_until_shared(load: Load, *members: MemberProcess) -> None:
    """Wait until each queue has one owner among these members, and all of them commit."""

    def is_shared() -> bool:
        owned = [each.queues() for each in members]
        return all(owned) and sorted(q for each in owned for q in each) == list(range(QUEUES))

    until(is_shared, lambda: wait_for_writes(load))
    wait_for_commits(load, *members)


def test_two_members_share_the_queues(load: Load, members: list[MemberProcess]) -> None:
    wait_until_shared(load, *members)


def test_the_group_goes_on_when_the_leader_of_its_coordinator_is_killed(
    shard: ReplicatedShard, load: Load, members: list[MemberProcess]
) -> None:
    leader = wait_for_leader(shard)
    kill_leader(shard)
    wait_for_leader(shard, but=leader)
    wait_until_shared(load, *members)


def test_a_stopped_member_loses_its_queues_and_comes_back(
    load: Load, members: list[MemberProcess]
) -> None:
    stopped, other = members
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: other.queues() == set(range(QUEUES)), lambda: wait_for_commits(load, other))
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    wait_until_shared(load, stopped, other)


def test_a_killed_member_loses_its_queues(load: Load, members: list[MemberProcess]) -> None:
    killed, other = members
    killed.process.kill()
    until(lambda: other.queues() == set(range(QUEUES)), lambda: wait_for_commits(load, other))


def test_no_message_was_passed_over_and_no_queue_had_two_owners(
    shard: ReplicatedShard, load: Load, members: list[MemberProcess]
) -> None:
    check(shard, load.history)
    # First: one member goes on meanwhile.
    committed = offsets(shard)
    histories = [each.history() for each in members]
    check_histories(histories, committed, offsets(shard))


def offsets(shard: ReplicatedShard) -> dict[int, int]:
    found = shard.cluster.call(0, "offsets", {"group": GROUP, "topic": TOPIC})
    return {queue: int(found[str(queue)]) for queue in range(QUEUES)}
