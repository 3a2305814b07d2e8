"""A consumer group on three replicas while members are killed and stopped, and while the coordinator's leader dies.

Each member is a process. Its history says what it read and committed, and under which number of a grant.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

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
ROOT = Path(__file__).resolve().parents[2]


class Entry(NamedTuple):
    """One line of a member's history."""

    kind: str
    queue: int
    offset: int
    number: int


class Member:
    """A process that reads as a member."""

    def __init__(self, url: str, place: Path) -> None:
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.group_worker", url, TOPIC, GROUP, str(place)],
            cwd=ROOT,
        )

    def lines(self) -> list[list[str]]:
        """What it has written down so far."""
        return (
            [line.split() for line in self.place.read_text().splitlines()]
            if self.place.exists()
            else []
        )

    def history(self) -> list[Entry]:
        """What it has read and committed."""
        return [
            Entry(line[0], *map(int, line[1:]))
            for line in self.lines()
            if line[0] in ("read", "committed")
        ]

    def queues(self) -> set[int]:
        """The queues that it owned last."""
        owned = [line[1:] for line in self.lines() if line[0] == "owns"]
        return set(map(int, owned[-1])) if owned else set()

    def commits(self) -> int:
        """How many offsets it has committed."""
        return sum(entry.kind == "committed" for entry in self.history())


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, NAME, LEAN_WITH_CLIENT) as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module")
def members(shard: ReplicatedShard, load: Load, tmp_path_factory) -> Iterator[list[Member]]:
    place = tmp_path_factory.mktemp("members")
    wait_for_writes(load)
    made = [Member(str(shard.paths.data_dir), place / f"member{number}") for number in range(2)]
    yield made
    for each in made:
        each.process.kill()
        each.process.wait()


def wait_for_commits(load: Load, *members: Member) -> None:
    """Wait until each of these members has committed something that is new."""
    before = [each.commits() for each in members]
    until(
        lambda: all(each.commits() > was for each, was in zip(members, before, strict=True)),
        lambda: wait_for_writes(load),
    )


def wait_until_shared(load: Load, *members: Member) -> None:
    """Wait until each queue has one owner among these members, and all of them commit."""

    def is_shared() -> bool:
        owned = [each.queues() for each in members]
        return all(owned) and sorted(q for each in owned for q in each) == list(range(QUEUES))

    until(is_shared, lambda: wait_for_writes(load))
    wait_for_commits(load, *members)


def test_two_members_share_the_queues(load: Load, members: list[Member]) -> None:
    wait_until_shared(load, *members)


def test_the_group_goes_on_when_the_leader_of_its_coordinator_is_killed(
    shard: ReplicatedShard, load: Load, members: list[Member]
) -> None:
    leader = wait_for_leader(shard)
    kill_leader(shard)
    wait_for_leader(shard, but=leader)
    wait_until_shared(load, *members)


def test_a_stopped_member_loses_its_queues_and_comes_back(
    load: Load, members: list[Member]
) -> None:
    stopped, other = members
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: other.queues() == set(range(QUEUES)), lambda: wait_for_commits(load, other))
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    wait_until_shared(load, stopped, other)


def test_a_killed_member_loses_its_queues(load: Load, members: list[Member]) -> None:
    killed, other = members
    killed.process.kill()
    until(lambda: other.queues() == set(range(QUEUES)), lambda: wait_for_commits(load, other))


def test_no_message_was_passed_over_and_no_queue_had_two_owners(
    shard: ReplicatedShard, load: Load, members: list[Member]
) -> None:
    check(shard, load.history)
    # First: one member goes on meanwhile.
    committed = shard.cluster.call(0, "offsets", {"group": GROUP, "topic": TOPIC})
    history = [entry for each in members for entry in each.history()]
    owners: dict[tuple[int, int], set[int]] = {}
    for index, each in enumerate(members):
        for entry in each.history():
            if entry.number:
                owners.setdefault((entry.queue, entry.number), set()).add(index)
    assert all(len(found) == 1 for found in owners.values()), "a number names two members"

    newest = shard.cluster.call(0, "offsets", {"group": GROUP, "topic": TOPIC})
    for queue in range(QUEUES):
        read = {entry.offset for entry in history if entry.kind == "read" and entry.queue == queue}
        assert read >= set(range(int(committed[str(queue)]))), "a message was passed over"
        by_number = sorted(
            (entry.number, entry.offset)
            for entry in history
            if entry.kind == "committed" and entry.queue == queue and entry.number
        )
        offsets = [offset for _, offset in by_number]
        assert offsets == sorted(offsets), "a committed offset went back"
        now = int(newest[str(queue)])
        assert now >= max(offsets, default=0), "a commit is lost"
