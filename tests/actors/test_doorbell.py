"""Doorbells: wake at once, never block, survive missing receivers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.actors.doorbell import Doorbell, doorbell_directory
from raymq.store.errors import Unavailable
from raymq.store.files import Files

MakeBell = Callable[[str], Doorbell]


@pytest.fixture
def replica_dir(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path)
    yield path
    shutil.rmtree(doorbell_directory(path), ignore_errors=True)


@pytest.fixture
def make_bell(replica_dir: str) -> Iterator[MakeBell]:
    bells: list[Doorbell] = []

    def make(role: str) -> Doorbell:
        bells.append(Doorbell(replica_dir, role, files=Files()))
        return bells[-1]

    yield make
    for bell in bells:
        bell.close()


def test_a_ring_ends_the_wait_once(make_bell: MakeBell):
    ours, theirs = make_bell("commit_log"), make_bell("group_commit")
    assert not theirs.wait(0)
    ours.ring("group_commit")
    assert theirs.wait(10_000)
    assert not theirs.wait(0)


def test_many_rings_are_one_wake(make_bell: MakeBell):
    ours, theirs = make_bell("commit_log"), make_bell("group_commit")
    for _ in range(5):
        ours.ring("group_commit")
    assert theirs.wait(10_000)
    assert not theirs.wait(0)


def test_a_ring_before_the_wait_is_remembered(make_bell: MakeBell):
    bell = make_bell("commit_log")
    bell.ring_own()
    assert bell.wait(0)


def test_a_full_buffer_means_already_rung(make_bell: MakeBell):
    ours, theirs = make_bell("commit_log"), make_bell("group_commit")
    # Linux queues 10 to some hundred datagrams a socket; none of these may block or fail.
    for _ in range(5_000):
        ours.ring("group_commit")
    assert theirs.wait(0)
    assert not theirs.wait(0)
    ours.ring("group_commit")
    assert theirs.wait(0)


def test_ringing_nobody_is_harmless(make_bell: MakeBell):
    make_bell("commit_log").ring("group_commit")


def test_ringing_one_that_closed_is_harmless(make_bell: MakeBell, replica_dir: str):
    ours, theirs = make_bell("commit_log"), make_bell("group_commit")
    theirs.close()
    assert os.listdir(doorbell_directory(replica_dir)) == ["commit_log"]
    ours.ring("group_commit")


def test_ringing_one_that_died_without_closing_is_harmless(make_bell: MakeBell):
    ours, theirs = make_bell("commit_log"), make_bell("group_commit")
    theirs._let_go()
    ours.ring("group_commit")


def test_a_successor_takes_over_the_name_of_the_dead(make_bell: MakeBell):
    ours, dead = make_bell("commit_log"), make_bell("group_commit")
    successor = make_bell("group_commit")
    ours.ring("group_commit")
    assert successor.wait(10_000)
    assert not dead.wait(0)


def test_whoever_rang_the_dead_rings_the_successor(make_bell: MakeBell):
    ours, dead = make_bell("commit_log"), make_bell("group_commit")
    ours.ring("group_commit")
    dead._let_go()
    ours.ring("group_commit")
    successor = make_bell("group_commit")
    ours.ring("group_commit")
    assert successor.wait(10_000)
    assert not successor.wait(0)


def test_a_receiver_that_was_replaced_between_two_rings_hears_the_second(make_bell: MakeBell):
    ours, first = make_bell("commit_log"), make_bell("group_commit")
    ours.ring("group_commit")
    first.close()
    successor = make_bell("group_commit")
    ours.ring("group_commit")
    assert successor.wait(10_000)


def test_a_long_data_directory_still_has_a_short_bell(tmp_path: Path):
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    bell = Doorbell(str(deep), "flush_real_time", files=Files())
    bell.ring_own()
    assert bell.wait(0)
    assert len(f"{doorbell_directory(str(deep))}/flush_real_time") < 100
    bell.close()
    shutil.rmtree(doorbell_directory(str(deep)))


def test_every_way_to_name_the_directory_finds_the_same_bell(tmp_path: Path):
    link = tmp_path / "link"
    (tmp_path / "real").mkdir()
    link.symlink_to(tmp_path / "real")
    assert doorbell_directory(str(link)) == doorbell_directory(str(tmp_path / "real"))
    assert doorbell_directory(f"{tmp_path}/./real/") == doorbell_directory(str(link))


def test_a_directory_that_others_may_enter_is_refused(replica_dir: str):
    Doorbell(replica_dir, "commit_log", files=Files()).close()
    os.chmod(doorbell_directory(replica_dir), 0o755)
    with pytest.raises(Unavailable) as caught:
        Doorbell(replica_dir, "commit_log", files=Files())
    assert "chmod 700" in caught.value.message
