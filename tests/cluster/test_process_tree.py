"""Ending a detached program with all its descendants, and no other process."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raymq.cluster.deploy import process_tree
from raymq.cluster.deploy.process_tree import MARK, Family
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from tests.support.waiting import until

#: another run of these tests on the same machine has another one
FAMILY_MARK = secrets.token_hex(8)
#: a leader with one child in its session and one in a session of its own; {leader} ignores SIGTERM or not
LEADER = """
import os, signal, subprocess, sys
{leader}
here = subprocess.Popen(["sleep", "60"])
away = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(here.pid, away.pid, flush=True)
signal.pause()
"""


class Started:
    """A running family, its children's pids and the process that the test must reap."""

    def __init__(self, leader: str) -> None:
        self.files = Files()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADER.format(leader=leader)],
            stdout=subprocess.PIPE,
            env={**os.environ, MARK: FAMILY_MARK},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.children = [int(word) for word in self.process.stdout.readline().split()]
        started = process_tree.start_time(self.process.pid, self.files)
        assert started is not None
        boot = self.files.boot_id_hash()
        self.family = Family(self.process.pid, started, boot, FAMILY_MARK)
        # Popen returns as soon as the child has called exec. For a moment its new environment cannot be read yet.
        until(self._has_all_children, step=lambda: None)

    def _has_all_children(self) -> bool:
        return set(self.children) <= set(process_tree.members(self.family, self.files))

    def end(self, grace_ms: int) -> list[int]:
        return process_tree.end_family(
            self.family, files=self.files, clock=Clock(), grace_ms=grace_ms
        )

    def close(self) -> None:
        self.end(0)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def started() -> Iterator[Started]:
    family = Started("")
    yield family
    family.close()


@pytest.fixture
def stubborn() -> Iterator[Started]:
    family = Started("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    yield family
    family.close()


def test_children_are_found_in_the_session_and_by_the_mark(started: Started) -> None:
    found = process_tree.members(started.family, started.files)
    assert found[0] == started.process.pid
    assert set(found) == {started.process.pid, *started.children}


def test_no_process_of_the_family_is_left(started: Started) -> None:
    killed = started.end(grace_ms=200)
    # The leader obeyed. Its children did not hear of it and had to be killed.
    assert set(killed) == set(started.children)
    assert process_tree.members(started.family, started.files) == []


def test_a_leader_that_ignores_the_request_is_killed_after_the_grace(stubborn: Started) -> None:
    assert stubborn.process.pid in stubborn.end(grace_ms=100)
    assert stubborn.process.wait() == -signal.SIGKILL


def test_the_children_of_a_dead_leader_are_found(started: Started) -> None:
    started.process.kill()
    started.process.wait()
    assert not process_tree.leader_alive(started.family, started.files)
    assert set(process_tree.members(started.family, started.files)) == set(started.children)


def test_a_reused_pid_is_neither_alive_nor_ended(started: Started) -> None:
    later = started.family._replace(start_time=started.family.start_time + 1, mark="other")
    assert not process_tree.leader_alive(later, started.files)
    files, clock = started.files, Clock()
    # The same pid with an earlier start: its leader was another process.
    earlier = started.family._replace(start_time=started.family.start_time - 1, mark="other")
    assert not process_tree.leader_alive(earlier, files)
    assert process_tree.end_family(earlier, files=files, clock=clock, grace_ms=0) == []
    assert started.process.poll() is None


def test_a_family_of_an_earlier_boot_has_no_members(started: Started) -> None:
    old = started.family._replace(boot_id=started.family.boot_id + 1)
    assert process_tree.members(old, started.files) == []
    assert not process_tree.leader_alive(old, started.files)
