"""A consumer group on three replicas while members are killed and stopped, and while the coordinator's leader dies.

Each member is a process. Its history says what it read and committed, and under which number of a grant.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.store.base.clock import Clock
from tests.support import tier
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
#: members that are stopped and killed, in turns
KILLS = tier.rounds("RAYMQ_GROUP_KILLS", thorough=2, quick=2)
#: short: each round waits for the end of one
SESSION_S = 2.0


class Members:
    """The processes of the group."""

    def __init__(self, url: str, place: Path) -> None:
        self._url, self._place = url, place
        self.running: list[MemberProcess] = []
        self.ended: list[MemberProcess] = []

    def start(self) -> None:
        """Another process."""
        place = self._place / f"member{len(self.running) + len(self.ended)}"
        made = MemberProcess(self._url, TOPIC, GROUP, place, session_timeout_s=SESSION_S)
        self.running.append(made)

    def kill(self, member: MemberProcess) -> None:
        """End one by SIGKILL."""
        member.end()
        self.running.remove(member)
        self.ended.append(member)


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, NAME, LEAN_WITH_CLIENT) as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module")
def members(shard: ReplicatedShard, load: Load, tmp_path_factory) -> Iterator[Members]:
    wait_for_writes(load)
    made = Members(str(shard.paths.data_dir), tmp_path_factory.mktemp("members"))
    for _ in range(2):
        made.start()
    yield made
    for each in made.running:
        each.end()


def wait_for_commits(load: Load, *members: MemberProcess) -> None:
    """Wait until each of these members has committed something that is new."""
    before = [each.commits() for each in members]
    until(
        lambda: all(each.commits() > was for each, was in zip(members, before, strict=True)),
        lambda: wait_for_writes(load),
    )


def wait_until_shared(load: Load, members: Members) -> None:
    """Wait until each queue has one owner among the members, and all of them commit."""

    def is_shared() -> bool:
        owned = [each.queues() for each in members.running]
        return all(owned) and sorted(q for each in owned for q in each) == list(range(QUEUES))

    until(is_shared, load.pause)
    wait_for_commits(load, *members.running)


def test_two_members_share_the_queues(load: Load, members: Members) -> None:
    wait_until_shared(load, members)


def test_the_group_goes_on_when_the_leader_of_its_coordinator_is_killed(
    shard: ReplicatedShard, load: Load, members: Members
) -> None:
    leader = wait_for_leader(shard)
    kill_leader(shard)
    wait_for_leader(shard, but=leader)
    wait_until_shared(load, members)


def test_a_member_that_is_stopped_or_killed_loses_its_queues_to_another_one(
    load: Load, members: Members
) -> None:
    """A stopped one comes back, and a new one takes the place of a killed one."""
    clock = Clock()
    owned_after_ms = []
    began_ms = clock.monotonic_ms()
    for number in range(KILLS):
        # Each place of the two in turns, and each place both ways.
        victim = members.running[number // 2 % 2]
        (other,) = (each for each in members.running if each is not victim)
        lost_ms = clock.monotonic_ms()
        if number % 2:
            members.kill(victim)
        else:
            victim.process.send_signal(signal.SIGSTOP)
        try:
            # For longer than its session: until then the queues are the victim's.
            until(lambda other=other: other.queues() == set(range(QUEUES)), load.pause)  # type: ignore[misc]
            owned_after_ms.append(clock.monotonic_ms() - lost_ms)
            wait_for_commits(load, other)
        finally:
            if number % 2 == 0:
                victim.process.send_signal(signal.SIGCONT)
        if number % 2:
            members.start()
        wait_until_shared(load, members)

    minutes = (clock.monotonic_ms() - began_ms) / 60_000
    median_ms = statistics.median(owned_after_ms)
    print(
        f"{KILLS} members stopped and killed in {minutes:.1f} min; all queues had an owner again after "
        f"{median_ms:.0f} ms (median), {max(owned_after_ms)} ms at most"
    )


def test_no_message_was_passed_over_and_no_queue_had_two_owners(
    shard: ReplicatedShard, load: Load, members: Members
) -> None:
    count = check(shard, load.history)
    # First: the members go on meanwhile.
    committed = offsets(shard)
    histories = [each.history() for each in (*members.running, *members.ended)]
    check_histories(histories, committed, offsets(shard))
    print(f"{sum(map(len, histories))} entries of {len(histories)} members, {count} messages")


def offsets(shard: ReplicatedShard) -> dict[int, int]:
    found = shard.cluster.call(0, "offsets", {"group": GROUP, "topic": TOPIC})
    return {queue: int(found[str(queue)]) for queue in range(QUEUES)}
